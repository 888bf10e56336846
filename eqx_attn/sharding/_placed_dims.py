"""Which dimensions of a call's arrays lie on the axis of its context, by the strategy."""

import dataclasses
from collections.abc import Sequence

import jax

from ._context import Placement
from ._partition_axes import Division
from ._partition_dims import CONTEXT, Dims
from ._strategies import STRATEGIES

_TOKENS = ("q_seq", "kv_seq")


def placed_array_dims(placement: Placement | None, dims: Dims) -> Dims:
    """Of query, key, value, output, rows and their gradients: all tokens are on the axis."""
    if placement is None:
        return dims
    return Dims(tuple(CONTEXT + name if name in _TOKENS else name for name in dims.names))


def placed_operand_dims(placement: Placement | None, operands):
    """Of operands, a tree of their dimensions."""
    if placement is None:
        return operands
    sharded = STRATEGIES[placement.strategy].SHARDED

    def placed(dims: Dims) -> Dims:
        matrix = len(dims.names) == 4
        kinds = dict(q_heads="heads", q_seq="rows" if matrix else "q", kv_seq="columns" if matrix else "kv")
        kinds |= dict(q_blocks="rows", kv_blocks="columns")
        return Dims(tuple(CONTEXT + name if name and kinds.get(name) in sharded else name for name in dims.names))

    return jax.tree.map(placed, operands)


def with_context(placement: Placement, division: Division) -> Division:
    """A division of batch and heads, and of tokens over the axis of a placement."""
    axis = placement.axis
    axes: dict[str, tuple[str, ...]]
    axes = {CONTEXT + name: (axis,) for name in (*_TOKENS, "q_blocks", "kv_blocks")}
    axes[CONTEXT + "q_heads"] = (*division.axes.get("q_heads", ()), axis)
    return dataclasses.replace(division, axes={**division.axes, **axes})


def has_context(division: Division) -> bool:
    """Whether a division is one of `with_context`."""
    return any(name.startswith(CONTEXT) for name in division.axes)


def without_context(axis: str | None, dims: Dims, found: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """The mesh axes of each dimension, but for the context's along tokens."""
    tokens = (*_TOKENS, *(CONTEXT + name for name in _TOKENS))
    return tuple(
        tuple(name for name in axes if name != axis) if dim in tokens else axes
        for dim, axes in zip(dims.names, found, strict=True)
    )
