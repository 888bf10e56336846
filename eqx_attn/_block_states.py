"""Which blocks each kernel of a call visits: what the kernels find out on the device, computed in numpy for reports.

States are 0 where a block is not visited, 1 where it is and needs a mask, 2 where it is and needs none.
"""

from typing import NamedTuple

import numpy as np

from ._call import Request, Route
from ._operands import Tile, Tiles
from ._tuning_tpu import fit_block
from ._visits import _band_ranges, band_kv_visits, MAX_WORDS

HIDDEN, MASKED, WHOLE = 0, 1, 2


class Tokens(NamedTuple):
    """One side's ids, above 0 but for padding, and its positions where the mask has a bound: int64 `[batch, seq]`."""

    ids: np.ndarray
    positions: np.ndarray | None


class Band(NamedTuple):
    """The bounds of `lower <= kv_position - q_position <= upper`; None always holds."""

    lower: int | None
    upper: int | None

    def reversed(self) -> "Band":
        """The band of `q_position - kv_position`."""
        return Band(*(None if bound is None else -bound for bound in (self.upper, self.lower)))


def passes_of(route: Route, request: Request) -> dict[str, Tile]:
    """The kernels of one training step by name, with the tiles that they run with; none for `reference`."""
    tiles, q_seq, kv_seq = route.tiles, request.q_seq, request.kv_seq
    if route.implementation == "reference":
        return {}
    if isinstance(tiles, Tile):
        tile = Tile(min(tiles.block_q, q_seq), min(tiles.block_kv, kv_seq))
        return {"forward": tile, "backward": tile}
    assert isinstance(tiles, Tiles)
    if route.implementation == "pallas_tpu":
        named = {"forward": tiles.forward, "dq, dk, dv": tiles.dkv}
        return {
            name: Tile(fit_block(tile.block_q, q_seq), fit_block(tile.block_kv, kv_seq)) for name, tile in named.items()
        }
    return {"forward": tiles.forward, "dq": tiles.dq, "dk, dv": tiles.dkv}


def block_states(
    implementation: str, kernel: str, tile: Tile, request: Request, band: Band, segments: tuple[Tokens, Tokens] | None
) -> np.ndarray | None:
    """`[examples, q_blocks, kv_blocks]` of one kernel of `passes_of`; one example where all are alike.

    `segments` are the tokens of queries and of keys. None where those decide and are not given.
    """
    if implementation == "xla":
        # Its loops skip by row numbers only, and every block that they visit is masked.
        rows_decide = Band(None, None) if "segments" in request.options else band
        return np.minimum(_band_states(request.q_seq, request.kv_seq, tile.block_q, tile.block_kv, rows_decide), MASKED)
    if "segments" in request.options and segments is None:
        return None
    sides = ((request.q_seq, tile.block_q), (request.kv_seq, tile.block_kv))
    if kernel == "dk, dv":  # its rows are blocks of keys
        states = _row_states(implementation, request, sides[::-1], band.reversed(), segments and segments[::-1])
        return np.swapaxes(states, 1, 2)
    return _row_states(implementation, request, sides, band, segments)


def _row_states(implementation, request, sides, band: Band, segments) -> np.ndarray:
    """`[examples, rows, blocks]`, where each block of rows visits blocks of the other side."""
    (row_seq, row_block), (column_seq, column_block) = sides
    if segments is not None:
        states = _triton_segment_states if implementation == "triton" else _tpu_segment_states
        row, column = segments
        return states(row, column, row_block, column_block, band)
    if implementation == "pallas_tpu" and request.mask != "full":
        visits = band_kv_visits(row_seq, column_seq, row_block, column_block, lower=band.lower, upper=band.upper)
        return visits.states()
    return _band_states(row_seq, column_seq, row_block, column_block, band)


def _band_states(row_seq, column_seq, row_block, column_block, band: Band) -> np.ndarray:
    """From row numbers, for kernels that derive the range from a whole block's, rows past the end included."""
    row_seq = _cdiv(row_seq, row_block) * row_block
    ranges = _band_ranges(row_seq, column_seq, row_block, column_block, *band)
    first, count, whole_first, whole_end = (x[:, None] for x in ranges)
    block = np.arange(_cdiv(column_seq, column_block))
    return _states((block >= first) & (block < first + count), (block >= whole_first) & (block < whole_end))[None]


def _triton_segment_states(row: Tokens, column: Tokens, row_block, column_block, band: Band) -> np.ndarray:
    """As `_summaries.visited_ranges` and the kernels: a run of whole blocks, and around it a test of each block."""
    row_blocks, column_blocks = _blocks(row, row_block), _blocks(column, column_block)
    states = []
    for r, c in zip(row_blocks, column_blocks, strict=True):  # one example at a time: less memory
        seen, whole = _same_ids(r, c)
        row_range, column_range = r.range_where(r.real), c.range_where(c.real)
        some, every = _bounds_hold(row_range, column_range, row_range, column_range, band)
        seen, whole = seen & some, whole & every
        started = np.logical_or.accumulate(whole, axis=1)
        ended = np.logical_or.accumulate(started & ~whole, axis=1)
        states.append(_states(seen, started & ~ended))
    return np.stack(states)


