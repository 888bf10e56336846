"""`python -m eqx_attn.bench --static`: kernels measured by libtpu's own schedules, without a TPU."""

import argparse
import contextlib
import functools
import importlib.metadata
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from .._codegen import KernelSpec, REPOSITORY
from ._environment import commit
from ._static import Measured
from ._static_pool import Job, measure_all
from ._static_rows import best_entries, Entry, matrix_entries, OURS, row_of, spec_entry, table_of, write_rows
from ._static_spec import DIRECTIONS, Overrides
from ._tpu import GENERATIONS


def run(options: argparse.Namespace) -> int:
    """Measures, prints a table and, with `--record`, writes rows."""
    if options.workload:
        return _workload(options)
    if options.tune:
        return _tune(options)
    generations = generations_of(options.static)
    if options.spec is None and (options.tile or options.direction):
        raise ValueError("--tile and --direction belong to --spec NAME")
    if options.spec is not None and options.record:
        raise ValueError("--record writes the whole table: leave out --spec")
    entries = _spec_entries(options, generations) if options.spec else matrix_entries(generations, options.seq)
    found: dict[Job, Measured | str] = {}
    for job, result in with_progress([entry.job for entry in entries], options.processes):
        found[job] = result
        if options.record and not isinstance(result, str):
            # As they come, so that what was measured before an interruption is there.
            rows = [
                row_of(entry, result, commit(options.commit))
                for entry in best_entries(entries, found)
                if entry.job == job
            ]
            write_rows(REPOSITORY / "benchmarks/tpu_static.json", rows, _versions())
    entries = best_entries(entries, found)
    failed = [(entry, found[entry.job]) for entry in entries if isinstance(found[entry.job], str)]
    faults = [f"{entry.label} {entry.direction} for {entry.generation}: {reason}" for entry, reason in failed]
    _print(table_of(entries, found), faults)
    return 1 if any(entry.implementation == OURS for entry, _ in failed) else 0


def _workload(options: argparse.Namespace) -> int:
    from . import _static_ring as ring

    if options.static not in ("", ring.GENERATION):
        raise ValueError(f"--workload ring is of {ring.GENERATION}, not of {options.static}")
    table, failed = ring.run(lambda jobs: with_progress(jobs, options.processes))
    _print(table, failed)
    return 1 if failed else 0


def _tune(options: argparse.Namespace) -> int:
    from . import _static_tune as tuning

    specs = [spec_named(name) for name in (options.spec.split(",") if options.spec else tuning.SPECS)]
    directions = [options.direction] if options.direction else DIRECTIONS
    cases = list(itertools.product(generations_of(options.static), specs, directions))
    tuned, faults = [], []
    with progress_bar() as progress:
        task = progress.add_task("tuning", total=len(cases))
        for generation, spec, direction in cases:
            progress.update(task, description=f"tuning {spec.name} {direction} for {generation}")
            try:
                measure = functools.partial(with_progress, processes=options.processes, progress=progress)
                tuned.append(tuning.tune(spec, generation, direction, options.seq, measure))
                if options.write_table:
                    tuning.write_table(Path(__file__).parent.parent / "tiles", tuned[-1:])
            except tuning.NothingCompiles as error:
                faults.append(str(error))
            progress.advance(task)
    _print(tuning.table_of(tuned), faults)
    return 1 if faults else 0


def _print(table: Table, faults: list[str]) -> None:
    console = Console(highlight=False)
    (console if console.is_terminal else Console(width=240, highlight=False)).print(table)
    for fault in faults:
        console.print(fault, style="red", markup=False, soft_wrap=True)


def _spec_entries(options: argparse.Namespace, generations: list[str]) -> list[Entry]:
    overrides = parse_tiles(options.tile)
    directions = [options.direction] if options.direction else DIRECTIONS
    return [
        spec_entry(spec_named(name), generation, direction, options.seq, overrides)
        for name in options.spec.split(",")
        for generation in generations
        for direction in directions
    ]


def _versions() -> dict[str, str]:
    return {package: importlib.metadata.version(package) for package in ("libtpu", "jax")}


def generations_of(text: str) -> list[str]:
    """The generations that `--static` names; all if it names none."""
    generations = text.split(",") if text else list(GENERATIONS)
    for generation in generations:
        if generation not in GENERATIONS:
            raise ValueError(
                f"--static {generation}: no TPU generation of that name; known are {', '.join(GENERATIONS)}"
            )
    return generations


def spec_named(name: str) -> Any:
    """The TPU kernel that a user's name means; the target may be left out."""
    name = name if "/" in name else f"pallas_tpu/{name}"
    try:
        spec = KernelSpec.from_name(name)
        reason = spec.refusal()
    except ValueError as error:
        spec, reason = None, str(error)
    if spec is None or reason is not None:
        raise ValueError(f"--spec {name}: {reason}")
    if spec.target != "pallas_tpu":
        raise ValueError(f"--spec {name}: --static measures pallas_tpu kernels")
    return spec


def parse_tiles(texts: list[str]) -> Overrides:
    """`["forward=2048x1024,field=2"]` as changes of tiles."""
    found = []
    for text in texts:
        match = re.fullmatch(r"(\w+)=(?:(\d+)x(\d+))?((?:,?\w+=\d+)*)", text)
        if not match:
            raise ValueError(f"--tile {text}: expected KERNEL=QxKV, such as forward=2048x1024, or KERNEL=FIELD=N")
        changes = [("block_q", int(match[2])), ("block_kv", int(match[3]))] if match[2] else []
        changes += [(name, int(value)) for name, value in re.findall(r"(\w+)=(\d+)", match[4])]
        found.append((match[1], tuple(changes)))
    return tuple(found)


def progress_bar() -> Progress:
    """On standard error."""
    clock = (TimeElapsedColumn(), TimeRemainingColumn())
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *clock)
    return Progress(*columns, console=Console(stderr=True))


def with_progress(
    jobs: list[Job], processes: int, progress: Progress | None = None
) -> Iterator[tuple[Job, Measured | str]]:
    """`measure_all`, with a bar of its own or, while it runs, in `progress`."""
    with contextlib.nullcontext(progress) if progress else progress_bar() as shown:
        task = shown.add_task("compiling", total=len(jobs))
        for job, result in measure_all(jobs, processes):
            words = " ".join(str(argument) for argument in job.arguments[:2])
            shown.update(task, advance=1, description=f"{words} for {job.device}")
            yield job, result
        if progress:
            progress.remove_task(task)
