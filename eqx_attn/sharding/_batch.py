"""What a call does with sharded arrays before it comes to `attend`: checks, and one batch axis out of several."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jaxtyping import Array

from .._mask_function import FromFunction
from .._masks import And, Mask, PrefixLM, Segments
from ._context import ContextParallel
from ._partition import array_names
from ._partition_axes import axes_of_type, divide, mesh_of, resharded, spec_of, typed_entries
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
        batch = ("batch",) if x.ndim == 4 else tuple(f"batch{i}" for i in range(x.ndim - 3))
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


def on_mesh(arrays: Sequence[Array]) -> bool:
    """Whether the types of arrays, or the context, say that there are several devices."""
    return mesh_of(arrays).size > 1


def split_batch(arguments: tuple[Mask, Array | None, Array | None, Array | None], query: Array) -> tuple[Any, Any]:
    """Mask, bias, dropout's seeds and the examples' numbers, and which axis of each array to map to map the first batch axis.

    What has the axis is sharded along it as `query` is.
    """
    mesh, count, first = mesh_of([query]), query.ndim - 3, typed_entries(query)[0]
    explicit = axes_of_type(mesh, AxisType.Explicit)

    def split(x: Array, trailing: int):
        if x.ndim - trailing < count:
            return x, None
        if x.shape[0] == 1 != query.shape[0]:
            return x[0], None
        return resharded(mesh, x, spec_of((first, *typed_entries(x)[1:]))) if explicit else x, 0

    mask, bias, seeds, numbers = arguments
    others = (bias if bias is None else 3, seeds if seeds is None else 1, numbers if numbers is None else 0)
    trailing = jax.tree.leaves((_trailing(mask), others))
    leaves, structure = jax.tree.flatten(arguments)
    split_leaves = [split(x, n) for x, n in zip(leaves, trailing, strict=True)]
    values, axes = ([x[i] for x in split_leaves] for i in range(2))
    return jax.tree.unflatten(structure, values), jax.tree.unflatten(structure, axes)


def _trailing(mask: Mask) -> Any:
    """For each array of a mask, in order, how many axes it has besides those of the batch."""
    if isinstance(mask, And):
        return [_trailing(part) for part in mask.masks]
    if isinstance(mask, PrefixLM):
        return 1 if mask.prefix.dtype == jnp.bool_ else 0
    if isinstance(mask, FromFunction):  # its arrays have no batch axes
        return [x.ndim for x in mask.arrays]
    count = 1 if isinstance(mask, Segments) else 3
    return [count for _ in jax.tree.leaves(mask)]
