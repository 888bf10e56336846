"""What a block of tokens holds, so that another block can tell whether it sees any of it before loading it."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

_LARGEST = jnp.iinfo(jnp.int32).max
_SMALLEST = jnp.iinfo(jnp.int32).min


def block_summary(
    ids: Int32[Array, "batch seq"], positions: Int32[Array, "batch seq"] | None, block: int
) -> Int32[Array, "batch fields blocks"]:
    """The extremes of each block of `block` tokens.

    Fields: the smallest id, padding included; the smallest and largest id of tokens that are not padding; with positions,
    their smallest and largest position. A block of padding alone has its smallest above its largest.
    """
    batch, seq = ids.shape
    blocks = -(-seq // block)
    tail = ((0, 0), (0, blocks * block - seq))
    ids = jnp.pad(ids, tail, constant_values=-1).reshape(batch, blocks, block)
    token = ids > 0
    fields = [
        jnp.min(ids, -1),
        jnp.min(jnp.where(token, ids, _LARGEST), -1),
        jnp.max(jnp.where(token, ids, _SMALLEST), -1),
    ]
    if positions is not None:
        # Half the range, so that differences of positions do not wrap around.
        positions = jnp.pad(positions, tail).reshape(batch, blocks, block)
        fields.append(jnp.min(jnp.where(token, positions, _LARGEST // 2), -1))
        fields.append(jnp.max(jnp.where(token, positions, _SMALLEST // 2), -1))
    return jnp.stack(fields, 1)


def visited_ranges(
    q_summary: Int32[Array, "batch fields q_blocks"],
    kv_summary: Int32[Array, "batch fields kv_blocks"],
    lower: int | None,
    upper: int | None,
    *,
    of: str,
) -> Int32[Array, "batch blocks 4"]:
    """For each block of one side (`of`: "q" or "kv"), which blocks of the other it visits: four block numbers.

    It may see something of [first, last), all of [whole_first, whole_last), and nothing of the rest; they are returned in
    the order first, whole_first, whole_last, last. Some blocks of [first, last) may be hidden all the same.
    """
    seen, whole = visible_blocks(q_summary, kv_summary, lower, upper)
    if of == "kv":
        seen, whole = jnp.swapaxes(seen, 1, 2), jnp.swapaxes(whole, 1, 2)
    others = jnp.arange(seen.shape[-1], dtype=jnp.int32)[None, None, :]
    # Only reductions, which fuse with the comparisons: nothing of size q_blocks * kv_blocks is stored.
    last = jnp.max(jnp.where(seen, others + 1, 0), -1)
    first = jnp.minimum(jnp.min(jnp.where(seen, others, _LARGEST), -1), last)
    whole_first = jnp.minimum(jnp.min(jnp.where(whole, others, _LARGEST), -1), last)
    after = ~whole & (others > whole_first[..., None])
    whole_last = jnp.minimum(jnp.min(jnp.where(after, others, _LARGEST), -1), last)
    return jnp.stack([first, whole_first, whole_last, last], -1)


def visible_blocks(
    q_summary: Array, kv_summary: Array, lower: int | None, upper: int | None
) -> tuple[Bool[Array, "batch q_blocks kv_blocks"], Bool[Array, "batch q_blocks kv_blocks"]]:
    """Whether some token of a query block may see some token of a key block, and whether every one sees every one."""
    q_lowest_id, q_first_id, q_last_id, *q_positions = jnp.moveaxis(q_summary, 1, 0)[..., :, None]
    kv_lowest_id, kv_first_id, kv_last_id, *kv_positions = jnp.moveaxis(kv_summary, 1, 0)[..., None, :]
    seen = (q_first_id <= kv_last_id) & (kv_first_id <= q_last_id)
    # Equal extremes on both sides leave one id, and no padding.
    whole = (q_lowest_id == q_last_id) & (kv_lowest_id == kv_last_id) & (q_last_id == kv_last_id) & (q_last_id > 0)
    if upper is not None:
        seen &= kv_positions[0] - q_positions[1] <= upper
        whole &= kv_positions[1] - q_positions[0] <= upper
    if lower is not None:
        seen &= kv_positions[1] - q_positions[0] >= lower
        whole &= kv_positions[0] - q_positions[1] >= lower
    return seen, whole
