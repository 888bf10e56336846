"""What is timed: the sizes of a call, its mask and its options, and the count of scores that it needs."""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .. import BlockSparse, Causal, Chunked, Dilated, Dropout, Full, Mask, PrefixLM, Segments, SlidingWindow


@dataclasses.dataclass(frozen=True)
class BlockMap:
    """A random map of blocks of `size` by `size` of which about `share` are seen; those on the diagonal always are."""

    size: int = 128
    share: float = 0.5
    seed: int = 0

    def seen(self, seq: int) -> np.ndarray:
        """Booleans `[blocks, blocks]`."""
        count = -(-seq // self.size)
        return (np.random.default_rng(self.seed).random((count, count)) < self.share) | np.eye(count, dtype=bool)


@dataclasses.dataclass(frozen=True)
class Case:
    """Self-attention of `[batch, seq, q_heads, head_dim]`.

    `kv_seq` is another number of keys, of a mask that is full, and `v_dim` another head dim of the value.
    `window` counts the keys that a query of a causal window sees, itself included. `documents` are the lengths of the
    documents packed in each row. `prefix`, `chunk` and `dilation` are the numbers of `PrefixLM`, `Chunked` and `Dilated`.
    `bias` names the axes of an additive bias, such as "1hqk" for `[1, q_heads, seq, seq]` or "b11k". Bias and `sinks` are
    differentiated like query, key and value. `layout="qkv"` is one array for `attention_qkvfused`.
    """

    batch: int
    seq: int
    q_heads: int
    head_dim: int
    kv_heads: int | None = None
    kv_seq: int | None = None
    v_dim: int | None = None
    mask: Literal["full", "causal"] = "causal"
    window: int | None = None
    documents: tuple[int, ...] = ()
    blocks: BlockMap | None = None
    prefix: int | None = None
    chunk: int | None = None
    dilation: int | None = None
    bias: str | None = None
    sinks: bool = False
    softcap: float | None = None
    dropout: float = 0.0
    lse: bool = False
    max_logit: bool = False
    layout: Literal["bshd", "qkv"] = "bshd"
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        """The sizes, and what differs from a plain causal call."""
        given = {
            x.name: getattr(self, x.name) for x in dataclasses.fields(self)[4:] if getattr(self, x.name) != x.default
        }
        words = (f"{name} {str(value).replace(' ', '')}" for name, value in given.items())
        return ", ".join((f"({self.batch},{self.seq},{self.q_heads},{self.head_dim})", *words))

    def arrays(self) -> tuple[dict[str, Array], tuple[Array, ...]]:
        """Random arrays that are differentiated, by name, and cotangents of the output and, with `lse`, of the lse."""
        keys = jax.random.split(jax.random.key(0), 7)
        kv_heads, kv_seq, v_dim = self.kv_heads or self.q_heads, self.kv_seq or self.seq, self.v_dim or self.head_dim

        def tokens(key, seq, heads, dim):
            return jax.random.normal(key, (self.batch, seq, heads, dim), self.dtype)

        if self.layout == "qkv":
            arrays = {"qkv": tokens(keys[0], self.seq, self.q_heads + 2 * kv_heads, self.head_dim)}
        else:
            arrays = {
                "query": tokens(keys[0], self.seq, self.q_heads, self.head_dim),
                "key": tokens(keys[1], kv_seq, kv_heads, self.head_dim),
                "value": tokens(keys[2], kv_seq, kv_heads, v_dim),
            }
        if self.bias is not None:
            sizes = {"1": 1, "b": self.batch, "h": self.q_heads, "q": self.seq, "k": kv_seq}
            arrays["bias"] = jax.random.normal(keys[4], tuple(sizes[axis] for axis in self.bias), self.dtype)
        if self.sinks:
            arrays["sinks"] = jax.random.normal(keys[5], (self.q_heads,), jnp.float32)
        dlse = (jax.random.normal(keys[6], (self.batch, self.q_heads, self.seq), jnp.float32),) if self.lse else ()
        return arrays, (tokens(keys[3], self.seq, self.q_heads, v_dim), *dlse)

    def ours(self) -> tuple[Mask, Dropout | None]:
        """The mask as eqx_attn takes it, and the dropout with its key."""
        mask = Causal() if self.mask == "causal" else Full()
        if self.prefix is not None:
            mask = PrefixLM(jnp.int32(self.prefix))
        if self.window is not None:
            mask = SlidingWindow(self.window - 1, 0)
        if self.documents:
            mask &= Segments.from_lengths(jnp.array([self.documents], jnp.int32), self.seq)
        if self.blocks is not None:
            mask &= BlockSparse(self.blocks.seen(self.seq), self.blocks.size)
        if self.chunk is not None:
            mask &= Chunked(self.chunk)
        if self.dilation is not None:
            mask &= Dilated(self.dilation)
        return mask, Dropout(self.dropout, jax.random.key(11)) if self.dropout else None

    def dense(self) -> Array | None:
        """The mask as a boolean array `[1, 1, seq, kv_seq]`, where `is_causal` alone does not say it."""
        return None if self._is_plain() else jnp.asarray(self.seen())[None, None]

    def _is_plain(self) -> bool:
        return not self.documents and (self.window, self.blocks, self.prefix, self.chunk, self.dilation) == (None,) * 5

    def seen(self) -> np.ndarray:
        """Booleans `[seq, kv_seq]`, True where a query sees a key."""
        query, key = np.arange(self.seq)[:, None], np.arange(self.kv_seq or self.seq)[None, :]
        seen = key <= query if self.mask == "causal" else np.ones((query.size, key.size), bool)
        if self.prefix is not None:
            seen |= key < self.prefix
        if self.window is not None:
            seen &= key > query - self.window
        if self.documents:
            ids = np.repeat(np.arange(len(self.documents)), self.documents)
            seen &= ids[:, None] == ids[None, :]
        if self.blocks is not None:
            size = self.blocks.size
            seen &= np.kron(self.blocks.seen(self.seq), np.ones((size, size), bool))[: self.seq, : self.seq]
        if self.chunk is not None:
            seen &= query // self.chunk == key // self.chunk
        if self.dilation is not None:
            seen &= (query - key) % self.dilation == 0
        return seen

    def visible(self) -> int:
        """How many (query, key) pairs a head has in a row."""
        if (self.kv_seq, self.blocks, self.prefix, self.chunk, self.dilation) != (None,) * 5:
            return _counts(self)[0]
        if self.mask == "full":
            return sum(length**2 for length in self.documents or (self.seq,))
        window = self.window or self.seq
        return sum(_causal_pairs(length, min(window, length)) for length in self.documents or (self.seq,))

    def visited_blocks(self) -> int:
        """How many blocks of 128 x 128 scores hold a visible one, whatever tiles a kernel has."""
        return _counts(self)[1]

    def flops(self, direction: str) -> float:
        """Two products forward, of 2 operations an element; five backward: scores, dq and dk; weights' gradient and dv."""
        of_key, of_value = self.head_dim, self.v_dim or self.head_dim
        channels = of_key + of_value if direction == "forward" else 3 * of_key + 2 * of_value
        return 2.0 * self.batch * self.q_heads * channels * self.visible()


@functools.cache
def _counts(case: Case) -> tuple[int, int]:
    seen = case.seen()
    return int(seen.sum()), int(blocks_of(seen, 128, 128).sum())


def blocks_of(seen: np.ndarray, block_q: int, block_kv: int) -> np.ndarray:
    """Which blocks of `[q_seq, kv_seq]` booleans hold a True one."""
    rows, columns = (np.arange(0, length, block) for length, block in zip(seen.shape, (block_q, block_kv), strict=True))
    return np.logical_or.reduceat(np.logical_or.reduceat(seen, rows, axis=0), columns, axis=1)


def _causal_pairs(length: int, window: int) -> int:
    return window * (window + 1) // 2 + (length - window) * window


def first_example(tree: Any) -> Any:
    """The arrays of a case, or what was computed from them, of the first example of the batch alone."""
    return jax.tree.map(lambda x: x[:1] if x.ndim > 1 else x, tree)
