"""TPU kernels under Pallas' interpreter, where unwritten memory is NaN and races are found, against a dense oracle."""

import dataclasses
import functools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call

from codegen.render import render
from codegen.spec import KernelSpec
from eqx_attn._context import interpret
from eqx_attn._operands import Operands, SegmentOperands, Tile, Tiles

TILES = Tiles(Tile(128, 128), Tile(128, 128), Tile(128, 128))
ROUNDING = {"float32": 2.0**-23, "bfloat16": 2.0**-8}


@functools.cache
def kernel(name: str) -> types.ModuleType:
    """The module of a freshly rendered spec, given without its target."""
    module = types.ModuleType(name)
    exec(compile(render(KernelSpec.from_name(f"pallas_tpu/{name}")), name, "exec"), module.__dict__)
    return module


@dataclasses.dataclass(frozen=True)
class Case:
    """Arrays in bhsd, float64, and what is visible of them."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    dlse: np.ndarray
    operands: Operands

    @property
    def visible(self) -> np.ndarray:
        """`[batch, q_seq, kv_seq]`."""
        batch, q_seq, kv_seq = self.q.shape[0], self.q.shape[2], self.k.shape[2]
        q_positions, kv_positions = np.arange(q_seq)[None], np.arange(kv_seq)[None]
        visible = np.ones((batch, q_seq, kv_seq), bool)
        segments = self.operands.segments
        if segments is not None:
            visible &= np.asarray(segments.q_ids)[:, :, None] == np.asarray(segments.kv_ids)[:, None, :]
            if segments.q_positions is not None:
                q_positions, kv_positions = np.asarray(segments.q_positions), np.asarray(segments.kv_positions)
        distance = kv_positions[:, None, :] - q_positions[:, :, None]
        if self.operands.lower is not None:
            visible &= distance >= self.operands.lower
        if self.operands.upper is not None:
            visible &= distance <= self.operands.upper
        return visible


def make(seed, q_seq, kv_seq, qk_dim, v_dim, *, heads=(2, 1), batch=1, scale=None, dtype="float32", **operands) -> Case:
    generator = np.random.default_rng(seed)
    q_heads, kv_heads = heads

    def array(*shape):
        return np.asarray(jnp.asarray(generator.normal(size=shape), dtype).astype(jnp.float32), np.float64)

    return Case(
        q=array(batch, q_heads, q_seq, qk_dim),
        k=array(batch, kv_heads, kv_seq, qk_dim),
        v=array(batch, kv_heads, kv_seq, v_dim) + 0.5,
        dout=array(batch, q_heads, q_seq, v_dim),
        dlse=generator.normal(size=(batch, q_heads, q_seq)),
        operands=Operands(scale=scale or qk_dim**-0.5, **operands),
    )


def oracle(case: Case) -> dict[str, np.ndarray]:
    """Everything that a kernel returns, and each array's gradient, in float64."""
    group = case.q.shape[1] // case.k.shape[1]
    k, v = case.k.repeat(group, 1), case.v.repeat(group, 1)
    visible, scale = case.visible[:, None], case.operands.scale
    scores = np.where(visible, scale * np.einsum("bhqd,bhkd->bhqk", case.q, k), -np.inf)
    sees = visible.any(-1, keepdims=True)
    top = np.where(sees, scores.max(-1, keepdims=True, initial=-np.inf), 0)
    weights = np.exp(scores - top)
    total = np.where(sees, weights.sum(-1, keepdims=True), 1)
    p = weights / total
    lse = np.where(sees, top + np.log(total), -np.inf)[..., 0]
    out = np.einsum("bhqk,bhkd->bhqd", p, v)
    dout, dlse = np.where(sees, case.dout, 0), np.where(sees[..., 0], case.dlse, 0)
    dp = np.einsum("bhqd,bhkd->bhqk", dout, v)
    ds = p * (dp - (out * dout).sum(-1, keepdims=True) + dlse[..., None])
    grouped = (case.q.shape[0], case.k.shape[1], group)
    return dict(
        out=out,
        lse=lse,
        dq=scale * np.einsum("bhqk,bhkd->bhqd", ds, k),
        dk=scale * np.einsum("bhqk,bhqd->bhkd", ds, case.q).reshape(*grouped, *case.k.shape[2:]).sum(2),
        dv=np.einsum("bhqk,bhqd->bhkd", p, dout).reshape(*grouped, *case.v.shape[2:]).sum(2),
    )


def run(name: str, case: Case, tiles: Tiles = TILES, dtype="float32") -> dict[str, np.ndarray]:
    """Forward and backward of a kernel, under the interpreter, arrays in bhsd."""
    module = kernel(name)

    def swap(x):
        return x.swapaxes(1, 2) if name.startswith("bshd") else x

    def step(q, k, v, dout, dlse, operands):
        out, lse = module.forward(q, k, v, operands, tiles)
        return out, lse, *module.backward(q, k, v, out, lse, dout, dlse, operands, tiles)

    arrays = [swap(jnp.asarray(x, dtype)) for x in (case.q, case.k, case.v, case.dout)]
    with interpret(), jax.default_matmul_precision("highest"):
        out, lse, dq, dk, dv = jax.jit(step)(*arrays, jnp.asarray(case.dlse, jnp.float32), case.operands)
        assert lse.dtype == jnp.float32 and all(x.dtype == dtype for x in (out, dq, dk, dv))
        results = dict(out=swap(out), lse=lse, dq=swap(dq), dk=swap(dk), dv=swap(dv))
        results = {name: np.asarray(x.astype(jnp.float32)) for name, x in results.items()}
    assert not interpret_pallas_call.races.races_found
    return results


def check(name: str, case: Case, tiles: Tiles = TILES, dtype="float32") -> dict[str, np.ndarray]:
    results, expected = run(name, case, tiles, dtype), oracle(case)
    # A sum of n products of rounded numbers is off by about sqrt(n) roundings of their size; n is what one result adds up.
    length = max(case.q.shape[1] // case.k.shape[1] * case.q.shape[2], case.k.shape[2])
    for key, value in expected.items():
        found = results[key]
        dead = ~np.isfinite(value)
        np.testing.assert_array_equal(found[dead], value[dead], err_msg=key)
        rounding = ROUNDING["float32"] if key == "lse" and dtype == "float32" else ROUNDING[dtype]
        size = max(1.0, np.abs(value[~dead]).max(initial=0))
        limit = 2 * math.sqrt(length) * rounding * size
        error = np.abs(found[~dead] - value[~dead]).max(initial=0)
        assert error <= limit, f"{key} of {name}: off by {error:.2e}, allowed {limit:.2e}"
    return results


def test_causal():
    check("bhsd_causal_qk128_v128", make(0, 256, 256, 128, 128, upper=0))
