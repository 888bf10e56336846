"""`--tune`: the fastest tiles of GPU kernels, by timing candidates in the same traces, and the tables that hold them."""

import concurrent.futures
import dataclasses
import hashlib
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from .._codegen import digests, KernelSpec, render
from .._context import target
from .._operands import Tile
from .._tile_tables import dims_of, kind_of, table_of, trial
from .._triton_inspect import compile_for_target, inspect_compiled
from ._environment import versions
from ._hopper import one_line
from ._implementations import Implementation, ours
from ._run import _Compiled, _samples, _SECONDS_PER_REPEAT
from ._tune_candidates import case_of, Direction, Sweep

CLOSE = 0.01
"""Tiles replace those that a kernel has only where they are faster by more than this part: less is noise."""

_PRESENT = "present"

Work = tuple[str, Direction, Sweep, Tile | None]
"""A kernel's name, the direction and sweep, and a tile to compile it with."""


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What a sweep found: the best tile (None: the present one), milliseconds of a call with it and before.

    `ran` is how many of the tiles ran, the present one among them.
    """

    spec: KernelSpec
    direction: Direction
    sweep: Sweep
    tile: Tile | None
    ms: float
    before_ms: float
    ran: int
    key: str


def tune(
    spec: KernelSpec, direction: Direction, sweep: Sweep, repeats: int, jobs: int, advance: Callable[[str], None]
) -> Tuned:
    """Times the candidates of a sweep by turns. Raises RuntimeError where not even the present tile runs."""
    usable = without_spills(spec, direction, sweep, jobs, advance)
    entries, failures = [], []
    arguments = case_of(spec).arrays()
    for label, tile in {_PRESENT: None, **{str(place): tile for place, tile in enumerate(usable)}}.items():
        advance(f"running {_words(tile)}")
        try:
            entries.append(_entry(label, spec, direction, sweep, tile, arguments))
        except Exception as error:  # Too much shared memory, for instance, shows only here.
            failures.append(one_line(error))
    if not entries or entries[0].implementation.name != _PRESENT:
        raise RuntimeError(
            f"the present tiles of {spec.name} do not run: {failures[0] if failures else 'no reason given'}"
        )
    advance("timing")
    samples, _ = _samples(entries, repeats, advance)
    medians = {name: 1e3 * statistics.median(seconds) for (name, _), seconds in samples.items()}
    label, best = choose(medians)
    tile = None if label == _PRESENT else usable[int(label)]
    return Tuned(spec, direction, sweep, tile, best, medians[_PRESENT], len(medians), key_of(spec, sweep))


def choose(medians: dict[str, float]) -> tuple[str, float]:
    """The fastest, or the present one where that is as good."""
    label = min(medians, key=lambda name: medians[name])
    if medians[label] >= (1 - CLOSE) * medians[_PRESENT]:
        label = _PRESENT
    return label, medians[label]


def _entry(label: str, spec: KernelSpec, direction: Direction, sweep: Sweep, tile: Tile | None, arguments) -> _Compiled:
    implementation, function = _function(spec, direction, sweep)
    with trial(spec, {} if tile is None else {sweep.field: tile}) as tried:
        compiled = function.lower(*arguments, implementation.rest).compile()
    if not tried.used:
        raise AssertionError(f"the call that was made for {spec.name} is served by another kernel")
    call = lambda: compiled(*arguments, implementation.rest)
    entry = _Compiled(Implementation(label, call, None))
    jax.block_until_ready(call())
    entry.runs["call"], entry.calls["call"] = call, _count(call)
    return entry


def _count(call: Callable[[], Any]) -> int:
    """As `_SECONDS_PER_REPEAT` has it, but a quarter: there are many candidates."""
    started = time.perf_counter()
    jax.block_until_ready(call())
    return min(10, max(2, round(_SECONDS_PER_REPEAT / 4 / (time.perf_counter() - started))))


def _function(spec: KernelSpec, direction: Direction, sweep: Sweep) -> tuple[Implementation, Any]:
    implementation = ours(case_of(spec), str(spec.target), deterministic=sweep.deterministic)
    return implementation, implementation.forward() if direction == "fwd" else implementation.both()


def without_spills(
    spec: KernelSpec, direction: Direction, sweep: Sweep, jobs: int, advance: Callable[[str], None]
) -> list[Tile]:
    """The candidates that compile and spill no more than the present tile.

    Compiled by processes that leave the GPU alone, into Triton's cache, where this process then finds them.
    """
    tried = [None, *sweep.tiles]
    work: list[Work] = [(spec.name, direction, sweep, tile) for tile in tried]
    if jobs == 1:
        spills = list(map(_spills, work))
    else:
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(min(jobs, len(work)), context, _leave_the_gpu_alone) as pool:
            spills = []
            for tile, found in zip(tried, pool.map(_spills, work), strict=True):
                advance(f"compiled {_words(tile)}")
                spills.append(found)
    present, *others = spills
    allowed = present if isinstance(present, int) else 0
    return [
        tile for tile, found in zip(sweep.tiles, others, strict=True) if isinstance(found, int) and found <= allowed
    ]


def _leave_the_gpu_alone() -> None:
    jax.config.update("jax_platforms", "cpu")


def _spills(work: Work) -> int | str:
    """Bytes that the kernels of a direction spill with a tile, or why they do not compile. Needs no GPU."""
    name, direction, sweep, tile = work
    spec = KernelSpec.from_name(name)
    implementation, function = _function(spec, direction, sweep)
    arguments = (*jax.eval_shape(case_of(spec).arrays), implementation.rest)
    try:
        with target("sm_90a"), trial(spec, {} if tile is None else {sweep.field: tile}):
            kernels = compile_for_target(lambda *values: function(*values), *arguments)
        return sum(inspect_compiled(kernel).spill_bytes for kernel in kernels)
    except Exception as error:
        return one_line(error)


def key_of(spec: KernelSpec, sweep: Sweep) -> str:
    """What a result depends on besides its device: the kernel's text, the candidates and the versions that compile them."""
    installed = {name: text for name, text in versions().items() if name in ("triton", "jaxlib", "backend")}
    tiles = [dataclasses.asdict(tile) for tile in sweep.tiles]
    content = [digests(render(spec))[1], sweep.field, tiles, sweep.deterministic, installed, str(case_of(spec))]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def is_done(path: Path, spec: KernelSpec, direction: Direction, sweep: Sweep) -> bool:
    """Whether a table holds the result of this very sweep, so that an interrupted run goes on after it."""
    entry = table_of(path).get(str(spec.target), {}).get(dims_of(spec), {}).get(kind_of(spec), {}).get(direction, {})
    return entry.get(sweep.field, {}).get("key") == key_of(spec, sweep)


