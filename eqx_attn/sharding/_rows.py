"""Functions of one example's tokens, on examples that are sharded."""

import functools
from collections.abc import Callable

import jax
from jax.sharding import AxisType
from jaxtyping import Array

from ._partition_axes import axes_of_type, mesh_of, resharded, spec_of, typed_entries
from ._varying import checks_varying, unchecked, varying_like


def by_example(function: Callable) -> Callable:
    """`function(*arrays, *integers)` with tokens on the last axis; on a mesh each device computes for its own examples.

    Sorts, scatters and gathers have no rule for explicit axes, nor do they need one: examples do not meet.
    """

    @functools.wraps(function)
    def on_mesh(*arguments) -> Array:
        arrays = [x for x in arguments if not isinstance(x, int)]
        integers = arguments[len(arrays) :]
        mesh = mesh_of(arrays)
        if checks_varying(mesh):
            (result,) = unchecked(mesh, lambda *leaves: [function(*leaves, *integers)], arrays)
            return varying_like(arrays, [result])[0]
        explicit = axes_of_type(mesh, AxisType.Explicit)
        leading = [typed_entries(x)[:-1] for x in arrays]
        if not explicit or not any(axes for found in leading for axes in found):
            return function(*arguments)
        spec = spec_of((*(max(of, key=len) for of in zip(*leading, strict=True)), ()))
        names = frozenset(explicit) if axes_of_type(mesh, AxisType.Auto) else frozenset()
        return jax.shard_map(
            lambda *leaves: function(*leaves, *integers),
            mesh=mesh,
            in_specs=(spec,) * len(arrays),
            out_specs=spec,
            axis_names=names,
            check_vma=False,
        )(*(resharded(mesh, x, spec) for x in arrays))

    return on_mesh
