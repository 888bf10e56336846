"""Putting sharded arrays into the order of a context and back, without gathering them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from beartype import beartype
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, jaxtyped, Shaped

from ._context import ContextParallel, mesh_of
from ._order import Order
from ._over_axis import map_over_axis


@jaxtyped(typechecker=beartype)
def reorder(x: Shaped[Array, "..."], context: ContextParallel, *, axis: int) -> Shaped[Array, "..."]:
    """`x`, whose `axis` is a sequence in its original order, with the tokens in the order of `context`.

    The sequence axis is sharded over `context.axis`, before and after. Tokens go straight to the device that they belong to:
    two permutes for "dual_chunk", one all-to-all for "striped". Differentiable, under `jax.jit` and outside of it.

    Raises ValueError where the length cannot be dealt: multiples of 2 n tokens for n devices and "dual_chunk", of n * n stripes
    for "striped".
    """
    return _moved(x, context, axis, _dealt)


@jaxtyped(typechecker=beartype)
def restore(x: Shaped[Array, "..."], context: ContextParallel, *, axis: int) -> Shaped[Array, "..."]:
    """Inverse of `reorder`: tokens in their original order."""
    return _moved(x, context, axis, _undealt)


def positions(context: ContextParallel, seq: int, devices: int | None = None) -> np.ndarray:
    """`[seq]`, int32: the original position of each token of an array in the order of `context`.

    A NumPy array, so that it also reorders on the host: `tokens[:, positions(context, seq, devices)]`. `devices` is the size
    of `context.axis`, by default in the mesh of `jax.set_mesh`.
    """
    order = context.order_on(mesh_of(context)) if devices is None else Order(context.order, context.stripe, devices)
    return order.positions(seq)


def _moved(x: Array, context: ContextParallel, axis: int, move: Any) -> Array:
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis is {axis}, and x has shape {x.shape}: name its sequence axis")
    axis %= x.ndim
    mesh = mesh_of(context, x)
    order = context.order_on(mesh)
    wanted = order.multiple * (order.devices if order.name == "striped" else 1)
    if x.shape[axis] % wanted:
        raise ValueError(
            f"x has shape {x.shape}: over {order.devices} devices, order={order.name!r} moves lengths that are multiples of "
            f"{wanted}, and axis {axis} has {x.shape[axis]}; pad it, or reorder on the host with positions(...)"
        )
    return _move(move, order, mesh, context.axis, axis, x)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _move(move, order: Order, mesh, mesh_axis: str, axis: int, x: Array) -> Array:
    spec = PartitionSpec(*(mesh_axis if number == axis else None for number in range(x.ndim)))

    def body(x):
        return jnp.moveaxis(move(order, mesh_axis, jnp.moveaxis(x, axis, 0)), 0, axis)

    return map_over_axis(mesh, mesh_axis, body, (spec,), spec, x)


def _dealt(order: Order, mesh_axis: str, x: Array) -> Array:
    """In and out: one device's tokens along axis 0."""
    if order.name == "striped":
        stripes = x.reshape(-1, order.devices, order.stripe, *x.shape[1:])  # [stripes of each, devices, stripe, ...]
        return lax.all_to_all(stripes, mesh_axis, 1, 0, tiled=True).reshape(x.shape)
    if order.name == "contiguous":
        return x
    # Chunks 2r and 2r+1 are here; of those that come, the even one belongs first on a device of even number.
    even, odd = jnp.split(x, 2)
    even, odd = (_permuted(chunk, order, mesh_axis, parity, forth=True) for parity, chunk in enumerate((even, odd)))
    is_even = lax.axis_index(mesh_axis) % 2 == 0
    return jnp.concatenate([jnp.where(is_even, even, odd), jnp.where(is_even, odd, even)])


def _undealt(order: Order, mesh_axis: str, x: Array) -> Array:
    if order.name == "striped":
        stripes = x.reshape(-1, order.stripe, *x.shape[1:])  # [stripes of all, stripe, ...]
        # From each device the stripes that belong here, in turn.
        here = lax.all_to_all(stripes[:, None], mesh_axis, 0, 1, tiled=True)
        return here.reshape(x.shape)
    if order.name == "contiguous":
        return x
    first, second = jnp.split(x, 2)
    is_even = lax.axis_index(mesh_axis) % 2 == 0
    chunks = (jnp.where(is_even, first, second), jnp.where(is_even, second, first))
    return jnp.concatenate(
        [_permuted(chunk, order, mesh_axis, parity, forth=False) for parity, chunk in enumerate(chunks)]
    )


def _permuted(chunk: Array, order: Order, mesh_axis: str, parity: int, *, forth: bool) -> Array:
    """Chunk 2r + parity of each device r to where it belongs, or back."""
    pairs = []
    for rank in range(order.devices):
        number = 2 * rank + parity
        pairs.append((rank, min(number, 2 * order.devices - 1 - number)))
    return lax.ppermute(chunk, mesh_axis, pairs if forth else [pair[::-1] for pair in pairs])
