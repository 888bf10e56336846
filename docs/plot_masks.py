"""Draws docs/masks.png: which keys each query sees, under every mask.

python docs/plot_masks.py [OUTPUT]
"""

import sys
from pathlib import Path

import jax.numpy as jnp
import matplotlib
import numpy as np

import eqx_attn
from eqx_attn import BlockSparse, Causal, Chunked, Dilated, Full, PrefixLM, Segments, SlidingWindow
from eqx_attn._plan import plan_mask
from eqx_attn._reference import visible_keys
from eqx_attn._serve import operands_for

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.colors import ListedColormap

SEQ = 24
IDS = jnp.array([1] * 9 + [2] * 4 + [3] * 8 + [0] * 3)
BLOCKS = np.array([[1, 0, 1, 0], [1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 1]], bool)
MASKS = {
    "Full()": Full(),
    "Causal()": Causal(),
    "SlidingWindow(5, 2)": SlidingWindow(5, 2),
    "PrefixLM(7)": PrefixLM(7),
    "Chunked(8)": Chunked(8),
    "Causal() & Chunked(8)": Causal() & Chunked(8),
    "SlidingWindow(12, 0) & Dilated(3)": SlidingWindow(12, 0) & Dilated(3),
    "BlockSparse(seen, 6)": BlockSparse(BLOCKS, 6),
    "Segments(ids)": Segments(IDS),
    "Causal() & Segments(ids)": Causal() & Segments(IDS),
    "PrefixLM(3) & Segments(ids)": PrefixLM(3) & Segments(IDS),
    "Causal() & ~jnp.eye(24, dtype=bool)": Causal() & ~jnp.eye(SEQ, dtype=bool),
}


def visible(mask: eqx_attn.Mask) -> np.ndarray:
    """`[q_seq, kv_seq]`, True where a query sees a key."""
    operands = operands_for(plan_mask(mask, (1,), 1, SEQ, SEQ), 1.0)
    return np.broadcast_to(visible_keys(operands, SEQ, SEQ), (1, 1, SEQ, SEQ))[0, 0]


def draw(path: Path) -> None:
    """Writes the picture."""
    figure, panels = plt.subplots(3, 4, figsize=(10.5, 8.6), dpi=110, sharex=True, sharey=True, layout="constrained")
    colours = ListedColormap(["#eceef0", "#1f5f99"])
    for panel, (name, mask) in zip(panels.flat, MASKS.items(), strict=True):
        panel.pcolormesh(visible(mask), cmap=colours, vmin=0, vmax=1, edgecolors="white", linewidth=0.5)
        panel.set_title(name, fontsize=9)
        panel.set(aspect="equal", xticks=[0, 12, 24], yticks=[0, 12, 24])
        panel.set_ylim(SEQ, 0)
        panel.spines[:].set_visible(False)
    for panel in panels[-1]:
        panel.set_xlabel("key")
    for panel in panels[:, 0]:
        panel.set_ylabel("query")
    figure.savefig(path)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("masks.png"))
