"""Calls of `attention` with options, in every layout, against the oracle."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle

import eqx_attn
from eqx_attn import _dropout

FULL, NONE = eqx_attn.Full(), oracle.Extras()


def plain(spec) -> bool:
    """Whether a kernel has separate arrays of one head dim, and no option but segments."""
    return not spec.layout.packed and not set(spec.options) - {"segments"} and spec.qk_dim == spec.v_dim


def call(layout, query, key, value, **options):
    """`attention` on three arrays, packed first where the layout is a packed one."""
    if layout == "qkv":
        qkv = jnp.concatenate([query, key, value], axis=-2)
        return eqx_attn.attention_qkvfused(qkv, kv_heads=key.shape[-2], **options)
    if layout == "kv":
        return eqx_attn.attention_kvpacked(query, jnp.stack([key, value], axis=-3), **options)
    return eqx_attn.attention(query, key, value, layout=layout, **options)


def results(inputs, mask, extras: oracle.Extras, dropout=None, layout=None, max_logit=True, **options):
    """Everything that a call gives, by the names of the oracle."""
    bias, sinks = extras.bias, extras.sinks

    @oracle.jit
    def run(arrays, learned, cotangents):
        def on(arrays, learned):
            bias, sinks = learned
            return call(
                layout or inputs.layout,
                *arrays,
                mask=mask,
                bias=bias,
                sinks=sinks,
                softcap=extras.softcap,
                dropout=dropout,
                return_lse=True,
                return_max_logit=max_logit,
                **options,
            )

        result, pull_back = jax.vjp(on, arrays, learned)
        return result, pull_back(result._replace(out=cotangents[0], lse=cotangents[1]))

    result, ((dq, dk, dv), (dbias, dsinks)) = run(inputs.arrays, (bias, sinks), (inputs.dout, inputs.dlse))
    if bias is not None:
        assert dbias.dtype == bias.dtype and dbias.shape == bias.shape
    found = dict(result._asdict(), dq=dq, dk=dk, dv=dv, dbias=dbias, dsinks=dsinks)
    return {name: np.asarray(x, np.float64) for name, x in found.items() if x is not None}


def check(inputs, mask=FULL, extras=NONE, dropout=None, **options):
    if dropout is not None:
        shape = oracle.score_shape(inputs)
        kept = kept_by(dropout, shape)
        extras = dataclasses.replace(extras, kept=kept, rate=dropout.rate)
    wanted = oracle.expected(inputs, mask, extras=extras)
    found = results(inputs, mask, extras, dropout, **options)
    if not options.get("max_logit", True):
        del wanted["max_logit"]
    assert found.keys() == wanted.keys()
    oracle.assert_matches(found, wanted, wanted)


def kept_by(dropout, shape):
    *batch, heads, q_seq, kv_seq = shape
    seeds = _dropout.seeds(dropout.key, int(np.prod(batch)), heads)
    kept = _dropout.kept(seeds, jnp.arange(q_seq), jnp.arange(kv_seq), dropout.rate)
    return np.asarray(kept).reshape(shape)
