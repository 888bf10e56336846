# Generated from templates/gluon_hopper/attention.py.jinja by python -m codegen; do not edit.
# spec: gluon_hopper/bhsd_full_qk128_v128
# digest: b83a0885a10a5fa8
"""Full attention, arrays [batch, heads, seq, dim], head dim 128.

Gluon for NVIDIA GPUs of capability 9.0. One warp has the tensor memory accelerator bring blocks of keys and values into shared
memory; two warpgroups of 64 query rows each multiply them, and their asynchronous products overlap the softmax. The
arrangement is FlashAttention-3's (Shah et al. 2024, arXiv:2407.08608). The backward has one kernel that keeps queries and one
that keeps keys, and no atomics: equal calls give equal bits.
"""

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from eqx_attn._device import head_group, multiprocessors, strides_of, tma_blocks, tma_vector, triton_call

SPEC = "gluon_hopper/bhsd_full_qk128_v128"

HEAD_DIM = gl.constexpr(128)
ROWS = gl.constexpr(64)  # of one warpgroup: the height of its products
CONSUMERS = gl.constexpr(2)  # warpgroups that multiply
LOG2_E = gl.constexpr(math.log2(math.e))  # exp(x) = exp2(LOG2_E * x), and exp2 is one instruction
PADDING = gl.constexpr(128)  # each head's lse and delta are padded to a multiple of so many rows
STATISTICS_ROWS = gl.constexpr(32)
CONSUMER_REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(24)
LN_2 = gl.constexpr(math.log(2.0))


@gluon.jit
def make_barriers(count: gl.constexpr, arrivals: gl.constexpr):
    """Barriers in shared memory, each of which opens when so many have arrived."""
    barriers = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(count):
        mbarrier.init(barriers.index(index), count=arrivals)
    return barriers


@gluon.aggregate
class Ring:
    """The barriers of a ring of slots: the producer fills slot after slot, both consumers empty each.

    Step s uses slot s % stages for the (s // stages)th time, and a barrier's phase is the parity of that.
    """

    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.jit
    def slot(self, step):
        """Where a step's blocks lie."""
        return step % self.full.shape[0]

    @gluon.jit
    def phase(self, step):
        """The parity of how often the slot was used before."""
        return step // self.full.shape[0] & 1

    @gluon.jit
    def acquire(self, step, size: gl.constexpr):
        """For the producer: waits until the slot of a step is empty and announces the bytes that come. Their barrier."""
        mbarrier.wait(self.empty.index(self.slot(step)), self.phase(step) ^ 1)
        mbarrier.expect(self.full.index(self.slot(step)), size)
        return self.full.index(self.slot(step))

    @gluon.jit
    def await_full(self, step, steps):
        """For a consumer: waits until the slot of a step is full, if there is such a step."""
        mbarrier.wait(self.full.index(self.slot(step)), self.phase(step), pred=step < steps)

    @gluon.jit
    def release(self, step):
        """For a consumer: it reads this slot no more."""
        mbarrier.arrive(self.empty.index(self.slot(step)), count=1)


@gluon.jit
def make_ring(stages: gl.constexpr):
    """The barriers of a ring of so many slots."""
    return Ring(make_barriers(stages, 1), make_barriers(stages, 2))


@gluon.jit
def make_tiles(desc, count: gl.constexpr):
    """Shared memory for so many blocks of a descriptor."""
    return gl.allocate_shared_memory(desc.dtype, [count] + desc.block_shape, desc.layout)


@gluon.jit
def matrix(tiles, index):
    """One of several tiles [1, 1, rows, HEAD_DIM] as a matrix."""
    return tiles.index(index).reshape([tiles.shape[3], tiles.shape[4]])


@gluon.jit
def place_of(heads, blocks, group):
    """Which head and which block of it is this program's.

    Programs start in order. So those of a group of heads run together, whose tiles then stay in the L2 cache, and among
    them all heads' block 0 comes first. The last group may be smaller.
    """
    first_head = gl.program_id(0) // (group * blocks) * group
    place = gl.program_id(0) % (group * blocks)
    size = gl.minimum(group, heads - first_head)
    return first_head + place % size, place // size


@gluon.jit
def store_rows(ptr, values, staging, row_stride, rows_left):
    """Writes the rows of one warpgroup that exist, 16-bit ones through shared memory: 16 bytes a thread, row by row."""
    if ptr.dtype.element_ty == staging.dtype:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
        gl.barrier()
        staging.store(values.to(staging.dtype))
        gl.barrier()
        values = staging.load(layout)
    else:
        layout: gl.constexpr = values.type.layout
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))
    addresses = ptr + rows[:, None] * row_stride + dims[None, :]
    gl.store(addresses, values.to(ptr.dtype.element_ty), mask=(rows < rows_left)[:, None])


