"""What a call does with sharded arrays before it comes to `attend`, which wants one batch axis: checks, and a fold of many."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType
from jaxtyping import Array

from .._masks import And, BlockSparse, Dense, Mask, PrefixLM, Segments
from ._context import ContextParallel
from ._partition import array_names
from ._partition_axes import Axes, axes_of_type, divide, mesh_of, resharded, spec_of, typed_entries
from ._partition_dims import array_dims, Dims
from ._placed_dims import without_context


def check_sharding(
    arrays: Sequence[Array], layout: str, q_heads: int, kv_heads: int, context: ContextParallel | None = None
) -> None:
    """Raises ValueError where the types of query, key and value say a sharding that no device can compute its share of."""
    mesh = mesh_of(arrays)
    if not axes_of_type(mesh, AxisType.Explicit):
        return
    found = {}
    for name, x, dims in zip(array_names(layout), arrays, array_dims(layout), strict=True):
        batch = tuple(f"batch{i}" for i in range(x.ndim - 3))
        named = Dims((*batch, *dims.names[1:]))
        found[name] = (named, without_context(None if context is None else context.axis, named, typed_entries(x)))
    divide(found, dict(mesh.shape), q_heads, kv_heads)


def check_packed_heads(name: str, packed: Array) -> None:
    """Raises ValueError where the type of an array `[..., heads, dim]` of several packed ones shards its heads."""
    *_, axes, _ = typed_entries(packed)
    if axes:
        raise ValueError(
            f"{name} of shape {packed.shape} is sharded as {spec_of(typed_entries(packed))}, along its heads: a shard of the "
            "packed array is not that of each array in it; give query, key and value apart to eqx_attn.attention, or shard "
            "the batch alone"
        )


@dataclasses.dataclass(frozen=True)
class BatchFold:
    """Several batch axes as one, where explicit mesh axes shard more than the first of them.

    Each device folds its own share, so that nothing moves: the examples of the folded axis lie in another order than by
    reshape. All arrays of a call are folded alike, and results unfolded.
    """

    mesh: AbstractMesh
    shape: tuple[int, ...]
    axes: tuple[Axes, ...]

    @classmethod
    def of(cls, query: Array) -> "BatchFold | None":
        """What a query's type asks for; None where its batch axes can be reshaped."""
        count = query.ndim - 3
        axes = typed_entries(query)[:count]
        return cls(mesh_of([query]), query.shape[:count], axes) if any(axes[1:]) else None

    @property
    def _names(self) -> frozenset:
        explicit = axes_of_type(self.mesh, AxisType.Explicit)
        return frozenset(explicit) if axes_of_type(self.mesh, AxisType.Auto) else frozenset()

    def fold(self, x: Array) -> Array:
        """`[*batch, ...]` with one batch axis; what is replicated along the batch is sharded first."""
        count, rest = len(self.shape), typed_entries(x)[len(self.shape) :]
        spec = spec_of((*self.axes, *rest))
        folded = spec_of((sum(self.axes, ()), *rest))
        return self._local(lambda y: y.reshape(math.prod(y.shape[:count]), *y.shape[count:]), x, spec, folded)

    def unfold(self, x: Array) -> Array:
        """The inverse of `fold`."""
        parts = [math.prod(self.mesh.shape[axis] for axis in of) for of in self.axes]
        local = [size // count for size, count in zip(self.shape, parts, strict=True)]
        rest = typed_entries(x)[1:]
        spec, unfolded = spec_of((sum(self.axes, ()), *rest)), spec_of((*self.axes, *rest))
        return self._local(lambda y: y.reshape(*local, *y.shape[1:]), x, spec, unfolded)

    def _local(self, function, x: Array, spec, out_spec) -> Array:
        x = resharded(self.mesh, x, spec)
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=(spec,), out_specs=out_spec, axis_names=self._names, check_vma=False
        )(x)

    def operand(self, x: Array | None, trailing: int) -> Array | None:
        """`fold` of an array whose axes before the last `trailing` broadcast to the batch; as it is where it has none."""
        if x is None or all(size == 1 for size in x.shape[: max(x.ndim - trailing, 0)]):
            return None if x is None else x.reshape(x.shape[max(x.ndim - trailing, 0) :])
        return self.fold(jnp.broadcast_to(x, (*self.shape, *x.shape[x.ndim - trailing :])))

    def mask(self, mask: Mask) -> Mask:
        """A mask whose arrays are folded."""
        match mask:
            case And():
                return And(tuple(self.mask(part) for part in mask.masks))
            case Segments():
                fold = functools.partial(self.operand, trailing=1)
                return jax.tree.map(fold, mask)
            case PrefixLM():
                trailing = 1 if mask.prefix.dtype == jnp.bool_ else 0
                return PrefixLM(self.operand(mask.prefix, trailing), mask.alignment)
            case BlockSparse():
                return BlockSparse(self.operand(mask.seen, 3), mask.block_size)
            case Dense():
                return Dense(self.operand(mask.visible, 3))
        return mask

    def options(self, options: Any) -> Any:
        """A call's options with mask and bias folded."""
        return dataclasses.replace(options, mask=self.mask(options.mask), bias=self.operand(options.bias, 3))
