"""JAX's transformations of attention: each equals the Python loop or the plain call that it stands for."""

import contextlib
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.ad_checkpoint import checkpoint_policies

import eqx_attn
from eqx_attn import attention, Causal, Segments

N, SEQ, HEADS, DIM = 3, 6, 2, 8
# A mapped call runs the same sums in another order at most; values are of size 1.
TOLERANCE = dict(rtol=0, atol=2e-6 * np.sqrt(SEQ * DIM))


def arrays(key, leading=()):
    return oracle.random_inputs(key, SEQ, SEQ, heads=(HEADS, 1), dims=(DIM, DIM), batch=leading).arrays


def ids(leading=()):
    return jnp.asarray(np.random.default_rng(1).integers(0, 3, (*leading, SEQ)), jnp.int32)


def call(query, key, value, q_ids):
    """Positions are made inside the mapped function: by rank within each id, as Segments does."""
    return attention(query, key, value, mask=Segments(q_ids) & Causal(), return_lse=True)


def gradient(*operands):
    """The cotangent of a sum is not batched."""
    return jax.grad(lambda *x: jnp.sum(call(*x).out), (0, 1, 2))(*operands)


one, gradient_of_one = oracle.jit(call), oracle.jit(gradient)
"""For `loop`: compiled once for all ways to map."""


def loop(function, in_axes, *arguments):
    """What jax.vmap stands for."""
    size = next(x.shape[axis] for x, axis in zip(arguments, in_axes, strict=True) if axis is not None)
    rows = [
        function(*(x if axis is None else jnp.take(x, i, axis) for x, axis in zip(arguments, in_axes, strict=True)))
        for i in range(size)
    ]
    return jax.tree.map(lambda *row: jnp.stack(row), *rows)


def assert_same(found, wanted):
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), **TOLERANCE)


def mapped_operands(key, in_axes):
    """Arrays of which those with an axis have the mapped one there."""
    plain = (*arrays(key), ids())
    full = (*arrays(key, (N,)), ids((N,)))
    return [
        one if axis is None else jnp.moveaxis(many, 0, axis)
        for one, many, axis in zip(plain, full, in_axes, strict=True)
    ]


SUBSETS = [subset for subset in itertools.product((None, 0), repeat=4) if any(axis == 0 for axis in subset)]
ANY_AXES = [(1, 2, 3, 1), (3, None, 0, 1), (-1, 1, -2, None), (None, 3, None, 0)]


def axes_name(axes):
    return ",".join(map(str, axes))


@pytest.mark.smoke
@pytest.mark.parametrize("in_axes", SUBSETS + ANY_AXES, ids=axes_name)
def test_case_01_vmap_over_any_operands_and_axes(in_axes, random_key):
    """TransformerEngine 2685."""
    operands = mapped_operands(random_key, in_axes)
    assert_same(oracle.jit(jax.vmap(call, in_axes))(*operands), loop(one, in_axes, *operands))


@pytest.mark.parametrize(
    "in_axes", [(0, 0, 0, 0), (0, None, None, 0), (None, 1, 0, None), (None, None, None, 0)], ids=axes_name
)
def test_case_03_vmap_of_grad(in_axes, random_key):
    """jax 38495."""
    operands = mapped_operands(random_key, in_axes)
    assert_same(oracle.jit(jax.vmap(gradient, in_axes))(*operands), loop(gradient_of_one, in_axes, *operands))


def test_grad_of_vmap_with_a_random_cotangent(random_key):
    in_axes = (0, None, 1, 0)
    operands = mapped_operands(random_key, in_axes)
    weights = jax.random.normal(random_key, (N, SEQ, HEADS, DIM))

    def loss(mapping, q, k, v):
        result = mapping(q, k, v, operands[3])
        return jnp.sum(result.out * weights) + jnp.sum(jnp.where(jnp.isfinite(result.lse), result.lse, 0) ** 2)

    found = oracle.jit(jax.grad(lambda *x: loss(jax.vmap(call, in_axes), *x), (0, 1, 2)))(*operands[:3])
    wanted = oracle.jit(jax.grad(lambda *x: loss(lambda *y: loop(call, in_axes, *y), *x), (0, 1, 2)))(*operands[:3])
    assert_same(found, wanted)


