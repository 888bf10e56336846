"""Multihead attention, in the place of `equinox.nn.MultiheadAttention`."""

import warnings
from collections.abc import Callable
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
from beartype import beartype
from jaxtyping import Array, Bool, Float, jaxtyped, PRNGKeyArray

from .._attention import attention, Implementation
from .._dropout import Dropout
from .._masks import as_mask, Mask
from ..sharding._context import ContextParallel
from ..sharding._place import Spread
from ._cache import KVCache
from ._dropout_attention import attention_with_dropout
from ._positions import mask_positions
from ._rotary import RotaryEmbedding

_Heads = Float[Array, "seq heads dim"]
_ProcessHeads = Callable[[_Heads, _Heads, _Heads], tuple[_Heads, _Heads, _Heads]]
_Mask = None | str | Mask | Bool[Array, "q_seq kv_seq"] | Bool[Array, "num_heads q_seq kv_seq"]


class MultiheadAttention(eqx.Module):
    """Multihead attention whose middle is `eqx_attn.attention`; takes the place of `equinox.nn.MultiheadAttention`.

    Arguments, defaults, field names, initial values and leaf order are equinox's, so that models and serialised
    checkpoints carry over: change the import, or convert a module with `MultiheadAttention.from_equinox(module)`. One
    thing differs: a query that sees no key gives 0, where equinox gives the mean of all values.

    What it adds: grouped query attention (`num_kv_heads`), rotary position embedding (`rotary`), masks that are never
    made dense (`mask=eqx_attn.Causal()` and the others), and a choice of kernel (`implementation`).

    It takes one example without a batch axis; `jax.vmap` maps it over a batch, which reaches the kernel as one call.

    >>> import jax, jax.numpy as jnp
    >>> import eqx_attn
    >>> layer = eqx_attn.nn.MultiheadAttention(num_heads=8, query_size=256, num_kv_heads=2, key=jax.random.key(0))
    >>> x = jnp.ones((4, 100, 256))  # [batch, seq, channels]
    >>> jax.vmap(lambda x: layer(x, x, x, mask=eqx_attn.Causal()))(x).shape
    (4, 100, 256)
    """

    # Equinox's fields in equinox's order; what is new below has no leaves. Serialised checkpoints depend on both.
    query_proj: eqx.nn.Linear
    key_proj: eqx.nn.Linear
    value_proj: eqx.nn.Linear
    output_proj: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    num_heads: int = eqx.field(static=True)
    query_size: int = eqx.field(static=True)
    key_size: int = eqx.field(static=True)
    value_size: int = eqx.field(static=True)
    output_size: int = eqx.field(static=True)
    qk_size: int = eqx.field(static=True)
    vo_size: int = eqx.field(static=True)
    use_query_bias: bool = eqx.field(static=True)
    use_key_bias: bool = eqx.field(static=True)
    use_value_bias: bool = eqx.field(static=True)
    use_output_bias: bool = eqx.field(static=True)

    num_kv_heads: int = eqx.field(static=True)
    rotary: RotaryEmbedding | None
    implementation: Implementation | None = eqx.field(static=True)
    context: ContextParallel | None = eqx.field(static=True)

    def __init__(
        self,
        num_heads: int,
        query_size: int,
        key_size: int | None = None,
        value_size: int | None = None,
        output_size: int | None = None,
        qk_size: int | None = None,
        vo_size: int | None = None,
        use_query_bias: bool = False,
        use_key_bias: bool = False,
        use_value_bias: bool = False,
        use_output_bias: bool = False,
        dropout_p: float = 0.0,
        inference: bool = False,
        dtype=None,
        *,
        num_kv_heads: int | None = None,
        rotary: RotaryEmbedding | None = None,
        implementation: Implementation | None = None,
        context: ContextParallel | None = None,
        key: PRNGKeyArray,
    ):
        """**Arguments:**

        - `num_heads`: number of query heads.
        - `query_size`: channels of `query`.
        - `key_size`, `value_size`, `output_size`: channels of `key_`, `value` and the result. Default: `query_size`.
        - `qk_size`, `vo_size`: channels per head of query and key, and of value. Default: `query_size // num_heads`.
        - `use_query_bias`, `use_key_bias`, `use_value_bias`, `use_output_bias`: whether that projection has a bias.
        - `dropout_p`: probability of dropping an attention weight. Dropout in training needs the weights themselves, so
            it takes a dense path with memory quadratic in the length; with a `context` it is `eqx_attn.Dropout` instead,
            which drops other weights than equinox would.
        - `inference`: whether dropout is off; see `equinox.nn.inference_mode`.
        - `dtype`: of all parameters. Default: float32, or float64 in x64 mode.
        - `num_kv_heads`: number of key and value heads, which divides `num_heads`; query head `h` uses key head
            `h // (num_heads // num_kv_heads)`. Default: `num_heads`.
        - `rotary`: applied to query and key heads, after `process_heads`, at the positions that the mask compares: with
            `eqx_attn.Segments` the positions inside the segment, else the row numbers, of which the queries' are moved
            by `kv_seq - q_seq` if the mask is aligned `"bottom_right"`.
        - `implementation`: as for `eqx_attn.attention`. Default: the fastest that serves the call.
        - `context`: an `eqx_attn.ContextParallel`: sequences are spread over the devices of a mesh axis, in its order, of
            which `rotary` takes the positions.
        - `key`: a `jax.random.key` for the initial values.

        Raises `ValueError` if `num_kv_heads` does not divide `num_heads` or `rotary` is for another size of head.
        """
        key_size = query_size if key_size is None else key_size
        value_size = query_size if value_size is None else value_size
        output_size = query_size if output_size is None else output_size
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        _check_head_counts(num_heads, num_kv_heads)
        qk_size = query_size // num_heads if qk_size is None else qk_size
        vo_size = query_size // num_heads if vo_size is None else vo_size
        _check_rotary(rotary, qk_size)

        def linear(in_size, out_size, use_bias, key):
            return eqx.nn.Linear(in_size, out_size, use_bias=use_bias, dtype=dtype, key=key)

        qkey, kkey, vkey, okey = jax.random.split(key, 4)
        self.query_proj = linear(query_size, num_heads * qk_size, use_query_bias, qkey)
        self.key_proj = linear(key_size, num_kv_heads * qk_size, use_key_bias, kkey)
        self.value_proj = linear(value_size, num_kv_heads * vo_size, use_value_bias, vkey)
        self.output_proj = linear(num_heads * vo_size, output_size, use_output_bias, okey)
        self.dropout = eqx.nn.Dropout(dropout_p, inference=inference)
        self.num_heads = num_heads
        self.query_size = query_size
        self.key_size = key_size
        self.value_size = value_size
        self.output_size = output_size
        self.qk_size = qk_size
        self.vo_size = vo_size
        self.use_query_bias = use_query_bias
        self.use_key_bias = use_key_bias
        self.use_value_bias = use_value_bias
        self.use_output_bias = use_output_bias
        self.num_kv_heads = num_kv_heads
        self.rotary = rotary
        self.implementation = implementation
        self.context = context

    @classmethod
    def from_equinox(
        cls,
        mha: eqx.nn.MultiheadAttention,
        *,
        rotary: RotaryEmbedding | None = None,
        implementation: Implementation | None = None,
        context: ContextParallel | None = None,
    ) -> "MultiheadAttention":
        """The same layer with the same parameters, from an `equinox.nn.MultiheadAttention` (a stacked one too)."""
        if not isinstance(mha, eqx.nn.MultiheadAttention):
            raise TypeError(f"from_equinox takes an equinox.nn.MultiheadAttention, found {type(mha).__name__}.")
        like = eqx.filter_eval_shape(
            cls,
            *(mha.num_heads, mha.query_size, mha.key_size, mha.value_size, mha.output_size, mha.qk_size, mha.vo_size),
            *(mha.use_query_bias, mha.use_key_bias, mha.use_value_bias, mha.use_output_bias),
            rotary=rotary,
            implementation=implementation,
            context=context,
            key=jax.random.key(0),
        )
        return eqx.tree_at(_submodules, like, _submodules(mha))

    @jax.named_scope("eqx_attn.nn.MultiheadAttention")
    def __call__(
        self,
        query: Float[Array, "q_seq query_size"],
        key_: Float[Array, "kv_seq key_size"],
        value: Float[Array, "kv_seq value_size"],
        mask: _Mask = None,
        *,
        key: PRNGKeyArray | None = None,
        inference: bool | None = None,
        deterministic: bool | None = None,
        process_heads: _ProcessHeads | None = None,
        cache: KVCache | None = None,
    ) -> Float[Array, "q_seq output_size"] | tuple[Float[Array, "q_seq output_size"], KVCache]:
        """**Arguments:**

        - `query`: `[q_seq, query_size]`, floating.
        - `key_`: `[kv_seq, key_size]`, floating.
        - `value`: `[kv_seq, value_size]`, floating.
        - `mask`: an `eqx_attn` mask, `"causal"`, or a boolean array, True where a query sees a key, `[q_seq, kv_seq]`
            or `[num_heads, q_seq, kv_seq]`. Default: every query sees every key.
        - `key`: a `jax.random.key` for dropout.
        - `inference`: whether dropout is off; None asks `self.dropout.inference`.
        - `deterministic`: equinox's deprecated name of `inference`.
        - `process_heads`: takes and returns query heads `[q_seq, num_heads, qk_size]`, key heads
            `[kv_seq, num_kv_heads, qk_size]` and value heads `[kv_seq, num_kv_heads, vo_size]`.
        - `cache`: a `KVCache`, to which key and value are added before the queries look at it. Query, key and value are
            then the next tokens of one sequence, and `mask` (not `Segments`, no array) speaks of positions in all of it.

        **Returns:** `[q_seq, output_size]`; with a cache, that and the cache with the new tokens.
        The row of a query that sees no key is the output projection of 0.

        Raises `ValueError` or `TypeError` for shapes and dtypes other than these, naming the argument, and
        `RuntimeError` if dropout is on and `key` is missing.
        """
        if deterministic is not None:
            inference = deterministic
            warnings.warn(
                "MultiheadAttention()(deterministic=...) is deprecated; write MultiheadAttention()(inference=...)",
                stacklevel=2,
            )
        self._check_inputs(query, key_, value)
        mask = as_mask(mask)
        heads = (
            _project(self.query_proj, query, self.num_heads),
            _project(self.key_proj, key_, self.num_kv_heads),
            _project(self.value_proj, value, self.num_kv_heads),
        )
        if process_heads is not None:
            heads = _processed(process_heads, heads)
        if cache is not None and self.context is not None:
            raise ValueError(
                f"cache is given, and this layer has context={self.context}: a cache holds one sequence in one place; generate "
                "with a layer without context (eqx.tree_at, or the same parameters in another layer)"
            )
        if cache is None:
            order = None
            if (spread := Spread.of(self.context, (query, key_))) is not None:
                order, mask = spread.order, spread.mask(mask)
            positions = mask_positions(mask, query.shape[0], key_.shape[0], order)
            heads = _rotated(self.rotary, positions, *heads)
        else:
            query_heads, *kv_heads = _rotated(self.rotary, _next_positions(cache, query, key_), *heads)
            cache = cache.append(*kv_heads)
            mask = cache.mask(mask, query.shape[0])
            heads = (query_heads, cache.key.astype(query_heads.dtype), cache.value.astype(query_heads.dtype))
        out = self._attend(*heads, mask, key, inference)
        out = jax.vmap(self.output_proj)(out.reshape(out.shape[0], -1))
        return out if cache is None else (out, cache)

    @jaxtyped(typechecker=beartype)
    def _attend(
        self,
        query: Float[Array, "q_seq q_heads qk_size"],
        key_: Float[Array, "kv_seq kv_heads qk_size"],
        value: Float[Array, "kv_seq kv_heads vo_size"],
        mask: Mask,
        dropout_key: Any,
        inference: Any,
    ) -> Float[Array, "q_seq q_heads vo_size"]:
        # Parameters and inputs may differ in dtype; equinox lets them promote (or refuse to) in its products.
        dtype = jnp.result_type(query, key_, value)
        query, key_, value = query.astype(dtype), key_.astype(dtype), value.astype(dtype)
        if _drops(self.dropout, inference):
            if self.context is None:
                return attention_with_dropout(query, key_, value, mask, self.dropout, dropout_key)
            if dropout_key is None:
                raise RuntimeError("dropout is on and key is missing: give key=..., or inference=True")
            dropout = Dropout(float(self.dropout.p), dropout_key)
        else:
            dropout = None
        implementation, context = self.implementation, self.context
        out = attention(query, key_, value, mask=mask, dropout=dropout, implementation=implementation, context=context)
        return cast(Array, out)

    def _check_inputs(self, query, key_, value):
        sizes = dict(query=self.query_size, key_=self.key_size, value=self.value_size)
        for (name, size), x in zip(sizes.items(), (query, key_, value), strict=True):
            wanted = f"[{'q_seq' if name == 'query' else 'kv_seq'}, {size}]"
            if x.ndim > 2:
                raise ValueError(
                    f"{name} has shape {x.shape}, but MultiheadAttention takes one example, without a batch axis: "
                    f"{wanted}. Map over the batch with jax.vmap(layer)(query, key_, value)."
                )
            if x.ndim < 2 or x.shape[1] != size:
                raise ValueError(f"{name} has shape {x.shape}, but this layer was built for {wanted}.")
            if not jnp.issubdtype(x.dtype, jnp.floating):
                raise TypeError(f"{name} has dtype {x.dtype}; attention takes floating inputs: cast or embed it first.")
        if key_.shape[0] != value.shape[0]:
            raise ValueError(
                "key and value must both be sequences of equal length. "
                f"Found key_ of shape {key_.shape} and value of shape {value.shape}."
            )


