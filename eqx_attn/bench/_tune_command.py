"""The command `python -m eqx_attn.bench --tune`, for GPU kernels."""

import argparse
import fnmatch
import importlib
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from .. import _codegen
from .._codegen import KernelSpec
from .._operands import Tile
from .._tile_tables import REPOSITORY_TABLES, table_path, user_tables
from .._tuning import default_tiles
from ._environment import device_kind
from ._hopper import one_line
from ._static_command import progress_bar
from ._tune import is_done, sizes_of, tune, Tuned, write
from ._tune_candidates import CANDIDATES, candidates, case_of, Direction, DIRECTIONS, Sweep

Work = tuple[KernelSpec, Direction, Sweep]


def run(options: argparse.Namespace) -> int:
    """Tunes the kernels that `--spec` names, prints what was found, and returns the exit status: 1 if a kernel did not run.

    **Raises:** `ValueError` without a GPU, or for names of kernels that are not tuned this way.
    """
    if jax.default_backend() != "gpu":
        raise ValueError(
            f"--tune needs a GPU, and JAX's default backend here is {jax.default_backend()!r}; --tune --static finds the tiles of "
            "TPU kernels without a TPU"
        )
    work = work_of(options.spec, options.direction)
    paths = [table_path(user_tables(), device_kind())]
    if options.write_table:
        paths.append(table_path(REPOSITORY_TABLES, device_kind()))
    found, faults = tune_all(work, paths, options.repeats, options.jobs)
    console = Console(highlight=False)
    (console if console.is_terminal else Console(width=200, highlight=False)).print(table_of(found, paths))
    for fault in faults:
        console.print(fault, style="red", markup=False, soft_wrap=True)
    return 1 if faults else 0


def work_of(names: str | None, direction: Direction | None) -> list[Work]:
    """The sweeps of the kernels of a comma-separated list of names and patterns; of all checked-in ones for None."""
    specs: list[KernelSpec] = []
    for name in (names or "*").split(","):
        specs += _matching(name.strip()) if any(sign in name for sign in "*?[") else [_named(name.strip())]
    directions: tuple[Direction, ...] = (direction,) if direction else DIRECTIONS
    return [
        (spec, where, sweep)
        for spec in dict.fromkeys(specs)
        for where in directions
        for sweep in candidates(spec, where)
    ]


def _matching(pattern: str) -> list[KernelSpec]:
    """The checked-in kernels of a pattern that can be tuned; there has to be one."""
    matrix: Any = importlib.import_module(f"{_codegen._package}.matrix")
    found = [spec for spec in matrix.checked_in() if fnmatch.fnmatchcase(spec.name, pattern) and _is_tuned(spec)]
    if not found:
        raise ValueError(
            f"--spec {pattern} matches no checked-in kernel of {', '.join(CANDIDATES)} that is tuned; python -m codegen --list "
            "shows all"
        )
    return found


def _is_tuned(spec: KernelSpec) -> bool:
    try:
        case_of(spec)
    except ValueError:
        return False
    return str(spec.target) in CANDIDATES


def _named(name: str) -> KernelSpec:
    try:
        spec = KernelSpec.from_name(name)
    except ValueError as error:
        raise ValueError(f"--spec {name}: {error}") from None
    if reason := spec.refusal():
        raise ValueError(f"--spec {name}: {reason}")
    for check in (lambda: candidates(spec, "fwd"), lambda: case_of(spec)):
        check()  # which says why the kernel is not tuned
    return spec


def tune_all(work: list[Work], paths: list[Path], repeats: int, jobs: int) -> tuple[list[Tuned], list[str]]:
    """What each sweep found, and what did not run. Results are written one by one; those that the first path holds are skipped."""
    found, faults = [], []
    with progress_bar() as progress:
        task = progress.add_task("tuning", total=len(work))
        for spec, direction, sweep in work:
            label = f"{spec.name} {sweep.field}"
            if all(is_done(path, spec, direction, sweep) for path in paths):
                progress.update(task, advance=1, description=f"{label}: done before")
                continue
            say = lambda text, label=label: progress.update(task, description=f"{label}: {text}")
            try:
                found.append(tune(spec, direction, sweep, repeats, jobs, say))
                for path in paths:
                    write(path, found[-1], found[-1].tile or present_tile(spec, sweep.field))
            except Exception as error:  # One kernel must not end the run over all of them.
                faults.append(f"{label}: {one_line(error)}")
            progress.advance(task)
    return found, faults


def present_tile(spec: KernelSpec, field: str) -> Tile:
    """What a kernel has without the sweep."""
    tiles = default_tiles(spec, "bfloat16", 4096, 4096)
    return getattr(tiles, field) or tiles.dq


def table_of(found: list[Tuned], paths: list[Path]) -> Table:
    """What was found, a row for each sweep."""
    shown = Table(box=None, header_style="bold", pad_edge=False, caption=f"written to {', '.join(map(str, paths))}")
    for title in ("kernel", "pass", "tile of", "best", "ms", "ms before", "candidates that ran"):
        left = title in ("kernel", "pass", "tile of", "best")
        shown.add_column(title, justify="left" if left else "right", no_wrap=True)
    for one in found:
        best = (
            "as before"
            if one.tile is None
            else ", ".join(f"{name} {size}" for name, size in sizes_of(one.tile).items())
        )
        figures = (f"{one.ms:.3f}", f"{one.before_ms:.3f}", str(one.ran))
        shown.add_row(one.spec.name, one.direction, one.sweep.field, best, *figures)
    return shown
