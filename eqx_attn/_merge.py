"""Merging two partial results of attention over different keys."""

from typing import Literal

import jax.numpy as jnp
from beartype import beartype
from jaxtyping import Array, Float, jaxtyped

from ._merge_parts import merge_parts
from ._serve import AttentionOutput


@jaxtyped(typechecker=beartype)
def merge(
    out_a: Float[Array, "..."],
    lse_a: Float[Array, "..."],
    out_b: Float[Array, "..."],
    lse_b: Float[Array, "..."],
    *,
    layout: Literal["bshd", "bhsd"] = "bshd",
) -> AttentionOutput:
    """The result of attention over the keys of both parts, from the results over each.

    >>> import jax, jax.numpy as jnp
    >>> import eqx_attn
    >>> query = key = value = jax.random.normal(jax.random.key(0), (8, 2, 64))
    >>> first = eqx_attn.attention(query, key[:3], value[:3], return_lse=True)
    >>> second = eqx_attn.attention(query, key[3:], value[3:], return_lse=True)
    >>> whole = eqx_attn.attention(query, key, value)
    >>> bool(jnp.allclose(eqx_attn.merge(*first[:2], *second[:2]).out, whole, atol=1e-5))
    True

    Computed in float32 (float64 for float64 inputs), differentiable; a part that saw no key (lse -inf, whatever its output
    holds) counts nothing, and where both saw none the result is 0 with lse -inf.

    **Arguments:**

    - `out_a`, `out_b`: `[*batch, q_seq, q_heads, v_dim]`, or as `layout` says.
    - `lse_a`, `lse_b`: `[*batch, q_heads, q_seq]`, natural logarithm.

    **Returns:** an `AttentionOutput` whose `out` has the dtype of `out_a`.
    """
    for name, out, lse in (("a", out_a, lse_a), ("b", out_b, lse_b)):
        rows = _rows(out, layout)
        if out.ndim < 3 or lse.shape != rows:
            raise ValueError(
                f"lse_{name} has shape {lse.shape}, but out_{name} of shape {out.shape} in layout {layout!r} has rows "
                f"[*batch, q_heads, q_seq] = {rows}"
            )
    if out_a.shape != out_b.shape:
        raise ValueError(f"out_a has shape {out_a.shape} and out_b {out_b.shape}: they are the same queries' results")
    wide = jnp.dtype(jnp.float64 if out_a.dtype == jnp.float64 else jnp.float32)
    out, lse = merge_parts(out_a, lse_a.astype(wide), out_b, lse_b.astype(wide), layout)
    return AttentionOutput(out.astype(out_a.dtype), lse)


def _rows(out, layout):
    if layout == "bshd":
        return (*out.shape[:-3], out.shape[-2], out.shape[-3])
    return out.shape[:-1]
