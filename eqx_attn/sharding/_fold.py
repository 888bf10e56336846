"""Axes that `jax.vmap` maps become part of the batch: on each device for its own share, so that nothing has to move."""

import dataclasses
import math
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array

from ._partition_dims import Dims


@dataclasses.dataclass(frozen=True)
class Level:
    """One `jax.vmap` around a call: its size, and which of the flattened arguments have the mapped axis, in front."""

    size: int
    mapped: tuple[bool, ...]


Levels = tuple[Level, ...]
"""All of them, the outermost first, as their axes lie in the arrays."""


def mapped_names(levels: Levels, leaf: int | None = None) -> tuple[str, ...]:
    """What the mapped axes of an argument are called, or of a result (`leaf=None`), which has all."""
    return tuple(f"mapped{i}" for i, level in enumerate(levels) if leaf is None or level.mapped[leaf])


def fold(levels: Levels, sizes: Sequence[int], leaf: int, dims: Dims, x: Array, own_gradient: bool) -> Array:
    """Argument number `leaf` without mapped axes; `dims` are the others, `sizes` those of the levels here.

    What is not mapped is broadcast. An operand that all examples share is kept as small as its levels allow: as many
    examples after one another as the batch is larger share an entry. Not so where its gradient is computed
    (`own_gradient`), of which there is one for each mapped index.
    """
    flags = [level.mapped[leaf] for level in levels]
    if dims.names[0] not in (None, "batch"):
        if any(flags):
            raise NotImplementedError(
                f"an index array [{dims.names[0]}] is mapped by jax.vmap: it belongs to its dimension, not to the batch"
            )
        return x
    if dims.names[0] is None and not own_gradient:
        while flags and not flags[-1]:
            flags.pop()
    for axis, is_mapped in enumerate(flags):
        if not is_mapped:
            x = jnp.expand_dims(x, axis)
    kept = len(flags)
    x = jnp.broadcast_to(x, (*sizes[:kept], *x.shape[kept:]))
    return x.reshape(math.prod(sizes[:kept]) * x.shape[kept], *x.shape[kept + 1 :])


def unfold(sizes: Sequence[int], x: Array) -> Array:
    """The inverse, for a result."""
    return x.reshape(*sizes, x.shape[0] // math.prod(sizes), *x.shape[1:])
