"""Calls drawn at random against the law in NumPy: lengths, ids, positions, windows, masks, bias and the other options."""

import calls
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import strategies as st
from test_masks import cases

import eqx_attn
from eqx_attn import BlockSparse, Chunked, Dilated, Dropout, PrefixLM, Segments
from eqx_attn._operands import Tile


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(eqx_attn._resolve, "XLA_TILE", Tile(4, 4))


@st.composite
def masks(draw):
    """A composition of segments, bands and an array, with one of the other masks."""
    mask, shape = draw(cases())
    *_, q_seq, kv_seq = shape
    parts = oracle.flatten(mask)
    segments = next((part for part in parts if isinstance(part, Segments)), None)
    taken = {part.alignment for part in parts if hasattr(part, "alignment")}
    if segments is not None and segments.explicit_positions:
        taken = {"top_left"}
    alignment = taken.pop() if taken else draw(st.sampled_from(["top_left", "bottom_right"]))
    kinds = ["chunked", "dilated", "blocks", "none"]
    if not any(hasattr(part, "alignment") for part in parts):
        kinds.append("prefix")
    kind, number = draw(st.sampled_from(kinds)), draw(st.integers(1, 6))
    if kind == "blocks":
        grid = (2, -(-q_seq // number), -(-kv_seq // 3))
        return mask & BlockSparse(np.random.default_rng(number).random(grid) < 0.6, (number, 3)), shape
    if kind == "none":
        return mask, shape
    other = {"chunked": Chunked, "dilated": Dilated, "prefix": PrefixLM}[kind](number, alignment)
    return mask & other, shape


@st.composite
def options(draw, shape):
    generator = np.random.default_rng(draw(st.integers(0, 99)))
    bias = None
    if draw(st.booleans()):
        axes = [draw(st.sampled_from([1, size])) for size in shape][draw(st.integers(0, 3)) :]
        bias = generator.normal(size=axes)
        bias = jnp.asarray(np.where(generator.random(axes) < 0.1, -np.inf, bias), jnp.float32)
    sinks = jnp.asarray(generator.normal(size=2), jnp.float32) if draw(st.booleans()) else None
    rate = draw(st.sampled_from([0.0, 0.3]))
    dropout = Dropout(rate, jax.random.key(5)) if rate else None
    return oracle.Extras(bias, sinks, draw(st.sampled_from([None, 1.5]))), dropout


@hypothesis.settings(max_examples=8)  # each is compiled
@hypothesis.given(st.data())
def test_any_call(data):
    mask, (batch, heads, q_seq, kv_seq) = data.draw(masks())
    extras, dropout = data.draw(options((batch, heads, q_seq, kv_seq)))
    seed, kv_heads = data.draw(st.integers(0, 99)), data.draw(st.sampled_from([1, 2]))
    inputs = oracle.random_inputs(
        jax.random.key(seed), q_seq, kv_seq, heads=(heads, kv_heads), dims=(8, 8), batch=(batch,)
    )
    calls.check(inputs, mask, extras, dropout, implementation="xla")
