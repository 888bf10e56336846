"""The arithmetic of partial results over different keys: exact for rows that saw nothing, also differentiated."""

import jax.numpy as jnp
from jaxtyping import Array


def merge_parts(out_a: Array, lse_a: Array, out_b: Array, lse_b: Array, layout: str) -> tuple[Array, Array]:
    """Output and lse over the keys of both parts, in the dtype of the lse; what a part with lse -inf holds counts nothing."""
    largest = jnp.maximum(lse_a, lse_b)
    dead = largest == -jnp.inf
    # Dead rows subtract 0, and dead parts exponentiate 0 before they are hidden, so that no gradient meets inf - inf.
    largest = jnp.where(dead, 0, largest)
    share_a, share_b = (
        jnp.where(lse == -jnp.inf, 0, jnp.exp(jnp.where(lse == -jnp.inf, 0, lse - largest))) for lse in (lse_a, lse_b)
    )
    total = jnp.where(dead, 1, share_a + share_b)
    out = _weighted(out_a, share_a / total, layout) + _weighted(out_b, share_b / total, layout)
    return out, jnp.where(dead, -jnp.inf, largest + jnp.log(total))


def merge_sinks(out: Array, lse: Array, sinks: Array, layout: str) -> tuple[Array, Array]:
    """Output and lse where each row also has its head's sink, `[entries, heads]`: a key whose value is 0."""
    logits = jnp.repeat(sinks.astype(lse.dtype), lse.shape[0] // sinks.shape[0], axis=0)[:, :, None]
    both = jnp.logaddexp(lse, logits)
    share = jnp.where(both == -jnp.inf, 0, jnp.exp(lse - jnp.where(both == -jnp.inf, 0, both)))
    return _weighted(out, share, layout), both


def _weighted(out, weight, layout):
    if layout == "bshd":
        weight = jnp.swapaxes(weight, -1, -2)
    weight = weight[..., None]
    return jnp.where(weight == 0, 0, out.astype(weight.dtype) * weight)
