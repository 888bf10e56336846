"""MultiheadAttention: equinox's results, gradients and checkpoints; what it adds; what it refuses."""

import doctest
import functools
import importlib
import io

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_attn
from eqx_attn.nn import MultiheadAttention, RotaryEmbedding

WIDTH, HEADS = 32, 4
FLOAT32 = np.finfo(np.float32).eps


def _x(seq=12, width=WIDTH, seed=0, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), (seq, width), dtype)


def _mha(**options):
    return MultiheadAttention(HEADS, WIDTH, **options, key=jax.random.key(0))


def _equinox(**options):
    return eqx.nn.MultiheadAttention(HEADS, WIDTH, **options, key=jax.random.key(0))


def _assert_close(actual, expected, length=WIDTH, eps=FLOAT32):
    """Two float32 computations with sums of up to `length` terms in another order, each after about four such sums."""
    scale = max(float(np.max(np.abs(np.asarray(expected, np.float32)))), 1.0)
    actual, expected = np.asarray(actual, np.float32), np.asarray(expected, np.float32)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=4 * eps * np.sqrt(length) * scale)


def _assert_same_gradients(ours, theirs, call, length=WIDTH):
    """Gradients of every parameter of both modules, under one random cotangent."""
    cotangent = jax.random.normal(jax.random.key(9), eqx.filter_eval_shape(call, theirs).shape)
    gradient = eqx.filter_jit(eqx.filter_grad(lambda module: jnp.sum(call(module) * cotangent)))
    grads = [gradient(module) for module in (ours, theirs)]
    leaves = [jax.tree.leaves(grad) for grad in grads]
    assert len(leaves[0]) == len(leaves[1]) > 0
    for actual, expected in zip(*leaves, strict=True):
        _assert_close(actual, expected, length)


_CONFIGURATIONS = {
    "plain": {},
    "biases": dict.fromkeys(("use_query_bias", "use_key_bias", "use_value_bias", "use_output_bias"), True),
    "sizes": dict(key_size=24, value_size=20, output_size=10, qk_size=6, vo_size=5),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", _CONFIGURATIONS)
def test_equals_equinox(name):
    options = _CONFIGURATIONS[name]
    theirs, ours = _equinox(**options), _mha(**options)
    args = _x(), _x(9, theirs.key_size, 1), _x(9, theirs.value_size, 2)
    for actual, expected in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(actual, expected)  # same key, same initial values, same order
    _assert_close(ours(*args), theirs(*args))
    _assert_same_gradients(ours, theirs, lambda module: module(*args))


@pytest.mark.parametrize("name", _CONFIGURATIONS)
def test_loads_equinox_checkpoint(name):
    theirs = eqx.nn.MultiheadAttention(
        HEADS, WIDTH, **_CONFIGURATIONS[name], dropout_p=0.25, inference=True, key=jax.random.key(5)
    )
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, theirs)
    file.seek(0)
    ours = eqx.tree_deserialise_leaves(file, _mha(**_CONFIGURATIONS[name], rotary=None))
    args = _x(), _x(9, theirs.key_size, 1), _x(9, theirs.value_size, 2)
    assert ours.dropout.p == 0.25 and ours.dropout.inference is True
    _assert_close(ours(*args), theirs(*args))
    _assert_same_gradients(ours, theirs, lambda module: module(*args))


