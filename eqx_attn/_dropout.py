"""Which weights dropout keeps: one integer hash of global indices, the same bits on every target, mesh and tile size.

A weight's number is `number_of(row_hash(seed, q_index), column_hash(kv_index))`, 24 bits, and it is kept where that is at
least `threshold(rate)`. The multipliers are those of the `lowbias32` mixer (Chris Wellons, hash-prospector, public
domain) and of MurmurHash3 (Austin Appleby, public domain).
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, PRNGKeyArray, UInt32

MIX_FIRST = 0x7FEB352D
MIX_SECOND = 0x846CA68B
GOLDEN = 0x9E3779B1
COLUMN_FACTOR = 0x85EBCA6B
COLUMN_START = 0x165667B1


class Dropout(eqx.Module):
    """Dropout of attention weights: `rate` of them become 0 and the others grow by `1 / (1 - rate)`.

    `key` is a key of `jax.random`. Which weights are dropped depends on the key, the example, the head and the positions in
    the arrays alone: not on the device, the implementation, or how the work is divided. A rate of 0 drops nothing.
    """

    rate: float = eqx.field(static=True)
    key: PRNGKeyArray

    def __check_init__(self):
        if isinstance(self.rate, bool) or not isinstance(self.rate, int | float) or not 0 <= self.rate < 1:
            raise ValueError(f"Dropout's rate is {self.rate!r}: give a number from 0 to below 1")


def mix(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """A bijection of 32 bits after which each bit depends on all."""
    x = (x ^ (x >> 16)) * jnp.uint32(MIX_FIRST)
    x = (x ^ (x >> 15)) * jnp.uint32(MIX_SECOND)
    return x ^ (x >> 16)


def seeds(key: PRNGKeyArray, batch: int, q_heads: int) -> UInt32[Array, "batch q_heads"]:
    """A seed for each example and head, from a key of `jax.random`."""
    seed = jnp.uint32(0)
    words = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    for word in words.astype(jnp.uint32):
        seed = mix(seed * jnp.uint32(GOLDEN) + word)
    seed = mix(seed + jnp.arange(batch, dtype=jnp.uint32) * jnp.uint32(GOLDEN))
    return mix(seed[:, None] + jnp.arange(q_heads, dtype=jnp.uint32)[None] * jnp.uint32(GOLDEN))


def row_hash(seed: UInt32[Array, "..."], q_index: Int32[Array, "..."]) -> UInt32[Array, "..."]:
    """A query's part of the hash."""
    return mix(seed + q_index.astype(jnp.uint32) * jnp.uint32(GOLDEN))


def column_hash(kv_index: Int32[Array, "..."]) -> UInt32[Array, "..."]:
    """A key's part of the hash."""
    return mix(kv_index.astype(jnp.uint32) * jnp.uint32(COLUMN_FACTOR) + jnp.uint32(COLUMN_START))


def number_of(rows: UInt32[Array, "..."], columns: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """24 bits of a query and a key, from their parts: few operations, since there is one per score."""
    x = (rows ^ columns) * jnp.uint32(MIX_FIRST)
    x = (x ^ (x >> 15)) * jnp.uint32(MIX_SECOND)
    return x >> 8


def threshold(rate: float) -> int:
    """The numbers below this are dropped."""
    return round(rate * 2**24)


def kept(
    seed: UInt32[Array, "batch q_heads"],
    q_index: Int32[Array, " q_seq"],
    kv_index: Int32[Array, " kv_seq"],
    rate: float,
) -> Bool[Array, "batch q_heads q_seq kv_seq"]:
    """Which weights survive."""
    rows = row_hash(seed[:, :, None], q_index[None, None])[..., None]
    return number_of(rows, column_hash(kv_index)[None, None, None]) >= threshold(rate)
