"""Attention on packed arrays and on ragged ones: the same arguments and results as `attention`, other inputs."""

from collections.abc import Callable

import jax
from beartype import beartype
from jaxtyping import Array, Bool, Float, Integer, jaxtyped

from ._attention import Implementation, result_of
from ._dropout import Dropout
from ._masks import as_mask, Full, Mask, Segments
from ._serve import AttentionOutput, Options, serve, Sizes, sizes_of
from ._validate import check_array, check_arrays, check_lengths, check_scale
from .sharding._batch import check_packed_heads
from .sharding._context import ContextParallel


def attention_qkvpacked(
    qkv: Float[Array, "..."],
    *,
    mask: "Mask | Bool[Array, '...'] | str | None" = Full(),
    bias: Float[Array, "..."] | None = None,
    sinks: Float[Array, " heads"] | None = None,
    softcap: float | None = None,
    dropout: Dropout | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
    context: ContextParallel | None = None,
    score_mod: Callable | None = None,
) -> "Float[Array, '...'] | AttentionOutput":
    """`attention` of query, key and value that lie in one array `[*batch, seq, 3, heads, dim]`, read in place on a GPU.

    >>> import jax, jax.numpy as jnp
    >>> import eqx_attn
    >>> qkv = jax.random.normal(jax.random.key(0), (2, 16, 3, 4, 64))  # a projection's output, reshaped
    >>> eqx_attn.attention_qkvpacked(qkv, mask="causal").shape
    (2, 16, 4, 64)

    The gradient is packed as well. All other arguments, the result `[*batch, seq, heads, dim]` and the errors are those of
    `attention`.
    """
    check_array("qkv", qkv, "[*batch, seq, 3, heads, dim]", 4)
    if qkv.shape[-3] != 3:
        raise ValueError(
            f"qkv has shape {qkv.shape}: its third axis from the end holds query, key and value, so it is 3 long; for fewer "
            "key/value heads than query heads use attention_qkvfused"
        )
    check_packed_heads("qkv", qkv)
    heads = qkv.shape[-2]
    fused = qkv.reshape(*qkv.shape[:-3], 3 * heads, qkv.shape[-1])
    options = _options(
        mask, scale, bias, sinks, softcap, dropout, implementation, deterministic, return_max_logit, context, score_mod
    )
    return result_of(_fused(fused, heads, options), return_lse)


def attention_qkvfused(
    qkv: Float[Array, "..."],
    *,
    kv_heads: int,
    mask: "Mask | Bool[Array, '...'] | str | None" = Full(),
    bias: Float[Array, "..."] | None = None,
    sinks: Float[Array, " q_heads"] | None = None,
    softcap: float | None = None,
    dropout: Dropout | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
    context: ContextParallel | None = None,
    score_mod: Callable | None = None,
) -> "Float[Array, '...'] | AttentionOutput":
    """`attention` of a fused projection's output `[*batch, seq, q_heads + 2 * kv_heads, dim]`, read in place on a GPU.

    The heads of the query come first, then those of the key, then those of the value. The gradient is fused as well. All
    other arguments, the result `[*batch, seq, q_heads, dim]` and the errors are those of `attention`.
    """
    check_array("qkv", qkv, "[*batch, seq, q_heads + 2 * kv_heads, dim]", 3)
    heads = qkv.shape[-2]
    if kv_heads < 1 or heads <= 2 * kv_heads or (heads - 2 * kv_heads) % kv_heads:
        raise ValueError(
            f"qkv has {heads} heads (shape {qkv.shape}) and kv_heads is {kv_heads}: that leaves {heads - 2 * kv_heads} query "
            "heads, which must be a multiple of kv_heads"
        )
    options = _options(
        mask, scale, bias, sinks, softcap, dropout, implementation, deterministic, return_max_logit, context, score_mod
    )
    return result_of(_fused(qkv, kv_heads, options), return_lse)


def attention_kvpacked(
    query: Float[Array, "..."],
    kv: Float[Array, "..."],
    *,
    mask: "Mask | Bool[Array, '...'] | str | None" = Full(),
    bias: Float[Array, "..."] | None = None,
    sinks: Float[Array, " q_heads"] | None = None,
    softcap: float | None = None,
    dropout: Dropout | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
    context: ContextParallel | None = None,
    score_mod: Callable | None = None,
) -> "Float[Array, '...'] | AttentionOutput":
    """`attention` of key and value that lie in one array `[*batch, kv_seq, 2, kv_heads, dim]`, read in place on a GPU.

    `query` is `[*batch, q_seq, q_heads, dim]`. The gradient of `kv` is packed as well. All other arguments, the result
    `[*batch, q_seq, q_heads, dim]` and the errors are those of `attention`.
    """
    check_array("query", query, "[*batch, q_seq, q_heads, dim]", 3)
    check_array("kv", kv, "[*batch, kv_seq, 2, kv_heads, dim]", 4)
    if kv.shape[-3] != 2:
        raise ValueError(f"kv has shape {kv.shape}: its third axis from the end holds key and value, so it is 2 long")
    if query.shape[-1] != kv.shape[-1]:
        raise ValueError(
            f"head dims differ: query has {query.shape[-1]} and kv {kv.shape[-1]}; a packed array has one head dim: give key "
            "and value apart to attention(...)"
        )
    options = _options(
        mask, scale, bias, sinks, softcap, dropout, implementation, deterministic, return_max_logit, context, score_mod
    )
    return result_of(_kvpacked(query, kv, options), return_lse)


