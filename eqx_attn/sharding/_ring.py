"""Ring attention: keys and values go from device to device while each computes with those that it has.

Liu et al. 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context" (arXiv:2310.01889). Everything here
runs on one device of the axis, inside a `shard_map`. A *shift* of t means that a device holds the keys of the device t
places before it; only shifts at which some device sees something take place, and one that not all need is skipped by the
others. What moves next is sent before the kernel of the present shift starts, so that it can move meanwhile, and not before
that of the last one has ended (an optimization barrier): else XLA may send everything at first, or keep for the backward what
came in the forward, and each device would hold all keys.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .._merge_parts import merge_parts, merge_sinks
from .._operands import Operands
from .._sinks import sinks_gradient
from .._summaries import block_summary, visible_blocks
from ._context import Placement
from ._dimensions import map_operands, matrix_dimensions
from ._wide import whole_bias_gradient, wide_dtype, with_wide_bias

SHARDED = ("q", "rows")
"""The dimensions of operands that lie on the axis.

What there is of keys besides themselves, a few bytes a token, is all there on each device, as are columns of matrices of
scores: the slice of a hop costs nothing, where another message would cost its latency.
"""


def forward(placement: Placement, layout: str, attend: Callable, arrays: tuple[Array, ...], operands: Operands):
    """This device's output, lse and, where asked for, largest scores; `attend(arrays, operands)` is one device's forward."""
    query, key, value = arrays
    moving = (key, value)
    shifts, visible = _shifts(placement), _visible(placement, operands)
    partial = dataclasses.replace(operands, sinks=None, out_dtype=wide_dtype(query))
    found = None
    for number, shift in enumerate(shifts):
        moving, found = lax.optimization_barrier((moving, found))
        upcoming = moving
        if number + 1 < len(shifts):
            upcoming = _sent(placement, moving, shifts[number + 1] - shift)

        hop = functools.partial(attend, (query, *moving), _of_hop(placement, partial, shift))
        part = _where_visible(placement, visible, shift, hop, (0, -jnp.inf, -jnp.inf))
        found = part if found is None else _merged(found, part, layout)
        moving = upcoming
    assert found is not None
    out, lse, *max_logit = found
    if operands.sinks is not None:
        out, lse = merge_sinks(out, lse, operands.sinks, layout)
    return out.astype(query.dtype), lse, *max_logit


def backward(
    placement: Placement,
    layout: str,
    differentiate: Callable,
    arrays: tuple[Array, ...],
    operands: Operands,
    *rows: Array,
):
    """Gradients as one device's `differentiate(arrays, operands, *rows)` gives them; `rows` are out, lse, dout, dlse.

    Given the lse of all keys, a hop's gradients are its exact share of them. Those of keys and values travel behind, in
    float32, and are home after the last hop.
    """
    query, key, value = arrays
    moving, rows = lax.optimization_barrier(((key, value), rows))
    shifts, visible = _shifts(placement), _visible(placement, operands)
    partial = with_wide_bias(placement, operands, "rows", "columns")
    partial = dataclasses.replace(partial, sinks=None, out_dtype=wide_dtype(query))
    dquery, returning, dbias, dmods = None, None, None, None
    for number, shift in enumerate(shifts):
        moving, dquery = lax.optimization_barrier((moving, dquery))
        upcoming = moving
        if number + 1 < len(shifts):
            upcoming = _sent(placement, moving, shifts[number + 1] - shift)

        hop = functools.partial(differentiate, (query, *moving), _of_hop(placement, partial, shift), *rows)
        (dquery_part, *dkv), (dbias_part, _, dmods_part) = _where_visible(placement, visible, shift, hop, 0)
        dquery = dquery_part if dquery is None else dquery + dquery_part
        dmods = dmods_part if dmods is None else jax.tree.map(jnp.add, dmods, dmods_part)
        returning = dkv if returning is None else jax.tree.map(jnp.add, returning, dkv)
        if operands.bias_gradient:
            dbias = _with_columns(placement, dbias, dbias_part, operands, shift)
        following = shifts[number + 1] if number + 1 < len(shifts) else placement.devices
        returning = _sent(placement, returning, following - shift)
        moving = upcoming
    assert dquery is not None and returning is not None
    grads = tuple(
        grad.astype(operands.out_dtype or x.dtype) for grad, x in zip((dquery, *returning), arrays, strict=True)
    )
    dsinks = _sinks_gradient(placement, layout, operands.sinks, *rows)
    dmods = lax.psum(dmods, placement.axis)
    return grads, (whole_bias_gradient(placement, dbias, operands, "rows"), dsinks, dmods)


def _sinks_gradient(placement: Placement, layout: str, sinks: Array | None, out, lse, dout, dlse) -> Array | None:
    if sinks is None:
        return None
    delta = jnp.sum(out.astype(lse.dtype) * dout.astype(lse.dtype), axis=-1)
    delta = jnp.swapaxes(delta, 1, 2) if layout == "bshd" else delta
    delta = jnp.where(lse == -jnp.inf, 0, delta - dlse)
    return lax.psum(sinks_gradient(sinks, lse, delta), placement.axis)


def _shifts(placement: Placement) -> list[int]:
    ranks = range(placement.devices)
    if placement.seen is None:
        return list(ranks)
    seen = placement.seen
    # The first is always there, since something has to say that nothing was seen.
    return [t for t in ranks if t == 0 or any(seen[rank][rank - t] for rank in ranks)]


def _visible(placement: Placement, operands: Operands):
    """`[devices]`: of which devices this one sees keys; None where all see all."""
    if placement.seen is not None:
        if all(map(all, placement.seen)):
            return None
        return jnp.asarray(placement.seen)[lax.axis_index(placement.axis)]
    segments, blocks, devices = operands.segments, placement.summary_blocks, placement.devices
    assert segments is not None
    queries = block_summary(segments.q_ids, segments.q_positions, segments.q_ids.shape[1] // blocks)
    keys = block_summary(segments.kv_ids, segments.kv_positions, segments.kv_ids.shape[1] // (blocks * devices))
    seen, _ = visible_blocks(queries, keys, operands.lower, operands.upper)
    return jnp.any(seen, axis=(0, 1)).reshape(devices, blocks).any(axis=1)


def _where_visible(placement: Placement, visible, shift: int, hop: Callable, nothing: Any):
    """The hop's results, or a filling of `nothing` where this device sees no key of it."""
    ranks, seen = range(placement.devices), placement.seen
    if visible is None or (seen is not None and all(seen[rank][rank - shift] for rank in ranks)):
        return hop()

    def skip():
        shapes = jax.eval_shape(hop)
        fill = jax.tree.broadcast(nothing, shapes) if not isinstance(nothing, tuple) else nothing[: len(shapes)]
        return jax.tree.map(lambda value, x: jnp.full(x.shape, value, x.dtype), fill, shapes)

    return lax.cond(visible[_source(placement, shift)], hop, skip)


