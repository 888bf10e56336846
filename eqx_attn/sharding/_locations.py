"""Programs of custom partitioning without source locations, on which XLA may not end.

The program of a shard is compiled into another one, whose table of stack frames its operations' numbers then mean. A frame
may so become its own caller, and XLA's inliner, which follows callers, runs forever (seen with jaxlib 0.11.2 on a CPU).
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import jax
from jax.extend.core import jaxpr_as_fun, Primitive
from jax.interpreters import mlir
from jaxtyping import Array

_unlocated = Primitive("eqx_attention_share")
_unlocated.multiple_results = True


def without_locations(function: Callable, leaves: Sequence[Array]) -> tuple[Array, ...]:
    """`function(*leaves)`, lowered without locations."""
    return tuple(_unlocated.bind(*leaves, jaxpr=jax.make_jaxpr(function)(*leaves)))


@_unlocated.def_abstract_eval
def _abstract(*_, jaxpr):
    return jaxpr.out_avals


@contextlib.contextmanager
def _no_locations() -> Iterator[None]:
    name = "jax_traceback_in_locations_limit"
    limit = getattr(jax.config, name)
    jax.config.update(name, 0)
    try:
        yield
    finally:
        jax.config.update(name, limit)


def _lower(context, *values, jaxpr):
    with _no_locations():
        return mlir.lower_fun(jaxpr_as_fun(jaxpr), multiple_results=True)(context, *values)


mlir.register_lowering(_unlocated, _lower)