def write(path: Path, tuned: Tuned, tile: Tile) -> None:
    """Puts a result into a table, in one step; everything else there stays."""
    spec = tuned.spec
    table = json.loads(path.read_text()) if path.exists() else {}
    kinds = table.setdefault(str(spec.target), {}).setdefault(dims_of(spec), {})
    fields = kinds.setdefault(kind_of(spec), {}).setdefault(tuned.direction, {})
    fields[tuned.sweep.field] = {
        "tile": sizes_of(tile),
        "ms": round(tuned.ms, 4),
        "before_ms": round(tuned.before_ms, 4),
        "key": tuned.key,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(descriptor, "w") as file:
        file.write(json.dumps(table, indent=1, sort_keys=True) + "\n")
    os.chmod(temporary, 0o644)
    os.replace(temporary, path)


def sizes_of(tile: Tile) -> dict[str, int]:
    """A tile as a table has it: what every GPU kernel takes, and of the rest what is not at its default."""
    always = ("block_q", "block_kv", "num_warps", "num_stages")
    fields = dataclasses.fields(tile)
    return {x.name: getattr(tile, x.name) for x in fields if x.name in always or getattr(tile, x.name) != x.default}


def _words(tile: Tile | None) -> str:
    return "the present tile" if tile is None else "x".join(map(str, sizes_of(tile).values()))