def test_rotary_adds_no_leaves():
    plain, rotary = _mha(), _mha(rotary=RotaryEmbedding(WIDTH // HEADS))
    assert len(jax.tree.leaves(plain)) == len(jax.tree.leaves(rotary))


@pytest.mark.parametrize("name", _CONFIGURATIONS)
def test_from_equinox(name):
    theirs = _equinox(**_CONFIGURATIONS[name], dropout_p=0.5)
    ours = MultiheadAttention.from_equinox(theirs)
    args = _x(), _x(9, theirs.key_size, 1), _x(9, theirs.value_size, 2)
    _assert_close(ours(*args, inference=True), theirs(*args, inference=True))
    for field in ("num_heads", "query_size", "key_size", "qk_size", "vo_size", "use_key_bias", "output_size"):
        assert getattr(ours, field) == getattr(theirs, field)
    assert ours.dropout == theirs.dropout


def test_from_equinox_stacked_layers():
    keys = jax.random.split(jax.random.key(0), 3)
    theirs = eqx.filter_vmap(lambda key: eqx.nn.MultiheadAttention(HEADS, WIDTH, key=key))(keys)
    ours = MultiheadAttention.from_equinox(theirs)

    def apply(stack, x):
        arrays, rest = eqx.partition(stack, eqx.is_array)
        return jax.lax.scan(lambda x, layer: (x + eqx.combine(layer, rest)(x, x, x), None), x, arrays)[0]

    _assert_close(eqx.filter_jit(apply)(ours, _x()), apply(theirs, _x()))
    _assert_same_gradients(ours, theirs, lambda stack: apply(stack, _x()))


@pytest.mark.parametrize("per_head", [False, True])
def test_boolean_masks(per_head):
    mask = jax.random.bernoulli(jax.random.key(3), 0.6, (HEADS, 12, 12) if per_head else (12, 12))
    mask = mask.at[..., 0].set(True)
    theirs, ours, x = _equinox(), _mha(), _x()
    _assert_close(ours(x, x, x, mask), theirs(x, x, x, mask))
    _assert_same_gradients(ours, theirs, lambda module: module(x, x, x, mask=mask))
    batch = jnp.stack([mask, jnp.ones_like(mask)])
    mapped = jax.vmap(lambda mask: ours(x, x, x, mask=mask))(batch)
    _assert_close(mapped, jnp.stack([theirs(x, x, x, mask), theirs(x, x, x)]))


@pytest.mark.parametrize(
    "mask, dense",
    [
        ("causal", lambda i, j: j <= i),
        (eqx_attn.Causal(), lambda i, j: j <= i),
        (eqx_attn.SlidingWindow(2, 1), lambda i, j: (j >= i - 2) & (j <= i + 1)),
        (eqx_attn.Causal() & eqx_attn.SlidingWindow(3, None), lambda i, j: (j <= i) & (j >= i - 3)),
        (eqx_attn.Full(), lambda i, j: j >= 0),
    ],
)
def test_structured_masks(mask, dense):
    theirs, ours, x = _equinox(), _mha(), _x()
    visible = np.fromfunction(dense, (12, 12), dtype=int)
    _assert_close(ours(x, x, x, mask), theirs(x, x, x, jnp.asarray(visible)))
    _assert_same_gradients(
        ours,
        theirs,
        lambda module: module(x, x, x, mask if _is_ours(module) else jnp.asarray(visible)),
    )


def _is_ours(module):
    return isinstance(module, MultiheadAttention)


def test_a_row_that_sees_nothing_gives_zero():
    mask = jnp.ones((12, 12), bool).at[4].set(False)
    x = _x()
    for ours in (_mha(), _mha(dropout_p=0.3)):
        call = functools.partial(ours, key=jax.random.key(0), mask=mask)
        np.testing.assert_array_equal(call(x, x, x)[4], jnp.zeros(WIDTH))
        grad = jax.grad(lambda x, call=call: jnp.sum(call(x, x, x)[4] ** 2 + call(x, x, x)[5]))(x)
        assert bool(jnp.all(jnp.isfinite(grad)))
    biased = _mha(use_output_bias=True)
    np.testing.assert_array_equal(biased(x, x, x, mask)[4], biased.output_proj.bias)


def test_case_29_documents_do_not_see_each_other():
    ids = jnp.asarray([1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 0, 0])
    ours = _mha(rotary=RotaryEmbedding(WIDTH // HEADS))
    call = eqx.filter_jit(lambda x: ours(x, x, x, mask=eqx_attn.Causal() & eqx_attn.Segments(ids)))
    x = _x()
    before, after = call(x), call(x.at[4:7].add(1.0))
    np.testing.assert_array_equal(np.delete(before, slice(4, 7), 0), np.delete(after, slice(4, 7), 0))
    assert float(jnp.max(jnp.abs(before[4:7] - after[4:7]))) > 0.01
    np.testing.assert_array_equal(before[10:], jnp.zeros((2, WIDTH)))
    for start, stop in ((0, 4), (4, 7), (7, 10)):
        alone = x[start:stop]
        _assert_close(before[start:stop], ours(alone, alone, alone, mask="causal"))


def test_rotary_follows_the_positions_of_the_segments():
    ids = jnp.asarray([1] * 5 + [2] * 7)
    order = jax.random.permutation(jax.random.key(2), 12)
    positions = jnp.asarray([*range(5), *range(7)])
    ours, x = _mha(rotary=RotaryEmbedding(WIDTH // HEADS)), _x()
    straight = ours(x, x, x, mask=eqx_attn.Causal() & eqx_attn.Segments(ids))
    y = x[order]
    mask = eqx_attn.Causal() & eqx_attn.Segments(ids[order], q_positions=positions[order])
    _assert_close(ours(y, y, y, mask=mask), straight[order])


@pytest.mark.parametrize("segmented", [False, True])
def test_rotary_follows_bottom_right_alignment(segmented):
    """The last rows of a sequence against all of it, as with a cache, give what one shot gives."""
    ours, x = _mha(rotary=RotaryEmbedding(WIDTH // HEADS)), _x()
    mask = eqx_attn.Causal("bottom_right")
    if segmented:
        mask = mask & eqx_attn.Segments(jnp.ones(4, int), jnp.ones(12, int))
    _assert_close(ours(x[8:], x, x, mask=mask), ours(x, x, x, mask="causal")[8:])


@pytest.mark.parametrize("chunks", [(3, 2, 1), (1,) * 6])
def test_case_28_chunks_equal_one_shot(chunks):
    ours, x = _mha(rotary=RotaryEmbedding(WIDTH // HEADS)), _x(seq=6)
    parts = np.split(np.arange(6), np.cumsum(chunks)[:-1])
    out = [ours(x[part], x[: part[-1] + 1], x[: part[-1] + 1], mask=eqx_attn.Causal("bottom_right")) for part in parts]
    _assert_close(jnp.concatenate(out), ours(x, x, x, mask="causal"))


def test_case_21_x64():
    with jax.enable_x64(True):
        theirs, ours, x = _equinox(), _mha(), _x(dtype=jnp.float64)
        assert ours.query_proj.weight.dtype == ours(x, x, x).dtype == jnp.float64
        eqx.clear_caches()
        rope = jax.vmap(eqx.nn.RotaryPositionalEmbedding(8), in_axes=1, out_axes=1)
        expected = theirs(
            x, x, x, jnp.tril(jnp.ones((12, 12), bool)), process_heads=lambda q, k, v: (rope(q), rope(k), v)
        )
        actual = eqx.tree_at(lambda m: m.rotary, ours, RotaryEmbedding(8), is_leaf=lambda x: x is None)(
            x, x, x, "causal"
        )
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-14)
    eqx.clear_caches()


def test_rotary_equals_equinox_rotary_in_process_heads():
    eqx.clear_caches()
    theirs, x = _equinox(), _x()
    rope = jax.vmap(eqx.nn.RotaryPositionalEmbedding(WIDTH // HEADS), in_axes=1, out_axes=1)
    process_heads = lambda q, k, v: (rope(q), rope(k), v)
    expected = theirs(x, x, x, process_heads=process_heads)
    _assert_close(_mha()(x, x, x, process_heads=process_heads), expected)
    _assert_close(_mha(rotary=RotaryEmbedding(WIDTH // HEADS))(x, x, x), expected)


def test_grouped_heads_equal_repeated_key_heads():
    grouped, x = _mha(num_kv_heads=2), _x()
    assert grouped.key_proj.weight.shape == (WIDTH // 2, WIDTH)

    def repeat(weight):
        return jnp.repeat(weight.reshape(2, WIDTH // HEADS, WIDTH), 2, axis=0).reshape(WIDTH, WIDTH)

    where = lambda m: (m.query_proj, m.key_proj.weight, m.value_proj.weight, m.output_proj)
    values = (
        grouped.query_proj,
        repeat(grouped.key_proj.weight),
        repeat(grouped.value_proj.weight),
        grouped.output_proj,
    )
    full = eqx.tree_at(where, _equinox(), values)
    _assert_close(grouped(x, x, x), full(x, x, x))
    shapes = []
    grouped(x, x, x, process_heads=lambda *heads: (shapes.extend(h.shape for h in heads), heads)[1])
    assert shapes == [(12, 4, 8), (12, 2, 8), (12, 2, 8)]


@pytest.mark.parametrize("per_head", [False, True])
def test_dropout_equals_equinox(per_head):
    theirs, ours, x = _equinox(dropout_p=0.4), _mha(dropout_p=0.4), _x()
    mask = jnp.tril(jnp.ones((12, 12), bool))
    mask = jnp.broadcast_to(mask, (HEADS, 12, 12)) if per_head else mask
    key = jax.random.key(11)
    call = lambda module: module(x, x, x, mask, key=key)
    _assert_close(call(ours), call(theirs))
    _assert_close(ours(x, x, x, "causal", key=key), call(theirs))
    _assert_same_gradients(ours, theirs, call)
    assert float(jnp.max(jnp.abs(call(ours) - ours(x, x, x, mask, inference=True)))) > 0.01


def test_dropout_switches():
    dropping, plain, x = _mha(dropout_p=0.4), _mha(), _x()
    expected = plain(x, x, x)
    _assert_close(dropping(x, x, x, inference=True), expected)
    _assert_close(eqx.nn.inference_mode(dropping)(x, x, x), expected)
    _assert_close(eqx.tree_at(lambda m: m.dropout.p, dropping, 0.0)(x, x, x), expected)
    with pytest.warns(UserWarning, match="deterministic=.*deprecated.*inference"):
        _assert_close(dropping(x, x, x, deterministic=True), expected)
    with pytest.raises(RuntimeError, match="Dropout requires a key"):
        dropping(x, x, x)
    mapped = jax.vmap(lambda x, key: dropping(x, x, x, key=key))(jnp.stack([x, x]), jax.random.split(jax.random.key(0)))
    assert float(jnp.max(jnp.abs(mapped[0] - mapped[1]))) > 0.01


def test_vmap_equals_loop_with_gradients():
    ours = _mha(num_kv_heads=2, rotary=RotaryEmbedding(WIDTH // HEADS))
    batch = jax.random.normal(jax.random.key(4), (3, 12, WIDTH))
    ids = jnp.asarray([[1] * 6 + [2] * 6, [1] * 12, [3] * 2 + [1] * 8 + [0] * 2])

    def one(x, ids):
        return ours(x, x, x, mask=eqx_attn.Causal() & eqx_attn.Segments(ids))

    loss = lambda x, ids: jnp.sum(one(x, ids) ** 2)
    _assert_close(jax.vmap(one)(batch, ids), jnp.stack([one(x, i) for x, i in zip(batch, ids, strict=True)]))
    grads = jax.jit(jax.vmap(jax.grad(loss)))(batch, ids)
    _assert_close(grads, jnp.stack([jax.grad(loss)(x, i) for x, i in zip(batch, ids, strict=True)]))
    columns = jax.vmap(one, in_axes=(1, None), out_axes=1)(jnp.swapaxes(batch, 0, 1), ids[0])
    _assert_close(columns[:, 1], one(batch[1], ids[0]))


def test_vmap_reaches_attention_as_one_batched_call(monkeypatch):
    seen = []
    from eqx_attn import _blockwise

    forward = _blockwise.forward
    monkeypatch.setattr(_blockwise, "forward", lambda q, *rest: (seen.append(q.shape), forward(q, *rest))[1])
    ours = _mha(implementation="xla")
    batch = jax.random.normal(jax.random.key(4), (5, 13, WIDTH))  # a shape of its own: nothing is cached
    jax.vmap(lambda x: ours(x, x, x))(batch)
    assert seen[-1] == (5, HEADS, 13, WIDTH // HEADS)


def test_half_precision_and_mixed_dtypes():
    x = _x(dtype=jnp.bfloat16)
    ours, theirs = _mha(dtype=jnp.bfloat16), _equinox(dtype=jnp.bfloat16)
    assert ours(x, x, x).dtype == jnp.bfloat16
    _assert_close(ours(x, x, x), theirs(x, x, x), eps=float(jnp.finfo(jnp.bfloat16).eps))
    with jax.numpy_dtype_promotion("standard"):
        mixed = _mha()(x, x, x)  # bfloat16 inputs, float32 parameters
        assert mixed.dtype == _equinox()(x, x, x).dtype == jnp.float32
        _assert_close(mixed, _equinox()(x, x, x))


@pytest.mark.parametrize("module", ["_multihead", "_rotary"])
def test_examples_in_docstrings(module):
    results = doctest.testmod(importlib.import_module(f"eqx_attn.nn.{module}"))
    assert results.attempted > 0 and results.failed == 0


def test_replaced_parameters_are_used():
    ours, x = _mha(), _x()
    doubled = eqx.tree_at(lambda m: m.output_proj.weight, ours, 2 * ours.output_proj.weight)
    _assert_close(eqx.filter_jit(doubled)(x, x, x), 2 * ours(x, x, x))


def test_stacked_layers_are_mapped_over():
    """Layers made by `filter_vmap`, as an ensemble: each has its own parameters, gradients and keys of dropout."""
    make = lambda key: MultiheadAttention(HEADS, WIDTH, num_kv_heads=2, dropout_p=0.3, key=key)
    keys = jax.random.split(jax.random.key(0), 3)
    stack, alone = eqx.filter_vmap(make)(keys), [make(key) for key in keys]
    x = jnp.stack([_x(seed=seed) for seed in range(3)])

    def loss(layer, x, key):
        return jnp.sum(jnp.sin(layer(x, x, x, "causal", key=key)))

    gradient = eqx.filter_jit(eqx.filter_value_and_grad(loss))
    found = eqx.filter_jit(eqx.filter_vmap(gradient))(stack, x, keys)
    wanted = [gradient(layer, row, key) for layer, row, key in zip(alone, x, keys, strict=True)]
    for leaf, *leaves in zip(*map(jax.tree.leaves, (found, *wanted)), strict=True):
        _assert_close(leaf, jnp.stack(leaves))
    inference = eqx.nn.inference_mode(stack)
    shared = eqx.filter_vmap(lambda layer, x: layer(x, x, x, "causal"), in_axes=(eqx.if_array(0), None))(
        inference, x[0]
    )
    _assert_close(shared, jnp.stack([layer(x[0], x[0], x[0], "causal", inference=True) for layer in alone]))


def test_a_module_is_cast():
    ours, x = _mha(num_kv_heads=2, rotary=RotaryEmbedding(WIDTH // HEADS)), _x()
    cast = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16) if eqx.is_inexact_array(leaf) else leaf, ours)
    small = x.astype(jnp.bfloat16)
    out = eqx.filter_jit(cast)(small, small, small, "causal")
    assert out.dtype == jnp.bfloat16
    _assert_close(out, ours(x, x, x, "causal"), eps=float(jnp.finfo(jnp.bfloat16).eps))
    grads = eqx.filter_grad(lambda layer: jnp.sum(layer(small, small, small, "causal").astype(jnp.float32)))(cast)
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype(jnp.bfloat16)}


def test_float8_is_refused():
    x = _x().astype(jnp.float8_e4m3fn)
    cast = jax.tree.map(lambda leaf: leaf.astype(x.dtype) if eqx.is_inexact_array(leaf) else leaf, _mha())
    with pytest.raises(TypeError, match=r"query has dtype float8_e4m3fn: float8 inputs are not supported yet; write"):
        eqx.filter_eval_shape(cast, x, x, x)


def _call(**changes):
    arguments = dict(query=_x(), key_=_x(), value=_x()) | changes
    return lambda: _mha()(**arguments)


@pytest.mark.parametrize(
    "build, error, message",
    [
        (_call(query=jnp.ones((2, 12, WIDTH))), ValueError, r"query has shape \(2, 12, 32\).*jax.vmap"),
        (_call(key_=jnp.ones((2, 12, WIDTH))), ValueError, r"key_ has shape \(2, 12, 32\).*jax.vmap"),
        (_call(value=jnp.ones(WIDTH)), ValueError, r"value has shape \(32,\).*\[kv_seq, 32\]"),
        (_call(query=_x(width=16)), ValueError, r"query has shape \(12, 16\).*\[q_seq, 32\]"),
        (_call(value=_x(seq=7)), ValueError, r"equal length.*\(12, 32\).*\(7, 32\)"),
        (_call(query=jnp.ones((12, WIDTH), jnp.int32)), TypeError, "query has dtype int32"),
        (_call(mask=jnp.ones((12, 12), jnp.int32)), TypeError, "mask is an array of int32.*boolean"),
        (_call(mask=jnp.ones((12, 11), bool)), ValueError, r"mask.*\(12, 11\).*12, 12"),
        (_call(mask=jnp.ones((3, 12, 12), bool)), ValueError, r"mask.*\(3, 12, 12\).*4, 12, 12"),
        (_call(mask="diagonal"), ValueError, "mask is 'diagonal'.*causal"),
        (_call(mask=eqx_attn.Segments(jnp.ones(11, int))), ValueError, r"q_ids.*\(11,\).*12 tokens"),
        (_call(mask=eqx_attn.Segments(jnp.ones((2, 12), int))), ValueError, r"q_ids.*\(2, 12\)"),
        (_call(process_heads=lambda q, k, v: (q[1:], k, v)), ValueError, "process_heads must not change the shape"),
        (lambda: _mha(num_kv_heads=3), ValueError, "num_heads is 4 and num_kv_heads is 3.*divide"),
        (lambda: _mha(num_kv_heads=0), ValueError, "num_kv_heads is 0.*at least 1"),
        (lambda: _mha(rotary=RotaryEmbedding(32)), ValueError, r"embedding_size 32.*8 channels.*RotaryEmbedding\(8\)"),
        (
            lambda: _mha(rotary=eqx.nn.RotaryPositionalEmbedding(8)),
            TypeError,
            "rotary is a RotaryPositional.*process_heads",
        ),
        (lambda: _mha(implementation="cudnn")(_x(), _x(), _x()), ValueError, "cudnn"),
        (lambda: MultiheadAttention.from_equinox(_mha()), TypeError, "from_equinox takes an equinox"),
    ],
)
def test_bad_input(build, error, message):
    with pytest.raises(error, match=message):
        build()
