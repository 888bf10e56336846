"""Score and mask functions against the laws that they obey, on every implementation that runs on the CPU."""

import jax
import mods
import oracle
import pytest

import eqx_attn
from eqx_attn import _tuning
from eqx_attn._operands import Tile, Tiles

IMPLEMENTATIONS = ("reference", "xla", "triton")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several blocks along both axes."""
    tiles = Tiles(Tile(16, 32), Tile(32, 16), Tile(16, 32))
    monkeypatch.setattr(_tuning, "_triton_tiles", lambda spec, dtype: tiles)
    monkeypatch.setattr(eqx_attn._resolve, "XLA_TILE", Tile(16, 8))
    monkeypatch.setattr(eqx_attn._vjp, "XLA_TILE", Tile(16, 8))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", mods.VARIANTS)
def test_variant(name, implementation, random_key):
    if implementation == "triton":
        pytest.importorskip("triton")
    layout = "bhsd" if name in ("alibi", "documents") else "bshd"
    inputs = oracle.random_inputs(random_key, 21, 37, heads=mods.HEADS, layout=layout)
    with eqx_attn.interpret(), jax.default_matmul_precision("highest"):
        mods.check(name, inputs, implementation=implementation)
