"""A call with a context: what one device computes, the lengths made equal, and the placement decided."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from .._masks import And, BlockSparse, Causal, Dense, Mask, parts, PrefixLM, Segments, SlidingWindow
from .._operands import Operands
from .._vjp import attend, Learned
from ._all_to_all import head_repeats
from ._context import ContextParallel, Placement
from ._dimensions import array_dimensions, Dimensions, map_operands, matrix_dimensions
from ._order import Order
from ._over_axis import resharded_along


def check_context(options: Any, mesh, sizes: Any) -> None:
    """Raises ValueError where the sequences cannot be spread as the context says."""
    context: ContextParallel = options.context
    order = context.order_on(mesh)
    if options.implementation == "reference":
        raise ValueError(
            f"implementation='reference' with context={context}: the reference computes all scores in one place; use 'xla', or "
            "leave the context out"
        )
    sizes_of_axes = dict(mesh.shape)
    explicit, auto = ([name for name in of if sizes_of_axes[name] > 1] for of in (mesh.explicit_axes, mesh.auto_axes))
    if explicit and auto:
        raise ValueError(
            f"context={context} on a mesh of both explicit axes, {', '.join(explicit)}, and auto ones, {', '.join(auto)}: make all "
            "of them one type, with axis_types=(jax.sharding.AxisType.Explicit,) * axes"
        )
    if context.strategy == "all_to_all" and sizes.q_heads % order.devices:
        raise ValueError(
            f"strategy='all_to_all' gives each of the {order.devices} devices of axis {context.axis!r} an equal number of heads, "
            f"and there are {sizes.q_heads} query heads: use strategy='ring' or 'all_gather'"
        )
    for seq in (sizes.q_seq, sizes.kv_seq):
        order.check(seq)


def whole_metadata(context: ContextParallel, mesh, mask: Mask) -> Mask:
    """`mask` with ids, positions and prefixes that no type says to be sharded along the sequence: a few bytes a token."""
    if context.axis not in mesh.explicit_axes:
        return mask
    if isinstance(mask, And):
        return And(tuple(whole_metadata(context, mesh, part) for part in mask.masks))
    if not isinstance(mask, Segments | PrefixLM):
        return mask
    return jax.tree.map(lambda x: resharded_along(mesh, context.axis, PartitionSpec(*(None,) * x.ndim), x), mask)


def merges_sinks(context: ContextParallel | None) -> bool:
    """Whether kernels do not see sinks, which count once in a row and not in each hop."""
    return context is not None and context.strategy == "ring"


def sizes_on_device(strategy: str, order: Order, sizes: Any) -> Any:
    """The sizes of what one device computes at a time."""
    devices, q_seq, kv_seq = order.devices, order.padded(sizes.q_seq), order.padded(sizes.kv_seq)
    if strategy == "all_to_all":
        kv_heads = sizes.kv_heads * head_repeats(sizes.kv_heads, devices) // devices
        return dataclasses.replace(
            sizes, q_seq=q_seq, kv_seq=kv_seq, q_heads=sizes.q_heads // devices, kv_heads=kv_heads
        )
    if strategy == "ring":
        kv_seq //= devices
    return dataclasses.replace(sizes, q_seq=q_seq // devices, kv_seq=kv_seq)


def attend_placed(options: Any, mesh, call: Any, arrays, operands: Operands, learned: Learned) -> tuple[Array, ...]:
    """`attend` of global arrays whose sequences are spread over the axis of the options' context."""
    context: ContextParallel = options.context
    order = context.order_on(mesh)
    dimensions = array_dimensions(call.layout)
    lengths = {
        name: x.shape[names.index(name)] for name, x, names in zip(("q", "kv"), arrays, dimensions, strict=False)
    }
    padded = {name: order.padded(length) for name, length in lengths.items()}
    pad = functools.partial(_padded, lengths, padded)
    arrays = tuple(map(pad, arrays, dimensions))
    everything = dataclasses.replace(operands, bias=learned.bias, sinks=learned.sinks)
    everything = map_operands(pad, _dealt_blocks(everything, order, padded))
    learned = Learned(everything.bias, everything.sinks)
    operands = dataclasses.replace(everything, bias=None, sinks=None)
    seen = None
    if _positions_decide(options.mask):
        visible = order.visible(padded["q"], padded["kv"], operands.lower, operands.upper)
        seen = tuple(map(tuple, visible.tolist()))
    placement = Placement(
        context.axis,
        order.devices,
        context.strategy,
        mesh,
        order.summary_blocks(),
        seen,
        () if learned.bias is None else matrix_dimensions(learned.bias),
    )
    out, *rows = attend(dataclasses.replace(call, placement=placement), arrays, operands, learned)
    if padded == lengths:
        return out, *rows
    if context.axis in mesh.explicit_axes:  # a part of a sequence that does not divide has no type on the axis
        none = PartitionSpec(*(None,) * 4)
        out, *rows = (resharded_along(mesh, context.axis, PartitionSpec(*none[: x.ndim]), x) for x in (out, *rows))
    out = jax.lax.slice_in_dim(out, 0, lengths["q"], axis=dimensions[0].index("q"))
    return out, *(jax.lax.slice_in_dim(x, 0, lengths["q"], axis=2) for x in rows)


def _positions_decide(mask: Mask) -> bool:
    """Whether nothing but positions, which are known while tracing, decides which devices see each other's keys."""
    return all(isinstance(part, Causal | SlidingWindow | Dense | BlockSparse) for part in parts(mask))


def _padded(lengths: dict[str, int], padded: dict[str, int], x: Array, names: Dimensions) -> Array:
    """`x` with padding tokens at the end: ids below 1, which differ between queries and keys, and zeros elsewhere."""
    tokens = dict(q="q", rows="q", kv="kv", columns="kv")
    widths = [(0, 0)] * x.ndim
    for axis, name in enumerate(names):
        token = tokens.get(name or "")
        if token is not None and x.shape[axis] == lengths[token]:
            widths[axis] = (0, padded[token] - lengths[token])
    if not any(after for _, after in widths):
        return x
    is_integer = jnp.issubdtype(x.dtype, jnp.integer)
    return jnp.pad(x, widths, constant_values=(-1 if "q" in names else -2) if is_integer else 0)


def _dealt_blocks(operands: Operands, order: Order, padded: dict[str, int]) -> Operands:
    """A block map's rows and columns in the order of the arrays."""
    blocks = operands.blocks
    if blocks is None:
        return operands
    seen = blocks.seen
    for token, size, axis in (("q", blocks.rows, 2), ("kv", blocks.columns, 3)):
        run = order.run(padded[token])
        if run % size:
            raise ValueError(
                f"BlockSparse has blocks of {size} {'queries' if token == 'q' else 'keys'}, and order={order.name!r} over "
                f"{order.devices} devices divides them: it keeps {run} neighbours together, which is no multiple of {size}; "
                "use smaller blocks" + (", or a stripe that is a multiple of them" if order.name == "striped" else "")
            )
        widths = [(0, 0)] * 4
        widths[axis] = (0, padded[token] // size - seen.shape[axis])
        seen = jnp.pad(seen, widths)
        if order.name != "contiguous":
            seen = jnp.take(seen, order.positions(padded[token])[::size] // size, axis=axis)
    return dataclasses.replace(operands, blocks=dataclasses.replace(blocks, seen=seen))
