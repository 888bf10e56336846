"""From a mask to what the kernels compute with: a band of positions, segment metadata, a dense array."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool

from ._masks import Causal, Dense, Mask, parts, Segments, SlidingWindow
from ._operands import SegmentOperands
from ._segments import count_of_ids

UNBOUNDED = 2**30
"""Stands for a missing bound where the kernel of a window wants both."""

_QUERY_PADDING, _KEY_PADDING = -1, -2


@dataclasses.dataclass(frozen=True)
class MaskPlan:
    """A mask in the terms of `Operands`; `dense` broadcasts to `[batch, q_heads, q_seq, kv_seq]`."""

    lower: int | None
    upper: int | None
    segments: SegmentOperands | None
    dense: Bool[Array, "_ _ _ _"] | None


def plan_mask(mask: Mask, batch_shape: tuple[int, ...], q_heads: int, q_seq: int, kv_seq: int) -> MaskPlan:
    """The plan of `mask` for arrays of these sizes; arrays in it have one batch axis, the product of `batch_shape`."""
    pieces = parts(mask)
    segments = [piece for piece in pieces if isinstance(piece, Segments)]
    bands = [piece for piece in pieces if isinstance(piece, Causal | SlidingWindow)]
    if len(segments) > 1:
        raise ValueError(
            f"mask combines {len(segments)} Segments: give one Segments whose ids tell all groups apart "
            "(for instance first_ids * second_ids.max() + second_ids)"
        )
    shift = 0 if segments else kv_seq - q_seq
    lower, upper = _band(bands, shift)
    return MaskPlan(
        lower,
        upper,
        _plan_segments(segments[0], bands, batch_shape, q_seq, kv_seq) if segments else None,
        _plan_dense(
            [piece.visible for piece in pieces if isinstance(piece, Dense)], batch_shape, q_heads, q_seq, kv_seq
        ),
    )


def _band(bands: list[Causal | SlidingWindow], shift: int) -> tuple[int | None, int | None]:
    """The intersection of bands, `lower <= kv - q <= upper`; bottom-right ones are moved by `shift`."""
    lower, upper = None, None
    for band in bands:
        left, right = (None, 0) if isinstance(band, Causal) else (band.left, band.right)
        offset = shift if band.alignment == "bottom_right" else 0
        if left is not None:
            lower = offset - left if lower is None else max(lower, offset - left)
        if right is not None:
            upper = offset + right if upper is None else min(upper, offset + right)
    return lower, upper


def _plan_segments(
    segments: Segments, bands: list[Causal | SlidingWindow], batch_shape: tuple[int, ...], q_seq: int, kv_seq: int
) -> SegmentOperands:
    _check_ids("q_ids", segments.q_ids, "query", batch_shape, q_seq)
    _check_ids("kv_ids", segments.kv_ids, "key", batch_shape, kv_seq)
    q_ids = _flat(segments.q_ids, batch_shape)
    kv_ids = _flat(segments.kv_ids, batch_shape)
    q_ids = jnp.where(q_ids > 0, q_ids, _QUERY_PADDING)
    kv_ids = jnp.where(kv_ids > 0, kv_ids, _KEY_PADDING)
    if not bands:
        return SegmentOperands(q_ids, kv_ids, None, None)
    q_positions = _flat(segments.q_positions, batch_shape)
    kv_positions = _flat(segments.kv_positions, batch_shape)
    alignments = {band.alignment for band in bands}
    if "bottom_right" in alignments:
        if segments.explicit_positions:
            raise ValueError(
                'alignment="bottom_right" together with explicit positions of Segments: the positions already say how '
                'queries and keys are aligned; use alignment="top_left"'
            )
        if len(alignments) > 1:
            raise ValueError(
                "mask combines both alignments with Segments: use one alignment for all bands, or give the positions "
                "that you mean to Segments"
            )
        q_positions += count_of_ids(kv_ids, q_ids) - count_of_ids(q_ids, q_ids)
    return SegmentOperands(q_ids, kv_ids, q_positions, kv_positions)


def _plan_dense(
    arrays: list[Array], batch_shape: tuple[int, ...], q_heads: int, q_seq: int, kv_seq: int
) -> Array | None:
    if not arrays:
        return None
    full = (*batch_shape, q_heads, q_seq, kv_seq)
    for array in arrays:
        try:
            fits = jnp.broadcast_shapes(array.shape, full) == full
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(
                f"mask is a boolean array of shape {array.shape}, which does not broadcast to "
                f"[*batch, q_heads, q_seq, kv_seq] = {full}"
            )
    dense = arrays[0]
    for array in arrays[1:]:
        dense = dense & array
    dense = dense.reshape((1,) * (len(full) - dense.ndim) + dense.shape)
    if any(size != 1 for size in dense.shape[: len(batch_shape)]):
        dense = jnp.broadcast_to(dense, (*batch_shape, *dense.shape[len(batch_shape) :]))
        return dense.reshape(-1, *dense.shape[len(batch_shape) :])
    return dense.reshape(1, *dense.shape[len(batch_shape) :])


def _check_ids(name: str, ids: Array, of: str, batch_shape: tuple[int, ...], seq: int) -> None:
    if ids.shape[-1] != seq:
        hint = " (with kv_ids not given, q_ids serves the keys too: give kv_ids)" if of == "key" else ""
        raise ValueError(
            f"{name} of Segments has shape {ids.shape}, but {of} has {seq} tokens: give one id per token{hint}"
        )
    try:
        fits = jnp.broadcast_shapes(ids.shape[:-1], batch_shape) == batch_shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"{name} of Segments has shape {ids.shape}, whose leading axes do not broadcast to the batch {batch_shape}"
        )


def _flat(array: Array, batch_shape: tuple[int, ...]) -> Array:
    return jnp.broadcast_to(array, (*batch_shape, array.shape[-1])).reshape(-1, array.shape[-1])
