"""What `jax.shard_map` with `check_vma=True` knows of arrays: over which manual axes their values vary."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from jaxtyping import Array

from ._partition_axes import axes_of_type


def varying_like(inputs: Iterable[Array], results: Sequence[Array]) -> list[Array]:
    """`results`, typed as varying over all manual axes over which some input does."""
    over = frozenset().union(*(_varying(x) for x in inputs))
    if not over:
        return list(results)
    return [lax.pcast(x, tuple(sorted(over - _varying(x))), to="varying") for x in results]


def alike_varying(arguments: Any) -> Any:
    """A pytree whose arrays are all typed as varying over the manual axes over which some are; differentiable.

    So the gradient of one that does not vary is summed over them by JAX itself.
    """
    leaves, structure = jax.tree.flatten(arguments)
    return jax.tree.unflatten(structure, varying_like(leaves, leaves))


def _varying(x: Array) -> frozenset:
    return jax.typeof(x).manual_axis_type.varying


def checks_varying(mesh: AbstractMesh) -> bool:
    """Whether this is traced inside a shard_map with check_vma=True."""
    manual = axes_of_type(mesh, AxisType.Manual)
    return bool(manual) and bool(_varying(lax.pcast(jnp.float32(0), manual[:1], to="varying")))


def unchecked(mesh: AbstractMesh, function: Callable, leaves: Sequence[Array]) -> list[Array]:
    """`function(*leaves)` without the bookkeeping of a surrounding shard_map, of which loops and kernels know nothing.

    Jitted, since outside of jit a shard_map with no axes left to take is not served.
    """
    manual = frozenset(axes_of_type(mesh, AxisType.Manual))
    specs = tuple(PartitionSpec() for _ in leaves)
    inner = jax.shard_map(function, in_specs=specs, out_specs=PartitionSpec(), axis_names=manual, check_vma=False)
    return jax.jit(inner)(*leaves)
