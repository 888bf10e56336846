"""Arrays with an element for each score, `[batch, head, row, column]`, of which each may be less: how kernels see them."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from ._operands import Tile


def matrix_shape(array: Shaped[Array, "entries heads rows columns"], batch: int) -> tuple[int, ...]:
    """What a kernel needs to find an element: the examples that share an entry, heads, rows, columns, stride of rows."""
    entries, heads, rows, columns = array.shape
    return batch // entries, heads, rows, columns, columns if rows > 1 else 0


class BiasParts(NamedTuple):
    """How the gradient of a bias is divided among the programs of its kernel.

    A program sums over `examples`, `heads` and spans of queries and keys; `shape` and `dtype` are those of all programs'
    results, which `sum_of_parts` brings to the bias' own.
    """

    examples: int
    heads: int
    q_span: int
    kv_span: int
    shape: tuple[int, int, int, int]
    dtype: Any
    programs: int

    @property
    def numbers(self) -> tuple[int, ...]:
        """The kernel's arguments."""
        return self.examples, self.heads, self.q_span, self.kv_span, *self.shape[2:]


def bias_parts(
    bias: Float[Array, "entries heads rows columns"], batch: int, q_heads: int, q_seq: int, kv_seq: int, tile: Tile
) -> BiasParts:
    """The division for `bias`.

    Where it has a row for each query and a column for each key there is a program for each of its tiles. Where rows or
    columns are shared there are few tiles: a program walks over those that are added up, for one example and head.
    """
    entries, heads, rows, columns = bias.shape
    whole = (rows, columns) == (q_seq, kv_seq)
    examples, same_heads = (batch // entries, q_heads // heads) if whole else (1, 1)
    q_span, q_size = _span(rows, q_seq, tile.block_q)
    kv_span, kv_size = _span(columns, kv_seq, tile.block_kv)
    shape = (batch // examples, q_heads // same_heads, q_size, kv_size)
    programs = math.prod(shape[:2]) * -(-q_seq // q_span) * -(-kv_seq // kv_span)
    dtype = bias.dtype if shape == bias.shape else jnp.dtype(jnp.float32)
    return BiasParts(examples, same_heads, q_span, kv_span, shape, dtype, programs)


def _span(size: int, seq: int, block: int) -> tuple[int, int]:
    """How many tokens a program walks over, and how many rows or columns its results have in all."""
    return (block, seq) if size == seq else (-(-seq // block) * block, block)


def sum_of_parts(
    dbias: Float[Array, "_ _ _ _"], bias: Float[Array, "entries heads rows columns"]
) -> Float[Array, "entries heads rows columns"]:
    """The programs' results added up to the shape of `bias`, in its dtype."""
    entries = bias.shape[0]
    dbias = dbias.reshape(entries, -1, *dbias.shape[1:]).sum(1)
    for axis in (1, 2, 3):
        if bias.shape[axis] == 1:
            dbias = dbias.sum(axis, keepdims=True)
    return dbias.astype(bias.dtype)