def test_jacrev(random_key):
    """Here only the cotangent is batched."""
    query, key, value = arrays(random_key)
    mask = Segments(ids()) & Causal()
    found, wanted = (
        oracle.jit(jax.jacrev(lambda q, name=name: attention(q, key, value, mask=mask, implementation=name)[:2]))(query)
        for name in (None, "reference")
    )
    assert_same(found, wanted)


def test_nested_vmap(random_key):
    query, key, value = arrays(random_key, (2, N))
    segments = ids((N,))
    inner = (0, 0, None, 0)
    value = value[:, 0]
    outer = (0, 0, 0, None)
    found = oracle.jit(jax.vmap(jax.vmap(call, inner), outer))(query, key, value, segments)
    assert_same(found, loop(lambda *x: loop(one, inner, *x), outer, query, key, value, segments))


def test_vmap_equals_a_batch_axis(random_key):
    query, key, value = arrays(random_key, (2, N))
    segments = ids((2, N))
    assert_same(jax.vmap(call, (1, 1, 1, 1), 1)(query, key, value, segments).out, call(query, key, value, segments).out)


def test_vmap_over_a_boolean_mask(random_key):
    query, key, value = arrays(random_key)
    masks = jnp.asarray(np.random.default_rng(0).random((N, SEQ, SEQ)) < 0.5)
    one = lambda mask: attention(query, key, value, mask=mask)
    assert_same(jax.vmap(one)(masks), jnp.stack([one(mask) for mask in masks]))
    many = lambda query: attention(query, key, value, mask=masks[0])
    queries = arrays(random_key, (N,))[0]
    assert_same(jax.vmap(many)(queries), jnp.stack([many(query) for query in queries]))


def test_vmap_reaches_the_kernel_as_one_batched_call(random_key):
    jaxpr = jax.make_jaxpr(jax.vmap(call))(*arrays(random_key, (N,)), ids((N,)))
    kernels = [equation for equation in equations(jaxpr.jaxpr) if equation.primitive.name == "eqx_attention"]
    assert len(kernels) == 1
    assert kernels[0].invars[0].aval.shape == (N, SEQ, HEADS, DIM)


def equations(jaxpr):
    """Every equation of a jaxpr, those of inner ones too."""
    for equation in jaxpr.eqns:
        yield equation
        for parameter in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def kernel_calls(function, *arguments):
    jaxpr = jax.make_jaxpr(function)(*arguments)
    return sum(equation.primitive.name == "eqx_attention" for equation in equations(jaxpr.jaxpr))


@pytest.mark.smoke
@pytest.mark.parametrize(
    "policy, calls",
    [
        (None, 3),  # forward, forward again, backward
        (checkpoint_policies.save_only_these_names("eqx_attn_out"), 3),  # the lse is needed too
        (checkpoint_policies.save_only_these_names("eqx_attn_out", "eqx_attn_lse"), 2),
        (checkpoint_policies.everything_saveable, 2),
    ],
    ids=["nothing", "out", "out and lse", "everything"],
)
def test_checkpoint_runs_the_forward_again_only_if_asked(policy, calls, random_key):
    operands = arrays(random_key)

    def loss(query, key, value):
        layer = jax.checkpoint(lambda q, k, v: attention(jnp.sin(q), k, v, mask="causal"), policy=policy)
        return jnp.sum(jnp.sin(layer(query, key, value)))

    gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
    assert kernel_calls(jax.grad(loss, (0, 1, 2)), *operands) == calls
    plain = jax.grad(lambda q, k, v: jnp.sum(jnp.sin(attention(jnp.sin(q), k, v, mask="causal"))), (0, 1, 2))
    assert_same(gradient(*operands), plain(*operands))


def test_a_call_without_a_gradient_has_one_kernel(random_key):
    assert kernel_calls(lambda *x: attention(*x), *arrays(random_key)) == 1


