"""The partitioning step of a call: each device computes its share of the batch and of the heads.

Both directions of `_vjp` pass through it, inside their batching rule and around the dispatch on the platform. Where the
arrays' types say how they are sharded (explicit mesh axes) it is a `jax.shard_map`. Where that is only found when a
program is compiled (auto axes) it is `_partition_auto`'s custom partitioning. Inside a user's own `jax.shard_map` there
is nothing left to share out, but kernels are kept from its bookkeeping of what varies over which axes.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec
from jaxtyping import Array

from .._call import Call
from .._context import interpreting
from .._operands import Operands
from .._resolve import current_platforms, warn_once
from ._context import Placement
from ._fold import fold, Levels, mapped_names, unfold
from ._partition_auto import partition_when_compiled
from ._partition_axes import Axes, axes_of_type, divide, Division, mesh_of, resharded, spec_of, typed_entries, WHOLE
from ._partition_dims import (
    array_dims,
    Dims,
    leaves_of,
    operand_dims,
    out_dims,
    ROWS,
    shape_without,
)
from ._placed_dims import has_context, placed_array_dims, placed_operand_dims, with_context, without_context
from ._strategies import STRATEGIES
from ._varying import checks_varying, unchecked, varying_like


@dataclasses.dataclass(frozen=True)
class Direction:
    """One direction of a call: `function(arrays, operands, *others)` on one device, for arrays without mapped axes.

    `backward` says which of the two it is: then `others` are out, lse, dout and dlse, and the results gradients.
    """

    call: Call
    function: Callable
    backward: bool

    def __call__(self, levels: Levels, arguments: tuple) -> Any:
        """The results of global arrays, under all `jax.vmap` of `levels`."""
        return _Share(self, levels, arguments).compute()

    def strategy(self, arrays: tuple[Array, ...], operands: Operands, *others: Array) -> Any:
        """The results on one device of the axis of the call's placement, inside a shard_map over it."""
        placement = self.call.placement
        assert placement is not None
        module = STRATEGIES[placement.strategy]
        run = module.backward if self.backward else module.forward
        return run(placement, self.call.layout, self.function, arrays, operands, *others)


