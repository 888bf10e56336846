"""Expected efficiency of calls with a context over the number of devices, as a table and as curves."""

import dataclasses
from pathlib import Path
from typing import Any

from rich.table import Table

from ..sharding._context import OrderName, Strategy
from ._cost_model import Machine, predict, Prediction, Work

WAYS: list[tuple[Strategy, OrderName]] = [
    ("ring", "dual_chunk"),
    ("ring", "contiguous"),
    ("all_gather", "dual_chunk"),
    ("all_to_all", "dual_chunk"),
]
DEVICES = (8, 16, 32, 64, 128, 256, 512)


@dataclasses.dataclass(frozen=True)
class Row:
    """One way on one number of devices; None where heads do not divide."""

    strategy: Strategy
    order: OrderName
    devices: int
    predicted: Prediction | None


def rows(work: Work, machine: Machine) -> list[Row]:
    """All ways on all numbers of devices."""
    found = []
    for strategy, order in WAYS:
        for devices in DEVICES:
            served = strategy != "all_to_all" or work.heads % devices == 0
            predicted = predict(work, machine, devices, strategy, order) if served else None
            found.append(Row(strategy, order, devices, predicted))
    return found


def table(work: Work, machine: Machine) -> Table:
    """For a terminal."""
    title = (
        f"causal, {work.tokens} tokens, {work.heads} query and {work.kv_heads} key heads of {work.head_dim}; "
        f"links of {machine.link:g} GB/s, {1e6 * machine.latency:g} us a message; "
        f"kernels of {machine.forward:g} and {machine.backward:g} TFLOP/s"
    )
    shown = Table(title=title, box=None, header_style="bold", pad_edge=False)
    for heading in ("strategy", "order", "devices", "tokens each", "forward ms", "both ms", "exposed"):
        shown.add_column(heading, justify="left" if heading in ("strategy", "order") else "right", no_wrap=True)
    for heading in ("efficiency forward", "efficiency"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for row in rows(work, machine):
        found, figures = row.predicted, ["-"] * 5
        if found is not None:
            figures = [f"{1e3 * found.forward:.2f}", f"{1e3 * found.both:.2f}", f"{found.exposed:.0%}"]
            figures += [f"{found.forward_efficiency:.0%}", f"{found.efficiency:.0%}"]
        shown.add_row(row.strategy, row.order, str(row.devices), str(work.tokens // row.devices), *figures)
    shown.caption = "efficiency: throughput of a device over that of one device alone, of forward and backward together"
    return shown


def plot(work: Work, machines: list[Machine], path: Path) -> None:
    """Writes efficiency over devices, a panel for each machine, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1 + 4.5 * len(machines), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(machines), sharey=True, squeeze=False)
    for panel, machine in zip(panels[0], machines, strict=True):
        _draw(panel, work, machine)
    panels[0][0].set_ylabel("throughput of a device, of one alone")
    panels[0][0].legend()
    figure.suptitle(f"Predicted: causal forward and backward, {work.tokens:,} tokens, head dim {work.head_dim}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _draw(panel: Any, work: Work, machine: Machine) -> None:
    found = rows(work, machine)
    for strategy, order in WAYS:
        points = [(row.devices, row.predicted) for row in found if (row.strategy, row.order) == (strategy, order)]
        points = [(devices, predicted.efficiency) for devices, predicted in points if predicted is not None]
        if points:
            panel.plot(*zip(*points, strict=True), marker="o", label=f"{strategy}, {order}")
    panel.set_xscale("log", base=2)
    panel.set_xticks(DEVICES, map(str, DEVICES))
    panel.set_xlabel("devices")
    panel.set_ylim(0, 1.05)
    panel.grid(alpha=0.3)
    panel.set_title(f"links of {machine.link:g} GB/s each way", fontsize=10)
