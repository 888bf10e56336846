"""The `xla` implementation: blockwise online softmax in plain JAX, for any device, in memory linear in the lengths.

The algorithm is FlashAttention's (Dao et al. 2022, arXiv:2205.14135; backward as in Dao 2023, arXiv:2307.08691), with loops
over query blocks and, inside, over the key blocks that a query block can see.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from . import _dropout
from ._mod_evaluate import Evaluation
from ._operands import Operands, Tile
from ._reference import expand_blocks
from ._sinks import sinks_gradient


class _Blocks(NamedTuple):
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


def forward(q: Array, k: Array, v: Array, operands: Operands, tile: Tile) -> tuple[Array, ...]:
    """Output `[batch, q_heads, q_seq, v_dim]` and lse `[batch, q_heads, q_seq]` of arrays laid out `bhsd`.

    With `operands.max_logit` also each row's largest visible score.
    """
    blocks = _blocks(q, k, tile)
    (q,), (k, v) = _clear_padding(operands, (q,), (k, v))
    operands = _pad_operands(operands, blocks)
    q_rows, k_rows, v_rows = _split_q(q, blocks), _pad_kv(k, blocks), _pad_kv(v, blocks)
    sinks = _per_head(operands.sinks, blocks)

    def attend(carry, block):
        i, q_block = block
        first, last = _kv_range(operands, blocks, i)
        start = (
            jnp.full(q_block.shape[:-1], -jnp.inf, blocks.wide),
            jnp.zeros(q_block.shape[:-1], blocks.wide),
            jnp.zeros((*q_block.shape[:-1], v.shape[-1]), blocks.wide),
        )
        step = functools.partial(_accumulate, q_block, k_rows, v_rows, operands, blocks, i)
        row_max, row_sum, acc = lax.fori_loop(first, last, step, start)
        highest = row_max
        if sinks is not None:
            highest = jnp.maximum(row_max, sinks)
            shift = jnp.where(highest == -jnp.inf, 0, highest)
            correction = jnp.exp(row_max - shift)
            row_sum, acc = row_sum * correction + jnp.exp(sinks - shift), acc * correction[..., None]
        seen = row_sum > 0
        out = acc / jnp.where(seen, row_sum, 1)[..., None]
        lse = jnp.where(seen, highest + jnp.log(jnp.where(seen, row_sum, 1)), -jnp.inf)
        return carry, (out.astype(operands.out_dtype or q.dtype), lse, row_max)

    _, (out, lse, row_max) = lax.scan(attend, None, (jnp.arange(blocks.q_blocks, dtype=jnp.int32), q_rows))
    rows = [_join_q(x[..., None], blocks)[..., 0] for x in ((lse, row_max) if operands.max_logit else (lse,))]
    return _join_q(out, blocks), *rows


def backward(
    q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array, dlse: Array, operands: Operands, tile: Tile
) -> tuple[Array, ...]:
    """Gradients of q, k and v, each in its array's shape, and in its dtype unless `out_dtype` is given (`bhsd`).

    Then that of the bias, where `operands.bias_gradient`, that of the sinks, where there are any, and in float32 or float64
    those of a score function's arrays that `operands.mod_gradients` names.
    """
    blocks = _blocks(q, k, tile)
    bias, sinks = operands.bias if operands.bias_gradient else None, operands.sinks
    (q, dout), (k, v) = _clear_padding(operands, (q, dout), (k, v))
    operands = _pad_operands(operands, blocks)
    k_rows, v_rows = _pad_kv(k, blocks), _pad_kv(v, blocks)
    delta = jnp.sum(out.astype(blocks.wide) * dout.astype(blocks.wide), axis=-1) - dlse
    delta = jnp.where(lse == -jnp.inf, 0, delta)
    rows = (q, dout.astype(q.dtype), lse[..., None], delta[..., None])
    # Rows past the end look dead: their lse is -inf, so they add nothing to dk and dv.
    fill = (0, 0, -jnp.inf, 0)
    q_rows, dout_rows, lse_rows, delta_rows = (_split_q(x, blocks, value) for x, value in zip(rows, fill, strict=True))

    def attend(carry, block):
        i, q_block, dout_block, lse_block, delta_block = block
        first, last = _kv_range(operands, blocks, i)
        step = functools.partial(
            _differentiate, q_block, dout_block, lse_block, delta_block, k_rows, v_rows, operands, blocks, i
        )
        start = (jnp.zeros(q_block.shape, blocks.wide), *carry)
        dq, *carry = lax.fori_loop(first, last, step, start)
        return tuple(carry), dq.astype(operands.out_dtype or q.dtype)

    start = (
        jnp.zeros(k_rows.shape, blocks.wide),
        jnp.zeros(v_rows.shape, blocks.wide),
        _no_bias_gradient(bias, operands),
        no_mod_gradients(operands, blocks.wide),
    )
    (dk, dv, dbias, dmods), dq = lax.scan(
        attend, start, (jnp.arange(blocks.q_blocks, dtype=jnp.int32), q_rows, dout_rows, lse_rows, delta_rows)
    )
    dk, dv = (x[:, :, : blocks.kv_seq].astype(operands.out_dtype or k.dtype) for x in (dk, dv))
    grads = [_join_q(dq, blocks), dk, dv]
    if bias is not None and dbias is not None:
        grads.append(dbias[:, :, : bias.shape[2], : bias.shape[3]].astype(bias.dtype))
    if sinks is not None:
        grads.append(sinks_gradient(sinks, lse, delta))
    return (*grads, *(x for x in dmods if x is not None))


def _accumulate(q_block, k_rows, v_rows, operands, blocks, i, j, carry):
    """One key block into (row_max, row_sum, acc) of query block i."""
    row_max, row_sum, acc = carry
    k_block, v_block = _kv_block(k_rows, blocks, j), _kv_block(v_rows, blocks, j)
    scores, _, _ = _scores(q_block, k_block, operands, blocks, i, j)
    scores = jnp.where(_visible(operands, blocks, i, j), scores, -jnp.inf)
    new_max = jnp.maximum(row_max, jnp.max(scores, axis=-1))
    # A row that has seen nothing keeps -inf; subtract 0 there, since -inf - -inf is no number.
    shift = jnp.where(new_max == -jnp.inf, 0, new_max)
    weights = jnp.exp(scores - shift[..., None])
    correction = jnp.exp(row_max - shift)
    product = jnp.einsum(
        "bhgqk,bhkd->bhgqd",
        _dropped(weights, operands, blocks, i, j).astype(v_block.dtype),
        v_block,
        preferred_element_type=blocks.wide,
    )
    return new_max, row_sum * correction + jnp.sum(weights, axis=-1), acc * correction[..., None] + product


def _differentiate(q_block, dout_block, lse_block, delta_block, k_rows, v_rows, operands, blocks, i, j, carry):
    """One key block's part of dq, and query block i's part of that block's dk, dv and dbias, and of dmods."""
    dq, dk, dv, dbias, dmods = carry
    k_block, v_block = _kv_block(k_rows, blocks, j), _kv_block(v_rows, blocks, j)
    product = functools.partial(jnp.einsum, preferred_element_type=blocks.wide)
    scores, slope, mod = _scores(q_block, k_block, operands, blocks, i, j)
    seen = _visible(operands, blocks, i, j) & (lse_block > -jnp.inf)
    weights = jnp.where(seen, jnp.exp(jnp.where(seen, scores - lse_block, 0)), 0)
    dweights = _dropped(product("bhgqd,bhkd->bhgqk", dout_block, v_block), operands, blocks, i, j)
    dbias_block = weights * (dweights - delta_block)
    if mod is not None:
        dmods = mod.scattered(dmods, dbias_block)
        # What is hidden may have any slope.
        dbias_block = jnp.where(weights > 0, dbias_block * mod(operands.score_mod.slope), 0)
    dscores = (dbias_block * slope * operands.scale).astype(q_block.dtype)
    dq = dq + product("bhgqk,bhkd->bhgqd", dscores, k_block)
    dk = _add_to_block(dk, product("bhgqk,bhgqd->bhkd", dscores, q_block), blocks, j)
    dropped = _dropped(weights, operands, blocks, i, j).astype(q_block.dtype)
    dv = _add_to_block(dv, product("bhgqk,bhgqd->bhkd", dropped, dout_block), blocks, j)
    return dq, dk, dv, _add_bias_gradient(dbias, dbias_block, blocks, i, j), dmods


