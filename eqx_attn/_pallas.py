"""Small parts of the TPU kernels that say nothing about attention: block sizes, padding, products, precision."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from . import _dropout
from ._context import interpreting
from ._operands import SegmentOperands
from ._tuning_tpu import fit_block as fit_block, fit_chunk as fit_chunk, LANES as LANES

SAMPLE = 256
"""Of how many keys the maximum is taken that a query starts with in the forward."""

OVERFLOW = 2.0**100
"""Where the sum of a query's weights reaches this, their maximum is taken anew: float32 ends at 2.0**128."""


def interpret_params() -> pltpu.InterpretParams | bool:
    """The `interpret` argument of `pallas_call`: inside `eqx_attn.interpret()`, the interpreter at its strictest."""
    return pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True) if interpreting() else False


def matmul_precision(dtype) -> lax.Precision:
    """The precision of a kernel's products: highest for float32 where `jax_default_matmul_precision` asks for more."""
    wanted = jax.config.jax_default_matmul_precision
    more = wanted is not None and str(wanted).lower() not in ("default", "bfloat16", "fastest")
    return lax.Precision.HIGHEST if more and dtype == jnp.float32 else lax.Precision.DEFAULT


def pad_rows(x: Array, rows: int, fill: float) -> Array:
    """`x [..., seq]` as `[..., 1, rows]`: one value per row along the lanes, `fill` beyond the end."""
    padding = [(0, 0)] * (x.ndim - 1) + [(0, rows - x.shape[-1])]
    return jnp.pad(x, padding, constant_values=fill)[..., None, :]


def column(row: Array) -> Array:
    """In a kernel: `row [1, n]` of 32-bit values as `[n, 1]`, from lanes to sublanes."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T[:, :1]


def across_lanes(row: Array) -> Array:
    """In a kernel: `row [1, n]` of 32-bit values as `[n, 128]`, from lanes to sublanes, in all lanes the same."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def widen(x: Array, width: int) -> Array:
    """In a kernel: the result of `across_lanes`, or some rows of it, as `[n, width]`."""
    return x if width == LANES else jnp.tile(x, (1, width // LANES))


def zero_tail(x: Array, block: Array, seq: int) -> Array:
    """In a kernel: block number `block` of an array of `seq` rows, with 0 beyond the array's end.

    What lies there is unspecified, and even a weight of 0 would not keep a NaN out of a sum.
    """
    if seq % x.shape[0] == 0:
        return x
    row = block * x.shape[0] + lax.broadcasted_iota(jnp.int32, x.shape, 0)
    return jnp.where(row < seq, x, jnp.zeros_like(x))


def dot(a: Array, b: Array, axes: tuple[int, int], precision: lax.Precision) -> Array:
    """In a kernel: the product of two matrices, summed over axis `axes[0]` of `a` and `axes[1]` of `b`, in float32."""
    dimensions = (((axes[0],), (axes[1],)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def pad_segments(segments: SegmentOperands, q_rows: int, kv_rows: int) -> tuple[Array, ...]:
    """The ids and, if any, positions of queries and keys, `[batch, 1, rows]` each; padding ids stand past the end."""
    ids = pad_rows(segments.q_ids, q_rows, -1), pad_rows(segments.kv_ids, kv_rows, -2)
    if segments.q_positions is None or segments.kv_positions is None:
        return ids
    return *ids, pad_rows(segments.q_positions, q_rows, 0), pad_rows(segments.kv_positions, kv_rows, 0)


def tanh(x: Array) -> Array:
    """In a kernel: the hyperbolic tangent, off by a few units of 2**-24, which the hardware's own is not.

    Where exp2 overflows, the result is 1.
    """
    return 1.0 - 2.0 / (jnp.exp2(x * 2.8853900817779268) + 1.0)


def drawn(row_hashes: Array, column_hashes: Array, rate: float) -> Array:
    """In a kernel: which weights dropout keeps, from the hashes of keys `[block_kv, 1]` and of queries `[1, block_q]`.

    They are the uint32 of `_dropout` as int32, whose products have the same bits.
    """

    def unsigned(x):
        return lax.bitcast_convert_type(x, jnp.uint32)

    number = _dropout.number_of(unsigned(row_hashes), unsigned(column_hashes))
    return lax.bitcast_convert_type(number, jnp.int32) >= _dropout.threshold(rate)
