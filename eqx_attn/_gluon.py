"""What kernels for Hopper are passed: arrays as blocks for the tensor memory accelerator, and how their programs are laid out."""

import jax
from jaxtyping import Array

from ._context import current_target
from ._triton_arguments import TensorDescriptor

_H200_MULTIPROCESSORS = 132
_KEPT_IN_CACHE = 32 * 2**20
"""Bytes of keys and values that may be in use at once: two thirds of the second cache of an H100 or H200."""


def tma_blocks(array: Array | jax.ShapeDtypeStruct, layout: str, rows: int) -> TensorDescriptor:
    """An array `[batch, seq, heads, dim]` or, in layout "bhsd", `[batch, heads, seq, dim]`, by blocks of `rows` tokens of one head.

    A kernel names a block by (batch, head, first row, 0), whatever the layout. Rows past the sequence read as zeros.
    """
    from triton.experimental.gluon import language as gl

    (batch, heads, seq, dim), strides = _by_head(array.shape, layout)
    return TensorDescriptor(
        array,
        block_shape=(1, 1, rows, dim),
        layout=gl.NVMMASharedLayout(128, 8 * array.dtype.itemsize, 4),
        shape=(batch, heads, seq, dim),
        strides=(*strides, 1),
    )


def _by_head(shape: tuple[int, ...], layout: str) -> tuple[tuple[int, int, int, int], tuple[int, int, int]]:
    """Batch, heads, seq and dim of an array, and how far apart its examples, heads and rows are."""
    batch, *middle, dim = shape
    if layout == "bhsd":
        heads, seq = middle
        return (batch, heads, seq, dim), (heads * seq * dim, seq * dim, dim)
    seq, heads = middle
    return (batch, heads, seq, dim), (seq * heads * dim, dim, heads * dim)


def tma_vector(array: Array, rows: int) -> TensorDescriptor:
    """A vector by blocks of `rows` numbers."""
    from triton.experimental.gluon import language as gl

    return TensorDescriptor(array, (rows,), gl.NVMMASharedLayout(0, 8 * array.dtype.itemsize, 1))


def strides_of(array: Array | jax.ShapeDtypeStruct, layout: str) -> tuple[int, int, int]:
    """How far apart in an array are examples, heads and rows."""
    batch_stride, head_stride, row_stride = _by_head(array.shape, layout)[1]
    return batch_stride, head_stride, row_stride


def head_group(kv_seq: int, dims: int, group: int, all_heads: int) -> int:
    """How many query heads are worked on together, so that their keys and values stay in the second cache.

    `dims` is the sum of both head dims, `group` the number of query heads that share a head of keys.
    """
    kept = _KEPT_IN_CACHE // (kv_seq * dims * 2)
    return max(1, min(16, kept * group, all_heads))


def multiprocessors() -> int:
    """Of the GPU that is compiled for: a program runs on each of them."""
    if current_target("cuda") is None:
        device = jax.local_devices()[0]
        if device.platform == "gpu":
            return int(getattr(device, "core_count", _H200_MULTIPROCESSORS))
    return _H200_MULTIPROCESSORS
