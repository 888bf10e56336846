# Generated from templates/triton/attention.py.jinja by python -m codegen; do not edit.
# spec: triton/bshd_full_qk32_v32_bias
# digest: 815f6b7c9013a04b
"""Full attention, arrays [batch, seq, heads, dim], head dim 32.

Portable Triton for NVIDIA GPUs of capability 8.0 and up. The algorithm is FlashAttention-2's (Dao 2023,
arXiv:2307.08691): the forward keeps a running softmax over blocks of keys; the backward computes the scores again, once
for the gradient of the queries and once for those of keys and values, without atomics.

A bias, an array whose axes may be 1, is added to the scores, and read by tile. Its gradient has a kernel of its own, which runs
where it is asked for.
"""

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from eqx_attn._device import bias_parts, dot_precision, matrix_shape, sum_of_parts, triton_call

SPEC = "triton/bshd_full_qk32_v32_bias"

HEAD_DIM = tl.constexpr(32)
LOG2_E = tl.constexpr(math.log2(math.e))  # exp(x) = exp2(LOG2_E * x), and exp2 is one instruction
LN_2 = tl.constexpr(math.log(2.0))


@triton.jit
def row_of(ptr, batch, head, row, seq, heads, dim: tl.constexpr):
    """Where one row of one head begins."""
    return ptr + ((batch * seq + row) * heads + head) * dim


