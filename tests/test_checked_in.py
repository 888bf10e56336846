"""Every checked-in kernel with options, a packed layout or two head dims, and every TPU kernel, against the float64 law.

Under the interpreters, in float32. The plain Triton kernels are in test_triton_kernels.
"""

import calls
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call

import eqx_attn
from codegen.matrix import checked_in
from codegen.spec import KernelSpec, Target
from eqx_attn import _tuning, BlockSparse, Causal, Dropout, Full, Segments, SlidingWindow
from eqx_attn._operands import Tile, Tiles

INTERPRETED = (Target.PALLAS_TPU, Target.TRITON)  # Gluon has no interpreter
SPECS = [
    spec
    for spec in checked_in()
    if spec.target in INTERPRETED and (spec.target is Target.PALLAS_TPU or not calls.plain(spec))
]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several blocks along both axes, of Triton's tiles other ones for each kernel."""
    triton = Tiles(Tile(32, 16), Tile(16, 32), Tile(16, 32))
    monkeypatch.setattr(_tuning, "_triton_tiles", lambda spec, dtype: triton)
    monkeypatch.setattr(_tuning, "pallas_tpu_tiles", lambda *_: Tiles(Tile(128, 128), Tile(128, 128), Tile(128, 128)))


def mask_of(spec: KernelSpec, q_seq: int, kv_seq: int):
    generator = np.random.default_rng(3)
    mask = {"full": Full(), "causal": Causal(), "window": SlidingWindow(q_seq // 4, q_seq // 9)}[spec.mask]
    if spec.segments:
        mask &= Segments(generator.integers(0, 4, q_seq), generator.integers(0, 4, kv_seq))
    if spec.blocks:
        mask &= BlockSparse(generator.random((-(-q_seq // 24), -(-kv_seq // 40))) < 0.6, (24, 40))
    if spec.dense:
        mask &= generator.random((q_seq, kv_seq)) < 0.7
    return mask


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_every_kernel(spec, random_key):
    if spec.target is Target.TRITON:
        pytest.importorskip("triton")
    q_seq, kv_seq = (50, 69) if spec.target is Target.TRITON else (150, 190)
    kv_seq = q_seq if spec.layout == "qkv" else kv_seq
    layout = str(spec.layout)
    inputs = oracle.random_inputs(
        random_key, q_seq, kv_seq, heads=(2, 1), dims=(spec.qk_dim, spec.v_dim), batch=(1,),
        layout="bhsd" if layout == "bhsd" else "bshd",
    )  # fmt: skip
    generator = np.random.default_rng(4)
    extras = oracle.Extras(
        bias=jnp.asarray(generator.normal(size=(1, 2, q_seq, kv_seq)), jnp.float32) if spec.bias else None,
        sinks=jnp.array([-1.0, 2.0]) if spec.sinks else None,
        softcap=2.0 if spec.softcap else None,
    )
    dropout = Dropout(0.2, jax.random.key(5)) if spec.dropout else None
    options = dict(layout=layout, max_logit=spec.maxlogit, implementation=str(spec.target))
    with eqx_attn.interpret(), jax.default_matmul_precision("highest"):
        calls.check(inputs, mask_of(spec, q_seq, kv_seq), extras, dropout, **options)
    if spec.target is Target.PALLAS_TPU:
        assert not interpret_pallas_call.races.races_found
