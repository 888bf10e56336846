"""CASES.md by number: what went wrong for users of other libraries, and must hold here.

Tested elsewhere, where their module is: 4, 5 and 6 (gradients of a bias) in test_options.py, 15 (packed arrays) in
test_packed.py, 27 in test_rotary.py, 28 in test_cache.py and test_nn.py. Of a later issue, since what it needs does not exist
yet: 7 (sharding). `-k case_` runs them all.
"""

import dataclasses
import math
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from test_transforms import equations

import eqx_attn
from eqx_attn import attention, Causal, Full, Segments, SlidingWindow
from eqx_attn._codegen import REPOSITORY
from eqx_attn._operands import Tile, Tiles
from eqx_attn._serve import operands_for, Options, prepare, sizes_of

IMPLEMENTATIONS = ("xla", "triton", "pallas_tpu")


SEQ = 50
"""Of most cases: calls that differ only in what their arrays hold are compiled once."""


def triton_tiles(*_):
    return Tiles(Tile(32, 16), Tile(16, 32), Tile(16, 32))


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several blocks even of short sequences."""
    monkeypatch.setattr(eqx_attn._resolve, "XLA_TILE", Tile(32, 32))
    monkeypatch.setattr(eqx_attn._tuning, "_triton_tiles", triton_tiles)


def results(inputs, mask, implementation="xla", **options):
    """Outputs and gradients; kernels run interpreted, products at the highest precision."""
    if implementation == "triton":
        pytest.importorskip("triton")
    with jax.default_matmul_precision("highest"):
        if implementation == "xla":
            return oracle.results(inputs, mask, implementation=implementation, **options)
        with eqx_attn.interpret():
            return oracle.results(inputs, mask, implementation=implementation, **options)


def check(inputs, mask, implementation="xla", **options):
    found = results(inputs, mask, implementation, **options)
    oracle.assert_matches(found, oracle.expected(inputs, mask))
    return found


def small(key, q_seq, kv_seq, **options):
    return oracle.random_inputs(key, q_seq, kv_seq, **(dict(heads=(2, 1), dims=(16, 16), batch=(1,)) | options))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_case_01_vmap_over_segment_ids(implementation, random_key):
    """TransformerEngine 2685: `vmap` over arrays and ids; positions are made inside (all subsets: test_transforms.py)."""
    inputs = small(random_key, 20, 20, batch=(3,), heads=(1, 1))
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 3, (3, 20)))

    def call(query, key, value, ids):
        return attention(query, key, value, mask=Segments(ids) & Causal(), implementation=implementation)

    with eqx_attn.interpret(), jax.default_matmul_precision("highest"):
        mapped = jax.vmap(call)(*inputs.arrays, ids)
    wanted = oracle.expected(inputs, Segments(ids) & Causal())
    oracle.assert_matches(dict(out=mapped), wanted, ["out"])


def test_case_02_vmap_of_a_packed_call(random_key):
    """TransformerEngine 2545: ids are shared by all examples, or lengths are mapped."""
    inputs = small(random_key, 12, 12, batch=(3,))
    lengths = jnp.array([[4, 5, 3], [12, 0, 0], [1, 1, 2]])
    call = lambda q, k, v, row: attention(q, k, v, mask=Segments.from_lengths(row, 12))
    mapped = jax.vmap(call)(*inputs.arrays, lengths)
    wanted = oracle.expected(inputs, Segments.from_lengths(lengths, 12))
    oracle.assert_matches(dict(out=mapped), wanted, ["out"])
    shared = jax.vmap(lambda q, k, v: call(q, k, v, lengths[0]))(*inputs.arrays)
    oracle.assert_matches(dict(out=shared), oracle.expected(inputs, Segments.from_lengths(lengths[0], 12)), ["out"])


def test_case_03_the_cotangent_is_not_batched(random_key):
    """jax 38495: `vmap(grad(sum))`; jacrev and every subset are in test_transforms.py."""
    inputs = small(random_key, 9, 9, batch=(3,))
    gradient = jax.grad(lambda *x: attention(*x, mask="causal").sum(), (0, 1, 2))
    mapped = jax.vmap(gradient)(*inputs.arrays)
    uniform = dataclasses.replace(inputs, dout=jnp.ones_like(inputs.dout), dlse=jnp.zeros_like(inputs.dlse))
    oracle.assert_matches(
        dict(zip(("dq", "dk", "dv"), mapped, strict=True)), oracle.expected(uniform, Causal()), ("dq", "dk", "dv")
    )


def test_case_08_a_permuted_gradient_is_seen(random_key):
    """TransformerEngine 3516: the oracle's random cotangent finds gradients that are permuted; a uniform one hides them."""
    inputs = small(random_key, 8, 8)
    found = results(inputs, Full())
    wanted = oracle.expected(inputs, Full())
    for name in ("dq", "dk", "dv"):
        for axis in (1, 2) if name == "dq" else (1,):
            with pytest.raises(AssertionError, match=name):
                oracle.assert_matches({**found, name: np.roll(found[name], 1, axis)}, wanted)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_case_09_different_segments_of_queries_and_keys(implementation, random_key):
    """TransformerEngine 3516: cross-attention of equal lengths whose segments differ."""
    q_ids, kv_ids = [1, 2, 2, 2, 2, 3, 3, 3], [1, 1, 1, 2, 2, 2, 3, 3]
    mask = Segments(np.repeat(q_ids, 5), np.repeat(kv_ids, 5))
    masks = [mask & Causal("bottom_right")]
    if implementation != "pallas_tpu":  # whose interpreter is slow; test_pallas_tpu.py has more
        masks += [mask, mask & Causal()]
    for inner in masks:
        check(small(random_key, 40, 40), inner, implementation)


