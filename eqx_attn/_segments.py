"""Arithmetic on segment ids: ranks, counts, ids from lengths. All of it linear in memory and without a largest id."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from .sharding._rows import by_example


@by_example
def ids_from_lengths(lengths: Int32[Array, "*batch segments"], seq: int) -> Int32[Array, "*batch seq"]:
    """Ids 1, 2, ... of segments that follow one another; 0 behind the last one."""
    if lengths.ndim > 1:
        return jax.vmap(lambda row: ids_from_lengths(row, seq))(lengths)
    ends, tokens, segment = _places(lengths, seq)
    return jnp.where(tokens < ends[-1], 1 + segment, 0)


@by_example
def ranks_from_lengths(lengths: Int32[Array, "*batch segments"], seq: int) -> Int32[Array, "*batch seq"]:
    """`ranks_within_ids` of `ids_from_lengths`, without sorting."""
    if lengths.ndim > 1:
        return jax.vmap(lambda row: ranks_from_lengths(row, seq))(lengths)
    ends, tokens, segment = _places(lengths, seq)
    return tokens - jnp.concatenate([jnp.zeros((1,), ends.dtype), ends])[segment]


def _places(lengths: Array, seq: int) -> tuple[Array, Array, Array]:
    """Where each segment ends, the tokens' numbers, and which segment each is in (one more than there are: in none)."""
    ends = jnp.cumsum(lengths).astype(jnp.int32)
    tokens = jnp.arange(seq, dtype=jnp.int32)
    # Unrolled, the search is a few gathers that XLA fuses; its loop would be a kernel or more a step.
    segment = jnp.searchsorted(ends, tokens, side="right", method="scan_unrolled").astype(jnp.int32)
    return ends, tokens, segment


@by_example
def ranks_within_ids(ids: Int32[Array, "*batch seq"]) -> Int32[Array, "*batch seq"]:
    """For each token, how many tokens of its own id come before it."""
    if ids.ndim > 1:
        return jax.vmap(ranks_within_ids)(ids)
    order = jnp.argsort(ids, stable=True)
    sorted_ids = ids[order]
    tokens = jnp.arange(ids.shape[0], dtype=jnp.int32)
    starts_group = jnp.concatenate([jnp.ones((1,), bool), sorted_ids[1:] != sorted_ids[:-1]])[: ids.shape[0]]
    group_start = jax.lax.cummax(jnp.where(starts_group, tokens, 0))
    return jnp.zeros_like(ids).at[order].set(tokens - group_start)


@by_example
def count_of_ids(ids: Int32[Array, "*batch seq"], wanted: Int32[Array, "*batch other"]) -> Int32[Array, "*batch other"]:
    """For each entry of `wanted`, how many tokens of `ids` have that id."""
    if ids.ndim > 1:
        return jax.vmap(count_of_ids)(ids, wanted)
    in_order = jnp.sort(ids)
    until = jnp.searchsorted(in_order, wanted, side="right")
    return (until - jnp.searchsorted(in_order, wanted, side="left")).astype(jnp.int32)


@by_example
def refine_ids(ids: Int32[Array, "*batch seq"], numbers: Int32[Array, "*batch seq"]) -> Int32[Array, "*batch seq"]:
    """New ids, equal where both `ids` and `numbers` are, from 1 on; ids <= 0 stay 0."""
    if ids.ndim > 1:
        return jax.vmap(refine_ids)(ids, numbers)
    order = jnp.lexsort((numbers, ids))
    sorted_ids, sorted_numbers = ids[order], numbers[order]
    changes = (sorted_ids[1:] != sorted_ids[:-1]) | (sorted_numbers[1:] != sorted_numbers[:-1])
    rank = jnp.concatenate([jnp.ones((1,), jnp.int32), 1 + jnp.cumsum(changes, dtype=jnp.int32)])[: ids.shape[0]]
    return jnp.where(ids > 0, jnp.zeros_like(ids).at[order].set(rank), 0)