@gluon.aggregate
class Tiling:
    """The sizes of a call, and which keys a query sees."""

    q_seq: gl.tensor
    kv_seq: gl.tensor
    q_heads: gl.tensor
    kv_heads: gl.tensor
    all_heads: gl.tensor
    head_group: gl.tensor

    @gluon.jit
    def tiles(self):
        """The number of tiles: a tile is CONSUMERS * ROWS queries of one head."""
        return gl.cdiv(self.q_seq, CONSUMERS * ROWS) * self.all_heads

    @gluon.jit
    def tile(self, index):
        """The first query, the head, its head of keys, and the batch of a tile.

        Tiles of a few heads, whose keys and values stay in the second cache, come together.
        """
        q_blocks = gl.cdiv(self.q_seq, CONSUMERS * ROWS)
        group = index // (self.head_group * q_blocks)
        within = index % (self.head_group * q_blocks)
        heads = gl.minimum(self.head_group, self.all_heads - group * self.head_group)
        batch_head = group * self.head_group + within % heads
        q_block = within // heads
        head = batch_head % self.q_heads
        return q_block * (CONSUMERS * ROWS), head, head // (self.q_heads // self.kv_heads), batch_head // self.q_heads


@gluon.aggregate
class Buffers:
    """What lies in shared memory, and the barriers by which the warps hand it to each other."""

    q: gl.shared_memory_descriptor  # [CONSUMERS, 1, 1, ROWS, HEAD_DIM]
    out: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor  # [stages, 1, 1, block_kv, HEAD_DIM]
    v: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
    turn: gl.shared_memory_descriptor  # whose turn it is with the tensor cores
    block_kv: gl.constexpr
    stages: gl.constexpr

    @gluon.jit
    def key_block(self, count):
        """Block number `count` of all that this program loads, once it is there: [block_kv, HEAD_DIM]."""
        mbarrier.wait(self.k_full.index(count % self.stages), count // self.stages & 1)
        return self.k.index(count % self.stages).reshape([self.block_kv, HEAD_DIM])

    @gluon.jit
    def value_block(self, count):
        """The same of the values."""
        mbarrier.wait(self.v_full.index(count % self.stages), count // self.stages & 1)
        return self.v.index(count % self.stages).reshape([self.block_kv, HEAD_DIM])

    @gluon.jit
    def release_keys(self, count):
        """Their place may be filled again."""
        mbarrier.arrive(self.k_empty.index(count % self.stages))

    @gluon.jit
    def release_values(self, count):
        """Their place may be filled again."""
        mbarrier.arrive(self.v_empty.index(count % self.stages))

    @gluon.jit
    def wait_for_turn(self, consumer: gl.constexpr, turn):
        """Until the other warpgroups have issued their products of this round."""
        mbarrier.wait(self.turn.index(consumer), turn & 1)

    @gluon.jit
    def pass_turn(self, consumer: gl.constexpr):
        """To the next warpgroup."""
        mbarrier.arrive(self.turn.index((consumer + 1) % CONSUMERS))


@gluon.jit
def load_tiles(problem, buffers, q_blocks, k_blocks, v_blocks):
    """The loading warp: queries, keys and values of one tile after another, keys from the last visible block down."""
    block_kv: gl.constexpr = buffers.block_kv
    stages: gl.constexpr = buffers.stages
    count = 0  # blocks of keys so far
    round = 0  # tiles so far
    index = gl.program_id(0)
    while index < problem.tiles():
        start, head, kv_head, batch = problem.tile(index)
        for consumer in gl.static_range(CONSUMERS):
            mbarrier.wait(buffers.q_empty.index(consumer), round & 1 ^ 1)
            mbarrier.expect(buffers.q_full.index(consumer), q_blocks.nbytes_per_cta)
            tma.async_load(
                q_blocks,
                [batch, head, start + consumer * ROWS, 0],
                buffers.q_full.index(consumer),
                buffers.q.index(consumer),
            )
        first, last = 0, gl.cdiv(problem.kv_seq, block_kv)
        for step in range(0, last - first):
            kv_start = (last - 1 - step) * block_kv
            slot = (count + step) % stages
            used = (count + step) // stages & 1
            mbarrier.wait(buffers.k_empty.index(slot), used ^ 1)
            mbarrier.expect(buffers.k_full.index(slot), k_blocks.nbytes_per_cta)
            tma.async_load(k_blocks, [batch, kv_head, kv_start, 0], buffers.k_full.index(slot), buffers.k.index(slot))
            mbarrier.wait(buffers.v_empty.index(slot), used ^ 1)
            mbarrier.expect(buffers.v_full.index(slot), v_blocks.nbytes_per_cta)
            tma.async_load(v_blocks, [batch, kv_head, kv_start, 0], buffers.v_full.index(slot), buffers.v.index(slot))
        count += last - first
        index = index + gl.num_programs(0)
        round += 1


@gluon.jit
def columns_sum(weights):
    """What one thread holds of each row's sum, [ROWS, 4]: adding the four can wait until the end."""
    quads = gl.reshape(weights, [weights.shape[0], weights.shape[1] // 8, 4, 2])
    return gl.sum(gl.sum(quads, 3), 1)


@gluon.jit
def by_row(row, tensor):
    """A value for each row, laid out to be multiplied with `tensor`."""
    return gl.expand_dims(gl.convert_layout(row, gl.SliceLayout(1, tensor.type.layout)), 1)


@gluon.jit
def hide(scores, problem, kv_start):
    """-inf in the place of the scores whose key is not visible."""
    columns = gl.expand_dims(kv_start + gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores.type.layout)), 0)
    return gl.where(columns < problem.kv_seq, scores, float("-inf"))


@gluon.jit
def step(
    buffers,
    q,
    acc,
    weights,
    row_max,
    row_sum,
    correction,
    count,
    scale,
    turn,
    consumer: gl.constexpr,
):
    """The products of a block's keys, and those of the values of the block before, whose weights are there."""
    scores_layout: gl.constexpr = row_max.type.layout.parent
    zeros = gl.zeros([ROWS, buffers.block_kv], gl.float32, scores_layout)
    k = buffers.key_block(count)
    buffers.wait_for_turn(consumer, turn)
    scores = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    acc = acc * by_row(correction, acc)
    v = buffers.value_block(count - 1)
    acc = warpgroup_mma(weights, v, acc, is_async=True)
    buffers.pass_turn(consumer)
    scores = warpgroup_mma_wait(1, deps=[scores])  # [ROWS, block_kv]
    buffers.release_keys(count)
    new_max = gl.maximum(row_max, gl.max(scores, 1) * scale)
    correction = gl.exp2(row_max - new_max)
    fresh = gl.exp2(scores * scale - gl.expand_dims(new_max, 1))
    row_sum = row_sum * by_row(correction, row_sum) + columns_sum(fresh)
    fresh = gl.convert_layout(fresh.to(buffers.k.dtype), weights.type.layout)
    acc = warpgroup_mma_wait(0, deps=[acc])
    buffers.release_values(count - 1)
    return acc, fresh, new_max, row_sum, correction


@gluon.jit
def attend(
    consumer: gl.constexpr,
    problem,
    buffers,
    scale,
    out_blocks,
    lse_ptr,
):
    """A warpgroup: output and lse of its rows of one tile after another."""
    block_kv: gl.constexpr = buffers.block_kv
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block_kv, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    count = 0  # blocks of keys before this tile
    turn = 0
    round = 0  # tiles so far
    index = gl.program_id(0)
    while tl.condition(index < problem.tiles(), disable_licm=True):  # what is hoisted lies in registers
        tile_start, head, _, batch = problem.tile(index)
        row_start = tile_start + consumer * ROWS
        last = gl.cdiv(problem.kv_seq, block_kv)

        q = buffers.q.index(consumer).reshape([ROWS, HEAD_DIM])
        mbarrier.wait(buffers.q_full.index(consumer), round & 1)
        zeros = gl.zeros([ROWS, block_kv], gl.float32, scores_layout)
        k = buffers.key_block(count)
        scores = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])  # [ROWS, block_kv]
        buffers.release_keys(count)
        if last * block_kv > problem.kv_seq:
            scores = hide(scores, problem, (last - 1) * block_kv)
        row_max = gl.max(scores, 1) * scale
        weights = gl.exp2(scores * scale - gl.expand_dims(row_max, 1))
        row_sum = columns_sum(weights)
        weights = gl.convert_layout(weights.to(buffers.k.dtype), weights_layout)
        acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, out_layout)
        correction = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(1, scores_layout))
        for block in tl.range(1, last, disable_licm=True):
            acc, weights, row_max, row_sum, correction = step(
                buffers,
                q,
                acc,
                weights,
                row_max,
                row_sum,
                correction,
                count + block,
                scale,
                turn + block - 1,
                consumer,
            )
        blocks = last
        mbarrier.arrive(buffers.q_empty.index(consumer))
        acc = acc * by_row(correction, acc)
        v = buffers.value_block(count + blocks - 1)
        acc = warpgroup_mma(weights, v, acc, is_async=True)
        sums = gl.convert_layout(gl.sum(row_sum, 1), gl.SliceLayout(1, scores_layout))
        lse = (row_max + gl.log2(sums)) * LN_2
        rows = row_start + gl.arange(0, ROWS, gl.SliceLayout(1, scores_layout))
        row_of_head = (batch * problem.q_heads + head) * problem.q_seq
        gl.store(lse_ptr + row_of_head + rows, lse, mask=rows < problem.q_seq)
        acc = warpgroup_mma_wait(0, deps=[acc])  # [ROWS, HEAD_DIM]
        buffers.release_values(count + blocks - 1)
        acc = acc * by_row(1.0 / sums, acc)
        tma.store_wait(0)  # of the tile before
        buffers.out.index(consumer).reshape([ROWS, HEAD_DIM]).store(acc.to(buffers.out.dtype))
        fence_async_shared()
        tma.async_store(out_blocks, [batch, head, row_start, 0], buffers.out.index(consumer))
        count += blocks
        turn += blocks - 1
        index += gl.num_programs(0)
        round += 1
    tma.store_wait(0)


