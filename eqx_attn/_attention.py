"""The public function: validate, resolve, call."""

import math
from typing import Literal, NamedTuple

import jax.numpy as jnp
from beartype import beartype
from jaxtyping import Array, Bool, Float, jaxtyped

from ._call import Request
from ._masks import as_mask, Full, Mask
from ._operands import Operands
from ._plan import MaskPlan, plan_mask, UNBOUNDED
from ._reference import reference_attention
from ._resolve import resolve
from ._validate import check_arrays, check_scale
from ._vjp import attend

Layout = Literal["bshd", "bhsd"]
Implementation = Literal["pallas_tpu", "triton", "gluon_hopper", "xla", "reference"]


class AttentionOutput(NamedTuple):
    """What `attention` returns when more than the output is asked for.

    `out` has the query's shape with the value's head dim; `lse`, `[*batch, q_heads, q_seq]` in float32, is the natural
    logarithm of the sum of the exponentials of a row's visible scores, -inf where there is none.
    """

    out: Array
    lse: Array


def attention(
    query: Float[Array, "..."],
    key: Float[Array, "..."],
    value: Float[Array, "..."],
    *,
    mask: "Mask | Bool[Array, '...'] | Literal['causal'] | None" = Full(),
    scale: float | None = None,
    layout: Layout = "bshd",
    implementation: Implementation | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
) -> "Float[Array, '...'] | AttentionOutput":
    """Scaled dot-product attention, `softmax(scale * query @ key.T) @ value` over the keys that `mask` shows.

    >>> import jax, jax.numpy as jnp
    >>> import eqx_attn
    >>> query = jax.random.normal(jax.random.key(0), (2, 16, 8, 64))  # [batch, q_seq, q_heads, head_dim]
    >>> key = value = jax.random.normal(jax.random.key(1), (2, 16, 2, 64))  # four query heads share a key/value head
    >>> eqx_attn.attention(query, key, value, mask=eqx_attn.Causal()).shape
    (2, 16, 8, 64)

    Softmax and accumulation are in float32. A query that sees no key gives 0, with lse -inf and gradient 0. Differentiable
    in query, key and value (reverse mode), through the output and the lse; works under `jax.vmap` and `jax.jit`.

    **Arguments:**

    - `query`: `[*batch, q_seq, q_heads, qk_dim]` in float16, bfloat16, float32 or float64.
    - `key`: `[*batch, kv_seq, kv_heads, qk_dim]` in the same dtype; `q_heads` is a multiple of `kv_heads`.
    - `value`: `[*batch, kv_seq, kv_heads, v_dim]`.
    - `mask`: an `eqx_attn` mask, `"causal"`, or a boolean array that broadcasts to `[*batch, q_heads, q_seq, kv_seq]`, True
        where a query sees a key.
    - `scale`: what scores are multiplied with; `qk_dim**-0.5` by default.
    - `layout`: `"bshd"` as above, or `"bhsd"`: `[*batch, heads, seq, dim]`.
    - `implementation`: None takes the fastest that the device has. `"triton"`, `"pallas_tpu"` are generated kernels, `"xla"`
        blockwise JAX for any device, `"reference"` the dense oracle in float32 (float64 where x64 is enabled).
    - `deterministic`: True asks for equal bits from run to run, also in the gradients; at present every implementation has
        them whatever is given.
    - `return_lse`: return an `AttentionOutput` with the lse, which is differentiable.

    **Returns:** `[*batch, q_seq, q_heads, v_dim]` in the query's dtype and layout, or an `AttentionOutput`.

    **Raises:** ValueError or TypeError while tracing, where arguments do not fit or `implementation` cannot serve them.
    """
    check_arrays(query, key, value, layout)
    check_scale(scale)
    checked = _attention_bshd if layout == "bshd" else _attention_bhsd
    result = checked(query, key, value, as_mask(mask), scale, implementation, deterministic)
    return result if return_lse else result.out


