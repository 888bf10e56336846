"""Which dimensions of a call's arrays lie on the axis of its context, by the strategy."""

from collections.abc import Sequence

import jax

from ._context import Placement
from ._partition_dims import CONTEXT_HEADS, CONTEXT_SEQ, Dims
from ._strategies import STRATEGIES

_TOKENS = ("q_seq", "kv_seq")


def placed_array_dims(placement: Placement | None, dims: Dims) -> Dims:
    """Of query, key, value, output, rows and their gradients: all tokens are on the axis."""
    if placement is None:
        return dims
    return Dims(tuple(CONTEXT_SEQ if name in _TOKENS else name for name in dims.names))


def placed_operand_dims(placement: Placement | None, operands):
    """Of operands, a tree of their dimensions."""
    if placement is None:
        return operands
    sharded = STRATEGIES[placement.strategy].SHARDED

    def placed(dims: Dims) -> Dims:
        matrix = len(dims.names) == 4
        kinds = dict(q_heads="heads", q_seq="rows" if matrix else "q", kv_seq="columns" if matrix else "kv")
        kinds |= dict(q_blocks="rows", kv_blocks="columns")
        return Dims(
            tuple(
                (CONTEXT_HEADS if name == "q_heads" else CONTEXT_SEQ) if kinds.get(name or "") in sharded else name
                for name in dims.names
            )
        )

    return jax.tree.map(placed, operands)


def without_context(axis: str | None, dims: Dims, found: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """The mesh axes of each dimension, but for the context's along tokens."""
    tokens = (*_TOKENS, CONTEXT_SEQ)
    return tuple(
        tuple(name for name in axes if name != axis) if dim in tokens else axes
        for dim, axes in zip(dims.names, found, strict=True)
    )
