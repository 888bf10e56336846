"""Attention with dropout on the attention weights: dense, because dropout as equinox defines it needs the weights."""

import dataclasses
import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from .._masks import Mask
from .._plan import plan_mask
from .._reference import visible_keys
from .._serve import operands_for


def attention_with_dropout(
    query: Float[Array, "q_seq q_heads qk_dim"],
    key: Float[Array, "kv_seq kv_heads qk_dim"],
    value: Float[Array, "kv_seq kv_heads v_dim"],
    mask: Mask,
    dropout: eqx.nn.Dropout,
    dropout_key: PRNGKeyArray | None,
) -> Float[Array, "q_seq q_heads v_dim"]:
    """What `equinox.nn.MultiheadAttention` computes between its projections, with the same random bits for a key.

    The memory grows with q_seq * kv_seq. A query that sees no key gives 0.
    """
    q_heads, kv_heads = query.shape[1], key.shape[1]
    key, value = (jnp.repeat(x, q_heads // kv_heads, axis=1) for x in (key, value))
    logits = jnp.einsum("qhd,khd->hqk", query / math.sqrt(query.shape[-1]), key)
    seen = _visible(mask, q_heads, query.shape[0], key.shape[0])
    # The lowest finite number rather than -inf: a row of -inf would have a NaN for its gradient.
    logits = jnp.where(seen, logits, jnp.finfo(logits.dtype).min)
    with jax.numpy_dtype_promotion("standard"):
        wide = jnp.promote_types(logits.dtype, jnp.float32)
    weights = jax.nn.softmax(logits.astype(wide), axis=-1).astype(logits.dtype)
    weights = jnp.where(seen, weights, 0)
    keys = None if dropout_key is None else jax.random.split(dropout_key, q_heads)
    weights = jax.vmap(lambda weights, key: dropout(weights, key=key, inference=False))(weights, keys)
    return jnp.einsum("hqk,khd->qhd", weights, value)


def _visible(mask: Mask, q_heads: int, q_seq: int, kv_seq: int) -> Bool[Array, "q_heads q_seq kv_seq"]:
    plan = plan_mask(mask, (), q_heads, q_seq, kv_seq)
    counts = dict(batch_index=1, head_index=q_heads, q_index=q_seq, kv_index=kv_seq)
    indices = {name: jnp.arange(count, dtype=jnp.int32) for name, count in counts.items()}
    operands = dataclasses.replace(operands_for(plan, scale=1.0), **indices)
    seen = visible_keys(operands, q_seq, kv_seq, plan.functions)
    return jnp.broadcast_to(seen, (1, q_heads, q_seq, kv_seq))[0]
