"""What one device of a context computes, for the report on a call: with which tokens, and in which words."""

from collections.abc import Callable, Iterator

import numpy as np

from ._block_states import Tokens
from .sharding._order import Order
from .sharding._place import Spread

TokenPair = tuple[Tokens, Tokens]
"""Those of queries and of keys."""


def context_words(spread: Spread) -> str:
    """The context of a call."""
    context, devices = spread.context, spread.order.devices
    moves = dict(
        ring="keys and values go round, a hop for each device",
        all_gather="each device gathers all keys and values",
        all_to_all="each device gets all tokens of some heads",
    )[context.strategy]
    return (
        f"{context.strategy} over {devices} devices of axis {context.axis!r}, order {context.order}: {moves}. Sizes are of one "
        "device at a time; blocks are those of the device that visits most"
        + (", in all hops" if "round" in moves else "")
    )


def refusal_of_reference(spread: Spread | None) -> tuple[str, ...]:
    """Why the reference does not serve a call with a context."""
    return () if spread is None else ("with a context it would need all scores in one place",)


def calls_of_devices(spread: Spread | None, tokens: TokenPair | None) -> Iterator[list[TokenPair | None]]:
    """For each device, the tokens of the calls of a kernel that it makes; one device for all that are alike."""
    if spread is None or spread.context.strategy == "all_to_all":
        yield [tokens]
        return
    order, is_ring = spread.order, spread.context.strategy == "ring"
    if tokens is None:
        yield [None] * (order.devices if is_ring else 1)
        return
    queries, keys = (_shares(order, side) for side in tokens)
    everything = [_in_original_order(order, tokens[1])]
    for query in queries:
        yield [(query, key) for key in (keys if is_ring else everything)]


def _changed(function: Callable[[np.ndarray], np.ndarray], side: Tokens) -> Tokens:
    return Tokens(function(side.ids), None if side.positions is None else function(side.positions))


def _padded(order: Order, side: Tokens) -> Tokens:
    seq = side.ids.shape[1]
    return _changed(lambda x: np.pad(x, ((0, 0), (0, order.padded(seq) - seq))), side)


def _shares(order: Order, side: Tokens) -> list[Tokens]:
    side = _padded(order, side)
    return [_changed(lambda x, rank=rank: np.split(x, order.devices, 1)[rank], side) for rank in range(order.devices)]


def _in_original_order(order: Order, side: Tokens) -> Tokens:
    side = _padded(order, side)
    places = order.places(side.ids.shape[1])
    return _changed(lambda x: x[:, places], side)