def test_case_10_a_shard_without_any_token_of_a_segment(random_key):
    """TransformerEngine 3516: what a ring step computes, without the ring: keys in shards, and their results merged."""
    q_ids, kv_ids = np.array([3] * 4 + [1] * 8 + [2] * 4), np.array([1] * 4 + [3] * 4 + [2] * 6 + [1] * 2)
    inputs = small(random_key, 16, 16)
    q_positions, kv_positions = np.arange(16), np.arange(16)

    def part(query, key, value, rows):
        mask = Segments(q_ids, kv_ids[rows], q_positions, kv_positions[rows]) & Causal()
        return attention(query, key[:, rows], value[:, rows], mask=mask, return_lse=True)[:2]

    def sharded(*arrays):
        steps = [part(*arrays, slice(start, start + 4)) for start in range(0, 16, 4)]
        merged = steps[0]
        for step in steps[1:]:
            merged = eqx_attn.merge(*merged, *step)[:2]
        return merged

    @oracle.jit
    def run(arrays, cotangents):
        primal, pull_back = jax.vjp(sharded, *arrays)
        return *primal, *pull_back(cotangents)

    found = dict(zip(oracle.NAMES, run(inputs.arrays, (inputs.dout, inputs.dlse)), strict=True))
    oracle.assert_matches(found, oracle.expected(inputs, Segments(q_ids, kv_ids, q_positions, kv_positions) & Causal()))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_case_11_striped_tokens_with_their_positions(implementation, random_key):
    """TransformerEngine 2523, 2823: permuted tokens, with ids and positions, give the permuted result."""
    seq = 40
    ids = np.repeat([1, 2, 3], [17, 3, 20])
    positions = np.array([*range(17), *range(3), *range(20)])
    order = np.arange(seq).reshape(10, 4).T.reshape(-1)  # striped over 4
    inputs = small(random_key, seq, seq)
    permuted = dataclasses.replace(
        inputs,
        **{name: getattr(inputs, name)[:, order] for name in ("query", "key", "value", "dout")},
        dlse=inputs.dlse[:, :, order],
    )
    mask = Segments(ids[order], q_positions=positions[order]) & SlidingWindow(6, 1)
    found = results(permuted, mask, implementation)
    wanted = oracle.expected(inputs, Segments(ids) & SlidingWindow(6, 1))
    for name in oracle.NAMES:
        value, allowed = (x[:, :, order] if name == "lse" else x[:, order] for x in wanted[name])
        oracle.assert_matches(found, {name: (value, allowed)}, [name])


def stored_elements(function, *arguments):
    """How many elements XLA's program holds besides arguments and results, at most."""
    return jax.jit(function).lower(*arguments).compile().memory_analysis().temp_size_in_bytes // 4


def test_case_12_memory_grows_linearly():
    """TransformerEngine 2522: many segments of many tokens, and no metadata of size seq * seq."""

    def loss(query, key, value, ids):
        mask = Segments(ids) & Causal()
        return attention(query, key, value, mask=mask, implementation="xla").astype(jnp.float32).sum()

    def stored(seq):
        array = jax.ShapeDtypeStruct((1, seq, 1, 8), jnp.float32)
        return stored_elements(
            jax.grad(loss, (0, 1, 2)), array, array, array, jax.ShapeDtypeStruct((1, seq), jnp.int32)
        )

    shorter, longer = stored(2**14), stored(2**16)
    assert longer < 2**16 * 2**16 / 16
    assert longer < 1.1 * 4 * shorter