def _scores(q_block, k_block, operands, blocks, i, j):
    """The scores of a block, the derivative of what a score function takes by what softcap was applied to, and the function."""
    scores = jnp.einsum("bhgqd,bhkd->bhgqk", q_block, k_block, preferred_element_type=blocks.wide) * operands.scale
    slope = 1.0
    if operands.softcap is not None:
        part = jnp.tanh(scores / operands.softcap)
        scores, slope = operands.softcap * part, 1 - part**2
    if operands.bias is not None:
        scores = scores + _block_of(operands.bias, blocks, i, j).astype(blocks.wide)
    if operands.score_mod is None:
        return scores, slope, None
    arguments = dict(score=scores, **_indices(operands, blocks, i, j))
    mod = Evaluation(operands.score_mod, arguments, operands.score_arrays, blocks.batch)
    return jnp.broadcast_to(mod(operands.score_mod.value), scores.shape), slope, mod


def _indices(operands, blocks, i, j):
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


def _dropped(x, operands, blocks, i, j):
    """`x` where dropout keeps the weight, made larger, and 0 elsewhere."""
    if operands.dropout_seed is None:
        return x
    q_index = lax.dynamic_slice_in_dim(operands.q_index, i * blocks.block_q, blocks.block_q)
    kv_index = lax.dynamic_slice_in_dim(operands.kv_index, j * blocks.block_kv, blocks.block_kv)
    kept = _dropout.kept(operands.dropout_seed, q_index, kv_index, operands.dropout_rate)
    return jnp.where(kept.reshape(x.shape), x / (1 - operands.dropout_rate), 0)


