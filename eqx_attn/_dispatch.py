"""One call, several platforms: each is traced only when JAX lowers for it.

`lax.platform_dependent` would trace every branch at every call; on a laptop that is a Pallas and a Triton trace that
nobody uses. A primitive whose lowering rule depends on the platform costs nothing until it is lowered.
"""

import contextlib
import functools
from collections.abc import Callable

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AbstractDevice, get_abstract_mesh, use_abstract_mesh

from ._call import Call
from ._context import current_target, resume, TPU_TARGETS


def by_platform(call: Call, function: Callable, *arguments):
    """`function(call, route, *arguments)` with the route of the platform that is lowered for."""
    if not call.routes and not current_target("tpu"):
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


def _lower(platform, context, *leaves, **parameters):
    function = mlir.lower_fun(functools.partial(_route, platform), multiple_results=True)
    call: Call = parameters["call"]
    if platform == "tpu" and "tpu" in dict(call.routes):
        _check_tpu(call)
    with _device_of(call):
        return function(context, *leaves, **parameters)


def _check_tpu(call: Call) -> None:
    """Raises ValueError where nothing says which TPU is lowered for."""
    with resume(call.context):
        named = current_target("tpu") or get_abstract_mesh().abstract_device
    if not named and jax.default_backend() != "tpu":
        raise ValueError(
            "eqx_attn.attention is being lowered for a TPU and there is none here: name one with `with "
            'eqx_attn.target("v6e"):`, and also a GPU where you lower for both, `eqx_attn.target("sm_90a", "v6e")`'
        )


@contextlib.contextmanager
def _device_of(call: Call):
    """Pallas asks JAX for the TPU that it lowers for: the target of the call, if there is one."""
    with resume(call.context):
        name = current_target("tpu")
    if name is None:
        yield
        return
    device = AbstractDevice(*TPU_TARGETS[name], "tpu")
    with use_abstract_mesh(get_abstract_mesh().update(abstract_device=device)):
        yield


mlir.register_lowering(_attention, functools.partial(_lower, None))
for _platform in ("cuda", "tpu"):
    mlir.register_lowering(_attention, functools.partial(_lower, _platform), platform=_platform)