@gluon.jit
def forward_kernel(
    q_blocks,
    k_blocks,
    v_blocks,
    scale,
    q_seq,
    kv_seq,
    q_heads,
    kv_heads,
    all_heads,
    head_group,
    out_blocks,
    lse_ptr,
    block_kv: gl.constexpr,
    stages: gl.constexpr,
):
    """Output and lse of tiles of CONSUMERS * ROWS queries of one head, as many as this program gets to."""
    problem = Tiling(q_seq, kv_seq, q_heads, kv_heads, all_heads, head_group)
    buffers = Buffers(
        gl.allocate_shared_memory(q_blocks.dtype, [CONSUMERS, 1, 1, ROWS, HEAD_DIM], q_blocks.layout),
        gl.allocate_shared_memory(out_blocks.dtype, [CONSUMERS, 1, 1, ROWS, HEAD_DIM], out_blocks.layout),
        gl.allocate_shared_memory(k_blocks.dtype, [stages, 1, 1, block_kv, HEAD_DIM], k_blocks.layout),
        gl.allocate_shared_memory(v_blocks.dtype, [stages, 1, 1, block_kv, HEAD_DIM], v_blocks.layout),
        make_barriers(CONSUMERS, 1),
        make_barriers(CONSUMERS, 1),
        make_barriers(stages, 1),
        make_barriers(stages, CONSUMERS),
        make_barriers(stages, 1),
        make_barriers(stages, CONSUMERS),
        make_barriers(CONSUMERS, 1),
        block_kv,
        stages,
    )
    fence_async_shared()
    mbarrier.arrive(buffers.turn.index(0))
    scale = scale * LOG2_E
    gl.warp_specialize(
        [
            (attend, (0, problem, buffers, scale, out_blocks, lse_ptr)),
            (attend, (1, problem, buffers, scale, out_blocks, lse_ptr)),
            (load_tiles, (problem, buffers, q_blocks, k_blocks, v_blocks)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.aggregate
class Problem:
    """The scalars that all parts of a kernel of the backward know."""

    scale: gl.tensor
    q_seq: gl.tensor
    kv_seq: gl.tensor
    batch: gl.tensor
    q_heads: gl.tensor
    kv_heads: gl.tensor
    group: gl.tensor  # heads whose programs run together


@gluon.jit
def statistics_kernel(
    out_ptr,
    dout_ptr,
    lse_ptr,
    dlse_ptr,
    q_heads,
    q_seq,
    batch_stride,
    head_stride,
    row_stride,
    lse_2_ptr,
    delta_ptr,
):
    """What the other kernels need of each query: lse in base 2, and delta, which is out * dout summed, less dlse.

    A query that saw no key, and each row up to the next multiple of PADDING, gets lse inf and delta 0: then its weights
    are 0, and so are its gradients, whatever dout and dlse hold.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    blocks = gl.cdiv(q_seq, PADDING) * (PADDING // STATISTICS_ROWS)
    head, block = gl.program_id(0) // blocks, gl.program_id(0) % blocks
    rows = block * STATISTICS_ROWS + gl.arange(0, STATISTICS_ROWS, gl.SliceLayout(1, layout))
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))

    start = (head // q_heads).to(gl.int64) * batch_stride + (head % q_heads).to(gl.int64) * head_stride
    tile = start + rows[:, None].to(gl.int64) * row_stride + dims[None, :]
    out = gl.load(out_ptr + tile, mask=(rows < q_seq)[:, None], other=0.0)  # [STATISTICS_ROWS, HEAD_DIM]
    dout = gl.load(dout_ptr + tile, mask=(rows < q_seq)[:, None], other=0.0)
    lse = gl.load(lse_ptr + head.to(gl.int64) * q_seq + rows, mask=rows < q_seq, other=float("-inf"))
    dlse = gl.load(dlse_ptr + head.to(gl.int64) * q_seq + rows, mask=rows < q_seq, other=0.0)

    dead = lse == float("-inf")
    delta = gl.sum(out.to(gl.float32) * dout.to(gl.float32), 1) - dlse
    padded_rows = head * (blocks * STATISTICS_ROWS) + rows
    gl.store(lse_2_ptr + padded_rows, gl.where(dead, float("inf"), lse * LOG2_E))
    gl.store(delta_ptr + padded_rows, gl.where(dead, 0.0, delta))


@gluon.aggregate
class QueryTile:
    """The queries of one program, and the blocks of keys of which they see some."""

    head: gl.tensor  # of all examples' heads
    row_start: gl.tensor
    first: gl.tensor
    blocks: gl.tensor


@gluon.jit
def query_tile(problem, block_kv: gl.constexpr):
    """This program's tile."""
    q_blocks = gl.cdiv(problem.q_seq, 2 * ROWS)
    head, block = place_of(problem.batch * problem.q_heads, q_blocks, problem.group)
    row_start = block * (2 * ROWS)
    return QueryTile(head, row_start, gl.to_tensor(0), gl.cdiv(problem.kv_seq, block_kv))


@gluon.aggregate
class DqBuffers:
    """Two tiles of 64 queries, and rings of blocks of keys and values."""

    q: gl.shared_memory_descriptor
    dout: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    k_ring: Ring
    v: gl.shared_memory_descriptor
    v_ring: Ring


@gluon.jit
def dq_producer(buffers, problem, q_desc, k_desc, v_desc, dout_desc):
    """Loads the queries, then blocks of keys and values, the last ones first."""
    block_kv: gl.constexpr = buffers.k.shape[3]
    tile = query_tile(problem, block_kv)
    batch, head = tile.head // problem.q_heads, tile.head % problem.q_heads
    kv_head = head // (problem.q_heads // problem.kv_heads)
    for index in gl.static_range(2):
        full = buffers.q_full.index(index)
        row = tile.row_start + index * ROWS
        mbarrier.expect(full, q_desc.nbytes_per_cta + dout_desc.nbytes_per_cta)
        tma.async_load(q_desc, [batch, head, row, 0], full, buffers.q.index(index))
        tma.async_load(dout_desc, [batch, head, row, 0], full, buffers.dout.index(index))
    for step in range(0, tile.blocks):
        row = (tile.first + tile.blocks - 1 - step) * block_kv
        k_full = buffers.k_ring.acquire(step, k_desc.nbytes_per_cta)
        tma.async_load(k_desc, [batch, kv_head, row, 0], k_full, buffers.k.index(buffers.k_ring.slot(step)))
        v_full = buffers.v_ring.acquire(step, v_desc.nbytes_per_cta)
        tma.async_load(v_desc, [batch, kv_head, row, 0], v_full, buffers.v.index(buffers.v_ring.slot(step)))


@gluon.jit
def mask_keys(weights, kv_start, problem):
    """Zeros for the keys that a query does not see, in a block of keys of which some row does not see all."""
    block_kv: gl.constexpr = weights.shape[1]
    some_hidden = kv_start + block_kv > problem.kv_seq
    if some_hidden:
        layout: gl.constexpr = weights.type.layout
        columns = kv_start + gl.arange(0, block_kv, gl.SliceLayout(0, layout))
        weights = gl.where((columns < problem.kv_seq)[None, :], weights, 0.0)
    return weights


@gluon.jit
def dq_step(
    step,
    tile,
    dq,
    previous,
    q,
    dout,
    lse_2,
    delta,
    buffers,
    problem,
    first: gl.constexpr,
):
    """The score gradients of one block of keys, as an operand; meanwhile those of the step before go into dq."""
    block_kv: gl.constexpr = buffers.k.shape[3]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block_kv, 16])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dq.type.layout, k_width=2)
    zeros = gl.zeros([ROWS, block_kv], gl.float32, layout)
    k_ring, v_ring = buffers.k_ring, buffers.v_ring

    k_ring.await_full(step, tile.blocks)
    k = matrix(buffers.k, k_ring.slot(step))  # [block_kv, HEAD_DIM]
    scores = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    v_ring.await_full(step, tile.blocks)
    v = matrix(buffers.v, v_ring.slot(step))
    dweights = warpgroup_mma(dout, v.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if not first:
        k_before = matrix(buffers.k, k_ring.slot(step - 1))
        dq = warpgroup_mma(previous, k_before, dq, is_async=True)
    scores = warpgroup_mma_wait(1 if first else 2, deps=[scores])
    weights = gl.exp2(scores * (problem.scale * LOG2_E) - lse_2[:, None])
    if first:  # the last block of keys, which may be cut off
        weights = mask_keys(weights, (tile.first + tile.blocks - 1 - step) * block_kv, problem)
    dweights = warpgroup_mma_wait(0 if first else 1, deps=[dweights])
    v_ring.release(step)
    dscores = weights * (dweights - delta[:, None])
    dscores = gl.convert_layout(dscores.to(q.dtype), operand)
    if not first:
        dq = warpgroup_mma_wait(0, deps=[dq])
        k_ring.release(step - 1)
    return dq, dscores


@gluon.jit
def dq_consumer(
    index: gl.constexpr, buffers, problem, lse_2_ptr, delta_ptr, dq_ptr, batch_stride, head_stride, row_stride
):
    """One warpgroup's 64 queries."""
    block_kv: gl.constexpr = buffers.k.shape[3]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block_kv, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    tile = query_tile(problem, block_kv)
    row_start = tile.row_start + index * ROWS
    statistics = tile.head * (gl.cdiv(problem.q_seq, PADDING) * PADDING) + row_start
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    lse_2 = gl.load(lse_2_ptr + statistics + rows)
    delta = gl.load(delta_ptr + statistics + rows)

    dq = gl.zeros([ROWS, HEAD_DIM], gl.float32, dq_layout)
    mbarrier.wait(buffers.q_full.index(index), 0)
    q = matrix(buffers.q, index)
    dout = matrix(buffers.dout, index)
    if tile.blocks > 0:
        dq, dscores = dq_step(0, tile, dq, 0, q, dout, lse_2, delta, buffers, problem, True)
        for step in range(1, tile.blocks):
            dq, dscores = dq_step(step, tile, dq, dscores, q, dout, lse_2, delta, buffers, problem, False)
        k = matrix(buffers.k, buffers.k_ring.slot(tile.blocks - 1))
        dq = warpgroup_mma(dscores, k, dq, is_async=True)
        dq = warpgroup_mma_wait(0, deps=[dq])

    batch, head = (tile.head // problem.q_heads).to(gl.int64), (tile.head % problem.q_heads).to(gl.int64)
    dq_rows = dq_ptr + batch * batch_stride + head * head_stride + row_start.to(gl.int64) * row_stride
    store_rows(dq_rows, dq * problem.scale, q, row_stride, problem.q_seq - row_start)


@gluon.jit
def dq_kernel(
    q_desc,
    k_desc,
    v_desc,
    dout_desc,
    lse_2_ptr,
    delta_ptr,
    scale,
    q_seq,
    kv_seq,
    batch,
    q_heads,
    kv_heads,
    group,
    batch_stride,
    head_stride,
    row_stride,
    dq_ptr,
    stages: gl.constexpr,
    v_stages: gl.constexpr,
):
    """Gradient of 128 queries of one head, 64 in each of two warpgroups; a third has the one warp that loads."""
    problem = Problem(scale, q_seq, kv_seq, batch, q_heads, kv_heads, group)
    buffers = DqBuffers(
        make_tiles(q_desc, 2),
        make_tiles(dout_desc, 2),
        make_barriers(2, 1),
        make_tiles(k_desc, stages),
        make_ring(stages),
        make_tiles(v_desc, v_stages),
        make_ring(v_stages),
    )
    fence_async_shared()
    gl.warp_specialize(
        [
            (dq_consumer, (0, buffers, problem, lse_2_ptr, delta_ptr, dq_ptr, batch_stride, head_stride, row_stride)),
            (dq_consumer, (1, buffers, problem, lse_2_ptr, delta_ptr, dq_ptr, batch_stride, head_stride, row_stride)),
            (dq_producer, (buffers, problem, q_desc, k_desc, v_desc, dout_desc)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.aggregate
class KeyTile:
    """The keys of one program, and the blocks of queries of which some see some of them."""

    head: gl.tensor  # of key and value, of all examples
    row_start: gl.tensor
    first: gl.tensor
    blocks: gl.tensor


@gluon.jit
def key_tile(problem, block_q: gl.constexpr):
    """This program's tile."""
    kv_blocks = gl.cdiv(problem.kv_seq, 2 * ROWS)
    head, block = place_of(problem.batch * problem.kv_heads, kv_blocks, problem.group)
    row_start = block * (2 * ROWS)
    return KeyTile(head, row_start, gl.to_tensor(0), gl.cdiv(problem.q_seq, block_q))


@gluon.aggregate
class KeyBuffers:
    """Two tiles of 64 keys and values, and a ring of blocks of queries."""

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    kv_full: gl.shared_memory_descriptor
    q: gl.shared_memory_descriptor
    dout: gl.shared_memory_descriptor
    lse_2: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    ring: Ring


@gluon.jit
def key_buffers(q_desc, k_desc, v_desc, dout_desc, lse_2_desc, delta_desc, stages: gl.constexpr):
    """What the blocks of these descriptors need, and their barriers."""
    return KeyBuffers(
        make_tiles(k_desc, 2),
        make_tiles(v_desc, 2),
        make_barriers(1, 1),
        make_tiles(q_desc, stages),
        make_tiles(dout_desc, stages),
        make_tiles(lse_2_desc, stages),
        make_tiles(delta_desc, stages),
        make_ring(stages),
    )


@gluon.jit
def key_producer(buffers, problem, q_desc, k_desc, v_desc, dout_desc, lse_2_desc, delta_desc):
    """Loads keys and values, then the blocks of queries of each head that uses them, with their lse and delta."""
    block_q: gl.constexpr = buffers.q.shape[3]
    tile = key_tile(problem, block_q)
    batch, kv_head = tile.head // problem.kv_heads, tile.head % problem.kv_heads
    kv_full = buffers.kv_full.index(0)
    mbarrier.expect(kv_full, 2 * (k_desc.nbytes_per_cta + v_desc.nbytes_per_cta))
    for index in gl.static_range(2):
        row = tile.row_start + index * ROWS
        tma.async_load(k_desc, [batch, kv_head, row, 0], kv_full, buffers.k.index(index))
        tma.async_load(v_desc, [batch, kv_head, row, 0], kv_full, buffers.v.index(index))

    size: gl.constexpr = 2 * (q_desc.nbytes_per_cta + lse_2_desc.nbytes_per_cta)
    shared_by = problem.q_heads // problem.kv_heads
    padded_seq = gl.cdiv(problem.q_seq, PADDING) * PADDING
    for member in range(0, shared_by):
        head = kv_head * shared_by + member
        statistics = (tile.head * shared_by + member) * padded_seq
        for block in range(0, tile.blocks):
            step = member * tile.blocks + block
            row = (tile.first + block) * block_q
            full = buffers.ring.acquire(step, size)
            slot = buffers.ring.slot(step)
            tma.async_load(q_desc, [batch, head, row, 0], full, buffers.q.index(slot))
            tma.async_load(lse_2_desc, [statistics + row], full, buffers.lse_2.index(slot))
            tma.async_load(dout_desc, [batch, head, row, 0], full, buffers.dout.index(slot))
            tma.async_load(delta_desc, [statistics + row], full, buffers.delta.index(slot))


@gluon.jit
def store_gradients(dk, dv, staging, tile, row_start, problem, dk_ptr, dv_ptr, batch_stride, head_stride, row_stride):
    """Writes one warpgroup's rows of dk and dv."""
    batch, kv_head = tile.head // problem.kv_heads, tile.head % problem.kv_heads
    rows = batch.to(gl.int64) * batch_stride + row_start.to(gl.int64) * row_stride
    rows_left = problem.kv_seq - row_start
    dv_rows = dv_ptr + rows + kv_head.to(gl.int64) * head_stride
    store_rows(dv_rows, dv, staging, row_stride, rows_left)
    dk_rows = dk_ptr + rows + kv_head.to(gl.int64) * head_stride
    store_rows(dk_rows, dk * problem.scale, staging, row_stride, rows_left)


@gluon.jit
def dkv_step(step, steps, scores, dk, dv, k, v, buffers, problem):
    """One block of queries into dk and dv, from its scores [keys, queries]; and the scores of the next block."""
    layout: gl.constexpr = scores.type.layout
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dk.type.layout, k_width=2)
    zeros = gl.zeros(scores.shape, gl.float32, layout)
    ring = buffers.ring
    slot = ring.slot(step)
    q, dout = matrix(buffers.q, slot), matrix(buffers.dout, slot)  # [block_q, HEAD_DIM]

    delta = buffers.delta.index(slot).load(gl.SliceLayout(0, layout))
    dweights = zeros - delta[None, :]
    dweights = warpgroup_mma(v, dout.permute((1, 0)), dweights, is_async=True)
    lse_2 = buffers.lse_2.index(slot).load(gl.SliceLayout(0, layout))
    weights = gl.exp2(scores * (problem.scale * LOG2_E) - lse_2[None, :])
    dweights = warpgroup_mma_wait(0, deps=[dweights])
    dv = warpgroup_mma(gl.convert_layout(weights.to(q.dtype), operand), dout, dv, is_async=True)
    dscores = gl.convert_layout((weights * dweights).to(q.dtype), operand)

    ring.await_full(step + 1, steps)
    q_next = matrix(buffers.q, ring.slot(step + 1))
    scores = warpgroup_mma(k, q_next.permute((1, 0)), zeros, use_acc=False, is_async=True)
    dk = warpgroup_mma(dscores, q, dk, is_async=True)
    dv = warpgroup_mma_wait(2, deps=[dv])
    dk, scores = warpgroup_mma_wait(0, deps=[dk, scores])
    ring.release(step)
    return scores, dk, dv


@gluon.jit
def dkv_consumer(index: gl.constexpr, buffers, problem, dk_ptr, dv_ptr, batch_stride, head_stride, row_stride):
    """One warpgroup's 64 keys."""
    block_q: gl.constexpr = buffers.q.shape[3]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block_q, 16])
    dkv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    tile = key_tile(problem, block_q)
    row_start = tile.row_start + index * ROWS
    steps = tile.blocks * (problem.q_heads // problem.kv_heads)
    k, v = matrix(buffers.k, index), matrix(buffers.v, index)  # [ROWS, HEAD_DIM]
    dk = gl.zeros([ROWS, HEAD_DIM], gl.float32, dkv_layout)
    dv = gl.zeros([ROWS, HEAD_DIM], gl.float32, dkv_layout)

    mbarrier.wait(buffers.kv_full.index(0), 0)
    buffers.ring.await_full(0, steps)
    zeros = gl.zeros([ROWS, block_q], gl.float32, layout)
    scores = warpgroup_mma(k, matrix(buffers.q, 0).permute((1, 0)), zeros, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    for step in range(0, steps):
        scores, dk, dv = dkv_step(step, steps, scores, dk, dv, k, v, buffers, problem)
    store_gradients(dk, dv, v, tile, row_start, problem, dk_ptr, dv_ptr, batch_stride, head_stride, row_stride)


@gluon.jit
def dkv_kernel(
    q_desc,
    k_desc,
    v_desc,
    dout_desc,
    lse_2_desc,
    delta_desc,
    scale,
    q_seq,
    kv_seq,
    batch,
    q_heads,
    kv_heads,
    group,
    batch_stride,
    head_stride,
    row_stride,
    dk_ptr,
    dv_ptr,
    stages: gl.constexpr,
):
    """Gradients of 128 keys and values, 64 in each of two warpgroups, summed over the query heads that share them."""
    problem = Problem(scale, q_seq, kv_seq, batch, q_heads, kv_heads, group)
    buffers = key_buffers(q_desc, k_desc, v_desc, dout_desc, lse_2_desc, delta_desc, stages)
    fence_async_shared()
    gl.warp_specialize(
        [
            (dkv_consumer, (0, buffers, problem, dk_ptr, dv_ptr, batch_stride, head_stride, row_stride)),
            (dkv_consumer, (1, buffers, problem, dk_ptr, dv_ptr, batch_stride, head_stride, row_stride)),
            (key_producer, (buffers, problem, q_desc, k_desc, v_desc, dout_desc, lse_2_desc, delta_desc)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


def forward(q, k, v, operands, tiles):
    """Output in the shape of q with the head dim of v, and lse [batch, q_heads, q_seq] in float32."""
    batch, q_heads, q_seq, _ = q.shape
    kv_heads, kv_seq = k.shape[1:3]
    tile = tiles.forward
    out = jax.ShapeDtypeStruct(q.shape, operands.out_dtype or q.dtype)
    programs = triton.cdiv(q_seq, 128) * q_heads * batch
    return triton_call(
        forward_kernel,
        tma_blocks(q, "bhsd", 64),
        tma_blocks(k, "bhsd", tile.block_kv),
        tma_blocks(v, "bhsd", tile.block_kv),
        operands.scale,
        q_seq,
        kv_seq,
        q_heads,
        kv_heads,
        batch * q_heads,
        head_group(kv_seq, 256, q_heads // kv_heads, batch * q_heads),
        outputs=(
            tma_blocks(out, "bhsd", 64),
            jax.ShapeDtypeStruct((batch, q_heads, q_seq), jnp.float32),
        ),
        grid=(min(programs, multiprocessors()),),
        num_warps=4,
        num_stages=1,
        constants=dict(block_kv=tile.block_kv, stages=tile.num_stages),
    )


def backward(q, k, v, out, lse, dout, dlse, operands, tiles):
    """Gradients of q, k and v, each of its array's shape and of out_dtype or the array's."""
    batch, q_heads, q_seq, _ = q.shape
    kv_heads, kv_seq = k.shape[1:3]
    dout = dout.astype(q.dtype)
    padded_seq = triton.cdiv(q_seq, 128) * 128
    vector = jax.ShapeDtypeStruct((batch * q_heads * padded_seq,), jnp.float32)
    lse_2, delta = triton_call(
        statistics_kernel,
        out,
        dout,
        lse,
        dlse,
        q_heads,
        q_seq,
        *strides_of(out, "bhsd"),
        outputs=(vector, vector),
        grid=(batch * q_heads * padded_seq // 32,),
        num_warps=4,
        num_stages=1,
        constants={},
    )
    tile = tiles.dq
    (dq,) = triton_call(
        dq_kernel,
        tma_blocks(q, "bhsd", 64),
        tma_blocks(k, "bhsd", tile.block_kv),
        tma_blocks(v, "bhsd", tile.block_kv),
        tma_blocks(dout, "bhsd", 64),
        lse_2,
        delta,
        operands.scale,
        q_seq,
        kv_seq,
        batch,
        q_heads,
        kv_heads,
        head_group(kv_seq, 256, q_heads // kv_heads, batch * q_heads),
        *strides_of(q, "bhsd"),
        outputs=(jax.ShapeDtypeStruct(q.shape, operands.out_dtype or q.dtype),),
        grid=(triton.cdiv(q_seq, 128) * q_heads * batch,),
        num_warps=4,
        num_stages=1,
        constants=dict(stages=tile.num_stages, v_stages=tile.num_stages),
    )
    tile = tiles.dkv
    dk, dv = triton_call(
        dkv_kernel,
        tma_blocks(q, "bhsd", tile.block_q),
        tma_blocks(k, "bhsd", 64),
        tma_blocks(v, "bhsd", 64),
        tma_blocks(dout, "bhsd", tile.block_q),
        tma_vector(lse_2, tile.block_q),
        tma_vector(delta, tile.block_q),
        operands.scale,
        q_seq,
        kv_seq,
        batch,
        q_heads,
        kv_heads,
        head_group(q_seq * (q_heads // kv_heads), 256, 1, batch * kv_heads),
        *strides_of(k, "bhsd"),
        outputs=(
            jax.ShapeDtypeStruct(k.shape, operands.out_dtype or k.dtype),
            jax.ShapeDtypeStruct(v.shape, operands.out_dtype or v.dtype),
        ),
        grid=(triton.cdiv(kv_seq, 128) * kv_heads * batch,),
        num_warps=4,
        num_stages=1,
        constants=dict(stages=tile.num_stages),
    )
    return dq, dk, dv
