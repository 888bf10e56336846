"""`Operands.out_dtype`: partial results of narrow arrays in float32, which a sum of them needs."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import eqx_attn
from eqx_attn._codegen import KernelSpec
from eqx_attn._kernels import load_kernel
from eqx_attn._operands import Operands, Tile, Tiles

TILES = {"triton": Tiles(Tile(16, 16), Tile(16, 16), Tile(16, 16)), "pallas_tpu": Tiles(*(Tile(128, 128),) * 3)}
# Triton's interpreter computes bfloat16 products wrongly, float16 ones rightly.
DTYPES = dict(triton="float16", pallas_tpu="bfloat16", xla="bfloat16")


@pytest.mark.parametrize("implementation", DTYPES)
def test_gradients_in_float32_are_nearer(implementation, random_key):
    if implementation == "triton":
        pytest.importorskip("triton")
    dtype = DTYPES[implementation]
    inputs = oracle.random_inputs(random_key, 40, 40, dims=(32, 32), batch=(1,), dtype=dtype, layout="bhsd")
    wanted = oracle.expected(inputs, eqx_attn.Causal())
    forward, backward = directions(implementation)
    with eqx_attn.interpret(), jax.default_matmul_precision("highest"):
        found = {}
        for out_dtype in (None, "float32"):
            operands = Operands(scale=32**-0.5, upper=0, out_dtype=out_dtype)
            out, lse = forward(*inputs.arrays, operands)
            assert out.dtype == (out_dtype or dtype)
            # The same out for both: only what the gradients are rounded to differs.
            out = jnp.asarray(wanted["out"][0], dtype)
            grads = backward(*inputs.arrays, out, lse, inputs.dout, inputs.dlse, operands)
            assert {str(x.dtype) for x in grads} == {out_dtype or dtype}
            found[out_dtype] = dict(zip(("dq", "dk", "dv"), grads, strict=True))
            oracle.assert_matches(found[out_dtype], wanted, ("dq", "dk", "dv"))
    for name in ("dq", "dk", "dv"):
        narrow, wide = (error(found[x][name], wanted[name][0]) for x in (None, "float32"))
        assert wide < narrow


def error(found, wanted) -> float:
    return float(np.sqrt(np.mean((np.asarray(found, np.float64) - wanted) ** 2)))


def directions(implementation):
    if implementation == "xla":
        from eqx_attn import _blockwise

        tile = Tile(16, 16)
        return (
            lambda *x: _blockwise.forward(*x, tile),
            lambda *x: _blockwise.backward(*x, tile)[:3],
        )
    kernel = load_kernel(KernelSpec.from_name(f"{implementation}/bhsd_causal_qk32_v32"))
    tiles = TILES[implementation]
    return lambda *x: kernel.forward(*x, tiles), lambda *x: kernel.backward(*x, tiles)[:3]
