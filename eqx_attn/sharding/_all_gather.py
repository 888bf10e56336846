"""Each device gathers all keys and values for its own queries; the gradients of keys and values are summed and scattered.

Kernels visit a range of blocks of keys for a block of queries. In the order of devices such a range has holes, and its blocks
that need no mask lie apart. So where positions or ids decide what is seen, gathered keys are put into their original order.
"""

import dataclasses
from collections.abc import Callable

from jax import lax
from jaxtyping import Array

from .._operands import Operands
from ._context import Placement
from ._dimensions import array_dimensions, Dimensions, map_operands, matrix_dimensions
from ._gathered_order import to_dealt, to_original
from ._wide import whole_bias_gradient, wide_dtype, with_wide_bias

SHARDED = ("q", "rows")
"""The dimensions of operands that lie on the axis."""


def forward(placement: Placement, layout: str, attend: Callable, arrays: tuple[Array, ...], operands: Operands):
    """This device's output, lse and, where asked for, largest scores; `attend(arrays, operands)` is one device's forward."""
    return attend(*_gathered(placement, layout, arrays, operands))


def backward(
    placement: Placement,
    layout: str,
    differentiate: Callable,
    arrays: tuple[Array, ...],
    operands: Operands,
    *rows: Array,
):
    """Gradients as one device's `differentiate(arrays, operands, *rows)` gives them; `rows` are out, lse, dout, dlse."""
    # Gathered again rather than kept from the forward, for which XLA would otherwise see to it.
    arrays, rows = lax.optimization_barrier((arrays, rows))
    wide = dataclasses.replace(with_wide_bias(placement, operands, "rows"), out_dtype=wide_dtype(arrays[0]))
    gathered, wide = _gathered(placement, layout, arrays, wide)
    (dquery, *dkv), (dbias, dsinks, dmods) = differentiate(gathered, wide, *rows)
    axis = _kv_axis(layout)
    tokens = gathered[1].shape[axis]
    if _reorders(placement, operands):
        dkv = [to_dealt(placement.order, grad, axis, tokens) for grad in dkv]
        if dbias is not None and "columns" in matrix_dimensions(dbias):
            dbias = to_dealt(placement.order, dbias, 3, tokens)
    dkv = (lax.psum_scatter(grad, placement.axis, scatter_dimension=axis, tiled=True) for grad in dkv)
    grads = tuple(grad.astype(operands.out_dtype or x.dtype) for grad, x in zip((dquery, *dkv), arrays, strict=True))
    dsinks = None if dsinks is None else lax.psum(dsinks, placement.axis)
    return grads, (whole_bias_gradient(placement, dbias, operands, "rows"), dsinks, lax.psum(dmods, placement.axis))


def _gathered(
    placement: Placement, layout: str, arrays: tuple[Array, ...], operands: Operands
) -> tuple[tuple[Array, ...], Operands]:
    """All keys and values, and operands in the same order."""
    query, *others = arrays
    axis = _kv_axis(layout)
    others = [lax.all_gather(x, placement.axis, axis=axis, tiled=True) for x in others]
    if not _reorders(placement, operands):
        return (query, *others), operands
    tokens = others[0].shape[axis]

    def in_order(x: Array, names: Dimensions) -> Array:
        of_keys = [axis for axis, name in enumerate(names) if name in ("kv", "columns")]
        return to_original(placement.order, x, of_keys[0], tokens) if of_keys else x

    return (query, *(to_original(placement.order, x, axis, tokens) for x in others)), map_operands(in_order, operands)


def _reorders(placement: Placement, operands: Operands) -> bool:
    return operands.segments is not None and placement.order.name != "contiguous"


def _kv_axis(layout: str) -> int:
    return array_dimensions(layout)[1].index("kv")
