"""The blocks of the `xla` implementation: their sizes, what lies in them, their scores, and which of those are seen."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from . import _dropout
from ._mod_evaluate import Evaluation
from ._operands import Operands
from ._reference import expand_blocks


class Blocks(NamedTuple):
    """The sizes of one call. Heads are `[kv_heads, group]`, sequences padded to whole blocks."""

    batch: int
    kv_heads: int
    group: int
    q_seq: int
    kv_seq: int
    block_q: int
    block_kv: int
    wide: jnp.dtype

    @property
    def q_blocks(self) -> int:
        return -(-self.q_seq // self.block_q)

    @property
    def kv_blocks(self) -> int:
        return -(-self.kv_seq // self.block_kv)


def rows_of_backward(q, out, lse, dout, dlse, blocks):
    """Query, dout, lse and delta by blocks of queries, and delta as a whole."""
    delta = jnp.sum(out.astype(blocks.wide) * dout.astype(blocks.wide), axis=-1) - dlse
    delta = jnp.where(lse == -jnp.inf, 0, delta)
    rows = (q, dout.astype(q.dtype), lse[..., None], delta[..., None])
    # Rows past the end look dead: their lse is -inf, so they add nothing to dk and dv.
    return [split_q(x, blocks, fill) for x, fill in zip(rows, (0, 0, -jnp.inf, 0), strict=True)], delta


def score_gradient(of_queries, k_block, v_block, operands, blocks, i, j):
    """Of a block the weights, the gradient of what the softmax takes, softcap's slope, and the score function (or None).

    `of_queries` are the block's query, dout, lse and delta.
    """
    q_block, dout_block, lse_block, delta_block = of_queries
    scores, slope, mod = scores_of(q_block, k_block, operands, blocks, i, j)
    seen = visible(operands, blocks, i, j) & (lse_block > -jnp.inf)
    weights = jnp.where(seen, jnp.exp(jnp.where(seen, scores - lse_block, 0)), 0)
    dweights = jnp.einsum("bhgqd,bhkd->bhgqk", dout_block, v_block, preferred_element_type=blocks.wide)
    dweights = dropped_out(dweights, operands, blocks, i, j)
    return weights, weights * (dweights - delta_block), slope, mod


def scores_of(q_block, k_block, operands, blocks, i, j):
    """The scores of a block, the derivative of what a score function takes by what softcap was applied to, and the function."""
    scores = jnp.einsum("bhgqd,bhkd->bhgqk", q_block, k_block, preferred_element_type=blocks.wide) * operands.scale
    slope = 1.0
    if operands.softcap is not None:
        part = jnp.tanh(scores / operands.softcap)
        scores, slope = operands.softcap * part, 1 - part**2
    if operands.bias is not None:
        scores = scores + block_of(operands.bias, blocks, i, j).astype(blocks.wide)
    if operands.score_mod is None:
        return scores, slope, None
    arguments = dict(score=scores, **indices_of(operands, blocks, i, j))
    mod = Evaluation(operands.score_mod, arguments, operands.score_arrays, blocks.batch, operands.deterministic)
    return jnp.broadcast_to(mod(operands.score_mod.value), scores.shape), slope, mod


def indices_of(operands, blocks, i, j):
    """What score and mask functions know of a block, each with the axes `[batch, kv_heads, group, block_q, block_kv]`."""
    q_index = lax.dynamic_slice_in_dim(operands.q_index, i * blocks.block_q, blocks.block_q)
    kv_index = lax.dynamic_slice_in_dim(operands.kv_index, j * blocks.block_kv, blocks.block_kv)
    return dict(
        batch=operands.batch_index[:, None, None, None, None],
        q_head=operands.head_index.reshape(1, blocks.kv_heads, blocks.group, 1, 1),
        q_index=q_index[None, None, None, :, None],
        kv_index=kv_index[None, None, None, None, :],
    )


def no_mod_gradients(operands, dtype):
    """Zeros for each gradient of a score function's array that is asked for, None for the others."""
    wanted = operands.mod_gradients or (False,) * len(operands.score_arrays)
    return [jnp.zeros(x.shape, dtype) if w else None for x, w in zip(operands.score_arrays, wanted, strict=True)]


