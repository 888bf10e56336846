"""One call, several platforms: each is traced only when JAX lowers for it.

`lax.platform_dependent` would trace every branch at every call; on a laptop that is a Pallas and a Triton trace that
nobody uses. A primitive whose lowering rule depends on the platform costs nothing until it is lowered.
"""

import functools
from collections.abc import Callable

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

from ._call import Call


def by_platform(call: Call, function: Callable, *arguments):
    """`function(call, route, *arguments)` with the route of the platform that is lowered for."""
    if not call.routes:
        return function(call, call.default, *arguments)
    leaves, structure = jax.tree.flatten(arguments)
    results = _attention.bind(*leaves, call=call, function=function, structure=structure)
    return jax.tree.unflatten(jax.tree.structure(_shapes(call, function, structure, _avals(leaves))), results)


def _avals(leaves):
    return tuple((x.shape, x.dtype) for x in leaves)


@functools.lru_cache(maxsize=1024)
def _shapes(call, function, structure, avals):
    """Results of the default route; all routes agree on shapes and dtypes, since the contract fixes them."""
    arguments = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(*aval) for aval in avals])
    return jax.eval_shape(functools.partial(function, call, call.default), *arguments)


_attention = Primitive("eqx_attention")
_attention.multiple_results = True


@_attention.def_impl
def _run(*leaves, **parameters):
    return _compiled(**parameters)(*leaves)


@functools.cache
def _compiled(**parameters):
    return jax.jit(functools.partial(_attention.bind, **parameters))


@_attention.def_abstract_eval
def _abstract(*leaves, call, function, structure):
    shapes = jax.tree.leaves(_shapes(call, function, structure, _avals(leaves)))
    return [ShapedArray(x.shape, x.dtype) for x in shapes]


def _route(platform, *leaves, call, function, structure):
    route = dict(call.routes).get(platform, call.default)
    return jax.tree.leaves(function(call, route, *jax.tree.unflatten(structure, leaves)))


mlir.register_lowering(_attention, mlir.lower_fun(functools.partial(_route, None), multiple_results=True))
for _platform in ("cuda", "tpu"):
    mlir.register_lowering(
        _attention, mlir.lower_fun(functools.partial(_route, _platform), multiple_results=True), platform=_platform
    )
