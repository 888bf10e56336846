"""The gradient of sinks: the same few sums over rows for every implementation."""

import jax.numpy as jnp
from jaxtyping import Array


def sinks_gradient(sinks: Array, lse: Array, delta: Array) -> Array:
    """In the shape of `sinks`: a sink's weight `exp(sink - lse)` in each row, times what the row gains by it, `-delta`."""
    entries, heads = sinks.shape
    of_rows = jnp.repeat(sinks, lse.shape[0] // entries, axis=0)[:, :, None]
    alive = lse > -jnp.inf
    weights = jnp.where(alive, jnp.exp(jnp.where(alive, of_rows - lse, 0)), 0)
    grads = -jnp.sum(weights * delta, axis=2)
    return grads.reshape(entries, -1, heads).sum(1).astype(sinks.dtype)
