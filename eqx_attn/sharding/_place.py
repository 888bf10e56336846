"""A call with a context: what one device computes, the lengths made equal, and the placement decided."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array

from .._call import Call
from .._mask_function import FromFunction
from .._masks import And, BlockSparse, Causal, Dense, Mask, parts, PrefixLM, Segments, SlidingWindow
from .._operands import Operands
from .._vjp import attend, Learned
from ._all_to_all import head_repeats
from ._context import ContextParallel, mesh_of, Placement
from ._dimensions import array_dimensions, Dimensions, map_operands, matrix_dimensions
from ._order import Order
from ._over_axis import resharded_along


@dataclasses.dataclass(frozen=True)
class Spread:
    """The context of a call and the mesh that has its axis."""

    context: ContextParallel
    mesh: Mesh | AbstractMesh

    @classmethod
    def of(cls, context: ContextParallel | None, arrays: Sequence[Array]) -> "Spread | None":
        """Raises ValueError where a context's axis is not there."""
        return None if context is None else cls(context, mesh_of(context, *arrays))

    @property
    def order(self) -> Order:
        """That of the tokens of the call's arrays."""
        return self.context.order_on(self.mesh)

    def check(self, implementation: str | None, sizes: Any) -> None:
        """Raises ValueError where the sequences cannot be spread as the context says."""
        context, mesh, order = self.context, self.mesh, self.order
        if implementation == "reference":
            raise ValueError(
                f"implementation='reference' with context={context}: the reference computes all scores in one place; use 'xla', "
                "or leave the context out"
            )
        axes = (mesh.explicit_axes, mesh.auto_axes)
        explicit, auto = (", ".join(name for name in of if mesh.shape[name] > 1) for of in axes)
        if explicit and auto:
            raise ValueError(
                f"context={context} on a mesh of both explicit axes, {explicit}, and auto ones, {auto}: make all of them one "
                "type, with axis_types=(jax.sharding.AxisType.Explicit,) * axes"
            )
        if context.strategy == "all_to_all" and sizes.q_heads % order.devices:
            raise ValueError(
                f"strategy='all_to_all' gives each of the {order.devices} devices of axis {context.axis!r} an equal number of "
                f"heads, and there are {sizes.q_heads} query heads: use strategy='ring' or 'all_gather'"
            )
        for seq in (sizes.q_seq, sizes.kv_seq):
            order.check(seq)

    def mask(self, mask: Mask) -> Mask:
        """`mask` with ids, positions and prefixes that no type says to be sharded along the sequence: a few bytes a token."""
        if self.context.axis not in self.mesh.explicit_axes:
            return mask
        if isinstance(mask, And):
            return And(tuple(map(self.mask, mask.masks)))
        return jax.tree.map(self._whole, mask) if isinstance(mask, Segments | PrefixLM) else mask

    def _whole(self, x: Array) -> Array:
        return resharded_along(self.mesh, self.context.axis, PartitionSpec(*(None,) * x.ndim), x)

    def sizes_on_device(self, sizes: Any) -> Any:
        """The sizes of what one device computes at a time."""
        order, strategy = self.order, self.context.strategy
        devices, q_seq, kv_seq = order.devices, order.padded(sizes.q_seq), order.padded(sizes.kv_seq)
        if strategy == "all_to_all":
            kv_heads = sizes.kv_heads * head_repeats(sizes.kv_heads, devices) // devices
            return dataclasses.replace(
                sizes, q_seq=q_seq, kv_seq=kv_seq, q_heads=sizes.q_heads // devices, kv_heads=kv_heads
            )
        if strategy == "ring":
            kv_seq //= devices
        return dataclasses.replace(sizes, q_seq=q_seq // devices, kv_seq=kv_seq)

    @property
    def merges_sinks(self) -> bool:
        """Whether kernels do not see sinks, which count once in a row and not in each hop."""
        return self.context.strategy == "ring"

    def attend(self, mask: Mask, call: Call, arrays, operands: Operands, learned: Learned) -> tuple[Array, ...]:
        """`attend` of global arrays; the mask is that of the operands."""
        order, dimensions = self.order, array_dimensions(call.layout)
        lengths = {
            name: x.shape[names.index(name)] for name, x, names in zip(("q", "kv"), arrays, dimensions, strict=False)
        }
        padded = {name: order.padded(length) for name, length in lengths.items()}
        pad = functools.partial(_padded, lengths, padded)
        arrays = tuple(map(pad, arrays, dimensions))
        everything = dataclasses.replace(
            operands, bias=learned.bias, sinks=learned.sinks, score_arrays=learned.score_arrays
        )
        everything = map_operands(pad, _dealt_blocks(everything, order, padded))
        learned = Learned(everything.bias, everything.sinks, everything.score_arrays)
        operands = dataclasses.replace(everything, bias=None, sinks=None, score_arrays=())
        placement = self._placement(mask, operands, learned, padded)
        out, *rows = attend(dataclasses.replace(call, placement=placement), arrays, operands, learned)
        if padded == lengths:
            return out, *rows
        if self.context.axis in self.mesh.explicit_axes:  # a part that does not divide has no type on the axis
            out, *rows = map(self._whole, (out, *rows))
        out = jax.lax.slice_in_dim(out, 0, lengths["q"], axis=dimensions[0].index("q"))
        return out, *(jax.lax.slice_in_dim(x, 0, lengths["q"], axis=2) for x in rows)

    def _placement(self, mask: Mask, operands: Operands, learned: Learned, padded: dict[str, int]) -> Placement:
        order, seen = self.order, None
        if _positions_decide(mask):
            visible = order.visible(padded["q"], padded["kv"], operands.lower, operands.upper)
            seen = tuple(map(tuple, visible.tolist()))
        return Placement(
            axis=self.context.axis,
            order=order,
            strategy=self.context.strategy,
            mesh=self.mesh,
            seen=seen,
            bias_dimensions=() if learned.bias is None else matrix_dimensions(learned.bias),
        )


def _positions_decide(mask: Mask) -> bool:
    """Whether nothing but positions, which are known while tracing, decides which devices see each other's keys."""
    return all(isinstance(part, Causal | SlidingWindow | Dense | BlockSparse | FromFunction) for part in parts(mask))


def _padded(lengths: dict[str, int], padded: dict[str, int], x: Array, names: Dimensions) -> Array:
    """`x` with padding tokens at the end: ids below 1, which differ between queries and keys, and zeros elsewhere.

    Indices, which have no axis but that of tokens, are 0: functions may read arrays there.
    """
    tokens = dict(q="q", rows="q", kv="kv", columns="kv")
    widths = [(0, 0)] * x.ndim
    for axis, name in enumerate(names):
        token = tokens.get(name or "")
        if token is not None and x.shape[axis] == lengths[token]:
            widths[axis] = (0, padded[token] - lengths[token])
    if not any(after for _, after in widths):
        return x
    is_ids = jnp.issubdtype(x.dtype, jnp.integer) and x.ndim > 1
    return jnp.pad(x, widths, constant_values=(-1 if "q" in names else -2) if is_ids else 0)


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
