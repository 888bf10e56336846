"""A byte-level GPT: how a model uses `eqx_attn.nn.MultiheadAttention`, rotary embedding and packed documents."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from .. import Causal, Segments
from .._attention import Implementation
from .._masks import Mask
from ..nn import MultiheadAttention, RotaryEmbedding
from ..sharding import reorder
from ..sharding._context import ContextParallel
from ._data import is_target
from ._mesh import by_rows


def rotary_attention(
    width: int,
    num_heads: int,
    num_kv_heads: int,
    key: PRNGKeyArray,
    implementation: Implementation | None = None,
    context: ContextParallel | None = None,
) -> MultiheadAttention:
    """The attention layer of one block."""
    rotary = RotaryEmbedding(width // num_heads)
    return MultiheadAttention(
        *(num_heads, width),
        num_kv_heads=num_kv_heads,
        rotary=rotary,
        implementation=implementation,
        context=context,
        key=key,
    )


def document_mask(segment_ids: Int[Array, " seq"]) -> Mask:
    """Each token sees the tokens of its own document up to itself."""
    return Causal() & Segments(segment_ids)


class Block(eqx.Module):
    """Attention and a multilayer perceptron, each behind a norm and beside a skip connection."""

    attention_norm: eqx.nn.RMSNorm
    attention: Callable
    mlp_norm: eqx.nn.RMSNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, width: int, attention: Callable, key: PRNGKeyArray):
        up_key, down_key = jax.random.split(key)
        self.attention_norm = eqx.nn.RMSNorm(width)
        self.attention = attention
        self.mlp_norm = eqx.nn.RMSNorm(width)
        self.up = eqx.nn.Linear(width, 4 * width, use_bias=False, key=up_key)
        self.down = eqx.nn.Linear(4 * width, width, use_bias=False, key=down_key)

    def __call__(self, x: Float[Array, "seq width"], mask) -> Float[Array, "seq width"]:
        """`mask` is whatever the attention layer takes."""
        y = jax.vmap(self.attention_norm)(x)
        x = x + self.attention(y, y, y, mask=mask)
        y = jax.vmap(self.mlp_norm)(x)
        return x + jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(y)))


class GPT(eqx.Module):
    """A decoder for one row of packed documents; map it over a batch with `jax.vmap`.

    `attention(width, num_heads, num_kv_heads, key)` makes a block's attention layer, and `make_mask(segment_ids)` what
    all of them take as `mask`. With a `context`, that of all these layers, tokens come in its order.
    """

    embedding: eqx.nn.Embedding
    blocks: Block  # stacked: each array has a leading axis of size depth
    norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear
    make_mask: Callable = eqx.field(static=True)
    context: ContextParallel | None = eqx.field(static=True)

    def __init__(
        self,
        vocabulary: int,
        width: int,
        depth: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        attention: Callable[[int, int, int, PRNGKeyArray], Callable] = rotary_attention,
        make_mask: Callable = document_mask,
        context: ContextParallel | None = None,
        *,
        key: PRNGKeyArray,
    ):
        def make_block(key):
            attention_key, block_key = jax.random.split(key)
            return Block(width, attention(width, num_heads, num_kv_heads or num_heads, attention_key), block_key)

        embedding_key, blocks_key, head_key = jax.random.split(key, 3)
        self.embedding = eqx.nn.Embedding(vocabulary, width, key=embedding_key)
        self.blocks = eqx.filter_vmap(make_block)(jax.random.split(blocks_key, depth))
        self.norm = eqx.nn.RMSNorm(width)
        self.head = eqx.nn.Linear(width, vocabulary, use_bias=False, key=head_key)
        self.make_mask = make_mask
        self.context = context

    def __call__(self, tokens: Int[Array, " seq"], segment_ids: Int[Array, " seq"]) -> Float[Array, "seq vocabulary"]:
        """Logits of each next token."""
        mask = self.make_mask(segment_ids)
        arrays, rest = eqx.partition(self.blocks, eqx.is_array)

        def apply(x, block):
            return eqx.combine(block, rest)(x, mask), None

        x, _ = jax.lax.scan(apply, jax.vmap(self.embedding)(tokens), arrays)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))


def cast(model: GPT, dtype) -> GPT:
    """`model` with all floating parameters in `dtype`."""
    floating, rest = eqx.partition(model, eqx.is_inexact_array)
    return eqx.combine(jax.tree.map(lambda x: x.astype(dtype), floating), rest)


def mean_loss(
    model: GPT, tokens: Int[Array, "rows length"], segment_ids: Int[Array, "rows length"]
) -> Float[Array, ""]:
    """Mean cross-entropy in nats of each token, given those before it in its document; first tokens are given."""
    tokens, segment_ids = by_rows((tokens, segment_ids))
    rows = (tokens[:, :-1], segment_ids[:, :-1], tokens[:, 1:], is_target(segment_ids))
    if (context := model.context) is not None:
        # Targets move with their tokens, and the mean does not see the order. From here on devices hold parts of rows.
        rows = (reorder(x, context, axis=1) for x in rows)
    inputs, ids, targets, counts = rows
    logits = jax.vmap(model)(inputs, ids).astype(jnp.float32)
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
    return jnp.mean(losses, where=counts)
