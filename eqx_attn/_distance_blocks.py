"""How TPU kernels read an array of one number for each distance from a query to a key, and sum up its gradient.

Of a block of scores, each row has the same numbers as the row before, moved by one lane: the kernel takes the numbers of all
distances in the block, and rolls each row by its own number.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from ._parts import Part
from ._score_blocks import score_blocks, ScoreBlocks
from ._tuning_tpu import LANES


@dataclasses.dataclass(frozen=True, eq=False)
class DistanceBlocks:
    """An array `[entries, heads, 1, q_seq + kv_seq - 1]`, of which heads may be 1, by the blocks of a kernel.

    `array` is what the kernel is called with, `[entries, heads, 2, all]`: the distances from queries to keys going up, and
    going down, where rows are keys; `all` is a whole number of blocks. The rest is as for `ScoreBlocks`.
    """

    like: ScoreBlocks
    q_seq: int
    kv_seq: int
    array: Array
    is_mask: bool

    @property
    def _q_rows(self) -> int:
        return pl.cdiv(self.q_seq, self.like.block_q) * self.like.block_q

    @property
    def _kv_rows(self) -> int:
        return pl.cdiv(self.kv_seq, self.like.block_kv) * self.like.block_kv

    def spec(self, place: Callable) -> pl.BlockSpec:
        """The block spec for a grid in which `place(*indices)` is example, query head, query block and key block."""

        def index(*indices):
            example, head, _, _ = place(*indices)
            return example // self.like.shared, head if self.like.shape[1] > 1 else 0, 0, 0

        return pl.BlockSpec((None, None, *self.array.shape[2:]), index)

    def tile(self, ref, q_block: Array, kv_block: Array) -> Array:
        """In a kernel: the block as `[block_kv, block_q]`."""
        rows, columns = self.like.block_kv, self.like.block_q
        start = q_block * columns - kv_block * rows - rows + self._kv_rows
        return self._flag(_rolled(ref[1:, pl.ds(pl.multiple_of(start, LANES), rows + columns)], rows))

    def by_part(self, ref, q_block: Array, kv_block: Array) -> Callable[[Part], Array]:
        """In a kernel: what makes the values of a part of the block's scores, `[rows, columns]`."""
        first = kv_block * self.like.block_kv - q_block * self.like.block_q + self._q_rows

        def of(part: Part) -> Array:
            rows, columns = part.rows.stop - part.rows.start, part.columns.stop - part.columns.start
            start = pl.multiple_of(first + part.columns.start - part.rows.stop, LANES)
            return self._flag(_rolled(ref[:1, pl.ds(start, rows + columns)], rows))

        return of

    def _flag(self, x: Array) -> Array:
        return x != 0 if self.is_mask else x

    def add(self, sums_ref, scores: Array, q_block: Array, kv_block: Array) -> None:
        """In a kernel: adds `[block_kv, block_q]` to the sums `[1, all]` of the distances, which go down."""
        rows, columns = self.like.block_kv, self.like.block_q
        start = q_block * columns - kv_block * rows - rows + self._kv_rows
        sums_ref[:, pl.ds(pl.multiple_of(start, LANES), rows + columns)] += _summed(scores)

    @property
    def sums_shape(self) -> tuple[int, int]:
        """The shape of the sums."""
        return 1, self.array.shape[3]

    def sums_spec(self) -> pl.BlockSpec:
        """The block spec of the sums for `grid`."""
        return pl.BlockSpec((None, None, *self.sums_shape), lambda entry, head, *_: (entry, head, 0, 0))

    def result(self, sums: Array) -> Array:
        """`[entries, heads, 1, all]` as the array was given."""
        first = self._kv_rows - self.kv_seq + 1
        return sums[..., first : first + self.q_seq + self.kv_seq - 1][..., ::-1]

    def grid(self, q_heads: int, q_blocks: int, kv_blocks: int) -> tuple[int, ...]:
        """As for an array with one number for each head."""
        return self.like.grid(q_heads, q_blocks, kv_blocks)

    def place(self, *steps):
        """As there."""
        return self.like.place(*steps)


def _rolled(numbers: Array, rows: int) -> Array:
    """In a kernel: `numbers [1, rows + columns]` as `[rows, columns]`, of which each row begins one number earlier."""
    wide = jnp.broadcast_to(numbers, (rows, numbers.shape[1]))
    return pltpu.roll(wide, 0, 1, stride=1, stride_axis=0)[:, rows:]


def _summed(scores: Array) -> Array:
    """In a kernel: the sums of `[rows, columns]` along the distances of `_rolled`, `[1, rows + columns]`.

    The lower half of the rows is moved to where the upper half lies, and added to it, until one row is left.
    """
    rows, columns = scores.shape
    total = jnp.concatenate([jnp.zeros((rows, rows), jnp.float32), scores], axis=1)
    width = rows + columns
    chunk = total[:LANES]
    for start in range(LANES, rows, LANES):
        chunk = chunk + pltpu.roll(total[start : start + LANES], width - start, 1)
    while chunk.shape[0] > 1:
        half = chunk.shape[0] // 2
        chunk = chunk[:half] + pltpu.roll(chunk[half:], width - half, 1)
    return chunk


def distance_blocks(array: Array, batch: int, q_seq: int, kv_seq: int, block_q: int, block_kv: int) -> DistanceBlocks:
    """The blocks of `elements_by_distance`, in 32 bits."""
    like = score_blocks(jnp.zeros(array.shape[:2], jnp.float32), batch, block_q, block_kv)
    blocks = DistanceBlocks(like, q_seq, kv_seq, array, array.dtype == jnp.bool_)
    q_rows, kv_rows = blocks._q_rows, blocks._kv_rows
    array = array.astype(jnp.int32) if blocks.is_mask else array
    # Going up from -q_rows to kv_rows - 1, and down from kv_rows to 1 - q_rows.
    padded = jnp.pad(array, [(0, 0)] * 3 + [(q_rows - q_seq + 1, kv_rows - kv_seq + 1)], mode="edge")
    both = jnp.concatenate([padded[..., :-1], padded[..., :0:-1]], axis=2)
    return dataclasses.replace(blocks, array=both)
