# Generated from templates/triton/attention.py.jinja by python -m codegen; do not edit.
# spec: triton/bshd_window_qk256_v256_softcap
# digest: 1723358472d1ca8b
"""Sliding-window attention, arrays [batch, seq, heads, dim], head dim 256.

Portable Triton for NVIDIA GPUs of capability 8.0 and up. The algorithm is FlashAttention-2's (Dao 2023,
arXiv:2307.08691): the forward keeps a running softmax over blocks of keys; the backward computes the scores again, once
for the gradient of the queries and once for those of keys and values, without atomics.

Scores are softcap * tanh(score / softcap).
"""

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from eqx_attn._device import dot_precision, triton_call

SPEC = "triton/bshd_window_qk256_v256_softcap"

HEAD_DIM = tl.constexpr(256)
LOG2_E = tl.constexpr(math.log2(math.e))  # exp(x) = exp2(LOG2_E * x), and exp2 is one instruction
LN_2 = tl.constexpr(math.log(2.0))


@triton.jit
def row_of(ptr, batch, head, row, seq, heads, dim: tl.constexpr):
    """Where one row of one head begins."""
    return ptr + ((batch * seq + row) * heads + head) * dim


@triton.jit
def halves(x):
    """The left and the right half of a tile."""
    return tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), [0, 2, 1]))


@triton.jit
def from_halves(left, right):
    """The tile with these halves."""
    return tl.reshape(tl.permute(tl.join(left, right), [0, 2, 1]), [left.shape[0], 2 * left.shape[1]])


@triton.jit
def tanh_of_base_2(x):
    """tanh(x / 2 * log(2)) = 1 - 2 / (exp2(x) + 1), off by no more than a few roundings of 1.

    Such a kernel waits for the unit of special functions. It finds the inverse root of a product of four elements, and
    multiplications make their inverses of that. Four quarters of a row lie in one thread, unless the row is short.
    """
    # From 30 on the result is 1, and the product of four such powers is still a number.
    left, right = halves(tl.exp2(tl.minimum(x, 30.0)) + 1.0)
    both = left * right
    if both.shape[1] >= 16:
        first, second = halves(both)
        root = tl.rsqrt(first * second)
        twice = 2.0 * root * root
        twice = from_halves(twice * second, twice * first)
    else:
        root = tl.rsqrt(both)
        twice = 2.0 * root * root
    return 1.0 - from_halves(twice * right, twice * left)


@triton.jit
def accumulate(scores, v, acc, row_max, row_sum, scale, precision: tl.constexpr):
    """One block of keys into each row's running softmax, in base 2."""
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
    # A row that has seen no key yet has maximum -inf, and -inf - -inf is no number.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores * scale - shift[:, None])  # [block_q, block_kv]
    correction = tl.exp2(row_max - shift)
    row_sum = row_sum * correction + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * correction[:, None], input_precision=precision)
    return acc, new_max, row_sum


