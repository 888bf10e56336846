"""The options of the Triton kernels under Triton's interpreter on the CPU, against the law in NumPy."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from calls import kept_by

import eqx_attn
from eqx_attn import _tuning
from eqx_attn._device import tile_visibility, triton_call, visited_lists
from eqx_attn._operands import BlockOperands, Operands, Tile, Tiles
from eqx_attn._reference import visible_keys

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

Q_SEQ, KV_SEQ = 50, 69  # no multiple of a tile, and the rest is another for each
DIM = 16


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several blocks along both axes, other tiles for each kernel, wide ones and tall ones."""
    tiles = Tiles(Tile(32, 16), Tile(16, 32), Tile(16, 32))
    monkeypatch.setattr(_tuning, "_triton_tiles", lambda spec, dtype: tiles)


IN_ORDER = eqx_attn.Segments(
    np.array([1] * 20 + [7] * 9 + [9] * 15 + [0] * 6), np.array([-1] * 2 + [1] * 30 + [9] * 37)
)  # nothing for the queries of 7: dead rows
MASKS = {
    "full": eqx_attn.Full(),
    "causal": eqx_attn.Causal("bottom_right"),
    "window": eqx_attn.SlidingWindow(20, 3),
    "segments": IN_ORDER,
    "packed": IN_ORDER & eqx_attn.Causal(),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """Arguments of `attention`: what is an array or a number of them, and the shapes of bias and sinks."""

    mask: str = "full"
    bias: tuple[int, ...] | None = None
    sinks: bool = False
    softcap: float | None = None
    dropout: float = 0.0
    max_logit: bool = False
    dense: tuple[int, ...] | None = None
    blocks: tuple[tuple[int, int], tuple[int, ...]] | None = None  # the block's size and the leading axes
    batch: int = 1
    heads: tuple[int, int] = (2, 1)
    dims: tuple[int, int] = (DIM, DIM)
    seq: tuple[int, int] = (Q_SEQ, KV_SEQ)
    layout: str = "bshd"
    hidden_by_bias: bool = False


def arguments(case, generator):
    """The mask, and the differentiable extras by name."""
    mask = MASKS[case.mask]
    if case.dense:
        mask = mask & eqx_attn._masks.Dense(jnp.asarray(generator.random(case.dense) < 0.6))
    if case.blocks:
        size, leading = case.blocks
        grid = tuple(-(-n // block) for n, block in zip(case.seq, size, strict=True))
        mask = mask & eqx_attn.BlockSparse(jnp.asarray(generator.random((*leading, *grid)) < 0.5), size)
    learned = {}
    if case.bias:
        bias = generator.normal(size=case.bias)
        if case.hidden_by_bias:
            bias = np.where(generator.random(case.bias) < 0.3, -np.inf, bias)
            bias[..., 3, :] = -np.inf  # a dead row
        learned["bias"] = bias
    if case.sinks:
        learned["sinks"] = generator.normal(size=case.heads[0]) * 3
    return mask, learned


def fused(query, key, value, **options):
    qkv = jnp.concatenate((query, key, value), axis=2)
    return eqx_attn.attention_qkvfused(qkv, kv_heads=key.shape[2], **options)


def key_with_value(query, key, value, **options):
    return eqx_attn.attention_kvpacked(query, jnp.stack((key, value), axis=2), **options)


def law(case, mask, arrays, learned, cotangents):
    """The same of NumPy's oracle, in float64."""
    inputs = oracle.Inputs(*arrays, *cotangents, "bhsd" if case.layout == "bhsd" else "bshd")
    dropout = (
        dict(kept=kept_by(dropout_of(case), oracle.score_shape(inputs)), rate=case.dropout) if case.dropout else {}
    )
    extras = oracle.Extras(learned.get("bias"), learned.get("sinks"), case.softcap, **dropout)
    found = {name: value for name, (value, _) in oracle.expected(inputs, mask, extras=extras).items()}
    if not case.max_logit:
        del found["max_logit"]
    return found


def dropout_of(case):
    return eqx_attn.Dropout(case.dropout, jax.random.key(7)) if case.dropout else None


def results(case, mask, dtype, arrays, learned, cotangents):
    """Outputs and all gradients by name, as float64."""
    options = dict(mask=mask, softcap=case.softcap, implementation="triton", dropout=dropout_of(case))
    arrays = [jnp.asarray(x, dtype) for x in arrays]
    learned = {name: jnp.asarray(x, jnp.float32) for name, x in learned.items()}

    packed = case.layout in ("qkv", "kv")
    attention = {"qkv": fused, "kv": key_with_value}[case.layout] if packed else eqx_attn.attention
    if not packed:
        options["layout"] = "bhsd" if case.layout == "bhsd" else "bshd"

    def call(arrays, learned):
        result = attention(*arrays, **learned, return_lse=True, return_max_logit=case.max_logit, **options)
        return (result.out, result.lse), result.max_logit

    @oracle.jit
    def run(arrays, learned, cotangents):
        primal, pull_back, max_logit = jax.vjp(call, arrays, learned, has_aux=True)
        return primal, max_logit, pull_back(cotangents)

    dout, dlse = cotangents
    (out, lse), max_logit, (grads, learned_grads) = run(
        arrays, learned, (jnp.asarray(dout, dtype), jnp.asarray(dlse, jnp.float32))
    )
    found = dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True))
    found |= {f"d{name}": grad for name, grad in learned_grads.items()}
    assert all(learned_grads[name].dtype == x.dtype for name, x in learned.items())
    if case.max_logit:
        found["max_logit"] = max_logit
    return {name: np.asarray(x, np.float64) for name, x in found.items()}


def assert_close(found, wanted, dtype):
    """A result is a sum whose terms carry the roundings of a score (of size 10 or less), a weight and a product, some 20 in
    all, and the accumulator's, sqrt(length) of them in quadrature: sqrt(200) for a sum over queries, heads and examples. Four
    of each, for the worst element of all, relative to the largest element.
    """
    eps = float(jnp.finfo(dtype).eps)
    for name, value in wanted.items():
        got = found[name]
        assert got.shape == value.shape, name
        assert (np.isinf(got) == np.isinf(value)).all(), f"{name} is infinite elsewhere"
        finite = np.isfinite(value)
        assert finite.any(), name
        allowed = 4 * (20 + 200**0.5) * eps * max(1.0, np.abs(value[finite]).max())
        error = np.abs(np.where(finite, got - np.where(finite, value, 0), 0))
        assert not np.isnan(got).any(), f"{name} holds NaN"
        assert error.max() <= allowed, f"{name} is off by {error.max():.1e}, allowed {allowed:.1e}"


def draw(case, key):
    """Query, key and value, and the cotangents of output and lse; normal, the values off centre."""
    generator = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    (q_heads, kv_heads), (q_seq, kv_seq), (qk_dim, v_dim) = case.heads, case.seq, case.dims

    def array(seq, heads, dim, mean=0.0):
        shape = (case.batch, seq, heads, dim) if case.layout != "bhsd" else (case.batch, heads, seq, dim)
        return generator.normal(mean, size=shape)

    arrays = (array(q_seq, q_heads, qk_dim), array(kv_seq, kv_heads, qk_dim), array(kv_seq, kv_heads, v_dim, 0.5))
    cotangents = array(q_seq, q_heads, v_dim), generator.normal(size=(case.batch, q_heads, q_seq))
    return generator, arrays, cotangents


def check(case, key, dtype="float32"):
    generator, arrays, cotangents = draw(case, key)
    mask, learned = arguments(case, generator)
    if dtype != "float32":  # the reference starts from the same numbers
        arrays = [np.asarray(np.asarray(x, dtype), np.float64) for x in arrays]
        cotangents = (np.asarray(np.asarray(cotangents[0], dtype), np.float64), cotangents[1])
    arrays = [np.asarray(x, np.float32) for x in arrays]
    cotangents = [np.asarray(x, np.float32) for x in cotangents]
    learned = {name: np.asarray(x, np.float32) for name, x in learned.items()}
    wanted = law(case, mask, arrays, learned, cotangents)
    with eqx_attn.interpret(), jax.default_matmul_precision("highest"):
        found = results(case, mask, dtype, arrays, learned, cotangents)
    assert found.keys() == wanted.keys()
    assert_close(found, wanted, dtype)
    return found


@pytest.mark.parametrize("mask", MASKS)
def test_options_of_scores(mask, random_key):
    check(Case(mask, softcap=2.0, sinks=True, max_logit=True, dropout=0.25), random_key)


@pytest.mark.parametrize(
    "option", [dict(softcap=2.0), dict(sinks=True), dict(max_logit=True), dict(dropout=0.3)], ids=str
)
def test_one_option(option, random_key):
    check(Case("causal", **option), random_key)


@pytest.mark.parametrize("mask", ["full", "window", "packed"])
def test_bias(mask, random_key):
    check(Case(mask, bias=(1, 2, Q_SEQ, KV_SEQ)), random_key)


@pytest.mark.parametrize("shape", [(2, 1, Q_SEQ, KV_SEQ), (1, 4, 1, KV_SEQ), (2, 1, Q_SEQ, 1), (1, 1, 1, 1)], ids=str)
def test_bias_that_is_shared(shape, random_key):
    check(Case("causal", bias=shape, batch=2, heads=(4, 2)), random_key)


def test_bias_hides_keys(random_key):
    check(Case(bias=(1, 2, Q_SEQ, KV_SEQ), hidden_by_bias=True, max_logit=True), random_key)


@pytest.mark.parametrize("mask, shape", [("window", (1, 2, Q_SEQ, KV_SEQ)), ("segments", (1, 1, Q_SEQ, 1))], ids=str)
def test_dense(mask, shape, random_key):
    check(Case(mask, dense=shape), random_key)


def test_dense_that_is_shared(random_key):
    check(Case(dense=(2, 1, 1, KV_SEQ), batch=2, heads=(4, 2)), random_key)


@pytest.mark.parametrize(
    "blocks",
    [((32, 32), ()), ((16, 64), (1, 2)), ((24, 10), (2, 1))],  # tiles divide it, one divides the other, neither
    ids=str,
)
def test_blocks(blocks, random_key):
    check(Case("causal", blocks=blocks, batch=2), random_key)


@pytest.mark.parametrize(
    "case",
    [
        Case("causal", layout="qkv", seq=(Q_SEQ, Q_SEQ), heads=(4, 2), batch=2),
        Case("window", layout="kv", heads=(4, 2), batch=2),
    ],
    ids=lambda case: case.layout,
)
def test_packed_arrays(case, random_key):
    check(case, random_key)


ALL_OPTIONS = dict(softcap=2.0, sinks=True, dropout=0.25, max_logit=True)


@pytest.mark.parametrize(
    "case",
    [
        Case("packed", bias=(1, 1, Q_SEQ, KV_SEQ), blocks=((32, 16), (2, 1)), batch=2, heads=(4, 2), **ALL_OPTIONS),
        Case(bias=(1, 2, 1, Q_SEQ), dense=(1, 1, Q_SEQ, Q_SEQ), layout="qkv", seq=(Q_SEQ, Q_SEQ), **ALL_OPTIONS),
        Case(
            "window", bias=(1, 2, Q_SEQ, 1), blocks=((30, 8), ()), dense=(1, 1, 1, KV_SEQ), layout="kv", **ALL_OPTIONS
        ),
        Case("causal", bias=(1, 2, Q_SEQ, KV_SEQ), layout="bhsd", dims=(24, 40), **ALL_OPTIONS),
    ],
    ids=["packed-blocks", "full-qkv", "window-kv", "causal-bhsd"],
)
def test_options_together(case, random_key):
    check(case, random_key)


def test_wide_heads_sweep_twice(random_key):
    check(Case("causal", bias=(1, 2, 20, 33), seq=(20, 33), dims=(136, 136), **ALL_OPTIONS), random_key)


def test_float16(random_key):
    check(Case("window", bias=(1, 2, Q_SEQ, KV_SEQ), **ALL_OPTIONS), random_key, "float16")


@pytest.mark.parametrize("garbage", [np.nan, 1000.0], ids=str)
def test_garbage_in_padding(garbage, random_key):
    """What padding holds, and its output's cotangent, reaches no result."""
    case = Case("packed", bias=(1, 2, Q_SEQ, KV_SEQ), **ALL_OPTIONS)
    generator, arrays, (dout, dlse) = draw(case, random_key)
    mask, learned = arguments(case, generator)
    q_padding, kv_padding = (np.asarray(ids <= 0)[None, :, None, None] for ids in (IN_ORDER.q_ids, IN_ORDER.kv_ids))
    dirty = [
        np.where(padding, garbage, x) for padding, x in zip((q_padding, kv_padding, kv_padding), arrays, strict=True)
    ]
    with eqx_attn.interpret(), jax.default_matmul_precision("highest"):
        clean = results(case, mask, "float32", arrays, learned, (dout, dlse))
        found = results(case, mask, "float32", dirty, learned, (np.where(q_padding, garbage, dout), dlse))
    for name, value in clean.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize("size", [(32, 32), (24, 10), (8, 100)], ids=str)
@pytest.mark.parametrize("bounds", [(None, None), (-20, 3)], ids=str)
def test_lists_hold_the_visited_tiles(bounds, size, random_key):
    """Against the dense predicate: what is whole, what is visited besides, and that each number is there once."""
    lower, upper = bounds
    generator = np.random.default_rng(np.asarray(jax.random.key_data(random_key)))
    seen = generator.random((2, 1, -(-Q_SEQ // size[0]), -(-KV_SEQ // size[1]))) < 0.7
    operands = Operands(scale=1.0, lower=lower, upper=upper, blocks=BlockOperands(jnp.asarray(seen), *size))
    tile = Tile(16, 32)
    _, tile_map = tile_visibility(operands, 2, Q_SEQ, KV_SEQ, tile)
    visible = np.asarray(visible_keys(operands, Q_SEQ, KV_SEQ))
    padded = np.zeros((2, 1, 64, 96), bool)  # whole tiles
    padded[:, :, :Q_SEQ, :KV_SEQ] = visible
    real = np.zeros((64, 96), bool)
    real[:Q_SEQ, :KV_SEQ] = True
    for of in ("q", "kv"):
        lists = np.asarray(visited_lists(tile_map, of=of))
        for entry, block in np.ndindex(2, 4 if of == "q" else 3):
            whole, some = set(), set()
            for other in range(3 if of == "q" else 4):
                i, j = (block, other) if of == "q" else (other, block)
                part = np.s_[i * 16 : i * 16 + 16, j * 32 : j * 32 + 32]
                cut = i * 16 + 16 > Q_SEQ if of == "kv" else j * 32 + 32 > KV_SEQ
                if padded[entry, 0][part].any():
                    some.add(other)
                if not cut and padded[entry, 0][part][real[part]].all():
                    whole.add(other)
            wholes, partials, *numbers = lists[entry, 0, block].tolist()
            assert set(numbers[:wholes]) == whole
            partial = set(numbers[wholes : wholes + partials])
            # Where the map cuts through a tile, what it shows there may lie outside the band: visited in vain.
            assert partial >= some - whole if bounds[0] is not None and size != (32, 32) else partial == some - whole
            assert sorted(numbers) == list(range(len(numbers)))


@triton.jit
def negate_kernel(x_ptr, first, y_ptr, count_ptr, BLOCK: tl.constexpr):
    offsets = first + tl.arange(0, BLOCK)
    tl.store(y_ptr + offsets, tl.load(y_ptr + offsets) - tl.load(x_ptr + offsets))
    tl.store(count_ptr, BLOCK)


def negate(x, y):
    return triton_call(
        negate_kernel,
        x,
        4,
        updated=(y,),
        outputs=(jax.ShapeDtypeStruct((1,), jnp.int32),),
        grid=(1,),
        num_warps=1,
        num_stages=1,
        constants=dict(BLOCK=8),
    )


def test_an_array_updated_in_place():
    x, y = jnp.arange(16.0), jnp.ones(16)
    with eqx_attn.interpret():
        count, changed = negate(x, y)
    inside = (x >= 4) & (x < 12)
    np.testing.assert_array_equal(changed, np.where(inside, 1 - x, 1))
    np.testing.assert_array_equal(y, 1)
    assert count.tolist() == [8]


def test_an_updated_array_is_aliased_when_lowered():
    with eqx_attn.target("sm_90a"):
        lowered = jax.jit(negate).trace(jnp.arange(16.0), jnp.ones(16)).lower(lowering_platforms=("cuda",))
    assert re.search(r"output_tuple_indices = \[1\],\s*operand_index = 1", lowered.as_text())


def test_packed_gradients_are_written_into_one_buffer():
    def gradient(qkv):
        return jax.grad(lambda x: eqx_attn.attention_qkvfused(x, kv_heads=1, mask="causal").sum())(qkv)

    with eqx_attn.target("sm_90a"):
        lowered = jax.jit(gradient).trace(jnp.ones((1, 64, 4, DIM), jnp.bfloat16)).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert text.count("#stablehlo.output_operand_alias<") == 1
    assert "concatenate" not in text and "slice" not in text
