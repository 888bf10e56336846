"""From the cycles of steps to those of a whole call: how often each body runs, and what comes on top."""

import dataclasses
import itertools
import math
from collections.abc import Iterator

from ._static import Kernel
from ._steps import Step


@dataclasses.dataclass(frozen=True)
class Mask:
    """What a query sees: keys from `lower` to `upper` positions further on (None: unbounded) of its own document.

    `documents` are the lengths of those in a row; none if the whole sequence is one.
    """

    lower: int | None = None
    upper: int | None = None
    documents: tuple[int, ...] = ()

    def visible(self, q_seq: int, kv_seq: int) -> int:
        """How many pairs of a query and a key are seen."""
        return sum(self._seen(range(start, stop), i) for start, stop in self._spans(kv_seq) for i in range(q_seq))

    def relation(self, queries: range, keys: range) -> tuple[bool, float]:
        """Whether all of these keys are seen by all queries, and the share of them, from the first on, that any query sees.

        The second is 0 where none is seen.
        """
        whole, last = False, keys.start
        for start, stop in self._spans(max(queries.stop, keys.stop)):
            part = range(max(queries.start, start), min(queries.stop, stop)) if self.documents else queries
            inside = range(max(keys.start, start), min(keys.stop, stop))
            if not part or not inside:
                continue
            low = -math.inf if self.lower is None else part.start + self.lower
            high = math.inf if self.upper is None else part[-1] + self.upper
            if low < inside.stop and inside.start <= high:
                last = max(last, int(min(inside.stop, high + 1)))
            all_low = -math.inf if self.lower is None else part[-1] + self.lower
            all_high = math.inf if self.upper is None else part.start + self.upper
            whole |= part == queries and inside == keys and all_low <= keys.start and keys[-1] <= all_high
        return whole, (last - keys.start) / max(1, len(keys))

    def _spans(self, seq: int) -> Iterator[tuple[int, int]]:
        if not self.documents:
            yield 0, seq
        ends = list(itertools.accumulate(self.documents))
        yield from zip([0, *ends], ends, strict=False)

    def _seen(self, keys: range, query: int) -> int:
        if self.documents and query not in keys:
            return 0
        low = keys.start if self.lower is None else max(keys.start, query + self.lower)
        high = keys.stop if self.upper is None else min(keys.stop, query + self.upper + 1)
        return max(0, high - low)


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


def visits_of(mask: Mask, q_seq: int, kv_seq: int, block_q: int, block_kv: int, backward: bool) -> Visits:
    """Of a kernel that goes over the blocks of keys of each block of queries or, backward, the other way round.

    The last block, if it is cut off, is masked. Steps are idle in rows of the grid that are shorter than the longest.
    """
    q_blocks, kv_blocks = math.ceil(q_seq / block_q), math.ceil(kv_seq / block_kv)
    whole, masked, lengths = 0, [], [0] * (kv_blocks if backward else q_blocks)
    for i, j in itertools.product(range(q_blocks), range(kv_blocks)):
        queries = range(i * block_q, min((i + 1) * block_q, q_seq))
        keys = range(j * block_kv, min((j + 1) * block_kv, kv_seq))
        all_seen, share = mask.relation(queries, keys)
        if share:
            lengths[j if backward else i] += 1
            if all_seen and len(keys) == block_kv:
                whole += 1
            else:
                masked.append(share * len(keys) / block_kv)
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
    bodies = steps.masked or (steps.whole,)
    over_sums = sum(cycles for trips, cycles in steps.loops if trips == visits.across)
    of_head = (
        visits.whole * steps.whole.full_cycles
        + sum(max(_cost(body, seen) for body in bodies) for seen in visits.masked)
        + (visits.whole + len(visits.masked)) * steps.transfers
        + visits.idle * steps.idle
        + visits.blocks * (steps.set_up + steps.write_out - over_sums)
        + over_sums
    )
    return (of_head * heads / block.heads + 2 * steps.idle) / (kernel.cores or 1)


def _cost(step: Step, seen: float) -> float:
    """Of a masked body whose loops, if their trips depend on data, go as far as some query sees."""
    trips = math.ceil(seen / step.products - 1e-9) if step.trip_cycles else 1
    return step.cycles + (max(1, trips) - 1) * step.trip_cycles
