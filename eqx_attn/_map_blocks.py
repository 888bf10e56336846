"""How TPU kernels test a single score against a map of blocks, in tiles that the map's blocks do not fill.

Of each tile of keys a query has some words, of which each bit stands for one of the map's blocks of keys that the tile
touches. That is as many words as scores divided by the tile's size, and the map's blocks may lie in any way.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jaxtyping import Array

from ._map_words import bits_of_keys, words_of_map
from ._operands import BlockOperands
from ._pallas import across_lanes, widen
from ._parts import Part
from ._score_blocks import score_blocks, ScoreBlocks


@dataclasses.dataclass(frozen=True, eq=False)
class WordBlocks:
    """The words of queries, `array [entries, heads, kv_blocks, words, q_seq]`; `spec` and `tile` as for `ScoreBlocks`."""

    batch: int
    block_q: int
    array: Array

    def spec(self, place: Callable) -> pl.BlockSpec:
        """The block spec for a grid in which `place(*indices)` is example, query head, query block and key block."""
        entries, heads, _, words, _ = self.array.shape
        shared = self.batch // entries

        def index(*indices):
            example, head, q_block, kv_block = place(*indices)
            return example // shared, head if heads > 1 else 0, kv_block, 0, q_block

        return pl.BlockSpec((None, None, None, words, self.block_q), index)

    def tile(self, ref) -> Array:
        """In a kernel: `[words, block_q]`."""
        return ref[...]

    def by_part(self, ref) -> Callable[[Part], list[Array]]:
        """In a kernel: what makes the words of a part of the block's scores, each in the scores' shape."""
        words = [across_lanes(ref[number : number + 1]) for number in range(ref.shape[0])]
        return lambda part: [widen(word[part.rows], part.columns.stop - part.columns.start) for word in words]


def map_blocks(
    blocks: BlockOperands, batch: int, q_seq: int, kv_seq: int, block_q: int, block_kv: int
) -> tuple[WordBlocks, ScoreBlocks]:
    """The words of the queries, and for each key which bit of its tile's words is its own."""
    bits = jnp.asarray(bits_of_keys(blocks.columns, kv_seq, block_kv), jnp.int32)[None, None, None]
    words = words_of_map(blocks.seen, blocks.columns, kv_seq, block_kv)
    words = jnp.moveaxis(words[:, :, np.arange(q_seq) // blocks.rows], 2, 4)
    return WordBlocks(batch, block_q, words), score_blocks(bits, batch, block_q, block_kv)


def has_bit(words: Array | list[Array], bits: Array) -> Array:
    """In a kernel: whether bit `bits` (of each key) of the words of each query is set.

    They are `[block_kv, 1]` and `[words, block_q]`, or of a part of the scores `[1, columns]` and its `by_part`.
    """
    if not isinstance(words, list):
        words = [words[number : number + 1] for number in range(words.shape[0])]
    word = words[0]
    for number in range(1, len(words)):
        word = jnp.where(bits >> 5 == number, words[number], word)
    return (word >> (bits & 31)) & 1 == 1
