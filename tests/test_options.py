"""bias, sinks, softcap, dropout, max_logit and the newer masks, on `xla`, against the law in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from calls import check, kept_by, results

import eqx_attn
from eqx_attn import (
    _dropout,
    _operands,
    _tuning,
    BlockSparse,
    Causal,
    Chunked,
    Dilated,
    Dropout,
    PrefixLM,
    Segments,
    SlidingWindow,
)

Q_SEQ, KV_SEQ = 21, 30
RATE = 0.3


def generator(seed=0):
    return np.random.default_rng(seed)


def bias_of(shape, dtype="float32"):
    bias = generator(1).normal(size=shape)
    if bias.ndim == 4 and bias.shape[-1] > 1:
        bias[..., ::7] = -np.inf
    return jnp.asarray(bias.astype(dtype))


BIASES = [(1, 4, Q_SEQ, KV_SEQ), (2, 1, Q_SEQ, KV_SEQ), (2, 4, Q_SEQ, KV_SEQ), (1, 1, Q_SEQ, KV_SEQ), (1, 4, 1, KV_SEQ)]


@pytest.mark.parametrize("shape", [*BIASES, (2, 4, Q_SEQ, 1), (Q_SEQ, KV_SEQ), (KV_SEQ,)])
def test_case_05_bias_of_every_shape(shape, random_key):
    """jax 23701, 30593, 27184: the gradient of a broadcast bias, with examples that differ."""
    check(oracle.random_inputs(random_key, Q_SEQ, KV_SEQ), Causal("bottom_right"), oracle.Extras(bias=bias_of(shape)))


def test_case_06_a_bias_without_gradient_costs_none(random_key):
    """TransformerEngine 3082, 3188: no array of the bias' size is made in the backward, and the forward is the same."""
    inputs = oracle.random_inputs(random_key, Q_SEQ, KV_SEQ)
    bias = bias_of((2, 4, Q_SEQ, KV_SEQ))

    def loss(query, bias):
        return (eqx_attn.attention(query, *inputs.arrays[1:], bias=bias) * inputs.dout).sum()

    def writes(arguments):
        text = jax.jit(jax.grad(loss, arguments)).lower(inputs.query, bias).as_text()
        return sum("dynamic_update_slice" in line and "tensor<2x4x21x30xf32>" in line for line in text.splitlines())

    assert writes((0,)) == 0 and writes((0, 1)) > 0


@pytest.mark.parametrize(
    "dtype, dtype_of_bias", [("bfloat16", "float32"), ("float16", "float32"), ("float32", "bfloat16")]
)
def test_bias_has_a_dtype_of_its_own(dtype, dtype_of_bias, random_key):
    inputs = oracle.random_inputs(random_key, Q_SEQ, KV_SEQ, dtype=dtype)
    check(inputs, extras=oracle.Extras(bias=bias_of((1, 4, Q_SEQ, KV_SEQ), dtype_of_bias)))


def test_a_row_that_its_bias_hides_is_dead(random_key):
    inputs = oracle.random_inputs(random_key, 4, 5)
    bias = np.zeros((4, 5), np.float32)
    bias[2] = -np.inf
    extras = oracle.Extras(bias=jnp.asarray(bias))
    check(inputs, extras=extras)
    found = results(inputs, eqx_attn.Full(), extras)
    assert (found["out"][:, 2] == 0).all() and np.isneginf(found["lse"][:, :, 2]).all()


SINKS = jnp.asarray([0.5, -1.0, 60.0, -np.inf], jnp.float32)


@pytest.mark.parametrize(
    "mask", [Causal("top_left"), SlidingWindow(2, 3), Segments([0] * 5 + [1] * 16, [1] * 20 + [0] * 10)]
)
def test_sinks(mask, random_key):
    """Below, above and far above the scores, and none at all; with rows that see no key."""
    inputs = oracle.random_inputs(random_key, Q_SEQ, KV_SEQ)
    check(inputs, mask, oracle.Extras(sinks=SINKS))


def test_a_dead_row_has_its_sink_for_lse(random_key):
    inputs = oracle.random_inputs(random_key, 3, 3)
    found = results(inputs, Segments([1, 0, 2], [1, 1, 0]), oracle.Extras(sinks=SINKS))
    np.testing.assert_array_equal(found["out"][:, 1:], 0)
    np.testing.assert_allclose(found["lse"][:, :, 1:], np.broadcast_to(SINKS[:, None], (2, 4, 2)))


