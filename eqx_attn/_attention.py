"""The public function on three arrays: validate and serve."""

from collections.abc import Callable
from typing import Literal

from beartype import beartype
from jaxtyping import Array, Bool, Float, jaxtyped

from ._dropout import Dropout
from ._masks import as_mask, Full, Mask
from ._serve import AttentionOutput, Options, serve, sizes_of
from ._validate import check_arrays, check_scale
from .sharding._context import ContextParallel

Layout = Literal["bshd", "bhsd"]
Implementation = Literal["pallas_tpu", "triton", "gluon_hopper", "xla", "reference"]


def attention(
    query: Float[Array, "..."],
    key: Float[Array, "..."],
    value: Float[Array, "..."],
    *,
    mask: "Mask | Bool[Array, '...'] | Literal['causal'] | None" = Full(),
    bias: Float[Array, "..."] | None = None,
    sinks: Float[Array, " q_heads"] | None = None,
    softcap: float | None = None,
    dropout: Dropout | None = None,
    scale: float | None = None,
    layout: Layout = "bshd",
    implementation: Implementation | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
    context: ContextParallel | None = None,
    score_mod: Callable | None = None,
) -> "Float[Array, '...'] | AttentionOutput":
    """Scaled dot-product attention, `softmax(scale * query @ key.T) @ value` over the keys that `mask` shows.

    >>> import jax, jax.numpy as jnp
    >>> import eqx_attn
    >>> query = jax.random.normal(jax.random.key(0), (2, 16, 8, 64))  # [batch, q_seq, q_heads, head_dim]
    >>> key = value = jax.random.normal(jax.random.key(1), (2, 16, 2, 64))  # four query heads share a key/value head
    >>> eqx_attn.attention(query, key, value, mask=eqx_attn.Causal()).shape
    (2, 16, 8, 64)

    Softmax and accumulation are in float32. A query that sees no key gives 0, with lse -inf and gradient 0. Differentiable
    in query, key, value, bias and sinks (reverse mode), through the output and the lse; works under `jax.vmap` and `jax.jit`.

    **Arguments:**

    - `query`: `[*batch, q_seq, q_heads, qk_dim]` in float16, bfloat16, float32 or float64.
    - `key`: `[*batch, kv_seq, kv_heads, qk_dim]` in the same dtype; `q_heads` is a multiple of `kv_heads`.
    - `value`: `[*batch, kv_seq, kv_heads, v_dim]`.
    - `mask`: an `eqx_attn` mask, `"causal"`, or a boolean array that broadcasts to `[*batch, q_heads, q_seq, kv_seq]`, True
        where a query sees a key.
    - `bias`: floating, broadcasts to `[*batch, q_heads, q_seq, kv_seq]`; added to the scaled scores. -inf hides a key. Its
        gradient has its own shape and dtype and is only computed where it is asked for.
    - `sinks`: `[q_heads]`, a learnable logit per head that counts in the denominator of the softmax, as of a key whose value
        is 0. Zeros make the off-by-one softmax.
    - `softcap`: scores become `softcap * tanh(score / softcap)`, before the bias.
    - `dropout`: an `eqx_attn.Dropout(rate, key)`: some weights become 0 and the others grow by `1 / (1 - rate)`.
    - `scale`: what scores are multiplied with; `qk_dim**-0.5` by default.
    - `layout`: `"bshd"` as above, or `"bhsd"`: `[*batch, heads, seq, dim]`.
    - `implementation`: None takes the fastest that the device has. `"triton"`, `"pallas_tpu"` are generated kernels, `"xla"`
        blockwise JAX for any device, `"reference"` the dense oracle in float32 (float64 where x64 is enabled).
    - `deterministic`: True asks for equal bits from run to run, also in the gradients; at present every implementation has
        them whatever is given.
    - `return_lse`: return an `AttentionOutput` with the lse, which is differentiable.
    - `return_max_logit`: return an `AttentionOutput` also with the largest visible score of each head, without gradient.
    - `score_mod`: a function `(score, batch, q_head, q_index, kv_index) -> score` of scalars (float32, float64 for float64
        arrays; int32), written with `jax.numpy`, which becomes part of the kernel. It takes the score after softcap and bias; masks
        hold for what it returns, and -inf hides a key. It may close over arrays and index them; floating ones have gradients. `batch`
        counts the examples of the batch axes; indices are those of the whole arrays (with a `context`, of the original order).
    - `context`: an `eqx_attn.ContextParallel`: the sequences are spread over the devices of a mesh axis.

    **Returns:** `[*batch, q_seq, q_heads, v_dim]` in the query's dtype and layout, or an `AttentionOutput`.

    **Raises:** ValueError or TypeError while tracing, where arguments do not fit or `implementation` cannot serve
    them; also, with its line named, where a function does what kernels have no code for.
    """
    check_arrays(query, key, value, layout)
    check_scale(scale)
    options = Options(
        as_mask(mask),
        scale,
        bias,
        sinks,
        softcap,
        dropout,
        implementation,
        deterministic,
        return_max_logit,
        context,
        score_mod,
    )
    checked = _attention_bshd if layout == "bshd" else _attention_bhsd
    return result_of(checked(query, key, value, options), return_lse)


def result_of(result: AttentionOutput, return_lse: bool) -> "Array | AttentionOutput":
    """The output alone, unless more was asked for."""
    return result if return_lse or result.max_logit is not None else result.out


@jaxtyped(typechecker=beartype)
def _attention_bshd(
    query: Float[Array, "*batch q_seq q_heads qk_dim"],
    key: Float[Array, "*batch kv_seq kv_heads qk_dim"],
    value: Float[Array, "*batch kv_seq kv_heads v_dim"],
    options: Options,
) -> AttentionOutput:
    return serve((query, key, value), sizes_of(query, key, value, "bshd"), "bshd", options)


@jaxtyped(typechecker=beartype)
def _attention_bhsd(
    query: Float[Array, "*batch q_heads q_seq qk_dim"],
    key: Float[Array, "*batch kv_heads kv_seq qk_dim"],
    value: Float[Array, "*batch kv_heads kv_seq v_dim"],
    options: Options,
) -> AttentionOutput:
    return serve((query, key, value), sizes_of(query, key, value, "bhsd"), "bhsd", options)