@triton.jit
def matrix_row(ptr, batch, head, row, share, heads, rows, width):
    """Where a row begins of an array [batch, head, row, column]. An axis of size 1 serves all, an entry `share` examples."""
    return ptr + (((batch // share) * heads + head % heads) * rows + row % rows) * width


@triton.jit
def accumulate(scores, v, acc, row_max, row_sum, precision: tl.constexpr):
    """One block of keys into each row's running softmax, in base 2."""
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    # A row that has seen no key yet has maximum -inf, and -inf - -inf is no number.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - shift[:, None])  # [block_q, block_kv]
    correction = tl.exp2(row_max - shift)
    row_sum = row_sum * correction + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * correction[:, None], input_precision=precision)
    return acc, new_max, row_sum


@triton.jit
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    bias_ptr,
    bias_share,
    bias_heads,
    bias_rows,
    bias_width,
    bias_stride,
    scale,
    q_seq,
    kv_seq,
    q_heads,
    kv_heads,
    out_ptr,
    lse_ptr,
    block_q: tl.constexpr,
    block_kv: tl.constexpr,
    bias_column: tl.constexpr,
    precision: tl.constexpr,
):
    """Output and lse of one block of queries of one head."""
    q_blocks = tl.cdiv(q_seq, block_q)
    program = tl.program_id(0)
    q_block = program % q_blocks
    head = program // q_blocks % q_heads
    batch = (program // q_blocks // q_heads).to(tl.int64)
    kv_head = head // (q_heads // kv_heads)

    q_start = q_block * block_q
    q_offsets = tl.arange(0, block_q)
    kv_offsets = tl.arange(0, block_kv)
    dims = tl.arange(0, HEAD_DIM)
    q_tile = q_offsets[:, None] * (q_heads * HEAD_DIM) + dims[None, :]
    kv_tile = kv_offsets[:, None] * (kv_heads * HEAD_DIM) + dims[None, :]
    rows = q_start + q_offsets
    in_rows = (rows < q_seq)[:, None]
    q_rows = row_of(q_ptr, batch, head, q_start, q_seq, q_heads, HEAD_DIM)
    q = tl.load(q_rows + q_tile, mask=in_rows, other=0.0)  # [block_q, HEAD_DIM]

    scale = scale * LOG2_E
    bias_tile = q_offsets[:, None] * bias_stride + kv_offsets[None, :] * bias_column
    bias_at = matrix_row(bias_ptr, batch, head, q_start, bias_share, bias_heads, bias_rows, bias_width)
    acc = tl.zeros([block_q, HEAD_DIM], tl.float32)
    row_max = tl.full([block_q], float("-inf"), tl.float32)
    row_sum = tl.zeros([block_q], tl.float32)

    whole = kv_seq // block_kv * block_kv
    for start in range(0, whole, block_kv):
        k_rows = row_of(k_ptr, batch, kv_head, start, kv_seq, kv_heads, HEAD_DIM)
        v_rows = row_of(v_ptr, batch, kv_head, start, kv_seq, kv_heads, HEAD_DIM)
        k = tl.load(k_rows + kv_tile)  # [block_kv, HEAD_DIM]
        v = tl.load(v_rows + kv_tile)  # [block_kv, HEAD_DIM]
        scores = tl.dot(q, k.T, input_precision=precision)  # [block_q, block_kv]
        bias = tl.load(bias_at + start * bias_column + bias_tile, mask=in_rows, other=0.0)
        scores = scores * scale + bias.to(tl.float32) * LOG2_E
        acc, row_max, row_sum = accumulate(scores, v, acc, row_max, row_sum, precision)

    for start in range(whole, kv_seq, block_kv):  # the tail
        columns = start + kv_offsets
        inside = (columns < kv_seq)[:, None]
        in_tile = in_rows & (columns < kv_seq)[None, :]
        k_rows = row_of(k_ptr, batch, kv_head, start, kv_seq, kv_heads, HEAD_DIM)
        v_rows = row_of(v_ptr, batch, kv_head, start, kv_seq, kv_heads, HEAD_DIM)
        k = tl.load(k_rows + kv_tile, mask=inside, other=0.0)  # [block_kv, HEAD_DIM]
        v = tl.load(v_rows + kv_tile, mask=inside, other=0.0)  # [block_kv, HEAD_DIM]
        scores = tl.dot(q, k.T, input_precision=precision)  # [block_q, block_kv]
        bias = tl.load(bias_at + start * bias_column + bias_tile, mask=in_tile, other=0.0)
        scores = scores * scale + bias.to(tl.float32) * LOG2_E
        keep = (columns < kv_seq)[None, :]
        scores = tl.where(keep, scores, float("-inf"))
        acc, row_max, row_sum = accumulate(scores, v, acc, row_max, row_sum, precision)

    seen = row_sum > 0  # a row that saw no key gives 0, and lse -inf
    row_sum = tl.where(seen, row_sum, 1.0)
    lse = tl.where(seen, (row_max + tl.log2(row_sum)) * LN_2, float("-inf"))
    out = acc / row_sum[:, None]
    out_rows = row_of(out_ptr, batch, head, q_start, q_seq, q_heads, HEAD_DIM)
    tl.store(out_rows + q_tile, out.to(out_ptr.dtype.element_ty), mask=in_rows)
    tl.store(lse_ptr + (batch * q_heads + head) * q_seq + rows, lse, mask=rows < q_seq)


@triton.jit
def dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    dout_ptr,
    dlse_ptr,
    bias_ptr,
    bias_share,
    bias_heads,
    bias_rows,
    bias_width,
    bias_stride,
    scale,
    q_seq,
    kv_seq,
    q_heads,
    kv_heads,
    dq_ptr,
    delta_ptr,
    block_q: tl.constexpr,
    block_kv: tl.constexpr,
    bias_column: tl.constexpr,
    precision: tl.constexpr,
):
    """Gradient of one block of queries of one head, and the delta that `dkv_kernel` reads."""
    q_blocks = tl.cdiv(q_seq, block_q)
    program = tl.program_id(0)
    q_block = program % q_blocks
    head = program // q_blocks % q_heads
    batch = (program // q_blocks // q_heads).to(tl.int64)
    kv_head = head // (q_heads // kv_heads)

    q_start = q_block * block_q
    q_offsets = tl.arange(0, block_q)
    kv_offsets = tl.arange(0, block_kv)
    dims = tl.arange(0, HEAD_DIM)
    q_tile = q_offsets[:, None] * (q_heads * HEAD_DIM) + dims[None, :]
    kv_tile = kv_offsets[:, None] * (kv_heads * HEAD_DIM) + dims[None, :]
    rows = q_start + q_offsets
    in_rows = (rows < q_seq)[:, None]
    q_rows = row_of(q_ptr, batch, head, q_start, q_seq, q_heads, HEAD_DIM)
    dq_rows = row_of(dq_ptr, batch, head, q_start, q_seq, q_heads, HEAD_DIM)
    out_rows = row_of(out_ptr, batch, head, q_start, q_seq, q_heads, HEAD_DIM)
    dout_rows = row_of(dout_ptr, batch, head, q_start, q_seq, q_heads, HEAD_DIM)
    q = tl.load(q_rows + q_tile, mask=in_rows, other=0.0)  # [block_q, HEAD_DIM]
    out = tl.load(out_rows + q_tile, mask=in_rows, other=0.0)  # [block_q, HEAD_DIM]
    dout = tl.load(dout_rows + q_tile, mask=in_rows, other=0.0)

    lse_offset = (batch * q_heads + head) * q_seq + rows
    lse = tl.load(lse_ptr + lse_offset, mask=rows < q_seq, other=float("-inf"))
    dlse = tl.load(dlse_ptr + lse_offset, mask=rows < q_seq, other=0.0)
    dead = lse == float("-inf")  # these rows saw no key: no gradient, whatever dlse holds
    lse_2 = tl.where(dead, float("inf"), lse * LOG2_E)
    delta = tl.where(dead, 0.0, tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1) - dlse)
    tl.store(delta_ptr + lse_offset, delta, mask=rows < q_seq)
    dout = dout.to(q.dtype)

    scale_2 = scale * LOG2_E
    bias_tile = q_offsets[:, None] * bias_stride + kv_offsets[None, :] * bias_column
    bias_at = matrix_row(bias_ptr, batch, head, q_start, bias_share, bias_heads, bias_rows, bias_width)
    dq = tl.zeros([block_q, HEAD_DIM], tl.float32)

    whole = kv_seq // block_kv * block_kv
    for start in range(0, whole, block_kv):
        k_rows = row_of(k_ptr, batch, kv_head, start, kv_seq, kv_heads, HEAD_DIM)
        v_rows = row_of(v_ptr, batch, kv_head, start, kv_seq, kv_heads, HEAD_DIM)
        k = tl.load(k_rows + kv_tile)  # [block_kv, HEAD_DIM]
        v = tl.load(v_rows + kv_tile)  # [block_kv, HEAD_DIM]
        scores = tl.dot(q, k.T, input_precision=precision)  # [block_q, block_kv]
        bias = tl.load(bias_at + start * bias_column + bias_tile, mask=in_rows, other=0.0)
        scores = scores * scale_2 + bias.to(tl.float32) * LOG2_E
        weights = tl.exp2(scores - lse_2[:, None])
        dweights = tl.dot(dout, v.T, input_precision=precision)
        dscores = weights * (dweights - delta[:, None])
        dq = tl.dot(dscores.to(k.dtype), k, dq, input_precision=precision)

    for start in range(whole, kv_seq, block_kv):  # the tail
        columns = start + kv_offsets
        inside = (columns < kv_seq)[:, None]
        in_tile = in_rows & (columns < kv_seq)[None, :]
        k_rows = row_of(k_ptr, batch, kv_head, start, kv_seq, kv_heads, HEAD_DIM)
        v_rows = row_of(v_ptr, batch, kv_head, start, kv_seq, kv_heads, HEAD_DIM)
        k = tl.load(k_rows + kv_tile, mask=inside, other=0.0)  # [block_kv, HEAD_DIM]
        v = tl.load(v_rows + kv_tile, mask=inside, other=0.0)  # [block_kv, HEAD_DIM]
        scores = tl.dot(q, k.T, input_precision=precision)  # [block_q, block_kv]
        bias = tl.load(bias_at + start * bias_column + bias_tile, mask=in_tile, other=0.0)
        scores = scores * scale_2 + bias.to(tl.float32) * LOG2_E
        weights = tl.exp2(scores - lse_2[:, None])
        keep = (columns < kv_seq)[None, :]
        weights = tl.where(keep, weights, 0.0)
        dweights = tl.dot(dout, v.T, input_precision=precision)
        dscores = weights * (dweights - delta[:, None])
        dq = tl.dot(dscores.to(k.dtype), k, dq, input_precision=precision)

    tl.store(dq_rows + q_tile, (dq * scale).to(dq_ptr.dtype.element_ty), mask=in_rows)


@triton.jit
def dkv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    lse_ptr,
    dout_ptr,
    delta_ptr,
    bias_ptr,
    bias_share,
    bias_heads,
    bias_rows,
    bias_width,
    bias_stride,
    scale,
    q_seq,
    kv_seq,
    q_heads,
    kv_heads,
    dk_ptr,
    dv_ptr,
    block_q: tl.constexpr,
    block_kv: tl.constexpr,
    bias_column: tl.constexpr,
    precision: tl.constexpr,
):
    """Gradients of one block of keys and values, summed over the query heads that share their head."""
    kv_blocks = tl.cdiv(kv_seq, block_kv)
    program = tl.program_id(0)
    kv_block = program % kv_blocks
    kv_head = program // kv_blocks % kv_heads
    batch = (program // kv_blocks // kv_heads).to(tl.int64)
    group = q_heads // kv_heads

    kv_start = kv_block * block_kv
    q_offsets = tl.arange(0, block_q)
    kv_offsets = tl.arange(0, block_kv)
    dims = tl.arange(0, HEAD_DIM)
    q_tile = q_offsets[:, None] * (q_heads * HEAD_DIM) + dims[None, :]
    kv_tile = kv_offsets[:, None] * (kv_heads * HEAD_DIM) + dims[None, :]
    columns = kv_start + kv_offsets
    in_columns = (columns < kv_seq)[:, None]
    k_rows = row_of(k_ptr, batch, kv_head, kv_start, kv_seq, kv_heads, HEAD_DIM)
    v_rows = row_of(v_ptr, batch, kv_head, kv_start, kv_seq, kv_heads, HEAD_DIM)
    dk_rows = row_of(dk_ptr, batch, kv_head, kv_start, kv_seq, kv_heads, HEAD_DIM)
    dv_rows = row_of(dv_ptr, batch, kv_head, kv_start, kv_seq, kv_heads, HEAD_DIM)
    k = tl.load(k_rows + kv_tile, mask=in_columns, other=0.0)  # [block_kv, HEAD_DIM]
    v = tl.load(v_rows + kv_tile, mask=in_columns, other=0.0)  # [block_kv, HEAD_DIM]
    whole = q_seq // block_q * block_q

    # Matrices are read row by row, as they lie, and their tiles transposed afterwards.
    in_columns_across = (columns < kv_seq)[None, :]
    bias_tile = q_offsets[:, None] * bias_stride + kv_offsets[None, :] * bias_column
    scale_2 = scale * LOG2_E
    dk = tl.zeros([block_kv, HEAD_DIM], tl.float32)
    dv = tl.zeros([block_kv, HEAD_DIM], tl.float32)
    for head in range(kv_head * group, kv_head * group + group):
        row_of_head = (batch * q_heads + head) * q_seq
        for start in tl.range(0, whole, block_q, disable_licm=True):
            rows = start + q_offsets
            q_rows = row_of(q_ptr, batch, head, start, q_seq, q_heads, HEAD_DIM)
            dout_rows = row_of(dout_ptr, batch, head, start, q_seq, q_heads, HEAD_DIM)
            q = tl.load(q_rows + q_tile)  # [block_q, HEAD_DIM]
            dout = tl.load(dout_rows + q_tile)  # [block_q, HEAD_DIM]
            dout = dout.to(q.dtype)
            lse = tl.load(lse_ptr + row_of_head + rows)
            delta = tl.load(delta_ptr + row_of_head + rows)
            lse_2 = tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E)
            bias_at = matrix_row(bias_ptr, batch, head, start, bias_share, bias_heads, bias_rows, bias_width)
            scores = tl.dot(k, q.T, input_precision=precision)
            bias = tl.load(bias_at + kv_start * bias_column + bias_tile, mask=in_columns_across, other=0.0).T
            scores = scores * scale_2 + bias.to(tl.float32) * LOG2_E
            weights = tl.exp2(scores - lse_2[None, :])
            dv = tl.dot(weights.to(dout.dtype), dout, dv, input_precision=precision)
            dweights = tl.broadcast_to(-delta[None, :], [block_kv, block_q])
            dweights = tl.dot(v, dout.T, dweights, input_precision=precision)
            dscores = weights * dweights
            dk = tl.dot(dscores.to(q.dtype), q, dk, input_precision=precision)

        for start in tl.range(whole, q_seq, block_q, disable_licm=True):  # the tail
            rows = start + q_offsets
            inside = (rows < q_seq)[:, None]
            in_tile = (rows < q_seq)[:, None] & in_columns_across
            q_rows = row_of(q_ptr, batch, head, start, q_seq, q_heads, HEAD_DIM)
            dout_rows = row_of(dout_ptr, batch, head, start, q_seq, q_heads, HEAD_DIM)
            q = tl.load(q_rows + q_tile, mask=inside, other=0.0)  # [block_q, HEAD_DIM]
            dout = tl.load(dout_rows + q_tile, mask=inside, other=0.0)  # [block_q, HEAD_DIM]
            dout = dout.to(q.dtype)
            lse = tl.load(lse_ptr + row_of_head + rows, mask=rows < q_seq, other=float("-inf"))
            delta = tl.load(delta_ptr + row_of_head + rows, mask=rows < q_seq, other=0.0)
            lse_2 = tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E)
            bias_at = matrix_row(bias_ptr, batch, head, start, bias_share, bias_heads, bias_rows, bias_width)
            scores = tl.dot(k, q.T, input_precision=precision)
            bias = tl.load(bias_at + kv_start * bias_column + bias_tile, mask=in_tile, other=0.0).T
            scores = scores * scale_2 + bias.to(tl.float32) * LOG2_E
            weights = tl.exp2(scores - lse_2[None, :])
            dv = tl.dot(weights.to(dout.dtype), dout, dv, input_precision=precision)
            dweights = tl.broadcast_to(-delta[None, :], [block_kv, block_q])
            dweights = tl.dot(v, dout.T, dweights, input_precision=precision)
            dscores = weights * dweights
            dk = tl.dot(dscores.to(q.dtype), q, dk, input_precision=precision)

    tl.store(dk_rows + kv_tile, (dk * scale).to(dk_ptr.dtype.element_ty), mask=in_columns)
    tl.store(dv_rows + kv_tile, dv.to(dv_ptr.dtype.element_ty), mask=in_columns)


