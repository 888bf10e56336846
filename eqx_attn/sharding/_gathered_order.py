"""Arrays that hold all tokens in the order of devices, and in their original order: permutations that move whole runs."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ._order import Order


def to_original(order: Order, x: Array, axis: int, tokens: int) -> Array:
    """`x` with all `tokens` along an axis, or blocks of them, from the arrays' order to the original one."""
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    devices = order.devices
    if order.name == "dual_chunk":
        chunks = x.reshape(*before, devices, 2, -1, *after)
        early, late = (lax.index_in_dim(chunks, number, axis + 1, keepdims=False) for number in range(2))
        return jnp.concatenate([early, jnp.flip(late, axis)], axis).reshape(x.shape)
    if order.name == "striped":
        stripes = x.reshape(*before, devices, _stripes(order, tokens), -1, *after)
        return jnp.swapaxes(stripes, axis, axis + 1).reshape(x.shape)
    return x


def to_dealt(order: Order, x: Array, axis: int, tokens: int) -> Array:
    """Inverse of `to_original`."""
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    devices = order.devices
    if order.name == "dual_chunk":
        early, late = jnp.split(x.reshape(*before, 2 * devices, -1, *after), 2, axis)
        return jnp.stack([early, jnp.flip(late, axis)], axis + 1).reshape(x.shape)
    if order.name == "striped":
        stripes = x.reshape(*before, _stripes(order, tokens), devices, -1, *after)
        return jnp.swapaxes(stripes, axis, axis + 1).reshape(x.shape)
    return x


def _stripes(order: Order, tokens: int) -> int:
    """How many of them a device holds."""
    return tokens // (order.devices * order.stripe)
