"""Every plain Triton kernel that is checked in under Triton's interpreter on the CPU, against the float64 oracle.

The interpreter puts NaN around an array, and into an output before a kernel runs: a read beyond an end shows, and so
does an element that is not written.
"""

import dataclasses

import calls
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import eqx_attn
from codegen.matrix import checked_in
from codegen.spec import KernelSpec, Layout, MaskKind, Target
from eqx_attn import _tuning
from eqx_attn._operands import Tile, Tiles

pytest.importorskip("triton")

SPECS = [spec for spec in checked_in() if spec.target is Target.TRITON and calls.plain(spec)]
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
        dims=(spec.qk_dim, spec.v_dim), batch=shape.pop("batch", (1,)), layout=str(spec.layout), **shape
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


def spec_named(name):
    return next(spec for spec in SPECS if spec.name == f"triton/{name}")


ONE_OF_EACH_MASK = [
    spec_named(f"{layout}_{mask}_qk64_v64{segments}")
    for layout, mask, segments in (
        ("bshd", "full", ""),
        ("bhsd", "causal", ""),
        ("bshd", "window", ""),
        ("bhsd", "full", "_segments"),
        ("bshd", "causal", "_segments"),
        ("bshd", "window", "_segments"),
    )
]


@pytest.mark.smoke
@pytest.mark.parametrize("spec", ONE_OF_EACH_MASK, ids=lambda spec: spec.name)
def test_float16(spec, random_key):
    run(random_key, spec, masks_of(spec)[0], dtype="float16")


@pytest.mark.parametrize("spec", ONE_OF_EACH_MASK, ids=lambda spec: spec.name)
def test_groups_of_heads_and_batch(spec, random_key):
    run(random_key, spec, masks_of(spec)[-1], heads=(4, 2), batch=(2,))


@pytest.mark.parametrize("q_seq, kv_seq", [(1, 1), (1, 40), (33, 1), (32, 32), (17, 70), (70, 17)])
@pytest.mark.parametrize("spec", ONE_OF_EACH_MASK[:3], ids=lambda spec: spec.name)
def test_lengths(spec, q_seq, kv_seq, random_key):
    for mask in masks_of(spec)[:2]:
        run(random_key, spec, mask, q_seq=q_seq, kv_seq=kv_seq)


@pytest.mark.parametrize("spec", ONE_OF_EACH_MASK[3:], ids=lambda spec: spec.name)
@pytest.mark.parametrize("q_seq, kv_seq", [(1, 1), (1, 40), (40, 1), (32, 32)])
def test_lengths_with_segments(spec, q_seq, kv_seq, random_key):
    ids = np.arange(40) // 15
    band = {"full": eqx_attn.Full(), "causal": eqx_attn.Causal("bottom_right")}
    mask = eqx_attn.Segments(ids[-q_seq:], ids[-kv_seq:]) & band.get(spec.mask, eqx_attn.SlidingWindow(3, 1))
    run(random_key, spec, mask, q_seq=q_seq, kv_seq=kv_seq)


@pytest.mark.parametrize("name", ["bshd_full_qk64_v64_segments", "bhsd_causal_qk64_v64_segments"])
def test_case_18_garbage_in_padding(name, random_key):
    spec = spec_named(name)
    ids = np.array([1] * 30 + [2] * 11 + [0] * 9)
    band = eqx_attn.Full() if spec.mask is MaskKind.FULL else eqx_attn.Causal()
    inputs = oracle.random_inputs(random_key, 50, 50, heads=(2, 1), dims=(64, 64), batch=(1,), layout=str(spec.layout))
    axis = 2 if spec.layout is Layout.BHSD else 1
    padding = jnp.expand_dims(jnp.asarray(ids) == 0, [a for a in range(4) if a != axis])
    filled = dataclasses.replace(
        inputs, key=jnp.where(padding, 1000.0, inputs.key), value=jnp.where(padding, 1000.0, inputs.value)
    )
    mask = eqx_attn.Segments(ids) & band
    with eqx_attn.interpret(), jax.default_matmul_precision("highest"):
        clean, dirty = (oracle.results(x, mask, implementation="triton") for x in (inputs, filled))
    for result in oracle.NAMES:
        np.testing.assert_array_equal(dirty[result], clean[result])


@pytest.mark.parametrize("spec", ONE_OF_EACH_MASK[2:], ids=lambda spec: spec.name)  # the first two always show a key
def test_nothing_visible_at_all(spec, random_key):
    """Every row is dead: outputs and gradients are 0 whatever the cotangents hold."""
    if spec.segments:
        band = {"full": eqx_attn.Full(), "causal": eqx_attn.Causal()}.get(spec.mask, eqx_attn.SlidingWindow(3, 1))
        mask = eqx_attn.Segments(np.arange(40) + 1, np.arange(20) + 100) & band
    else:
        mask = eqx_attn.SlidingWindow(0, 0, "bottom_right") & eqx_attn.SlidingWindow(0, 0)  # two bands that never meet
    _, found = run(random_key, spec, mask, q_seq=40, kv_seq=20)
    assert (found["lse"] == -np.inf).all()
    assert all((found[name] == 0).all() for name in ("out", "dq", "dk", "dv"))


def test_a_shared_head_dim_differs_from_the_values(random_key):
    """Rendered on demand, with padded tiles: neither dim is a power of two."""
    spec = KernelSpec(Target.TRITON, Layout.BSHD, MaskKind.CAUSAL, 24, 40)
    run(random_key, spec, eqx_attn.Causal())


def test_equal_bits_from_run_to_run(random_key):
    spec = spec_named("bshd_causal_qk64_v64_segments")
    first, second = (run(random_key, spec, masks_of(spec)[0])[1] for _ in range(2))
    for name in oracle.NAMES:
        np.testing.assert_array_equal(first[name], second[name])
