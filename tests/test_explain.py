"""The report on a call: it names what `attention` would run, counts what the kernels visit, and runs nothing."""

import contextlib
import doctest
import functools
import importlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_attn
from eqx_attn import Causal, explain, Segments, SlidingWindow
from eqx_attn._block_states import Band, block_states
from eqx_attn._explain import _tokens
from eqx_attn._operands import Tile
from eqx_attn._serve import operands_for, Options, prepare, sizes_of
from eqx_attn._summaries import block_summary, visible_blocks, visited_ranges
from eqx_attn._visits import segment_kv_visits, segment_q_visits


def _shapes(q_seq=4096, kv_seq=None, heads=(16, 4), dim=128, batch=(2,), dtype=jnp.bfloat16, layout="bshd"):
    def shape(seq, heads):
        return (*batch, seq, heads, dim) if layout == "bshd" else (*batch, heads, seq, dim)

    query = jax.ShapeDtypeStruct(shape(q_seq, heads[0]), dtype)
    key = jax.ShapeDtypeStruct(shape(kv_seq or q_seq, heads[1]), dtype)
    return query, key, key


@pytest.fixture(autouse=True)
def _nothing_runs(monkeypatch):
    """No kernel is loaded, and nothing is compiled."""

    def refuse(*_):
        raise AssertionError("explain loaded a kernel")

    monkeypatch.setattr("eqx_attn._vjp.load_kernel", refuse)


@contextlib.contextmanager
def _no_compilation():
    compiled = []

    def listen(event, *_, **__):
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not compiled


@pytest.mark.smoke
@pytest.mark.parametrize(
    "device, kernel", [("sm_90a", "triton/bshd_causal_qk128_v128"), ("v6e", "pallas_tpu/bshd_causal_qk128_v128")]
)
def test_names_the_kernel_and_its_blocks(device, kernel):
    with _no_compilation():
        report = explain(*_shapes(), mask=Causal(), device=device)
    assert report.kernel == kernel and report.implementation == kernel.split("/")[0] and report.checked_in
    backward = ["dq, dk, dv"] if device == "v6e" else ["dq", "dk, dv"]
    assert [part.name for part in report.passes] == ["forward", *backward]
    for part in report.passes:
        q_start = np.arange(0, 4096, part.tile.block_q)[:, None]
        kv_start = np.arange(0, 4096, part.tile.block_kv)
        seen = kv_start <= q_start + part.tile.block_q - 1
        whole = kv_start + part.tile.block_kv - 1 <= q_start
        assert (part.blocks.visited, part.blocks.total) == (seen.sum(), seen.size)
        assert part.blocks.masked == (seen & ~whole).sum() and part.blocks.examples == 1
    assert f"{kernel} (checked in)" in " ".join(str(report).split()) and "masked" in str(report)


def test_on_a_cpu_xla_serves_and_the_kernels_say_why_not():
    report = explain(*_shapes(), mask="causal")
    if jax.default_backend() != "cpu":
        pytest.skip("another device's default")
    assert report.implementation == "xla" and report.kernel is None and report.checked_in is None
    assert {part.blocks.visited for part in report.passes} == {36} and report.passes[0].blocks.total == 64
    assert "served by         xla" in str(report)
    assert "needs a TPU" in report.others["pallas_tpu"][0] and "needs an NVIDIA GPU" in report.others["triton"][0]
    assert "needs an NVIDIA GPU" in report.others["gluon_hopper"][0] and "also serves" in report.others["reference"][0]


def test_a_kernel_that_is_not_checked_in_is_rendered_on_demand():
    report = explain(*_shapes(dim=96), device="sm_80")
    assert report.kernel == "triton/bshd_full_qk96_v96" and report.checked_in is False
    assert "rendered on demand" in str(report)


def test_copies():
    assert explain(*_shapes(dim=64), device="sm_90a").copies == "none"
    assert "transposed to bhsd" in explain(*_shapes(dim=64), device="v5e").copies
    assert "reshape" in explain(*_shapes(dim=128), device="v5e").copies
    assert "backward, lse and the sums of out * dout too" in explain(*_shapes(dim=128), device="v6e").copies
    assert explain(*_shapes(dim=64, layout="bhsd"), layout="bhsd", device="v5e").copies == "none"


