"""The dense oracle: attention as its definition reads, for tests and for reading. Memory grows with q_seq * kv_seq."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ._operands import Operands


def visible_keys(operands: Operands, q_seq: int, kv_seq: int) -> Bool[Array, "#batch #q_heads q_seq kv_seq"]:
    """The dense predicate of `operands`: which key each query may see."""
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
    if operands.dense is not None:
        seen = seen & operands.dense
    return seen


def reference_attention(
    query: Float[Array, "batch q_seq q_heads qk_dim"],
    key: Float[Array, "batch kv_seq kv_heads qk_dim"],
    value: Float[Array, "batch kv_seq kv_heads v_dim"],
    operands: Operands,
) -> tuple[Float[Array, "batch q_seq q_heads v_dim"], Float[Array, "batch q_heads q_seq"]]:
    """Output and lse, in float64 where x64 is enabled and in float32 otherwise; differentiable by JAX itself.

    A query that sees no key has output 0, lse -inf, and gradient 0, also through the lse.
    """
    out_dtype = operands.out_dtype or query.dtype
    lse_dtype = jnp.dtype(jnp.float64 if query.dtype == jnp.float64 else jnp.float32)
    wide = jnp.float64 if jax.config.jax_enable_x64 else jnp.float32
    batch, q_seq, q_heads, qk_dim = query.shape
    kv_seq, kv_heads = key.shape[1:3]
    query, key, value = (x.astype(wide) for x in (query, key, value))
    query = query.reshape(batch, q_seq, kv_heads, q_heads // kv_heads, qk_dim)
    with jax.default_matmul_precision("highest"):
        scores = jnp.einsum("bqhgd,bkhd->bhgqk", query, key).reshape(batch, q_heads, q_seq, kv_seq) * operands.scale
    seen = jnp.broadcast_to(visible_keys(operands, q_seq, kv_seq), scores.shape)
    dead = ~jnp.any(seen, axis=-1, keepdims=True)
    row_max = jax.lax.stop_gradient(jnp.max(jnp.where(seen, scores, -jnp.inf), axis=-1, keepdims=True))
    row_max = jnp.where(dead, 0, row_max)
    # `where` before and after exp: a hidden score may be anything, and neither its value nor its gradient may leak.
    weights = jnp.where(seen, jnp.exp(jnp.where(seen, scores - row_max, 0)), 0)
    row_sum = jnp.where(dead, 1, jnp.sum(weights, axis=-1, keepdims=True))
    probabilities = (weights / row_sum).reshape(batch, kv_heads, q_heads // kv_heads, q_seq, kv_seq)
    with jax.default_matmul_precision("highest"):
        out = jnp.einsum("bhgqk,bkhd->bqhgd", probabilities, value)
    lse = jnp.where(dead, -jnp.inf, row_max + jnp.log(row_sum))[..., 0]
    return out.reshape(batch, q_seq, q_heads, -1).astype(out_dtype), lse.astype(lse_dtype)
