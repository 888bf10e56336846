"""What a block of tokens holds, so that another block can tell whether it sees any of it before loading it."""

import jax.numpy as jnp
from jaxtyping import Array, Int32

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


def visited_range(
    q_summary: Int32[Array, "batch fields q_blocks"],
    kv_summary: Int32[Array, "batch fields kv_blocks"],
    lower: int | None,
    upper: int | None,
    *,
    of: str,
) -> Int32[Array, "batch blocks 2"]:
    """For each block of one side (`of`: "q" or "kv"), the first block of the other that it may see, and the one after the last.

    Empty ranges are (0, 0). Some blocks inside a range may be hidden.
    """
    seen = visible_blocks(q_summary, kv_summary, lower, upper)
    if of == "kv":
        seen = jnp.swapaxes(seen, 1, 2)
    others = jnp.arange(seen.shape[-1], dtype=jnp.int32)
    last = jnp.max(jnp.where(seen, others + 1, 0), -1)
    first = jnp.minimum(jnp.min(jnp.where(seen, others, _LARGEST), -1), last)
    return jnp.stack([first, last], -1)


def visible_blocks(q_summary: Array, kv_summary: Array, lower: int | None, upper: int | None) -> Array:
    """Whether some token of a query block may see some token of a key block: `[batch, q_blocks, kv_blocks]`."""
    q_fields = [q_summary[:, field, :, None] for field in range(q_summary.shape[1])]
    kv_fields = [kv_summary[:, field, None, :] for field in range(kv_summary.shape[1])]
    seen = (q_fields[1] <= kv_fields[2]) & (kv_fields[1] <= q_fields[2])
    if upper is not None:
        seen &= kv_fields[3] - q_fields[4] <= upper
    if lower is not None:
        seen &= kv_fields[4] - q_fields[3] >= lower
    return seen
