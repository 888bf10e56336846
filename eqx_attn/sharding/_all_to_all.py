"""Heads for sequence: each device gets the whole sequence of some heads, and gives the results back.

Jacobs et al. 2023, "DeepSpeed Ulysses" (arXiv:2309.14509). Key heads that are fewer than devices are repeated first.
"""

import dataclasses
import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .._operands import Operands
from ._context import Placement
from ._wide import whole_bias_gradient, wide_dtype, with_wide_bias

SHARDED = ("heads",)
"""The dimensions of operands that lie on the axis."""


def forward(placement: Placement, layout: str, attend: Callable, arrays: tuple[Array, ...], operands: Operands):
    """This device's output, lse and, where asked for, largest scores; `attend(arrays, operands)` is one device's forward."""
    trade = _Trade(placement, layout)
    out, *rows = attend(trade.arrays(arrays), operands)
    return trade.heads_back(out), *(trade.rows_back(x) for x in rows)


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
    """Gradients as one device's `differentiate(arrays, operands, out, lse, dout, dlse)` gives them."""
    trade = _Trade(placement, layout)
    repeats = trade.repeats(arrays[1])
    wide = with_wide_bias(placement, operands, "heads")
    if repeats > 1:
        wide = dataclasses.replace(wide, out_dtype=wide_dtype(arrays[0]))
    (dquery, *dkv), (dbias, dsinks, dmods) = differentiate(
        trade.arrays(arrays), wide, trade.heads(out), trade.rows(lse), trade.heads(dout), trade.rows(dlse)
    )
    dquery, *dkv = (trade.heads_back(x) for x in (dquery, *dkv))
    dkv = (trade.summed(grad, repeats) for grad in dkv)
    grads = tuple(grad.astype(operands.out_dtype or x.dtype) for grad, x in zip((dquery, *dkv), arrays, strict=True))
    return grads, (whole_bias_gradient(placement, dbias, operands, "heads"), dsinks, lax.psum(dmods, placement.axis))


def head_repeats(kv_heads: int, devices: int) -> int:
    """How often each key head is there, so that all devices get as many, and those of their own query heads."""
    return devices // math.gcd(kv_heads, devices)


class _Trade:
    """The exchanges of one call."""

    def __init__(self, placement: Placement, layout: str):
        self._placement = placement
        self._seq, self._heads = (1, 2) if layout == "bshd" else (2, 1)

    def _exchange(self, x: Array, split: int, concat: int) -> Array:
        return lax.all_to_all(x, self._placement.axis, split, concat, tiled=True)

    def arrays(self, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        query, *others = arrays
        repeats = self.repeats(others[0])
        return self.heads(query), *(self.heads(jnp.repeat(x, repeats, self._heads)) for x in others)

    def heads(self, x: Array) -> Array:
        """Some heads of all tokens, from all heads of some."""
        return self._exchange(x, self._heads, self._seq)

    def heads_back(self, x: Array) -> Array:
        return self._exchange(x, self._seq, self._heads)

    def rows(self, x: Array) -> Array:
        return self._exchange(x, 1, 2)

    def rows_back(self, x: Array) -> Array:
        return self._exchange(x, 2, 1)

    def repeats(self, key: Array) -> int:
        return head_repeats(key.shape[self._heads], self._placement.devices)

    def summed(self, grad: Array, repeats: int) -> Array:
        """The gradient of heads that were repeated."""
        if repeats == 1:
            return grad
        axis = self._heads
        return grad.reshape(*grad.shape[:axis], -1, repeats, *grad.shape[axis + 1 :]).sum(axis + 1)
