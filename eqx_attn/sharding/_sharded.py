"""Both directions of a call whose sequences are spread over a mesh axis: a `shard_map` over that axis around a strategy."""

import functools
from collections.abc import Callable

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from .._operands import Operands
from . import _ring
from ._context import Placement
from ._dimensions import array_dimensions, Dimensions, map_operands, ROWS

_STRATEGIES = dict(ring=_ring)


def forward(
    placement: Placement, layout: str, attend: Callable, arrays: tuple[Array, ...], operands: Operands
) -> tuple[Array, ...]:
    """Output, lse and, where asked for, largest scores of global arrays; `attend` is the forward of one device's share."""
    specs = _Specs(placement, layout)
    rows = (specs.of(ROWS),) * (2 if operands.max_logit else 1)
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
    of_out, of_rows = specs.arrays[0], specs.of(ROWS)
    body = functools.partial(_STRATEGIES[placement.strategy].backward, placement, layout, differentiate)
    dbias = of_operands.bias if operands.bias_gradient else None
    return specs.map(
        body,
        (specs.arrays, of_operands, of_out, of_rows, of_out, of_rows),
        (specs.arrays, (dbias, of_operands.sinks)),
        *(arrays, operands, out, lse, dout, dlse),
    )


class _Specs:
    """Which axes of a call's arrays lie on the axis of a placement."""

    def __init__(self, placement: Placement, layout: str):
        self._placement = placement
        self._sharded = _STRATEGIES[placement.strategy].SHARDED
        self.arrays = tuple(self.of(dimensions) for dimensions in array_dimensions(layout))

    def of(self, dimensions: Dimensions) -> PartitionSpec:
        axis = self._placement.axis
        return PartitionSpec(*(axis if name in self._sharded else None for name in dimensions))

    def operands(self, operands: Operands) -> Operands:
        return map_operands(lambda _, dimensions: self.of(dimensions), operands)

    def map(self, body: Callable, in_specs, out_specs, *arguments):
        axis, mesh = self._placement.axis, self._placement.mesh
        if axis in mesh.explicit_axes:
            arguments = jax.tree.map(functools.partial(_resharded, mesh, axis), in_specs, arguments)
        mapped = jax.shard_map(
            body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names={axis}, check_vma=False
        )
        return mapped(*arguments)


def _resharded(mesh, axis: str, spec: PartitionSpec, x: Array) -> Array:
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