def test_sinks_of_zero_are_the_off_by_one_softmax(random_key):
    query, key, value = oracle.random_inputs(random_key, 5, 6, heads=(1, 1), batch=()).arrays
    found = eqx_attn.attention(query, key, value, scale=1.0, sinks=jnp.zeros(1))
    exponentials = np.exp(np.asarray(query[:, 0] @ key[:, 0].T, np.float64))
    wanted = exponentials @ np.asarray(value[:, 0], np.float64) / (1 + exponentials.sum(-1, keepdims=True))
    np.testing.assert_allclose(found[:, 0], wanted, rtol=1e-4)


@pytest.mark.parametrize("softcap", [0.7, 30])
def test_softcap(softcap, random_key):
    check(oracle.random_inputs(random_key, Q_SEQ, KV_SEQ), Causal(), oracle.Extras(softcap=softcap))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_all_options_at_once(layout, random_key):
    inputs = oracle.random_inputs(random_key, Q_SEQ, KV_SEQ, layout=layout, dims=(16, 8))
    mask = SlidingWindow(9, 6, "bottom_right") & np.asarray(generator().random((2, 1, Q_SEQ, KV_SEQ)) < 0.8)
    extras = oracle.Extras(bias_of((2, 1, Q_SEQ, KV_SEQ)), SINKS, 1.5)
    check(inputs, mask, extras, Dropout(RATE, jax.random.key(3)))


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_float64(implementation, random_key):
    with jax.enable_x64(True):
        inputs = oracle.random_inputs(random_key, Q_SEQ, KV_SEQ, dtype="float64")
        extras = oracle.Extras(bias_of((1, 4, Q_SEQ, KV_SEQ), "float64"), SINKS.astype(jnp.float64), 1.5)
        check(inputs, Causal(), extras, Dropout(RATE, jax.random.key(3)), implementation=implementation)


