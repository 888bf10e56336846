"""Packed and ragged calls against the plain ones, which are tested against the law."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import eqx_attn
from eqx_attn import attention, attention_kvpacked, attention_qkvfused, attention_qkvpacked, attention_ragged, Causal


def apart(arrays, mask="causal", **options):
    return attention(*arrays, mask=mask, return_lse=True, **options)


def values(function, arrays, cotangents):
    """Output, lse and the gradients of the arrays."""
    result, pull_back = jax.vjp(function, *arrays)
    return result.out, result.lse, pull_back(result._replace(out=cotangents[0], lse=cotangents[1]))


def fused(arrays):
    return jnp.concatenate(arrays, axis=-2)


def test_case_15_qkvfused(random_key):
    """TransformerEngine 2358: the value's heads begin behind the key's, of which there are fewer than query heads."""
    inputs = oracle.random_inputs(random_key, 11, 11, heads=(6, 2))
    cotangents = inputs.dout, inputs.dlse
    wanted = values(lambda *x: apart(x), inputs.arrays, cotangents)
    found = values(
        lambda x: attention_qkvfused(x, kv_heads=2, mask="causal", return_lse=True), [fused(inputs.arrays)], cotangents
    )
    for got, value in zip(found[:2], wanted[:2], strict=True):
        np.testing.assert_array_equal(got, value)
    np.testing.assert_array_equal(found[2][0], fused(wanted[2]))


def test_case_15_qkvpacked(random_key):
    inputs = oracle.random_inputs(random_key, 11, 11, heads=(3, 3))
    cotangents = inputs.dout, inputs.dlse
    wanted = values(lambda *x: apart(x), inputs.arrays, cotangents)
    packed = jnp.stack(inputs.arrays, axis=-3)
    found = values(lambda x: attention_qkvpacked(x, mask="causal", return_lse=True), [packed], cotangents)
    np.testing.assert_array_equal(found[0], wanted[0])
    np.testing.assert_array_equal(found[2][0], jnp.stack(wanted[2], axis=-3))


def test_case_15_kvpacked(random_key):
    """The value's offset in a row is kv_heads * dim, whatever the number of query heads."""
    inputs = oracle.random_inputs(random_key, 9, 14, heads=(6, 2))
    cotangents = inputs.dout, inputs.dlse
    wanted = values(lambda *x: apart(x, Causal("bottom_right")), inputs.arrays, cotangents)
    query, key, value = inputs.arrays

    def call(query, kv):
        return attention_kvpacked(query, kv, mask=Causal("bottom_right"), return_lse=True)

    found = values(call, [query, jnp.stack([key, value], axis=-3)], cotangents)
    np.testing.assert_array_equal(found[0], wanted[0])
    np.testing.assert_array_equal(found[2][0], wanted[2][0])
    np.testing.assert_array_equal(found[2][1], jnp.stack(wanted[2][1:], axis=-3))


def test_vmap_of_a_packed_array(random_key):
    qkv = fused(oracle.random_inputs(random_key, 7, 7, heads=(4, 2), batch=(3,)).arrays)
    found = jax.vmap(lambda x: attention_qkvfused(x, kv_heads=2), in_axes=1, out_axes=1)(jnp.moveaxis(qkv, 0, 1))
    np.testing.assert_allclose(jnp.moveaxis(found, 1, 0), attention_qkvfused(qkv, kv_heads=2), atol=1e-6)


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: attention_qkvpacked(jnp.ones((2, 5, 4, 3, 8))),
            r"third axis from the end .* so it is 3 long; .*qkvfused",
        ),
        (
            lambda: attention_qkvpacked(jnp.ones((5, 3, 8))),
            r"qkv has shape \(5, 3, 8\): it is \[\*batch, seq, 3, heads, dim\]",
        ),
        (
            lambda: attention_qkvfused(jnp.ones((2, 5, 7, 8)), kv_heads=2),
            "leaves 3 query heads, which must be a multiple",
        ),
        (
            lambda: attention_kvpacked(jnp.ones((2, 5, 4, 8)), jnp.ones((2, 5, 3, 2, 8))),
            "kv has shape .* so it is 2 long",
        ),
        (
            lambda: attention_kvpacked(jnp.ones((2, 5, 4, 8)), jnp.ones((2, 5, 2, 2, 16))),
            "query has 8 and kv 16; a packed array has one head dim",
        ),
        (lambda: attention_kvpacked(jnp.ones((2, 5, 4, 8)), jnp.ones((2, 5, 2, 3, 8))), "query has 4 heads and key 3"),
        (lambda: attention_qkvfused(jnp.ones((5, 6, 8)), kv_heads=2, scale=-1.0), "scale is -1.0: with packed arrays"),
        (
            lambda: attention_ragged(*[jnp.ones((2, 5, 2, 8))] * 3, np.array([5])),
            "ragged arrays are .*without batch axes",
        ),
        (lambda: attention_ragged(*[jnp.ones((5, 2, 8))] * 3, np.array([3, 4])), "q_lengths sum up to 7, .* 5 tokens"),
        (
            lambda: attention_ragged(jnp.ones((4, 2, 8)), *[jnp.ones((5, 2, 8))] * 2, np.array([3])),
            "query has 4 tokens and key 5: give kv_lengths",
        ),
        (
            lambda: attention_ragged(*[jnp.ones((5, 2, 8))] * 3, np.array([3]), np.array([3, 1])),
            "q_lengths has 1 sequences and kv_lengths 2",
        ),
    ],
)
def test_what_does_not_fit_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_lengths_are_integers():
    with pytest.raises(TypeError, match=r"q_lengths has shape \(1,\) and dtype float32: give one integer per sequence"):
        attention_ragged(*[jnp.ones((5, 2, 8))] * 3, jnp.ones(1))


