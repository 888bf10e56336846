"""The named shapes that are timed, with the masks and the count of products that they need."""

import dataclasses
import fnmatch
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .. import Causal, Full, Mask, Segments, SlidingWindow


@dataclasses.dataclass(frozen=True)
class Case:
    """Self-attention of `[batch, seq, q_heads, head_dim]`.

    `window` counts the keys that a query of a causal window sees, itself included. `documents` are the lengths of the
    documents packed in each row.
    """

    batch: int
    seq: int
    q_heads: int
    head_dim: int
    kv_heads: int | None = None
    mask: Literal["full", "causal"] = "causal"
    window: int | None = None
    documents: tuple[int, ...] = ()
    dtype: str = "bfloat16"

    def arrays(self) -> tuple[Array, Array, Array, Array]:
        """Random query, key, value and cotangent of the output."""
        keys = jax.random.split(jax.random.key(0), 4)
        heads = (self.q_heads, self.kv_heads or self.q_heads, self.kv_heads or self.q_heads, self.q_heads)
        q, k, v, dout = (
            jax.random.normal(key, (self.batch, self.seq, count, self.head_dim), self.dtype)
            for key, count in zip(keys, heads, strict=True)
        )
        return q, k, v, dout

    def ours(self) -> Mask:
        """The mask as eqx_attn takes it."""
        if self.window is not None:
            return SlidingWindow(self.window - 1, 0)
        band = Causal() if self.mask == "causal" else Full()
        if not self.documents:
            return band
        return band & Segments.from_lengths(jnp.array([self.documents], jnp.int32), self.seq)

    def dense(self) -> Array | None:
        """The mask as a boolean array `[1, 1, seq, seq]`, where `is_causal` alone does not say it."""
        if self.window is None and not self.documents:
            return None
        rows = jnp.arange(self.seq)
        seen = rows[None, :] <= rows[:, None] if self.mask == "causal" else jnp.ones((self.seq, self.seq), bool)
        if self.window is not None:
            seen &= rows[None, :] > rows[:, None] - self.window
        if self.documents:
            ids = jnp.repeat(jnp.arange(len(self.documents)), jnp.array(self.documents), total_repeat_length=self.seq)
            seen &= ids[None, :] == ids[:, None]
        return seen[None, None]

    def visible(self) -> int:
        """How many (query, key) pairs a head has in a row."""
        if self.mask == "full":
            return sum(length**2 for length in self.documents or (self.seq,))
        window = self.window or self.seq
        return sum(_causal_pairs(length, min(window, length)) for length in self.documents or (self.seq,))

    def flops(self, direction: str) -> float:
        """Two products forward, of 2 operations an element; five backward, so 2.5 times as many."""
        forward = 4.0 * self.batch * self.q_heads * self.head_dim * self.visible()
        return forward if direction == "forward" else 2.5 * forward


def _causal_pairs(length: int, window: int) -> int:
    return window * (window + 1) // 2 + (length - window) * window


# The shapes of the project's table of published kernels, so that figures can be compared with it.
CASES = {
    "hd128_full_4k": Case(4, 4096, 16, 128, mask="full"),
    "hd128_causal_4k": Case(4, 4096, 16, 128),
    "hd128_full_16k": Case(1, 16384, 16, 128, mask="full"),
    "hd128_causal_16k": Case(1, 16384, 16, 128),
    "hd64_full_4k": Case(4, 4096, 32, 64, mask="full"),
    "hd64_causal_4k": Case(4, 4096, 32, 64),
    "hd256_full_4k": Case(4, 4096, 8, 256, mask="full"),
    "hd256_causal_4k": Case(4, 4096, 8, 256),
    "gqa_causal_8k": Case(2, 8192, 32, 128, kv_heads=8),
    "window_16k": Case(1, 16384, 16, 128, window=1024),
    "packed_16k": Case(1, 16384, 16, 128, documents=(512, 4096, 1024, 3000, 1096, 2560, 3072, 1024)),
}
# Small enough for a CPU: they show that the program works, not how fast anything is.
SMOKE = {
    "smoke_causal": Case(1, 96, 4, 16, kv_heads=2, dtype="float32"),
    "smoke_window": Case(1, 96, 2, 16, window=20, dtype="float32"),
    "smoke_packed": Case(1, 96, 2, 16, documents=(30, 50, 16), dtype="float32"),
}
GROUPS = {"triton": CASES, "smoke": SMOKE}


def select(names: str) -> dict[str, Case]:
    """The cases of a comma-separated list of names, shell patterns and groups. Raises ValueError for an unknown one."""
    known = {**CASES, **SMOKE}
    found: dict[str, Case] = {}
    for name in filter(None, (part.strip() for part in names.split(","))):
        matching = GROUPS.get(name) or {key: known[key] for key in fnmatch.filter(known, name)}
        if not matching:
            raise ValueError(
                f"--cases {name} is unknown; there are the groups {', '.join(GROUPS)} and {', '.join(known)}"
            )
        found |= matching
    if not found:
        raise ValueError("--cases names no case")
    return found
