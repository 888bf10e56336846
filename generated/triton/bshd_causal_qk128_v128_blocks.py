# Generated from templates/triton/attention.py.jinja by python -m codegen; do not edit.
# spec: triton/bshd_causal_qk128_v128_blocks
# digest: 8c1728cd75623453
"""Causal attention, arrays [batch, seq, heads, dim], head dim 128.

Portable Triton for NVIDIA GPUs of capability 8.0 and up. The algorithm is FlashAttention-2's (Dao 2023,
arXiv:2307.08691): the forward keeps a running softmax over blocks of keys; the backward computes the scores again, once
for the gradient of the queries and once for those of keys and values, without atomics.

A map says which blocks of keys a block of queries may see. Lists of visited blocks are made of it beforehand, so that a
hidden block costs nothing.
"""

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from eqx_attn._device import dot_precision, tile_visibility, triton_call, visited_lists, words_of_map

SPEC = "triton/bshd_causal_qk128_v128_blocks"

HEAD_DIM = tl.constexpr(128)
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
def in_map(words_ptr, bits, in_rows, words: tl.constexpr):
    """Whether the map shows each key, whose bit is given, to each query, whose words are. One word, unless the map is fine."""
    word = tl.load(words_ptr, mask=in_rows, other=0)
    for number in tl.static_range(1, words):
        word = tl.where(bits >> 5 == number, tl.load(words_ptr + number, mask=in_rows, other=0), word)
    return (word >> (bits & 31)) & 1 == 1


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
    visits_ptr,
    words_ptr,
    map_share,
    map_heads,
    map_height,
    scale,
    upper,
    q_seq,
    kv_seq,
    q_heads,
    kv_heads,
    out_ptr,
    lse_ptr,
    block_q: tl.constexpr,
    block_kv: tl.constexpr,
    map_rows: tl.constexpr,
    map_columns: tl.constexpr,
    map_words: tl.constexpr,
    precision: tl.constexpr,
):
    """Output and lse of one block of queries of one head."""
    q_blocks = tl.cdiv(q_seq, block_q)
    kv_blocks = tl.cdiv(kv_seq, block_kv)
    program = tl.program_id(0)
    q_block = q_blocks - 1 - program % q_blocks  # later blocks see more keys: the longest start first
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
    words_at = matrix_row(words_ptr, batch, head, 0, map_share, map_heads, map_height, kv_blocks * map_words)
    acc = tl.zeros([block_q, HEAD_DIM], tl.float32)
    row_max = tl.full([block_q], float("-inf"), tl.float32)
    row_sum = tl.zeros([block_q], tl.float32)

    # The blocks that every row sees all of, then those of which some row sees some.
    visits = matrix_row(visits_ptr, batch, head, q_block, map_share, map_heads, q_blocks, kv_blocks + 3)
    whole, partial = tl.load(visits), tl.load(visits + 1)
    kv_block = tl.load(visits + 2)
    for index in range(0, whole):
        start = kv_block * block_kv
        kv_block = tl.load(visits + 3 + index)  # of the next step, which then need not wait for it
        k_rows = row_of(k_ptr, batch, kv_head, start, kv_seq, kv_heads, HEAD_DIM)
        v_rows = row_of(v_ptr, batch, kv_head, start, kv_seq, kv_heads, HEAD_DIM)
        k = tl.load(k_rows + kv_tile)  # [block_kv, HEAD_DIM]
        v = tl.load(v_rows + kv_tile)  # [block_kv, HEAD_DIM]
        scores = tl.dot(q, k.T, input_precision=precision)  # [block_q, block_kv]
        acc, row_max, row_sum = accumulate(scores, v, acc, row_max, row_sum, scale, precision)

    for index in range(whole, whole + partial):
        start = kv_block * block_kv
        kv_block = tl.load(visits + 3 + index)
        columns = start + kv_offsets
        inside = (columns < kv_seq)[:, None]
        k_rows = row_of(k_ptr, batch, kv_head, start, kv_seq, kv_heads, HEAD_DIM)
        v_rows = row_of(v_ptr, batch, kv_head, start, kv_seq, kv_heads, HEAD_DIM)
        k = tl.load(k_rows + kv_tile, mask=inside, other=0.0)  # [block_kv, HEAD_DIM]
        v = tl.load(v_rows + kv_tile, mask=inside, other=0.0)  # [block_kv, HEAD_DIM]
        scores = tl.dot(q, k.T, input_precision=precision)  # [block_q, block_kv]
        words = words_at + (rows // map_rows)[:, None] * (kv_blocks * map_words) + start // block_kv * map_words
        bits = (columns // map_columns - start // map_columns)[None, :]
        shown_blocks = in_map(words, bits, (rows < q_seq)[:, None], map_words)
        keep = (columns < kv_seq)[None, :]
        keep &= shown_blocks
        keep &= columns[None, :] <= rows[:, None] + upper
        scores = tl.where(keep, scores, float("-inf"))
        acc, row_max, row_sum = accumulate(scores, v, acc, row_max, row_sum, scale, precision)

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
    visits_ptr,
    words_ptr,
    map_share,
    map_heads,
    map_height,
    scale,
    upper,
    q_seq,
    kv_seq,
    q_heads,
    kv_heads,
    dq_ptr,
    delta_ptr,
    block_q: tl.constexpr,
    block_kv: tl.constexpr,
    map_rows: tl.constexpr,
    map_columns: tl.constexpr,
    map_words: tl.constexpr,
    precision: tl.constexpr,
):
    """Gradient of one block of queries of one head, and the delta that `dkv_kernel` reads."""
    q_blocks = tl.cdiv(q_seq, block_q)
    kv_blocks = tl.cdiv(kv_seq, block_kv)
    program = tl.program_id(0)
    q_block = q_blocks - 1 - program % q_blocks  # later blocks see more keys: the longest start first
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
    words_at = matrix_row(words_ptr, batch, head, 0, map_share, map_heads, map_height, kv_blocks * map_words)
    dq = tl.zeros([block_q, HEAD_DIM], tl.float32)

    # The blocks that every row sees all of, then those of which some row sees some.
    visits = matrix_row(visits_ptr, batch, head, q_block, map_share, map_heads, q_blocks, kv_blocks + 3)
    whole, partial = tl.load(visits), tl.load(visits + 1)
    kv_block = tl.load(visits + 2)
    for index in range(0, whole):
        start = kv_block * block_kv
        kv_block = tl.load(visits + 3 + index)  # of the next step, which then need not wait for it
        k_rows = row_of(k_ptr, batch, kv_head, start, kv_seq, kv_heads, HEAD_DIM)
        v_rows = row_of(v_ptr, batch, kv_head, start, kv_seq, kv_heads, HEAD_DIM)
        k = tl.load(k_rows + kv_tile)  # [block_kv, HEAD_DIM]
        v = tl.load(v_rows + kv_tile)  # [block_kv, HEAD_DIM]
        scores = tl.dot(q, k.T, input_precision=precision)  # [block_q, block_kv]
        weights = tl.exp2(scores * scale_2 - lse_2[:, None])
        dweights = tl.dot(dout, v.T, input_precision=precision)
        dscores = weights * (dweights - delta[:, None])
        dq = tl.dot(dscores.to(k.dtype), k, dq, input_precision=precision)

    for index in range(whole, whole + partial):
        start = kv_block * block_kv
        kv_block = tl.load(visits + 3 + index)
        columns = start + kv_offsets
        inside = (columns < kv_seq)[:, None]
        k_rows = row_of(k_ptr, batch, kv_head, start, kv_seq, kv_heads, HEAD_DIM)
        v_rows = row_of(v_ptr, batch, kv_head, start, kv_seq, kv_heads, HEAD_DIM)
        k = tl.load(k_rows + kv_tile, mask=inside, other=0.0)  # [block_kv, HEAD_DIM]
        v = tl.load(v_rows + kv_tile, mask=inside, other=0.0)  # [block_kv, HEAD_DIM]
        scores = tl.dot(q, k.T, input_precision=precision)  # [block_q, block_kv]
        weights = tl.exp2(scores * scale_2 - lse_2[:, None])
        words = words_at + (rows // map_rows)[:, None] * (kv_blocks * map_words) + start // block_kv * map_words
        bits = (columns // map_columns - start // map_columns)[None, :]
        shown_blocks = in_map(words, bits, (rows < q_seq)[:, None], map_words)
        keep = (columns < kv_seq)[None, :]
        keep &= shown_blocks
        keep &= columns[None, :] <= rows[:, None] + upper
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
    visits_ptr,
    words_ptr,
    map_share,
    map_heads,
    map_height,
    scale,
    upper,
    q_seq,
    kv_seq,
    q_heads,
    kv_heads,
    dk_ptr,
    dv_ptr,
    block_q: tl.constexpr,
    block_kv: tl.constexpr,
    map_rows: tl.constexpr,
    map_columns: tl.constexpr,
    map_words: tl.constexpr,
    precision: tl.constexpr,
):
    """Gradients of one block of keys and values, summed over the query heads that share their head."""
    q_blocks = tl.cdiv(q_seq, block_q)
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

    # exp(scale * scores - lse) = exp2(scale_2 * (scores - lse / scale)): the products start from what is subtracted,
    # which costs no register. Hoisting the loops' invariants would, so that is off.
    scale_2, inverse_scale = scale * LOG2_E, 1.0 / scale
    dk = tl.zeros([block_kv, HEAD_DIM], tl.float32)
    dv = tl.zeros([block_kv, HEAD_DIM], tl.float32)
    for head in range(kv_head * group, kv_head * group + group):
        row_of_head = (batch * q_heads + head) * q_seq
        visits = matrix_row(visits_ptr, batch, head, kv_block, map_share, map_heads, kv_blocks, q_blocks + 3)
        whole, partial = tl.load(visits), tl.load(visits + 1)
        q_block = tl.load(visits + 2)
        for index in tl.range(0, whole, disable_licm=True):
            start = q_block * block_q
            q_block = tl.load(visits + 3 + index)  # of the next step, which then need not wait for it
            rows = start + q_offsets
            q_rows = row_of(q_ptr, batch, head, start, q_seq, q_heads, HEAD_DIM)
            dout_rows = row_of(dout_ptr, batch, head, start, q_seq, q_heads, HEAD_DIM)
            q = tl.load(q_rows + q_tile)  # [block_q, HEAD_DIM]
            dout = tl.load(dout_rows + q_tile)  # [block_q, HEAD_DIM]
            dout = dout.to(q.dtype)
            lse = tl.load(lse_ptr + row_of_head + rows)
            delta = tl.load(delta_ptr + row_of_head + rows)
            shift = tl.where(lse == float("-inf"), float("-inf"), -lse * inverse_scale)
            scores = tl.broadcast_to(shift[None, :], [block_kv, block_q])
            scores = tl.dot(k, q.T, scores, input_precision=precision)
            weights = tl.exp2(scores * scale_2)
            words_at = matrix_row(words_ptr, batch, head, 0, map_share, map_heads, map_height, kv_blocks * map_words)
            dv = tl.dot(weights.to(dout.dtype), dout, dv, input_precision=precision)
            dweights = tl.broadcast_to(-delta[None, :], [block_kv, block_q])
            dweights = tl.dot(v, dout.T, dweights, input_precision=precision)
            dscores = weights * dweights
            dk = tl.dot(dscores.to(q.dtype), q, dk, input_precision=precision)

        for index in tl.range(whole, whole + partial, disable_licm=True):
            start = q_block * block_q
            q_block = tl.load(visits + 3 + index)
            rows = start + q_offsets
            inside = (rows < q_seq)[:, None]
            q_rows = row_of(q_ptr, batch, head, start, q_seq, q_heads, HEAD_DIM)
            dout_rows = row_of(dout_ptr, batch, head, start, q_seq, q_heads, HEAD_DIM)
            q = tl.load(q_rows + q_tile, mask=inside, other=0.0)  # [block_q, HEAD_DIM]
            dout = tl.load(dout_rows + q_tile, mask=inside, other=0.0)  # [block_q, HEAD_DIM]
            dout = dout.to(q.dtype)
            lse = tl.load(lse_ptr + row_of_head + rows, mask=rows < q_seq, other=float("-inf"))
            delta = tl.load(delta_ptr + row_of_head + rows, mask=rows < q_seq, other=0.0)
            shift = tl.where(lse == float("-inf"), float("-inf"), -lse * inverse_scale)
            scores = tl.broadcast_to(shift[None, :], [block_kv, block_q])
            scores = tl.dot(k, q.T, scores, input_precision=precision)
            weights = tl.exp2(scores * scale_2)
            words_at = matrix_row(words_ptr, batch, head, 0, map_share, map_heads, map_height, kv_blocks * map_words)
            words = words_at + (rows // map_rows)[None, :] * (kv_blocks * map_words) + kv_start // block_kv * map_words
            bits = (columns // map_columns - kv_start // map_columns)[:, None]
            shown_blocks = in_map(words, bits, (rows < q_seq)[None, :], map_words)
            keep = shown_blocks
            keep &= columns[:, None] <= rows[None, :] + upper
            weights = tl.where(keep, weights, 0.0)
            dv = tl.dot(weights.to(dout.dtype), dout, dv, input_precision=precision)
            dweights = tl.broadcast_to(-delta[None, :], [block_kv, block_q])
            dweights = tl.dot(v, dout.T, dweights, input_precision=precision)
            dscores = weights * dweights
            dk = tl.dot(dscores.to(q.dtype), q, dk, input_precision=precision)

    tl.store(dk_rows + kv_tile, (dk * scale).to(dk_ptr.dtype.element_ty), mask=in_columns)
    tl.store(dv_rows + kv_tile, dv.to(dv_ptr.dtype.element_ty), mask=in_columns)


def forward(q, k, v, operands, tiles):
    """Output in the shape of q with the head dim of v, and lse [batch, q_heads, q_seq] in float32."""
    batch, q_seq, q_heads, _ = q.shape
    kv_seq, kv_heads = k.shape[1:3]
    tile = tiles.forward
    seen, tile_map = tile_visibility(operands, batch, q_seq, kv_seq, tile)
    words = words_of_map(seen, operands.blocks.columns, kv_seq, tile.block_kv)
    out_shape = (batch, q_seq, q_heads, 128)
    return triton_call(
        forward_kernel,
        q,
        k,
        v,
        visited_lists(tile_map, of="q"),
        words,
        batch // words.shape[0],
        *words.shape[1:3],
        operands.scale,
        operands.upper,
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
            map_rows=operands.blocks.rows,
            map_columns=operands.blocks.columns,
            map_words=words.shape[4],
            precision=dot_precision(),
        ),
    )


def backward(q, k, v, out, lse, dout, dlse, operands, tiles):
    """Gradients of q, k and v, each of its array's shape and of out_dtype or the array's."""
    batch, q_seq, q_heads, _ = q.shape
    kv_seq, kv_heads = k.shape[1:3]
    tile = tiles.dq
    seen, tile_map = tile_visibility(operands, batch, q_seq, kv_seq, tile)
    words = words_of_map(seen, operands.blocks.columns, kv_seq, tile.block_kv)
    dq, delta = triton_call(
        dq_kernel,
        q,
        k,
        v,
        out,
        lse,
        dout,
        dlse,
        visited_lists(tile_map, of="q"),
        words,
        batch // words.shape[0],
        *words.shape[1:3],
        operands.scale,
        operands.upper,
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
            map_rows=operands.blocks.rows,
            map_columns=operands.blocks.columns,
            map_words=words.shape[4],
            precision=dot_precision(),
        ),
    )
    tile = tiles.dkv
    seen, tile_map = tile_visibility(operands, batch, q_seq, kv_seq, tile)
    words = words_of_map(seen, operands.blocks.columns, kv_seq, tile.block_kv)
    dk, dv = triton_call(
        dkv_kernel,
        q,
        k,
        v,
        lse,
        dout,
        delta,
        visited_lists(tile_map, of="kv"),
        words,
        batch // words.shape[0],
        *words.shape[1:3],
        operands.scale,
        operands.upper,
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
            map_rows=operands.blocks.rows,
            map_columns=operands.blocks.columns,
            map_words=words.shape[4],
            precision=dot_precision(),
        ),
    )
    return dq, dk, dv
