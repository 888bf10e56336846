"""The custom gradient and the batching rule, written once for all implementations.

From the outside in: a `custom_vjp`; around each direction a `custom_vmap`, whose rule calls it again with one level more;
the partitioning step, which shares batch and heads out over devices and folds mapped axes into the batch of each; inside,
the dispatch on the platform that is lowered for.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import CustomVJPPrimal
from jaxtyping import Array

from . import _blockwise
from ._call import Call, Route
from ._context import resume
from ._dispatch import by_platform
from ._kernels import load_kernel
from ._mod_gradients import mod_gradients, sums_in_kernel
from ._operands import Operands, Tile
from ._tuning import XLA_TILE
from .sharding._fold import Level, Levels
from .sharding._partition import aligned_cotangent, Direction
from .sharding._varying import alike_varying

Arrays = tuple[Array, ...]
"""Query, key and value, or fewer arrays where some of them are packed, in the order of `call.layout`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Learned:
    """The operands that have gradients, as in `Operands`."""

    bias: Array | None = None
    sinks: Array | None = None
    score_arrays: tuple[Array | None, ...] = ()


@functools.partial(jax.jit, static_argnums=(0,))
def attend(call: Call, arrays: Arrays, operands: Operands, learned: Learned = Learned()) -> Arrays:
    """Output, lse and, where the operands ask for it, each row's largest score, of arrays with one batch axis.

    Jitted, so that equal layers are traced once. The residuals `out` and `lse` carry the names "eqx_attn_out" and
    "eqx_attn_lse" for `jax.checkpoint` policies.
    """
    return _attend(call, *alike_varying((arrays, learned, operands)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call, arrays, learned, operands):
    return _batched_forward(call)(arrays, _with(operands, learned))


def _attend_forward(call, arrays, learned, operands):
    wants_bias = learned.bias is not None and learned.bias.perturbed
    wants_mods = tuple(x.perturbed and jnp.issubdtype(x.value.dtype, jnp.floating) for x in learned.score_arrays)
    arrays, learned, operands = jax.tree.map(
        lambda primal: primal.value, (arrays, learned, operands), is_leaf=_is_primal
    )
    operands = dataclasses.replace(_with(operands, learned), bias_gradient=wants_bias, mod_gradients=wants_mods)
    out, lse, *max_logit = _batched_forward(call)(arrays, operands)
    out, lse = checkpoint_name(out, "eqx_attn_out"), checkpoint_name(lse, "eqx_attn_lse")
    return (out, lse, *max_logit), (arrays, out, lse, operands)


def _attend_backward(call, residuals, cotangents):
    arrays, out, lse, operands = residuals
    dout, dlse = aligned_cotangent("out", out, cotangents[0]), aligned_cotangent("lse", lse, cotangents[1])
    operands = dataclasses.replace(operands, max_logit=False)
    arrays_grads, learned_grads = _batched_backward(call)(arrays, operands, out, lse, dout, dlse)
    return arrays_grads, Learned(*learned_grads), None


_attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)


def _is_primal(x):
    return isinstance(x, CustomVJPPrimal)


def _with(operands: Operands, learned: Learned) -> Operands:
    return dataclasses.replace(operands, bias=learned.bias, sinks=learned.sinks, score_arrays=learned.score_arrays)


@functools.cache
def _batched_forward(call: Call):
    return _batched(Direction(call, functools.partial(by_platform, call, _forward_on), backward=False))


@functools.cache
def _batched_backward(call: Call):
    return _batched(Direction(call, functools.partial(by_platform, call, _backward_on), backward=True))


def _forward_on(call: Call, route: Route, arrays, operands):
    with resume(call.context):
        if route.spec is not None:
            return tuple(load_kernel(route.spec).forward(*arrays, operands, route.tiles))
        assert isinstance(route.tiles, Tile)
        q, k, v = unpacked(arrays, call.layout, operands.heads_of_kv)
        q, k, v = (_heads_first(x, call.layout) for x in (q, k, v))
        out, *others = _blockwise.forward(q, k, v, operands, route.tiles)
        return _heads_first(out, call.layout), *others


def _backward_on(call: Call, route: Route, arrays, operands, out, lse, dout, dlse):
    """The gradients of the arrays, and those of bias, sinks and a score function's arrays, None where there are none."""
    with resume(call.context):
        if route.spec is not None:
            beside = any(operands.mod_gradients) and not sums_in_kernel(route.spec, operands)
            of_kernel = dataclasses.replace(operands, mod_gradients=()) if beside else operands
            grads = load_kernel(route.spec).backward(*arrays, out, lse, dout, dlse, of_kernel, route.tiles)
            if beside:
                q, k, v = unpacked(arrays, call.layout, operands.heads_of_kv)
                q, k, v, first_out, first_dout = (_heads_first(x, call.layout) for x in (q, k, v, out, dout))
                grads = (*grads, *mod_gradients(q, k, v, first_out, lse, first_dout, dlse, operands, XLA_TILE))
        else:
            assert isinstance(route.tiles, Tile)
            q, k, v = unpacked(arrays, call.layout, operands.heads_of_kv)
            q, k, v, out, dout = (_heads_first(x, call.layout) for x in (q, k, v, out, dout))
            grads = _blockwise.backward(q, k, v, out, lse, dout, dlse, operands, route.tiles)
            packed_grads = packed([_heads_first(grad, call.layout) for grad in grads[:3]], call.layout)
            grads = (*packed_grads, *grads[3:])
    *arrays_grads, others = *grads[: len(arrays)], list(grads[len(arrays) :])
    dbias = others.pop(0) if operands.bias_gradient else None
    dsinks = others.pop(0) if operands.sinks is not None else None
    dmods = tuple(others.pop(0) if wanted else None for wanted in operands.mod_gradients)
    return tuple(arrays_grads), (dbias, dsinks, dmods)


def unpacked(arrays: Arrays, layout: str, heads_of_kv: int | None) -> Arrays:
    """Query, key and value, sliced out of packed arrays."""
    if layout == "qkv":
        (qkv,) = arrays
        assert heads_of_kv is not None
        q_heads = qkv.shape[-2] - 2 * heads_of_kv
        return tuple(jnp.split(qkv, (q_heads, q_heads + heads_of_kv), axis=-2))
    if layout == "kv":
        return arrays[0], *jnp.split(arrays[1], 2, axis=-2)
    return arrays


def packed(arrays: Sequence[Array], layout: str) -> Arrays:
    """Inverse of `unpacked`."""
    if layout == "qkv":
        return (jnp.concatenate(arrays, axis=2),)
    if layout == "kv":
        return arrays[0], jnp.concatenate(arrays[1:], axis=2)
    return tuple(arrays)


def _heads_first(x: Array, layout: str) -> Array:
    """`bshd` to `bhsd` and back."""
    return x if layout == "bhsd" else jnp.swapaxes(x, 1, 2)


def _batched(direction: Direction, levels: Levels = ()):
    """A direction with a batching rule: the mapped axis of each `jax.vmap` around it becomes one more level."""
    function = custom_vmap(lambda *arguments: direction(levels, arguments))

    def rule(size, is_mapped, *arguments):
        level = Level(size, tuple(jax.tree.leaves(is_mapped)))
        results = _batched(direction, (level, *levels))(*arguments)
        return results, jax.tree.map(lambda _: True, results)

    function.def_vmap(rule)
    return function