def test_an_implementation_that_cannot_serve_is_reported():
    report = explain(*_shapes(dim=60, dtype=jnp.float16), implementation="pallas_tpu", device="v6e")
    assert report.implementation is None and report.passes == ()
    reasons = " ".join(report.others["pallas_tpu"])
    assert "float16" in reasons and "multiples of 8" in reasons
    assert "attention raises" in str(report) and reasons.split(";")[0] in " ".join(str(report).split())
    assert max(map(len, str(report).splitlines())) <= 80


def test_a_default_that_falls_back_says_why_without_a_warning():
    report = explain(*_shapes(dim=60), device="sm_90a")
    assert report.implementation == "xla" and "multiples of 8" in report.others["triton"][0]


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_implementations_without_kernels(implementation):
    report = explain(*_shapes(), implementation=implementation, device="sm_90a")
    assert report.implementation == implementation and report.kernel is None
    assert "also serves" in report.others["triton"][0]


def test_options_are_named_and_choose_the_kernel():
    options = dict(
        bias=jnp.zeros((1, 1)), sinks=jnp.zeros(16), softcap=30, dropout=eqx_attn.Dropout(0.1, jax.random.key(0))
    )
    mask = eqx_attn.BlockSparse(np.ones((32, 32), bool)) & Causal()
    report = explain(*_shapes(), mask=mask, **options, return_max_logit=True, device="sm_90a")
    assert report.kernel == "triton/bshd_causal_qk128_v128_blocks_bias_softcap_sinks_dropout_maxlogit"
    assert "a map of blocks, with a bias, with a softcap, with sinks, with dropout" in " ".join(str(report).split())
    assert report.passes[0].blocks.visited is None


def test_unknown_segments_depend_on_the_ids():
    ids = jax.ShapeDtypeStruct((2, 4096), jnp.int32)
    mask = eqx.filter_eval_shape(Segments, ids) & Causal()
    report = explain(*_shapes(), mask=mask, device="v6e")
    assert report.kernel == "pallas_tpu/bshd_causal_qk128_v128_segments"
    assert report.passes[0].blocks.visited is None and "depends on values" in " ".join(str(report).split())


def test_inside_a_traced_function():
    known = Segments(np.repeat(np.arange(1, 5), 1024))
    reports = []

    @jax.jit
    def step(query, ids):
        reports.append(explain(query, query, query, mask=Segments(ids), device="sm_90a"))
        reports.append(explain(query, query, query, mask=known, device="sm_90a"))
        return query

    jax.eval_shape(step, _shapes()[0], jax.ShapeDtypeStruct((4096,), jnp.int32))
    assert reports[0].passes[0].blocks.visited is None
    blocks = reports[1].passes[0].blocks
    assert blocks.visited == blocks.total // 4 and blocks.examples == 2 and blocks.masked == 0
    assert f"{blocks.visited} of {blocks.total} over 2 examples" in " ".join(str(reports[1]).split())


@functools.cache
def _ids(seq, number, seed):
    """Documents in order in one row, in any order in the other, with padding."""
    ids = np.random.default_rng(seed).integers(0, number + 1, (2, seq))
    ids[0] = np.sort(ids[0])
    return ids


@pytest.mark.parametrize("bands", [(), (Causal("bottom_right"),), (SlidingWindow(9, 3),), (SlidingWindow(5, None),)])
@pytest.mark.parametrize("number", [1, 3, 40])
def test_segments_are_counted_as_the_kernels_count(bands, number):
    """The numpy counts against the functions that the kernels run."""
    q_seq, kv_seq, tile = 70, 101, Tile(8, 16)
    segments = Segments(_ids(q_seq, number, 0), _ids(kv_seq, number, 1))
    mask = functools.reduce(lambda a, b: a & b, bands, segments)
    query, key, value = _shapes(q_seq, kv_seq)
    request, plan = prepare(sizes_of(query, key, value, "bshd"), "bshd", Options(mask))
    operands = operands_for(plan, 1.0)
    band, tokens = Band(operands.lower, operands.upper), _tokens(plan.segments) if plan.segments else None
    bounds = dict(lower=operands.lower, upper=operands.upper)
    for kernel, expected in (
        ("forward", segment_kv_visits(plan.segments, 8, 16, **bounds).states()),
        ("dq, dk, dv", segment_q_visits(plan.segments, 8, 16, **bounds).states().swapaxes(1, 2)),
    ):
        found = block_states("pallas_tpu", kernel, tile, request, band, tokens)
        np.testing.assert_array_equal(found, expected)
    for kernel in ("dq", "dk, dv"):
        found = block_states("triton", kernel, tile, request, band, tokens)
        np.testing.assert_array_equal(found, _triton_states(plan, operands, tile, "kv" if kernel == "dk, dv" else "q"))


