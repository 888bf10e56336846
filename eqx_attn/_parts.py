"""The parts of a block of scores, and the order in which a backward kernel computes them."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from jaxtyping import Array

from ._operands import Tile

Weights = TypeVar("Weights")


class Part(NamedTuple):
    """Some queries and some keys of a block."""

    rows: slice
    columns: slice


def parts_of_block(tile: Tile, block_q: int, block_kv: int) -> tuple[Part, ...]:
    """A block's parts of `tile.inner_q` queries and `tile.inner_kv` keys or fewer, key by key.

    One key's parts follow one another, so that two neighbours add to different sums of queries.
    """
    rows, columns = _slices(block_q, tile.inner_q), _slices(block_kv, tile.inner_kv)
    return tuple(Part(row, column) for column in columns for row in rows)


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
