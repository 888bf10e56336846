"""The rows of `--cases hopper`: from samples to figures, the file that holds them, and the tables for a terminal."""

import dataclasses
import json
import os
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from rich.table import Table

from ._hopper_cases import Bar, BARS

MATMUL = "matmul"


class Judged(Protocol):
    """What a row takes from a variant: its implementation, and how far its results are from the reference's."""

    implementation: Any
    deterministic: bool
    differences: dict[str, float]
    faults: list[str]


@dataclasses.dataclass
class Row:
    """One figure: the median of the repeats. The file adds the device, its versions and the commit.

    `deterministic` says whether equal bits from run to run were asked for, None forward. `of_cudnn` and `of_matmul` are its
    speed over that of cuDNN, of the same direction, and of the matrix product (in TFLOP/s), of the same run. `difference` is the
    largest relative rms difference of its results from those of our reference, `spread` the range over the median.
    """

    case: str
    direction: str
    implementation: str
    deterministic: bool | None
    ms: float
    tflops: float
    of_cudnn: float | None = None
    of_matmul: float | None = None
    spread: float | None = None
    difference: float | None = None
    note: str = ""


def rows_of(
    case: str,
    flops: dict[str, float],
    variants: Mapping[str, Judged],
    samples: dict[tuple[str, str], list[float]],
    note: str,
) -> list[Row]:
    """The rows of a case from seconds by (label, function); a backward is both directions less the forward of a repeat.

    `flops` are those of "fwd", "bwd" and the matrix product.
    """
    product = samples.get((MATMUL, "forward"), [])
    rows = [_row(case, "fwd", MATMUL, None, product, flops[MATMUL], note)] if product else []
    for label, variant in variants.items():
        name = variant.implementation.name
        notes = "; ".join(filter(None, (variant.implementation.note, note, *variant.faults)))
        seconds = _by_direction(label, name, samples)
        for direction, values in seconds.items():
            if not values or statistics.median(values) <= 0:
                continue
            asked = variant.deterministic if direction == "bwd" else None
            row = _row(case, direction, name, asked, values, flops[direction], notes)
            known = [away for what, away in variant.differences.items() if (what == "out") == (direction == "fwd")]
            row.difference = max(known, default=None)
            rows.append(row)
    return _with_ratios(rows)


def _row(case, direction, name, deterministic, seconds: list[float], flops: float, note: str) -> Row:
    median = statistics.median(seconds)
    spread = (max(seconds) - min(seconds)) / median
    return Row(case, direction, name, deterministic, 1e3 * median, 1e-12 * flops / median, spread=spread, note=note)


def _by_direction(label: str, name: str, samples: dict[tuple[str, str], list[float]]) -> dict[str, list[float]]:
    """The deterministic variant has the other's forward."""
    forward, both = samples.get((name, "forward"), []), samples.get((label, "both"), [])
    backward = [total - part for total, part in zip(both, forward, strict=True)] if both and forward else []
    return {"fwd": forward if label == name else [], "bwd": backward}


def _with_ratios(rows: list[Row]) -> list[Row]:
    cudnn = {row.direction: row.ms for row in rows if row.implementation == "cudnn"}
    product = next((row.tflops for row in rows if row.implementation == MATMUL), None)
    for row in rows:
        if row.implementation != MATMUL:
            row.of_cudnn = cudnn[row.direction] / row.ms if row.direction in cudnn else None
            row.of_matmul = row.tflops / product if product else None
    return rows


def merge(path: Path, rows: list[dict[str, Any]], cases: dict[str, dict]) -> None:
    """Puts the rows of some cases into the file, in the place of all rows of those cases on that device.

    All of them, since rows of a case are compared with one another and so are of one run. In one step, so that an interrupted
    run leaves a whole file.
    """
    if not rows:
        return
    held = json.loads(path.read_text()) if path.exists() else {"cases": {}, "rows": []}
    fresh = {(row["case"], row["device"]) for row in rows}
    kept = [row for row in held["rows"] if (row["case"], row["device"]) not in fresh]
    shapes = {**held["cases"], **cases}
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n  ".join(map(json.dumps, kept + rows))
    text = f'{{"cases": {json.dumps(shapes)},\n "rows": [\n  {lines}\n ]}}\n'
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    os.chmod(temporary, 0o644)
    os.replace(temporary, path)


def table(rows: list[Row], title: str) -> Table:
    """A line for each case and direction: TFLOP/s of each implementation, deterministic in brackets; `!` where it is wrong."""
    names = list(dict.fromkeys(row.implementation for row in rows))
    shown = Table(title=title, box=None, header_style="bold", pad_edge=False)
    for heading in ("case", "", *names):
        shown.add_column(heading, justify="right" if heading in names else "left", no_wrap=True)
    for case, direction in dict.fromkeys((row.case, row.direction) for row in rows):
        found = [row for row in rows if (row.case, row.direction) == (case, direction)]
        shown.add_row(case, direction, *(_cell([row for row in found if row.implementation == name]) for name in names))
    shown.caption = "TFLOP/s (speed over cuDNN's); a backward after / is the one with equal bits from run to run"
    return shown


def _cell(rows: list[Row]) -> str:
    words = []
    for row in sorted(rows, key=lambda row: row.deterministic is True):
        ratio = "" if row.of_cudnn is None or row.implementation == "cudnn" else f" ({row.of_cudnn:.2f})"
        words.append(f"{row.tflops:.0f}{ratio}{'!' if 'differs' in row.note else ''}")
    return " / ".join(words) or "-"


def missed(rows: list[Row], implementation: str) -> list[str]:
    """A line for each bar that an implementation of ours does not reach; what has no figure to compare with is no line."""
    lines = []
    for case, bar in BARS.items():
        for what, direction, deterministic, least, peer in _demands(bar):
            here = [row for row in rows if row.case == case and row.direction == direction]
            ours = [row for row in here if (row.implementation, row.deterministic) == (implementation, deterministic)]
            theirs = [row for row in here if row.implementation == peer]
            if ours and theirs and (reached := theirs[0].ms / ours[0].ms) < least:
                lines.append(f"{case} {what}: {reached:.2f} of {peer}, at least {least:.2f}")
    return lines


def _demands(bar: Bar) -> list[tuple[str, str, bool | None, float, str]]:
    demands = [("forward", "fwd", None, bar.forward, bar.peer), ("backward", "bwd", False, bar.backward, bar.peer)]
    if bar.deterministic is not None:
        demands.append(("deterministic backward", "bwd", True, bar.deterministic, "cudnn"))
    return demands