def test_jit_inside_and_outside(random_key):
    operands = (*arrays(random_key), ids())
    plain = call(*operands)
    assert_same(jax.jit(call)(*operands), plain)
    assert_same(eqx.filter_jit(call)(*operands), plain)
    assert_same(
        jax.jit(jax.grad(lambda q: call(q, *operands[1:]).out.sum()))(operands[0]),
        jax.grad(lambda q: jax.jit(call)(q, *operands[1:]).out.sum())(operands[0]),
    )


def test_masks_pass_through_jit_as_arguments(random_key):
    query, key, value = arrays(random_key)
    traces = []

    @jax.jit
    def masked(query, mask):
        traces.append(mask)
        return attention(query, key, value, mask=mask)

    masks = [Segments(ids()) & Causal(), Segments(ids()[::-1]) & Causal()]
    for mask in masks:
        assert_same(masked(query, mask), attention(query, key, value, mask=mask))
    assert len(traces) == 1


def test_scan_over_layers(random_key):
    query, key, value = arrays(random_key, (N,))

    def layer(carry, kv):
        return carry + attention(carry, *kv, mask="causal"), None

    def scanned(query, key, value):
        return jax.lax.scan(layer, query[0], (key, value))[0]

    def unrolled(query, key, value):
        carry = query[0]
        for kv in zip(key, value, strict=True):
            carry, _ = layer(carry, kv)
        return carry

    operands = (query, key, value)
    assert_same(jax.jit(scanned)(*operands), unrolled(*operands))
    found, wanted = (
        oracle.jit(jax.grad(lambda *x, f=f: jnp.sum(jnp.sin(f(*x))), (0, 1, 2)))(*operands) for f in (scanned, unrolled)
    )
    assert_same(found, wanted)


def test_remat_inside_scan(random_key):
    query, key, value = arrays(random_key, (N,))
    policy = checkpoint_policies.save_only_these_names("eqx_attn_out", "eqx_attn_lse")

    def loss(wrap, key, value):
        layer = wrap(lambda carry, kv: (carry + attention(carry, *kv, mask="causal"), None))
        return jnp.sum(jnp.sin(jax.lax.scan(layer, query[0], (key, value))[0]))

    found = oracle.jit(jax.grad(lambda *x: loss(lambda f: jax.checkpoint(f, policy=policy), *x), (0, 1)))(key, value)
    assert_same(found, oracle.jit(jax.grad(lambda *x: loss(lambda f: f, *x), (0, 1)))(key, value))


def test_donated_arguments(random_key):
    operands = arrays(random_key)
    wanted = attention(*operands)
    found = jax.jit(attention, donate_argnums=0)(*(jnp.copy(x) for x in operands))
    assert_same(found, wanted)


def test_filter_grad_of_a_module(random_key):
    class Layer(eqx.Module):
        query: jax.Array
        key: jax.Array
        value: jax.Array
        name: str = "attention"

    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(layer):
        return jnp.sum(attention(layer.query, layer.key, layer.value, mask="causal") ** 2)

    operands = arrays(random_key)
    found = gradient(Layer(*operands))
    wanted = jax.grad(lambda *x: jnp.sum(attention(*x, mask="causal", implementation="reference") ** 2), (0, 1, 2))(
        *operands
    )
    assert_same((found.query, found.key, found.value), wanted)


@pytest.mark.smoke
def test_export_for_the_cpu(random_key):
    operands = (*arrays(random_key), ids())
    function = jax.jit(lambda *x: jax.value_and_grad(lambda q: call(q, *x[1:]).out.sum())(x[0]))
    exported = jax.export.export(function, platforms=["cpu"])(*operands)
    assert_same(exported.call(*operands), function(*operands))
    pytest.importorskip("flatbuffers", reason="jax.export serializes with flatbuffers")
    again = jax.export.deserialize(exported.serialize())
    assert_same(again.call(*operands), function(*operands))


UNCHECKED = [jax.export.DisabledSafetyCheck.custom_call(name) for name in ("triton_kernel_call_ffi", "tpu_custom_call")]
not_here = pytest.mark.skipif(jax.default_backend() != "cpu", reason="a test of lowering for what is not here")