def _triton_states(plan, operands, tile, of):
    summaries = (
        block_summary(plan.segments.q_ids, plan.segments.q_positions, tile.block_q),
        block_summary(plan.segments.kv_ids, plan.segments.kv_positions, tile.block_kv),
    )
    seen, _ = visible_blocks(*summaries, operands.lower, operands.upper)
    seen = np.asarray(seen if of == "q" else seen.swapaxes(1, 2))
    ranges = np.asarray(visited_ranges(*summaries, operands.lower, operands.upper, of=of))[..., None]
    block = np.arange(seen.shape[-1])
    assert not (seen & ((block < ranges[:, :, 0]) | (block >= ranges[:, :, 3]))).any()
    whole = (block >= ranges[:, :, 1]) & (block < ranges[:, :, 2])
    states = np.where(seen | whole, np.where(whole, 2, 1), 0)
    return states if of == "q" else states.swapaxes(1, 2)


def test_large_tables_of_segments_have_joined_blocks():
    ids = np.arange(128 * 300) // 1000 + 1
    segments, tile = Segments(ids), Tile(128, 128)
    request, plan = prepare(sizes_of(*_shapes(len(ids), batch=(1,)), "bshd"), "bshd", Options(segments))
    tokens = _tokens(plan.segments)
    visits = segment_kv_visits(plan.segments, 128, 128)
    assert visits.join > 1
    found = block_states("pallas_tpu", "forward", tile, request, Band(None, None), tokens)
    np.testing.assert_array_equal(found, visits.states())


@pytest.mark.parametrize("implementation", ["triton", "pallas_tpu"])
@pytest.mark.parametrize("mask", [Causal(), Causal("bottom_right"), SlidingWindow(30, 5), SlidingWindow(0, None)])
@pytest.mark.parametrize("kernel", ["forward", "dk, dv"])
def test_bands_are_counted_with_ragged_ends(implementation, mask, kernel):
    """Every visible pair is in a visited block, blocks without a mask are whole, and no row of blocks has idle ones."""
    q_seq, kv_seq, tile = 100, 150, Tile(16, 32)
    request, plan = prepare(sizes_of(*_shapes(q_seq, kv_seq), "bshd"), "bshd", Options(mask))
    operands = operands_for(plan, 1.0)
    states = block_states(implementation, kernel, tile, request, Band(operands.lower, operands.upper), None)
    distance = np.arange(160) - np.arange(112)[:, None]
    lower, upper = (-np.inf if plan.lower is None else plan.lower), (np.inf if plan.upper is None else plan.upper)
    visible = (lower <= distance) & (distance <= upper)
    visible[q_seq:], visible[:, kv_seq:] = False, False
    by_block = visible.reshape(7, 16, 5, 32).transpose(0, 2, 1, 3).reshape(7, 5, -1)
    assert states.shape == (1, 7, 5)
    assert (states[0][by_block.any(-1)] > 0).all()
    # The last rows of blocks may have tails, which the kernels compute and throw away.
    inner = by_block[:-1, :-1], states[0, :-1, :-1]
    np.testing.assert_array_equal(inner[1] == 2, inner[0].all(-1))
    np.testing.assert_array_equal(inner[1] > 0, inner[0].any(-1))


def test_windows_are_put_in_words():
    words = explain(*_shapes(), mask=SlidingWindow(256, None), device="v6e").call
    assert "-256 <= key position - query position" in words and str(2**30) not in words
    assert "query [2,4096,16,128]" in words and "bfloat16" in words


