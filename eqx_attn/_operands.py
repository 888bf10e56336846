"""What a kernel reads besides query, key and value, and the tile sizes that it runs with."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt32


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
class BlockOperands:
    """Which blocks of keys each block of queries may see; a block is `rows` queries by `columns` keys, the last cut off.

    `seen` is `[batch, q_heads, q_blocks, kv_blocks]`, of which batch and q_heads may be less, as for `Operands.dense`.
    """

    seen: Bool[Array, "_ _ q_blocks kv_blocks"]
    rows: int = dataclasses.field(metadata=dict(static=True))
    columns: int = dataclasses.field(metadata=dict(static=True))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
    """Everything a kernel takes besides query, key, value and tile sizes.

    The score of a query and a key is `softcap(scale * q . k) + bias`. The key is visible where
    `lower <= kv_position - q_position <= upper` (a bound of None always holds) and, with segments, where the ids are
    equal, and where `blocks` and `dense` say so. Positions are the segments' or, without segments, the row numbers.

    `dense` (True where visible) and `bias` are `[batch, q_heads, q_seq, kv_seq]` and may have 1 in the place of each of the
    last three. Their batch size, like that of `blocks.seen` and `sinks`, is a divisor of the batch: as many examples
    after one another as the batch is larger share an entry (`shared_index`).

    `out_dtype` is the dtype of the output and of the gradients of query, key and value; None is that of the arrays. Partial
    results that are still to be summed are asked for in float32.

    `max_logit` says that the forward also returns the largest visible score of each row, float32 `[batch, q_heads, q_seq]`.
    `sinks` are logits that count in the denominator of each row of their head. `bias_gradient` says that the backward
    returns the gradient of the bias. `heads_of_kv` is the number of key/value heads, where an array is packed.

    `dropout_rate` of the weights become 0, those whose hash of (`dropout_seed` of the example and head, `q_index`,
    `kv_index`) is low (`_dropout`), and the others grow by `1 / (1 - dropout_rate)`.

    `score_mod` makes of a score what the softmax takes, and `mask_mod` hides keys: functions of the score and of indices, with
    the arrays that they read, `[entries, *shape]`, whose first axis is like that of `sinks`. `mod_gradients` says of which
    arrays of `score_mod` the backward returns gradients, in float32 or wider; `deterministic` that these have equal bits
    from run to run.

    The index arrays hold the *global* index along the dimension that they name. They follow their dimension through vmap,
    shards and ring hops; a kernel never derives a global index from a program id. None where nothing depends on them.
    For dropout those of batch and heads are in `dropout_seed`.
    """

    scale: float = dataclasses.field(metadata=dict(static=True))
    lower: int | None = dataclasses.field(default=None, metadata=dict(static=True))
    upper: int | None = dataclasses.field(default=None, metadata=dict(static=True))
    out_dtype: str | None = dataclasses.field(default=None, metadata=dict(static=True))
    softcap: float | None = dataclasses.field(default=None, metadata=dict(static=True))
    dropout_rate: float = dataclasses.field(default=0.0, metadata=dict(static=True))
    bias_gradient: bool = dataclasses.field(default=False, metadata=dict(static=True))
    max_logit: bool = dataclasses.field(default=False, metadata=dict(static=True))
    heads_of_kv: int | None = dataclasses.field(default=None, metadata=dict(static=True))
    score_mod: Any = dataclasses.field(default=None, metadata=dict(static=True))
    mask_mod: Any = dataclasses.field(default=None, metadata=dict(static=True))
    mod_gradients: tuple[bool, ...] = dataclasses.field(default=(), metadata=dict(static=True))
    deterministic: bool = dataclasses.field(default=False, metadata=dict(static=True))
    segments: SegmentOperands | None = None
    blocks: BlockOperands | None = None
    dense: Bool[Array, "_ _ _ _"] | None = None
    bias: Float[Array, "_ _ _ _"] | None = None
    sinks: Float32[Array, "_ q_heads"] | None = None
    dropout_seed: UInt32[Array, "batch q_heads"] | None = None
    score_arrays: tuple[Array, ...] = ()
    mask_arrays: tuple[Array, ...] = ()
    batch_index: Int32[Array, " batch"] | None = None
    head_index: Int32[Array, " q_heads"] | None = None
    q_index: Int32[Array, " q_seq"] | None = None
    kv_index: Int32[Array, " kv_seq"] | None = None


def shared_index(batch: int, entries: int):
    """Which of an operand's `entries` each example of a batch uses: `[batch]`, consecutive examples share one."""
    return jnp.arange(batch) // (batch // entries)


@dataclasses.dataclass(frozen=True)
class Tile:
    """The tile of one kernel: query rows and key rows per step.

    For Triton, warps and pipeline stages. For the TPU, the size of the tiles within a step, and how many tiles the first
    products of a tile are ahead of its weights (`lead`) and the last ones behind (`lag`).
    """

    block_q: int
    block_kv: int
    num_warps: int = 4
    num_stages: int = 2
    inner_q: int = 256
    inner_kv: int = 256
    lead: int = 1
    lag: int = 2


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tile sizes of a spec's kernels: forward, query gradient, key and value gradient, and bias gradient (as `dq` if None)."""

    forward: Tile
    dq: Tile
    dkv: Tile
    dbias: Tile | None = None
