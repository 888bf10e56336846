"""The names of the dimensions of a call's arrays, so that one function can slice, pad or shard all that have one."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxtyping import Array

from .._operands import Operands

Dimensions = tuple[str | None, ...]
"""Of each axis: "batch", "heads", "kv_heads", "dim"; "q" and "kv" are tokens; "rows" and "columns" are queries and keys of a
matrix of scores, or blocks of them. None where the array has 1 for all."""


def array_dimensions(layout: str) -> tuple[Dimensions, Dimensions, Dimensions]:
    """Of query, key and value."""

    def of(seq, heads):
        return ("batch", seq, heads, "dim") if layout == "bshd" else ("batch", heads, seq, "dim")

    return of("q", "heads"), of("kv", "kv_heads"), of("kv", "kv_heads")


ROWS: Dimensions = ("batch", "heads", "q")
"""Of lse and of what else there is one of for each row of scores."""


def map_operands(function: Callable[[Array, Dimensions], Any], operands: Operands) -> Operands:
    """`operands` with `function(array, dimensions)` in the place of each array."""
    changed: dict[str, Any] = {}
    if operands.segments is not None:
        dims = dict(q_ids="q", q_positions="q", kv_ids="kv", kv_positions="kv")
        new = {
            name: function(x, ("batch", dim))
            for name, dim in dims.items()
            if (x := getattr(operands.segments, name)) is not None
        }
        changed["segments"] = dataclasses.replace(operands.segments, **new)
    if operands.blocks is not None:
        seen = operands.blocks.seen
        changed["blocks"] = dataclasses.replace(operands.blocks, seen=function(seen, matrix_dimensions(seen)))
    for name in ("dense", "bias"):
        if (x := getattr(operands, name)) is not None:
            changed[name] = function(x, matrix_dimensions(x))
    named: dict[str, Dimensions] = dict(
        sinks=("batch", "heads"),
        dropout_seed=("batch", "heads"),
        batch_index=("batch",),
        head_index=("heads",),
        q_index=("q",),
        kv_index=("kv",),
    )
    for name, dims in named.items():
        if (x := getattr(operands, name)) is not None:
            changed[name] = function(x, dims)
    for name in ("score_arrays", "mask_arrays"):
        changed[name] = tuple(function(x, ("batch", *(None,) * (x.ndim - 1))) for x in getattr(operands, name))
    return dataclasses.replace(operands, **changed)


def matrix_dimensions(x: Array) -> Dimensions:
    """Of `[batch, heads, rows, columns]`, of which all may be 1."""
    names = ("batch", "heads", "rows", "columns")
    return tuple(name if size > 1 or name == "batch" else None for name, size in zip(names, x.shape, strict=True))
