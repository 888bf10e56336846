"""TPU kernels under Pallas' interpreter, where unwritten memory is NaN and races are found, against a dense oracle.

Every checked-in kernel is in test_checked_in.
"""

import dataclasses
import functools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from oracle import jit

from codegen.render import render
from codegen.spec import KernelSpec
from eqx_attn import _vector_memory, _visits
from eqx_attn._context import interpret, target
from eqx_attn._operands import Operands, SegmentOperands, Tile, Tiles
from eqx_attn._query_sums import FetchedSums, query_sums, ResidentSums
from eqx_attn._vector_memory import vmem_limit_bytes

TILES = Tiles(Tile(128, 128), Tile(128, 128), Tile(128, 128))


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
    """Forward and backward of a kernel under the interpreter, arrays in bhsd. Fails where that saw a race."""
    module = kernel(name)

    def swap(x):
        return x.swapaxes(1, 2) if name.startswith("bshd") else x

    @jit  # most of a test's time is XLA compiling the interpreter's loops
    def step(q, k, v, dout, dlse, operands):
        out, lse = module.forward(q, k, v, operands, tiles)
        return out, lse, *module.backward(q, k, v, out, lse, dout, dlse, operands, tiles)

    arrays = [swap(jnp.asarray(x, dtype)) for x in (case.q, case.k, case.v, case.dout)]
    with interpret(), jax.default_matmul_precision("highest"):
        out, lse, dq, dk, dv = step(*arrays, jnp.asarray(case.dlse, jnp.float32), case.operands)
        assert lse.dtype == jnp.float32
        assert all(x.dtype == (case.operands.out_dtype or dtype) for x in (out, dq, dk, dv))
        results = dict(out=swap(out), lse=lse, dq=swap(dq), dk=swap(dk), dv=swap(dv))
        results = {name: np.asarray(x.astype(jnp.float32)) for name, x in results.items()}
    assert not interpret_pallas_call.races.races_found
    return results


def check(name: str, case: Case, tiles: Tiles = TILES, dtype="float32") -> dict[str, np.ndarray]:
    """Compares everything that a kernel returns with the oracle."""
    results, expected = run(name, case, tiles, dtype), oracle(case)
    for key, value in expected.items():
        found, dead = results[key], ~np.isfinite(value)
        np.testing.assert_array_equal(found[dead], value[dead], err_msg=key)
        error = np.abs(found[~dead] - value[~dead]).max(initial=0)
        limit = tolerance(case, key, dtype) * max(1.0, np.abs(value[~dead]).max(initial=0))
        assert error <= limit, f"{key} of {name}: off by {error:.2e}, allowed {limit:.2e}"
    return results


def tolerance(case: Case, key: str, dtype: str) -> float:
    """Relative to the largest element: sums of up to `length` float32 terms, and two roundings to a smaller dtype.

    One rounding is that of the weights (or of their gradient) before a product, the other that of the result. The
    exponential makes the rounding of a score, which is relative, an absolute error: large scores count instead.
    """
    score = case.operands.scale * np.abs(np.einsum("bhqd,bkd->bhqk", case.q, case.k[:, 0])).max()
    length = max(case.q.shape[1] // case.k.shape[1] * case.q.shape[2], case.k.shape[2])
    halves = 2 if dtype == "bfloat16" and key != "lse" else 0
    return halves * 2.0**-8 + max(8.0, math.sqrt(length), score) * 2.0**-23


def ids(generator, batch, seq, count):
    """Sorted ids 0 to `count`, 0 being padding."""
    return np.sort(generator.integers(0, count + 1, size=(batch, seq)), axis=1)


def segments_of(q_ids, kv_ids, positions: bool) -> SegmentOperands:
    """The operands for ids in which padding is 0: a position is a token's rank among those of its id."""

    def ranks(x):
        return (np.tril(x[:, :, None] == x[:, None, :], -1)).sum(-1)

    def int32(x):
        return jnp.asarray(x, jnp.int32)

    return SegmentOperands(
        int32(np.where(q_ids > 0, q_ids, -1)),
        int32(np.where(kv_ids > 0, kv_ids, -2)),
        int32(ranks(q_ids)) if positions else None,
        int32(ranks(kv_ids)) if positions else None,
    )


def test_transposed_arrays():
    check("bshd_causal_qk192_v128", make(2, 66, 130, 192, 128, heads=(4, 2), batch=2, upper=0))


@pytest.mark.parametrize("q_seq, kv_seq", [(1, 1), (63, 250)])
def test_ragged_lengths(q_seq, kv_seq):
    check("bhsd_full_qk64_v64", make(3, q_seq, kv_seq, 64, 64))


@pytest.mark.parametrize(
    "q_seq, kv_seq, alignment", [(250, 128, "top_left"), (128, 250, "bottom_right"), (250, 128, "bottom_right")]
)
def test_cross_lengths(q_seq, kv_seq, alignment):
    """More keys than queries and the top left: test_checked_in."""
    upper = 0 if alignment == "top_left" else kv_seq - q_seq
    case = make(4, q_seq, kv_seq, 128, 128, upper=upper)
    results = check("bhsd_causal_qk128_v128", case)
    dead = ~case.visible.any(-1)[:, None]
    assert dead.sum() == max(0, -upper)
    assert np.all(results["out"][0, 0][dead[0, 0]] == 0)


def test_head_dims_below_a_register():
    check("bhsd_causal_qk8_v24", make(5, 130, 130, 8, 24, upper=0))


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["bhsd_causal_qk128_v128", "bshd_full_qk64_v64_segments"])
def test_bfloat16(name):
    operands = dict(upper=0)
    if "segments" in name:
        q_ids = ids(np.random.default_rng(6), 1, 250, 3)
        operands = dict(segments=segments_of(q_ids, q_ids, False))
    dim = KernelSpec.from_name(f"pallas_tpu/{name}").qk_dim
    check(name, make(6, 250, 250, dim, dim, dtype="bfloat16", **operands), dtype="bfloat16")