@pytest.mark.parametrize("mask", [eqx_attn.Full(), Causal(), eqx_attn.SlidingWindow(2, 1, "bottom_right")])
@pytest.mark.parametrize("cross", [False, True])
def test_ragged_equals_each_sequence_alone(mask, cross, random_key):
    """Sequences of length 0 and 1; what lies behind the last one holds NaN, is never read, and gets no gradient."""
    q_lengths, kv_lengths = [5, 0, 1, 8, 3], [4, 2, 1, 0, 9] if cross else [5, 0, 1, 8, 3]
    inputs = oracle.random_inputs(random_key, 20, 19 if cross else 20, batch=())
    used = sum(q_lengths), sum(kv_lengths)
    arrays = [x.at[n:].set(jnp.nan) for x, n in zip(inputs.arrays, (used[0], used[1], used[1]), strict=True)]
    cotangents = inputs.dout.at[used[0] :].set(jnp.nan), inputs.dlse.at[:, used[0] :].set(0)
    given = np.array(q_lengths), np.array(kv_lengths) if cross else None

    def call(*arrays):
        return attention_ragged(*arrays, *given, mask=mask, return_lse=True)

    out, lse, grads = values(call, arrays, cotangents)
    assert (out[used[0] :] == 0).all() and jnp.isneginf(lse[:, used[0] :]).all()
    assert all((grad[n:] == 0).all() for grad, n in zip(grads, (used[0], used[1], used[1]), strict=True))
    q_ends, kv_ends = np.cumsum(q_lengths), np.cumsum(kv_lengths)
    for q_end, kv_end, q_length, kv_length in zip(q_ends, kv_ends, q_lengths, kv_lengths, strict=True):
        q_rows, kv_rows = slice(q_end - q_length, q_end), slice(kv_end - kv_length, kv_end)
        if q_length == 0 or kv_length == 0:
            assert (out[q_rows] == 0).all() and all((grad[kv_rows] == 0).all() for grad in grads[1:])
            continue
        alone = [x[rows] for x, rows in zip(arrays, (q_rows, kv_rows, kv_rows), strict=True)]
        own = values(lambda *x: apart(x, mask), alone, (cotangents[0][q_rows], cotangents[1][:, q_rows]))
        found = out[q_rows], lse[:, q_rows], grads[0][q_rows], grads[1][kv_rows], grads[2][kv_rows]
        for got, wanted in zip(found, (*own[:2], *own[2]), strict=True):
            np.testing.assert_allclose(got, wanted, atol=2e-5)


PACKED = {
    "qkvfused": (functools.partial(attention_qkvfused, kv_heads=1), [(2, 64, 4, 32)]),
    "qkvpacked": (attention_qkvpacked, [(2, 64, 3, 2, 32)]),
    "kvpacked": (attention_kvpacked, [(2, 64, 2, 32), (2, 64, 2, 1, 32)]),
}


@pytest.mark.parametrize("name", PACKED)
def test_gpu_kernels_read_and_write_packed_arrays_in_place(name):
    """Around the kernels nothing is as large as an array but reshapes that keep its bytes where they are."""
    pytest.importorskip("triton")
    function, shapes = PACKED[name]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    dout = jax.ShapeDtypeStruct((2, 64, 2, 32), jnp.bfloat16)

    def forward(*arrays):
        return function(*arrays, mask="causal")

    def backward(dout, *arrays):
        out, pull_back = jax.vjp(forward, *arrays)
        return out, pull_back(dout)

    for run, arguments, kernels in ((forward, arrays, 1), (backward, [dout, *arrays], 3)):
        with eqx_attn.target("sm_90a"):
            text = jax.jit(run).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
        found = re.findall(r"stablehlo\.(\w+)[^\n]*bf16", text)
        assert found.count("custom_call") == kernels
        assert set(found) <= {"custom_call", "reshape"}