def test_case_12_kernels_get_metadata_of_linear_size():
    """64k tokens, of which a kernel reads ids, positions and their summaries."""
    pytest.importorskip("triton")
    pytest.importorskip("jax_cuda13_plugin")
    query = jax.ShapeDtypeStruct((1, 2**16, 1, 64), jnp.float16)
    ids = jax.ShapeDtypeStruct((1, 2**16), jnp.int32)

    def call(query, key, value, ids):
        return attention(query, key, value, mask=Segments(ids) & Causal(), implementation="triton")

    with eqx_attn.target("sm_90a"):
        exported = jax.jit(call).trace(query, query, query, ids).lower(lowering_platforms=("cuda",)).as_text()
    (launch,) = (line for line in exported.splitlines() if "triton_kernel_call_ffi" in line)
    shapes = re.findall(r"tensor<((?:\d+x)+)(?:f16|f32|i32)>", launch)
    sizes = [math.prod(int(size) for size in shape.split("x")[:-1]) for shape in shapes]
    assert len(sizes) > 5 and max(sizes) == 2**16 * 64  # the arrays themselves are the largest


METADATA = [Causal("bottom_right"), eqx_attn.Chunked(1000) & SlidingWindow(64, 8), eqx_attn.PrefixLM(16)]


@pytest.mark.parametrize("mask", METADATA, ids=["causal", "chunked window", "prefix"])
def test_case_12_metadata_of_many_segments(mask):
    """64k tokens in 2,000 segments, made of their lengths inside jit: a few numbers for each token, at every step."""
    tokens, lengths = 2**16, jax.ShapeDtypeStruct((2000,), jnp.int32)

    def metadata(lengths):
        segments = Segments.from_lengths(lengths, tokens, lengths, tokens)
        return eqx_attn._plan.plan_mask(segments & mask, (1,), 1, tokens, tokens).segments

    largest = max(
        value.aval.size for equation in equations(jax.make_jaxpr(metadata)(lengths).jaxpr) for value in equation.outvars
    )
    assert largest <= 2 * tokens  # ids of queries and keys together
    compiled = jax.jit(metadata).lower(lengths).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 128 * tokens  # 32 numbers
    sizes = np.random.default_rng(0).multinomial(tokens - 100, np.full(2000, 1 / 2000)).astype(np.int32)
    found = compiled(sizes)
    wanted = np.concatenate([np.arange(size) for size in sizes])
    np.testing.assert_array_equal(found.q_positions[0, :-100], wanted)
    assert (found.q_ids[0, -100:] < 0).all()


def test_a_mask_is_made_without_any_computation():
    """What follows from ids and lengths is computed where a call needs it."""
    million = jax.ShapeDtypeStruct((2**20,), jnp.int32)
    makers = [
        lambda x: Segments(x) & Causal(),
        lambda x: Segments(x, x, x, x),
        lambda x: Segments.from_lengths(x, 2**20) & SlidingWindow(3, 3),
        lambda x: eqx_attn.PrefixLM(x) & eqx_attn.Chunked(5),
    ]
    for make in makers:
        jaxpr = jax.make_jaxpr(lambda x, make=make: jax.tree.leaves(make(x)))(million)
        assert not jaxpr.jaxpr.eqns


def test_layers_share_the_ranks_of_a_mask():
    """Each call computes them; one sort is left in a program of several layers, scanned or not."""
    array, ids = jax.ShapeDtypeStruct((1, 32, 1, 8), jnp.float32), jax.ShapeDtypeStruct((32,), jnp.int32)

    def layer(x, mask):
        return x + attention(x, x, x, mask=mask)

    def unrolled(x, ids):
        mask = Segments(ids) & Causal()
        return layer(layer(x, mask), mask).sum()

    def scanned(x, ids):
        mask = Segments(ids) & Causal()
        return jax.lax.scan(lambda x, _: (layer(x, mask), None), x, length=3)[0].sum()

    for function in (unrolled, scanned):
        text = jax.jit(jax.grad(function)).lower(array, ids).compile().as_text()
        before, _, entry = text.partition("\nENTRY ")
        assert (before.count(" sort("), entry.count(" sort(")) == (0, 1)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_case_13_there_is_no_largest_number_of_segments(implementation, random_key):
    """grain 1000, maxtext 2774: a segment for each token."""
    ids = np.random.default_rng(0).permutation(np.arange(1, SEQ + 1)) * 40_000_000
    inputs = small(random_key, SEQ, SEQ)
    found = check(inputs, Segments(ids), implementation)
    np.testing.assert_allclose(found["out"], inputs.value.repeat(2, 2), rtol=1e-6)  # each sees itself


