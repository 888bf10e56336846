"""The function: every implementation that runs anywhere against the float64 oracle, and what it refuses."""

import contextlib
import importlib.util

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import eqx_attn
from eqx_attn import _resolve, attention, Causal, Full, merge, Segments, SlidingWindow
from eqx_attn._operands import Tile

Q_SEQ, KV_SEQ = 21, 34
IMPLEMENTATIONS = ("xla", "reference")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks along both axes, with a rest."""
    monkeypatch.setattr(_resolve, "XLA_TILE", Tile(8, 16))


def ids(seed, seq):
    return np.random.default_rng(seed).integers(0, 4, (2, seq))


def dense(*shape):
    return jnp.asarray(np.random.default_rng(0).random(shape) < 0.4)


MASKS = {
    "full": Full(),
    "causal": Causal(),
    "causal bottom right": Causal("bottom_right"),
    "window": SlidingWindow(5, 2),
    "left window": SlidingWindow(9, None, "bottom_right"),
    "right window": SlidingWindow(None, 3),
    "two windows": SlidingWindow(9, 3) & SlidingWindow(4, 12, "bottom_right"),
    "segments": Segments(ids(0, Q_SEQ), ids(1, KV_SEQ)),
    "segments causal": Segments(ids(0, Q_SEQ), ids(1, KV_SEQ)) & Causal(),
    "segments window": SlidingWindow(2, 1, "bottom_right") & Segments(ids(0, Q_SEQ), ids(1, KV_SEQ)),
    "positions": Segments(ids(0, Q_SEQ), ids(1, KV_SEQ), ids(2, Q_SEQ), ids(3, KV_SEQ)) & Causal(),
    "dense": eqx_attn._masks.Dense(dense(2, 4, Q_SEQ, KV_SEQ)),
    "dense key padding": eqx_attn._masks.Dense(dense(2, 1, 1, KV_SEQ)),
    "dense and causal": Causal() & dense(Q_SEQ, KV_SEQ),
}


REFERENCE_MASKS = ("full", "two windows", "segments window", "positions", "dense and causal")


@pytest.mark.smoke
@pytest.mark.parametrize(
    "mask, implementation", [(mask, "xla") for mask in MASKS] + [(mask, "reference") for mask in REFERENCE_MASKS]
)
def test_every_mask(mask, implementation, random_key):
    """What the reference sees of each of them, and of any composition, is in test_masks."""
    inputs = oracle.random_inputs(random_key, Q_SEQ, KV_SEQ)
    oracle.check(inputs, MASKS[mask], implementation=implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("mask", ["causal", "segments window"])
def test_half_precision(mask, dtype, implementation, random_key):
    inputs = oracle.random_inputs(random_key, Q_SEQ, KV_SEQ, dtype=dtype)
    oracle.check(inputs, MASKS[mask], implementation=implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("mask", ["full", "segments causal"])
def test_float64(mask, implementation, random_key):
    with jax.enable_x64(True):
        inputs = oracle.random_inputs(random_key, Q_SEQ, KV_SEQ, dtype="float64")
        oracle.check(inputs, MASKS[mask], implementation=implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_layout_bhsd(implementation, random_key):
    inputs = oracle.random_inputs(random_key, Q_SEQ, KV_SEQ, layout="bhsd")
    oracle.check(inputs, MASKS["segments causal"], implementation=implementation)
    oracle.check(inputs, MASKS["dense"], implementation=implementation)


@pytest.mark.parametrize("heads, dims", [((1, 1), (5, 3)), ((3, 3), (64, 64)), ((8, 2), (8, 24)), ((6, 1), (24, 8))])
def test_heads_and_dims(heads, dims, random_key):
    """`xla` has no multiple of 8 to keep to."""
    inputs = oracle.random_inputs(random_key, Q_SEQ, KV_SEQ, heads=heads, dims=dims)
    oracle.check(inputs, SlidingWindow(5, 2), implementation="xla")


@pytest.mark.parametrize("batch", [(), (1,), (2, 3)])
def test_batch_axes(batch, random_key):
    inputs = oracle.random_inputs(random_key, 9, 9, batch=batch)
    for mask in (Causal(), Segments(ids(0, 9)[0])):  # ids without the batch's axes are the same for each
        oracle.check(inputs, mask, implementation="xla")


def test_masks_broadcast_over_batch_axes(random_key):
    inputs = oracle.random_inputs(random_key, 9, 9, batch=(3, 2))
    oracle.check(inputs, Segments(ids(0, 9)) & Causal(), implementation="xla")  # [2, 9] for [3, 2, ...]
    oracle.check(inputs, Segments(ids(0, 9)[0][None, None], ids(1, 9)), implementation="xla")
    visible = dense(3, 1, 1, 9, 9)
    oracle.check(inputs, eqx_attn._masks.Dense(visible), implementation="xla")


@pytest.mark.parametrize(
    "scale, implementation",
    [(scale, "xla") for scale in (-0.7, 0.0, 0, 2, 1e-3)] + [(scale, "reference") for scale in (-0.7, 0)],
)
def test_scale(scale, implementation, random_key):
    inputs = oracle.random_inputs(random_key, Q_SEQ, KV_SEQ)
    oracle.check(inputs, Causal(), scale=scale, implementation=implementation)


def test_large_scores_do_not_overflow(random_key):
    """Scores in the thousands: each row is its largest key, and the softmax must subtract it."""
    inputs = oracle.random_inputs(random_key, Q_SEQ, KV_SEQ)
    for implementation in IMPLEMENTATIONS:
        found = oracle.results(inputs, Full(), scale=500.0, implementation=implementation)
        assert all(np.isfinite(found[name]).all() for name in oracle.NAMES)
        np.testing.assert_allclose(found["lse"], oracle.expected(inputs, Full(), 500.0)["lse"][0], rtol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_dead_rows(implementation, random_key):
    inputs = oracle.random_inputs(random_key, 8, 8)
    mask = Segments([0, 0, 1, 1, 5, 2, 2, -3], [1, 1, 0, 0, 2, 2, 7, -3])
    found = oracle.results(inputs, mask, implementation=implementation)
    dead, unseen = [0, 1, 4, 7], [2, 3, 6, 7]
    assert (found["lse"][:, :, dead] == -np.inf).all() and np.isfinite(found["lse"][:, :, [2, 3, 5, 6]]).all()
    for name, rows in (("out", dead), ("dq", dead), ("dk", unseen), ("dv", unseen)):
        assert (found[name][:, rows] == 0).all(), name
    oracle.assert_matches(found, oracle.expected(inputs, mask))


def test_dead_rows_with_garbage_cotangents(random_key):
    """What flows back into a dead row is often inf or NaN (from its lse of -inf), and must stop there."""
    inputs = oracle.random_inputs(random_key, 4, 4)

    def call(*arrays):
        return attention(*arrays, mask=Segments([0, 1, 1, 9], [1, 1, 2, 2]), implementation="xla", return_lse=True)

    (_, lse, _), pull_back = jax.vjp(call, *inputs.arrays)
    dead = np.isneginf(np.asarray(lse))
    dlse = jnp.where(dead, jnp.nan, inputs.dlse)
    found = pull_back(eqx_attn.AttentionOutput(inputs.dout, dlse))
    clean = pull_back(eqx_attn.AttentionOutput(inputs.dout, jnp.where(dead, 0, inputs.dlse)))
    for got, wanted in zip(found, clean, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_return_lse(random_key):
    query, key, value = oracle.random_inputs(random_key, 6, 6).arrays
    alone = attention(query, key, value)
    both = attention(query, key, value, return_lse=True)
    assert (
        isinstance(both, eqx_attn.AttentionOutput)
        and both._fields == ("out", "lse", "max_logit")
        and both.max_logit is None
    )
    assert both.lse.shape == (2, 4, 6) and both.lse.dtype == jnp.float32
    np.testing.assert_array_equal(alone, both.out)


def test_the_gradient_of_the_lse_is_the_softmax(random_key):
    query, key, value = oracle.random_inputs(random_key, 6, 7, heads=(1, 1), batch=()).arrays
    loss = lambda key: attention(query, key, value, scale=1.0, implementation="xla", return_lse=True).lse[0, 3]
    weights = jax.nn.softmax(query[3, 0] @ key[:, 0].T)
    np.testing.assert_allclose(jax.grad(loss)(key)[:, 0], weights[:, None] * query[3, 0][None], atol=1e-6)


def test_masks_given_as_a_name_or_an_array(random_key):
    query, key, value = oracle.random_inputs(random_key, 6, 6).arrays
    causal = attention(query, key, value, mask=Causal())
    np.testing.assert_array_equal(attention(query, key, value, mask="causal"), causal)
    triangle = jnp.tril(jnp.ones((6, 6), bool))
    np.testing.assert_allclose(attention(query, key, value, mask=triangle), causal, atol=1e-6)
    np.testing.assert_allclose(attention(query, key, value, mask=np.asarray(triangle)), causal, atol=1e-6)
    np.testing.assert_array_equal(attention(query, key, value, mask=None), attention(query, key, value))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_merge(layout, random_key):
    """Two parts of the keys; some rows see keys of one part only, and one row sees none."""
    inputs = oracle.random_inputs(random_key, 7, 12, layout=layout)
    q_ids, kv_ids = np.array([1, 1, 2, 2, 3, 4, 4]), np.array([1, 1, 1, 4, 4, 4, 2, 2, 2, 4, 1, 2])
    axis = 1 if layout == "bshd" else 2

    def whole(q, k, v):
        return attention(q, k, v, mask=Segments(q_ids, kv_ids), layout=layout, implementation="xla", return_lse=True)

    def merged(q, k, v):
        (k_a, k_b), (v_a, v_b) = (jnp.split(x, [5], axis) for x in (k, v))
        parts = (
            attention(q, k, v, mask=Segments(q_ids, ids), layout=layout, implementation="xla", return_lse=True)
            for k, v, ids in ((k_a, v_a, kv_ids[:5]), (k_b, v_b, kv_ids[5:]))
        )
        first, second = parts
        return merge(first.out, first.lse, second.out, second.lse, layout=layout)

    cotangents = eqx_attn.AttentionOutput(inputs.dout, inputs.dlse)
    results = []
    for function in (whole, merged):

        @jax.jit
        def run(arrays, function=function):
            primal, pull_back = jax.vjp(function, *arrays)
            return *primal[:2], *pull_back(cotangents)

        results.append(dict(zip(oracle.NAMES, run(inputs.arrays), strict=True)))
    assert np.isneginf(results[1]["lse"]).sum() == 2 * 4  # id 3 sees none, in neither
    wanted = oracle.expected(inputs, Segments(q_ids, kv_ids))
    # Two more roundings each of a product and a sum than the whole.
    oracle.assert_matches(results[0], wanted)
    oracle.assert_matches(results[1], {name: (value, 2 * allowed) for name, (value, allowed) in wanted.items()})


def test_merge_ignores_what_a_dead_part_holds(random_key):
    query, key, value = oracle.random_inputs(random_key, 3, 5).arrays
    out, lse, _ = attention(query, key, value, return_lse=True)
    nothing = jnp.full_like(lse, -jnp.inf)
    nan, inf = jnp.full_like(out, jnp.nan), jnp.full_like(out, jnp.inf)
    for merged in (merge(out, lse, nan, nothing), merge(inf, nothing, out, lse)):
        np.testing.assert_allclose(merged.out, out, rtol=1e-6)
        np.testing.assert_array_equal(merged.lse, lse)
    dead = merge(out, nothing, out, nothing)
    assert (dead.out == 0).all() and jnp.isneginf(dead.lse).all()


def test_merge_is_in_float32(random_key):
    query, key, value = oracle.random_inputs(random_key, 3, 5, dtype="bfloat16").arrays
    out, lse, _ = attention(query, key, value, return_lse=True)
    merged = merge(out, lse, out, lse)
    assert merged.out.dtype == jnp.bfloat16 and merged.lse.dtype == jnp.float32
    np.testing.assert_allclose(merged.lse, lse + np.log(2.0), rtol=1e-6)
    np.testing.assert_array_equal(merged.out, out)


def test_merge_names_what_does_not_fit(random_key):
    query, key, value = oracle.random_inputs(random_key, 3, 5).arrays
    out, lse, _ = attention(query, key, value, return_lse=True)
    with pytest.raises(
        ValueError, match=r"lse_b has shape \(2, 3, 4\), but out_b .* \[\*batch, q_heads, q_seq\] = \(2, 4, 3\)"
    ):
        merge(out, lse, out, jnp.swapaxes(lse, 1, 2))
    with pytest.raises(ValueError, match=r"out_a has shape \(2, 3, 4, 16\) and out_b \(2, 2, 4, 16\)"):
        merge(out, lse, out[:, :2], lse[:, :, :2])


def array(*shape, dtype="float32"):
    return jnp.ones(shape, dtype)


Q, K = (2, 6, 4, 16), (2, 9, 2, 16)


def call(query=Q, key=K, value=None, **options):
    query, key, value = (
        array(*x) if isinstance(x, tuple) else x for x in (query, key, key if value is None else value)
    )
    return attention(query, key, value, **options)


BAD_INPUT = {
    "rank": (dict(query=(6, 16)), ValueError, r"query has shape \(6, 16\): it is .*split .*\.reshape"),
    "no array": (dict(key=[1.0]), TypeError, r"key is a list: give a JAX array of shape \[\*batch, seq, heads, dim\]"),
    "integers": (dict(key=array(*K, dtype="int32")), TypeError, r"key has dtype int32.*key\.astype\(jnp\.bfloat16\)"),
    "float8": (dict(query=array(*Q, dtype="float8_e4m3fn")), TypeError, "query has dtype float8.*not supported"),
    "empty": (dict(query=(2, 0, 4, 16)), ValueError, r"query has shape \(2, 0, 4, 16\): an axis of size 0"),
    "dtypes": (
        dict(value=array(*K, dtype="bfloat16")),
        TypeError,
        r"dtypes differ: query has float32, key has float32, value has bfloat16; .*key\.astype\(query\.dtype\)",
    ),
    "batch": (dict(query=(3, 6, 4, 16)), ValueError, r"batch axes differ: query has \(3,\), key has \(2,\).*jax\.vmap"),
    "batch rank": (dict(query=(6, 4, 16)), ValueError, r"batch axes differ: query has \(\), key has \(2,\)"),
    "kv lengths": (dict(value=(2, 8, 2, 16)), ValueError, r"kv_seq differs: key .* has 9, value .* has 8"),
    "kv heads": (dict(value=(2, 9, 1, 16)), ValueError, r"kv_heads differs: key .* has 2, value .* has 1"),
    "head dims": (dict(key=(2, 9, 2, 8)), ValueError, r"head dims differ: query has 16 and key 8"),
    "head counts": (
        dict(key=(2, 9, 3, 16)),
        ValueError,
        "query has 4 heads and key 3: .* multiple .*with layout='bhsd' the heads would be axis -3",
    ),
    "layout": (dict(layout="bsdh"), ValueError, "layout is 'bsdh': it is one of 'bshd', 'bhsd'"),
    "wrong layout": (dict(layout="bhsd"), ValueError, "with layout='bshd' the heads would be axis -2"),
    "implementation": (
        dict(implementation="cudnn"),
        ValueError,
        "implementation is 'cudnn': it is one of pallas_tpu, triton, gluon_hopper, xla, reference, or None",
    ),
    "scale": (dict(scale=np.float32(1)), TypeError, "scale is a float32: it is a Python number.*multiply query by"),
    "scale bool": (dict(scale=True), TypeError, "scale is a bool"),
    "query ids": (
        dict(mask=Segments([1] * 5, [1] * 9)),
        ValueError,
        r"q_ids of Segments has shape \(5,\), but query has 6 tokens: give one id per token",
    ),
    "key ids": (dict(mask=Segments([1] * 6)), ValueError, r"kv_ids .* key has 9 tokens.*q_ids serves the keys too"),
    "mask": (dict(mask="full"), ValueError, "mask is 'full': the only mask with a name"),
    "mask shape": (dict(mask=np.ones((6, 8), bool)), ValueError, r"shape \(6, 8\), which does.*\(2, 4, 6, 9\)"),
    "mask dtype": (dict(mask=np.ones((6, 9))), TypeError, "mask is an array of float64: a mask is boolean"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input(case):
    arguments, error, message = BAD_INPUT[case]
    if case == "wrong layout":
        arguments = dict(arguments, query=(2, 9, 5, 16), key=(2, 6, 5, 16))
    with pytest.raises(error, match=message):
        call(**arguments)


def test_bad_input_is_found_while_tracing():
    """Nothing is compiled and no array needed."""
    query, key = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (Q, (2, 9, 3, 16)))
    with pytest.raises(ValueError, match="query has 4 heads and key 3"):
        jax.eval_shape(attention, query, key, key)


@pytest.mark.smoke
@pytest.mark.parametrize(
    "implementation, device, name", [("triton", "an NVIDIA GPU", "sm_90a"), ("pallas_tpu", "a TPU", "v6e")]
)
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the device may be here")
def test_a_backend_that_is_not_here(implementation, device, name):
    message = (
        f"(?s)implementation='{implementation}' cannot serve .*needs {device}, and this process's default backend "
    )
    message += rf"\(cpu\) is none: .*interpret\(\).*target\(\"{name}\"\)"
    with pytest.raises(ValueError, match=message):
        call(implementation=implementation)
    other = {"triton": "v6e", "pallas_tpu": "sm_90a"}[implementation]
    with pytest.raises(ValueError, match=rf"target\('{other}'\) is none"), eqx_attn.target(other):
        call(implementation=implementation)


def test_triton_is_not_installed(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "triton" else find_spec(name, *rest)
    )
    message = r"Triton is not installed: pip install 'eqx_attn\[cuda\]'"
    with pytest.raises(ValueError, match=message), eqx_attn.interpret():
        call(implementation="triton")
    monkeypatch.setattr(_resolve, "_warned", set())
    with (
        eqx_attn.target("sm_90a"),
        pytest.warns(UserWarning, match=f"runs on 'xla', which is slower than triton: {message}"),
    ):
        jax.eval_shape(call)
    with eqx_attn.target("sm_90a"):
        jax.eval_shape(call)  # said once


@pytest.mark.parametrize(
    "device, options, message",
    [
        (None, {}, "it needs an NVIDIA GPU, and this process's default backend (cpu) is none"),
        ("sm_80", {}, "it needs an NVIDIA GPU of capability 9.0 (H100, H200), and this one has 8.0: use 'triton'"),
        ("sm_90a", dict(softcap=2.0), "gluon_hopper has no kernels with softcap yet; 'triton' has"),
        ("sm_90a", dict(dim=32), "head dims are 32 and 32; the kernels of gluon_hopper have 64 or 128 for both"),
    ],
)
def test_what_gluon_hopper_does_not_serve(device, options, message):
    dim = options.pop("dim", 64) if (options := dict(options)) else 64
    arrays = [jnp.zeros((1, 16, 2, dim), jnp.bfloat16)] * 3
    with eqx_attn.target(device) if device else contextlib.nullcontext(), pytest.raises(ValueError) as raised:
        attention(*arrays, implementation="gluon_hopper", **options)
    assert message in str(raised.value)


def test_gluon_has_no_interpreter():
    arrays = [jnp.zeros((1, 16, 2, 64), jnp.bfloat16)] * 3
    with eqx_attn.interpret(), pytest.raises(ValueError, match="Gluon, its language, has no interpreter"):
        attention(*arrays, implementation="gluon_hopper")


def test_every_reason_is_listed():
    arrays = (array(*shape[:-1], 12, dtype="float16") for shape in (Q, K, K))
    with pytest.raises(ValueError) as caught:
        attention(*arrays, implementation="pallas_tpu")
    message = str(caught.value)
    for reason in (
        "float16; the kernels of pallas_tpu compute in bfloat16, float32",
        "qk_dim is 12; kernels exist for multiples of 8 from 8 to 256: pad the head dim with zeros",
        "it needs a TPU",
    ):
        assert reason in message
    assert message.count("\n- ") == 4  # v_dim is 12 too


def test_bfloat16_under_tritons_interpreter():
    arrays = (array(*shape, dtype="bfloat16") for shape in (Q, K, K))
    with pytest.raises(ValueError, match="interpreter computes bfloat16 products wrongly"), eqx_attn.interpret():
        attention(*arrays, implementation="triton")


def test_an_unknown_target():
    with pytest.raises(ValueError, match="unknown device 'h100'; known are sm_80, .*, 7x"), eqx_attn.target("h100"):
        pass


def test_the_fallback_of_a_gpu_says_why_once(monkeypatch):
    monkeypatch.setattr(_resolve, "_warned", set())
    with eqx_attn.target("sm_90a"):
        with pytest.warns(UserWarning, match="slower than triton: v_dim is 12"):
            jax.eval_shape(lambda: call(value=(*K[:3], 12)))
        jax.eval_shape(lambda: call(value=(*K[:3], 12)))


def test_deterministic(random_key):
    inputs = oracle.random_inputs(random_key, Q_SEQ, KV_SEQ)
    first, second = (oracle.results(inputs, Causal(), deterministic=True, implementation="xla") for _ in range(2))
    for name in oracle.NAMES:
        np.testing.assert_array_equal(first[name], second[name])


def test_a_traced_scale_is_multiplied_into_the_query(random_key):
    """What the error about scale recommends."""
    inputs = oracle.random_inputs(random_key, 5, 5)
    query, key, value = inputs.arrays
    learned = eqx.filter_jit(lambda scale: attention(query * scale, key, value, scale=1.0, implementation="xla"))
    np.testing.assert_allclose(learned(jnp.float32(0.3)), attention(query, key, value, scale=0.3), atol=1e-5)