def _tpu_segment_states(row: Tokens, column: Tokens, row_block, column_block, band: Band) -> np.ndarray:
    """As `_visits.segment_kv_visits`, where a table that would be too large has joined blocks."""
    examples, rows, columns = len(row.ids), _cdiv(row.ids.shape[1], row_block), _cdiv(column.ids.shape[1], column_block)
    join = 1
    while examples * _cdiv(rows, join) * (1 + _cdiv(columns, join)) > MAX_WORDS and max(rows, columns) > join:
        join *= 2
    states = []
    for r, c in zip(_blocks(row, row_block * join), _blocks(column, column_block * join), strict=True):
        seen, whole = _same_ids(r, c)
        row_shared, column_shared = _shared_ranges(r, c)
        some, every = _bounds_hold(row_shared, column_shared, r.range_where(r.real), c.range_where(c.real), band)
        states.append(_states(seen & some, whole & every))
    return np.stack(states).repeat(join, axis=1).repeat(join, axis=2)[:, :rows, :columns]


def _states(seen, whole) -> np.ndarray:
    return np.where(seen, np.where(whole, WHOLE, MASKED), HIDDEN).astype(np.int8)


class _Blocks(NamedTuple):
    """One example's tokens in blocks, `[blocks, block]`, filled up with padding, and the extremes of their real ids."""

    ids: np.ndarray
    positions: np.ndarray
    real: np.ndarray
    low: np.ndarray
    high: np.ndarray

    def range_where(self, condition):
        """The least and greatest position of the tokens of each block where `condition` holds."""
        return _range_where(condition, self.positions)


_BIG = 2**40


def _range_where(condition, values):
    return np.where(condition, values, _BIG).min(-1), np.where(condition, values, -_BIG).max(-1)


def _blocks(tokens: Tokens, block: int):
    tail = (0, -tokens.ids.shape[1] % block)
    for example, ids in enumerate(tokens.ids):
        ids = np.pad(ids, tail).reshape(-1, block)
        # Without positions nothing bounds them.
        positions = np.zeros_like(ids)
        if tokens.positions is not None:
            positions = np.pad(tokens.positions[example], tail).reshape(-1, block)
        yield _Blocks(ids, positions, ids > 0, *_range_where(ids > 0, ids))


def _same_ids(row: _Blocks, column: _Blocks):
    """Where two blocks may share an id, and where both have one id only, the same, and no padding."""
    seen = (row.low[:, None] <= column.high) & (column.low <= row.high[:, None])
    row_one, column_one = ((x.low == x.high) & x.real.all(-1) for x in (row, column))
    return seen, row_one[:, None] & column_one & (row.low[:, None] == column.low)


def _bounds_hold(row_some, column_some, row_all, column_all, band: Band):
    """Where the bounds hold for some pair, as far as ranges of positions tell, and where for all pairs."""
    (row_low, row_high), (column_low, column_high) = (_matrix(row_some, 1), _matrix(column_some, 0))
    (row_least, row_most), (column_least, column_most) = (_matrix(row_all, 1), _matrix(column_all, 0))
    some, every = np.bool_(True), np.bool_(True)
    if band.upper is not None:
        some, every = column_low - row_high <= band.upper, column_most - row_least <= band.upper
    if band.lower is not None:
        some = some & (column_high - row_low >= band.lower)
        every = every & (column_least - row_most >= band.lower)
    return some, every


def _matrix(extremes, axis):
    return [x if x.ndim == 2 else np.expand_dims(x, axis) for x in extremes]


def _shared_ranges(row: _Blocks, column: _Blocks):
    """Ranges of the positions that may count: of one id, where one is shared and it is a side's least or greatest."""
    low, high = np.maximum(row.low[:, None], column.low), np.minimum(row.high[:, None], column.high)
    for side, axis in ((row, 1), (column, 0)):
        at_low, at_high = (side.range_where(side.ids == edge[:, None]) for edge in (side.low, side.high))
        is_low, is_high = ((low == high) & (low == np.expand_dims(edge, axis)) for edge in (side.low, side.high))
        yield [
            np.where(
                is_low, np.expand_dims(a, axis), np.where(is_high, np.expand_dims(b, axis), np.expand_dims(c, axis))
            )
            for a, b, c in zip(at_low, at_high, side.range_where(side.real), strict=True)
        ]


def _cdiv(a, b):
    return -(-a // b)