class TestDropout:
    def test_is_unbiased(self):
        """Of n weights a share of 1 - rate is kept, up to 4 standard deviations, in each example, head, row and column."""
        seeds = _dropout.seeds(jax.random.key(0), 3, 4)
        kept = np.asarray(_dropout.kept(seeds, jnp.arange(200), jnp.arange(300), RATE), np.float64) - (1 - RATE)
        deviation = np.sqrt(RATE * (1 - RATE))
        for axes, limit in (((0, 1, 2, 3), 4), ((2, 3), 4), ((0, 1, 3), 4.5), ((0, 1, 2), 4.5)):
            count = np.prod([kept.shape[axis] for axis in axes])
            assert (abs(kept.mean(axes)) <= limit * deviation / np.sqrt(count)).all()

    def test_rows_columns_heads_and_examples_are_independent(self):
        """Two of either agree in a share of (1 - rate)^2 + rate^2 of the weights."""
        seeds = _dropout.seeds(jax.random.key(1), 2, 2)
        kept = np.asarray(_dropout.kept(seeds, jnp.arange(256), jnp.arange(256), RATE))
        share = (1 - RATE) ** 2 + RATE**2
        deviation = np.sqrt(share * (1 - share))
        for axis in range(4):
            first, second = np.take(kept, 0, axis), np.take(kept, 1, axis)
            assert abs((first == second).mean() - share) <= 4 * deviation / np.sqrt(first.size)

    @pytest.mark.parametrize("tile", [(8, 8), (16, 4)])
    def test_is_the_same_for_every_tile(self, tile, random_key, monkeypatch):
        inputs = oracle.random_inputs(random_key, Q_SEQ, KV_SEQ)
        monkeypatch.setattr(eqx_attn._resolve, "XLA_TILE", eqx_attn._operands.Tile(*tile))
        check(inputs, Causal(), dropout=Dropout(RATE, jax.random.key(7)))

    @pytest.mark.parametrize("implementation", ["xla", "triton", "pallas_tpu"])
    def test_drops_the_same_weights_everywhere(self, implementation, random_key, monkeypatch):
        """With the identity for values the output is the weights: which of them are 0, in two sizes of tiles, and mapped.

        A TPU kernel's tiles are at least 128, so that it has one here; its own tests have more.
        """
        if implementation == "triton":
            pytest.importorskip("triton")
        query, key, _ = oracle.random_inputs(random_key, 32, 32, heads=(2, 1), dims=(16, 16)).arrays
        value = jnp.broadcast_to(jnp.eye(32)[:, None], (2, 32, 1, 32))
        dropout = Dropout(RATE, jax.random.key(13))
        options = dict(dropout=dropout, implementation=implementation)
        kept = np.swapaxes(kept_by(dropout, (2, 2, 32, 32)), 1, 2)
        tiles = _operands.Tile(32, 16), _operands.Tile(16, 32)
        for tile in tiles[:1] if implementation == "pallas_tpu" else tiles:
            monkeypatch.setattr(eqx_attn._resolve, "XLA_TILE", tile)
            monkeypatch.setattr(_tuning, "_triton_tiles", lambda *_, tile=tile: _operands.Tiles(tile, tile, tile))
            with eqx_attn.interpret():
                found = eqx_attn.attention(query, key, value, **options)
            np.testing.assert_array_equal(found > 0, kept)
        with eqx_attn.interpret():
            mapped = jax.vmap(lambda x: eqx_attn.attention(x, key[0], value[0], **options))(query)
        np.testing.assert_array_equal(mapped > 0, np.stack([kept[0], kept[0]]))  # each as its own call: example 0

    def test_outputs_are_unbiased(self, random_key):
        """Their mean over keys, each element within 5 standard deviations of the output without dropout."""
        query, key, value = oracle.random_inputs(random_key, 4, 8, heads=(1, 1), batch=()).arrays
        weights = eqx_attn.attention(query, key, jnp.eye(8)[:, None])[:, 0]
        number = 2000
        call = lambda key_of_dropout: eqx_attn.attention(query, key, value, dropout=Dropout(RATE, key_of_dropout))
        mean = jax.vmap(call)(jax.random.split(jax.random.key(1), number)).mean(0)[:, 0]
        deviation = np.sqrt(RATE / (1 - RATE) * (weights**2) @ (value[:, 0] ** 2) / number)
        assert (abs(mean - weights @ value[:, 0]) <= 5 * deviation).all()

    def test_vmap_equals_a_loop(self, random_key):
        query, key, value = oracle.random_inputs(random_key, 6, 6).arrays
        keys = jax.random.split(jax.random.key(0), 3)
        queries = jnp.stack([query, query + 1, query - 1])

        def call(query, key_of_dropout):
            return eqx_attn.attention(query, key, value, dropout=Dropout(RATE, key_of_dropout))

        mapped = jax.vmap(call)(queries, keys)
        np.testing.assert_allclose(mapped, [call(q, k) for q, k in zip(queries, keys, strict=True)], atol=1e-6)
        shared = jax.vmap(call, (0, None))(queries, keys[0])
        np.testing.assert_allclose(shared, [call(q, keys[0]) for q in queries], atol=1e-6)

    def test_a_rate_of_zero_is_no_dropout(self, random_key):
        arrays = oracle.random_inputs(random_key, 6, 6).arrays
        found = eqx_attn.attention(*arrays, dropout=Dropout(0.0, jax.random.key(0)))
        np.testing.assert_array_equal(found, eqx_attn.attention(*arrays))

    def test_raw_keys_serve_as_well(self, random_key):
        arrays = oracle.random_inputs(random_key, 6, 6).arrays
        found = eqx_attn.attention(*arrays, dropout=Dropout(RATE, jax.random.PRNGKey(5)))
        np.testing.assert_array_equal(found, eqx_attn.attention(*arrays, dropout=Dropout(RATE, jax.random.key(5))))


PREFIX_OF_KEYS = np.arange(KV_SEQ) % 11 == 3
IDS = np.array([1] * 8 + [5] * 7 + [0] * 2 + [1] * 4), np.array([5] * 10 + [1] * 15 + [0] * 5)


