"""From the cycles of steps to those of a whole call: how often each body runs, and what comes on top."""

import dataclasses
import math

from ._static import Kernel


@dataclasses.dataclass(frozen=True)
class Visits:
    """Of one head: steps with a whole block, with a masked one, and idle ones; and blocks that are set up and written out.

    A masked step is told by the share of its keys, from the first on, that some query sees. `across` are the blocks of the
    other axis, over which results are summed.
    """

    whole: int
    masked: tuple[float, ...]
    idle: int
    blocks: int
    across: int


def visits_of(q_seq: int, kv_seq: int, block_q: int, block_kv: int, causal: bool, backward: bool) -> Visits:
    """For a full or a causal mask. The last block, if it is cut off, is masked.

    Skipped steps are those of a grid whose rows (in the backward columns) are all as long as the longest.
    """
    q_blocks, kv_blocks = math.ceil(q_seq / block_q), math.ceil(kv_seq / block_kv)
    whole, masked, lengths = 0, [], [0] * (kv_blocks if backward else q_blocks)
    for i in range(q_blocks):
        for j in range(kv_blocks):
            first, last = i * block_q, min((i + 1) * block_q, q_seq) - 1
            keys = min(kv_seq, last + 1 if causal else kv_seq) - j * block_kv
            if keys <= 0:
                continue
            lengths[j if backward else i] += 1
            if keys >= block_kv and (not causal or (j + 1) * block_kv - 1 <= first):
                whole += 1
            else:
                masked.append(min(1.0, keys / block_kv))
    idle = max(lengths) * len(lengths) - sum(lengths)
    return Visits(whole, tuple(masked), idle, len(lengths), q_blocks if backward else kv_blocks)


def call_cycles(kernel: Kernel, visits: Visits, heads: int) -> float:
    """Cycles of one core for a call over `heads` (of all examples): a lower bound, without waiting for memory.

    All set-up and write-out counts for each block, but loops with as many trips as there are blocks across once a head:
    they are over the sums of that axis. Where the kernel has no body of its own for masked blocks, the whole one counts;
    where it has several, the costliest.
    """
    steps, block = kernel.steps, kernel.block
    assert steps is not None and block is not None
    masked_cost = 0.0
    for seen in visits.masked:
        costs = [steps.whole.full_cycles]
        if steps.masked:
            costs = [_cost(step, seen) for step in steps.masked]
        masked_cost += max(costs)
    over_sums = sum(cycles for trips, cycles in steps.loops if trips == visits.across)
    visited = visits.whole + len(visits.masked)
    of_head = (
        visits.whole * steps.whole.full_cycles
        + masked_cost
        + visited * steps.transfers
        + visits.idle * steps.idle
        + visits.blocks * (steps.set_up + steps.write_out - over_sums)
        + over_sums
    )
    turns = heads / block.heads
    return (of_head * turns + 2 * steps.idle) / (kernel.cores or 1)


def _cost(step, seen: float) -> float:
    """Of a masked body whose loops, if their trips depend on data, go as far as some query sees."""
    trips = math.ceil(seen / step.products - 1e-9) if step.trip_cycles else 1
    return step.cycles + (max(1, trips) - 1) * step.trip_cycles