def dropped_out(x, operands, blocks, i, j):
    """`x` where dropout keeps the weight, made larger, and 0 elsewhere."""
    if operands.dropout_seed is None:
        return x
    q_index = lax.dynamic_slice_in_dim(operands.q_index, i * blocks.block_q, blocks.block_q)
    kv_index = lax.dynamic_slice_in_dim(operands.kv_index, j * blocks.block_kv, blocks.block_kv)
    kept = _dropout.kept(operands.dropout_seed, q_index, kv_index, operands.dropout_rate)
    return jnp.where(kept.reshape(x.shape), x / (1 - operands.dropout_rate), 0)


def blocks_of(q, k, tile) -> Blocks:
    batch, q_heads, q_seq, _ = q.shape
    kv_heads, kv_seq = k.shape[1:3]
    wide = jnp.dtype(jnp.float64 if q.dtype == jnp.float64 else jnp.float32)
    block_q, block_kv = min(tile.block_q, q_seq), min(tile.block_kv, kv_seq)
    return Blocks(batch, kv_heads, q_heads // kv_heads, q_seq, kv_seq, block_q, block_kv, wide)


def clear_padding(operands, of_queries, of_keys):
    """Rows of padding become 0: their weights are 0, but 0 times NaN is NaN."""
    segments = operands.segments
    if segments is None:
        return of_queries, of_keys
    is_query, is_key = (ids[:, None, :, None] > 0 for ids in (segments.q_ids, segments.kv_ids))
    return [jnp.where(is_query, x, 0) for x in of_queries], [jnp.where(is_key, x, 0) for x in of_keys]


def split_q(x, blocks, fill: float = 0):
    """`[batch, q_heads, q_seq, dim]` as `[q_blocks, batch, kv_heads, group, block_q, dim]`."""
    x = _pad(x, 2, blocks.q_blocks * blocks.block_q, fill)
    x = x.reshape(blocks.batch, blocks.kv_heads, blocks.group, blocks.q_blocks, blocks.block_q, x.shape[-1])
    return jnp.moveaxis(x, 3, 0)


def join_q(x, blocks):
    """Inverse of `split_q`."""
    x = jnp.moveaxis(x, 0, 3)
    x = x.reshape(blocks.batch, blocks.kv_heads * blocks.group, blocks.q_blocks * blocks.block_q, x.shape[-1])
    return x[:, :, : blocks.q_seq]


def pad_kv(x, blocks):
    return _pad(x, 2, blocks.kv_blocks * blocks.block_kv, 0)


def kv_block(x, blocks, j):
    return lax.dynamic_slice_in_dim(x, j * blocks.block_kv, blocks.block_kv, axis=2)


def add_to_block(total, part, blocks, j):
    start = j * blocks.block_kv
    return lax.dynamic_update_slice_in_dim(total, kv_block(total, blocks, j) + part, start, axis=2)


def _pad(x, axis, size, fill):
    if x.shape[axis] == size:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths, constant_values=fill)


def pad_operands(operands: Operands, blocks: Blocks) -> Operands:
    """Metadata in whole blocks; what is added is padding, which sees nothing and is not seen."""
    q_size, kv_size = blocks.q_blocks * blocks.block_q, blocks.kv_blocks * blocks.block_kv
    segments = operands.segments
    if segments is not None:
        has_positions = segments.q_positions is not None
        segments = type(segments)(
            _pad(segments.q_ids, 1, q_size, -1),
            _pad(segments.kv_ids, 1, kv_size, -2),
            _pad(segments.q_positions, 1, q_size, 0) if has_positions else None,
            _pad(segments.kv_positions, 1, kv_size, 0) if has_positions else None,
        )

    def pad_matrix(x, fill):
        if x is None:
            return None
        x = _pad(x, 2, q_size, fill) if x.shape[2] > 1 else x
        return _pad(x, 3, kv_size, fill) if x.shape[3] > 1 else x

    def pad_index(index, size):
        return None if index is None else _pad(index, 0, size, 0)

    return dataclasses.replace(
        operands,
        segments=segments,
        dense=pad_matrix(operands.dense, False),
        bias=pad_matrix(operands.bias, 0),
        q_index=pad_index(operands.q_index, q_size),
        kv_index=pad_index(operands.kv_index, kv_size),
    )


