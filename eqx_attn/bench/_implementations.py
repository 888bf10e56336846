"""What is compared: this package and, as peers, what comes with JAX."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .. import attention, attention_qkvfused
from ._case import Case, first_example
from ._numerics import tolerance

OURS = "eqx_attn"
PEERS = ("cudnn", "xla")


@dataclasses.dataclass(frozen=True)
class Implementation:
    """`function(arrays, rest) -> (results, other)`; `note` is for the reader.

    `arrays` are those of the case, which are differentiated; `rest` is made beforehand: the mask as this function takes
    it. `results` are the output, first, and what else has a gradient; `other` has none.
    """

    name: str
    function: Callable
    rest: Any
    note: str = ""

    def forward(self) -> Callable:
        """`(arrays, cotangents, rest) -> (results, other)`, jitted."""
        function = self.function
        return jax.jit(lambda arrays, cotangents, rest: function(arrays, rest))

    def both(self) -> Callable:
        """The same arguments to the gradients by name and `other`, jitted: the forward and the backward."""
        function = self.function

        def gradients(arrays, cotangents, rest):
            results, pullback, other = jax.vjp(lambda arrays: function(arrays, rest), arrays, has_aux=True)
            return pullback(tuple(cotangents[: len(results)]))[0], other

        return jax.jit(gradients)


def implementations(case: Case, peers: tuple[str, ...]) -> list[Implementation]:
    """Ours first, then the peers that have what the case needs. cuDNN's own window is one more where it is a window."""
    without = lacking(case)
    if without:
        return [ours(case, note=f"no peer: jax.nn has no {without}" if peers else "")]
    found = [ours(case)]
    for peer in peers:
        found.append(jax_nn(peer, case))
        if peer == "cudnn" and case.window is not None:
            found.append(jax_nn(peer, case, "cudnn_window"))
    return found


def ours(
    case: Case,
    implementation: str | None = None,
    name: str = OURS,
    note: str = "",
    deterministic: bool | None = None,
) -> Implementation:
    """`eqx_attn.attention`, or `attention_qkvfused`; `rest` are the mask and the dropout."""
    options: dict[str, Any] = dict(softcap=case.softcap, return_lse=case.lse, return_max_logit=case.max_logit)
    options |= dict(implementation=implementation, deterministic=deterministic)

    def function(arrays, rest):
        mask, dropout = rest
        given: dict[str, Any] = {name: arrays.get(name) for name in ("bias", "sinks")} | options
        if case.layout == "qkv":
            kv_heads = case.kv_heads or case.q_heads
            result = attention_qkvfused(arrays["qkv"], kv_heads=kv_heads, mask=mask, dropout=dropout, **given)
        else:
            query, key, value = (arrays[name] for name in ("query", "key", "value"))
            result = attention(query, key, value, mask=mask, dropout=dropout, **given)
        if isinstance(result, jax.Array):
            return (result,), None
        return (result.out, result.lse) if case.lse else (result.out,), result.max_logit

    return Implementation(name, function, case.ours(), note)


def needs_check(case: Case, peers: tuple[str, ...]) -> bool:
    """Whether the output of a peer would not tell that ours is wrong."""
    return not peers or bool(lacking(case)) or case.bias is not None or case.lse or case.layout != "bshd"


def lacking(case: Case) -> str:
    """What the case needs and `jax.nn.dot_product_attention` has not; empty where it has all."""
    needs = {
        "softcap": case.softcap is not None,
        "sinks": case.sinks,
        "dropout": case.dropout > 0,
        "largest score": case.max_logit,
    }
    return ", ".join(name for name, is_needed in needs.items() if is_needed)


def jax_nn(peer: Any, case: Case, name: str | None = None) -> Implementation:
    """`jax.nn.dot_product_attention`, causal by its flag unless a dense mask says it already."""
    options: dict[str, Any] = {}
    notes = []
    dense = case.dense()
    if name == "cudnn_window":
        assert case.window is not None
        dense, options = None, {"local_window_size": (case.window - 1, 0)}
        notes.append("local_window_size")
    elif dense is not None:
        notes.append("dense boolean mask")
    if case.layout == "qkv":
        notes.append("slices of qkv, gradient concatenated")
    # cuDNN through JAX refuses a bias that has one row for all queries.
    widen = peer == "cudnn" and case.bias is not None and case.bias[2] == "1"
    if case.bias is not None:
        notes.append("gradient of a bias made wide" if widen else "with the gradient of the bias")
    if case.lse:
        notes.append("lse without gradient")
        options["return_residual"] = True

    def function(arrays, dense):
        query, key, value = _apart(arrays, case)
        bias = arrays.get("bias")
        if widen:
            bias = jnp.broadcast_to(bias, (*bias.shape[:2], case.seq, case.seq))
        causal = case.mask == "causal" and dense is None
        result = jax.nn.dot_product_attention(
            query, key, value, bias=bias, mask=dense, is_causal=causal, implementation=peer, **options
        )
        return ((result[0],), result[1]) if case.lse else ((result,), None)

    return Implementation(name or peer, function, dense, "; ".join(notes))


def _apart(arrays: dict[str, jax.Array], case: Case) -> tuple[jax.Array, jax.Array, jax.Array]:
    if case.layout != "qkv":
        return arrays["query"], arrays["key"], arrays["value"]
    query, key, value = jnp.split(arrays["qkv"], [case.q_heads, case.q_heads + (case.kv_heads or case.q_heads)], axis=2)
    return query, key, value


def difference(out: Any, other: Any) -> float:
    """The relative root-mean-square difference of two outputs: a few thousandths between right ones in bfloat16."""
    out, other = (jnp.asarray(x, jnp.float32) for x in (out, other))
    return float(jnp.sqrt(jnp.mean((out - other) ** 2) / jnp.mean(other**2)))


def check(case: Case, forward: Callable, both: Callable) -> tuple[float, str]:
    """Our own functions against eqx_attn's `xla` on the first example: the largest difference, and what is wrong.

    Results and all gradients, with cotangents that are 0 for the other examples, so that gradients summed over the batch
    are those of the first. Both sides round as `_numerics.tolerance` says.
    """
    arrays, cotangents = case.arrays()
    cotangents = jax.tree.map(lambda x: x.at[1:].set(0), cotangents)
    xla, rest = ours(case, "xla"), case.ours()
    found = forward(arrays, cotangents, rest), both(arrays, cotangents, rest)
    few = first_example(arrays), first_example(cotangents), rest
    wanted = xla.forward()(*few), xla.both()(*few)
    differences = {
        jax.tree_util.keystr(path): difference(got, want)
        for (path, got), want in zip(
            jax.tree.leaves_with_path(first_example(found)), jax.tree.leaves(wanted), strict=True
        )
    }
    name, worst = max(differences.items(), key=lambda item: math.inf if math.isnan(item[1]) else item[1])
    bound = 2 * tolerance("dq", case.dtype, case.head_dim, case.seq)
    return worst, "" if worst <= bound else f"wrong: {name} differs from xla by {worst:.1e}, bound {bound:.1e}"
