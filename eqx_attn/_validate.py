"""The checks of `attention`'s arguments, whose messages name the argument, what was found, and the way out."""

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ._dropout import Dropout

LAYOUTS = {"bshd": "[*batch, seq, heads, dim]", "bhsd": "[*batch, heads, seq, dim]"}


def check_arrays(query, key, value, layout: str) -> None:
    """Raises TypeError or ValueError where query, key and value do not fit one another or the layout."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}: it is one of {', '.join(map(repr, LAYOUTS))}")
    arrays = dict(query=query, key=key, value=value)
    for name, array in arrays.items():
        check_array(name, array, LAYOUTS[layout], 3)
    dtypes = {name: str(array.dtype) for name, array in arrays.items()}
    if len(set(dtypes.values())) > 1:
        raise TypeError(f"dtypes differ: {_listed(dtypes)}; cast them to one, for instance key.astype(query.dtype)")
    batches = {name: array.shape[:-3] for name, array in arrays.items()}
    if len(set(batches.values())) > 1:
        raise ValueError(
            f"batch axes differ: {_listed(batches)} (the axes before {LAYOUTS[layout].removeprefix('[*batch, ').rstrip(']')}); "
            "broadcast them with jnp.broadcast_to, or map the call with jax.vmap"
        )
    seq, heads = (-3, -2) if layout == "bshd" else (-2, -3)
    for axis, what in ((seq, "kv_seq"), (heads, "kv_heads")):
        if key.shape[axis] != value.shape[axis]:
            raise ValueError(
                f"{what} differs: key of shape {key.shape} has {key.shape[axis]}, value of shape {value.shape} has "
                f"{value.shape[axis]} (layout {layout!r} is {LAYOUTS[layout]})"
            )
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"head dims differ: query has {query.shape[-1]} and key {key.shape[-1]} (shapes {query.shape}, {key.shape})"
        )
    q_heads, kv_heads = query.shape[heads], key.shape[heads]
    if q_heads % kv_heads:
        other = f"; with layout={_other(layout)!r} the heads would be axis {'-3' if layout == 'bshd' else '-2'}"
        raise ValueError(
            f"query has {q_heads} heads and key {kv_heads}: the number of query heads must be a multiple of the number of "
            f"key/value heads (layout {layout!r} is {LAYOUTS[layout]}{other})"
        )


def check_scale(scale) -> None:
    """Raises TypeError where `scale` is not a Python number."""
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, int | float)):
        raise TypeError(
            f"scale is a {type(scale).__name__}: it is a Python number or None (qk_dim**-0.5); multiply query by a traced or "
            "learned scale, and pass scale=1.0"
        )


def check_bias(bias) -> None:
    """Raises TypeError where `bias` is no floating array."""
    if bias is None:
        return
    if not hasattr(bias, "shape") or not hasattr(bias, "dtype"):
        raise TypeError(
            f"bias is a {type(bias).__name__}: give an array that broadcasts to [*batch, q_heads, q_seq, kv_seq]"
        )
    if bias.dtype == jnp.bool_:
        raise TypeError("bias has dtype bool: it is added to the scores; give a boolean array as mask")
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        raise TypeError(f"bias has dtype {bias.dtype}: it is added to the scores; write bias.astype(jnp.float32)")


def check_sinks(sinks, q_heads: int) -> None:
    """Raises TypeError or ValueError where `sinks` is not one floating logit per query head."""
    if sinks is None:
        return
    if not hasattr(sinks, "shape") or not jnp.issubdtype(sinks.dtype, jnp.floating):
        found = getattr(sinks, "dtype", type(sinks).__name__)
        raise TypeError(f"sinks is {found}: give a floating array of one logit per query head")
    if sinks.shape != (q_heads,):
        raise ValueError(f"sinks has shape {sinks.shape}: there are {q_heads} query heads, so give shape ({q_heads},)")


def check_softcap(softcap) -> None:
    """Raises where `softcap` is no positive Python number."""
    if softcap is None:
        return
    if isinstance(softcap, bool) or not isinstance(softcap, int | float):
        raise TypeError(f"softcap is a {type(softcap).__name__}: it is a Python number or None")
    if not softcap > 0:
        raise ValueError(f"softcap is {softcap}: it bounds the scores' size, so give a number above 0, or None")


def check_dropout(dropout) -> None:
    """Raises TypeError where `dropout` is no `Dropout`."""
    if dropout is not None and not isinstance(dropout, Dropout):
        raise TypeError(
            f"dropout is a {type(dropout).__name__}: give eqx_attn.Dropout(rate, key), with a key of jax.random"
        )


def check_lengths(q_lengths, kv_lengths, q_tokens: int, kv_tokens: int) -> None:
    """Raises TypeError or ValueError where the lengths of ragged sequences do not fit.

    The values of traced lengths are not known: where their sum exceeds the tokens, the last sequences are cut off.
    """
    for name, lengths, tokens in (("q_lengths", q_lengths, q_tokens), ("kv_lengths", kv_lengths, kv_tokens)):
        if lengths is None:
            continue
        if not jnp.issubdtype(jnp.result_type(lengths), jnp.integer) or jnp.ndim(lengths) != 1:
            raise TypeError(
                f"{name} has shape {jnp.shape(lengths)} and dtype {jnp.result_type(lengths)}: give one integer per sequence"
            )
        # In NumPy, since under jit jnp.sum of a concrete array is traced.
        if not isinstance(lengths, Tracer) and (total := int(np.sum(np.asarray(lengths)))) > tokens:
            raise ValueError(f"{name} sum up to {total}, but there are {tokens} tokens")
    if kv_lengths is None:
        if q_tokens != kv_tokens:
            raise ValueError(
                f"query has {q_tokens} tokens and key {kv_tokens}: give kv_lengths, the lengths of the keys"
            )
    elif jnp.shape(q_lengths) != jnp.shape(kv_lengths):
        raise ValueError(
            f"q_lengths has {len(q_lengths)} sequences and kv_lengths {len(kv_lengths)}: give one length per sequence to both "
            "(0 where there is none)"
        )


def check_array(name: str, array, shape: str, axes: int) -> None:
    """Raises TypeError or ValueError where `array` is no floating array `[...]` of at least so many axes."""
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise TypeError(f"{name} is a {type(array).__name__}: give a JAX array of shape {shape}")
    if array.ndim < axes:
        raise ValueError(
            f"{name} has shape {array.shape}: it is {shape}; split the projection's output into heads with "
            f".reshape({', '.join(shape.strip('[]').split(', '))})"
        )
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(
            f"{name} has dtype {array.dtype}: attention computes in floating point; write {name}.astype(jnp.bfloat16)"
        )
    if jnp.finfo(array.dtype).bits == 8:
        raise TypeError(
            f"{name} has dtype {array.dtype}: float8 inputs are not supported yet; write {name}.astype(jnp.bfloat16)"
        )
    if 0 in array.shape:
        raise ValueError(f"{name} has shape {array.shape}: an axis of size 0 leaves nothing to attend to")


def _other(layout):
    return "bhsd" if layout == "bshd" else "bshd"


def _listed(found: dict) -> str:
    return ", ".join(f"{name} has {value}" for name, value in found.items())