@triton.jit
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    scale,
    lower,
    upper,
    softcap,
    q_seq,
    kv_seq,
    q_heads,
    kv_heads,
    out_ptr,
    lse_ptr,
    block_q: tl.constexpr,
    block_kv: tl.constexpr,
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

    to_tanh, softcap_2 = 2.0 * LOG2_E * scale / softcap, softcap * LOG2_E
    acc = tl.zeros([block_q, HEAD_DIM], tl.float32)
    row_max = tl.full([block_q], float("-inf"), tl.float32)
    row_sum = tl.zeros([block_q], tl.float32)

    # Some row sees some key of [first, last); every row sees every key of [whole_first, whole_last).
    first = tl.maximum(q_start + lower, 0) // block_kv * block_kv
    last = tl.minimum(q_start + block_q + upper, kv_seq)
    whole_first = tl.cdiv(tl.maximum(q_start + block_q - 1 + lower, 0), block_kv) * block_kv
    whole_last = tl.maximum(tl.minimum(q_start + upper + 1, kv_seq), 0) // block_kv * block_kv
    for start in range(whole_first, whole_last, block_kv):
        k_rows = row_of(k_ptr, batch, kv_head, start, kv_seq, kv_heads, HEAD_DIM)
        v_rows = row_of(v_ptr, batch, kv_head, start, kv_seq, kv_heads, HEAD_DIM)
        k = tl.load(k_rows + kv_tile)  # [block_kv, HEAD_DIM]
        v = tl.load(v_rows + kv_tile)  # [block_kv, HEAD_DIM]
        scores = tl.dot(q, k.T, input_precision=precision)  # [block_q, block_kv]
        scores = tanh_of_base_2(scores * to_tanh)
        acc, row_max, row_sum = accumulate(scores, v, acc, row_max, row_sum, softcap_2, precision)

    # The blocks that need a mask lie on both sides of those.
    near = tl.cdiv(tl.maximum(tl.minimum(whole_first, last) - first, 0), block_kv)
    far_first = tl.maximum(whole_first, whole_last)
    far = tl.cdiv(tl.maximum(last - far_first, 0), block_kv)
    for block in range(0, near + far):
        start = tl.where(block < near, first + block * block_kv, far_first + (block - near) * block_kv)
        columns = start + kv_offsets
        inside = (columns < kv_seq)[:, None]
        k_rows = row_of(k_ptr, batch, kv_head, start, kv_seq, kv_heads, HEAD_DIM)
        v_rows = row_of(v_ptr, batch, kv_head, start, kv_seq, kv_heads, HEAD_DIM)
        k = tl.load(k_rows + kv_tile, mask=inside, other=0.0)  # [block_kv, HEAD_DIM]
        v = tl.load(v_rows + kv_tile, mask=inside, other=0.0)  # [block_kv, HEAD_DIM]
        scores = tl.dot(q, k.T, input_precision=precision)  # [block_q, block_kv]
        scores = tanh_of_base_2(scores * to_tanh)
        keep = (columns < kv_seq)[None, :]
        keep &= columns[None, :] >= rows[:, None] + lower
        keep &= columns[None, :] <= rows[:, None] + upper
        scores = tl.where(keep, scores, float("-inf"))
        acc, row_max, row_sum = accumulate(scores, v, acc, row_max, row_sum, softcap_2, precision)

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
    scale,
    lower,
    upper,
    softcap,
    q_seq,
    kv_seq,
    q_heads,
    kv_heads,
    dq_ptr,
    delta_ptr,
    block_q: tl.constexpr,
    block_kv: tl.constexpr,
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

    to_tanh, softcap_2 = 2.0 * LOG2_E * scale / softcap, softcap * LOG2_E
    dq = tl.zeros([block_q, HEAD_DIM], tl.float32)

    # Some row sees some key of [first, last); every row sees every key of [whole_first, whole_last).
    first = tl.maximum(q_start + lower, 0) // block_kv * block_kv
    last = tl.minimum(q_start + block_q + upper, kv_seq)
    whole_first = tl.cdiv(tl.maximum(q_start + block_q - 1 + lower, 0), block_kv) * block_kv
    whole_last = tl.maximum(tl.minimum(q_start + upper + 1, kv_seq), 0) // block_kv * block_kv
    for start in range(whole_first, whole_last, block_kv):
        k_rows = row_of(k_ptr, batch, kv_head, start, kv_seq, kv_heads, HEAD_DIM)
        v_rows = row_of(v_ptr, batch, kv_head, start, kv_seq, kv_heads, HEAD_DIM)
        k = tl.load(k_rows + kv_tile)  # [block_kv, HEAD_DIM]
        v = tl.load(v_rows + kv_tile)  # [block_kv, HEAD_DIM]
        scores = tl.dot(q, k.T, input_precision=precision)  # [block_q, block_kv]
        capped = tanh_of_base_2(scores * to_tanh)
        scores = softcap_2 * capped
        weights = tl.exp2(scores - lse_2[:, None])
        dweights = tl.dot(dout, v.T, input_precision=precision)
        dscores = weights * (dweights - delta[:, None])
        dscores *= 1.0 - capped * capped
        dq = tl.dot(dscores.to(k.dtype), k, dq, input_precision=precision)

    # The blocks that need a mask lie on both sides of those.
    near = tl.cdiv(tl.maximum(tl.minimum(whole_first, last) - first, 0), block_kv)
    far_first = tl.maximum(whole_first, whole_last)
    far = tl.cdiv(tl.maximum(last - far_first, 0), block_kv)
    for block in range(0, near + far):
        start = tl.where(block < near, first + block * block_kv, far_first + (block - near) * block_kv)
        columns = start + kv_offsets
        inside = (columns < kv_seq)[:, None]
        k_rows = row_of(k_ptr, batch, kv_head, start, kv_seq, kv_heads, HEAD_DIM)
        v_rows = row_of(v_ptr, batch, kv_head, start, kv_seq, kv_heads, HEAD_DIM)
        k = tl.load(k_rows + kv_tile, mask=inside, other=0.0)  # [block_kv, HEAD_DIM]
        v = tl.load(v_rows + kv_tile, mask=inside, other=0.0)  # [block_kv, HEAD_DIM]
        scores = tl.dot(q, k.T, input_precision=precision)  # [block_q, block_kv]
        capped = tanh_of_base_2(scores * to_tanh)
        scores = softcap_2 * capped
        weights = tl.exp2(scores - lse_2[:, None])
        keep = (columns < kv_seq)[None, :]
        keep &= columns[None, :] >= rows[:, None] + lower
        keep &= columns[None, :] <= rows[:, None] + upper
        weights = tl.where(keep, weights, 0.0)
        dweights = tl.dot(dout, v.T, input_precision=precision)
        dscores = weights * (dweights - delta[:, None])
        dscores *= 1.0 - capped * capped
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
    scale,
    lower,
    upper,
    softcap,
    q_seq,
    kv_seq,
    q_heads,
    kv_heads,
    dk_ptr,
    dv_ptr,
    block_q: tl.constexpr,
    block_kv: tl.constexpr,
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
    # Some row of [first, last) sees some of these keys, and every row of [whole_first, whole_last) sees all of them.
    first = tl.maximum(kv_start - upper, 0) // block_q * block_q
    last = tl.minimum(kv_start + block_kv - lower, q_seq)
    whole_first = tl.cdiv(tl.maximum(kv_start + block_kv - 1 - upper, 0), block_q) * block_q
    whole_last = tl.maximum(tl.minimum(kv_start - lower + 1, q_seq), 0) // block_q * block_q
    # The blocks that need a mask lie on both sides of those.
    near = tl.cdiv(tl.maximum(tl.minimum(whole_first, last) - first, 0), block_q)
    far_first = tl.maximum(whole_first, whole_last)
    far = tl.cdiv(tl.maximum(last - far_first, 0), block_q)

    to_tanh, softcap_2 = 2.0 * LOG2_E * scale / softcap, softcap * LOG2_E
    dv = tl.zeros([block_kv, HEAD_DIM], tl.float32)
    for head in range(kv_head * group, kv_head * group + group):
        row_of_head = (batch * q_heads + head) * q_seq
        for start in tl.range(whole_first, whole_last, block_q, disable_licm=True):
            rows = start + q_offsets
            q_rows = row_of(q_ptr, batch, head, start, q_seq, q_heads, HEAD_DIM)
            dout_rows = row_of(dout_ptr, batch, head, start, q_seq, q_heads, HEAD_DIM)
            q = tl.load(q_rows + q_tile)  # [block_q, HEAD_DIM]
            dout = tl.load(dout_rows + q_tile)  # [block_q, HEAD_DIM]
            dout = dout.to(q.dtype)
            lse = tl.load(lse_ptr + row_of_head + rows)
            lse_2 = tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E)
            scores = tl.dot(k, q.T, input_precision=precision)
            scores = softcap_2 * tanh_of_base_2(scores * to_tanh)
            weights = tl.exp2(scores - lse_2[None, :])
            dv = tl.dot(weights.to(dout.dtype), dout, dv, input_precision=precision)

        for block in tl.range(0, near + far, disable_licm=True):
            start = tl.where(block < near, first + block * block_q, far_first + (block - near) * block_q)
            rows = start + q_offsets
            inside = (rows < q_seq)[:, None]
            q_rows = row_of(q_ptr, batch, head, start, q_seq, q_heads, HEAD_DIM)
            dout_rows = row_of(dout_ptr, batch, head, start, q_seq, q_heads, HEAD_DIM)
            q = tl.load(q_rows + q_tile, mask=inside, other=0.0)  # [block_q, HEAD_DIM]
            dout = tl.load(dout_rows + q_tile, mask=inside, other=0.0)  # [block_q, HEAD_DIM]
            dout = dout.to(q.dtype)
            lse = tl.load(lse_ptr + row_of_head + rows, mask=rows < q_seq, other=float("-inf"))
            lse_2 = tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E)
            scores = tl.dot(k, q.T, input_precision=precision)
            scores = softcap_2 * tanh_of_base_2(scores * to_tanh)
            weights = tl.exp2(scores - lse_2[None, :])
            keep = columns[:, None] >= rows[None, :] + lower
            keep &= columns[:, None] <= rows[None, :] + upper
            weights = tl.where(keep, weights, 0.0)
            dv = tl.dot(weights.to(dout.dtype), dout, dv, input_precision=precision)

    tl.store(dv_rows + kv_tile, dv.to(dv_ptr.dtype.element_ty), mask=in_columns)

    # A second sweep for dk: both at once would not fit the registers.
    v = tl.load(v_rows + kv_tile, mask=in_columns, other=0.0)  # [block_kv, HEAD_DIM]
    dk = tl.zeros([block_kv, HEAD_DIM], tl.float32)
    for head in range(kv_head * group, kv_head * group + group):
        row_of_head = (batch * q_heads + head) * q_seq
        for start in tl.range(whole_first, whole_last, block_q, disable_licm=True):
            rows = start + q_offsets
            q_rows = row_of(q_ptr, batch, head, start, q_seq, q_heads, HEAD_DIM)
            dout_rows = row_of(dout_ptr, batch, head, start, q_seq, q_heads, HEAD_DIM)
            q = tl.load(q_rows + q_tile)  # [block_q, HEAD_DIM]
            dout = tl.load(dout_rows + q_tile)  # [block_q, HEAD_DIM]
            dout = dout.to(q.dtype)
            lse = tl.load(lse_ptr + row_of_head + rows)
            delta = tl.load(delta_ptr + row_of_head + rows)
            lse_2 = tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E)
            scores = tl.dot(k, q.T, input_precision=precision)
            capped = tanh_of_base_2(scores * to_tanh)
            scores = softcap_2 * capped
            weights = tl.exp2(scores - lse_2[None, :])
            dweights = tl.broadcast_to(-delta[None, :], [block_kv, block_q])
            dweights = tl.dot(v, dout.T, dweights, input_precision=precision)
            dscores = weights * dweights
            dscores *= 1.0 - capped * capped
            dk = tl.dot(dscores.to(q.dtype), q, dk, input_precision=precision)

        for block in tl.range(0, near + far, disable_licm=True):
            start = tl.where(block < near, first + block * block_q, far_first + (block - near) * block_q)
            rows = start + q_offsets
            inside = (rows < q_seq)[:, None]
            q_rows = row_of(q_ptr, batch, head, start, q_seq, q_heads, HEAD_DIM)
            dout_rows = row_of(dout_ptr, batch, head, start, q_seq, q_heads, HEAD_DIM)
            q = tl.load(q_rows + q_tile, mask=inside, other=0.0)  # [block_q, HEAD_DIM]
            dout = tl.load(dout_rows + q_tile, mask=inside, other=0.0)  # [block_q, HEAD_DIM]
            dout = dout.to(q.dtype)
            lse = tl.load(lse_ptr + row_of_head + rows, mask=rows < q_seq, other=float("-inf"))
            delta = tl.load(delta_ptr + row_of_head + rows, mask=rows < q_seq, other=0.0)
            lse_2 = tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E)
            scores = tl.dot(k, q.T, input_precision=precision)
            capped = tanh_of_base_2(scores * to_tanh)
            scores = softcap_2 * capped
            weights = tl.exp2(scores - lse_2[None, :])
            keep = columns[:, None] >= rows[None, :] + lower
            keep &= columns[:, None] <= rows[None, :] + upper
            weights = tl.where(keep, weights, 0.0)
            dweights = tl.broadcast_to(-delta[None, :], [block_kv, block_q])
            dweights = tl.dot(v, dout.T, dweights, input_precision=precision)
            dscores = weights * dweights
            dscores *= 1.0 - capped * capped
            dk = tl.dot(dscores.to(q.dtype), q, dk, input_precision=precision)

    tl.store(dk_rows + kv_tile, (dk * scale).to(dk_ptr.dtype.element_ty), mask=in_columns)


def forward(q, k, v, operands, tiles):
    """Output in the shape of q with the head dim of v, and lse [batch, q_heads, q_seq] in float32."""
    batch, q_seq, q_heads, _ = q.shape
    kv_seq, kv_heads = k.shape[1:3]
    tile = tiles.forward
    out_shape = (batch, q_seq, q_heads, 256)
    return triton_call(
        forward_kernel,
        q,
        k,
        v,
        operands.scale,
        operands.lower,
        operands.upper,
        operands.softcap,
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
        constants=dict(block_q=tile.block_q, block_kv=tile.block_kv, precision=dot_precision()),
    )


def backward(q, k, v, out, lse, dout, dlse, operands, tiles):
    """Gradients of q, k and v, each of its array's shape and of out_dtype or the array's."""
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
        operands.scale,
        operands.lower,
        operands.upper,
        operands.softcap,
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
        constants=dict(block_q=tile.block_q, block_kv=tile.block_kv, precision=dot_precision()),
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
        operands.scale,
        operands.lower,
        operands.upper,
        operands.softcap,
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
        constants=dict(block_q=tile.block_q, block_kv=tile.block_kv, precision=dot_precision()),
    )
    return dq, dk, dv