@triton.jit
def dbias_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    lse_ptr,
    dout_ptr,
    delta_ptr,
    bias_ptr,
    bias_share,
    bias_heads,
    bias_rows,
    bias_width,
    bias_stride,
    scale,
    q_seq,
    kv_seq,
    q_heads,
    kv_heads,
    examples,
    same_heads,
    q_span,
    kv_span,
    dbias_rows,
    dbias_columns,
    dbias_ptr,
    block_q: tl.constexpr,
    block_kv: tl.constexpr,
    bias_column: tl.constexpr,
    precision: tl.constexpr,
):
    """Gradient of one tile of the bias, summed over the examples and heads that share it and over the tiles of a span."""
    q_parts = tl.cdiv(q_seq, q_span)
    kv_parts = tl.cdiv(kv_seq, kv_span)
    program = tl.program_id(0)
    kv_part = program % kv_parts
    q_part = program // kv_parts % q_parts
    matrix = program // kv_parts // q_parts
    first_head = matrix % (q_heads // same_heads) * same_heads
    first_batch = (matrix // (q_heads // same_heads)).to(tl.int64) * examples

    q_offsets = tl.arange(0, block_q)
    kv_offsets = tl.arange(0, block_kv)
    dims = tl.arange(0, HEAD_DIM)
    q_tile = q_offsets[:, None] * (q_heads * HEAD_DIM) + dims[None, :]
    kv_tile = kv_offsets[:, None] * (kv_heads * HEAD_DIM) + dims[None, :]
    bias_tile = q_offsets[:, None] * bias_stride + kv_offsets[None, :] * bias_column
    scale_2 = scale * LOG2_E
    dbias = tl.zeros([block_q, block_kv], tl.float32)
    q_first, q_last = q_part * q_span, tl.minimum(q_part * q_span + q_span, q_seq)
    kv_first, kv_last = kv_part * kv_span, tl.minimum(kv_part * kv_span + kv_span, kv_seq)
    kv_tiles = tl.cdiv(tl.maximum(kv_last - kv_first, 0), block_kv)
    tiles = tl.cdiv(tl.maximum(q_last - q_first, 0), block_q) * kv_tiles
    for index in range(0, examples * same_heads * tiles):
        batch = first_batch + index // tiles // same_heads
        head = first_head + index // tiles % same_heads
        kv_head = head // (q_heads // kv_heads)
        q_start = q_first + index % tiles // kv_tiles * block_q
        start = kv_first + index % kv_tiles * block_kv
        rows = q_start + q_offsets
        in_rows = (rows < q_seq)[:, None]
        q_rows = row_of(q_ptr, batch, head, q_start, q_seq, q_heads, HEAD_DIM)
        dout_rows = row_of(dout_ptr, batch, head, q_start, q_seq, q_heads, HEAD_DIM)
        q = tl.load(q_rows + q_tile, mask=in_rows, other=0.0)  # [block_q, HEAD_DIM]
        dout = tl.load(dout_rows + q_tile, mask=in_rows, other=0.0)
        dout = dout.to(q.dtype)
        row_of_head = (batch * q_heads + head) * q_seq
        lse = tl.load(lse_ptr + row_of_head + rows, mask=rows < q_seq, other=float("-inf"))
        lse_2 = tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E)
        delta = tl.load(delta_ptr + row_of_head + rows, mask=rows < q_seq, other=0.0)
        bias_at = matrix_row(bias_ptr, batch, head, q_start, bias_share, bias_heads, bias_rows, bias_width)
        columns = start + kv_offsets
        inside = (columns < kv_seq)[:, None]
        in_tile = in_rows & (columns < kv_seq)[None, :]
        k_rows = row_of(k_ptr, batch, kv_head, start, kv_seq, kv_heads, HEAD_DIM)
        v_rows = row_of(v_ptr, batch, kv_head, start, kv_seq, kv_heads, HEAD_DIM)
        k = tl.load(k_rows + kv_tile, mask=inside, other=0.0)  # [block_kv, HEAD_DIM]
        v = tl.load(v_rows + kv_tile, mask=inside, other=0.0)  # [block_kv, HEAD_DIM]
        scores = tl.dot(q, k.T, input_precision=precision)  # [block_q, block_kv]
        bias = tl.load(bias_at + start * bias_column + bias_tile, mask=in_tile, other=0.0)
        scores = scores * scale_2 + bias.to(tl.float32) * LOG2_E
        weights = tl.exp2(scores - lse_2[:, None])
        keep = (columns < kv_seq)[None, :]
        weights = tl.where(keep, weights, 0.0)
        dweights = tl.dot(dout, v.T, input_precision=precision)
        dscores = weights * (dweights - delta[:, None])
        dbias += dscores

    dbias_tile = q_offsets[:, None] * dbias_columns + (kv_part * block_kv + kv_offsets)[None, :]
    dbias_start = dbias_ptr + (matrix.to(tl.int64) * dbias_rows + q_part * block_q) * dbias_columns
    in_dbias = (q_part * block_q + q_offsets < dbias_rows)[:, None]
    in_dbias &= (kv_part * block_kv + kv_offsets < dbias_columns)[None, :]
    tl.store(dbias_start + dbias_tile, dbias.to(dbias_ptr.dtype.element_ty), mask=in_dbias)


def forward(q, k, v, operands, tiles):
    """Output in the shape of q with the head dim of v, and lse [batch, q_heads, q_seq] in float32."""
    batch, q_seq, q_heads, _ = q.shape
    kv_seq, kv_heads = k.shape[1:3]
    tile = tiles.forward
    out_shape = (batch, q_seq, q_heads, 32)
    return triton_call(
        forward_kernel,
        q,
        k,
        v,
        operands.bias,
        *matrix_shape(operands.bias, batch),
        operands.scale,
        q_seq,
        kv_seq,
        q_heads,
        kv_heads,
        outputs=(
            jax.ShapeDtypeStruct(out_shape, operands.out_dtype or q.dtype),
            jax.ShapeDtypeStruct((batch, q_heads, q_seq), jnp.float32),
        ),
        grid=(triton.cdiv(q_seq, tile.block_q) * q_heads * batch,),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        constants=dict(
            block_q=tile.block_q,
            block_kv=tile.block_kv,
            bias_column=int(operands.bias.shape[3] > 1),
            precision=dot_precision(),
        ),
    )


def backward(q, k, v, out, lse, dout, dlse, operands, tiles):
    """Gradients of q, k and v, each of its array's shape and of out_dtype or the array's; then of the bias, where asked for."""
    batch, q_seq, q_heads, _ = q.shape
    kv_seq, kv_heads = k.shape[1:3]
    tile = tiles.dq
    dq, delta = triton_call(
        dq_kernel,
        q,
        k,
        v,
        out,
        lse,
        dout,
        dlse,
        operands.bias,
        *matrix_shape(operands.bias, batch),
        operands.scale,
        q_seq,
        kv_seq,
        q_heads,
        kv_heads,
        outputs=(
            jax.ShapeDtypeStruct(q.shape, operands.out_dtype or q.dtype),
            jax.ShapeDtypeStruct(lse.shape, jnp.float32),
        ),
        grid=(triton.cdiv(q_seq, tile.block_q) * q_heads * batch,),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        constants=dict(
            block_q=tile.block_q,
            block_kv=tile.block_kv,
            bias_column=int(operands.bias.shape[3] > 1),
            precision=dot_precision(),
        ),
    )
    tile = tiles.dkv
    dk, dv = triton_call(
        dkv_kernel,
        q,
        k,
        v,
        lse,
        dout,
        delta,
        operands.bias,
        *matrix_shape(operands.bias, batch),
        operands.scale,
        q_seq,
        kv_seq,
        q_heads,
        kv_heads,
        outputs=(
            jax.ShapeDtypeStruct(k.shape, operands.out_dtype or k.dtype),
            jax.ShapeDtypeStruct(v.shape, operands.out_dtype or v.dtype),
        ),
        grid=(triton.cdiv(kv_seq, tile.block_kv) * kv_heads * batch,),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        constants=dict(
            block_q=tile.block_q,
            block_kv=tile.block_kv,
            bias_column=int(operands.bias.shape[3] > 1),
            precision=dot_precision(),
        ),
    )
    grads = [dq, dk, dv]
    if operands.bias_gradient:
        grads.append(bias_gradient(q, k, v, lse, dout, delta, operands, tiles.dbias or tiles.dq))
    return tuple(grads)


def bias_gradient(q, k, v, lse, dout, delta, operands, tile):
    """Gradient of the bias, in its shape and dtype."""
    batch, q_seq, q_heads, _ = q.shape
    kv_seq, kv_heads = k.shape[1:3]
    parts = bias_parts(operands.bias, batch, q_heads, q_seq, kv_seq, tile)
    (dbias,) = triton_call(
        dbias_kernel,
        q,
        k,
        v,
        lse,
        dout,
        delta,
        operands.bias,
        *matrix_shape(operands.bias, batch),
        operands.scale,
        q_seq,
        kv_seq,
        q_heads,
        kv_heads,
        *parts.numbers,
        outputs=(jax.ShapeDtypeStruct(parts.shape, parts.dtype),),
        grid=(parts.programs,),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        constants=dict(
            block_q=tile.block_q,
            block_kv=tile.block_kv,
            bias_column=int(operands.bias.shape[3] > 1),
            precision=dot_precision(),
        ),
    )
    return sum_of_parts(dbias, operands.bias)
