"""The custom gradient and the batching rule, written once for all implementations.

From the outside in: a `custom_vjp`; around each direction a `custom_vmap`, whose rule folds the mapped axis into the batch
and calls itself; inside, the dispatch on the platform that is lowered for.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jaxtyping import Array

from . import _blockwise
from ._call import Call, Route
from ._context import resume
from ._dispatch import by_platform
from ._kernels import load_kernel
from ._operands import Operands, SegmentOperands, Tile


@functools.partial(jax.jit, static_argnums=(0,))
def attend(call: Call, q: Array, k: Array, v: Array, operands: Operands) -> tuple[Array, Array]:
    """Output and lse of arrays with one batch axis in `call.layout`; jitted, so that equal layers are traced once.

    The residuals `out` and `lse` carry the names "eqx_attn_out" and "eqx_attn_lse" for `jax.checkpoint` policies.
    """
    return _attend(call, q, k, v, operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call, q, k, v, operands):
    return _batched_forward(call)(q, k, v, operands)


def _attend_forward(call, q, k, v, operands):
    out, lse = _batched_forward(call)(q, k, v, operands)
    out, lse = checkpoint_name(out, "eqx_attn_out"), checkpoint_name(lse, "eqx_attn_lse")
    return (out, lse), (q, k, v, out, lse, operands)


def _attend_backward(call, residuals, cotangents):
    q, k, v, out, lse, operands = residuals
    dout, dlse = cotangents
    return (*_batched_backward(call)(q, k, v, out, lse, dout, dlse, operands), None)


_attend.defvjp(_attend_forward, _attend_backward)


@functools.cache
def _batched_forward(call: Call):
    return _fold_mapped_axis(functools.partial(by_platform, call, _forward_on))


@functools.cache
def _batched_backward(call: Call):
    return _fold_mapped_axis(functools.partial(by_platform, call, _backward_on))


def _forward_on(call: Call, route: Route, q, k, v, operands):
    with resume(call.context):
        if route.spec is not None:
            return load_kernel(route.spec).forward(q, k, v, operands, route.tiles)
        assert isinstance(route.tiles, Tile)
        q, k, v = (_heads_first(x, call.layout) for x in (q, k, v))
        out, lse = _blockwise.forward(q, k, v, operands, route.tiles)
        return _heads_first(out, call.layout), lse


def _backward_on(call: Call, route: Route, q, k, v, out, lse, dout, dlse, operands):
    with resume(call.context):
        if route.spec is not None:
            return load_kernel(route.spec).backward(q, k, v, out, lse, dout, dlse, operands, route.tiles)
        assert isinstance(route.tiles, Tile)
        q, k, v, out, dout = (_heads_first(x, call.layout) for x in (q, k, v, out, dout))
        grads = _blockwise.backward(q, k, v, out, lse, dout, dlse, operands, route.tiles)
        return tuple(_heads_first(grad, call.layout) for grad in grads)


def _heads_first(x: Array, layout: str) -> Array:
    """`bshd` to `bhsd` and back."""
    return jnp.swapaxes(x, 1, 2) if layout == "bshd" else x


def _fold_mapped_axis(function):
    """`function(*arrays, operands)` with a batching rule: the mapped axis becomes part of the batch.

    Unmapped arrays are broadcast over it. The rule calls the batched function again, so that nested maps fold one by one.
    """
    batched = custom_vmap(function)

    def rule(size, is_mapped, *arguments):
        *arrays, operands = arguments
        *mapped_arrays, mapped_operands = is_mapped
        batch = arrays[0].shape[1 if mapped_arrays[0] else 0]
        fold = functools.partial(_fold, size, batch)
        folded = [fold(mapped, x) for mapped, x in zip(mapped_arrays, arrays, strict=True)]
        results = batched(*folded, _fold_operands(fold, mapped_operands, operands))
        unfolded = jax.tree.map(lambda x: x.reshape(size, batch, *x.shape[1:]), results)
        return unfolded, jax.tree.map(lambda _: True, results)

    batched.def_vmap(rule)
    return batched


def _fold(size: int, batch: int, mapped: bool, x: Array) -> Array:
    """`x` with batch axis `size * batch`, from `[size, batch, ...]` where mapped and `[batch, ...]` where not."""
    rest = x.shape[2:] if mapped else x.shape[1:]
    if not mapped:
        x = x[None]
    return jnp.broadcast_to(x, (size, batch, *rest)).reshape(size * batch, *rest)


def _fold_operands(fold, mapped: Operands, operands: Operands) -> Operands:
    """Operands that have a batch axis are folded; the index arrays of the other dimensions stay as they are."""
    for name in ("head_index", "q_index", "kv_index"):
        if getattr(mapped, name):
            raise NotImplementedError(
                f"{name} is mapped by jax.vmap: an index array belongs to its dimension, not to the batch"
            )

    def fold_field(name):
        x, is_mapped = getattr(operands, name), getattr(mapped, name)
        if x is None or (x.shape[0] == 1 and not is_mapped and name == "dense"):
            return x  # one dense mask for all examples stays one
        return fold(is_mapped, x)

    segments = operands.segments
    if segments is not None:
        folded = dict(_fold_each(fold, mapped.segments, segments))
        segments = dataclasses.replace(segments, **folded)
    return dataclasses.replace(
        operands, segments=segments, dense=fold_field("dense"), batch_index=fold_field("batch_index")
    )


def _fold_each(fold, mapped: SegmentOperands | None, segments: SegmentOperands):
    for field in dataclasses.fields(segments):
        x = getattr(segments, field.name)
        yield field.name, None if x is None else fold(getattr(mapped, field.name), x)
