"""The gradient of attention sinks, which needs no kernel: only what the backward has of each row."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def sinks_gradient(
    sinks: Float[Array, "entries q_heads"],
    lse: Float[Array, "batch q_heads q_seq"],
    delta: Float[Array, "batch q_heads q_seq"],
) -> Float[Array, "entries q_heads"]:
    """A sink's weight `exp(sink - lse)` in each row, times what the row gains by it, `-delta`.

    `delta` is the row's sum of `out * dout`, less `dlse`; what it holds where lse is -inf does not matter.
    """
    entries, heads = sinks.shape
    of_rows = jnp.repeat(sinks, lse.shape[0] // entries, axis=0)[:, :, None]
    alive = lse > -jnp.inf
    weights = jnp.where(alive, jnp.exp(jnp.where(alive, of_rows - lse, 0)), 0)
    grads = -jnp.sum(weights * delta, axis=2)
    return grads.reshape(entries, -1, heads).sum(1).astype(sinks.dtype)
