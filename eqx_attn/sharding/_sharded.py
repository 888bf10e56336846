"""Both directions of a call whose sequences are spread over a mesh axis: a `shard_map` over that axis around a strategy."""

import functools
from collections.abc import Callable

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from .._operands import Operands
from . import _all_gather, _all_to_all, _ring
from ._context import Placement
from ._dimensions import array_dimensions, Dimensions, map_operands, ROWS

_STRATEGIES = dict(ring=_ring, all_gather=_all_gather, all_to_all=_all_to_all)


def forward(
    placement: Placement, layout: str, attend: Callable, arrays: tuple[Array, ...], operands: Operands
) -> tuple[Array, ...]:
    """Output, lse and, where asked for, largest scores of global arrays; `attend` is the forward of one device's share."""
    specs = _Specs(placement, layout)
    rows = (specs.rows,) * (2 if operands.max_logit else 1)
    body = functools.partial(_STRATEGIES[placement.strategy].forward, placement, layout, attend)
    return specs.map(body, (specs.arrays, specs.operands(operands)), (specs.arrays[0], *rows), arrays, operands)


def backward(
    placement: Placement,
    layout: str,
    differentiate: Callable,
    arrays: tuple[Array, ...],
    operands: Operands,
    out: Array,
    lse: Array,
    dout: Array,
    dlse: Array,
):
    """Gradients of global arrays, and those of bias and sinks; `differentiate` is the backward of one device's share."""
    specs = _Specs(placement, layout)
    of_operands = specs.operands(operands)
    of_out, of_rows = specs.arrays[0], specs.rows
    body = functools.partial(_STRATEGIES[placement.strategy].backward, placement, layout, differentiate)
    dbias = of_operands.bias if operands.bias_gradient else None
    grads, learned = specs.map(
        body,
        (specs.arrays, of_operands, of_out, of_rows, of_out, of_rows),
        (specs.arrays, (dbias, of_operands.sinks)),
        *(arrays, operands, out, lse, dout, dlse),
    )
    # A gradient has its array's type, which has a sharding where axes are explicit.
    like = functools.partial(_typed_like, placement.mesh)
    dbias, dsinks = (
        None if x is None else like(x, getattr(operands, name)) for x, name in zip(learned, _LEARNED, strict=True)
    )
    return tuple(map(like, grads, arrays)), (dbias, dsinks)


_LEARNED = ("bias", "sinks")


class _Specs:
    """Which axes of a call's arrays lie on the axis of a placement."""

    def __init__(self, placement: Placement, layout: str):
        self._placement = placement
        self.arrays = tuple(self._of(names, ("q", "kv")) for names in array_dimensions(layout))
        self.rows = self._of(ROWS, ("q",))

    def operands(self, operands: Operands) -> Operands:
        sharded = _STRATEGIES[self._placement.strategy].SHARDED
        return map_operands(lambda _, names: self._of(names, sharded), operands)

    def _of(self, names: Dimensions, sharded: tuple[str, ...]) -> PartitionSpec:
        return PartitionSpec(*(self._placement.axis if name in sharded else None for name in names))

    def map(self, body: Callable, in_specs, out_specs, *arguments):
        return map_over_axis(self._placement.mesh, self._placement.axis, body, in_specs, out_specs, *arguments)


def map_over_axis(mesh, axis: str, body: Callable, in_specs, out_specs, *arguments):
    """`jax.shard_map` over one axis of a mesh: arguments are first sharded along it as the specs say."""
    if axis in mesh.explicit_axes:
        arguments = jax.tree.map(functools.partial(resharded, mesh, axis), in_specs, arguments)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names={axis}, check_vma=False)
    return mapped(*arguments)


def _typed_like(mesh, x: Array, like: Array) -> Array:
    if not mesh.explicit_axes or jax.typeof(x).sharding == jax.typeof(like).sharding:
        return x
    return jax.reshard(x, NamedSharding(mesh, jax.typeof(like).sharding.spec))


def resharded(mesh, axis: str, spec: PartitionSpec, x: Array) -> Array:
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