@jaxtyped(typechecker=beartype)
def _attention_bshd(
    query: Float[Array, "*batch q_seq q_heads qk_dim"],
    key: Float[Array, "*batch kv_seq kv_heads qk_dim"],
    value: Float[Array, "*batch kv_seq kv_heads v_dim"],
    mask: Mask,
    scale: float | int | None,
    implementation: str | None,
    deterministic: bool | None,
) -> AttentionOutput:
    return _attention(query, key, value, mask, scale, "bshd", implementation, deterministic)


@jaxtyped(typechecker=beartype)
def _attention_bhsd(
    query: Float[Array, "*batch q_heads q_seq qk_dim"],
    key: Float[Array, "*batch kv_heads kv_seq qk_dim"],
    value: Float[Array, "*batch kv_heads kv_seq v_dim"],
    mask: Mask,
    scale: float | int | None,
    implementation: str | None,
    deterministic: bool | None,
) -> AttentionOutput:
    return _attention(query, key, value, mask, scale, "bhsd", implementation, deterministic)


def _attention(query, key, value, mask, scale, layout, implementation, deterministic) -> AttentionOutput:
    batch_shape = query.shape[:-3]
    request, plan = prepare(query, key, value, mask, layout, deterministic)
    call = resolve(request, implementation)
    scale = float(request.qk_dim**-0.5 if scale is None else scale)
    if scale <= 0:  # the kernels take the maximum of scores before they scale
        query, scale = (-query, -scale) if scale else (jnp.zeros_like(query), 1.0)
    operands = operands_for(plan, scale)
    q, k, v = (jnp.reshape(x, (request.batch, *x.shape[-3:])) for x in (query, key, value))
    if call.default.implementation == "reference":
        out, lse = _reference(layout, q, k, v, operands)
    else:
        out, lse = attend(call, q, k, v, operands)
    return AttentionOutput(out.reshape(*batch_shape, *out.shape[1:]), lse.reshape(*batch_shape, *lse.shape[1:]))


def prepare(query, key, value, mask: Mask, layout: str, deterministic: bool | None) -> tuple[Request, MaskPlan]:
    """What resolution looks at, and the mask in the kernels' terms."""
    batch_shape = query.shape[:-3]
    seq, heads = (-3, -2) if layout == "bshd" else (-2, -3)
    q_seq, q_heads, kv_seq, kv_heads = query.shape[seq], query.shape[heads], key.shape[seq], key.shape[heads]
    plan = _without_idle_bounds(plan_mask(mask, batch_shape, q_heads, q_seq, kv_seq), q_seq, kv_seq)
    request = Request(
        layout=layout,
        dtype=str(query.dtype),
        batch=math.prod(batch_shape),
        q_seq=q_seq,
        kv_seq=kv_seq,
        q_heads=q_heads,
        kv_heads=kv_heads,
        qk_dim=query.shape[-1],
        v_dim=value.shape[-1],
        mask=_mask_kind(plan),
        segments=plan.segments is not None,
        dense=plan.dense is not None,
        deterministic=deterministic,
    )
    return request, plan


def operands_for(plan: MaskPlan, scale: float) -> Operands:
    """What the kernel reads besides the arrays. A window's missing bound becomes one that always holds."""
    lower, upper = plan.lower, plan.upper
    if lower is not None and upper is None:
        upper = UNBOUNDED
    return Operands(
        scale=scale,
        lower=lower,
        upper=upper,
        segments=plan.segments,
        dense=plan.dense,
    )


def _without_idle_bounds(plan: MaskPlan, q_seq: int, kv_seq: int) -> MaskPlan:
    """Row numbers lie between -q_seq and kv_seq: a bound outside never hides a key, and its kernel need not ask."""
    if plan.segments is not None:
        return plan
    lower = None if plan.lower is not None and plan.lower <= 1 - q_seq else plan.lower
    upper = None if plan.upper is not None and plan.upper >= kv_seq - 1 else plan.upper
    return MaskPlan(lower, upper, plan.segments, plan.dense)


def _mask_kind(plan: MaskPlan) -> str:
    if plan.lower is not None:
        return "window"
    return "full" if plan.upper is None else "causal"


def _reference(layout, q, k, v, operands):
    if layout == "bshd":
        return reference_attention(q, k, v, operands)
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    out, lse = reference_attention(q, k, v, operands)
    return jnp.swapaxes(out, 1, 2), lse