def test_float32_results_of_bfloat16_arrays():
    case = make(7, 128, 128, 64, 64, dtype="bfloat16", out_dtype="float32")
    check("bhsd_full_qk64_v64", case, dtype="bfloat16")


def test_unequal_tiles():
    tiles = Tiles(Tile(256, 128), Tile(128, 384), Tile(384, 128))
    check("bhsd_window_qk64_v64", make(8, 300, 400, 64, 64, heads=(1, 1), lower=-100, upper=2**30), tiles)


@pytest.mark.parametrize(
    "name, growth", [("bhsd_full_qk64_v64", 60), ("bhsd_full_qk64_v64", 1 / 60), ("bhsd_causal_qk64_v64", 60)]
)
def test_scores_that_outgrow_the_first_ones(name, growth):
    """Weights against the maximum of the first keys overflow, also in the last block, which is cut to its length."""
    case = make(15, 200, 1100, 64, 64, **dict(upper=900) if "causal" in name else {})
    case = dataclasses.replace(case, k=case.k * np.linspace(1, growth, 1100)[:, None])
    forward = Tile(256, 512, inner_q=128, inner_kv=128, lead=2, lag=1)
    check(name, case, dataclasses.replace(TILES, forward=forward))


def test_cross_attention_with_other_segments():
    q_ids = np.repeat([[1, 2, 2, 2, 2, 3, 3, 3]], 16, axis=1)
    kv_ids = np.repeat([[1, 1, 1, 2, 2, 2, 3, 3]], 16, axis=1)
    segments = segments_of(np.sort(q_ids), np.sort(kv_ids), True)
    check("bhsd_causal_qk64_v64_segments", make(9, 128, 128, 64, 64, upper=0, segments=segments))


def test_permuted_tokens():
    """Striped order: every block visits blocks that are not neighbours, and ids are not sorted."""
    generator = np.random.default_rng(10)
    tokens = np.sort(generator.integers(1, 5, size=(1, 512)))
    segments = segments_of(tokens, tokens, True)
    stripes = np.arange(512).reshape(128, 4).T.reshape(-1)
    case = make(10, 512, 512, 64, 64, heads=(1, 1), upper=0, segments=segments)
    striped = dataclasses.replace(
        case,
        **{name: getattr(case, name)[:, :, stripes] for name in ("q", "k", "v", "dout", "dlse")},
        operands=dataclasses.replace(case.operands, segments=jax.tree.map(lambda x: x[:, stripes], segments)),
    )
    check("bhsd_causal_qk64_v64_segments", striped)


