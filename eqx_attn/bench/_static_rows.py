"""What `--static` measures, and its results as rows of a table and of `benchmarks/tpu_static.json`."""

import dataclasses
import importlib
import itertools
import json
from pathlib import Path
from typing import Any

from rich.table import Table

from .. import _codegen
from .._codegen import KernelSpec
from ._static import Kernel, Measured
from ._static_estimate import call_cycles, Mask, visits_of
from ._static_peers import installed_peers, peer_program, PEER_TILES
from ._static_pool import Job
from ._static_spec import (
    Direction,
    DIRECTIONS,
    flops_per_score,
    HEADS,
    Overrides,
    share_of,
    spec_program,
    tiles_of,
    useful_of,
)
from ._tpu import GENERATIONS

OURS = "eqx_attn"
HEAD_DIMS = (64, 128, 256)
PLAIN_MASKS = {"full": Mask(), "causal": Mask(upper=0)}
DOCUMENT = 2048
"""The tokens of each document of a packed row, for kernels with segments."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One direction of one implementation for one generation; `visible` is what it is supposed to see."""

    implementation: str
    label: str
    generation: str
    head_dims: tuple[int, int]
    mask: str
    visible: Mask
    direction: Direction
    seq: int
    job: Job

    @property
    def flops(self) -> int:
        """Useful operations of a score."""
        return flops_per_score(*self.head_dims, self.direction)


def spec_entry(
    spec: Any, generation: str, direction: Direction, seq: int, overrides: Overrides = (), label: str = ""
) -> Entry:
    """One of our kernels. Raises `ValueError` where `overrides` name what tiles do not have."""
    tiles_of(spec, generation, seq, overrides)  # Raises before anything is compiled.
    return Entry(
        implementation=OURS,
        label=label or spec.name.removeprefix("pallas_tpu/"),
        generation=generation,
        head_dims=(spec.qk_dim, spec.v_dim),
        mask=str(spec.mask),
        visible=mask_of(spec, seq),
        direction=direction,
        seq=seq,
        job=Job(spec_program, (spec.name, direction, generation, seq, overrides), generation),
    )


def matrix_entries(generations: list[str], seq: int) -> list[Entry]:
    """Ours, and the installed peers with several tiles: all head dims, masks and directions of the table."""
    entries = []
    for generation in generations:
        for head_dim in HEAD_DIMS:
            for mask in PLAIN_MASKS:
                for direction in DIRECTIONS:
                    spec = KernelSpec.from_name(f"pallas_tpu/bshd_{mask}_qk{head_dim}_v{head_dim}")
                    entries.append(spec_entry(spec, generation, direction, seq))
                    for peer, tile in itertools.product(installed_peers(), PEER_TILES):
                        entries.append(_peer_entry(peer, tile, generation, head_dim, mask, direction, seq))
    return entries


def _peer_entry(
    peer: str, tile: tuple[int, int, int], generation: str, head_dim: int, mask: str, direction: Direction, seq: int
) -> Entry:
    arguments = (peer, direction, head_dim, mask, seq, HEADS, tile)
    job = Job(peer_program, arguments, generation)
    label = f"{peer} {mask} {head_dim}"
    return Entry(peer, label, generation, (head_dim, head_dim), mask, PLAIN_MASKS[mask], direction, seq, job)


def best_entries(entries: list[Entry], found: dict[Job, Measured | str]) -> list[Entry]:
    """Of those of the same kernel and case, which differ by their tiles, the one with the largest share.

    Only entries that were found count; one that failed is left where all did.
    """

    def share(entry: Entry) -> float:
        result = found[entry.job]
        return -1.0 if isinstance(result, str) else share_of(result, entry.generation, entry.flops).useful

    best: dict[tuple[str, str, str], Entry] = {}
    for entry in entries:
        if entry.job in found:
            case = (entry.label, entry.generation, entry.direction)
            best[case] = max(best.get(case, entry), entry, key=share)
    return list(best.values())


def row_of(entry: Entry, measured: Measured, commit: str) -> dict[str, Any]:
    """A row of the JSON file. Shares are percent of the peak, cycles those of steps with whole blocks, VMEM bytes."""
    kernels = _multiplying(measured)
    share = share_of(measured, entry.generation, entry.flops)
    masked = [max(step.full_cycles for step in kernel.steps.masked) for kernel in kernels if kernel.steps.masked]
    return {
        "generation": entry.generation,
        "head_dim": entry.head_dims[0],
        "mask": entry.mask,
        "direction": entry.direction,
        "kernel": entry.implementation,
        "useful_mxu": round(100 * share.useful, 1),
        "cycles": round(share.cycles),
        "masked_cycles": sum(masked) or None,
        "whole_call_mxu": round(100 * call_share(entry, measured), 1),
        "vmem": max(kernel.vmem for kernel in kernels),
        "spec": entry.label,
        "blocks": [f"{kernel.block.queries} x {kernel.block.keys}" for kernel in kernels],
        "seq": entry.seq,
        "bound": max(kernels, key=lambda kernel: kernel.steps.whole.cycles).steps.whole.bound,
        "commit": commit,
    }