@not_here
def test_export_for_a_gpu_that_is_not_here():
    pytest.importorskip("triton")
    pytest.importorskip("jax_cuda13_plugin", reason="JAX lowers for CUDA with its plugin")
    query, key = (jax.ShapeDtypeStruct((1, 128, heads, 64), jnp.float16) for heads in (4, 2))
    function = jax.grad(lambda q, k, v: attention(q, k, v, mask="causal").astype(jnp.float32).sum(), (0, 1, 2))
    with eqx_attn.target("sm_90a"):
        exported = jax.export.export(jax.jit(function), platforms=["cuda"], disabled_checks=UNCHECKED)(query, key, key)
    text = exported.mlir_module()
    assert text.count("triton_kernel_call_ffi") == 3  # forward, dq, dkv
    assert [aval.shape for aval in exported.out_avals] == [query.shape, key.shape, key.shape]


def with_options(query, key, value, bias, sinks, seed):
    dropout = eqx_attn.Dropout(0.2, jax.random.wrap_key_data(seed))
    mask = eqx_attn.SlidingWindow(40, 0)
    return attention(query, key, value, mask=mask, bias=bias, sinks=sinks, softcap=3.0, dropout=dropout)


@not_here
def test_export_for_several_platforms_at_once():
    """One artifact holds XLA's program for the CPU and both kernels, and runs here after a reload."""
    for package in ("triton", "jax_cuda13_plugin", "flatbuffers"):
        pytest.importorskip(package)
    arrays = oracle.random_inputs(jax.random.key(0), 64, 64, heads=(2, 1), dims=(64, 64), batch=(1,)).arrays
    operands = (*arrays, jnp.ones((2, 64, 64)), jnp.ones(2), jnp.arange(2, dtype=jnp.uint32))
    platforms = ("cpu", "tpu", "cuda")
    with eqx_attn.target("sm_90a", "v6e"):
        exported = jax.export.export(jax.jit(with_options), platforms=platforms, disabled_checks=UNCHECKED)(*operands)
    text = exported.mlir_module()
    assert (text.count("triton_kernel_call_ffi"), text.count("tpu_custom_call")) == (1, 1)
    again = jax.export.deserialize(exported.serialize())
    assert again.platforms == platforms
    assert_same(again.call(*operands), with_options(*operands))


@not_here
@pytest.mark.parametrize(
    "platform, targets, message",
    [
        ("tpu", (), r"lowered for a TPU and there is none here.*target\("),
        ("tpu", ("sm_90a",), r'target\("sm_90a", "v6e"\)'),
        ("cuda", ("v6e",), "target\\('v6e'\\) is not an NVIDIA GPU"),
    ],
)
def test_lowering_for_a_device_that_nobody_named(platform, targets, message):
    pytest.importorskip("triton")
    query = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)
    with contextlib.ExitStack() as stack:
        if targets:
            stack.enter_context(eqx_attn.target(*targets))
        traced = jax.jit(lambda x: attention(x, x, x)).trace(query)
        with pytest.raises(ValueError, match=message):
            traced.lower(lowering_platforms=(platform,))


def test_targets_are_of_two_kinds():
    for names in ((), ("sm_90a", "sm_80")):
        message = "give one device, or one NVIDIA architecture and one TPU"
        with pytest.raises(ValueError, match=message), eqx_attn.target(*names):
            pass


def test_forward_mode_is_refused_by_jax(random_key):
    query, key, value = arrays(random_key)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda q: attention(q, key, value), (query,), (query,))


def test_the_interpret_context_retraces_a_jitted_function(random_key):
    query, key, value = arrays(random_key)
    function = jax.jit(lambda q: attention(q, key, value, implementation="pallas_tpu"))
    with pytest.raises(ValueError, match="needs a TPU"):
        function(query)
    with eqx_attn.interpret():
        found = function(query)
    np.testing.assert_allclose(found, attention(query, key, value), atol=1e-5)
    with pytest.raises(ValueError, match="needs a TPU"):
        function(query)