def attention_ragged(
    query: Float[Array, "..."],
    key: Float[Array, "..."],
    value: Float[Array, "..."],
    q_lengths: Integer[Array, " sequences"],
    kv_lengths: Integer[Array, " sequences"] | None = None,
    *,
    mask: "Mask | str | None" = Full(),
    sinks: Float[Array, " q_heads"] | None = None,
    softcap: float | None = None,
    dropout: Dropout | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
    context: ContextParallel | None = None,
    score_mod: Callable | None = None,
) -> "Float[Array, '...'] | AttentionOutput":
    """`attention` of sequences of different lengths that lie one after the other, without padding between them.

    >>> import jax, jax.numpy as jnp
    >>> import eqx_attn
    >>> query = key = value = jax.random.normal(jax.random.key(0), (24, 4, 64))  # [tokens, heads, dim]
    >>> lengths = jnp.array([10, 0, 1, 8])  # five tokens are left over
    >>> eqx_attn.attention_ragged(query, key, value, lengths, mask="causal").shape
    (24, 4, 64)

    **Arguments:**

    - `query`: `[q_tokens, q_heads, qk_dim]`; `key` and `value`: `[kv_tokens, kv_heads, qk_dim or v_dim]`.
    - `q_lengths`: the tokens of each sequence, 0 included. Tokens beyond their sum are never read: their result and their
        gradient are 0.
    - `kv_lengths`: the same for the keys, as many; `q_lengths` by default.
    - `mask`: as of each sequence alone: positions count from its first token, and `"bottom_right"` aligns its last query with
        its last key.
    - `score_mod`: its indices, and those of a mask's function, are of tokens in the arrays, not in their sequences.

    All other arguments, the result `[q_tokens, q_heads, v_dim]` and the errors are those of `attention`.
    """
    check_arrays(query, key, value, "bshd")
    check_scale(scale)
    if query.ndim != 3:
        raise ValueError(f"query has shape {query.shape}: ragged arrays are [tokens, heads, dim], without batch axes")
    check_lengths(q_lengths, kv_lengths, query.shape[0], key.shape[0])
    segments = Segments.from_lengths(
        q_lengths, query.shape[0], q_lengths if kv_lengths is None else kv_lengths, key.shape[0]
    )
    options = _options(
        as_mask(mask) & segments,
        *(scale, None, sinks, softcap, dropout, implementation, deterministic, return_max_logit, context, score_mod),
    )
    return result_of(_ragged(query, key, value, options), return_lse)


def _options(mask, scale, *others) -> Options:
    check_scale(scale)
    return Options(as_mask(mask), scale, *others)


@jaxtyped(typechecker=beartype)
def _fused(qkv: Float[Array, "*batch seq heads dim"], kv_heads: int, options: Options) -> AttentionOutput:
    *batch_shape, seq, heads, dim = qkv.shape
    sizes = Sizes(tuple(batch_shape), seq, seq, heads - 2 * kv_heads, kv_heads, dim, dim, str(qkv.dtype))
    return serve((qkv,), sizes, "qkv", options)


@jaxtyped(typechecker=beartype)
def _kvpacked(
    query: Float[Array, "*batch q_seq q_heads dim"], kv: Float[Array, "*batch kv_seq 2 kv_heads dim"], options: Options
) -> AttentionOutput:
    check_packed_heads("kv", kv)
    *batch_shape, kv_seq, _, kv_heads, dim = kv.shape
    # The shape alone: a slice of the array would be a copy outside jit.
    key = jax.ShapeDtypeStruct((*batch_shape, kv_seq, kv_heads, dim), kv.dtype)
    check_arrays(query, key, key, "bshd")
    sizes = sizes_of(query, key, key, "bshd")
    return serve((query, kv.reshape(*batch_shape, kv_seq, 2 * kv_heads, dim)), sizes, "kv", options)


@jaxtyped(typechecker=beartype)
def _ragged(
    query: Float[Array, "q_tokens q_heads qk_dim"],
    key: Float[Array, "kv_tokens kv_heads qk_dim"],
    value: Float[Array, "kv_tokens kv_heads v_dim"],
    options: Options,
) -> AttentionOutput:
    return serve((query, key, value), sizes_of(query, key, value, "bshd"), "bshd", options)
