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

from ._case import Case
from ._cases import baseline_of
from ._environment import commit, device_kind, versions
from ._implementations import check, difference, Implementation, implementations, needs_check, OURS, ours
from ._profile import busy_times, wall_times

_SECONDS_PER_REPEAT = 0.04
_BASELINE = "baseline"


@dataclasses.dataclass
class Row:
    """One figure. `ratio_to_cudnn` is our speed over cuDNN's; `difference` is that of a peer's output from eqx_attn's.

    Of a feature: `cost` is our time over that of our dense causal kernel, which took turns in the same traces, and
    `proportion` is the cost over the share of its blocks of 128 x 128 that the feature's mask visits; `difference` is the
    largest of results and gradients from those of eqx_attn's "xla", where no peer has the feature.
    """

    case: str
    direction: str
    implementation: str
    milliseconds: float | None = None
    tflops: float | None = None
    ratio_to_cudnn: float | None = None
    cost: float | None = None
    proportion: float | None = None
    baseline_milliseconds: float | None = None
    spread: float | None = None
    difference: float | None = None
    note: str = ""


@dataclasses.dataclass
class _Compiled:
    """One implementation, compiled: the jitted functions, what to call, and how often in a repeat.

    `error` says why it has no figure.
    """

    implementation: Implementation
    functions: dict[str, Callable] = dataclasses.field(default_factory=dict)
    runs: dict[str, Callable[[], Any]] = dataclasses.field(default_factory=dict)
    calls: dict[str, int] = dataclasses.field(default_factory=dict)
    difference: float | None = None
    error: str = ""


