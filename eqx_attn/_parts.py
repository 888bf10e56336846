"""The parts of a block of scores, and the order in which a backward kernel computes them."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from jaxtyping import Array

from ._operands import Tile

Weights = TypeVar("Weights")


class Part(NamedTuple):
    """Some queries and some keys of a block, and whether all of these queries see all of these keys."""

    rows: slice
    columns: slice
    whole: bool


class Edge(NamedTuple):
    """Blocks that the edge of a band goes through: those whose first key is `low` to `high` after their first query.

    `parts` are those of which some block has scores to show.
    """

    low: int
    high: int
    parts: tuple[Part, ...]


def parts_of_block(tile: Tile, block_q: int, block_kv: int, *, whole: bool = True) -> tuple[Part, ...]:
    """A block's parts of `tile.inner_q` queries and `tile.inner_kv` keys or fewer, key by key.

    One key's parts follow one another, so that two neighbours add to different sums of queries.
    """
    rows, columns = _slices(block_q, tile.inner_q), _slices(block_kv, tile.inner_kv)
    return tuple(Part(row, column, whole) for column in columns for row in rows)


def parts_before_end(tile: Tile, block_q: int, block_kv: int, kv_seq: int) -> tuple[Part, ...]:
    """The parts of the last block of keys that begin before the end."""
    return _seen_by_some(tile, block_q, block_kv, {(0, (kv_seq - 1) % block_kv + 1)}, None, None)


def ends_of_rows(parts: Sequence[Part]) -> tuple[set[int], set[int]]:
    """Of parts that are sorted by their queries: the numbers of each queries' first part, and of the last."""
    last = {part.rows.start: number for number, part in enumerate(parts)}
    first = {part.rows.start: number for number, part in reversed(list(enumerate(parts)))}
    return set(first.values()), set(last.values())


def rows_without(parts: Sequence[Part], block_q: int) -> list[slice]:
    """The queries of a block that are in none of these parts, which are sorted by their queries."""
    edges = [0, *(edge for part in parts for edge in (part.rows.start, part.rows.stop)), block_q]
    return [slice(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]


LARGEST_CUT = 256
"""The rows and columns of a part of a block on an edge, at most: of larger ones more would be hidden."""

MAX_EDGES = 2
"""For how many kinds of blocks a kernel has a body of its own: the two edges of a window."""


def edges_of_band(
    tile: Tile,
    block_q: int,
    block_kv: int,
    q_seq: int,
    kv_seq: int,
    *,
    lower: int | None = None,
    upper: int | None = None,
) -> tuple[Edge, ...]:
    """The blocks that are visible in part under `lower <= kv - q <= upper`, or because the keys end in them.

    Where square blocks lie along the diagonal all are alike, and so only the parts along and on one side of it are listed.
    """
    blocks = _blocks_on_edges(block_q, block_kv, q_seq, kv_seq, lower, upper)
    edges = []
    for distances in _groups(sorted({distance for distance, _ in blocks})):
        chosen = {block for block in blocks if block[0] in distances}
        parts = _seen_by_some(tile, block_q, block_kv, chosen, lower, upper)
        edges.append(Edge(distances[0], distances[-1], parts))
    return tuple(edges)


def _blocks_on_edges(block_q, block_kv, q_seq, kv_seq, lower, upper) -> set[tuple[int, int]]:
    """Those visible in part: how far the first key is from the first query, and how many keys the block has."""
    q_blocks, kv_blocks = -(-q_seq // block_q), -(-kv_seq // block_kv)
    kv_block = np.arange(kv_blocks)[:, None]
    # Blocks that an edge goes through are at most this many after one another.
    near = np.arange(-(-block_kv // block_q) + 3)
    found = [(kv_block * block_kv - bound) // block_q - 1 + near for bound in (lower, upper) if bound is not None]
    pairs = {(i, j) for block in found for j, row in enumerate(block) for i in row.tolist() if 0 <= i < q_blocks}
    if kv_seq % block_kv:
        pairs |= {(i, kv_blocks - 1) for i in range(q_blocks)}
    blocks = {(j * block_kv - i * block_q, min(block_kv, kv_seq - j * block_kv)) for i, j in pairs}
    block = Part(slice(0, block_q), slice(0, block_kv), True)
    return {place for place in blocks if _visible(block, *place, lower, upper) == (True, False)}


def _groups(distances: list[int]) -> list[list[int]]:
    """At most `MAX_EDGES` runs of sorted numbers, with the widest gaps between them."""
    gaps = [after - before for before, after in itertools.pairwise(distances)]
    cuts = sorted(sorted(range(len(gaps)), key=lambda place: -gaps[place])[: MAX_EDGES - 1])
    starts, ends = [0, *(cut + 1 for cut in cuts)], [*(cut + 1 for cut in cuts), len(distances)]
    return [distances[start:end] for start, end in zip(starts, ends, strict=True) if start < end]


def _seen_by_some(tile, block_q, block_kv, blocks, lower, upper) -> tuple[Part, ...]:
    """The parts of which one of `blocks` has scores to show; a part is whole where it is in all of them."""
    tile = dataclasses.replace(tile, inner_q=min(tile.inner_q, LARGEST_CUT), inner_kv=min(tile.inner_kv, LARGEST_CUT))
    parts = []
    for part in parts_of_block(tile, block_q, block_kv):
        some, every = zip(*(_visible(part, distance, keys, lower, upper) for distance, keys in blocks), strict=True)
        if any(some):
            parts.append(part._replace(whole=all(every)))
    return tuple(parts)


def _visible(part: Part, distance: int, keys: int, lower, upper) -> tuple[bool, bool]:
    """Whether some, and whether all scores of a part are visible, in a block of `keys` keys at `distance`."""
    stop = min(part.columns.stop, keys)
    nearest = distance + part.columns.start - (part.rows.stop - 1)
    farthest = distance + stop - 1 - part.rows.start
    some = part.columns.start < keys and (lower is None or farthest >= lower) and (upper is None or nearest <= upper)
    inside = (lower is None or nearest >= lower) and (upper is None or farthest <= upper)
    return some, some and inside and part.columns.stop <= keys


def _slices(size: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


def in_turns[Weights](
    parts: Sequence[Part],
    scores: tuple[Callable[[Part], Array], Callable[[Part], Array]],
    weigh: Callable[[Part, Array, Array], Weights],
    add: Sequence[Callable[[Part, Weights], None]],
) -> None:
    """In a kernel: the five products of each part, and between the second and the third what makes weights of them.

    What the vector units do for a part lies between products for its neighbours, so that the matrix units have work
    meanwhile. Products that add to sums lie apart from one another for the same reason.
    """
    made, weights = {}, {}
    for number in range(-1, len(parts) + 1):
        after, before = number + 1, number - 1
        if after < len(parts):
            made[after] = [scores[0](parts[after])]
        if before >= 0:
            add[0](parts[before], weights[before])
        if after < len(parts):
            made[after].append(scores[1](parts[after]))
        if before >= 0:
            for sum_up in add[1:]:
                sum_up(parts[before], weights[before])
            del weights[before]
        if 0 <= number < len(parts):
            weights[number] = weigh(parts[number], *made.pop(number))
