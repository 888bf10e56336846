"""The keys and values of tokens that have been seen, for generation token by token."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from beartype import beartype
from jax import lax
from jaxtyping import Array, Float, Int32, jaxtyped

from .._masks import And, Causal, Chunked, Dilated, Mask, parts, PrefixLM, Segments, SlidingWindow


class KVCache(eqx.Module):
    """Room for the keys and values of `capacity` tokens, and how many there are.

    It is passed to `MultiheadAttention(..., cache=cache)` and returned with the new tokens in it; nothing is changed in
    place. A sequence gives the same results in one call, in chunks and token by token, and no step compiles anew, since
    the shapes stay the same. Positions count from the first token that was ever put in, for masks and for rotary embeddings.

    >>> import jax, jax.numpy as jnp
    >>> import eqx_attn
    >>> layer = eqx_attn.nn.MultiheadAttention(num_heads=4, query_size=32, key=jax.random.key(0))
    >>> x = jax.random.normal(jax.random.key(1), (10, 32))
    >>> cache = eqx_attn.nn.KVCache.for_layer(layer, capacity=16)
    >>> prompt, cache = layer(x[:7], x[:7], x[:7], mask="causal", cache=cache)
    >>> token, cache = layer(x[7:8], x[7:8], x[7:8], mask="causal", cache=cache)
    >>> int(cache.length)
    8

    With a batch, map both: `jax.vmap(lambda x, cache: layer(x, x, x, mask="causal", cache=cache))(x, caches)`, where `caches`
    comes from `jax.vmap(lambda _: KVCache.for_layer(layer, capacity), axis_size=batch)(None)` or has been broadcast.
    """

    key: Float[Array, "capacity kv_heads qk_size"]
    value: Float[Array, "capacity kv_heads vo_size"]
    length: Int32[Array, ""]

    @classmethod
    def for_layer(cls, layer: Any, capacity: int, dtype: Any = None) -> "KVCache":
        """An empty cache for a `MultiheadAttention`; `dtype` is that of its parameters by default."""
        if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1:
            raise ValueError(f"capacity is {capacity!r}: give the number of tokens that the cache has room for")
        dtype = layer.key_proj.weight.dtype if dtype is None else dtype
        return cls(
            jnp.zeros((capacity, layer.num_kv_heads, layer.qk_size), dtype),
            jnp.zeros((capacity, layer.num_kv_heads, layer.vo_size), dtype),
            jnp.zeros((), jnp.int32),
        )

    @property
    def capacity(self) -> int:
        """How many tokens there is room for."""
        return self.key.shape[0]

    def positions(self, tokens: int) -> Int32[Array, " tokens"]:
        """The positions of the next tokens."""
        return self.length + jnp.arange(tokens, dtype=jnp.int32)

    @jaxtyped(typechecker=beartype)
    def append(
        self, key: Float[Array, "tokens kv_heads qk_size"], value: Float[Array, "tokens kv_heads vo_size"]
    ) -> "KVCache":
        """The cache with these tokens behind the others. Raises at run time where there is no room for them."""
        tokens = key.shape[0]
        if tokens > self.capacity:
            raise ValueError(f"key has {tokens} tokens and the cache room for {self.capacity}: make a larger KVCache")
        length = eqx.error_if(
            self.length,
            self.length + tokens > self.capacity,
            f"KVCache is full: its capacity is {self.capacity} tokens; make a larger one",
        )
        start = (length, jnp.zeros_like(length), jnp.zeros_like(length))
        return KVCache(
            lax.dynamic_update_slice(self.key, key.astype(self.key.dtype), start),
            lax.dynamic_update_slice(self.value, value.astype(self.value.dtype), start),
            length + tokens,
        )

    def mask(self, mask: Mask, tokens: int) -> Mask:
        """What the last `tokens` tokens see of the cache under `mask`, whose positions are those of the whole sequence.

        Raises ValueError for masks that say something of arrays of other lengths: `Segments` and boolean arrays.
        """
        pieces = parts(mask)
        for piece in pieces:
            if not isinstance(piece, Causal | SlidingWindow | PrefixLM | Chunked | Dilated):
                raise ValueError(
                    f"mask holds {type(piece).__name__} and there is a cache: with a cache, masks speak of positions in the "
                    "whole sequence; use Causal, SlidingWindow, Chunked, Dilated or PrefixLM"
                )
            if isinstance(piece, PrefixLM) and piece.prefix.dtype == jnp.bool_:
                raise ValueError("mask holds PrefixLM of booleans and there is a cache: give the prefix's length")
        rows = jnp.arange(self.capacity, dtype=jnp.int32)
        segments = Segments(
            jnp.ones((tokens,), jnp.int32),
            (rows < self.length).astype(jnp.int32),
            self.length - tokens + jnp.arange(tokens, dtype=jnp.int32),
            rows,
        )
        return And((segments, *(_top_left(piece) for piece in pieces)))


def _top_left(piece):
    """Explicit positions say how queries and keys are aligned."""
    if isinstance(piece, Causal):
        return Causal()
    if isinstance(piece, SlidingWindow):
        return SlidingWindow(piece.left, piece.right)
    if isinstance(piece, PrefixLM):
        return PrefixLM(piece.prefix)
    return Chunked(piece.size) if isinstance(piece, Chunked) else Dilated(piece.step)
