"""Which tiles a kernel visits where a block map is given: compacted lists, so that a hidden block costs nothing at all."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from ._operands import BlockOperands, Operands, Tile
from ._summaries import visible_blocks


class TileMap(NamedTuple):
    """The tiles of which some query sees some key, and those of which every query sees every key.

    Both are `[entries, heads, q_blocks, kv_blocks]`. `q_full` and `kv_full` tell which tiles lie inside the sequence.
    """

    some: Bool[Array, "entries heads q_blocks kv_blocks"]
    whole: Bool[Array, "entries heads q_blocks kv_blocks"]
    q_full: Bool[Array, " q_blocks"]
    kv_full: Bool[Array, " kv_blocks"]


def tile_visibility(
    operands: Operands,
    batch: int,
    q_seq: int,
    kv_seq: int,
    tile: Tile,
    summaries: tuple[Array, Array] | None = None,
) -> tuple[Bool[Array, "entries heads _ _"], TileMap]:
    """The block map, and what the map, the band and the segments leave of a kernel's tiles.

    `summaries` are the `block_summary` of queries and keys. With segments each example has its own tiles, so the map is
    repeated for each.
    """
    blocks = operands.blocks
    assert blocks is not None
    if summaries is not None:
        repeats = batch // blocks.seen.shape[0]
        blocks = BlockOperands(jnp.repeat(blocks.seen, repeats, axis=0), blocks.rows, blocks.columns)
    some, whole = _on_tiles(blocks, q_seq, kv_seq, tile)
    if summaries is None:
        in_band, inside_band = _band_of_tiles(operands, q_seq, kv_seq, tile)
    else:
        with_positions = summaries[0].shape[1] > 3
        bounds = (operands.lower, operands.upper) if with_positions else (None, None)
        in_band, inside_band = (x[:, None] for x in visible_blocks(*summaries, *bounds))
    q_ends, kv_ends = (_extent(seq, block)[1] for seq, block in ((q_seq, tile.block_q), (kv_seq, tile.block_kv)))
    tile_map = TileMap(
        some & in_band,
        whole & inside_band,
        jnp.asarray(q_ends % tile.block_q == tile.block_q - 1),
        jnp.asarray(kv_ends % tile.block_kv == tile.block_kv - 1),
    )
    return blocks.seen, tile_map


def visited_lists(tile_map: TileMap, *, of: str) -> Int32[Array, "entries heads blocks others+3"]:
    """For each block of one side (`of`: "q" or "kv") the blocks of the other that it visits.

    First how many are visible as a whole, and lie inside the sequence, then how many others are visited; then their
    numbers in that order; then the hidden ones, and one number more, since the kernels read one step ahead.
    """
    some = tile_map.some
    full = tile_map.kv_full[None, :] if of == "q" else tile_map.q_full[:, None]
    whole = tile_map.whole & full[None, None]
    if of == "kv":
        some, whole = jnp.swapaxes(some, 2, 3), jnp.swapaxes(whole, 2, 3)
    counts = jnp.stack([jnp.sum(whole, -1), jnp.sum(some & ~whole, -1)], -1)
    order = jnp.argsort(jnp.where(whole, 0, jnp.where(some, 1, 2)), axis=-1, stable=True)
    return jnp.concatenate([counts, order, jnp.zeros_like(counts[..., :1])], -1, dtype=jnp.int32)


def _on_tiles(blocks: BlockOperands, q_seq: int, kv_seq: int, tile: Tile) -> tuple[Array, Array]:
    """Whether any and whether all of what a tile covers of the map is visible: differences of running sums."""
    sums, covered = blocks.seen.astype(jnp.int32), 1
    for axis, seq, block, size in ((2, q_seq, tile.block_q, blocks.rows), (3, kv_seq, tile.block_kv, blocks.columns)):
        starts, ends = _extent(seq, block)
        first, last = starts // size, ends // size
        widths = [(0, 0)] * 4
        widths[axis] = (1, 0)
        running = jnp.pad(jnp.cumsum(sums, axis), widths)
        sums = jnp.take(running, last + 1, axis) - jnp.take(running, first, axis)
        covered = covered * np.expand_dims(last + 1 - first, tuple(other for other in range(4) if other != axis))
    return sums > 0, sums == covered


def _band_of_tiles(operands: Operands, q_seq: int, kv_seq: int, tile: Tile) -> tuple[Array, Array]:
    """Whether some and whether all of a tile lies between the bounds, by row numbers: `[1, 1, q_blocks, kv_blocks]`."""
    (q_first, q_last), (kv_first, kv_last) = _extent(q_seq, tile.block_q), _extent(kv_seq, tile.block_kv)
    nearest = jnp.asarray(kv_first)[None, :] - jnp.asarray(q_last)[:, None]
    farthest = jnp.asarray(kv_last)[None, :] - jnp.asarray(q_first)[:, None]
    some = whole = jnp.ones(nearest.shape, bool)
    if operands.lower is not None:
        some, whole = some & (farthest >= operands.lower), whole & (nearest >= operands.lower)
    if operands.upper is not None:
        some, whole = some & (nearest <= operands.upper), whole & (farthest <= operands.upper)
    return some[None, None], whole[None, None]


def _extent(seq: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """The first and the last token of each block."""
    starts = np.arange(0, seq, block, dtype=np.int32)
    return starts, np.minimum(starts + block, seq).astype(np.int32) - 1