@pytest.mark.parametrize(
    "mask",
    [
        PrefixLM(4),
        PrefixLM(np.array([0, 25]), "bottom_right"),
        PrefixLM(PREFIX_OF_KEYS) & Segments(*IDS),
        PrefixLM(3) & Causal(),
        PrefixLM(6) & Chunked(7),
        Chunked(7),
        Chunked(7, "bottom_right") & Causal("bottom_right"),
        Chunked(3) & Segments(*IDS),
        Chunked(4, "bottom_right") & Segments(*IDS) & SlidingWindow(2, 1, "bottom_right"),
        Dilated(3),
        Dilated(4) & SlidingWindow(8, 4),
        Dilated(2, "bottom_right") & Chunked(9) & Causal(),
        BlockSparse(generator().random((3, 8)) < 0.5, (8, 4)),
        BlockSparse(generator().random((2, 1, 2, 2)) < 0.6, (16, 16)) & Causal("bottom_right"),
        BlockSparse(generator().random((4, 2, 2)) < 0.6, 16) & Segments(*IDS),
    ],
    ids=str,
)
def test_masks(mask, random_key):
    check(oracle.random_inputs(random_key, Q_SEQ, KV_SEQ), mask)


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: PrefixLM(2.5), TypeError, "PrefixLM's prefix has dtype float32: give lengths"),
        (lambda: Chunked(0), ValueError, "Chunked's size is 0: give an int >= 1"),
        (lambda: Dilated(True), ValueError, "Dilated's step is True"),
        (lambda: BlockSparse(np.ones((2, 2))), TypeError, r"seen has shape \(2, 2\) and dtype float32: give booleans"),
        (lambda: BlockSparse(np.ones((2, 2), bool), 0), ValueError, "block_size is 0"),
        (lambda: Dropout(1.0, jax.random.key(0)), ValueError, "rate is 1.0: give a number from 0 to below 1"),
    ],
)
def test_makers_name_what_does_not_fit(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(mask=PrefixLM(2) & SlidingWindow(3, None)), ValueError, "PrefixLM with SlidingWindow.*boolean array"),
        (dict(mask=PrefixLM(np.ones(5, int))), ValueError, r"shape \(5,\) .* \[\*batch\] = \(2,\)"),
        (dict(mask=BlockSparse(np.ones((2, 2), bool), 4)), ValueError, r"21 queries and 30 keys .* \(6, 8\)"),
        (
            dict(bias=jnp.ones((3, 1, 1, 1))),
            ValueError,
            r"bias is an array of shape \(3, 1, 1, 1\), .* \(2, 4, 21, 30\)",
        ),
        (dict(bias=jnp.ones((30,), bool)), TypeError, "bias has dtype bool.* as mask"),
        (dict(bias=jnp.ones((30,), int)), TypeError, "bias has dtype int32"),
        (dict(sinks=jnp.ones(2)), ValueError, r"sinks has shape \(2,\): there are 4 query heads"),
        (dict(sinks=jnp.ones(4, int)), TypeError, "sinks is int32"),
        (dict(softcap=0), ValueError, "softcap is 0"),
        (dict(softcap=jnp.ones(())), TypeError, "softcap is a .*: it is a Python number"),
        (dict(dropout=0.1), TypeError, r"dropout is a float: give eqx_attn.Dropout\(rate, key\)"),
    ],
)
def test_calls_name_what_does_not_fit(options, error, message, random_key):
    with pytest.raises(error, match=message):
        eqx_attn.attention(*oracle.random_inputs(random_key, Q_SEQ, KV_SEQ).arrays, **options)


@pytest.mark.parametrize("name", ["query", "key", "value", "bias", "sinks"])
def test_case_04_vmap_of_the_gradient(name, random_key):
    """TransformerEngine's rule for the backward: each example has a gradient of its own, also of what they share."""
    inputs = oracle.random_inputs(random_key, 5, 6)
    arguments = dict(zip(("query", "key", "value"), inputs.arrays, strict=True))
    arguments |= dict(bias=bias_of((2, 1, 5, 6)), sinks=SINKS)

    def loss(arguments, weight):
        return (eqx_attn.attention(**arguments) * inputs.dout * weight).sum()

    mapped = dict.fromkeys(arguments) | {name: 0}
    stacked = arguments | {name: jnp.stack([arguments[name], arguments[name] * 2])}
    weights = jnp.array([1.0, -3.0])
    for arguments_axes, weight_axis, given in (({**mapped}, None, stacked), (None, 0, arguments)):
        weight = weights if weight_axis == 0 else weights[0]
        found = jax.vmap(jax.grad(loss), (arguments_axes, weight_axis))(given, weight)
        for example in range(2):
            own = arguments if arguments_axes is None else arguments | {name: stacked[name][example]}
            wanted = jax.grad(loss)(own, weights[example] if weight_axis == 0 else weight)
            for key in wanted:
                np.testing.assert_allclose(found[key][example], wanted[key], atol=2e-5, err_msg=key)
