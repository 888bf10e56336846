# Generated from templates/pallas_tpu/attention.py.jinja by python -m codegen; do not edit.
# spec: pallas_tpu/bshd_full_qk32_v32_bias
# digest: 85d85568f8397077
"""Full attention on a TPU, forward and backward.

Query [batch, q_seq, q_heads, 32], key [batch, kv_seq, kv_heads, 32], value [batch, kv_seq, kv_heads, 32].
A TPU's tiles are 128 lanes wide, and heads of this dim, side by side in a token, do not lie on them: the
arrays are copied to [batch, heads, seq, dim] before the kernels, and the results back.

The algorithm is FlashAttention-2's (Dao 2023, arXiv:2307.08691): the forward keeps a running softmax over blocks of
keys; the backward recomputes the scores once, for all gradients. In the forward, scores are held transposed,
[block_kv, block_q]: the statistics of a query then lie along the lanes, like lse in memory, and maxima and sums over
keys need no exchange between lanes.

The bias is read by blocks as it is, and transposed like the scores. Its gradient has a kernel of its own, which runs where
it is asked for.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from eqx_attn._device import (
    across_lanes,
    dot,
    fit_block,
    in_turns,
    interpret_params,
    matmul_precision,
    pad_rows,
    parts_before_end,
    parts_of_block,
    query_sums,
    score_blocks,
    vmem_limit_bytes,
    widen,
    zero_tail,
)

SPEC = "pallas_tpu/bshd_full_qk32_v32_bias"

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
    bias = score_blocks(operands.bias, batch, block_q, block_kv)
    queries, keys, rows, scores = _query_blocks(block_q, block_kv, q_heads // kv_heads)
    out, lse = pl.pallas_call(
        functools.partial(
            _forward_kernel,
            bias=bias,
            scale=operands.scale,
            kv_seq=kv_seq,
            precision=matmul_precision(q.dtype),
        ),
        out_shape=(
            jax.ShapeDtypeStruct((batch, q_heads, q_seq, HEAD_DIM), operands.out_dtype or q.dtype),
            jax.ShapeDtypeStruct((batch, q_heads, 1, q_blocks * block_q), jnp.float32),
        ),
        grid_spec=pl.GridSpec(
            grid=(batch, q_heads, q_blocks, kv_blocks),
            in_specs=[scores(bias), queries(HEAD_DIM), keys(HEAD_DIM), keys(HEAD_DIM)],
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
        bias.array,
        q.swapaxes(1, 2),
        k.swapaxes(1, 2),
        v.swapaxes(1, 2),
    )
    return out.swapaxes(1, 2), lse[:, :, 0, :q_seq]


def _forward_kernel(
    bias_ref, q_ref, k_ref, v_ref, out_ref, lse_ref, acc_ref, max_ref, sum_ref, *, bias, scale, kv_seq, precision
):
    """One step of one block of queries: one block of keys into the running softmax of each query."""
    kv_block = pl.program_id(3)

    @pl.when(kv_block == 0)
    def _():
        max_ref[...] = jnp.full_like(max_ref, HIDDEN)  # [1, block_q]
        acc_ref[...] = jnp.zeros_like(acc_ref)  # [head_dim, block_q]
        sum_ref[...] = jnp.zeros_like(sum_ref)

    def attend(partial):
        v = v_ref[...]
        s = dot(k_ref[...], q_ref[...], (1, 1), precision) * scale + bias.tile(bias_ref)  # [block_kv, block_q]
        if partial:
            s = jnp.where(_keep(kv_block * k_ref.shape[0], s.shape, kv_seq), s, HIDDEN)
            v = zero_tail(v, kv_block, kv_seq)
        row_max = jnp.maximum(max_ref[...], jnp.max(s, axis=0, keepdims=True))
        shift = jnp.where(row_max > HIDDEN, row_max, 0.0)  # -inf - -inf is no number
        correction = jnp.exp2((max_ref[...] - shift) * LOG2_E)
        p = jnp.exp2((s - shift) * LOG2_E)
        max_ref[...] = row_max
        sum_ref[...] = sum_ref[...] * correction + jnp.sum(p, axis=0, keepdims=True)
        acc_ref[...] = acc_ref[...] * correction + dot(v, p.astype(v.dtype), (0, 0), precision)

    @pl.when(kv_block < kv_seq // k_ref.shape[0])
    def _():
        attend(partial=False)

    if kv_seq % k_ref.shape[0]:

        @pl.when(kv_block == kv_seq // k_ref.shape[0])
        def _():
            attend(partial=True)

    @pl.when(kv_block == pl.num_programs(3) - 1)
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
    bias = score_blocks(operands.bias, batch, block_q, block_kv)
    queries, keys, rows, scores = _key_blocks(block_q, block_kv, group)
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
            bias=bias,
            scale=operands.scale,
            q_seq=q_seq,
            kv_seq=kv_seq,
            sums=sums,
            precision=matmul_precision(q.dtype),
            parts=parts_of_block(tile, block_q, block_kv),
            partial_parts=parts_before_end(tile, block_q, block_kv, kv_seq),
        ),
        out_shape=(
            sums.shape,
            jax.ShapeDtypeStruct((batch, kv_heads, kv_seq, HEAD_DIM), operands.out_dtype or k.dtype),
            jax.ShapeDtypeStruct((batch, kv_heads, kv_seq, HEAD_DIM), operands.out_dtype or v.dtype),
        ),
        grid_spec=pl.GridSpec(
            grid=(batch, kv_heads, kv_blocks, group, q_blocks),
            in_specs=[scores(bias), queries(HEAD_DIM), keys(HEAD_DIM), keys(HEAD_DIM), queries(HEAD_DIM), rows, rows],
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
    bias,
    scale,
    q_seq,
    kv_seq,
    sums,
    precision,
    parts,
    partial_parts,
):
    """One step of one block of keys: one block of one head's queries into all gradients.

    Scores are [queries, keys] here; keys, values and all sums are transposed, so that of the five products only the one
    for dq, k^T ds^T, takes its second matrix transposed.
    """
    kv_block, q_block = pl.program_id(2), pl.program_id(4)
    starts = (pl.program_id(3) == 0) & (q_block == 0)
    ends = (pl.program_id(3) == pl.num_programs(3) - 1) & (q_block == pl.num_programs(4) - 1)

    @pl.when(starts & (kv_block == 0))
    def _():
        sums.clear(dq_ref, sums_refs)

    @pl.when(starts)
    def _():
        k_t_ref[...] = zero_tail(k_ref[...], kv_block, kv_seq).T  # [head_dim, block_kv]
        v_t_ref[...] = zero_tail(v_ref[...], kv_block, kv_seq).T  # [head_dim, block_kv]
        dk_acc_ref[...] = jnp.zeros_like(dk_acc_ref)  # [head_dim, block_kv]
        dv_acc_ref[...] = jnp.zeros_like(dv_acc_ref)  # [head_dim, block_kv]

    def accumulate(parts, partial):
        step_sums = sums.fetch(dq_ref, sums_refs, q_block)
        if q_seq % q_ref.shape[0]:

            @pl.when(q_block == q_seq // q_ref.shape[0])
            def _():
                # Queries past the end must not reach the sums, not even as NaN * 0.
                q_ref[...] = zero_tail(q_ref[...], q_block, q_seq)
                dout_ref[...] = zero_tail(dout_ref[...], q_block, q_seq)

        q, dout = q_ref[...], dout_ref[...]
        lse, delta = across_lanes(lse_ref[...]), across_lanes(delta_ref[...])  # [block_q, 128]
        bias_of = bias.by_part(bias_ref)
        if partial:
            # Queries without any key must not reach the sums, not even as NaN * 0.
            sees = lse[:, :1] < BLIND
            q, dout = jnp.where(sees, q, 0), jnp.where(sees, dout, 0)
        q_t_ref[...], dout_t_ref[...] = q.T, dout.T

        def score(part):
            return dot(q[part.rows], k_t_ref[:, part.columns], (1, 0), precision)

        def score_of_dout(part):
            return dot(dout[part.rows], v_t_ref[:, part.columns], (1, 0), precision)

        def weigh(part, s, dp):
            row_lse, row_delta = widen(lse[part.rows], s.shape[1]), widen(delta[part.rows], s.shape[1])
            s = s * scale + bias_of(part)
            if q_seq % q_ref.shape[0]:
                s = jnp.where(row_lse < BLIND, s, HIDDEN)
            if not part.whole:
                s = jnp.where(_keep_part(part, kv_block, k_ref.shape[0], kv_seq), s, HIDDEN)
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

    @pl.when(kv_block < kv_seq // k_ref.shape[0])
    def _():
        accumulate(parts, partial=False)

    if kv_seq % k_ref.shape[0]:

        @pl.when(kv_block == kv_seq // k_ref.shape[0])
        def _():
            accumulate(partial_parts, partial=True)

    @pl.when(ends)
    def _():
        dk_ref[...] = (dk_acc_ref[...] * scale).T.astype(dk_ref.dtype)
        dv_ref[...] = dv_acc_ref[...].T.astype(dv_ref.dtype)

    @pl.when(ends & (kv_block == pl.num_programs(2) - 1))
    def _():
        sums.finish(dq_ref, sums_refs)


def _keep_part(part, kv_block, block_kv, kv_seq):
    """Which scores of a part of a block survive, [1, keys]: those of keys before the end."""
    columns = lax.broadcasted_iota(jnp.int32, (1, part.columns.stop - part.columns.start), 1)
    return kv_block * block_kv + part.columns.start + columns < kv_seq


def _bias_gradient(q, k, v, dout, lse, delta, operands, tile):
    """The scores' gradient where each has a bias of its own, and sums of it where several share one."""
    batch, q_seq, q_heads, _ = q.shape
    _, kv_seq, kv_heads, _ = k.shape
    block_q, block_kv = fit_block(tile.block_q, q_seq), fit_block(tile.block_kv, kv_seq)
    q_blocks, kv_blocks = pl.cdiv(q_seq, block_q), pl.cdiv(kv_seq, block_kv)
    bias = score_blocks(operands.bias, batch, block_q, block_kv)
    queries, keys, rows, scores = _bias_blocks(block_q, block_kv, q_heads // kv_heads, bias)
    semantics = ("parallel", "parallel", "parallel", "parallel", "arbitrary", "arbitrary", "arbitrary", "arbitrary")
    dbias = pl.pallas_call(
        functools.partial(
            _dbias_kernel,
            bias=bias,
            scale=operands.scale,
            kv_seq=kv_seq,
            precision=matmul_precision(q.dtype),
        ),
        out_shape=jax.ShapeDtypeStruct(bias.array.shape, bias.array.dtype),
        grid_spec=pl.GridSpec(
            grid=bias.grid(q_heads, q_blocks, kv_blocks),
            in_specs=[scores(bias), queries(HEAD_DIM), keys(HEAD_DIM), keys(HEAD_DIM), queries(HEAD_DIM), rows, rows],
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
    bias_ref, q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, dbias_ref, acc_ref, *, bias, scale, kv_seq, precision
):
    """One block of scores of one head into the gradient of the bias."""
    steps = [pl.program_id(axis) for axis in range(8)]
    _, _, _, kv_block = bias.place(*steps)

    @pl.when(sum(steps[4:]) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)  # [block_kv or 1, block_q or 1]

    keep = _keep(kv_block * k_ref.shape[0], (k_ref.shape[0], q_ref.shape[0]), kv_seq)
    keep &= lse_ref[...] < BLIND
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

    return queries, keys, rows, scores


def _keep(kv_start, shape, kv_seq):
    """Which scores of keys from this one on survive, `shape` [keys, queries]: those of keys before the end."""
    return kv_start + lax.broadcasted_iota(jnp.int32, shape, 0) < kv_seq


def _query_blocks(block_q, block_kv, group):
    """Block specs for the grid (batch, q_heads, q_blocks, steps): queries, keys, a value per query, scores."""

    def queries(dim):
        return pl.BlockSpec((None, None, block_q, dim), lambda b, h, i, step: (b, h, i, 0))

    def keys(dim):
        def index(b, h, i, step):
            return b, h // group, step, 0

        return pl.BlockSpec((None, None, block_kv, dim), index)

    rows = pl.BlockSpec((None, None, 1, block_q), lambda b, h, i, step: (b, h, 0, i))

    def scores(blocks):
        return blocks.spec(lambda b, h, i, step: (b, h, i, step))

    return queries, keys, rows, scores


def _key_blocks(block_q, block_kv, group):
    """Block specs for the grid (batch, kv_heads, kv_blocks, group, steps), in the order of `_query_blocks`."""

    def queries(dim):
        def index(b, h, j, g, step):
            return b, h * group + g, step, 0

        return pl.BlockSpec((None, None, block_q, dim), index)

    def keys(dim):
        return pl.BlockSpec((None, None, block_kv, dim), lambda b, h, j, g, step: (b, h, j, 0))

    def row_index(b, h, j, g, step):
        return b, h * group + g, 0, step

    rows = pl.BlockSpec((None, None, 1, block_q), row_index)

    def scores(blocks):
        return blocks.spec(lambda b, h, j, g, step: (b, h * group + g, step, j))

    return queries, keys, rows, scores
