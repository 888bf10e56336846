"""A sequence through a KVCache: in one call, in chunks, token by token."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_attn
from eqx_attn import Causal, Chunked, PrefixLM, Segments, SlidingWindow
from eqx_attn.nn import KVCache, MultiheadAttention, RotaryEmbedding

SEQ, WIDTH = 12, 32


def layer(**options):
    options = dict(num_kv_heads=2, rotary=RotaryEmbedding(8)) | options
    return MultiheadAttention(4, WIDTH, key=jax.random.key(0), **options)


def tokens():
    return jax.random.normal(jax.random.key(1), (SEQ, WIDTH))


@eqx.filter_jit
def step(module, x, mask, cache):
    return module(x, x, x, mask=mask, cache=cache)


@pytest.mark.parametrize(
    "mask", ["causal", Causal("bottom_right"), SlidingWindow(3, 0), Causal() & Chunked(5), PrefixLM(1)], ids=str
)
def test_case_28_cache_with_rotary(mask):
    """equinox 704, 860: one shot, chunks and single tokens are equal, with grouped heads, in a cache larger than needed."""
    module, x = layer(), tokens()
    whole = eqx.filter_jit(module)(x, x, x, mask=mask)  # query and key have one length, so both alignments are one
    for size in (SEQ, 4, 1) if mask == "causal" else (4, 1):
        cache, found = KVCache.for_layer(module, SEQ + 5), []
        for start in range(0, SEQ, size):
            out, cache = step(module, x[start : start + size], mask, cache)
            found.append(out)
        assert int(cache.length) == SEQ
        np.testing.assert_allclose(jnp.concatenate(found), whole, atol=2e-6)


def test_steps_do_not_compile_again():
    module, x = layer(), tokens()
    cache, traces = KVCache.for_layer(module, SEQ), []

    @jax.jit
    def generate(x, cache):
        traces.append(x.shape)
        return module(x, x, x, mask="causal", cache=cache)

    for token in x:
        _, cache = generate(token[None], cache)
    assert traces == [(1, WIDTH)]


def test_vmap_over_sequences_of_different_lengths():
    module, x = layer(), tokens()
    caches = [step(module, x[:n], "causal", KVCache.for_layer(module, SEQ))[1] for n in (2, 7)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *caches)
    out, stacked = jax.vmap(lambda x, cache: step(module, x, "causal", cache))(jnp.stack([x[2:3], x[7:8]]), stacked)
    whole = module(x, x, x, mask="causal")
    np.testing.assert_allclose(out[:, 0], whole[jnp.array([2, 7])], atol=2e-6)
    assert list(stacked.length) == [3, 8]


def test_a_full_cache_is_an_error():
    module, x = layer(), tokens()
    _, cache = step(module, x[:10], "causal", KVCache.for_layer(module, 11))
    with pytest.raises(Exception, match="KVCache is full: its capacity is 11 tokens"):
        jax.block_until_ready(step(module, x[10:], "causal", cache))
    with pytest.raises(ValueError, match="key has 12 tokens and the cache room for 4"):
        module(x, x, x, cache=KVCache.for_layer(module, 4))


def test_a_cache_has_a_dtype_of_its_own():
    module, x = layer(), tokens()
    cache = KVCache.for_layer(module, SEQ, jnp.bfloat16)
    out, cache = step(module, x, "causal", cache)
    assert cache.key.dtype == jnp.bfloat16 and out.dtype == jnp.float32
    # Keys and values are rounded to 8 bits, 2^-9 off each.
    np.testing.assert_allclose(out, module(x, x, x, mask="causal"), atol=4 * 2**-9)


@pytest.mark.parametrize(
    "mask, message",
    [
        (Segments(np.ones(SEQ, int)), "mask holds Segments and there is a cache"),
        (np.ones((SEQ, SEQ), bool), "mask holds Dense and there is a cache"),
        (PrefixLM(np.ones(SEQ, bool)), "give the prefix's length"),
    ],
)
def test_masks_that_a_cache_refuses(mask, message):
    module, x = layer(), tokens()
    with pytest.raises(ValueError, match=message):
        module(x, x, x, mask=mask, cache=KVCache.for_layer(module, SEQ))


def test_what_does_not_fit_is_named():
    module, x = layer(), tokens()
    with pytest.raises(ValueError, match="query has 3 tokens and key_ 12: with a cache both are the next tokens"):
        module(x[:3], x, x, cache=KVCache.for_layer(module, SEQ))
    with pytest.raises(ValueError, match="capacity is 0"):
        KVCache.for_layer(module, 0)
    assert isinstance(eqx_attn.nn.KVCache.for_layer(module, 1), eqx.Module)