def run(cases: dict[str, Case], peers: tuple[str, ...], repeats: int, given_commit: str | None) -> dict[str, Any]:
    """Times all cases and returns what the JSON file holds. Shows progress on the standard error."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    rows: list[Row] = []
    baselines: dict[Case, _Compiled] = {}
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(cases) * (repeats + 1))
        for name, case in cases.items():
            advance = lambda what, name=name: progress.update(task, advance=1, description=f"{name}: {what}")
            baseline = baseline_of(name)
            if baseline is not None and baseline not in baselines:
                baselines[baseline] = _compile(ours(baseline, name=_BASELINE), baseline)[0]
            compared = None if baseline is None else (baseline, baselines[baseline])
            rows += time_case(name, case, peers, repeats, advance, compared)
    return {
        "device": device_kind(),
        "versions": versions(),
        "commit": commit(given_commit),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "repeats": repeats,
        "cases": {name: dataclasses.asdict(case) for name, case in cases.items()},
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def time_case(
    name: str,
    case: Case,
    peers: tuple[str, ...],
    repeats: int,
    advance: Callable[[str], None],
    baseline: "tuple[Case, _Compiled] | None" = None,
) -> list[Row]:
    """The rows of one case: for each implementation forward, and backward as both directions less the forward.

    A baseline takes turns with them, for the costs.
    """
    compiled: list[_Compiled] = []
    expected = None
    for implementation in implementations(case, peers):
        entry, out = _compile(implementation, case, expected)
        if implementation.name == OURS:
            expected = out
            if baseline is not None and needs_check(case, peers):
                entry.difference, entry.error = check(case, entry.functions["forward"], entry.functions["both"])
        compiled.append(entry)
    advance("compiled")
    timed = compiled if baseline is None else [*compiled, baseline[1]]
    samples, profiled = _samples(timed, repeats, advance)
    rows = _rows(name, case, compiled, samples, profiled)
    return rows if baseline is None else _with_costs(rows, case, baseline[0], samples)


def _samples(
    timed: "list[_Compiled]", repeats: int, advance: Callable[[str], None]
) -> tuple[dict[tuple[str, str], list[float]], bool]:
    """Seconds by implementation and function, and whether they are from profiles."""
    runs = {
        (entry.implementation.name, what): (function, entry.calls[what])
        for entry in timed
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
    return samples, profiled


def _compile(implementation: Implementation, case: Case, expected: Any = None) -> "tuple[_Compiled, Any]":
    """Compiles and warms up both functions; a peer that refuses the case becomes a row that says so."""
    entry = _Compiled(implementation)
    arrays, cotangents = case.arrays()
    out = None
    try:
        for what, function in (("forward", implementation.forward()), ("both", implementation.both())):
            call = lambda function=function: function(arrays, cotangents, implementation.rest)
            result = jax.block_until_ready(call())
            if what == "forward":
                out = result[0][0]
                entry.difference = None if expected is None else difference(out, expected)
            started = time.perf_counter()
            jax.block_until_ready(call())
            seconds = time.perf_counter() - started
            entry.functions[what], entry.runs[what] = function, call
            entry.calls[what] = min(30, max(2, round(_SECONDS_PER_REPEAT / seconds)))
    except Exception as error:  # Whatever a peer says about a case must not end the run over all of them.
        if implementation.name in (OURS, _BASELINE):
            raise
        entry.error = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return entry, out


def _rows(
    name: str, case: Case, compiled: "list[_Compiled]", samples: dict[tuple[str, str], list[float]], profiled: bool
) -> list[Row]:
    rows = []
    for entry in compiled:
        implementation = entry.implementation
        notes = [implementation.note, "" if profiled else "wall-clock time: no profile of a GPU", entry.error]
        note = "; ".join(filter(None, notes))
        for direction, seconds in _by_direction(implementation.name, samples).items():
            row = Row(name, direction, implementation.name, difference=entry.difference, note=note)
            # What computes something wrong, or has failed in one direction, has no figure.
            if seconds and not entry.error and (median := statistics.median(seconds)) > 0:
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


def _by_direction(name: str, samples: dict[tuple[str, str], list[float]]) -> dict[str, list[float]]:
    """Seconds forward, and backward as both less the forward of the same repeat."""
    forward, both = (samples.get((name, what), []) for what in ("forward", "both"))
    backward = [total - part for total, part in zip(both, forward, strict=True)] if both else []
    return {"forward": forward, "backward": backward}


def _with_costs(rows: list[Row], case: Case, baseline: Case, samples: dict[tuple[str, str], list[float]]) -> list[Row]:
    """Our rows get their costs against the baseline's samples."""
    visits = case.visited_blocks() / baseline.visited_blocks()
    seconds = _by_direction(_BASELINE, samples)
    for row in rows:
        if row.implementation != OURS or not row.milliseconds or not seconds[row.direction]:
            continue
        row.baseline_milliseconds = 1e3 * statistics.median(seconds[row.direction])
        if row.baseline_milliseconds > 0:
            row.cost = row.milliseconds / row.baseline_milliseconds
            row.proportion = row.cost / visits if visits != 1 else None
    return rows


def save(results: dict[str, Any], path: Path) -> None:
    """Writes the JSON file, and its folder where that does not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")


def table(results: dict[str, Any]) -> Table:
    """The rows for a terminal."""
    title = f"{results['device']}, jax {results['versions'].get('jax')}, commit {results['commit'][:12]}"
    shown = Table(title=title, box=None, header_style="bold", pad_edge=False)
    figures = {"ms": ("milliseconds", ".3f"), "TFLOP/s": ("tflops", ".1f"), "x cuDNN": ("ratio_to_cudnn", ".2f")}
    if any(row["cost"] for row in results["rows"]):
        figures |= {"cost": ("cost", ".2f"), "cost/blocks": ("proportion", ".2f")}
    figures |= {"spread": ("spread", ".1%"), "difference": ("difference", ".1e")}
    for heading in ("case", "direction", "implementation", *figures, "note"):
        shown.add_column(heading, justify="right" if heading in figures else "left", no_wrap=heading != "note")
    for row in results["rows"]:
        words = ("-" if row[key] is None else format(row[key], how) for key, how in figures.values())
        style = "bold" if row["implementation"] == OURS else ""
        shown.add_row(row["case"], row["direction"], row["implementation"], *words, row["note"], style=style)
    return shown
