"""Ring attention: keys and values go from device to device while each computes with those that it has.

Liu et al. 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context" (arXiv:2310.01889). Everything here
runs on one device of the axis, inside a `shard_map`. A *shift* of t means that a device holds the keys of the device t
places before it; only shifts at which some device sees something take place, and one that not all need is skipped by the
others. What moves next is sent before the kernel of the present shift starts, so that it can move meanwhile.
"""

import dataclasses
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

SHARDED = ("q", "kv", "rows")
"""The dimensions of operands that lie on the axis. Columns of a matrix of scores are all there, on each device."""

_OF_KEYS = ("kv_ids", "kv_positions")


def forward(placement: Placement, layout: str, attend: Callable, arrays: tuple[Array, ...], operands: Operands):
    """This device's output, lse and, where asked for, largest scores; `attend(arrays, operands)` is one device's forward."""
    query, key, value = arrays
    moving = (key, value, _metadata_of_keys(operands))
    shifts, visible = _shifts(placement), _visible(placement, operands)
    partial = dataclasses.replace(operands, sinks=None, out_dtype=wide_dtype(query))
    found = None
    for number, shift in enumerate(shifts):
        upcoming = moving
        if number + 1 < len(shifts):
            upcoming = _sent(placement, moving, shifts[number + 1] - shift)

        def hop(moving=moving, shift=shift):
            key, value, metadata = moving
            return attend((query, key, value), _of_hop(placement, partial, metadata, shift))

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
    moving = (key, value, _metadata_of_keys(operands))
    shifts, visible = _shifts(placement), _visible(placement, operands)
    partial = with_wide_bias(placement, operands, "rows", "columns")
    partial = dataclasses.replace(partial, sinks=None, out_dtype=wide_dtype(query))
    dquery, returning, dbias = None, None, None
    for number, shift in enumerate(shifts):
        upcoming = moving
        if number + 1 < len(shifts):
            upcoming = _sent(placement, moving, shifts[number + 1] - shift)

        def hop(moving=moving, shift=shift):
            key, value, metadata = moving
            return differentiate((query, key, value), _of_hop(placement, partial, metadata, shift), *rows)

        (dquery_part, *dkv), (dbias_part, _) = _where_visible(placement, visible, shift, hop, 0)
        dquery = dquery_part if dquery is None else dquery + dquery_part
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
    return grads, (whole_bias_gradient(placement, dbias, operands, "rows"), dsinks)


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
    segments, blocks = operands.segments, placement.summary_blocks
    assert segments is not None
    summaries = [
        block_summary(ids, positions, ids.shape[1] // blocks)
        for ids, positions in ((segments.q_ids, segments.q_positions), (segments.kv_ids, segments.kv_positions))
    ]
    kv_summaries = lax.all_gather(summaries[1], placement.axis, axis=2, tiled=True)
    seen, _ = visible_blocks(summaries[0], kv_summaries, operands.lower, operands.upper)
    return jnp.any(seen, axis=(0, 1)).reshape(placement.devices, blocks).any(axis=1)


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


def _metadata_of_keys(operands: Operands) -> dict[str, Array]:
    metadata = dict(kv_index=operands.kv_index)
    if operands.segments is not None:
        metadata |= {name: getattr(operands.segments, name) for name in _OF_KEYS}
    return {name: x for name, x in metadata.items() if x is not None}


def _of_hop(placement: Placement, operands: Operands, metadata: dict[str, Array], shift: int) -> Operands:
    """Operands for the keys that are here at a shift: what travelled with them, and their columns of what did not."""
    metadata = dict(metadata)
    changed: dict[str, Any] = dict(kv_index=metadata.pop("kv_index", None))
    if operands.segments is not None:
        changed["segments"] = dataclasses.replace(operands.segments, **metadata)
    operands = dataclasses.replace(operands, **changed)

    def columns(x, dimensions):
        if "columns" not in dimensions:
            return x
        axis = dimensions.index("columns")
        size = x.shape[axis] // placement.devices
        return lax.dynamic_slice_in_dim(x, _source(placement, shift) * size, size, axis)

    return map_operands(columns, operands)


def _with_columns(placement: Placement, dbias, part: Array, operands: Operands, shift: int) -> Array:
    """The bias' gradient with the part that the keys of a shift add to it."""
    assert operands.bias is not None
    if "columns" not in matrix_dimensions(operands.bias):
        return part if dbias is None else dbias + part
    if dbias is None:
        dbias = jnp.zeros((*part.shape[:3], operands.bias.shape[3]), part.dtype)
    return lax.dynamic_update_slice_in_dim(dbias, part, _source(placement, shift) * part.shape[3], 3)


def _merged(found, part, layout: str):
    out, lse = merge_parts(*found[:2], *part[:2], layout)
    return out, lse, *map(jnp.maximum, found[2:], part[2:])