@pytest.mark.smoke
def test_queries_without_keys():
    """Neither a gradient that is not finite nor unused keys leave a trace."""
    q_ids, kv_ids = np.zeros((1, 250), int), np.zeros((1, 250), int)
    q_ids[:, :50], kv_ids[:, 30:70] = 7, 7  # the rest is padding
    q_ids[:, 60:70] = 9  # an id that no key has
    case = make(11, 250, 250, 64, 64, segments=segments_of(q_ids, kv_ids, False))
    case.dout[:, :, 50:], case.dlse[:, :, 50:] = np.nan, np.inf
    case.k[:, :, 70:], case.v[:, :, 70:] = 1000.0, 1000.0
    results = check("bhsd_full_qk64_v64_segments", case)
    for name in ("out", "dq"):
        assert np.all(results[name][:, :, 50:] == 0), name
    for name in ("dk", "dv"):
        assert np.all(results[name][:, :, 70:] == 0), name
    assert np.all(results["lse"][:, :, 50:] == -np.inf)


def test_hidden_blocks_are_not_read():
    """NaN in every block of keys that no query sees, and in queries that see none of the keys."""
    case = make(12, 256, 512, 64, 64, upper=-128)
    clean = oracle(case)
    case.k[:, :, 128:], case.v[:, :, 128:] = np.nan, np.nan
    case.q[:, :, :128], case.dout[:, :, :128] = np.nan, np.nan
    results = run("bhsd_causal_qk64_v64", case)
    for name, expected in clean.items():
        finite = np.isfinite(expected)
        np.testing.assert_array_equal(results[name][~finite], expected[~finite])
        np.testing.assert_allclose(results[name][finite], expected[finite], atol=1e-4, err_msg=name)


def test_joined_blocks(monkeypatch):
    """Tables that would not fit scalar memory: two by two blocks share an entry, also where one is left over."""
    monkeypatch.setattr(_visits, "MAX_WORDS", 8)
    q_ids = ids(np.random.default_rng(13), 1, 300, 4)
    segments = segments_of(q_ids, q_ids, True)
    check("bhsd_causal_qk64_v64", make(13, 300, 300, 64, 64, heads=(1, 1), upper=-20))
    check("bhsd_causal_qk64_v64_segments", make(13, 300, 300, 64, 64, heads=(1, 1), upper=0, segments=segments))


@pytest.mark.parametrize(
    "name, q_seq, heads", [("bshd_window_qk128_v128", 300, (2, 1)), ("bhsd_full_qk64_v64", 100, (1, 1))]
)
def test_sums_that_do_not_fit_vector_memory(monkeypatch, name, q_seq, heads):
    """With several heads and blocks of queries, some of them visited by no block of keys; and with one for all steps."""
    monkeypatch.setitem(_vector_memory._MIB, "v5p", 0)  # what counts where no TPU is known
    dim = KernelSpec.from_name(f"pallas_tpu/{name}").qk_dim
    bounds = dict(lower=-100, upper=-20) if "window" in name else {}
    check(name, make(16, q_seq, 200, dim, dim, heads=heads, batch=2, **bounds))


@pytest.mark.parametrize(
    "q_seq, dtype, resident",
    [(48, "bfloat16", True), (49, "bfloat16", False), (36, "float32", True), (37, "float32", False)],
)
def test_sums_are_resident_where_they_fit_half(q_seq, dtype, resident):
    """On a v6e: 96 MiB to use, of which float32 results leave less, and 512 bytes for a query of each of 2 heads."""
    with target("v6e"):
        limit = vmem_limit_bytes()
    sizes = dict(batch=1, kv_heads=1, group=2, q_seq=q_seq * 1024, block_q=1024, dim=128, dtype=dtype, scale=1.0)
    sums = query_sums(limit=limit, columns=False, **sizes)
    assert isinstance(sums, ResidentSums if resident else FetchedSums)


def test_vector_memory_of_an_unknown_device():
    with target("v5p"):
        assert vmem_limit_bytes() == 48 * 2**20
    assert vmem_limit_bytes() == 48 * 2**20


def test_x64():
    q_ids = ids(np.random.default_rng(14), 1, 130, 2)
    segments = segments_of(q_ids, q_ids, True)
    with jax.enable_x64(True):
        check("bshd_window_qk64_v64_segments", make(14, 130, 130, 64, 64, lower=-9, upper=9, segments=segments))


def test_tiles_are_multiples_of_128():
    case, tiles = make(15, 128, 128, 64, 64), Tiles(Tile(64, 128), Tile(128, 128), Tile(128, 128))
    with pytest.raises(ValueError, match="a tile of 64 rows: TPU kernels take positive multiples of 128"):
        run("bhsd_full_qk64_v64", case, tiles)
