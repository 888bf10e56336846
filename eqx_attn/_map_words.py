"""A map of blocks as words of 32 bits, so that a kernel tests a score against the map by a shift."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32

BITS = 32


def bits_of_keys(columns: int, kv_seq: int, block_kv: int) -> np.ndarray:
    """Which of its tile's bits stands for each key: the blocks of the map that a tile touches are counted from its first."""
    key = np.arange(kv_seq)
    return key // columns - key // block_kv * block_kv // columns


def words_of_map(
    seen: Bool[Array, "entries heads rows columns"], columns: int, kv_seq: int, block_kv: int
) -> Int32[Array, "entries heads rows kv_blocks words"]:
    """The words of each row of a map, for each tile of `block_kv` keys; a block of the map has `columns` keys."""
    starts = np.arange(0, kv_seq, block_kv)
    words = -(-(int(bits_of_keys(columns, kv_seq, block_kv).max()) + 1) // BITS)
    number = starts[:, None] // columns + np.arange(words * BITS)  # [kv_blocks, bits]
    seen = seen[..., np.minimum(number, seen.shape[3] - 1)]
    seen = seen.reshape(*seen.shape[:-1], words, BITS).astype(jnp.uint32)
    shifts = jnp.arange(BITS, dtype=jnp.uint32).reshape((1,) * (seen.ndim - 1) + (BITS,))
    packed = jnp.sum(seen << shifts, axis=-1, dtype=jnp.uint32)
    return lax.bitcast_convert_type(packed, jnp.int32)
