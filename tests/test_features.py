"""Every pair of features on every implementation that runs on a CPU, against the law in NumPy.

The calls are generated: each has one value of every feature, and each pair of values of two features that go together
occurs in some call.
"""

import itertools

import calls
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import eqx_attn
from eqx_attn import _tuning, BlockSparse, Causal, Chunked, Dilated, Dropout, PrefixLM, Segments, SlidingWindow
from eqx_attn._operands import Tile, Tiles

FEATURES = {
    "implementation": ("xla", "triton", "pallas_tpu"),
    "mask": ("full", "causal", "window", "prefix", "chunked", "dilated", "segments", "blocks", "dense"),
    "bias": (None, "heads", "examples", "keys"),
    "layout": ("bshd", "bhsd", "qkv", "kv"),
    "lengths": ((21, 30), (40, 40), (1, 19)),
    "heads": ((2, 2), (4, 2), (3, 1)),
    "dims": ((16, 16), (32, 16)),
    "softcap": (None, 2.0),
    "sinks": (False, True),
    "dropout": (0.0, 0.3),
    "max_logit": (False, True),
}


def goes(call: dict) -> bool:
    """Whether these values of some features go together."""
    if call.get("layout") in ("qkv", "kv") and call.get("dims") == (32, 16):
        return False
    q_seq, kv_seq = call.get("lengths", (1, 1))
    return not (call.get("layout") == "qkv" and q_seq != kv_seq)


def pairwise() -> list[dict]:
    """Calls that cover every pair of values that go together, found greedily."""
    pairs = {
        ((one, a), (other, b))
        for one, other in itertools.combinations(FEATURES, 2)
        for a, b in itertools.product(FEATURES[one], FEATURES[other])
        if goes({one: a, other: b})
    }
    left, chosen = dict.fromkeys(sorted(pairs, key=repr)), []
    while left:
        call = dict(next(iter(left)))
        for name, values in FEATURES.items():
            if name not in call:
                fitting = [value for value in values if goes(call | {name: value})]
                call[name] = max(fitting, key=lambda value: sum(pair in left for pair in _pairs(call | {name: value})))
        call = {name: call[name] for name in FEATURES}
        chosen.append(call)
        for pair in _pairs(call):
            left.pop(pair, None)
    return chosen


def _pairs(call: dict):
    items = [(name, call[name]) for name in FEATURES if name in call]
    return list(itertools.combinations(items, 2))


def mask_of(name: str, q_seq: int, kv_seq: int):
    generator = np.random.default_rng(5)
    ids = generator.integers(0, 3, q_seq), np.sort(generator.integers(0, 3, kv_seq))
    return {
        "full": eqx_attn.Full(),
        "causal": Causal("bottom_right"),
        "window": SlidingWindow(7, 3),
        "prefix": PrefixLM(np.array([4, 11])),
        "chunked": Chunked(9) & Causal(),
        "dilated": Dilated(3) & SlidingWindow(12, None),
        "segments": Segments(*ids) & SlidingWindow(5, 2),
        "blocks": BlockSparse(generator.random((-(-q_seq // 8), -(-kv_seq // 16))) < 0.6, (8, 16))
        & Causal("bottom_right"),
        "dense": Causal("bottom_right") & (generator.random((2, 1, q_seq, kv_seq)) < 0.7),
    }[name]


def bias_of(name, heads: int, q_seq: int, kv_seq: int):
    if name is None:
        return None
    shape = {"heads": (1, heads, q_seq, kv_seq), "examples": (2, 1, q_seq, kv_seq), "keys": (2, heads, 1, kv_seq)}[name]
    return jnp.asarray(np.random.default_rng(6).normal(size=shape), jnp.float32)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several blocks along both axes, other tiles for each kernel."""
    monkeypatch.setattr(_tuning, "_triton_tiles", lambda spec, dtype: Tiles(Tile(32, 16), Tile(16, 32), Tile(16, 32)))


CALLS = pairwise()


def test_every_pair_occurs():
    found = {pair for call in CALLS for pair in _pairs(call)}
    for one, other in itertools.combinations(FEATURES, 2):
        for a, b in itertools.product(FEATURES[one], FEATURES[other]):
            assert (((one, a), (other, b)) in found) == goes({one: a, other: b})


@pytest.mark.parametrize("features", CALLS, ids=lambda call: "-".join(map(str, call.values())).replace(" ", ""))
def test_features(features, random_key):
    implementation, (q_seq, kv_seq), heads = features["implementation"], features["lengths"], features["heads"]
    if implementation == "triton":
        pytest.importorskip("triton")
    layout = features["layout"]
    inputs = oracle.random_inputs(
        random_key, q_seq, kv_seq, heads=heads, dims=features["dims"], layout="bhsd" if layout == "bhsd" else "bshd"
    )
    extras = oracle.Extras(
        bias=bias_of(features["bias"], heads[0], q_seq, kv_seq),
        sinks=jnp.linspace(-1.0, 2.0, heads[0], dtype=jnp.float32) if features["sinks"] else None,
        softcap=features["softcap"],
    )
    dropout = Dropout(features["dropout"], jax.random.key(11)) if features["dropout"] else None
    mask = mask_of(features["mask"], q_seq, kv_seq)
    with eqx_attn.interpret(), jax.default_matmul_precision("highest"):
        calls.check(
            inputs, mask, extras, dropout, layout=layout, max_logit=features["max_logit"], implementation=implementation
        )
