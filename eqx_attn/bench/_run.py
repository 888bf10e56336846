"""Times the cases: ours and the peers by turns in the same run."""

import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ._cases import Case
from ._environment import commit, device_kind, versions
from ._implementations import difference, Implementation, implementations, OURS
from ._profile import busy_times, wall_times

_SECONDS_PER_REPEAT = 0.04


@dataclasses.dataclass
class Row:
    """One figure. `ratio_to_cudnn` is our speed over cuDNN's; `difference` is that of the output from eqx_attn's."""

    case: str
    direction: str
    implementation: str
    milliseconds: float | None = None
    tflops: float | None = None
    ratio_to_cudnn: float | None = None
    spread: float | None = None
    difference: float | None = None
    note: str = ""


@dataclasses.dataclass
class _Compiled:
    """One implementation, compiled: what to call, and how often in a repeat. `error` says why it has none."""

    implementation: Implementation
    runs: dict[str, Callable[[], Any]] = dataclasses.field(default_factory=dict)
    calls: dict[str, int] = dataclasses.field(default_factory=dict)
    difference: float | None = None
    error: str = ""


def run(cases: dict[str, Case], peers: tuple[str, ...], repeats: int, given_commit: str | None) -> dict[str, Any]:
    """Times all cases and returns what the JSON file holds. Shows progress on the standard error."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    rows: list[Row] = []
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(cases) * (repeats + 1))
        for name, case in cases.items():
            advance = lambda what, name=name: progress.update(task, advance=1, description=f"{name}: {what}")
            rows += time_case(name, case, peers, repeats, advance)
    return {
        "device": device_kind(),
        "versions": versions(),
        "commit": commit(given_commit),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "repeats": repeats,
        "cases": {name: dataclasses.asdict(case) for name, case in cases.items()},
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def time_case(name: str, case: Case, peers: tuple[str, ...], repeats: int, advance: Callable[[str], None]) -> list[Row]:
    """The rows of one case: for each implementation forward, and backward as both directions less the forward."""
    arrays = case.arrays()
    compiled: list[_Compiled] = []
    expected = None
    for implementation in implementations(case, peers):
        entry, out = _compile(implementation, arrays, expected)
        compiled.append(entry)
        expected = out if implementation.name == OURS else expected
    advance("compiled")
    runs = {
        (entry.implementation.name, what): (function, entry.calls[what])
        for entry in compiled
        for what, function in entry.runs.items()
    }
    samples: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    profiled = True
    for repeat in range(repeats):
        functions, counts = zip(*runs.values(), strict=True) if runs else ((), ())
        times = busy_times(functions, counts) if profiled else None
        if times is None:
            if profiled and repeat:  # A single trace that cannot be read must not mix two kinds of figures.
                advance("trace without figures")
                continue
            profiled = False
            times = wall_times(functions, counts)
        for key, seconds in zip(runs, times, strict=True):
            samples[key].append(seconds)
        advance(f"repeat {repeat + 1}")
    return _rows(name, case, compiled, samples, profiled)


def _compile(implementation: Implementation, arrays: tuple, expected: Any) -> tuple[_Compiled, Any]:
    """Compiles and warms up both functions; a peer that refuses the case becomes a row that says so."""
    entry = _Compiled(implementation)
    out = None
    try:
        for what, function in (("forward", implementation.forward()), ("both", implementation.both())):
            call = lambda function=function: function(*arrays, implementation.mask)
            result = jax.block_until_ready(call())
            if what == "forward":
                out = result
                entry.difference = None if expected is None else difference(out, expected)
            started = time.perf_counter()
            jax.block_until_ready(call())
            seconds = time.perf_counter() - started
            entry.runs[what] = call
            entry.calls[what] = min(30, max(2, round(_SECONDS_PER_REPEAT / seconds)))
    except Exception as error:  # Whatever a peer says about a case must not end the run over all of them.
        if implementation.name == OURS:
            raise
        entry.error = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return entry, out


def _rows(
    name: str, case: Case, compiled: list[_Compiled], samples: dict[tuple[str, str], list[float]], profiled: bool
) -> list[Row]:
    rows = []
    for entry in compiled:
        implementation = entry.implementation
        notes = [implementation.note, "" if profiled else "wall-clock time: no profile of a GPU", entry.error]
        note = "; ".join(filter(None, notes))
        forward = samples.get((implementation.name, "forward"), [])
        both = samples.get((implementation.name, "both"), [])
        backward = [total - part for total, part in zip(both, forward, strict=True)] if both else []
        for direction, seconds in (("forward", forward), ("backward", backward)):
            row = Row(name, direction, implementation.name, difference=entry.difference, note=note)
            if seconds and (median := statistics.median(seconds)) > 0:
                row.milliseconds = 1e3 * median
                row.tflops = 1e-12 * case.flops(direction) / median
                row.spread = (max(seconds) - min(seconds)) / median
            rows.append(row)
    cudnn = {row.direction: row.milliseconds for row in rows if row.implementation == "cudnn"}
    for row in rows:
        theirs = cudnn.get(row.direction)
        if theirs and row.milliseconds:
            row.ratio_to_cudnn = theirs / row.milliseconds
    return rows


def save(results: dict[str, Any], path: Path) -> None:
    """Writes the JSON file, and its folder where that does not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")


def table(results: dict[str, Any]) -> Table:
    """The rows for a terminal."""
    title = f"{results['device']}, jax {results['versions'].get('jax')}, commit {results['commit'][:12]}"
    shown = Table(title=title, box=None, header_style="bold", pad_edge=False)
    for heading in ("case", "direction", "implementation", "ms", "TFLOP/s", "x cuDNN", "spread", "difference", "note"):
        numeric = heading in ("ms", "TFLOP/s", "x cuDNN", "spread", "difference")
        shown.add_column(heading, justify="right" if numeric else "left", no_wrap=heading != "note")
    formats = (
        ("milliseconds", ".3f"),
        ("tflops", ".1f"),
        ("ratio_to_cudnn", ".2f"),
        ("spread", ".1%"),
        ("difference", ".1e"),
    )
    for row in results["rows"]:
        figures = ("-" if row[key] is None else format(row[key], how) for key, how in formats)
        style = "bold" if row["implementation"] == OURS else ""
        shown.add_row(row["case"], row["direction"], row["implementation"], *figures, row["note"], style=style)
    return shown