class _Share:
    """One traced call: its flattened arguments, and the dimensions of arguments and results."""

    def __init__(self, direction: Direction, levels: Levels, arguments: tuple):
        self.direction, self.levels, self.placement = direction, levels, direction.call.placement
        self.leaves, self.structure = jax.tree.flatten(arguments)
        shapes = [shape_without(x, sum(level.mapped[i] for level in levels)) for i, x in enumerate(self.leaves)]
        arrays, operands, *_ = jax.tree.unflatten(self.structure, shapes)
        layout, backward = direction.call.layout, direction.backward
        self.layout, self.count = layout, len(arrays)
        placed = functools.partial(placed_array_dims, self.placement)
        of_arrays, out, rows = tuple(map(placed, array_dims(layout))), placed(out_dims(layout)), placed(ROWS)
        of_operands = placed_operand_dims(self.placement, operand_dims(operands))
        self.base = leaves_of((of_arrays, of_operands, *((out, rows, out, rows) if backward else ())))
        self.dims = [dims.behind(mapped_names(levels, i)) for i, dims in enumerate(self.base)]
        numbers = jax.tree.unflatten(self.structure, range(len(self.leaves)))
        self.learned = _learned(numbers[1], backward)
        if backward:
            of_results = [*of_arrays, *(self.base[i] for i in self.learned)]
        else:
            of_results = [out, rows, *((rows,) if operands.max_logit else ())]
        self.results = [dims.behind(mapped_names(levels)) for dims in of_results]
        self.q_heads, self.kv_heads = _head_counts(layout, arrays, operands)

    def compute(self) -> Any:
        """The results, with all mapped axes in front, in the structure that the direction returns."""
        mesh = mesh_of(self.leaves)
        checks = checks_varying(mesh)
        if axes_of_type(mesh, AxisType.Explicit):
            results = self._shared_out(mesh)
        elif self.placement is not None and (
            axes_of_type(mesh, AxisType.Manual) or not _has_auto(self.placement.mesh, self.placement.axis)
        ):
            run = functools.partial(self._over_context, self.placement)
            results = unchecked(mesh, run, self.leaves) if checks else run(*self.leaves)
        elif _has_auto(mesh) and not axes_of_type(mesh, AxisType.Manual):
            results = partition_when_compiled(
                self.local, self.leaves, self.dims, self.results, self.q_heads, self.kv_heads, self.placement
            )
        else:
            if _has_auto(mesh):
                _warn_left_to_xla(self.direction.call, axes_of_type(mesh, AxisType.Auto))
            run = functools.partial(self.local, WHOLE)
            results = unchecked(mesh, run, self.leaves) if checks else run(*self.leaves)
        return self._in_structure(varying_like(self.leaves, results))

    def local(self, division: Division, *leaves: Array) -> list[Array]:
        """The results of one device's share, from its share of the flattened arguments."""
        sizes = [level.size // division.parts(f"mapped{i}") for i, level in enumerate(self.levels)]
        folded = [
            fold(self.levels, sizes, i, dims, x, i in self.learned)
            for i, (x, dims) in enumerate(zip(leaves, self.base, strict=True))
        ]
        arrays, operands, *others = jax.tree.unflatten(self.structure, folded)
        own = _OwnHeads(division, self.layout, self.q_heads, self.kv_heads) if division.of_heads else None
        if own is not None:
            arrays = (arrays[0], *(own.taken(x) for x in arrays[1:]))
        if self.direction.backward:
            results = self._local_gradients(division, own, arrays, operands, others)
        else:
            results = self._function(division, arrays, operands)
        return [unfold(sizes, x) for x in results]

    def _function(self, division: Division, *arguments) -> list[Array]:
        """The direction's function, or its strategy where tokens are divided: JAX traces the whole once for the shapes."""
        function = self.direction.strategy if has_context(division) else self.direction.function
        return jax.tree.leaves(function(*arguments))

    def _local_gradients(self, division, own, arrays, operands, others) -> list[Array]:
        """Gradients, of which those of shared arrays are summed over devices, in float32."""
        dtypes = [operands.out_dtype or x.dtype for x in arrays]
        dtypes += [x.dtype for x in _learned(operands, backward=True)]
        summed = [division.summed(self.dims[i]) for i in self.learned]
        if own is not None and operands.out_dtype is None:
            operands = dataclasses.replace(operands, out_dtype=_at_least_float32(arrays[0].dtype))
        if operands.bias_gradient and summed[0]:
            operands = dataclasses.replace(operands, bias=operands.bias.astype(_at_least_float32(operands.bias.dtype)))
        results = self._function(division, arrays, operands, *others)
        grads, learned = results[: self.count], results[self.count :]
        if own is not None:
            grads = [grads[0], *(lax.psum(own.put_back(x), division.of_heads) for x in grads[1:])]
        learned = [lax.psum(x, axes) if axes else x for x, axes in zip(learned, summed, strict=True)]
        return [x.astype(dtype) for x, dtype in zip((*grads, *learned), dtypes, strict=True)]

    def _shared_out(self, mesh: AbstractMesh) -> list[Array]:
        """A shard_map over all explicit axes, with specs from the arguments' types."""
        explicit = axes_of_type(mesh, AxisType.Explicit)
        found = [typed_entries(x) for x in self.leaves]
        division = self._division(found, dict(mesh.shape))
        in_specs = [division.spec(dims) for dims in self.dims]
        out_specs = [division.spec(dims) for dims in self.results]
        leaves = [resharded(mesh, x, spec) for x, spec in zip(self.leaves, in_specs, strict=True)]
        # Without names it is over all axes, but for those that a jax.vmap around this trace has taken.
        names = frozenset(explicit) if axes_of_type(mesh, AxisType.Auto) else frozenset()
        if names and _has_auto(mesh):
            _warn_left_to_xla(self.direction.call, axes_of_type(mesh, AxisType.Auto))
        results = jax.shard_map(
            functools.partial(self.local, division),
            mesh=mesh,
            in_specs=tuple(in_specs),
            out_specs=out_specs,
            axis_names=names,
            check_vma=False,
        )(*leaves)
        if not self.direction.backward:
            return results
        return [
            resharded(mesh, x, self._spec_of_gradient(division, i, found[i]))
            for x, i in zip(results, (*range(self.count), *self.learned), strict=True)
        ]

    def _spec_of_gradient(self, division: Division, leaf: int, found: tuple[Axes, ...]) -> PartitionSpec:
        """That of the argument, and all mapped axes in front."""
        mapped = division.spec(Dims(mapped_names(self.levels)))
        own = found[len(mapped_names(self.levels, leaf)) :]
        return PartitionSpec(*mapped, *spec_of(own))

    def _over_context(self, placement: Placement, *leaves: Array) -> list[Array]:
        """A shard_map over the context's axis, which is an auto one, and the only one."""
        division = with_context(placement, WHOLE)
        return jax.shard_map(
            functools.partial(self.local, division),
            mesh=placement.mesh,
            in_specs=tuple(division.spec(dims) for dims in self.dims),
            out_specs=[division.spec(dims) for dims in self.results],
            axis_names=frozenset((placement.axis,)),
            check_vma=False,
        )(*leaves)

    def _division(self, found: list[tuple[Axes, ...]], sizes: Mapping[str, int]) -> Division:
        """The division that the arguments' axes ask for. Of operands only their mapped axes count: they follow."""
        placement = self.placement
        context = None if placement is None else placement.axis
        arrays = {
            name: (self.dims[i], without_context(context, self.dims[i], found[i]))
            for i, name in enumerate(array_names(self.layout))
        }
        for i in range(self.count, len(self.leaves)):
            names = mapped_names(self.levels, i)
            if any(found[i][: len(names)]):
                arrays[f"operand {i - self.count}"] = (Dims(names), found[i][: len(names)])
        division = divide(arrays, sizes, self.q_heads, self.kv_heads)
        if placement is None or context not in axes_of_type(mesh_of(self.leaves), AxisType.Explicit):
            return division
        return with_context(placement, division)

    def _in_structure(self, results: list[Array]) -> Any:
        if not self.direction.backward:
            return tuple(results)
        others = iter(results[self.count :])
        _, operands, *_ = jax.tree.unflatten(self.structure, self.leaves)
        dbias = next(others) if operands.bias_gradient else None
        dsinks = next(others) if operands.sinks is not None else None
        dmods = tuple(next(others) if wanted else None for wanted in operands.mod_gradients)
        return tuple(results[: self.count]), (dbias, dsinks, dmods)


def _head_counts(layout: str, arrays, operands: Operands) -> tuple[int, int]:
    axis = 1 if layout == "bhsd" else 2
    if layout == "qkv":
        assert operands.heads_of_kv is not None
        return arrays[0].shape[axis] - 2 * operands.heads_of_kv, operands.heads_of_kv
    return arrays[0].shape[axis], arrays[1].shape[axis] // (2 if layout == "kv" else 1)


class _OwnHeads:
    """Which kv heads a device needs whose query heads are of one group: one of those that it holds."""

    def __init__(self, division: Division, layout: str, q_heads: int, kv_heads: int):
        self._axis = 1 if layout == "bhsd" else 2
        self._held = kv_heads // division.parts("kv_heads")
        self._place = lax.axis_index(division.of_heads) * self._held // division.size(division.of_heads)
        del q_heads

    def taken(self, x: Array) -> Array:
        """That head of a key or value."""
        return lax.dynamic_slice_in_dim(x, self._place, 1, self._axis)

    def put_back(self, x: Array) -> Array:
        """The gradient of that head, among zeros for the others."""
        if self._held == 1:
            return x
        shape = [self._held if axis == self._axis else size for axis, size in enumerate(x.shape)]
        return lax.dynamic_update_slice_in_dim(jnp.zeros(shape, x.dtype), x, self._place, self._axis)


def array_names(layout: str) -> tuple[str, ...]:
    """What the arrays of a layout are called."""
    return {"qkv": ("qkv",), "kv": ("query", "kv")}.get(layout, ("query", "key", "value"))


def aligned_cotangent(name: str, result: Array, cotangent: Any) -> Array:
    """The cotangent of a result, whose sharding is the law: zeros where there is none, or what the type leaves open.

    Raises ValueError where the type of the cotangent says another sharding.
    """
    if isinstance(cotangent, SymbolicZero):
        return jnp.zeros_like(result)
    specs = [spec_of(typed_entries(x)) for x in (result, cotangent)]
    if specs[0] != specs[1] and not jax.typeof(cotangent).sharding.mesh.empty:
        raise ValueError(
            f"attention's {name} is sharded as {specs[0]} and its cotangent as {specs[1]}: reshard what comes after the call, "
            f"for instance jax.reshard(cotangent, {specs[0]})"
        )
    return cotangent


def _warn_left_to_xla(call: Call, axes: Axes) -> None:
    """Warns where a kernel is served whole on auto axes, since custom partitioning does not work beside manual axes."""
    routes = dict(call.routes)
    kernels = [routes[platform] for platform in current_platforms() if platform in routes]
    if kernels or call.default.spec is not None:
        warn_once(
            f"eqx_attn.attention inside a jax.shard_map cannot share out the mesh axes {axes}, which are Auto: its kernels get "
            "whole arrays along them, gathered if need be; make these axes Explicit or manual too"
        )


def _has_auto(mesh: Mesh | AbstractMesh, *but: str) -> bool:
    """Whether shardings may be found later. Interpreted kernels are callbacks, which cannot be partitioned."""
    if interpreting():
        return False
    if mesh.empty:
        return jax.device_count() > 1
    return math.prod(mesh.shape[name] for name in axes_of_type(mesh, AxisType.Auto) if name not in but) > 1


def _at_least_float32(dtype) -> str:
    return "float64" if dtype == jnp.float64 else "float32"


def _learned(operands: Operands, backward: bool) -> list:
    """What has gradients besides the arrays."""
    if not backward:
        return []
    mods = [x for x, wanted in zip(operands.score_arrays, operands.mod_gradients, strict=False) if wanted]
    found = [operands.bias if operands.bias_gradient else None, operands.sinks, *mods]
    return [x for x in found if x is not None]
