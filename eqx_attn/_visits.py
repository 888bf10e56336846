"""Which blocks of keys each block of queries has to visit, and the reverse: the tables that TPU kernels read.

One row of a table belongs to one block of rows (queries in the forward, keys where keys are summed over) and lists the
blocks of columns that it visits, in order. A block is *partial* where some of its scores are hidden, so that it needs a
mask; blocks with nothing to see are not listed. Tables are computed from two bounds (a band: in numpy, at trace time),
from segments (from each block's least and greatest id and position, in jnp), or from a map of blocks, with either.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32

from ._operands import BlockOperands, SegmentOperands, shared_index

MAX_WORDS = 2**16
"""The size of a table at which its blocks are joined: a quarter of a TPU core's scalar memory."""


@dataclasses.dataclass(frozen=True, eq=False)
class Visits:
    """A table of visits.

    `table` is one row after the other, and one example after the other where `examples` > 1. A row is its number of
    visits, then `width` entries `2 * block + partial`; entries past the last visit repeat it, so that a step that
    visits nothing also loads nothing. `join` x `join` blocks share one entry: 1 by 1, unless the table would exceed
    `MAX_WORDS`.

    `steps` is the largest number of visits of a row (at least 1), in blocks: the extent of the kernel's innermost grid
    axis. It is an array where the table depends on data.

    With a map of blocks `heads` of the examples are the heads of one entry, which `shared` examples of the batch share:
    `example` tells which one is that of an example and a head.

    `block`, `visited`, `whole` and `partial` are for index maps and kernels: they read the table, there a reference to scalar
    memory, at a row's step.
    """

    table: Int32[Array | np.ndarray, " words"]
    steps: int | Int32[Array, ""]
    rows: int
    width: int
    blocks: int
    join: int
    examples: int
    heads: int = 1
    shared: int = 1

    def example(self, example, head):
        """The example of the table that an example of the batch and a query head use."""
        entry = example // self.shared
        return entry * self.heads + head if self.heads > 1 else entry

    def block(self, table, row, step, example=0):
        """The block visited at this step, or the last one visited."""
        if self.join == 1:
            return self._entry(table, row, step, example) >> 1
        last = jnp.maximum(table[self._start(row, example)] * self.join - 1, 0)
        step = jnp.minimum(step, last)
        joined = self._entry(table, row, step, example) >> 1
        return jnp.minimum(joined * self.join + step % self.join, self.blocks - 1)

    def whole(self, table, row, step, example=0):
        """Whether this step visits a block of which every score is seen."""
        return self.visited(table, row, step, example) & (self._entry(table, row, step, example) & 1 == 0)

    def partial(self, table, row, step, example=0):
        """Whether this step visits a block of which some scores are hidden."""
        return self.visited(table, row, step, example) & (self._entry(table, row, step, example) & 1 == 1)

    def states(self) -> np.ndarray:
        """`[examples, rows, blocks]`: 0 where a block is not visited, 1 partial, 2 whole. Not under a trace."""
        table = np.asarray(self.table).reshape(self.examples, -1, 1 + self.width)
        joined = -(-self.blocks // self.join)
        states = np.zeros((self.examples, table.shape[1], joined), np.int8)
        example, row, step = np.nonzero(np.arange(self.width) < table[:, :, :1])
        entry = table[example, row, 1 + step]
        states[example, row, entry >> 1] = np.where(entry & 1, 1, 2)
        states = states.repeat(self.join, axis=1).repeat(self.join, axis=2)
        return states[:, : self.rows, : self.blocks]

    def _start(self, row, example):
        joined_rows = -(-self.rows // self.join)
        row = row if self.join == 1 else row // self.join
        return (example * joined_rows + row) * (1 + self.width)

    def _entry(self, table, row, step, example):
        step = step if self.join == 1 else step // self.join
        return table[self._start(row, example) + 1 + jnp.minimum(step, self.width - 1)]

    def visited(self, table, row, step, example=0):
        """Whether this step visits a block."""
        count = table[self._start(row, example)]
        if self.join == 1:
            return step < count
        joined = self._entry(table, row, step, example) >> 1
        return (step < count * self.join) & (joined * self.join + step % self.join < self.blocks)


def band_kv_visits(
    q_seq: int, kv_seq: int, block_q: int, block_kv: int, *, lower: int | None = None, upper: int | None = None
) -> Visits:
    """The blocks of keys that each block of queries visits under `lower <= kv - q <= upper`, from row numbers.

    The last block of keys is partial where the sequence ends inside it.
    """
    return _band_visits(q_seq, kv_seq, block_q, block_kv, lower, upper)


def band_q_visits(
    q_seq: int, kv_seq: int, block_q: int, block_kv: int, *, lower: int | None = None, upper: int | None = None
) -> Visits:
    """The blocks of queries that each block of keys visits: the reverse of `band_kv_visits`."""
    return _band_visits(kv_seq, q_seq, block_kv, block_q, _negated(upper), _negated(lower))


def _negated(bound: int | None) -> int | None:
    return None if bound is None else -bound


def _band_visits(row_seq, column_seq, row_block, column_block, lower, upper) -> Visits:
    rows, blocks, join = _cdiv(row_seq, row_block), _cdiv(column_seq, column_block), 1
    while True:
        first, count, whole_first, whole_end = _band_ranges(
            row_seq, column_seq, row_block * join, column_block * join, lower, upper
        )
        width = max(1, int(count.max()))
        if len(count) * (1 + width) <= MAX_WORDS or (len(count) == 1 and width == 1):
            break
        join *= 2
    step = np.minimum(np.arange(width), np.maximum(count - 1, 0)[:, None])
    block = first[:, None] + step  # [rows, width]
    partial = (block < whole_first[:, None]) | (block >= whole_end[:, None])
    table = np.concatenate([count[:, None], 2 * block + partial], axis=1).astype(np.int32).reshape(-1)
    return Visits(table, min(width * join, blocks), rows, width, blocks, join, examples=1)


def _band_ranges(row_seq, column_seq, row_block, column_block, lower, upper):
    """Per block of rows: the first visited block, how many, and from where to where they are whole."""
    lower, upper = -(2**40) if lower is None else lower, 2**40 if upper is None else upper
    row_first = np.arange(0, row_seq, row_block, dtype=np.int64)
    row_last = np.minimum(row_first + row_block, row_seq) - 1
    column_first = np.maximum(row_first + lower, 0)
    column_last = np.minimum(row_last + upper, column_seq - 1)
    count = np.where(column_first <= column_last, column_last // column_block - column_first // column_block + 1, 0)
    first = np.where(count > 0, column_first // column_block, 0)
    whole_first = _cdiv(np.maximum(row_last + lower, 0), column_block)
    whole_end = (np.minimum(row_first + upper, column_seq - 1) + 1) // column_block
    return first, count, whole_first, whole_end


def segment_kv_visits(
    segments: SegmentOperands, block_q: int, block_kv: int, *, lower: int | None = None, upper: int | None = None
) -> Visits:
    """The blocks of keys that each block of queries visits: from their least and greatest ids and positions.

    Computed from one summary per block, so linear in the lengths; the table itself has at most `MAX_WORDS`. A block
    that is listed may turn out to have nothing to see (ids 1 and 3 on one side, 2 on the other); one that is not listed
    has nothing. A block is whole where both sides have one id without padding and the bounds hold throughout.
    """
    return _segment_visits(_queries(segments), _keys(segments), block_q, block_kv, lower, upper)


def segment_q_visits(
    segments: SegmentOperands, block_q: int, block_kv: int, *, lower: int | None = None, upper: int | None = None
) -> Visits:
    """The blocks of queries that each block of keys visits: the reverse of `segment_kv_visits`."""
    return _segment_visits(_keys(segments), _queries(segments), block_kv, block_q, _negated(upper), _negated(lower))


class _Tokens(NamedTuple):
    """One side's ids (padding below 1) and, where the mask has a bound, positions: `[batch, seq]` each."""

    ids: Array
    positions: Array | None


def _queries(segments: SegmentOperands) -> _Tokens:
    return _Tokens(segments.q_ids, segments.q_positions)


def _keys(segments: SegmentOperands) -> _Tokens:
    return _Tokens(segments.kv_ids, segments.kv_positions)


def _segment_visits(rows: _Tokens, columns: _Tokens, row_block, column_block, lower, upper) -> Visits:
    examples = rows.ids.shape[0]
    row_count, blocks, join = _cdiv(rows.ids.shape[1], row_block), _cdiv(columns.ids.shape[1], column_block), 1
    while examples * _cdiv(row_count, join) * (1 + _cdiv(blocks, join)) > MAX_WORDS and max(row_count, blocks) > join:
        join *= 2
    seen, whole = _segment_states(rows, columns, row_block * join, column_block * join, lower, upper)
    table, longest = _listed(seen, whole)
    steps = jnp.minimum(longest * join, blocks)
    return Visits(table, steps, row_count, seen.shape[2], blocks, join, examples)


def _segment_states(rows: _Tokens, columns: _Tokens, row_block, column_block, lower, upper) -> tuple[Array, Array]:
    """Where blocks may see each other, and where wholly: `[batch, rows, blocks]`."""
    row, column = _summary(rows, row_block), _summary(columns, column_block)
    row = jax.tree.map(lambda x: x[:, :, None], row)
    column = jax.tree.map(lambda x: x[:, None, :], column)
    seen, whole = _same_ids(row, column)
    if lower is not None or upper is not None:
        in_band, inside = _bounds_hold(row, column, lower, upper)
        seen, whole = seen & in_band, whole & inside
    return seen, whole


def _listed(seen: Array, whole: Array) -> tuple[Array, Array]:
    """The table for `[examples, rows, blocks]`, and the largest number of visits of a row, at least 1."""
    width = seen.shape[2]
    step = lax.broadcasted_iota(jnp.int32, seen.shape, 2)
    entry = 2 * step + (~whole).astype(jnp.int32)
    count = jnp.sum(seen, axis=2, dtype=jnp.int32, keepdims=True)
    listed = jnp.sort(jnp.where(seen, entry, 2 * width), axis=2)
    last = jnp.max(jnp.where(seen, entry, 0), axis=2, keepdims=True)
    listed = jnp.where(step < count, listed, last)
    return jnp.concatenate([count, listed], axis=2).reshape(-1), jnp.maximum(jnp.max(count), 1)


def map_kv_visits(
    blocks: BlockOperands,
    batch: int,
    q_seq: int,
    kv_seq: int,
    block_q: int,
    block_kv: int,
    *,
    lower: int | None = None,
    upper: int | None = None,
    segments: SegmentOperands | None = None,
) -> Visits:
    """The blocks of keys that each block of queries visits under a map, and under the bounds and segments, if any.

    A table for each entry of the map, or for each example where there are segments, and for each head of the map.
    """
    tokens = None if segments is None else (_queries(segments), _keys(segments))
    row, column = _Side(q_seq, block_q, blocks.rows), _Side(kv_seq, block_kv, blocks.columns)
    return _map_visits(blocks.seen, batch, row, column, lower, upper, tokens)


def map_q_visits(
    blocks: BlockOperands,
    batch: int,
    q_seq: int,
    kv_seq: int,
    block_q: int,
    block_kv: int,
    *,
    lower: int | None = None,
    upper: int | None = None,
    segments: SegmentOperands | None = None,
) -> Visits:
    """The blocks of queries that each block of keys visits: the reverse of `map_kv_visits`."""
    tokens = None if segments is None else (_keys(segments), _queries(segments))
    row, column = _Side(kv_seq, block_kv, blocks.columns), _Side(q_seq, block_q, blocks.rows)
    return _map_visits(blocks.seen.swapaxes(2, 3), batch, row, column, _negated(upper), _negated(lower), tokens)


class _Side(NamedTuple):
    """A sequence's length, the kernel's block of it, and the map's."""

    seq: int
    block: int
    map_block: int


def _map_visits(
    seen: Array, batch: int, row: _Side, column: _Side, lower, upper, tokens: tuple[_Tokens, _Tokens] | None
) -> Visits:
    entries, heads = batch if tokens else seen.shape[0], seen.shape[1]
    row_count, count, join = _cdiv(row.seq, row.block), _cdiv(column.seq, column.block), 1
    while (
        entries * heads * _cdiv(row_count, join) * (1 + _cdiv(count, join)) > MAX_WORDS and max(row_count, count) > join
    ):
        join *= 2
    some, every = _any_and_all(seen, row._replace(block=row.block * join), column._replace(block=column.block * join))
    if tokens is None:
        ranges = _band_ranges(row.seq, column.seq, row.block * join, column.block * join, lower, upper)
        first, visited, whole_first, whole_end = (x[None, None, :, None] for x in ranges)
        block = np.arange(some.shape[3])[None, None, None]
        in_band = (block >= first) & (block < first + visited)
        inside = (block >= whole_first) & (block < whole_end)
    else:
        in_band, inside = _segment_states(tokens[0], tokens[1], row.block * join, column.block * join, lower, upper)
        in_band, inside = in_band[:, None], inside[:, None]
        some, every = (x[shared_index(batch, x.shape[0])] for x in (some, every))
    shape = (entries * heads, *some.shape[2:])
    table, longest = _listed((some & in_band).reshape(shape), (every & inside).reshape(shape))
    steps = jnp.minimum(longest * join, count)
    return Visits(table, steps, row_count, shape[2], count, join, shape[0], heads, batch // entries)


def _any_and_all(seen: Array, row: _Side, column: _Side) -> tuple[Array, Array]:
    """Whether any, and whether all of the map's blocks that a kernel's block touches are seen: `[_, _, rows, blocks]`."""
    (top, bottom), (left, right) = _touched(row), _touched(column)
    sums = jnp.cumsum(jnp.cumsum(jnp.pad(seen.astype(jnp.int32), ((0, 0), (0, 0), (1, 0), (1, 0))), axis=2), axis=3)
    above, below = sums[:, :, top], sums[:, :, bottom]
    found = below[..., right] - below[..., left] - above[..., right] + above[..., left]
    return found > 0, found == ((bottom - top)[:, None] * (right - left)[None])[None, None]


def _touched(side: _Side) -> tuple[np.ndarray, np.ndarray]:
    """For each of a kernel's blocks the first of the map's that it touches, and the one after the last."""
    start = np.arange(0, side.seq, side.block)
    return start // side.map_block, (np.minimum(start + side.block, side.seq) - 1) // side.map_block + 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Range:
    """Least and greatest of something per block, `[batch, blocks]`; empty where low > high."""

    low: Array
    high: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Summary:
    """What is known of each block: its real ids, whether padding is among them, and positions.

    `at_low` and `at_high` are the positions of the least and of the greatest id only. Where documents are packed in
    order, neighbouring blocks share one id, the greatest of the one and the least of the other, and only those count.
    """

    ids: _Range
    padded: Array
    positions: _Range
    at_low: _Range
    at_high: _Range


_BIG = 2**31 - 1


def _summary(tokens: _Tokens, block: int) -> _Summary:
    ids = _blocks(tokens.ids, block)
    real = ids > 0
    id_range = _range_where(real, ids)
    # Without positions nothing bounds them.
    positions = jnp.zeros_like(ids) if tokens.positions is None else _blocks(tokens.positions, block)
    return _Summary(
        id_range,
        ~real.all(axis=2),
        _range_where(real, positions),
        _range_where(ids == id_range.low[:, :, None], positions),
        _range_where(ids == id_range.high[:, :, None], positions),
    )


def _blocks(array: Array, block: int) -> Array:
    """`[batch, seq]` as `[batch, blocks, block]`, the last block filled up with 0, which is padding as an id."""
    padding = -array.shape[1] % block
    return jnp.pad(array, ((0, 0), (0, padding))).reshape(array.shape[0], -1, block)


def _range_where(condition: Array, values: Array) -> _Range:
    return _Range(
        jnp.min(jnp.where(condition, values, _BIG), axis=2), jnp.max(jnp.where(condition, values, -_BIG), axis=2)
    )


def _same_ids(row: _Summary, column: _Summary) -> tuple[Array, Array]:
    """Where two blocks may share an id, and where they have one id only, the same."""
    overlap = _overlap(row, column)
    one_id = (row.ids.low == row.ids.high) & (column.ids.low == column.ids.high)
    return overlap.low <= overlap.high, one_id & (row.ids.low == column.ids.low) & ~row.padded & ~column.padded


def _overlap(row: _Summary, column: _Summary) -> _Range:
    return _Range(jnp.maximum(row.ids.low, column.ids.low), jnp.minimum(row.ids.high, column.ids.high))


def _bounds_hold(row: _Summary, column: _Summary, lower: int | None, upper: int | None) -> tuple[Array, Array]:
    """Where the bounds hold for some pair of positions, as far as the ranges tell, and where for all pairs."""
    overlap = _overlap(row, column)
    shared_row, shared_column = _positions_of(row, overlap), _positions_of(column, overlap)
    some = every = jnp.bool_(True)
    if upper is not None:
        some &= shared_column.low <= shared_row.high + upper
        every &= column.positions.high <= row.positions.low + upper
    if lower is not None:
        some &= shared_column.high >= shared_row.low + lower
        every &= column.positions.low >= row.positions.high + lower
    return some, every


def _positions_of(side: _Summary, overlap: _Range) -> _Range:
    """The positions that may count: of one id, where just one is shared and it is this side's least or greatest."""
    single = overlap.low == overlap.high
    return jax.tree.map(
        lambda at_low, at_high, all_ids: jnp.where(
            single & (overlap.low == side.ids.low),
            at_low,
            jnp.where(single & (overlap.low == side.ids.high), at_high, all_ids),
        ),
        side.at_low,
        side.at_high,
        side.positions,
    )


def _cdiv(a, b):
    return -(-a // b)