@pytest.mark.parametrize(
    "strategy, order, visited, masked",
    [
        (
            "ring",
            "contiguous",
            3 * 64 + 36,
            8,
        ),  # the last device: three whole shares of 8 x 8 blocks, and half of its own
        ("ring", "dual_chunk", 4 * 32 + 4, 8),
        ("all_gather", "dual_chunk", 4 * 32 + 4, 8),  # no more masked ones: keys lie in their original order
        ("all_gather", "contiguous", 3 * 64 + 36, 8),
        ("all_to_all", "contiguous", 32 * 33 // 2, 32),
    ],
)
def test_contexts_are_counted_on_the_busiest_device(strategy, order, visited, masked):
    mesh = jax.sharding.AbstractMesh((4,), ("context",), axis_types=(jax.sharding.AxisType.Explicit,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "context"))
    query, key, value = (
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in _shapes(2048, heads=(8, 4), batch=(1,))
    )
    context = eqx_attn.ContextParallel("context", strategy, order)
    report = explain(query, key, value, mask=Causal(), context=context, device="sm_90a")
    assert report.kernel == "triton/bshd_causal_qk128_v128_segments"
    forward = report.passes[0]
    assert (forward.tile.block_q, forward.tile.block_kv) == (64, 64)
    assert (forward.blocks.visited, forward.blocks.masked) == (visited, masked)
    assert f"{strategy} over 4 devices of axis 'context', order {order}" in " ".join(str(report).split())
    assert "all scores in one place" in report.others["reference"][0]


def test_contexts_without_positions_and_with_unknown_ones():
    query, key, value = _shapes(1024, batch=(1,))
    context = eqx_attn.ContextParallel("context")
    with pytest.raises(ValueError, match="no mesh here has an axis 'context'"):
        explain(query, key, value, context=context)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((2,), ("context",))):
        full = explain(query, key, value, context=context, device="sm_90a")
        mask = eqx.filter_eval_shape(Segments, jax.ShapeDtypeStruct((1, 1024), jnp.int32))
        unknown = explain(query, key, value, mask=mask, context=context, device="sm_90a")
        reference = explain(query, key, value, context=context, implementation="reference")
    blocks, of_unknown = full.passes[0].blocks, unknown.passes[0].blocks
    assert blocks.visited == blocks.total == 2 * 4 * 4  # two hops, 512 tokens in blocks of 128
    assert of_unknown.visited is None and of_unknown.total == 2 * 8 * 8  # of 64
    assert unknown.context == full.context
    assert reference.implementation is None


def test_interpreting_is_said():
    with eqx_attn.interpret():
        report = explain(*_shapes(dtype=jnp.float32), implementation="triton")
    assert report.implementation == "triton" and "interpreted" in report.device


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (dict(layout="bsdh"), ValueError, "layout is 'bsdh'"),
        (dict(scale="8"), TypeError, "scale is a str"),
        (dict(mask="windowed"), ValueError, "mask is 'windowed'"),
        (dict(mask=Segments(np.ones(9, np.int32))), ValueError, "but query has 4096 tokens"),
        (dict(implementation="cudnn"), ValueError, "implementation is 'cudnn'"),
        (dict(device="h100"), ValueError, "unknown device 'h100'"),
    ],
)
def test_refusals_are_those_of_attention(arguments, error, message):
    with pytest.raises(error) as refused:
        explain(*_shapes(), **arguments)
    assert message in str(refused.value)
    if "device" not in arguments:
        with pytest.raises(error) as theirs:
            jax.eval_shape(functools.partial(eqx_attn.attention, **arguments), *_shapes())
        assert str(refused.value) == str(theirs.value)


def test_shapes_are_checked():
    query, _, _ = _shapes(heads=(3, 2))
    with pytest.raises(ValueError, match="multiple of the number of key/value heads"):
        explain(query, *_shapes(heads=(3, 2))[1:])


def test_the_check_for_compilation_can_fail():
    with pytest.raises(AssertionError, match="backend_compile"), _no_compilation():
        jax.jit(lambda x: x * 2.5 + 1)(jnp.ones(7))


def test_the_example_of_the_docstring_runs():
    results = doctest.testmod(importlib.import_module("eqx_attn._explain"))
    assert results.attempted > 3 and results.failed == 0
