# Generated from templates/pallas_tpu/attention.py.jinja by python -m codegen; do not edit.
# spec: pallas_tpu/bshd_full_qk32_v32_segments_bias
# digest: 6fcaee9b1cc0c80b
"""Full attention within segments on a TPU, forward and backward.

Query [batch, q_seq, q_heads, 32], key [batch, kv_seq, kv_heads, 32], value [batch, kv_seq, kv_heads, 32].
A TPU's tiles are 128 lanes wide, and heads of this dim, side by side in a token, do not lie on them: the
arrays are copied to [batch, heads, seq, dim] before the kernels, and the results back.

The algorithm is FlashAttention-2's (Dao 2023, arXiv:2307.08691): the forward keeps a running softmax over blocks of
keys; the backward recomputes the scores once, for all gradients. In the forward, scores are held transposed,
[block_kv, block_q]: the statistics of a query then lie along the lanes, like lse in memory, and maxima and sums over
keys need no exchange between lanes.

A token sees only tokens of its own id. Which blocks a block visits, and which of those need a mask, is a table in
scalar memory, made from each block's least and greatest id; nothing is loaded for a block with nothing to
see.

The bias is read by blocks as it is, and transposed like the scores. Its gradient has a kernel of its own, which runs where
it is asked for.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from eqx_attn._device import (
    across_lanes,
    column,
    dot,
    fit_block,
    in_turns,
    interpret_params,
    matmul_precision,
    pad_rows,
    pad_segments,
    parts_of_block,
    query_sums,
    score_blocks,
    segment_kv_visits,
    segment_q_visits,
    vmem_limit_bytes,
    widen,
)

SPEC = "pallas_tpu/bshd_full_qk32_v32_segments_bias"

HEAD_DIM = 32
LOG2_E = 1.4426950408889634  # exp(x) = exp2(LOG2_E * x), and the hardware has exp2
HIDDEN = -jnp.inf  # the score of a key that the query does not see
BLIND = 1e30  # in the backward, the lse of a query past the end or without any key: exp2(score - lse) is 0


def forward(q, k, v, operands, tiles):
    """Returns out [batch, q_seq, q_heads, 32] and lse, float32 [batch, q_heads, q_seq].

    lse is the natural logarithm of the sum of a query's exponentiated scores; -inf, and out 0, where it sees no key.
    """
    batch, q_seq, q_heads, _ = q.shape
    _, kv_seq, kv_heads, _ = k.shape
    block_q, block_kv = fit_block(tiles.forward.block_q, q_seq), fit_block(tiles.forward.block_kv, kv_seq)
    q_blocks, kv_blocks = pl.cdiv(q_seq, block_q), pl.cdiv(kv_seq, block_kv)
    visits = segment_kv_visits(operands.segments, block_q, block_kv)
    bias = score_blocks(operands.bias, batch, block_q, block_kv)
    queries, keys, rows, scores, tokens = _query_blocks(block_q, block_kv, q_heads // kv_heads, visits)
    out, lse = pl.pallas_call(
        functools.partial(
            _forward_kernel,
            visits=visits,
            bias=bias,
            scale=operands.scale,
            precision=matmul_precision(q.dtype),
        ),
        out_shape=(
            jax.ShapeDtypeStruct((batch, q_heads, q_seq, HEAD_DIM), operands.out_dtype or q.dtype),
            jax.ShapeDtypeStruct((batch, q_heads, 1, q_blocks * block_q), jnp.float32),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, q_heads, q_blocks, visits.steps),
            in_specs=[tokens, scores(bias), queries(HEAD_DIM), keys(HEAD_DIM), keys(HEAD_DIM)],
            out_specs=(queries(HEAD_DIM), rows),
            scratch_shapes=[
                pltpu.VMEM((HEAD_DIM, block_q), jnp.float32),
                pltpu.VMEM((1, block_q), jnp.float32),
                pltpu.VMEM((1, block_q), jnp.float32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=vmem_limit_bytes(),
        ),
        interpret=interpret_params(),
        name="attention_forward",
    )(
        visits.table,
        pad_segments(operands.segments, q_blocks * block_q, kv_blocks * block_kv),
        bias.array,
        q.swapaxes(1, 2),
        k.swapaxes(1, 2),
        v.swapaxes(1, 2),
    )
    return out.swapaxes(1, 2), lse[:, :, 0, :q_seq]


def _forward_kernel(
    visits_ref,
    tokens,
    bias_ref,
    q_ref,
    k_ref,
    v_ref,
    out_ref,
    lse_ref,
    acc_ref,
    max_ref,
    sum_ref,
    *,
    visits,
    bias,
    scale,
    precision,
):
    """One step of one block of queries: one block of keys into the running softmax of each query."""
    example, q_block, step = pl.program_id(0), pl.program_id(2), pl.program_id(3)

    @pl.when(step == 0)
    def _():
        max_ref[...] = jnp.full_like(max_ref, HIDDEN)  # [1, block_q]
        acc_ref[...] = jnp.zeros_like(acc_ref)  # [head_dim, block_q]
        sum_ref[...] = jnp.zeros_like(sum_ref)

    def attend(partial):
        v = v_ref[...]
        s = dot(k_ref[...], q_ref[...], (1, 1), precision) * scale + bias.tile(bias_ref)  # [block_kv, block_q]
        if partial:
            s = jnp.where(_keep(tokens), s, HIDDEN)
            v = _zero_padding(v, tokens)
        row_max = jnp.maximum(max_ref[...], jnp.max(s, axis=0, keepdims=True))
        shift = jnp.where(row_max > HIDDEN, row_max, 0.0)  # -inf - -inf is no number
        correction = jnp.exp2((max_ref[...] - shift) * LOG2_E)
        p = jnp.exp2((s - shift) * LOG2_E)
        max_ref[...] = row_max
        sum_ref[...] = sum_ref[...] * correction + jnp.sum(p, axis=0, keepdims=True)
        acc_ref[...] = acc_ref[...] * correction + dot(v, p.astype(v.dtype), (0, 0), precision)

    @pl.when(visits.whole(visits_ref, q_block, step, example))
    def _():
        attend(partial=False)

    @pl.when(visits.partial(visits_ref, q_block, step, example))
    def _():
        attend(partial=True)

    @pl.when(step == pl.num_programs(3) - 1)
    def _():
        sees = max_ref[...] > HIDDEN
        out_ref[...] = jnp.where(sees, acc_ref[...] / sum_ref[...], 0.0).T.astype(out_ref.dtype)
        lse_ref[...] = jnp.where(sees, max_ref[...] + jnp.log2(sum_ref[...]) / LOG2_E, -jnp.inf)


def backward(q, k, v, out, lse, dout, dlse, operands, tiles):
    """Returns dq, dk, dv, like q, k, v, and the gradient of the bias, if asked for,.

    They are for the gradients dout of out and dlse of lse.
    """
    # The gradient of a score is p * (dp - delta): delta is the same for all keys of a query, and lse adds p * dlse.
    delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1)
    delta = delta.swapaxes(1, 2) - dlse  # [batch, q_heads, q_seq]
    sees = lse > -jnp.inf
    delta = jnp.where(sees, delta, 0.0)
    lse = jnp.where(sees, lse, BLIND)
    dq, dk, dv = _array_gradients(q, k, v, dout, lse, delta, operands, tiles.dkv)
    dbias = ()
    if operands.bias_gradient:
        dbias = (_bias_gradient(q, k, v, dout, lse, delta, operands, tiles.dbias or tiles.dq),)
    return dq, dk, dv, *dbias


def _array_gradients(q, k, v, dout, lse, delta, operands, tile):
    """Each block of keys goes over the blocks of queries that see it, for every query head that it serves."""
    batch, q_seq, q_heads, _ = q.shape
    _, kv_seq, kv_heads, _ = k.shape
    block_q, block_kv = fit_block(tile.block_q, q_seq), fit_block(tile.block_kv, kv_seq)
    q_blocks, kv_blocks = pl.cdiv(q_seq, block_q), pl.cdiv(kv_seq, block_kv)
    group = q_heads // kv_heads
    visits = segment_q_visits(operands.segments, block_q, block_kv)
    bias = score_blocks(operands.bias, batch, block_q, block_kv)
    queries, keys, rows, scores, tokens = _key_blocks(block_q, block_kv, group, visits)
    sums = query_sums(
        batch=batch,
        kv_heads=kv_heads,
        group=group,
        q_seq=q_seq,
        block_q=block_q,
        dim=HEAD_DIM,
        dtype=operands.out_dtype or q.dtype,
        scale=operands.scale,
        columns=False,
        limit=vmem_limit_bytes(),
    )
    dq, dk, dv = pl.pallas_call(
        functools.partial(
            _backward_kernel,
            visits=visits,
            bias=bias,
            scale=operands.scale,
            sums=sums,
            precision=matmul_precision(q.dtype),
            parts=parts_of_block(tile, block_q, block_kv),
            partial_parts=parts_of_block(tile, block_q, block_kv, whole=False),
        ),
        out_shape=(
            sums.shape,
            jax.ShapeDtypeStruct((batch, kv_heads, kv_seq, HEAD_DIM), operands.out_dtype or k.dtype),
            jax.ShapeDtypeStruct((batch, kv_heads, kv_seq, HEAD_DIM), operands.out_dtype or v.dtype),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, kv_heads, kv_blocks, group, visits.steps),
            in_specs=[
                tokens,
                scores(bias),
                queries(HEAD_DIM),
                keys(HEAD_DIM),
                keys(HEAD_DIM),
                queries(HEAD_DIM),
                rows,
                rows,
            ],
            out_specs=(pl.BlockSpec(memory_space=pl.ANY), keys(HEAD_DIM), keys(HEAD_DIM)),
            scratch_shapes=[
                pltpu.VMEM((HEAD_DIM, block_kv), k.dtype),
                pltpu.VMEM((HEAD_DIM, block_kv), v.dtype),
                pltpu.VMEM((HEAD_DIM, block_q), q.dtype),
                pltpu.VMEM((HEAD_DIM, block_q), dout.dtype),
                pltpu.VMEM((HEAD_DIM, block_kv), jnp.float32),
                pltpu.VMEM((HEAD_DIM, block_kv), jnp.float32),
                sums.scratch,
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary", "arbitrary"),
            vmem_limit_bytes=vmem_limit_bytes(),
        ),
        interpret=interpret_params(),
        name="attention_backward",
    )(
        visits.table,
        pad_segments(operands.segments, q_blocks * block_q, kv_blocks * block_kv),
        bias.array,
        q.swapaxes(1, 2),
        k.swapaxes(1, 2),
        v.swapaxes(1, 2),
        dout.swapaxes(1, 2),
        pad_rows(lse, q_blocks * block_q, BLIND),
        pad_rows(delta, q_blocks * block_q, 0.0),
    )
    return (
        sums.result(dq).swapaxes(1, 2),
        dk.swapaxes(1, 2),
        dv.swapaxes(1, 2),
    )


def _backward_kernel(
    visits_ref,
    tokens,
    bias_ref,
    q_ref,
    k_ref,
    v_ref,
    dout_ref,
    lse_ref,
    delta_ref,
    dq_ref,
    dk_ref,
    dv_ref,
    k_t_ref,
    v_t_ref,
    q_t_ref,
    dout_t_ref,
    dk_acc_ref,
    dv_acc_ref,
    sums_refs,
    *,
    visits,
    bias,
    scale,
    sums,
    precision,
    parts,
    partial_parts,
):
    """One step of one block of keys: one block of one head's queries into all gradients.

    Scores are [queries, keys] here; keys, values and all sums are transposed, so that of the five products only the one
    for dq, k^T ds^T, takes its second matrix transposed.
    """
    example, kv_block, step = pl.program_id(0), pl.program_id(2), pl.program_id(4)
    q_block = visits.block(visits_ref, kv_block, step, example)
    starts = (pl.program_id(3) == 0) & (step == 0)
    ends = (pl.program_id(3) == pl.num_programs(3) - 1) & (step == pl.num_programs(4) - 1)

    @pl.when(starts & (kv_block == 0))
    def _():
        sums.clear(dq_ref, sums_refs)

    @pl.when(starts)
    def _():
        k_t_ref[...] = _zero_padding(k_ref[...], tokens).T  # [head_dim, block_kv]
        v_t_ref[...] = _zero_padding(v_ref[...], tokens).T  # [head_dim, block_kv]
        dk_acc_ref[...] = jnp.zeros_like(dk_acc_ref)  # [head_dim, block_kv]
        dv_acc_ref[...] = jnp.zeros_like(dv_acc_ref)  # [head_dim, block_kv]

    def accumulate(parts, partial):
        step_sums = sums.fetch(dq_ref, sums_refs, q_block)
        q, dout = q_ref[...], dout_ref[...]
        lse, delta = across_lanes(lse_ref[...]), across_lanes(delta_ref[...])  # [block_q, 128]
        bias_of = bias.by_part(bias_ref)
        if partial:
            # Queries past the end or without any key must not reach the sums, not even as NaN * 0.
            sees = lse[:, :1] < BLIND
            q, dout = jnp.where(sees, q, 0), jnp.where(sees, dout, 0)
            q_ids = across_lanes(tokens[0][...])
        q_t_ref[...], dout_t_ref[...] = q.T, dout.T

        def score(part):
            return dot(q[part.rows], k_t_ref[:, part.columns], (1, 0), precision)

        def score_of_dout(part):
            return dot(dout[part.rows], v_t_ref[:, part.columns], (1, 0), precision)

        def weigh(part, s, dp):
            row_lse, row_delta = widen(lse[part.rows], s.shape[1]), widen(delta[part.rows], s.shape[1])
            s = s * scale + bias_of(part)
            if not part.whole:
                s = jnp.where(_keep_part(part, q_ids, tokens), s, HIDDEN)
            p = jnp.exp2((s - row_lse) * LOG2_E)
            ds = p * (dp - row_delta)
            return p.astype(dout.dtype), ds.astype(q.dtype)

        def add_dv(part, weights):
            dv_acc_ref[:, part.columns] += dot(dout_t_ref[:, part.rows], weights[0], (1, 0), precision)

        def add_dk(part, weights):
            dk_acc_ref[:, part.columns] += dot(q_t_ref[:, part.rows], weights[1], (1, 0), precision)

        def add_dq(part, weights):
            step_sums.add(part.rows, dot(k_t_ref[:, part.columns], weights[1], (1, 1), precision))

        in_turns(parts, (score, score_of_dout), weigh, (add_dv, add_dk, add_dq))
        step_sums.store()

    @pl.when(visits.whole(visits_ref, kv_block, step, example))
    def _():
        accumulate(parts, partial=False)

    @pl.when(visits.partial(visits_ref, kv_block, step, example))
    def _():
        accumulate(partial_parts, partial=True)

    @pl.when(ends)
    def _():
        dk_ref[...] = (dk_acc_ref[...] * scale).T.astype(dk_ref.dtype)
        dv_ref[...] = dv_acc_ref[...].T.astype(dv_ref.dtype)

    @pl.when(ends & (kv_block == pl.num_programs(2) - 1))
    def _():
        sums.finish(dq_ref, sums_refs)


def _keep_part(part, q_ids, tokens):
    """Which scores of a part of a block survive, [queries, keys]."""
    kv_ids = tokens[1][:, part.columns]
    q_ids = widen(q_ids[part.rows], kv_ids.shape[1])
    keep = q_ids == kv_ids
    return keep


def _bias_gradient(q, k, v, dout, lse, delta, operands, tile):
    """The scores' gradient where each has a bias of its own, and sums of it where several share one."""
    batch, q_seq, q_heads, _ = q.shape
    _, kv_seq, kv_heads, _ = k.shape
    block_q, block_kv = fit_block(tile.block_q, q_seq), fit_block(tile.block_kv, kv_seq)
    q_blocks, kv_blocks = pl.cdiv(q_seq, block_q), pl.cdiv(kv_seq, block_kv)
    bias = score_blocks(operands.bias, batch, block_q, block_kv)
    queries, keys, rows, scores, tokens = _bias_blocks(block_q, block_kv, q_heads // kv_heads, bias)
    semantics = ("parallel", "parallel", "parallel", "parallel", "arbitrary", "arbitrary", "arbitrary", "arbitrary")
    dbias = pl.pallas_call(
        functools.partial(
            _dbias_kernel,
            bias=bias,
            scale=operands.scale,
            precision=matmul_precision(q.dtype),
        ),
        out_shape=jax.ShapeDtypeStruct(bias.array.shape, bias.array.dtype),
        grid_spec=pl.GridSpec(
            grid=bias.grid(q_heads, q_blocks, kv_blocks),
            in_specs=[
                tokens,
                scores(bias),
                queries(HEAD_DIM),
                keys(HEAD_DIM),
                keys(HEAD_DIM),
                queries(HEAD_DIM),
                rows,
                rows,
            ],
            out_specs=scores(bias),
            scratch_shapes=[pltpu.VMEM(bias.tile_shape, jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=semantics,
            vmem_limit_bytes=vmem_limit_bytes(),
        ),
        interpret=interpret_params(),
        name="attention_dbias",
    )(
        pad_segments(operands.segments, q_blocks * block_q, kv_blocks * block_kv),
        bias.array,
        q.swapaxes(1, 2),
        k.swapaxes(1, 2),
        v.swapaxes(1, 2),
        dout.swapaxes(1, 2),
        pad_rows(lse, q_blocks * block_q, BLIND),
        pad_rows(delta, q_blocks * block_q, 0.0),
    )
    return dbias.reshape(operands.bias.shape).astype(operands.bias.dtype)


def _dbias_kernel(
    tokens, bias_ref, q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, dbias_ref, acc_ref, *, bias, scale, precision
):
    """One block of scores of one head into the gradient of the bias."""
    steps = [pl.program_id(axis) for axis in range(8)]

    @pl.when(sum(steps[4:]) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)  # [block_kv or 1, block_q or 1]

    keep = _keep(tokens)

    @pl.when(jnp.any(keep))
    def _():
        s = dot(k_ref[...], q_ref[...], (1, 1), precision) * scale + bias.tile(bias_ref)  # [block_kv, block_q]
        p = jnp.exp2((s - lse_ref[...]) * LOG2_E)
        dp = dot(v_ref[...], dout_ref[...], (1, 1), precision)
        acc_ref[...] += bias.summed(jnp.where(keep, p * (dp - delta_ref[...]), 0.0))

    @pl.when(sum(steps[4:]) == sum(pl.num_programs(axis) - 1 for axis in range(4, 8)))
    def _():
        dbias_ref[...] = bias.untile(acc_ref[...]).astype(dbias_ref.dtype)


def _bias_blocks(block_q, block_kv, group, bias):
    """Block specs for the grid of `_bias_gradient`, in the order of `_query_blocks`."""

    def queries(dim):
        def index(*steps):
            b, h, i, _ = bias.place(*steps)
            return b, h, i, 0

        return pl.BlockSpec((None, None, block_q, dim), index)

    def keys(dim):
        def index(*steps):
            b, h, _, j = bias.place(*steps)
            return b, h // group, j, 0

        return pl.BlockSpec((None, None, block_kv, dim), index)

    def row_index(*steps):
        b, h, i, _ = bias.place(*steps)
        return b, h, 0, i

    rows = pl.BlockSpec((None, None, 1, block_q), row_index)

    def scores(blocks):
        return blocks.spec(bias.place)

    def q_index(*steps):
        b, _, i, _ = bias.place(*steps)
        return b, 0, i

    def kv_index(*steps):
        b, _, _, j = bias.place(*steps)
        return b, 0, j

    q_tokens = pl.BlockSpec((None, 1, block_q), q_index)
    kv_tokens = pl.BlockSpec((None, 1, block_kv), kv_index)
    return queries, keys, rows, scores, (q_tokens, kv_tokens)


def _keep(tokens):
    """Which scores of a block survive, [block_kv, block_q]."""
    q_ids_ref, kv_ids_ref = tokens
    q_ids, kv_ids = q_ids_ref[...], column(kv_ids_ref[...])
    keep = q_ids == kv_ids
    return keep


def _zero_padding(x, tokens):
    """A block of keys or values with 0 for padding, which may hold anything, and even a weight of 0 keeps no NaN out."""
    return jnp.where(column(tokens[1][...]) > 0, x, 0)


def _query_blocks(block_q, block_kv, group, visits):
    """Block specs for the grid (batch, q_heads, q_blocks, steps): queries, keys, a value per query, scores, ids."""

    def queries(dim):
        return pl.BlockSpec((None, None, block_q, dim), lambda b, h, i, step, table: (b, h, i, 0))

    def keys(dim):
        def index(b, h, i, step, table):
            return b, h // group, visits.block(table, i, step, b), 0

        return pl.BlockSpec((None, None, block_kv, dim), index)

    rows = pl.BlockSpec((None, None, 1, block_q), lambda b, h, i, step, table: (b, h, 0, i))

    def scores(blocks):
        return blocks.spec(lambda b, h, i, step, table: (b, h, i, visits.block(table, i, step, b)))

    q_tokens = pl.BlockSpec((None, 1, block_q), lambda b, h, i, step, table: (b, 0, i))
    kv_tokens = pl.BlockSpec((None, 1, block_kv), lambda b, h, i, step, table: (b, 0, visits.block(table, i, step, b)))
    return queries, keys, rows, scores, (q_tokens, kv_tokens)


def _key_blocks(block_q, block_kv, group, visits):
    """Block specs for the grid (batch, kv_heads, kv_blocks, group, steps), in the order of `_query_blocks`."""

    def queries(dim):
        def index(b, h, j, g, step, table):
            return b, h * group + g, visits.block(table, j, step, b), 0

        return pl.BlockSpec((None, None, block_q, dim), index)

    def keys(dim):
        return pl.BlockSpec((None, None, block_kv, dim), lambda b, h, j, g, step, table: (b, h, j, 0))

    def row_index(b, h, j, g, step, table):
        return b, h * group + g, 0, visits.block(table, j, step, b)

    rows = pl.BlockSpec((None, None, 1, block_q), row_index)

    def scores(blocks):
        return blocks.spec(lambda b, h, j, g, step, table: (b, h * group + g, visits.block(table, j, step, b), j))

    q_tokens = pl.BlockSpec((None, 1, block_q), lambda b, h, j, g, step, table: (b, 0, visits.block(table, j, step, b)))
    kv_tokens = pl.BlockSpec((None, 1, block_kv), lambda b, h, j, g, step, table: (b, 0, j))
    return queries, keys, rows, scores, (q_tokens, kv_tokens)