def _no_bias_gradient(bias, operands):
    """Zeros to add the bias' gradient to, in the padded shape; None where it is not asked for.

    A score's gradient belongs to one element of the bias. Only where queries or keys share elements are there sums over
    blocks, and those are in float32.
    """
    if bias is None:
        return None
    shared = 1 in operands.bias.shape[2:]
    return jnp.zeros(operands.bias.shape, jnp.promote_types(bias.dtype, jnp.float32) if shared else bias.dtype)


def _add_bias_gradient(dbias, block, blocks, i, j):
    if dbias is None:
        return None
    entries, heads, q_size, kv_size = dbias.shape
    block = block.reshape(entries, -1, blocks.kv_heads * blocks.group, *block.shape[3:]).sum(1)
    for axis, size in ((1, heads), (2, q_size), (3, kv_size)):
        if size == 1:
            block = block.sum(axis, keepdims=True)
    zero = jnp.zeros_like(i)
    start = (zero, zero, i * blocks.block_q if q_size > 1 else zero, j * blocks.block_kv if kv_size > 1 else zero)
    so_far = lax.dynamic_slice(dbias, start, block.shape)
    total = so_far.astype(block.dtype) + block
    return lax.dynamic_update_slice(dbias, total.astype(dbias.dtype), start)


def _per_head(sinks, blocks):
    """`[entries, q_heads]` as `[batch, kv_heads, group, 1]`."""
    if sinks is None:
        return None
    sinks = jnp.repeat(sinks, blocks.batch // sinks.shape[0], axis=0)
    return sinks.reshape(blocks.batch, blocks.kv_heads, blocks.group, 1).astype(blocks.wide)


def _blocks(q, k, tile) -> _Blocks:
    batch, q_heads, q_seq, _ = q.shape
    kv_heads, kv_seq = k.shape[1:3]
    wide = jnp.dtype(jnp.float64 if q.dtype == jnp.float64 else jnp.float32)
    block_q, block_kv = min(tile.block_q, q_seq), min(tile.block_kv, kv_seq)
    return _Blocks(batch, kv_heads, q_heads // kv_heads, q_seq, kv_seq, block_q, block_kv, wide)


def _clear_padding(operands, of_queries, of_keys):
    """Rows of padding become 0: their weights are 0, but 0 times NaN is NaN."""
    segments = operands.segments
    if segments is None:
        return of_queries, of_keys
    is_query, is_key = (ids[:, None, :, None] > 0 for ids in (segments.q_ids, segments.kv_ids))
    return [jnp.where(is_query, x, 0) for x in of_queries], [jnp.where(is_key, x, 0) for x in of_keys]


def _split_q(x, blocks, fill: float = 0):
    """`[batch, q_heads, q_seq, dim]` as `[q_blocks, batch, kv_heads, group, block_q, dim]`."""
    x = _pad(x, 2, blocks.q_blocks * blocks.block_q, fill)
    x = x.reshape(blocks.batch, blocks.kv_heads, blocks.group, blocks.q_blocks, blocks.block_q, x.shape[-1])
    return jnp.moveaxis(x, 3, 0)


def _join_q(x, blocks):
    """Inverse of `_split_q`."""
    x = jnp.moveaxis(x, 0, 3)
    x = x.reshape(blocks.batch, blocks.kv_heads * blocks.group, blocks.q_blocks * blocks.block_q, x.shape[-1])
    return x[:, :, : blocks.q_seq]


def _pad_kv(x, blocks):
    return _pad(x, 2, blocks.kv_blocks * blocks.block_kv, 0)


def _kv_block(x, blocks, j):
    return lax.dynamic_slice_in_dim(x, j * blocks.block_kv, blocks.block_kv, axis=2)


def _add_to_block(total, part, blocks, j):
    start = j * blocks.block_kv
    return lax.dynamic_update_slice_in_dim(total, _kv_block(total, blocks, j) + part, start, axis=2)


def _pad(x, axis, size, fill):
    if x.shape[axis] == size:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths, constant_values=fill)


def _pad_operands(operands: Operands, blocks: _Blocks) -> Operands:
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


def _kv_range(operands, blocks, i):
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


def _visible(operands, blocks, i, j):
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
        seen = seen & _broadcast_heads(entry, blocks)
    if operands.dense is not None:
        seen = seen & _block_of(operands.dense, blocks, i, j)
    if operands.bias is not None:
        seen = seen & (_block_of(operands.bias, blocks, i, j) > -jnp.inf)
    if operands.mask_mod is not None:
        arguments = _indices(operands, blocks, i, j)
        mask = Evaluation(operands.mask_mod, arguments, operands.mask_arrays, blocks.batch)
        seen = seen & mask(operands.mask_mod.value)
    return seen


def _block_of(x, blocks, i, j):
    """Of `[entries, q_heads, q_seq, kv_seq]` (of which all may be less), the part of one block, with one entry per example."""
    if x.shape[2] > 1:
        x = lax.dynamic_slice_in_dim(x, i * blocks.block_q, blocks.block_q, axis=2)
    if x.shape[3] > 1:
        x = lax.dynamic_slice_in_dim(x, j * blocks.block_kv, blocks.block_kv, axis=3)
    return _broadcast_heads(x, blocks)


def _broadcast_heads(x, blocks):
    entries, heads, *matrix = x.shape
    if entries > 1:
        x = jnp.repeat(x, blocks.batch // entries, axis=0)
    return x.reshape(x.shape[0], *((1, 1) if heads == 1 else (blocks.kv_heads, blocks.group)), *matrix)
