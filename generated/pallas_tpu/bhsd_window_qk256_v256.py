# Generated from templates/pallas_tpu/attention.py.jinja by python -m codegen; do not edit.
# spec: pallas_tpu/bhsd_window_qk256_v256
# digest: 0aba8e70fce561b7
"""Sliding-window attention on a TPU, forward and backward.

Query [batch, q_heads, q_seq, 256], key [batch, kv_heads, kv_seq, 256], value [batch, kv_heads, kv_seq, 256].

The algorithm is FlashAttention-2's (Dao 2023, arXiv:2307.08691): the forward keeps a running softmax over blocks of
keys; the backward recomputes the scores once, for all gradients. In the forward, scores are held transposed,
[block_kv, block_q]: the statistics of a query then lie along the lanes, like lse in memory, and maxima and sums over
keys need no exchange between lanes.

The maximum of a block would keep its weights waiting for all of its scores. Weights refer to a maximum from before the
block instead, so that a block's parts overlap, the products of one with the weights of another; where a sum of weights
then grows out of range, the block is taken again, with its own maximum.

Which blocks a block visits, and which of those need a mask, is a table in scalar memory; nothing is loaded for a block
with nothing to see.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from eqx_attn._device import (
    across_lanes,
    band_kv_visits,
    band_q_visits,
    dot,
    edges_of_band,
    ends_of_rows,
    fit_block,
    fit_chunk,
    in_turns,
    interpret_params,
    LANES,
    matmul_precision,
    OVERFLOW,
    pad_rows,
    parts_of_block,
    query_sums,
    rows_without,
    SAMPLE,
    vmem_limit_bytes,
    widen,
    zero_tail,
)

SPEC = "pallas_tpu/bhsd_window_qk256_v256"

HEAD_DIM = 256
LOG2_E = 1.4426950408889634  # exp(x) = exp2(LOG2_E * x), and the hardware has exp2
HIDDEN = -1e30  # the score of a key that the query does not see
BLIND = 1e30  # in the backward, the lse of a query past the end or without any key: exp2(score - lse) is 0


def forward(q, k, v, operands, tiles):
    """Returns out [batch, q_heads, q_seq, 256] and lse, float32 [batch, q_heads, q_seq].

    lse is the natural logarithm of the sum of a query's exponentiated scores; -inf, and out 0, where it sees no key.
    """
    batch, q_heads, q_seq, _ = q.shape
    _, kv_heads, kv_seq, _ = k.shape
    block_q, block_kv = fit_block(tiles.forward.block_q, q_seq), fit_block(tiles.forward.block_kv, kv_seq)
    q_blocks = pl.cdiv(q_seq, block_q)
    visits = band_kv_visits(q_seq, kv_seq, block_q, block_kv, lower=operands.lower, upper=operands.upper)
    queries, keys, rows = _query_blocks(block_q, block_kv, q_heads // kv_heads, visits)
    edges = edges_of_band(tiles.forward, block_q, block_kv, q_seq, kv_seq, lower=operands.lower, upper=operands.upper)
    out, lse = pl.pallas_call(
        functools.partial(
            _forward_kernel,
            visits=visits,
            scale=operands.scale,
            lower=operands.lower,
            upper=operands.upper,
            q_seq=q_seq,
            kv_seq=kv_seq,
            tile=tiles.forward,
            edges=edges,
            precision=matmul_precision(q.dtype),
        ),
        out_shape=(
            jax.ShapeDtypeStruct((batch, q_heads, q_seq, HEAD_DIM), operands.out_dtype or q.dtype),
            jax.ShapeDtypeStruct((batch, q_heads, 1, q_blocks * block_q), jnp.float32),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, q_heads, q_blocks, visits.steps),
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
        visits.table,
        q,
        k,
        v,
    )
    return out, lse[:, :, 0, :q_seq]


def _forward_kernel(
    visits_ref,
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
    visits,
    scale,
    lower,
    upper,
    q_seq,
    kv_seq,
    tile,
    edges,
    precision,
):
    """One step of one block of queries: one block of keys into the running softmax of each query."""
    q_block, step = pl.program_id(2), pl.program_id(3)
    kv_block = visits.block(visits_ref, q_block, step)

    @pl.when(step == 0)
    def _():
        max_ref[...] = jnp.full_like(max_ref, HIDDEN)  # [1, block_q]
        slot_ref[0] = 0
        acc_ref[0] = jnp.zeros(acc_ref.shape[1:], jnp.float32)  # [head_dim, block_q]
        sum_ref[0] = jnp.zeros(sum_ref.shape[1:], jnp.float32)  # [1, block_q]
        queries_ref[...] = zero_tail(q_ref[...], q_block, q_seq).T

    block_q, block_kv = q_ref.shape[0], k_ref.shape[0]
    q_start, kv_start = q_block * block_q, kv_block * block_kv
    chunk = fit_chunk(block_q, block_kv)
    chunks = block_kv // chunk

    def attend():
        """Chunks of keys one after the other, each with the maximum of all keys so far."""
        slot = slot_ref[0]

        def attend_chunk(number, _):
            keys = pl.ds(pl.multiple_of(number * chunk, chunk), chunk)
            v = v_ref[keys]
            s = dot(k_ref[keys], queries_ref[...], (1, 0), precision) * (scale * LOG2_E)  # [chunk, block_q]
            s = jnp.where(_keep(q_start, kv_start + number * chunk, s.shape, lower, upper, kv_seq), s, HIDDEN)
            v = zero_tail(v, kv_start // chunk + number, kv_seq)
            row_max = jnp.maximum(max_ref[...], jnp.max(s, axis=0, keepdims=True))
            shift = jnp.where(row_max > HIDDEN, row_max, 0.0)  # where nothing is seen, nothing is added
            correction = jnp.exp2(max_ref[...] - shift)
            p = jnp.exp2(s - shift)
            max_ref[...] = row_max
            sum_ref[slot] = sum_ref[slot] * correction + jnp.sum(p, axis=0, keepdims=True)
            acc_ref[slot] = acc_ref[slot] * correction + dot(v, p.astype(v.dtype), (0, 0), precision)
            return 0

        keys = kv_seq - kv_start  # up to the end of the sequence
        keys = jnp.minimum(keys, q_start + block_q + upper - kv_start)  # up to the last query's last
        end = jnp.minimum(pl.cdiv(keys, chunk), chunks)
        first = jnp.maximum(q_start + lower - kv_start, 0) // chunk
        lax.fori_loop(first, end, attend_chunk, 0)

    def attend_parts(parts, partial):
        """Parts of the scores, the products of one beside the weights of another, against a maximum from before this block."""
        old, new = slot_ref[0], 1 - slot_ref[0]
        values_ref[...] = (zero_tail(v_ref[...], kv_block, kv_seq) if partial else v_ref[...]).T
        parts = sorted(parts, key=lambda part: part.rows.start)
        first, last = ends_of_rows(parts)
        for rows in rows_without(parts, block_q):
            acc_ref[new, :, rows], sum_ref[new, :, rows] = acc_ref[old, :, rows], sum_ref[old, :, rows]
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
                if not whole:
                    keep = _keep(q_start + rows.start, kv_start + columns.start, s.shape, lower, upper, kv_seq)
                    s = jnp.where(keep, s, HIDDEN)
                p = jnp.exp2(s - max_ref[:, rows])
                total = sum_ref[old, :, rows] if turn in first else total
                total = total + jnp.sum(p, axis=0, keepdims=True)
                if turn in last:
                    sum_ref[new, :, rows] = total
                weights[turn] = p.astype(v_ref.dtype)
        fits = jnp.max(jnp.where(sum_ref[new] < OVERFLOW, 0, 1)) == 0

        slot_ref[0] = jnp.where(fits, new, old)
        exact_ref[0] = jnp.where(fits, 0, 1)

    visited = visits.visited(visits_ref, q_block, step)
    distance = kv_start - q_start
    whole = visited & (kv_start + block_kv <= kv_seq) & (distance + block_kv - 1 <= upper)
    whole &= distance - block_q + 1 >= lower

    @pl.when(visited & (jnp.min(max_ref[...]) == HIDDEN))
    def _():
        # Queries that have seen nothing yet start with the maximum of some keys, from the last query's first one on.
        some = min(SAMPLE, block_kv)
        start = jnp.clip(q_start + block_q - 1 + lower - kv_start, 0, block_kv - some) // LANES * LANES
        keys = k_ref[pl.ds(pl.multiple_of(start, LANES), some)]
        s = dot(keys, queries_ref[...], (1, 0), precision) * (scale * LOG2_E)
        s = jnp.where(_keep(q_start, kv_start + start, s.shape, lower, upper, kv_seq), s, HIDDEN)
        highest = jnp.max(s, axis=0, keepdims=True)
        max_ref[...] = jnp.where(max_ref[...] == HIDDEN, highest, max_ref[...])

    seen = jnp.min(max_ref[...]) > HIDDEN  # by every query
    exact_ref[0] = jnp.where(visited & ~whole & ~seen, 1, 0)

    @pl.when(whole)
    def _():
        attend_parts(parts_of_block(tile, block_q, block_kv), partial=False)

    for edge in edges:
        through = visited & ~whole & seen & (edge.low <= distance) & (distance <= edge.high)
        pl.when(through)(functools.partial(attend_parts, edge.parts, partial=True))

    pl.when(exact_ref[0] == 1)(attend)

    @pl.when(step == pl.num_programs(3) - 1)
    def _():
        acc, total = acc_ref[slot_ref[0]], sum_ref[slot_ref[0]]
        sees = max_ref[...] > HIDDEN
        out_ref[...] = jnp.where(sees, acc / total, 0.0).T.astype(out_ref.dtype)
        lse_ref[...] = jnp.where(sees, (max_ref[...] + jnp.log2(total)) / LOG2_E, -jnp.inf)


def backward(q, k, v, out, lse, dout, dlse, operands, tiles):
    """Returns dq, dk, dv, like q, k, v, for the gradients dout of out and dlse of lse."""
    # The gradient of a score is p * (dp - delta): delta is the same for all keys of a query, and lse adds p * dlse.
    delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1)
    delta = delta - dlse  # [batch, q_heads, q_seq]
    sees = lse > -jnp.inf
    delta = jnp.where(sees, delta, 0.0)
    lse = jnp.where(sees, lse * LOG2_E, BLIND)
    dq, dk, dv = _array_gradients(q, k, v, dout, lse, delta, operands, tiles.dkv)
    return dq, dk, dv


def _array_gradients(q, k, v, dout, lse, delta, operands, tile):
    """Each block of keys goes over the blocks of queries that see it, for every query head that it serves."""
    batch, q_heads, q_seq, _ = q.shape
    _, kv_heads, kv_seq, _ = k.shape
    block_q, block_kv = fit_block(tile.block_q, q_seq), fit_block(tile.block_kv, kv_seq)
    q_blocks, kv_blocks = pl.cdiv(q_seq, block_q), pl.cdiv(kv_seq, block_kv)
    group = q_heads // kv_heads
    visits = band_q_visits(q_seq, kv_seq, block_q, block_kv, lower=operands.lower, upper=operands.upper)
    queries, keys, rows = _key_blocks(block_q, block_kv, group, visits)
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
            scale=operands.scale,
            lower=operands.lower,
            upper=operands.upper,
            q_seq=q_seq,
            kv_seq=kv_seq,
            sums=sums,
            precision=matmul_precision(q.dtype),
            parts=parts_of_block(tile, block_q, block_kv),
            edges=edges_of_band(tile, block_q, block_kv, q_seq, kv_seq, lower=operands.lower, upper=operands.upper),
        ),
        out_shape=(
            sums.shape,
            jax.ShapeDtypeStruct((batch, kv_heads, kv_seq, HEAD_DIM), operands.out_dtype or k.dtype),
            jax.ShapeDtypeStruct((batch, kv_heads, kv_seq, HEAD_DIM), operands.out_dtype or v.dtype),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, kv_heads, kv_blocks, group, visits.steps),
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
        visits.table,
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
    visits_ref,
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
    scale,
    lower,
    upper,
    q_seq,
    kv_seq,
    sums,
    precision,
    parts,
    edges,
):
    """One step of one block of keys: one block of one head's queries into all gradients.

    Scores are [queries, keys] here; keys, values and all sums are transposed, so that of the five products only the one
    for dq, k^T ds^T, takes its second matrix transposed.
    """
    kv_block, step = pl.program_id(2), pl.program_id(4)
    q_block = visits.block(visits_ref, kv_block, step)
    q_start, kv_start = q_block * q_ref.shape[0], kv_block * k_ref.shape[0]
    starts = (pl.program_id(3) == 0) & (step == 0)
    ends = (pl.program_id(3) == pl.num_programs(3) - 1) & (step == pl.num_programs(4) - 1)

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
            s = s * (scale * LOG2_E)
            if not part.whole:
                s = jnp.where(_keep_part(part, q_start, kv_start, lower, upper, kv_seq), s, HIDDEN)
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

    visited = visits.visited(visits_ref, kv_block, step)
    distance = kv_start - q_start
    whole = visited & (kv_start + k_ref.shape[0] <= kv_seq) & (distance + k_ref.shape[0] - 1 <= upper)
    whole &= distance - q_ref.shape[0] + 1 >= lower

    @pl.when(whole)
    def _():
        accumulate(parts, partial=False)

    for edge in edges:
        through = visited & ~whole & (edge.low <= distance) & (distance <= edge.high)
        pl.when(through)(functools.partial(accumulate, edge.parts, partial=True))

    @pl.when(ends)
    def _():
        dk_ref[...] = (dk_acc_ref[...] * scale).T.astype(dk_ref.dtype)
        dv_ref[...] = dv_acc_ref[...].T.astype(dv_ref.dtype)

    @pl.when(ends & (kv_block == pl.num_programs(2) - 1))
    def _():
        sums.finish(dq_ref, sums_refs)


def _keep_part(part, q_start, kv_start, lower, upper, kv_seq):
    """Which scores of a part of a block survive, [queries, keys]."""
    shape = part.rows.stop - part.rows.start, part.columns.stop - part.columns.start
    rows = q_start + part.rows.start + lax.broadcasted_iota(jnp.int32, shape, 0)
    columns = kv_start + part.columns.start + lax.broadcasted_iota(jnp.int32, shape, 1)
    keep = columns >= rows + lower
    keep &= columns <= rows + upper
    return keep & (columns < kv_seq)


def _keep(q_start, kv_start, shape, lower, upper, kv_seq):
    """Which scores of queries and keys from these on survive, `shape` [keys, queries]."""
    rows = q_start + lax.broadcasted_iota(jnp.int32, (1, shape[1]), 1)
    columns = kv_start + lax.broadcasted_iota(jnp.int32, (shape[0], 1), 0)
    keep = columns >= rows + lower
    keep &= columns <= rows + upper
    return keep & (columns < kv_seq)


def _query_blocks(block_q, block_kv, group, visits):
    """Block specs for the grid (batch, q_heads, q_blocks, steps): queries, keys, a value per query."""

    def queries(dim):
        return pl.BlockSpec((None, None, block_q, dim), lambda b, h, i, step, table: (b, h, i, 0))

    def keys(dim):
        def index(b, h, i, step, table):
            return b, h // group, visits.block(table, i, step), 0

        return pl.BlockSpec((None, None, block_kv, dim), index)

    rows = pl.BlockSpec((None, None, 1, block_q), lambda b, h, i, step, table: (b, h, 0, i))
    return queries, keys, rows


def _key_blocks(block_q, block_kv, group, visits):
    """Block specs for the grid (batch, kv_heads, kv_blocks, group, steps), in the order of `_query_blocks`."""

    def queries(dim):
        def index(b, h, j, g, step, table):
            return b, h * group + g, visits.block(table, j, step), 0

        return pl.BlockSpec((None, None, block_q, dim), index)

    def keys(dim):
        return pl.BlockSpec((None, None, block_kv, dim), lambda b, h, j, g, step, table: (b, h, j, 0))

    def row_index(b, h, j, g, step, table):
        return b, h * group + g, 0, visits.block(table, j, step)

    rows = pl.BlockSpec((None, None, 1, block_q), row_index)
    return queries, keys, rows