def _check_head_counts(num_heads: int, num_kv_heads: int):
    if num_heads < 1 or num_kv_heads < 1:
        raise ValueError(f"num_heads is {num_heads} and num_kv_heads is {num_kv_heads}; both must be at least 1.")
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads is {num_heads} and num_kv_heads is {num_kv_heads}: each key head serves an equal group of "
            "query heads, so num_kv_heads must divide num_heads."
        )


def _check_rotary(rotary: RotaryEmbedding | None, qk_size: int):
    if rotary is not None and not isinstance(rotary, RotaryEmbedding):
        raise TypeError(
            f"rotary is a {type(rotary).__name__}; pass an eqx_attn.nn.RotaryEmbedding, and apply others in "
            "process_heads."
        )
    if rotary is not None and rotary.embedding_size != qk_size:
        raise ValueError(
            f"rotary has embedding_size {rotary.embedding_size}, but a query head has {qk_size} channels: "
            f"build RotaryEmbedding({qk_size})."
        )


def _submodules(mha) -> tuple:
    return mha.query_proj, mha.key_proj, mha.value_proj, mha.output_proj, mha.dropout


def _project(projection, x: Array, num_heads: int) -> Array:
    return jax.vmap(projection)(x).reshape(x.shape[0], num_heads, -1)


def _processed(process_heads: _ProcessHeads, heads: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
    new_heads = process_heads(*heads)
    before, after = ([x.shape for x in three] for three in (heads, new_heads))
    if before != after:
        raise ValueError(
            f"process_heads must not change the shape of the heads. Got query, key and value heads of {before}, "
            f"returned {after}."
        )
    return new_heads


def _next_positions(cache: KVCache, query: Array, key: Array):
    if query.shape[0] != key.shape[0]:
        raise ValueError(
            f"query has {query.shape[0]} tokens and key_ {key.shape[0]}: with a cache both are the next tokens of one sequence"
        )
    positions = cache.positions(query.shape[0])
    return positions, positions


def _rotated(rotary: RotaryEmbedding | None, positions: tuple[Array, Array], query: Array, key: Array, value: Array):
    if rotary is None:
        return query, key, value
    q_positions, kv_positions = positions
    return rotary(query, positions=q_positions), rotary(key, positions=kv_positions), value


def _drops(dropout: eqx.nn.Dropout, inference: bool | None) -> bool:
    """Whether `dropout` would drop anything, by its own rules."""
    off = dropout.inference if inference is None else inference
    return not off and not (isinstance(dropout.p, int | float) and dropout.p == 0)
