"""How TPU kernels read what there is per score, or per query, key or head of the scores: bias, masks, hashes, sinks.

Kernels hold scores transposed, `[block_kv, block_q]`, and the arrays are `[..., q_seq, kv_seq]`: a block is transposed where
it is read. An array of which one axis has size 1 is read as a row and becomes a row or a column of scores.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from . import _dropout
from ._operands import Operands
from ._pallas import across_lanes, column, widen
from ._parts import Part
from ._tuning_tpu import LANES


@dataclasses.dataclass(frozen=True, eq=False)
class ScoreBlocks:
    """An array `[entries, heads, q_seq, kv_seq]`, of which the last three may be 1, by the blocks of a kernel.

    `entries` divides the batch: as many examples after one another as it is smaller share an entry. `array` is what the
    kernel is called with, `spec` its block spec, `tile` what the kernel makes of its reference: a matrix that broadcasts to
    `[block_kv, block_q]`.
    """

    shape: tuple[int, int, int, int]
    batch: int
    block_q: int
    block_kv: int
    array: Array

    @property
    def shared(self) -> int:
        """How many examples share an entry."""
        return self.batch // self.shape[0]

    @property
    def block_shape(self) -> tuple[int, int]:
        """The block of the array as kernels get it: one value per query lies along the lanes too."""
        _, _, rows, columns = self.shape
        if columns == 1:
            return 1, self.block_q if rows > 1 else 1
        return self.block_q if rows > 1 else 1, self.block_kv

    def spec(self, place: Callable) -> pl.BlockSpec:
        """The block spec for a grid in which `place(*indices)` is example, query head, query block and key block."""
        _, heads, rows, columns = self.shape

        def index(*indices):
            example, head, q_block, kv_block = place(*indices)
            across = kv_block if columns > 1 else q_block if rows > 1 else 0
            down = q_block if rows > 1 and columns > 1 else 0
            return example // self.shared, head if heads > 1 else 0, down, across

        return pl.BlockSpec((None, None, *self.block_shape), index)

    def tile(self, ref, queries: slice | Any = slice(None), keys: slice | Any = slice(None)) -> Array:
        """In a kernel: the block, or part of it, as `[keys or 1, queries or 1]`, in 32 bits; booleans stay booleans."""
        x = self._wide(ref[self._part(queries, keys)])
        _, _, rows, columns = self.shape
        if columns > 1:
            x = x.T if rows > 1 else column(x)
        return self._flag(x)

    def by_part(self, ref) -> Callable[[Part], Array]:
        """In a kernel: what makes the values of a part of the block's scores, as `tile` but `[rows or 1, columns or 1]`."""
        _, _, rows, columns = self.shape
        if columns == 1 and rows > 1:
            of_queries = across_lanes(self._wide(ref[...]))
            return lambda part: self._flag(widen(of_queries[part.rows], part.columns.stop - part.columns.start))
        if columns == 1:
            return lambda part: self._flag(self._wide(ref[...]))
        return lambda part: self._flag(self._wide(ref[part.rows if rows > 1 else slice(None), part.columns]))

    def _wide(self, x: Array) -> Array:
        """In 32 bits."""
        return x if x.dtype.itemsize == 4 else x.astype(jnp.int32 if self._is_mask else jnp.float32)

    def _flag(self, x: Array) -> Array:
        return x != 0 if self._is_mask else x

    @property
    def _is_mask(self) -> bool:
        return self.array.dtype == jnp.int8

    def _part(self, queries, keys):
        _, _, rows, columns = self.shape
        if rows > 1 and columns > 1:
            return queries, keys
        return slice(None), keys if columns > 1 else queries if rows > 1 else slice(None)

    def summed(self, scores: Array) -> Array:
        """In a kernel: `[block_kv, block_q]`, summed to the shape of `tile`."""
        _, _, rows, columns = self.shape
        if rows == 1:
            scores = jnp.sum(scores, axis=1, keepdims=True)
        return scores if columns > 1 else jnp.sum(scores, axis=0, keepdims=True)

    @property
    def tile_shape(self) -> tuple[int, int]:
        """The shape of `tile`."""
        _, _, rows, columns = self.shape
        return self.block_kv if columns > 1 else 1, self.block_q if rows > 1 else 1

    def untile(self, tile: Array) -> Array:
        """In a kernel: the inverse of `tile`, for a result like the array."""
        _, _, rows, columns = self.shape
        if columns == 1:
            return tile
        return tile.T if rows > 1 else jnp.broadcast_to(tile, (tile.shape[0], LANES)).T[:1]

    def result(self, sums: Array) -> Array:
        """What `untile` has written, in the shape that was given."""
        return sums.reshape(self.shape)

    def grid(self, q_heads: int, q_blocks: int, kv_blocks: int) -> tuple[int, ...]:
        """The grid of a kernel that sums scores to an array like this one: its axes, then those that are summed over.

        Entries, heads, query and key blocks; then examples of an entry, heads, query and key blocks, of which each has
        one step where the axis is the array's own.
        """
        entries, *own = self.shape
        counts = q_heads, q_blocks, kv_blocks
        kept = [count if size > 1 else 1 for size, count in zip(own, counts, strict=True)]
        summed = [1 if size > 1 else count for size, count in zip(own, counts, strict=True)]
        return entries, *kept, self.shared, *summed

    def place(self, entry, head, q_block, kv_block, *summed):
        """Example, query head, query block and key block at a step of `grid`."""
        example, more_head, more_q_block, more_kv_block = summed
        return entry * self.shared + example, head + more_head, q_block + more_q_block, kv_block + more_kv_block


def score_blocks(array: Array, batch: int, block_q: int, block_kv: int) -> ScoreBlocks:
    """The blocks of a floating, int32 or boolean array `[entries, heads, q_seq, kv_seq]`.

    Booleans are stored as int8, and floats that a TPU does not compute with as float32. Fewer axes: `[entries, heads]`.
    """
    array = array.reshape(*array.shape, *(1,) * (4 - array.ndim))
    shape: Any = array.shape
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.int8)
    elif array.dtype not in (jnp.float32, jnp.bfloat16, jnp.int32):
        array = array.astype(jnp.float32)
    if shape[3] == 1:
        array = array.swapaxes(2, 3)
    return ScoreBlocks(shape, batch, block_q, block_kv, array)


def dropout_blocks(operands: Operands, batch: int, block_q: int, block_kv: int) -> tuple[ScoreBlocks, ScoreBlocks]:
    """The queries' and the keys' parts of dropout's hash, as int32."""
    assert operands.dropout_seed is not None and operands.q_index is not None and operands.kv_index is not None
    rows = _dropout.row_hash(operands.dropout_seed[:, :, None], operands.q_index[None, None])
    columns = _dropout.column_hash(operands.kv_index)
    rows, columns = (lax.bitcast_convert_type(x, jnp.int32) for x in (rows, columns))
    return (
        score_blocks(rows[..., None], batch, block_q, block_kv),
        score_blocks(columns[None, None, None], batch, block_q, block_kv),
    )
