"""The names of the dimensions of all arrays of a call: what decides which mesh axes shard them."""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array

from .._operands import Operands

HEADS = ("q_heads", "kv_heads")
DIVIDED = ("batch", *HEADS)
"""The dimensions that are shared out over devices. All others are whole on each device."""

CONTEXT = "context_"
"""Before the name of a dimension that lies on the axis of a call's context (heads: besides the axes of the query's)."""


@dataclasses.dataclass(frozen=True)
class Dims:
    """The dimensions of one array by name; None where it has one entry for all. Not a pytree, so a leaf in their place."""

    names: tuple[str | None, ...]

    def behind(self, names: tuple[str, ...]) -> "Dims":
        """With more dimensions in front."""
        return Dims((*names, *self.names))


ROWS = Dims(("batch", "q_heads", "q_seq"))


def array_dims(layout: str) -> tuple[Dims, ...]:
    """Of the arrays of a layout."""

    def of(seq, heads, dim):
        return Dims(("batch", heads, seq, dim) if layout == "bhsd" else ("batch", seq, heads, dim))

    query = of("q_seq", "q_heads", "qk_dim")
    if layout == "qkv":
        return (of("q_seq", "packed_heads", "qk_dim"),)
    if layout == "kv":
        return query, of("kv_seq", "packed_heads", "qk_dim")
    return query, of("kv_seq", "kv_heads", "qk_dim"), of("kv_seq", "kv_heads", "v_dim")


def out_dims(layout: str) -> Dims:
    """Of the output."""
    return Dims(("batch", "q_heads", "q_seq", "v_dim") if layout == "bhsd" else ("batch", "q_seq", "q_heads", "v_dim"))


def operand_dims(operands: Operands) -> Operands:
    """`operands`, arrays or shapes without mapped axes, with the dimensions of each array in its place."""

    def scores(x, rows="q_seq", columns="kv_seq"):
        names = ("batch", "q_heads", rows, columns)
        return None if x is None else Dims(tuple(None if n == 1 else m for n, m in zip(x.shape, names, strict=True)))

    def known(x, *names):
        return None if x is None else Dims(names)

    def captured(x):
        return Dims((None if x.shape[0] == 1 else "batch", *(None,) * (len(x.shape) - 1)))

    segments, blocks, sinks = operands.segments, operands.blocks, operands.sinks
    if segments is not None:
        segments = dataclasses.replace(
            segments,
            q_ids=Dims(("batch", "q_seq")),
            kv_ids=Dims(("batch", "kv_seq")),
            q_positions=known(segments.q_positions, "batch", "q_seq"),
            kv_positions=known(segments.kv_positions, "batch", "kv_seq"),
        )
    if blocks is not None:
        blocks = dataclasses.replace(blocks, seen=scores(blocks.seen, "q_blocks", "kv_blocks"))
    return dataclasses.replace(
        operands,
        segments=segments,
        blocks=blocks,
        dense=scores(operands.dense),
        bias=scores(operands.bias),
        sinks=None if sinks is None else Dims((None if sinks.shape[0] == 1 else "batch", "q_heads")),
        dropout_seed=known(operands.dropout_seed, "batch", "q_heads"),
        score_arrays=tuple(map(captured, operands.score_arrays)),
        mask_arrays=tuple(map(captured, operands.mask_arrays)),
        batch_index=known(operands.batch_index, "batch"),
        head_index=known(operands.head_index, "q_heads"),
        q_index=known(operands.q_index, "q_seq"),
        kv_index=known(operands.kv_index, "kv_seq"),
    )


def leaves_of(dims: Any) -> list[Dims]:
    """The dimensions of a pytree's arrays in order."""
    return jax.tree.leaves(dims)


def shape_without(array: Array, mapped: int) -> jax.ShapeDtypeStruct:
    """The shape of an array without its first axes."""
    return jax.ShapeDtypeStruct(array.shape[mapped:], array.dtype)
