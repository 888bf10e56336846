"""Partial results that are still to be summed are in float32, or float64 for float64 arrays."""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .._operands import Operands
from ._context import Placement


def wide_dtype(x: Array) -> str:
    """The dtype of partial results."""
    return "float64" if x.dtype == jnp.float64 else "float32"


def with_wide_bias(placement: Placement, operands: Operands, *summed: str) -> Operands:
    """A bias that has 1 for one of these dimensions in float32: its gradient, in the same dtype, is a sum of parts."""
    bias = operands.bias
    if bias is None or not operands.bias_gradient or all(name in placement.bias_dimensions for name in summed):
        return operands
    return dataclasses.replace(operands, bias=bias.astype(wide_dtype(bias)))


def whole_bias_gradient(placement: Placement, dbias: Array | None, operands: Operands, divided: str) -> Array | None:
    """In the bias' dtype; summed over the axis, along which `divided` lies, where the bias has 1 for that dimension."""
    if dbias is None or operands.bias is None:
        return None
    whole: Array = dbias if divided in placement.bias_dimensions else lax.psum(dbias, placement.axis)
    return whole.astype(operands.bias.dtype)
