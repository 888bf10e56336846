"""`--tune --static`: the tiles of our TPU kernels, found by their static cycles, and the tables that hold them.

Starting from the tiles that a kernel has, groups of fields are varied one after the other, and the best combination of a
group is kept. What counts is the useful share of a whole call. Kernels that need more vector memory than their limit do
not compile and are passed over; everything that was compiled is kept in the user's cache, so a sweep that was interrupted
goes on where it was.
"""

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

from .._operands import Tiles
from .._tuning_tpu import kind_of
from ._static import Measured
from ._static_pool import Job
from ._static_rows import call_share, Entry, spec_entry
from ._static_spec import Direction, Overrides, tiles_of

CHOICES: dict[str, tuple[int, ...]] = {
    "block_q": (512, 1024, 2048),
    "block_kv": (512, 1024, 2048),
    "inner_q": (256, 512, 1024),
    "inner_kv": (256, 512),
    "lead": (1, 2),
    "lag": (1, 2),
}
GROUPS = (("block_q", "block_kv"), ("inner_q", "inner_kv"), ("lead", "lag"))
"""Fields that are varied together; those that a tile does not have are left out."""

CLOSE = 0.005
"""Of candidates whose shares differ by less than this part, the one with the shortest code is taken."""

SPECS = tuple(
    f"pallas_tpu/bshd_{mask}_qk{dim}_v{dim}{options}"
    for dim in (64, 128, 256)
    for mask, options in (("full", ""), ("causal", ""), ("window", ""), ("full", "_segments"), ("causal", "_segments"))
)
"""One kernel for each entry of a table."""

Measure = Callable[[list[Job]], Iterator[tuple[Job, Measured | str]]]


class NothingCompiles(Exception):
    """No candidate of a kernel compiles."""


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What was found for one direction of a kernel: changes of its tiles, and the useful share of a call before and after."""

    spec: Any
    generation: str
    direction: Direction
    overrides: Overrides
    before: float | None
    after: float

    @property
    def tiles(self) -> Tiles:
        """All tiles of the kernel, of which those of the direction are tuned."""
        return tiles_of(self.spec, self.generation, 2**20, self.overrides)


def tune(spec: Any, generation: str, direction: Direction, seq: int, measure: Measure) -> Tuned:
    """The best tiles of one direction of a kernel. Raises `NothingCompiles`."""
    fields = _fields(tiles_of(spec, generation, seq), direction)
    chosen: dict[str, int] = {}
    shares: dict[Overrides, tuple[float, int]] = {}

    def try_all(candidates: list[dict[str, int]]) -> None:
        entries = {}
        for candidate in candidates:
            overrides = tuple((field, tuple(candidate.items())) for field in fields) if candidate else ()
            entries[overrides] = spec_entry(spec, generation, direction, seq, overrides)
        for job, result in measure([entry.job for overrides, entry in entries.items() if overrides not in shares]):
            overrides = job.arguments[4]
            if not isinstance(result, str):
                shares[overrides] = _score(entries[overrides], result)

    try_all([{}])
    before = shares[()][0] if () in shares else None
    for group in GROUPS:
        names = [name for name in group if hasattr(next(iter(fields.values())), name)]
        options = itertools.product(*(CHOICES[name] for name in names))
        try_all([{**chosen, **dict(zip(names, values, strict=True))} for values in options])
        if shares:
            best = _best(shares)
            chosen = dict(best[0][1]) if best else {}
    if not shares:
        raise NothingCompiles(f"no tile of {spec.name} compiles for {generation}, {direction}")
    best = _best(shares)
    return Tuned(spec, generation, direction, best, before, shares[best][0])


def _fields(tiles: Tiles, direction: Direction) -> dict[str, Any]:
    """The tiles of the kernels of a direction, by their fields in `Tiles`, but that of a bias, which has few kernels."""
    names = ("forward",) if direction == "fwd" else [name for name in vars(tiles) if name not in ("forward", "dbias")]
    return {name: getattr(tiles, name) for name in names}


def _score(entry: Entry, measured: Measured) -> tuple[float, int]:
    return call_share(entry, measured), sum(kernel.bundles for kernel in measured.kernels)


def _best(shares: dict[Overrides, tuple[float, int]]) -> Overrides:
    most = max(share for share, _ in shares.values())
    close = [overrides for overrides, (share, _) in shares.items() if share >= (1 - CLOSE) * most]
    return min(close, key=lambda overrides: shares[overrides][1])


def table_of(tuned: list[Tuned]) -> Table:
    """What was found, a row for each direction of a kernel."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("kernel", "TPU", "pass", "tile", "useful before", "after"):
        table.add_column(title, justify="right" if title in ("useful before", "after") else "left", no_wrap=True)
    for found in tuned:
        tile = next(iter(_fields(found.tiles, found.direction).values()))
        words = ", ".join(f"{name} {value}" for name, value in vars(tile).items() if name in CHOICES)
        before = "does not compile" if found.before is None else f"{100 * found.before:.1f}%"
        name = found.spec.name.removeprefix("pallas_tpu/")
        table.add_row(name, found.generation, found.direction, words, before, f"{100 * found.after:.1f}%")
    return table


def write_table(folder: Path, tuned: list[Tuned]) -> list[Path]:
    """Puts what was found into `FOLDER/GENERATION.json`; entries of other kernels there stay."""
    paths = []
    for generation in dict.fromkeys(found.generation for found in tuned):
        path = folder / f"{generation}.json"
        table: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        for found in tuned:
            if found.generation == generation:
                head_dim = str(max(found.spec.qk_dim, found.spec.v_dim))
                entry = table.setdefault(kind_of(found.spec) or "", {}).setdefault(head_dim, {})
                for field, tile in _fields(found.tiles, found.direction).items():
                    entry[field] = {name: value for name, value in vars(tile).items() if name in CHOICES}
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
        paths.append(path)
    return paths
