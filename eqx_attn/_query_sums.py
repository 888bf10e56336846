"""The gradient of queries in a kernel that goes over blocks of keys: sums that grow from one block of keys to the next.

They are float32 and transposed, `[dim, block_q]` for each block of queries. Where those of all heads that share a key head
fit, they stay in vector memory (`ResidentSums`); else each step fetches its block's and stores it back (`FetchedSums`).
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array


@dataclasses.dataclass(frozen=True)
class _Sums:
    """What both ways have in common: the sizes, and what becomes of the sums in the end.

    A kernel asks `shape` and `scratch` for its call. Its grid is (batch, kv_heads, kv_blocks, group,
    steps), of which the first two axes may be shared out to cores. There it calls `clear` at a head's first step and
    `finish` after its last one. A step that has scores calls `fetch`, `add` for each part of them, then `store`.

    `result` is what all of that leaves: `[batch, q_heads, q_seq, dim]` or, in `columns`, `[batch, q_seq, q_heads * dim]`.
    """

    batch: int
    kv_heads: int
    group: int
    q_seq: int
    block_q: int
    dim: int
    dtype: str
    scale: float
    columns: bool

    @property
    def q_blocks(self) -> int:
        return pl.cdiv(self.q_seq, self.block_q)

    @property
    def slots(self) -> int:
        """How many blocks of queries see the keys of one head."""
        return self.group * self.q_blocks

    @property
    def block(self) -> tuple[int, int]:
        return self.dim, self.block_q

    def slot(self, q_block):
        return pl.program_id(3) * self.q_blocks + q_block


class ResidentSums(_Sums):
    """Sums in vector memory until the last block of keys, when they are written out by blocks."""

    @property
    def shape(self) -> jax.ShapeDtypeStruct:
        rows, heads = self.q_blocks * self.block_q, self.kv_heads * self.group
        shape = (self.batch, rows, heads * self.dim) if self.columns else (self.batch, heads, rows, self.dim)
        return jax.ShapeDtypeStruct(shape, self.dtype)

    @property
    def scratch(self) -> tuple:
        return (
            pltpu.VMEM((self.slots, *self.block), jnp.float32),
            pltpu.VMEM((2, self.block_q, self.dim), self.dtype),
            pltpu.SemaphoreType.DMA((2,)),
        )

    def clear(self, dq_ref, scratch) -> None:
        @_loop(self.slots)
        def _(slot):
            scratch[0][slot] = jnp.zeros(self.block, jnp.float32)

    def fetch(self, dq_ref, scratch, q_block) -> "_ResidentStep":
        return _ResidentStep(scratch[0].at[self.slot(q_block)])

    def finish(self, dq_ref, scratch) -> None:
        sums, buffers, semaphores = scratch
        batch, first_head = pl.program_id(0), pl.program_id(1) * self.group

        def copy(slot, buffer):
            rows = pl.ds(pl.multiple_of(slot % self.q_blocks * self.block_q, 128), self.block_q)
            head = first_head + slot // self.q_blocks
            if self.columns:
                place = dq_ref.at[batch, rows, pl.ds(pl.multiple_of(head * self.dim, 128), self.dim)]
            else:
                place = dq_ref.at[batch, head, rows]
            return pltpu.make_async_copy(buffers.at[buffer], place, semaphores.at[buffer])

        @_loop(self.slots)
        def _(slot):
            buffer = slot % 2

            @pl.when(slot >= 2)
            def _():
                copy(slot - 2, buffer).wait()

            buffers[buffer] = (sums[slot] * self.scale).T.astype(buffers.dtype)
            copy(slot, buffer).start()

        for slot in range(max(self.slots - 2, 0), self.slots):
            copy(jnp.int32(slot), slot % 2).wait()

    def result(self, dq: Array) -> Array:
        return dq[:, : self.q_seq] if self.columns else dq[:, :, : self.q_seq]


@dataclasses.dataclass(frozen=True)
class _ResidentStep:
    sums: jax.Ref

    def add(self, rows: slice, product: Array) -> None:
        self.sums[:, rows] += product

    def store(self) -> None:
        pass


class FetchedSums(_Sums):
    """Sums in the device's memory, `[batch, q_heads, q_blocks, dim, block_q]`, of which a step has one block.

    While a step computes, its block is on the way in and the last step's on the way out. A kernel may not leave the order
    of the two to chance where they are the same block: then, and only then, the step begins by waiting for the write. So
    nothing depends on how many steps lie between two visits of a block. All other writes have ended before the step's own
    begins, which is from the same memory, and the last one of a head before the head's last step ends.
    """

    @property
    def shape(self) -> jax.ShapeDtypeStruct:
        heads = self.kv_heads * self.group
        return jax.ShapeDtypeStruct((self.batch, heads, self.q_blocks, *self.block), jnp.float32)

    @property
    def scratch(self) -> tuple:
        block = pltpu.VMEM(self.block, jnp.float32)
        return block, block, block, pltpu.SMEM((1,), jnp.int32), pltpu.SemaphoreType.DMA((2,))

    def clear(self, dq_ref, scratch) -> None:
        _, _, outgoing, written, semaphores = scratch
        outgoing[...] = jnp.zeros(self.block, jnp.float32)
        written[0] = -1

        def copy(slot):
            head = pl.program_id(1) * self.group + slot // self.q_blocks
            place = dq_ref.at[pl.program_id(0), head, slot % self.q_blocks]
            return pltpu.make_async_copy(outgoing, place, semaphores.at[1])

        @_loop(self.slots)
        def _(slot):
            copy(slot).start()

        @_loop(self.slots)
        def _(slot):
            copy(slot).wait()

    def fetch(self, dq_ref, scratch, q_block) -> "_FetchedStep":
        head = pl.program_id(1) * self.group + pl.program_id(3)
        own, incoming, outgoing, written, semaphores = scratch
        place = dq_ref.at[pl.program_id(0), head, q_block]
        step = _FetchedStep(own, incoming, outgoing, written, semaphores, place, self.slot(q_block))
        step.fetch()
        return step

    def finish(self, dq_ref, scratch) -> None:
        _, _, outgoing, written, semaphores = scratch
        _wait_for_write(outgoing, dq_ref.at[0, 0, 0], semaphores, written[0] >= 0)

    def result(self, dq: Array) -> Array:
        dq = (dq * self.scale).astype(self.dtype)
        axes = (0, 2, 4, 1, 3) if self.columns else (0, 1, 2, 4, 3)
        dq = dq.transpose(axes)
        if self.columns:
            return dq.reshape(self.batch, -1, self.kv_heads * self.group * self.dim)[:, : self.q_seq]
        return dq.reshape(self.batch, self.kv_heads * self.group, -1, self.dim)[:, :, : self.q_seq]


@dataclasses.dataclass(frozen=True)
class _FetchedStep:
    own: jax.Ref  # the sums of this step alone
    incoming: jax.Ref
    outgoing: jax.Ref
    written: jax.Ref  # the slot of the write that may be under way, or -1
    semaphores: jax.Ref
    place: jax.Ref
    slot: Array

    def fetch(self) -> None:
        same = self.written[0] == self.slot
        _wait_for_write(self.outgoing, self.place, self.semaphores, same)

        @pl.when(same)
        def _():
            self.written[0] = -1

        self.own[...] = jnp.zeros(self.own.shape, jnp.float32)
        self._read().start()

    def add(self, rows: slice, product: Array) -> None:
        self.own[:, rows] += product

    def store(self) -> None:
        self._read().wait()
        _wait_for_write(self.outgoing, self.place, self.semaphores, self.written[0] >= 0)
        self.outgoing[...] = self.incoming[...] + self.own[...]
        pltpu.make_async_copy(self.outgoing, self.place, self.semaphores.at[1]).start()
        self.written[0] = self.slot

    def _read(self):
        return pltpu.make_async_copy(self.place, self.incoming, self.semaphores.at[0])


def _loop(count: int):
    """Runs the decorated function for each number below `count`, in 32 bits also under x64."""

    def run(body: Callable[[Array], None]) -> None:
        def step(number, _):
            body(number)
            return _

        lax.fori_loop(jnp.int32(0), jnp.int32(count), step, None)

    return run


def _wait_for_write(outgoing, place, semaphores, condition) -> None:
    """The place may be another one than that written to: a wait counts bytes."""

    @pl.when(condition)
    def _():
        pltpu.make_async_copy(outgoing, place, semaphores.at[1]).wait()


def query_sums(*, limit: int, **sizes) -> ResidentSums | FetchedSums:
    """The sums for these sizes: resident where they take at most half of `limit`, the bytes of vector memory to use.

    Three eighths beside float32 results, whose blocks take twice as much: 8 MiB more at head dim 256.
    """
    resident = ResidentSums(**sizes)
    share = limit * 3 // 8 if jnp.dtype(resident.dtype) == jnp.float32 else limit // 2
    return resident if 4 * resident.slots * resident.dim * resident.block_q <= share else FetchedSums(**sizes)