def mask_of(spec: Any, seq: int) -> Mask:
    """What the queries of one of our kernels see: windows as wide as `codegen --verify` takes, documents of equal length."""
    window = importlib.import_module(f"{_codegen._package}.compilers").WINDOW
    lower, upper = {"full": (None, None), "causal": (None, 0), "window": (-window, 0)}[str(spec.mask)]
    return Mask(lower, upper, (DOCUMENT,) * -(-seq // DOCUMENT) if spec.segments else ())


def call_share(entry: Entry, measured: Measured) -> float:
    """The useful share of the peak over a whole call at the measured length, by `call_cycles`."""
    backward, cycles = entry.direction == "bwd", 0.0
    for kernel in _multiplying(measured):
        block = kernel.block
        visits = visits_of(entry.visible, entry.seq, entry.seq, block.queries, block.keys, backward)
        cycles += call_cycles(kernel, visits, HEADS) * (kernel.cores or 1)
    flops = entry.flops * entry.visible.visible(entry.seq, entry.seq) * HEADS
    return flops / (cycles * GENERATIONS[entry.generation].flops_per_cycle)


def write_rows(path: Path, rows: list[dict[str, Any]], versions: dict[str, str]) -> None:
    """Puts rows into the file, in the place of those of the same kernel and case that are there."""

    def case(row: dict[str, Any]) -> tuple:
        return tuple(row[key] for key in ("generation", "head_dim", "mask", "direction", "kernel"))

    known = {case(row): row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}
    known |= {case(row): row for row in rows}
    order = {name: number for number, name in enumerate(GENERATIONS)}
    kept = sorted(known.values(), key=lambda row: (order[row["generation"]], *case(row)[1:]))
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n  ".join(json.dumps(row) for row in kept)
    path.write_text(f'{{"versions": {json.dumps(versions)},\n "rows": [\n  {lines}\n ]}}\n')


def table_of(entries: list[Entry], found: dict[Job, Measured | str]) -> Table:
    """A row for each kernel, and one for a direction of several kernels."""
    table = Table(box=None, header_style="bold", pad_edge=False, caption=_CAPTION, caption_justify="left")
    for title in ("kernel", "TPU", "pass", "block"):
        table.add_column(title, no_wrap=True)
    for title in ("MiB", "cores", "step", "masked", "set-up", "write-out", "useful", "call", "array", "busiest"):
        table.add_column(title, justify="right", no_wrap=True)
    for title in ("spills", "seconds"):
        table.add_column(title, justify="right", no_wrap=True)
    for entry in entries:
        result = found[entry.job]
        if isinstance(result, str):
            table.add_row(entry.label, entry.generation, entry.direction, "[red]failed[/red]")
            continue
        for kernel in result.kernels:
            table.add_row(*_cells(entry, kernel, result, alone=len(_multiplying(result)) == 1))
        if len(_multiplying(result)) > 1:
            share, call = share_of(result, entry.generation, entry.flops), call_share(entry, result)
            cells = ["", "", "", f"{share.cycles:.0f}", "", "", "", _percent(share.useful), _percent(call)]
            table.add_row(entry.label, entry.generation, f"[bold]{entry.direction}[/bold]", *cells)
    return table


_CAPTION = """
step: cycles of one step with a whole block; masked: the same with masked blocks (a + n b: with a loop of n + 1 trips)
useful, array: shares of the matrix units' peak in such a step, of the products that count and of all, padding included
call: useful share over the whole call, set-up, write-out and partly hidden blocks included, without waiting for memory"""


def _cells(entry: Entry, kernel: Kernel, measured: Measured, alone: bool) -> list[str]:
    steps, block = kernel.steps, kernel.block
    name = entry.direction if alone else kernel.name.removeprefix("attention_")
    head = [entry.label, entry.generation, name]
    vmem = f"{kernel.vmem / 2**20:.1f}"
    if steps is None or block is None:
        return [*head, "", vmem]
    whole_pass = share_of(measured, entry.generation, entry.flops).useful
    useful = whole_pass if alone else useful_of(kernel, entry.generation, *entry.head_dims)
    busiest = sorted(steps.whole.units.items(), key=lambda unit: -unit[1])[:2]
    return [
        *head,
        f"{block.queries} x {block.keys}" + (f" x {block.heads} heads" if block.heads > 1 else ""),
        vmem,
        "?" if kernel.cores is None else str(kernel.cores),
        _cycles(steps.whole),
        ", ".join(map(_cycles, steps.masked)),
        str(steps.set_up),
        str(steps.write_out),
        _percent(useful),
        _percent(call_share(entry, measured)) if alone else "",
        _percent(steps.whole.array),
        ", ".join(f"{unit} {share:.0%}" for unit, share in busiest),
        str(steps.whole.spills),
        f"{measured.compile_seconds:.0f}",
    ]


def _multiplying(measured: Measured) -> list[Any]:
    return [kernel for kernel in measured.kernels if kernel.steps is not None]


def _cycles(step) -> str:
    return f"{step.cycles} + n {step.trip_cycles}" if step.trip_cycles else str(step.cycles)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"
