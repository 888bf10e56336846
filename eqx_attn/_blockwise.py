"""The `xla` implementation: blockwise online softmax in plain JAX, for any device, in memory linear in the lengths.

The algorithm is FlashAttention's (Dao et al. 2022, arXiv:2205.14135; backward as in Dao 2023, arXiv:2307.08691), with loops
over query blocks and, inside, over the key blocks that a query block can see.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ._blockwise_parts import (
    add_to_block,
    blocks_of,
    clear_padding,
    dropped_out,
    join_q,
    kv_block,
    kv_range,
    no_mod_gradients,
    pad_kv,
    pad_operands,
    rows_of_backward,
    score_gradient,
    scores_of,
    split_q,
    visible,
)
from ._operands import Operands, Tile
from ._sinks import sinks_gradient


def forward(q: Array, k: Array, v: Array, operands: Operands, tile: Tile) -> tuple[Array, ...]:
    """Output `[batch, q_heads, q_seq, v_dim]` and lse `[batch, q_heads, q_seq]` of arrays laid out `bhsd`.

    With `operands.max_logit` also each row's largest visible score.
    """
    blocks = blocks_of(q, k, tile)
    (q,), (k, v) = clear_padding(operands, (q,), (k, v))
    operands = pad_operands(operands, blocks)
    q_rows, k_rows, v_rows = split_q(q, blocks), pad_kv(k, blocks), pad_kv(v, blocks)
    sinks = _per_head(operands.sinks, blocks)

    def attend(carry, block):
        i, q_block = block
        first, last = kv_range(operands, blocks, i)
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
    rows = [join_q(x[..., None], blocks)[..., 0] for x in ((lse, row_max) if operands.max_logit else (lse,))]
    return join_q(out, blocks), *rows


def backward(
    q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array, dlse: Array, operands: Operands, tile: Tile
) -> tuple[Array, ...]:
    """Gradients of q, k and v, each in its array's shape, and in its dtype unless `out_dtype` is given (`bhsd`).

    Then that of the bias, where `operands.bias_gradient`, that of the sinks, where there are any, and in float32 or float64
    those of a score function's arrays that `operands.mod_gradients` names.
    """
    blocks = blocks_of(q, k, tile)
    bias, sinks = operands.bias if operands.bias_gradient else None, operands.sinks
    (q, dout), (k, v) = clear_padding(operands, (q, dout), (k, v))
    operands = pad_operands(operands, blocks)
    k_rows, v_rows = pad_kv(k, blocks), pad_kv(v, blocks)
    rows, delta = rows_of_backward(q, out, lse, dout, dlse, blocks)

    def attend(carry, block):
        i, q_block, dout_block, lse_block, delta_block = block
        first, last = kv_range(operands, blocks, i)
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
    (dk, dv, dbias, dmods), dq = lax.scan(attend, start, (jnp.arange(blocks.q_blocks, dtype=jnp.int32), *rows))
    dk, dv = (x[:, :, : blocks.kv_seq].astype(operands.out_dtype or k.dtype) for x in (dk, dv))
    grads = [join_q(dq, blocks), dk, dv]
    if bias is not None and dbias is not None:
        grads.append(dbias[:, :, : bias.shape[2], : bias.shape[3]].astype(bias.dtype))
    if sinks is not None:
        grads.append(sinks_gradient(sinks, lse, delta))
    return (*grads, *(x for x in dmods if x is not None))


def _accumulate(q_block, k_rows, v_rows, operands, blocks, i, j, carry):
    """One key block into (row_max, row_sum, acc) of query block i."""
    row_max, row_sum, acc = carry
    k_block, v_block = kv_block(k_rows, blocks, j), kv_block(v_rows, blocks, j)
    scores, _, _ = scores_of(q_block, k_block, operands, blocks, i, j)
    scores = jnp.where(visible(operands, blocks, i, j), scores, -jnp.inf)
    new_max = jnp.maximum(row_max, jnp.max(scores, axis=-1))
    # A row that has seen nothing keeps -inf; subtract 0 there, since -inf - -inf is no number.
    shift = jnp.where(new_max == -jnp.inf, 0, new_max)
    weights = jnp.exp(scores - shift[..., None])
    correction = jnp.exp(row_max - shift)
    product = jnp.einsum(
        "bhgqk,bhkd->bhgqd",
        dropped_out(weights, operands, blocks, i, j).astype(v_block.dtype),
        v_block,
        preferred_element_type=blocks.wide,
    )
    return new_max, row_sum * correction + jnp.sum(weights, axis=-1), acc * correction[..., None] + product


def _differentiate(q_block, dout_block, lse_block, delta_block, k_rows, v_rows, operands, blocks, i, j, carry):
    """One key block's part of dq, and query block i's part of that block's dk, dv and dbias, and of dmods."""
    dq, dk, dv, dbias, dmods = carry
    k_block, v_block = kv_block(k_rows, blocks, j), kv_block(v_rows, blocks, j)
    product = functools.partial(jnp.einsum, preferred_element_type=blocks.wide)
    of_queries = (q_block, dout_block, lse_block, delta_block)
    weights, dvalue, slope, mod = score_gradient(of_queries, k_block, v_block, operands, blocks, i, j)
    dbias_block = dvalue
    if mod is not None:
        dmods = mod.scattered(dmods, dvalue)
        # What is hidden may have any slope.
        dbias_block = jnp.where(weights > 0, dvalue * mod(operands.score_mod.slope), 0)
    dscores = (dbias_block * slope * operands.scale).astype(q_block.dtype)
    dq = dq + product("bhgqk,bhkd->bhgqd", dscores, k_block)
    dk = add_to_block(dk, product("bhgqk,bhgqd->bhkd", dscores, q_block), blocks, j)
    dropped = dropped_out(weights, operands, blocks, i, j).astype(q_block.dtype)
    dv = add_to_block(dv, product("bhgqk,bhgqd->bhkd", dropped, dout_block), blocks, j)
    return dq, dk, dv, _add_bias_gradient(dbias, dbias_block, blocks, i, j), dmods


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
