"""The dense oracle: attention as its definition reads, for tests and for reading. Memory grows with q_seq * kv_seq."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from . import _dropout
from ._operands import BlockOperands, Operands, shared_index


def on_all_indices(function: Callable, operands: Operands, *scores: Array) -> Array:
    """A function of scalars, or of scores `[batch, q_heads, q_seq, kv_seq]` and scalars, at each index."""
    indices = (operands.batch_index, operands.head_index, operands.q_index, operands.kv_index)
    mapped = function
    for axis in (3, 2, 1, 0):
        mapped = jax.vmap(mapped, (*(0 for _ in scores), *(0 if axis == number else None for number in range(4))))
    return mapped(*scores, *indices)


def visible_keys(
    operands: Operands, q_seq: int, kv_seq: int, functions: Sequence[Callable] = ()
) -> Bool[Array, "#batch #q_heads q_seq kv_seq"]:
    """The dense predicate of `operands`, and of mask functions: which key each query may see."""
    seen = jnp.ones((1, 1, q_seq, kv_seq), bool)
    segments = operands.segments
    if segments is None or segments.q_positions is None or segments.kv_positions is None:
        distance = jnp.arange(kv_seq, dtype=jnp.int32)[None, :] - jnp.arange(q_seq, dtype=jnp.int32)[:, None]
        distance = distance[None, None]
    else:
        distance = (segments.kv_positions[:, None, :] - segments.q_positions[:, :, None])[:, None]
    if operands.lower is not None:
        seen = seen & (distance >= operands.lower)
    if operands.upper is not None:
        seen = seen & (distance <= operands.upper)
    if segments is not None:
        seen = seen & (segments.q_ids[:, :, None] == segments.kv_ids[:, None, :])[:, None]
    if operands.blocks is not None:
        seen = seen & expand_blocks(operands.blocks, jnp.arange(q_seq), jnp.arange(kv_seq))
    if operands.dense is not None:
        seen = seen & operands.dense
    for function in functions:
        seen = seen & on_all_indices(function, operands)
    return seen


def expand_blocks(blocks: BlockOperands, rows: Int[Array, " q_seq"], columns: Int[Array, " kv_seq"]) -> Array:
    """The block map, token by token: `[_, _, q_seq, kv_seq]`."""
    return blocks.seen[:, :, rows // blocks.rows][..., columns // blocks.columns]


def reference_attention(
    query: Float[Array, "batch q_seq q_heads qk_dim"],
    key: Float[Array, "batch kv_seq kv_heads qk_dim"],
    value: Float[Array, "batch kv_seq kv_heads v_dim"],
    operands: Operands,
    score_mod: Callable | None = None,
    mask_functions: Sequence[Callable] = (),
) -> tuple[Array, ...]:
    """Output and lse, in float64 where x64 is enabled and in float32 otherwise; differentiable by JAX itself.

    With `operands.max_logit` also the largest visible score of each row. A query that sees no key has output 0 and
    gradient 0, also through the lse, which is -inf or, with sinks, its head's sink. Functions are what a user gave, which
    are evaluated as they are.
    """
    out_dtype = operands.out_dtype or query.dtype
    lse_dtype = jnp.dtype(jnp.float64 if query.dtype == jnp.float64 else jnp.float32)
    wide = jnp.float64 if jax.config.jax_enable_x64 else jnp.float32
    batch, q_seq, q_heads, _ = query.shape
    kv_seq, kv_heads = key.shape[1:3]
    operands = _one_entry_per_example(operands, batch)
    query, key, value = (x.astype(wide) for x in (query, key, value))
    scores = _scores(query, key, operands)
    seen = jnp.broadcast_to(visible_keys(operands, q_seq, kv_seq, mask_functions), scores.shape)
    if score_mod is not None:
        scores = on_all_indices(score_mod, operands, scores).astype(wide)
        seen = seen & (scores > -jnp.inf)
    if operands.bias is not None:
        seen = seen & (operands.bias > -jnp.inf)
    row_max = jax.lax.stop_gradient(jnp.max(jnp.where(seen, scores, -jnp.inf), axis=-1, keepdims=True))
    sinks = None if operands.sinks is None else operands.sinks.astype(wide)[:, :, None, None]
    highest = row_max if sinks is None else jnp.maximum(row_max, jax.lax.stop_gradient(sinks))
    dead = highest == -jnp.inf
    highest = jnp.where(dead, 0, highest)
    # `where` before and after exp: a hidden score may be anything, and neither its value nor its gradient may leak.
    weights = jnp.where(seen, jnp.exp(jnp.where(seen, scores - highest, 0)), 0)
    row_sum = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        row_sum = row_sum + jnp.exp(sinks - highest)
    row_sum = jnp.where(dead, 1, row_sum)
    probabilities = weights / row_sum
    if operands.dropout_seed is not None:
        q_index, kv_index = operands.q_index, operands.kv_index
        assert q_index is not None and kv_index is not None
        kept = _dropout.kept(operands.dropout_seed, q_index, kv_index, operands.dropout_rate)
        probabilities = jnp.where(kept, probabilities / (1 - operands.dropout_rate), 0)
    probabilities = probabilities.reshape(batch, kv_heads, q_heads // kv_heads, q_seq, kv_seq)
    with jax.default_matmul_precision("highest"):
        out = jnp.einsum("bhgqk,bkhd->bqhgd", probabilities, value)
    out = out.reshape(batch, q_seq, q_heads, -1).astype(out_dtype)
    lse = jnp.where(dead, -jnp.inf, highest + jnp.log(row_sum))[..., 0].astype(lse_dtype)
    return (out, lse, row_max[..., 0].astype(lse_dtype)) if operands.max_logit else (out, lse)


def _scores(query, key, operands):
    """`[batch, q_heads, q_seq, kv_seq]`."""
    batch, q_seq, q_heads, qk_dim = query.shape
    kv_seq, kv_heads = key.shape[1:3]
    query = query.reshape(batch, q_seq, kv_heads, q_heads // kv_heads, qk_dim)
    with jax.default_matmul_precision("highest"):
        scores = jnp.einsum("bqhgd,bkhd->bhgqk", query, key).reshape(batch, q_heads, q_seq, kv_seq) * operands.scale
    if operands.softcap is not None:
        scores = operands.softcap * jnp.tanh(scores / operands.softcap)
    if operands.bias is not None:
        scores = scores + operands.bias.astype(scores.dtype)
    return scores


def _one_entry_per_example(operands: Operands, batch: int) -> Operands:
    """Operands that several examples share, repeated."""

    def repeat(x):
        return None if x is None or x.shape[0] in (1, batch) else x[shared_index(batch, x.shape[0])]

    changed = {name: repeat(getattr(operands, name)) for name in ("dense", "bias", "sinks")}
    if operands.blocks is not None and (seen := repeat(operands.blocks.seen)) is not None:
        changed["blocks"] = dataclasses.replace(operands.blocks, seen=seen)
    return dataclasses.replace(operands, **{name: x for name, x in changed.items() if x is not None})
