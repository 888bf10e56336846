"""Draws benchmarks/mask.png: which blocks of scores the kernels visit under three masks.

python benchmarks/plot_mask.py [OUTPUT]
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.patches import Patch

from eqx_attn import Causal, Segments, SlidingWindow
from eqx_attn._block_states import block_states, HIDDEN, MASKED
from eqx_attn._explain import _planned
from eqx_attn._operands import Tile
from eqx_attn._serve import Options

matplotlib.use("Agg")
from matplotlib import pyplot as plt

SEQ, BLOCK = 2048, 128
LENGTHS = (450, 300, 750, 420)  # the rest of the row is padding
MASKS = {
    "Causal()": Causal(),
    "SlidingWindow(400, 0)": SlidingWindow(400, 0),
    "Causal() & Segments(ids)": Causal() & Segments.from_lengths(jnp.array(LENGTHS), SEQ),
}
COLOURS = {"not visited": "#eceef0", "visited, masked": "#9ec1e0", "visited, no mask needed": "#1f5f99"}


def states_of(mask) -> np.ndarray:
    """`[q_blocks, kv_blocks]` of the Triton forward with square tiles, as `_block_states` numbers them."""
    query = jax.ShapeDtypeStruct((1, SEQ, 1, 64), jnp.bfloat16)
    request, band, tokens = _planned(query, query, query, mask, "bshd", Options(mask), spread=None)
    states = block_states("triton", "forward", Tile(BLOCK, BLOCK), request, band, tokens)
    assert states is not None
    return states[0]


def visible() -> dict[str, np.ndarray]:
    """The three masks, dense `[q_seq, kv_seq]`, for the outlines."""
    distance = np.arange(SEQ) - np.arange(SEQ)[:, None]
    ids = np.repeat(np.arange(len(LENGTHS) + 1), (*LENGTHS, SEQ - sum(LENGTHS)))
    same = (ids[:, None] == ids) & (ids < len(LENGTHS))
    shown = (distance <= 0, (distance <= 0) & (distance >= -400), (distance <= 0) & same)
    return dict(zip(MASKS, shown, strict=True))


def draw(path: Path) -> None:
    """Writes the picture."""
    figure, panels = plt.subplots(1, len(MASKS), figsize=(10.5, 4.3), dpi=110, sharey=True, layout="constrained")
    outlines = visible()
    for panel, (name, mask) in zip(panels, MASKS.items(), strict=True):
        states = states_of(mask)
        colours = ListedColormap(list(COLOURS.values()))
        norm = BoundaryNorm([-0.5, 0.5, 1.5, 2.5], colours.N)
        edges = np.arange(0, SEQ + 1, BLOCK)
        panel.pcolormesh(edges, edges, states, cmap=colours, norm=norm, edgecolors="white", linewidth=0.8)
        panel.contour(np.arange(SEQ), np.arange(SEQ), outlines[name], [0.5], colors="#c2410c", linewidths=1.1)
        visited, masked = (states != HIDDEN).sum(), (states == MASKED).sum()
        panel.set_title(f"{name}\n{visited} of {states.size} blocks, {masked} of them masked", fontsize=10)
        panel.set(xlabel="key", aspect="equal", xticks=[0, 1024, 2048], yticks=[0, 1024, 2048])
        panel.set_xlim(0, SEQ)
        panel.set_ylim(SEQ, 0)
        panel.spines[:].set_visible(False)
    panels[0].set_ylabel("query")
    handles = [Patch(color=colour, label=label) for label, colour in COLOURS.items()]
    handles.append(Patch(facecolor="none", edgecolor="#c2410c", label="outline of the visible pairs"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    figure.savefig(path)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("mask.png"))
