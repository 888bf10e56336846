"""Published attention kernels for JAX as peers: each takes the cases that it has, in the form that suits it best."""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from ._case import Case
from ._implementations import Implementation, jax_nn, lacking


class Refused(ValueError):
    """A peer that is not installed, or that has not what a case needs."""


def peer(name: str, case: Case) -> Implementation:
    """The peer of that name for a case. Raises `Refused` with the reason where it has not what the case needs."""
    return HOPPER_PEERS[name](case)


def _cudnn(case: Case) -> Implementation:
    """Through `jax.nn`: with its own window where there is one, else with a dense mask for what it has no flag for."""
    if missing := lacking(case):
        raise Refused(f"jax.nn has no {missing}")
    if case.v_dim not in (None, case.head_dim):
        return _with_wide_value(jax_nn("cudnn", dataclasses.replace(case, v_dim=None)), case)
    plain_window = case.window is not None and not case.documents
    return dataclasses.replace(jax_nn("cudnn", case, "cudnn_window" if plain_window else None), name="cudnn")


def _with_wide_value(implementation: Implementation, case: Case) -> Implementation:
    """`jax.nn` has one head dim: zeros fill the value's up, and the output's are cut off."""
    v_dim = case.v_dim
    assert v_dim is not None
    if v_dim > case.head_dim:
        raise Refused(f"jax.nn has one head dim, and the value's, {v_dim}, is wider than the key's, {case.head_dim}")

    def function(arrays, rest):
        value = jnp.pad(arrays["value"], [(0, 0)] * 3 + [(0, case.head_dim - v_dim)])
        (out,), other = implementation.function({**arrays, "value": value}, rest)
        return (out[..., :v_dim],), other

    return dataclasses.replace(implementation, name="cudnn", function=function, note="value filled up with zeros")


def _xla(case: Case) -> Implementation:
    if missing := lacking(case):
        raise Refused(f"jax.nn has no {missing}")
    if case.v_dim not in (None, case.head_dim):
        raise Refused("jax.nn has one head dim for key and value")
    return dataclasses.replace(jax_nn("xla", case), name="jax_xla")


def _fa4(case: Case) -> Implementation:
    """FlashAttention-4, `fa4_jax`. Packed documents go to its function of packed tokens."""
    _refuse(case, bias="bias", softcap="softcap", sinks="sinks", dropout="dropout")
    fa4 = _module("fa4_jax", "fa4-jax[cu13]")
    causal, window = case.mask == "causal", None if case.window is None else (case.window - 1, 0)
    if not case.documents:
        return _of_three("fa4", lambda *arrays: fa4.flash_attn(*arrays, causal=causal, window_size=window))
    return _of_packed(
        "fa4", case, lambda *arrays: fa4.flash_attn_varlen(*arrays, arrays[-1], causal=causal, window_size=window)
    )


def _fa3(case: Case) -> Implementation:
    """FlashAttention-3, `flash_attn3_jax`; the published wheel has head dim 128 only."""
    _refuse(case, bias="bias", softcap="softcap", sinks="sinks", dropout="dropout")
    if {case.head_dim, case.v_dim or case.head_dim} != {128}:
        raise Refused(f"its published wheel has head dim 128 only, not {case.head_dim}")
    fa3 = _module("flash_attn3_jax", "flash-attn3-jax")
    options: dict[str, Any] = dict(is_causal=case.mask == "causal" and case.window is None)
    options["window_size"] = (-1, -1) if case.window is None else (case.window - 1, 0)
    if not case.documents:
        return _of_three("fa3", lambda *arrays: fa3.flash_mha(*arrays, **options))
    longest = max(case.documents)
    options |= dict(max_seqlen_q=longest, max_seqlen_k=longest)
    return _of_packed("fa3", case, lambda *arrays: fa3.flash_mha_varlen(*arrays, arrays[-1], **options))


def _tokamax(case: Case) -> Implementation:
    """tokamax's Mosaic GPU kernels; packed documents as a dense mask, since it has nothing else."""
    _refuse(case, sinks="sinks", dropout="dropout")
    tokamax = _module("tokamax", "tokamax[cuda]")
    dense = case.dense() if case.documents else None
    options: dict[str, Any] = dict(implementation="mosaic", logits_soft_cap=case.softcap)
    if case.window is not None:
        options["local_window_size"] = (case.window - 1, 0)
    options["is_causal"] = case.mask == "causal" and dense is None and case.window is None

    def function(arrays, dense):
        three = (arrays[name] for name in ("query", "key", "value"))
        out = tokamax.dot_product_attention(*three, bias=arrays.get("bias"), mask=dense, **options)
        return (out,), None

    return Implementation("tokamax", function, dense, "" if dense is None else "dense boolean mask")


def _of_three(name: str, call: Callable) -> Implementation:
    """A function of query, key and value."""
    return Implementation(name, lambda arrays, rest: ((call(*_three(arrays)),), None), None)


def _of_packed(name: str, case: Case, call: Callable) -> Implementation:
    """A function of arrays `[tokens, heads, dim]` and the documents' offsets; a row of a case has all its documents."""
    if case.batch != 1:
        raise Refused(f"packed documents of {case.batch} rows: only one row is written for it here")
    offsets = jnp.asarray(np.cumsum((0, *case.documents)), jnp.int32)
    return Implementation(
        name, lambda arrays, offsets: ((call(*(x[0] for x in _three(arrays)), offsets)[None],), None), offsets, "packed"
    )


def _three(arrays: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(arrays[name] for name in ("query", "key", "value"))


def _refuse(case: Case, **fields: str) -> None:
    if missing := [words for field, words in fields.items() if getattr(case, field) not in (None, False, 0.0)]:
        raise Refused(f"it has no {', '.join(missing)}")


def _module(name: str, package: str) -> Any:
    """An optional package; what its import raises, whatever that is, is the reason."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # A compiled package can fail in many ways, and none may end the run.
        text = " ".join(f"{type(error).__name__}: {error}".split())[:160]
        raise Refused(f"{name} cannot be imported ({text}): pip install '{package}'") from None


HOPPER_PEERS: dict[str, Callable[[Case], Implementation]] = {
    "cudnn": _cudnn,
    "fa4": _fa4,
    "fa3": _fa3,
    "tokamax": _tokamax,
    "jax_xla": _xla,
}
