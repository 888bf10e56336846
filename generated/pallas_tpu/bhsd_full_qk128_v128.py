# Generated from templates/pallas_tpu/attention.py.jinja by python -m codegen; do not edit.
# spec: pallas_tpu/bhsd_full_qk128_v128
# digest: f05522219b1d438a
"""Full attention on a TPU, forward and backward.

Query [batch, q_heads, q_seq, 128], key [batch, kv_heads, kv_seq, 128], value [batch, kv_heads, kv_seq, 128].

The algorithm is FlashAttention-2's (Dao 2023, arXiv:2307.08691): the forward keeps a running softmax over blocks of
keys; the backward recomputes the scores once, for all gradients. In the forward, scores are held transposed,
[block_kv, block_q]: the statistics of a query then lie along the lanes, like lse in memory, and maxima and sums over
keys need no exchange between lanes.

The maximum of a block would keep its weights waiting for all of its scores. Weights refer to a maximum from before the
block instead, so that a block's parts overlap, the products of one with the weights of another; where a sum of weights
then grows out of range, the block is taken again, with its own maximum.
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
    ends_of_rows,
    fit_block,
    fit_chunk,
    in_turns,
    interpret_params,
    matmul_precision,
    OVERFLOW,
    pad_rows,
    parts_before_end,
    parts_of_block,
    query_sums,
    SAMPLE,
    vmem_limit_bytes,
    widen,
    zero_tail,
)

SPEC = "pallas_tpu/bhsd_full_qk128_v128"

HEAD_DIM = 128
LOG2_E = 1.4426950408889634  # exp(x) = exp2(LOG2_E * x), and the hardware has exp2
HIDDEN = -1e30  # the score of a key past the end
BLIND = 1e30  # in the backward, the lse of a query past the end: exp2(score - lse) is 0


def forward(q, k, v, operands, tiles):
    """Returns out [batch, q_heads, q_seq, 128] and lse, float32 [batch, q_heads, q_seq].

    lse is the natural logarithm of the sum of a query's exponentiated scores.
    """
    batch, q_heads, q_seq, _ = q.shape
    _, kv_heads, kv_seq, _ = k.shape
    block_q, block_kv = fit_block(tiles.forward.block_q, q_seq), fit_block(tiles.forward.block_kv, kv_seq)
    q_blocks, kv_blocks = pl.cdiv(q_seq, block_q), pl.cdiv(kv_seq, block_kv)
    queries, keys, rows = _query_blocks(block_q, block_kv, q_heads // kv_heads)
    out, lse = pl.pallas_call(
        functools.partial(
            _forward_kernel,
            scale=operands.scale,
            q_seq=q_seq,
            kv_seq=kv_seq,
            tile=tiles.forward,
            precision=matmul_precision(q.dtype),
        ),
        out_shape=(
            jax.ShapeDtypeStruct((batch, q_heads, q_seq, HEAD_DIM), operands.out_dtype or q.dtype),
            jax.ShapeDtypeStruct((batch, q_heads, 1, q_blocks * block_q), jnp.float32),
        ),
        grid_spec=pl.GridSpec(
            grid=(batch, q_heads, q_blocks, kv_blocks),
            in_specs=[queries(HEAD_DIM), keys(HEAD_DIM), keys(HEAD_DIM)],
            out_specs=(queries(HEAD_DIM), rows),
            scratch_shapes=[
                pltpu.VMEM((2, HEAD_DIM, block_q), jnp.float32),
                pltpu.VMEM((1, block_q), jnp.float32),
                pltpu.VMEM((2, 1, block_q), jnp.float32),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.VMEM((HEAD_DIM, block_q), q.dtype),
                pltpu.VMEM((HEAD_DIM, block_kv), v.dtype),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=vmem_limit_bytes(),
        ),
        interpret=interpret_params(),
        name="attention_forward",
    )(
        q,
        k,
        v,
    )
    return out, lse[:, :, 0, :q_seq]


def _forward_kernel(
    q_ref,
    k_ref,
    v_ref,
    out_ref,
    lse_ref,
    acc_ref,
    max_ref,
    sum_ref,
    slot_ref,
    exact_ref,
    queries_ref,
    values_ref,
    *,
    scale,
    q_seq,
    kv_seq,
    tile,
    precision,
):
    """One step of one block of queries: one block of keys into the running softmax of each query."""
    kv_block = pl.program_id(3)

    @pl.when(kv_block == 0)
    def _():
        slot_ref[0] = 0
        acc_ref[0] = jnp.zeros(acc_ref.shape[1:], jnp.float32)  # [head_dim, block_q]
        sum_ref[0] = jnp.zeros(sum_ref.shape[1:], jnp.float32)  # [1, block_q]
        queries_ref[...] = zero_tail(q_ref[...], pl.program_id(2), q_seq).T
        # Queries start with the maximum over the first keys.
        s = dot(k_ref[: min(kv_seq, SAMPLE)], queries_ref[...], (1, 0), precision) * (scale * LOG2_E)
        max_ref[...] = jnp.max(s, axis=0, keepdims=True)  # [1, block_q]

    block_q, block_kv = q_ref.shape[0], k_ref.shape[0]
    kv_start = kv_block * block_kv
    chunk = fit_chunk(block_q, block_kv)
    chunks = block_kv // chunk

    def attend():
        """Chunks of keys one after the other, each with the maximum of all keys so far."""
        slot = slot_ref[0]

        def attend_chunk(number, _):
            keys = pl.ds(pl.multiple_of(number * chunk, chunk), chunk)
            v = v_ref[keys]
            s = dot(k_ref[keys], queries_ref[...], (1, 0), precision) * (scale * LOG2_E)  # [chunk, block_q]
            s = jnp.where(_keep(kv_start + number * chunk, s.shape, kv_seq), s, HIDDEN)
            v = zero_tail(v, kv_start // chunk + number, kv_seq)
            row_max = jnp.maximum(max_ref[...], jnp.max(s, axis=0, keepdims=True))
            correction = jnp.exp2(max_ref[...] - row_max)
            p = jnp.exp2(s - row_max)
            max_ref[...] = row_max
            sum_ref[slot] = sum_ref[slot] * correction + jnp.sum(p, axis=0, keepdims=True)
            acc_ref[slot] = acc_ref[slot] * correction + dot(v, p.astype(v.dtype), (0, 0), precision)
            return 0

        end = jnp.minimum(pl.cdiv(kv_seq - kv_start, chunk), chunks)
        lax.fori_loop(0, end, attend_chunk, 0)

    def attend_parts(parts):
        """Parts of the scores, the products of one beside the weights of another, against a maximum from before this block."""
        old, new = slot_ref[0], 1 - slot_ref[0]
        values_ref[...] = v_ref[...].T
        parts = sorted(parts, key=lambda part: part.rows.start)
        first, last = ends_of_rows(parts)
        products, weights = {}, {}
        for turn in range(-tile.lead, len(parts) + tile.lag):
            if turn >= tile.lag:
                number = turn - tile.lag
                rows, columns, _ = parts[number]
                acc = acc_ref[old, :, rows] if number in first else acc
                acc = acc + dot(values_ref[:, columns], weights.pop(number), (1, 0), precision)  # [head_dim, rows]
                if number in last:
                    acc_ref[new, :, rows] = acc
            if turn + tile.lead < len(parts):
                rows, columns, _ = parts[turn + tile.lead]
                products[turn + tile.lead] = dot(k_ref[columns], queries_ref[:, rows], (1, 0), precision)
            if 0 <= turn < len(parts):
                rows, columns, whole = parts[turn]
                s = products.pop(turn) * (scale * LOG2_E)  # [columns, rows]
                p = jnp.exp2(s - max_ref[:, rows])
                total = sum_ref[old, :, rows] if turn in first else total
                total = total + jnp.sum(p, axis=0, keepdims=True)
                if turn in last:
                    sum_ref[new, :, rows] = total
                weights[turn] = p.astype(v_ref.dtype)
        fits = jnp.max(jnp.where(sum_ref[new] < OVERFLOW, 0, 1)) == 0

        slot_ref[0] = jnp.where(fits, new, old)
        exact_ref[0] = jnp.where(fits, 0, 1)

    def attend_first(keys):
        attend_parts(parts_of_block(tile, block_q, keys))

    if kv_seq % block_kv:
        pl.when(kv_block < kv_seq // block_kv)(functools.partial(attend_first, block_kv))
        pl.when(kv_block == kv_seq // block_kv)(functools.partial(attend_first, kv_seq % block_kv))
    else:
        attend_first(block_kv)

    pl.when(exact_ref[0] == 1)(attend)

    @pl.when(kv_block == pl.num_programs(3) - 1)
    def _():
        acc, total = acc_ref[slot_ref[0]], sum_ref[slot_ref[0]]
        out_ref[...] = (acc / total).T.astype(out_ref.dtype)
        lse_ref[...] = (max_ref[...] + jnp.log2(total)) / LOG2_E


def backward(q, k, v, out, lse, dout, dlse, operands, tiles):
    """Returns dq, dk, dv, like q, k, v, for the gradients dout of out and dlse of lse."""
    # The gradient of a score is p * (dp - delta): delta is the same for all keys of a query, and lse adds p * dlse.
    delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1)
    delta = delta - dlse  # [batch, q_heads, q_seq]
    lse = lse * LOG2_E
    dq, dk, dv = _array_gradients(q, k, v, dout, lse, delta, operands, tiles.dkv)
    return dq, dk, dv


def _array_gradients(q, k, v, dout, lse, delta, operands, tile):
    """Each block of keys goes over the blocks of queries that see it, for every query head that it serves."""
    batch, q_heads, q_seq, _ = q.shape
    _, kv_heads, kv_seq, _ = k.shape
    block_q, block_kv = fit_block(tile.block_q, q_seq), fit_block(tile.block_kv, kv_seq)
    q_blocks, kv_blocks = pl.cdiv(q_seq, block_q), pl.cdiv(kv_seq, block_kv)
    group = q_heads // kv_heads
    queries, keys, rows = _key_blocks(block_q, block_kv, group)
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
            in_specs=[queries(HEAD_DIM), keys(HEAD_DIM), keys(HEAD_DIM), queries(HEAD_DIM), rows, rows],
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
        q,
        k,
        v,
        dout,
        pad_rows(lse, q_blocks * block_q, BLIND),
        pad_rows(delta, q_blocks * block_q, 0.0),
    )
    return (
        sums.result(dq),
        dk,
        dv,
    )


def _backward_kernel(
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

    def accumulate(parts):
        step_sums = sums.fetch(dq_ref, sums_refs, q_block)
        if q_seq % q_ref.shape[0]:

            @pl.when(q_block == q_seq // q_ref.shape[0])
            def _():
                # Queries past the end must not reach the sums, not even as NaN * 0.
                q_ref[...] = zero_tail(q_ref[...], q_block, q_seq)
                dout_ref[...] = zero_tail(dout_ref[...], q_block, q_seq)

        q, dout = q_ref[...], dout_ref[...]
        lse, delta = across_lanes(lse_ref[...]), across_lanes(delta_ref[...])  # [block_q, 128]
        q_t_ref[...], dout_t_ref[...] = q.T, dout.T

        def score(part):
            return dot(q[part.rows], k_t_ref[:, part.columns], (1, 0), precision)

        def score_of_dout(part):
            return dot(dout[part.rows], v_t_ref[:, part.columns], (1, 0), precision)

        def weigh(part, s, dp):
            row_lse, row_delta = widen(lse[part.rows], s.shape[1]), widen(delta[part.rows], s.shape[1])
            s = s * (scale * LOG2_E)
            if not part.whole:
                s = jnp.where(_keep_part(part, kv_block, k_ref.shape[0], kv_seq), s, HIDDEN)
            p = jnp.exp2(s - row_lse)
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
        accumulate(parts)

    if kv_seq % k_ref.shape[0]:

        @pl.when(kv_block == kv_seq // k_ref.shape[0])
        def _():
            accumulate(partial_parts)

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


def _keep(kv_start, shape, kv_seq):
    """Which scores of keys from this one on survive, `shape` [keys, queries]: those of keys before the end."""
    return kv_start + lax.broadcasted_iota(jnp.int32, shape, 0) < kv_seq


def _query_blocks(block_q, block_kv, group):
    """Block specs for the grid (batch, q_heads, q_blocks, steps): queries, keys, a value per query."""

    def queries(dim):
        return pl.BlockSpec((None, None, block_q, dim), lambda b, h, i, step: (b, h, i, 0))

    def keys(dim):
        def index(b, h, i, step):
            return b, h // group, step, 0

        return pl.BlockSpec((None, None, block_kv, dim), index)

    rows = pl.BlockSpec((None, None, 1, block_q), lambda b, h, i, step: (b, h, 0, i))
    return queries, keys, rows


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
    return queries, keys, rows
