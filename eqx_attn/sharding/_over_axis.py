"""`jax.shard_map` over one axis of a mesh, whatever the types of the others."""

import functools
from collections.abc import Callable

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array


def map_over_axis(mesh, axis: str, body: Callable, in_specs, out_specs, *arguments):
    """`jax.shard_map` over one axis of a mesh: arguments are first sharded along it as the specs say."""
    if axis in mesh.explicit_axes:
        arguments = jax.tree.map(functools.partial(resharded_along, mesh, axis), in_specs, arguments)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names={axis}, check_vma=False)
    return mapped(*arguments)


def resharded_along(mesh, axis: str, spec: PartitionSpec, x: Array) -> Array:
    """`x` on the axis as `spec` says, and on all other axes as it was."""
    present = jax.typeof(x).sharding.spec
    present = (*present, *(None,) * (x.ndim - len(present)))
    wanted = PartitionSpec(*(_moved(axis, old, new) for old, new in zip(present, spec, strict=True)))
    return x if PartitionSpec(*present) == wanted else jax.reshard(x, NamedSharding(mesh, wanted))


def _moved(axis: str, present, wanted):
    others = [name for name in (present if isinstance(present, tuple) else (present,)) if name not in (None, axis)]
    if wanted is not None:
        others.append(axis)
    return others[0] if len(others) == 1 else tuple(others) or None
