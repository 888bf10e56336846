"""The bar chart of a run."""

from pathlib import Path
from typing import Any

import numpy as np


def plot(results: dict[str, Any], path: Path) -> None:
    """Writes a picture: the cost of each feature, where there are costs, else TFLOP/s of each implementation."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    costs = [row for row in results["rows"] if row["cost"]]
    count = len({row["case"] for row in costs or results["rows"]})
    figure = Figure(figsize=(max(7.0, 1.1 * count + 2), 7.0), layout="constrained")
    FigureCanvasAgg(figure)
    if costs:
        _costs(figure.subplots(), costs)
    else:
        for axes, direction in zip(figure.subplots(2, 1, sharex=True), ("forward", "backward"), strict=True):
            rows = [row for row in results["rows"] if row["direction"] == direction]
            _bars(axes, rows, "implementation", "tflops")
            axes.set_ylabel(f"{direction}, TFLOP/s")
    figure.axes[0].legend(frameon=False, ncols=4)
    figure.suptitle(results["device"])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _costs(axes: Any, rows: list[dict[str, Any]]) -> None:
    _bars(axes, rows, "direction", "cost")
    for bars in axes.containers:
        axes.bar_label(bars, fmt="%.2f", fontsize=8)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_ylabel("time over that of the dense causal kernel")


def _bars(axes: Any, rows: list[dict[str, Any]], series: str, figure: str) -> None:
    """A group of bars for each case: one for each value of `series`, as high as `figure`."""
    cases, names = (list(dict.fromkeys(row[key] for row in rows)) for key in ("case", series))
    found = {(row["case"], row[series]): row[figure] for row in rows}
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        places = np.arange(len(cases)) + (number - (len(names) - 1) / 2) * width
        axes.bar(places, [found.get((case, name)) or 0.0 for case in cases], width, label=name)
    axes.set_xticks(range(len(cases)), cases, rotation=30, ha="right")
    axes.spines[["top", "right"]].set_visible(False)
