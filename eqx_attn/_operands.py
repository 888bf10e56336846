"""What a kernel reads besides query, key and value, and the tile sizes that it runs with."""

import dataclasses

import jax
from jaxtyping import Array, Bool, Int32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SegmentOperands:
    """Normalised segment metadata: tokens see only keys of their own id.

    Padding has id -1 among queries and -2 among keys, so that equality alone decides. All other ids are positive. The
    positions are what the band of `Operands` compares; they are None where it has no bound.
    """

    q_ids: Int32[Array, "batch q_seq"]
    kv_ids: Int32[Array, "batch kv_seq"]
    q_positions: Int32[Array, "batch q_seq"] | None
    kv_positions: Int32[Array, "batch kv_seq"] | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
    """Everything a kernel takes besides query, key, value and tile sizes.

    A key is visible where `lower <= kv_position - q_position <= upper` (a bound of None always holds) and, with
    segments, where the ids are equal. Positions are the segments' or, without segments, the row numbers.

    `dense` is a boolean array, True where visible, that broadcasts to `[batch, q_heads, q_seq, kv_seq]`.

    The index arrays hold the *global* index along the dimension that they name (an example's number in the batch, and so
    on). They follow their dimension through vmap, shards and ring hops; a kernel never derives a global index from a
    program id. None where nothing depends on them.
    """

    scale: float = dataclasses.field(metadata=dict(static=True))
    lower: int | None = dataclasses.field(default=None, metadata=dict(static=True))
    upper: int | None = dataclasses.field(default=None, metadata=dict(static=True))
    out_dtype: str | None = dataclasses.field(default=None, metadata=dict(static=True))
    segments: SegmentOperands | None = None
    dense: Bool[Array, "_ _ _ _"] | None = None
    batch_index: Int32[Array, " batch"] | None = None
    head_index: Int32[Array, " q_heads"] | None = None
    q_index: Int32[Array, " q_seq"] | None = None
    kv_index: Int32[Array, " kv_seq"] | None = None


@dataclasses.dataclass(frozen=True)
class Tile:
    """The tile of one kernel: query rows and key rows per step and, for Triton, warps and pipeline stages."""

    block_q: int
    block_kv: int
    num_warps: int = 4
    num_stages: int = 2


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tile sizes of a spec's three kernels: forward, query gradient, key and value gradient."""

    forward: Tile
    dq: Tile
    dkv: Tile