def kv_range(operands, blocks, i):
    """First key block that query block i can see by row numbers, and the one after the last."""
    if operands.segments is not None and operands.segments.q_positions is not None:
        return jnp.int32(0), jnp.int32(blocks.kv_blocks)
    first, last = jnp.int32(0), jnp.int32(blocks.kv_blocks)
    if operands.lower is not None:
        first = jnp.clip((i * blocks.block_q + operands.lower) // blocks.block_kv, 0, blocks.kv_blocks)
    if operands.upper is not None:
        end = (i + 1) * blocks.block_q - 1 + operands.upper
        last = jnp.clip(end // blocks.block_kv + 1, 0, blocks.kv_blocks)
    return first, last


def visible(operands, blocks, i, j):
    """The mask of one block, broadcasting to `[batch, kv_heads, group, block_q, block_kv]`."""
    q_start, kv_start = i * blocks.block_q, j * blocks.block_kv
    rows = q_start + jnp.arange(blocks.block_q, dtype=jnp.int32)
    columns = kv_start + jnp.arange(blocks.block_kv, dtype=jnp.int32)
    seen = (columns < blocks.kv_seq)[None, None, None, None, :]
    segments = operands.segments
    if segments is None or segments.q_positions is None:
        distance = (columns[None, :] - rows[:, None])[None, None, None]
    else:
        q_positions = lax.dynamic_slice_in_dim(segments.q_positions, q_start, blocks.block_q, axis=1)
        kv_positions = lax.dynamic_slice_in_dim(segments.kv_positions, kv_start, blocks.block_kv, axis=1)
        distance = (kv_positions[:, None, :] - q_positions[:, :, None])[:, None, None]
    if operands.lower is not None:
        seen = seen & (distance >= operands.lower)
    if operands.upper is not None:
        seen = seen & (distance <= operands.upper)
    if segments is not None:
        q_ids = lax.dynamic_slice_in_dim(segments.q_ids, q_start, blocks.block_q, axis=1)
        kv_ids = lax.dynamic_slice_in_dim(segments.kv_ids, kv_start, blocks.block_kv, axis=1)
        seen = seen & (q_ids[:, :, None] == kv_ids[:, None, :])[:, None, None]
    if operands.blocks is not None:
        # Rows and columns past the end take the last entry; they are hidden in any case.
        entry = expand_blocks(operands.blocks, rows, columns)
        seen = seen & broadcast_heads(entry, blocks)
    if operands.dense is not None:
        seen = seen & block_of(operands.dense, blocks, i, j)
    if operands.bias is not None:
        seen = seen & (block_of(operands.bias, blocks, i, j) > -jnp.inf)
    if operands.mask_mod is not None:
        arguments = indices_of(operands, blocks, i, j)
        mask = Evaluation(operands.mask_mod, arguments, operands.mask_arrays, blocks.batch)
        seen = seen & mask(operands.mask_mod.value)
    return seen


def block_of(x, blocks, i, j):
    """Of `[entries, q_heads, q_seq, kv_seq]` (of which all may be less), the part of one block, with one entry per example."""
    if x.shape[2] > 1:
        x = lax.dynamic_slice_in_dim(x, i * blocks.block_q, blocks.block_q, axis=2)
    if x.shape[3] > 1:
        x = lax.dynamic_slice_in_dim(x, j * blocks.block_kv, blocks.block_kv, axis=3)
    return broadcast_heads(x, blocks)


def broadcast_heads(x, blocks):
    entries, heads, *matrix = x.shape
    if entries > 1:
        x = jnp.repeat(x, blocks.batch // entries, axis=0)
    return x.reshape(x.shape[0], *((1, 1) if heads == 1 else (blocks.kv_heads, blocks.group)), *matrix)
