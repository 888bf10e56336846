"""Each device gathers all keys and values for its own queries; the gradients of keys and values are summed and scattered."""

import dataclasses
from collections.abc import Callable

from jax import lax
from jaxtyping import Array

from .._operands import Operands
from ._context import Placement
from ._dimensions import array_dimensions
from ._wide import whole_bias_gradient, wide_dtype, with_wide_bias

SHARDED = ("q", "rows")
"""The dimensions of operands that lie on the axis."""


def forward(placement: Placement, layout: str, attend: Callable, arrays: tuple[Array, ...], operands: Operands):
    """This device's output, lse and, where asked for, largest scores; `attend(arrays, operands)` is one device's forward."""
    return attend(_gathered(placement, layout, arrays), operands)


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
    (dquery, *dkv), (dbias, dsinks) = differentiate(_gathered(placement, layout, arrays), wide, *rows)
    axis = _kv_axis(layout)
    dkv = (lax.psum_scatter(grad, placement.axis, scatter_dimension=axis, tiled=True) for grad in dkv)
    grads = tuple(grad.astype(operands.out_dtype or x.dtype) for grad, x in zip((dquery, *dkv), arrays, strict=True))
    dsinks = None if dsinks is None else lax.psum(dsinks, placement.axis)
    return grads, (whole_bias_gradient(placement, dbias, operands, "rows"), dsinks)


def _gathered(placement: Placement, layout: str, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    query, *others = arrays
    axis = _kv_axis(layout)
    return query, *(lax.all_gather(x, placement.axis, axis=axis, tiled=True) for x in others)


def _kv_axis(layout: str) -> int:
    return array_dimensions(layout)[1].index("kv")
