"""The loss curve as a picture."""

from pathlib import Path

import matplotlib

from ._train import History


def plot_losses(history: History, unigram: float, path: Path) -> None:
    """Writes training and validation loss over steps, with the unigram baseline, as a PNG."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.8), layout="constrained")
    axes.plot(*zip(*history.train, strict=True), color="tab:blue", alpha=0.35, linewidth=1, label="training batch")
    axes.plot(*zip(*history.validation, strict=True), color="tab:blue", marker="o", label="validation")
    axes.axhline(unigram, color="tab:gray", linestyle="--", label=f"unigram baseline {unigram:.2f}")
    step, last = history.validation[-1]
    axes.annotate(f"{last:.2f}", (step, last), textcoords="offset points", xytext=(0, 8), ha="center")
    axes.set_title("Byte-level GPT on Python's help texts, attention by eqx_attn")
    axes.set_xlabel("training step")
    axes.set_ylabel("cross-entropy [nats per byte]")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
