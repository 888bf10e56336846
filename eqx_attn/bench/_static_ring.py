"""`--static --workload ring`: the time of a published ring attention, from static cycles.

The workload is that of maxdiffusion's pull request 485: video diffusion on four v6e, 75,600 tokens in a ring, so that each
device computes its 18,900 queries against four times 18,900 keys, 40 heads of 128, mask-free. It reports 269.35 ms for
a layer's attention, 86.56 forward and 182.80 backward, by kernels without masks; before that 363.16 with JAX's splash
kernels and segment masks.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator

from rich.table import Table

from ._static import Measured
from ._static_estimate import call_cycles, Mask, visits_of
from ._static_peers import peer_program
from ._static_pool import Job
from ._static_spec import Direction, DIRECTIONS, HEADS, spec_program
from ._tpu import GENERATIONS

GENERATION = "v6e"
TOKENS, HOPS, Q_HEADS, HEAD_DIM = 18_900, 4, 40, 128
PUBLISHED = {"fwd": 86.56, "bwd": 182.80}
"""Milliseconds of the pull request's kernels."""

MEASURED_OVER_STATIC = 1.2
"""Published times of this chip's kernels are 1.15 to 1.33 times their static cycles."""

_SPLASH_TILES = ((1024, 1024, 512), (1024, 2048, 512), (2048, 2048, 1024))
_SPEC = f"pallas_tpu/bshd_full_qk{HEAD_DIM}_v{HEAD_DIM}"


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One implementation of a direction, at a length that its blocks divide if it needs that."""

    name: str
    direction: Direction
    seq: int
    job: Job


def candidates() -> list[Candidate]:
    """Ours, and JAX's splash with segment masks with several tiles, of which the best counts."""
    found = []
    for direction in DIRECTIONS:
        arguments = (_SPEC, direction, GENERATION, TOKENS, (), "float32")
        found.append(Candidate("eqx_attn", direction, TOKENS, Job(spec_program, arguments, GENERATION)))
        for tile in _SPLASH_TILES:
            seq = math.ceil(TOKENS / max(tile)) * max(tile)
            arguments = ("jax_splash", direction, HEAD_DIM, "full", seq, HEADS, tile, True)
            found.append(Candidate("jax_splash", direction, seq, Job(peer_program, arguments, GENERATION)))
    return found


def milliseconds(candidate: Candidate, measured: Measured) -> float:
    """Of a layer's forward or backward: its kernels on all hops, and the sums of the hops' results."""
    cycles = 0.0
    for kernel in measured.kernels:
        if kernel.block is not None:
            sizes = (candidate.seq, candidate.seq, kernel.block.queries, kernel.block.keys)
            visits = visits_of(Mask(), *sizes, backward=candidate.direction == "bwd")
            cycles += call_cycles(kernel, visits, Q_HEADS)
    kernels = HOPS * MEASURED_OVER_STATIC * cycles / GENERATIONS[GENERATION].clock
    return 1e3 * (kernels + sums_seconds(candidate.direction))


def sums_seconds(direction: Direction) -> float:
    """Adding each hop's float32 result to those before, at the memory's bandwidth: two reads and a write.

    Those are the output or the gradients of queries, keys and values.
    """
    arrays = 1 if direction == "fwd" else 3
    size = 4 * TOKENS * Q_HEADS * HEAD_DIM
    return (HOPS - 1) * arrays * 3 * size / GENERATIONS[GENERATION].bandwidth


def table_of(found: dict[Candidate, Measured | str]) -> Table:
    """The best of each implementation beside the published times."""
    title = f"{TOKENS} queries, {HOPS} hops of as many keys, {Q_HEADS} heads of {HEAD_DIM}, {GENERATION}; milliseconds"
    table = Table(title=title, box=None, header_style="bold", pad_edge=False, caption=_CAPTION, caption_justify="left")
    for heading in ("", "forward", "backward", "both", "against eqx_attn"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    best = dict(_best(found))
    ours = sum(best.get(("eqx_attn", direction), math.nan) for direction in DIRECTIONS)
    rows = {"maxdiffusion 485, published": [PUBLISHED[direction] for direction in DIRECTIONS]}
    for name, words in (("jax_splash", "JAX's splash, segment masks"), ("eqx_attn", "eqx_attn")):
        rows[words] = [best.get((name, direction), math.nan) for direction in DIRECTIONS]
    for name, (forward, backward) in rows.items():
        both = forward + backward
        table.add_row(name, f"{forward:.1f}", f"{backward:.1f}", f"{both:.1f}", f"{both / ours:.2f}")
    return table


_CAPTION = f"""
But for the published ones, static cycles times {MEASURED_OVER_STATIC}, with set-up, write-out and cut-off blocks, and the sums of hops
at the memory's bandwidth; without waiting for memory or for links"""


def _best(found: dict[Candidate, Measured | str]) -> Iterator[tuple[tuple[str, str], float]]:
    times: dict[tuple[str, str], list[float]] = {}
    for candidate, measured in found.items():
        if not isinstance(measured, str):
            times.setdefault((candidate.name, candidate.direction), []).append(milliseconds(candidate, measured))
    for key, values in times.items():
        yield key, min(values)


Measure = Callable[[list[Job]], Iterator[tuple[Job, Measured | str]]]


def run(measure: Measure) -> tuple[Table, list[str]]:
    """Measures by `measure`; returns the table, and what failed."""
    jobs = {candidate.job: candidate for candidate in candidates()}
    found = {jobs[job]: result for job, result in measure(list(jobs))}
    failed = [f"{found.name} {found.direction}: {result}" for found, result in found.items() if isinstance(result, str)]
    return table_of(found), failed
