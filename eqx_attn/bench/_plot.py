"""The bar chart of a run."""

from pathlib import Path
from typing import Any

import numpy as np


def plot(results: dict[str, Any], path: Path) -> None:
    """Writes TFLOP/s of each case and implementation, forward and backward, as a picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = results["rows"]
    cases = list(dict.fromkeys(row["case"] for row in rows))
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    figure = Figure(figsize=(max(7.0, 1.1 * len(cases) + 2), 7.0), layout="constrained")
    FigureCanvasAgg(figure)
    width = 0.8 / len(names)
    for axes, direction in zip(figure.subplots(2, 1, sharex=True), ("forward", "backward"), strict=True):
        found = {(row["case"], row["implementation"]): row["tflops"] for row in rows if row["direction"] == direction}
        for number, name in enumerate(names):
            heights = [found.get((case, name)) or 0.0 for case in cases]
            places = np.arange(len(cases)) + (number - (len(names) - 1) / 2) * width
            axes.bar(places, heights, width, label=name)
        axes.set_ylabel(f"{direction}, TFLOP/s")
        axes.set_xticks(range(len(cases)), cases, rotation=30, ha="right")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(frameon=False, ncols=len(names))
    figure.suptitle(results["device"])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
