"""Every checked-in Triton kernel under Triton's interpreter on the CPU, against the float64 oracle.

The interpreter puts NaN around an array, and into an output before a kernel runs: a read beyond an end shows, and so
does an element that is not written.
"""

import jax
import numpy as np
import oracle
import pytest

import eqx_attn
from codegen.matrix import checked_in
from codegen.spec import Layout, MaskKind, Target
from eqx_attn import _tuning
from eqx_attn._operands import Tile, Tiles

pytest.importorskip("triton")

SPECS = [spec for spec in checked_in() if spec.target is Target.TRITON]
Q_SEQ, KV_SEQ = 50, 69  # no multiple of a tile, and the rest is another for each


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several blocks along both axes, other tiles for each kernel, wide ones and tall ones."""
    tiles = Tiles(Tile(32, 16), Tile(16, 32), Tile(16, 32))
    monkeypatch.setattr(_tuning, "_triton_tiles", lambda spec, dtype: tiles)


def masks_of(spec):
    """Masks that the kernel of `spec` serves; with segments ids that are sorted, unordered, and padding."""
    bands = {
        MaskKind.FULL: [eqx_attn.Full()],
        MaskKind.CAUSAL: [eqx_attn.Causal(), eqx_attn.Causal("bottom_right")],
        MaskKind.WINDOW: [
            eqx_attn.SlidingWindow(9, 3),
            eqx_attn.SlidingWindow(20, None, "bottom_right"),
            eqx_attn.SlidingWindow(30, 0),
        ],
    }[spec.mask]
    if not spec.segments:
        return bands
    q_ids = np.array([1] * 20 + [7] * 9 + [9] * 15 + [0] * 6)
    kv_ids = np.array([-1] * 2 + [1] * 30 + [9] * 37)  # nothing for the queries of 7: dead rows
    unordered = np.random.default_rng(0)
    shuffled = eqx_attn.Segments(unordered.integers(0, 4, Q_SEQ), unordered.integers(0, 4, KV_SEQ))
    in_order = eqx_attn.Segments(q_ids, kv_ids)
    return [segments & band for segments, band in zip([in_order, shuffled] * 2, bands + bands[:1], strict=False)]


def run(key, spec, mask, **shape):
    inputs = oracle.random_inputs(
        key, shape.pop("q_seq", Q_SEQ), shape.pop("kv_seq", KV_SEQ), heads=shape.pop("heads", (2, 1)),
        dims=(spec.qk_dim, spec.v_dim), batch=(1,), layout=str(spec.layout), **shape
    )  # fmt: skip
    with eqx_attn.interpret(), jax.default_matmul_precision("highest"):
        found = oracle.results(inputs, mask, implementation="triton")
    oracle.assert_matches(found, oracle.expected(inputs, mask))
    return inputs, found


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_every_kernel(spec, random_key):
    # One mask of the kind a spec (by its dim, so that all are had); all of them where products are small.
    masks = masks_of(spec)
    chosen = masks if spec.qk_dim == 64 and spec.layout is Layout.BSHD else [masks[spec.qk_dim // 64 % len(masks)]]
    for mask in chosen:
        run(random_key, spec, mask)