def _source(placement: Placement, shift: int):
    """The device whose keys this one holds at a shift."""
    return (lax.axis_index(placement.axis) - shift) % placement.devices


def _sent(placement: Placement, tree, shift: int):
    """`tree` of the device `shift` places before this one."""
    devices = placement.devices
    if shift % devices == 0:
        return tree
    pairs = [(rank, (rank + shift) % devices) for rank in range(devices)]
    return jax.tree.map(lambda x: lax.ppermute(x, placement.axis, pairs), tree)


def _of_hop(placement: Placement, operands: Operands, shift: int) -> Operands:
    """Operands for the keys that are here at a shift."""

    def of_keys(x, names):
        axis = next((axis for axis, name in enumerate(names) if name in ("kv", "columns")), None)
        if axis is None:
            return x
        size = x.shape[axis] // placement.devices
        return lax.dynamic_slice_in_dim(x, _source(placement, shift) * size, size, axis)

    return map_operands(of_keys, operands)


def _with_columns(placement: Placement, dbias, part: Array, operands: Operands, shift: int) -> Array:
    """The bias' gradient with the part that the keys of a shift add to it."""
    assert operands.bias is not None
    if "columns" not in matrix_dimensions(operands.bias):
        return part if dbias is None else dbias + part
    if dbias is None:
        dbias = jnp.zeros((*part.shape[:3], operands.bias.shape[3]), part.dtype)
    return lax.dynamic_update_slice_in_dim(dbias, part, _source(placement, shift) * part.shape[3], 3)


def _merged(found, part, layout: str):
    out, lse = merge_parts(found[0], found[1], part[0], part[1], layout)
    return out, lse, *map(jnp.maximum, found[2:], part[2:])