CASE_14 = [[1, 1, 2, 2, 0, 0], [0, 0, 1, 1], [7, 7, 9, 9, 9, 7], [1, 1, -1, -1]]


@pytest.mark.parametrize(
    "ids, implementation", [(ids, name) for ids in CASE_14 for name in ("xla", "triton")] + [(CASE_14[0], "pallas_tpu")]
)
def test_case_14_ids_name_segments_and_padding(ids, implementation, random_key):
    """TransformerEngine: padding on either side, ids that are not 1, 2, ..., and padding given as -1."""
    ids = np.repeat(ids, -(-SEQ // len(ids)))[:SEQ]
    found = check(small(random_key, SEQ, SEQ), Segments(ids), implementation)
    padding = ids <= 0
    assert (np.isneginf(found["lse"]) == padding).all()
    for name in ("out", "dq", "dk", "dv"):
        assert (found[name][:, padding] == 0).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_case_16_grouped_heads(implementation, random_key):
    """Jax' Pallas kernel: 8 query heads on 2; 8 on 3 is an error naming both."""
    check(small(random_key, 20, 20, heads=(8, 2)), Causal(), implementation)
    arrays = small(random_key, 20, 20, heads=(8, 3)).arrays
    with pytest.raises(ValueError, match="query has 8 heads and key 3"):
        attention(*arrays, implementation=implementation)


@pytest.mark.parametrize("q_seq, kv_seq", [(1, 1), (63, 63), (65, 65), (250, 250), (1, 65), (63, 250)])
@pytest.mark.parametrize("mask", [Full(), Causal()], ids=["full", "causal"])
def test_case_17_ragged_lengths(mask, q_seq, kv_seq, random_key):
    """jax 23819, 27224: lengths that are no multiple of anything (kernels: test_triton_kernels.py, test_pallas_tpu.py)."""
    check(small(random_key, q_seq, kv_seq), mask)


@pytest.mark.parametrize("implementation", ["xla", "pallas_tpu"])
def test_case_17_long_ragged_lengths(implementation, random_key):
    """The largest of them, 1350 x 1777, with the tiles that the TPU kernels have by default."""
    check(small(random_key, 1350, 1777, heads=(1, 1)), Causal("bottom_right"), implementation)


@pytest.mark.parametrize(
    "mask, implementation", [(Full(), "xla"), (Causal(), "xla"), (Full(), "triton"), (Causal(), "pallas_tpu")]
)
def test_case_18_garbage_behind_the_real_keys(mask, implementation, random_key):
    """maxdiffusion 485: 1000.0 in the padding of key and value leaves no trace, to the bit."""
    ids = np.array([1] * 37 + [0] * 13)
    inputs = small(random_key, SEQ, SEQ)
    padding = jnp.asarray(ids == 0)[None, :, None, None]
    filled = dataclasses.replace(
        inputs, key=jnp.where(padding, 1000.0, inputs.key), value=jnp.where(padding, 1000.0, inputs.value)
    )
    clean, dirty = (results(x, Segments(ids) & mask, implementation) for x in (inputs, filled))
    for name in oracle.NAMES:
        np.testing.assert_array_equal(clean[name], dirty[name])
    assert (dirty["dk"][:, 37:] == 0).all() and (dirty["dv"][:, 37:] == 0).all()


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize("q_seq, kv_seq", [(128, 512), (512, 128)])
def test_case_19_causal_between_unequal_lengths(q_seq, kv_seq, alignment, random_key):
    """jax 24491: both alignments; queries before the first key give 0."""
    found = check(small(random_key, q_seq, kv_seq, heads=(1, 1)), Causal(alignment))
    dead = max(q_seq - kv_seq, 0) if alignment == "bottom_right" else 0
    assert (np.isneginf(found["lse"]).sum(), (found["out"] == 0).all((2, 3)).sum()) == (dead, dead)


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize("q_seq, kv_seq", [(16, 64), (64, 16)])
def test_case_19_in_kernels(q_seq, kv_seq, alignment, random_key):
    """The same at a fraction of the lengths, which is blocks enough for the small tiles (TPU: test_pallas_tpu.py)."""
    check(small(random_key, q_seq, kv_seq), Causal(alignment), "triton")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_case_20_a_row_that_sees_no_key(implementation, random_key):
    """equinox 274, pytorch 41508: out 0, lse -inf, all gradients 0 and finite, also through the lse."""
    q_ids, kv_ids = np.array([1] * 20 + [5] * 20), np.array([1] * 25 + [6] * 15)
    bands = (Causal("bottom_right"),) if implementation == "pallas_tpu" else (Full(), Causal())
    for band in bands:
        found = check(small(random_key, 40, 40), Segments(q_ids, kv_ids) & band, implementation)
        assert np.isneginf(found["lse"][:, :, 20:]).all()
        for name, rows in (("out", 20), ("dq", 20), ("dk", 25), ("dv", 25)):
            assert (found[name][:, rows:] == 0).all()


X64 = """
import jax, jax.numpy as jnp, numpy as np
import eqx_attn, oracle
assert jnp.zeros(()).dtype == jnp.float64
implementations = {"float32": ["xla", "triton", "pallas_tpu"], "float16": ["xla", "triton"], "float64": [None]}
masks = eqx_attn.Segments(np.arange(20) // 7, np.arange(25) // 9) & eqx_attn.Causal(), eqx_attn.Causal("bottom_right")
for dtype in implementations:
    for name in implementations[dtype]:
        for mask in masks[:1] if name == "pallas_tpu" else masks:  # whose interpreter is slow
            inputs = oracle.random_inputs(jax.random.key(0), 20, 25, heads=(2, 1), batch=(1,), dtype=dtype)
            with eqx_attn.interpret(), jax.default_matmul_precision("highest"):
                oracle.check(inputs, mask, implementation=name)
print("all right")
"""


@pytest.mark.smoke
def test_case_21_x64():
    """jax 18847: x64 mode, in a process of its own, of every implementation."""
    pytest.importorskip("triton")
    environment = os.environ | dict(
        JAX_ENABLE_X64="1",
        JAX_NUMPY_DTYPE_PROMOTION="strict",
        JAX_NUMPY_RANK_PROMOTION="raise",
        PYTHONPATH=os.pathsep.join([str(REPOSITORY), os.path.dirname(oracle.__file__)]),
    )
    done = subprocess.run([sys.executable, "-c", X64], env=environment, capture_output=True, text=True, timeout=400)
    assert done.stdout == "all right\n", done.stderr[-3000:]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_case_22_float32_is_computed_in_float32(implementation, random_key):
    """jax 24047, 23182: near 1e-6 at the highest precision."""
    inputs = small(random_key, 60, 60)
    found = results(inputs, Causal(), implementation)
    wanted = oracle.expected(inputs, Causal())
    oracle.assert_matches(found, wanted)
    for name in ("out", "lse"):
        assert abs(found[name] - wanted[name][0]).max() < 4e-6  # values reach 4, where a unit in the last place is 5e-7


@pytest.mark.parametrize("precision, rounding", [(None, 2**-11), ("high", 2**-20), ("highest", None)])
def test_case_22_at_lower_precision(precision, rounding, random_key):
    """Products round their factors to tf32 by default (10 bits); at `high` three of them make 20 bits or more."""
    pytest.importorskip("triton")
    inputs = small(random_key, 60, 60)
    with eqx_attn.interpret(), jax.default_matmul_precision(precision):
        found = oracle.results(inputs, Causal(), implementation="triton")
    oracle.assert_matches(found, oracle.expected(inputs, Causal(), product_eps=rounding))


CASE_23 = Segments(np.arange(20) // 6, np.arange(30) // 8) & SlidingWindow(4, 2)


def test_case_23_every_path_has_the_mask(random_key):
    """TransformerEngine 1524: what is chosen for a call gives the oracle's answer, also where no kernel serves the mask."""
    inputs = small(random_key, 20, 30)
    dense = jnp.asarray(oracle.visible(CASE_23, oracle.score_shape(inputs)))
    for mask in (CASE_23, eqx_attn._masks.Dense(dense)):
        for implementation in (None, "xla", "reference"):
            oracle.check(inputs, mask, implementation=implementation)


@pytest.mark.parametrize("device", ["sm_90a", "v6e"])
def test_case_23_the_kernel_chosen_for_a_device_has_the_mask(device, random_key):
    """As before: ids, and both sides of the window, reach the kernel."""
    if device == "sm_90a":
        pytest.importorskip("triton")
    with eqx_attn.target(device):
        request, plan = prepare(sizes_of(*small(random_key, 20, 30).arrays, "bshd"), "bshd", Options(CASE_23))
        spec = dict(eqx_attn._resolve.resolve(request, None).routes)["cuda" if device == "sm_90a" else "tpu"].spec
    operands = operands_for(plan, 0.25)
    assert (spec.mask, spec.segments, operands.lower, operands.upper) == ("window", True, -4, 2)
    assert operands.segments.q_ids.shape == (1, 20)


def test_case_24_no_kernel_says_which_argument_and_why():
    """TransformerEngine 568: per backend, the argument, what was found, and the way out."""
    query = jax.ShapeDtypeStruct((1, 16, 2, 20), jnp.float16)
    mask = jnp.ones((16, 16), bool)
    for implementation, dtypes in (("triton", None), ("pallas_tpu", "query, key and value are float16")):
        with pytest.raises(ValueError) as caught, eqx_attn.interpret():
            jax.eval_shape(lambda x, name=implementation: attention(x, x, x, mask=mask, implementation=name), query)
        message = str(caught.value)
        assert message.startswith(f"implementation='{implementation}' cannot serve this call:\n")
        assert "qk_dim is 20; kernels exist for multiples of 8" in message and "v_dim is 20" in message
        assert (dtypes is None) or dtypes in message
        assert "implementation=None takes the fastest that can" in message


def test_case_25_windows_count_inclusively(random_key):
    """Megatron-Bridge 2656: `SlidingWindow(0, 0)` sees itself; W=1 sees two."""
    inputs = small(random_key, 9, 9)
    found = check(inputs, SlidingWindow(0, 0))
    np.testing.assert_allclose(found["out"], inputs.value.repeat(2, 2), rtol=1e-6)
    same = dataclasses.replace(inputs, query=jnp.zeros_like(inputs.query))  # equal weights: the lse counts keys
    found = results(same, SlidingWindow(1, 0))
    np.testing.assert_allclose(np.exp(found["lse"]), [[[1] + [2] * 8] * 2], rtol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_case_26_both_sides_of_a_window_under_bottom_right(implementation, random_key):
    """TransformerEngine: the right side was dropped."""
    inputs = small(random_key, 20, 37)
    check(inputs, SlidingWindow(3, 5, "bottom_right"), implementation)
    same = dataclasses.replace(inputs, query=jnp.zeros_like(inputs.query))
    found = results(same, SlidingWindow(3, 5, "bottom_right"), implementation)
    np.testing.assert_allclose(np.exp(found["lse"][0, 0, :15]), 9, rtol=1e-5)
    np.testing.assert_allclose(np.exp(found["lse"][0, 0, -5:]), [8, 7, 6, 5, 4], rtol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_case_29_packed_documents_do_not_see_each_other(implementation, random_key):
    """maxtext 4476: other tokens in one document change nothing in another, to the bit."""
    ids = np.repeat([1, 2, 3], [13, 20, 17])
    inputs, other = (small(key, SEQ, SEQ) for key in jax.random.split(random_key))
    second = jnp.asarray(ids == 2)[None, :, None, None]
    changed = dataclasses.replace(
        inputs, **{n: jnp.where(second, getattr(other, n), getattr(inputs, n)) for n in ("query", "key", "value")}
    )
    before, after = (results(x, Segments(ids) & Causal(), implementation) for x in (inputs, changed))
    for name in ("out", "dq", "dk", "dv"):
        np.testing.assert_array_equal(before[name][:, ids != 2], after[name][:, ids != 2])
        assert (before[name][:, ids == 2] != after[name][:, ids == 2]).any()


@pytest.mark.parametrize("package, found", [("triton", "4.0.0"), ("jax", "0.13.1")])
def test_case_30_other_versions(package, found, monkeypatch):
    """jax-triton 365, 336: the error names the versions that work."""
    module = pytest.importorskip(package)
    monkeypatch.setattr(module, "__version__", found)
    with pytest.raises(
        ImportError, match=rf"{package} {found} is not known .*triton 3\.9\.0, jax 0\.11\.2 or 0\.12\.0\.1"
    ):
        eqx_attn._triton_versions.require_triton()


def test_every_case_of_this_issue_has_a_test():
    numbers = {int(name.split("_")[2]) for name in globals() if name.startswith("test_case_")}
    elsewhere, later = {4, 5, 6, 15, 27, 28}, {7}
    assert numbers | elsewhere | later == set(range(1, 31)) and not numbers & later
