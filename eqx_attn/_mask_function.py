"""`Mask.from_function`: which keys a query sees, by a function of indices."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array

from ._masks import Mask
from ._mods import check_mask_function


class FromFunction(Mask):
    """Visible where a function of indices says so; made by `Mask.from_function`.

    Arrays of a function that is a pytree (an `eqx.Module`, a `jax.tree_util.Partial`) are leaves of the mask.
    """

    arrays: tuple[Array, ...]
    others: tuple[Any, ...] = eqx.field(static=True)
    structure: Any = eqx.field(static=True)

    def __init__(self, function: Callable):
        check_mask_function(function)
        leaves, self.structure = jax.tree.flatten(function)
        self.arrays = tuple(x for x in leaves if eqx.is_array(x))
        self.others = tuple(None if eqx.is_array(x) else x for x in leaves)

    @property
    def function(self) -> Callable:
        """What was given."""
        arrays = iter(self.arrays)
        return jax.tree.unflatten(self.structure, [next(arrays) if x is None else x for x in self.others])
