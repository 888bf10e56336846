"""A user's function of scalars, evaluated again so that what it reads of captured arrays becomes an argument.

The function is traced to a jaxpr once. What does not depend on the score or on indices is kept apart (`Known`) and computed
outside of kernels, as ordinary JAX; arrays that depend on indices may only be views, until an element is read.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, Literal

from ._mod_names import assigned_name, place_of

# fmt: off
ELEMENTWISE = frozenset((
    "abs", "add", "add_any", "and", "ceil", "clamp", "convert_element_type", "copy", "cos", "custom_jvp_call",
    "custom_vjp_call", "div", "eq", "erf", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow", "is_finite",
    "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "pow", "rem", "rsqrt",
    "select_n", "shift_left", "shift_right_arithmetic", "sign", "sin", "sqrt", "square", "stop_gradient", "sub",
    "tan", "tanh", "xor",
))
# fmt: on
"""The primitives on scalars that kernels can be printed from."""

_INLINED = ("jit", "pjit", "closed_call", "core_call", "remat", "checkpoint", "custom_lin")
_PLACING = ("pvary", "pcast", "reshard", "mesh_cast", "sharding_constraint")
"""What these change is not the value."""

_WAYS_OUT = {
    "cond": "write it with jnp.where",
    "while": "write it out, or compute its result into an array before the call and index that",
    "scan": "write it out, or compute its result into an array before the call and index that",
    "round": "write jnp.floor(x + 0.5)",
    "random_bits": "draw an array before the call and index it; for dropout there is attention(..., dropout=...)",
}
_ARRAY_WAY_OUT = (
    "functions are of scalars: compute such an array before the call, for all indices, close over it, and read one element of "
    "it, array[q_index, kv_index]"
)


class CannotPrint(ValueError):
    """A user's function does something for which kernels have no code."""


@dataclasses.dataclass(eq=False)
class Known:
    """A value that depends on neither score nor indices, computed when it is asked for, outside of kernels."""

    aval: Any
    compute: Callable[[], Any]
    is_constant: bool = False
    name: str = ""
    _value: Any = None

    @property
    def value(self) -> Any:
        """The array, which may be traced."""
        if self._value is None:
            self._value = self.compute()
        return self._value


@dataclasses.dataclass(frozen=True, eq=False)
class View:
    """A part of a known array: where it starts along each axis, and which of the axes it has; all others have one index."""

    base: Known
    starts: tuple[Any, ...]
    axes: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Load:
    """One element that is read of a known array; `dtype` is that in which the function uses it."""

    base: Known
    dtype: Any


class Replay:
    """One evaluation. `elements` are the values of the loads, in order; None where it is only found out which there are.

    Afterwards `loads` and `indices`, an index per axis for each, say what was read, and `named` has the values to which the
    user's code gives names.
    """

    def __init__(self, what: str, elements: Sequence[Any] | None = None):
        self.what, self.elements = what, elements
        self.loads: list[Load] = []
        self.indices: list[tuple[Any, ...]] = []
        self.named: dict[str, Any] = {}
        self._place = ""

    def run(self, jaxpr: Jaxpr, constants: Sequence[Known], arguments: Sequence[Any]) -> Any:
        """The function's value."""
        (result,) = self._evaluate(jaxpr, constants, arguments)
        return self._scalar(result, None)

    def _evaluate(self, jaxpr: Jaxpr, constants: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, constants, strict=True))
        env |= zip(jaxpr.invars, arguments, strict=True)

        def read(atom):
            return _literal(atom) if isinstance(atom, Literal) else env[atom]

        outer = self._place
        for equation in jaxpr.eqns:
            self._place = place_of(equation) or outer  # what JAX's own functions do has none
            results = self._step(equation, [read(x) for x in equation.invars])
            env |= zip(equation.outvars, results, strict=True)
            if len(results) == 1 and (name := assigned_name(equation)):
                if isinstance(results[0], Known):
                    results[0].name = name
                elif not isinstance(results[0], View):
                    self.named[name] = results[0]
        return [read(x) for x in jaxpr.outvars]

    def _step(self, equation: Any, values: list[Any]) -> list[Any]:
        name = equation.primitive.name
        if all(isinstance(x, Known) for x in values):
            return _known(equation, values)
        if name in ("jit", "pjit") and equation.params["name"] in ("floor_divide", "remainder"):
            return [self._scalars(equation, values, lambda *x: evaluated(equation, x)[0])]
        if name in _PLACING:
            return values
        if name in _INLINED:
            inner = equation.params["jaxpr"]
            jaxpr, constants = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())
            return self._evaluate(jaxpr, [_array(x) for x in constants], values)
        if (view := _VIEWS.get(name)) is not None:
            result = view(self, equation, values)
            return [result]
        if name == "convert_element_type" and isinstance(values[0], View) and values[0].axes == ():
            return [self._load(values[0], equation.params["new_dtype"])]
        self.check(equation)
        return [self._scalars(equation, values, lambda *x: evaluated(equation, x)[0])]

    def _scalars(self, equation: Any, values: list[Any], function: Callable) -> Any:
        return function(*(self._scalar(x, equation) for x in values))

    def _scalar(self, value: Any, equation: Any) -> Any:
        """A number, from whatever stands for one."""
        if isinstance(value, Known):
            if value.is_constant and value.aval.shape == ():
                return value.value
            value = View(value, (0,) * value.aval.ndim, tuple(range(value.aval.ndim)), value.aval.shape)
        if not isinstance(value, View):
            return value
        if value.axes != ():
            raise CannotPrint(self.of_arrays(equation, value.sizes))
        return self._load(value, value.base.aval.dtype)

    def _load(self, view: View, dtype: Any) -> Any:
        number = len(self.loads)
        self.loads.append(Load(view.base, jnp.dtype(dtype)))
        self.indices.append(view.starts)
        return jnp.zeros((), dtype) if self.elements is None else self.elements[number]

    def view(self, value: Any, equation: Any) -> View:
        """An array as a view of what is known."""
        if isinstance(value, View):
            return value
        if isinstance(value, Known):
            return View(value, (0,) * value.aval.ndim, tuple(range(value.aval.ndim)), value.aval.shape)
        raise CannotPrint(self.of_arrays(equation, np.shape(value)))

    def check(self, equation: Any) -> None:
        """Raises `CannotPrint`, which names primitive and line, where kernels have no code for an equation."""
        name, parameters = equation.primitive.name, equation.params
        shape = next((x.aval.shape for x in (*equation.invars, *equation.outvars) if x.aval.shape), None)
        if name not in ELEMENTWISE or (name == "select_n" and len(equation.invars) > 3):
            way_out = "use other operations, or compute it for all indices before the call and index the array"
            way_out = _WAYS_OUT.get(name, _ARRAY_WAY_OUT if shape else way_out)
            raise CannotPrint(
                f"{self.what} uses the primitive {name!r} ({self._place}), for which kernels have no code: {way_out}; "
                "implementation='reference' takes any function"
            )
        if shape:
            raise CannotPrint(self.of_arrays(equation, shape))
        if name in ("custom_jvp_call", "custom_vjp_call"):
            for inner in parameters["call_jaxpr"].jaxpr.eqns:
                if inner.primitive.name not in _INLINED:
                    self.check(inner)

    def of_arrays(self, equation: Any, shape: Sequence[int]) -> str:
        """What to say of an array where there should be a number."""
        if equation is None:
            return f"{self.what} returns an array of shape {tuple(shape)}: it is a function of scalars, and returns one"
        where = f"{self._place}, {equation.primitive.name!r}"
        return f"{self.what} computes with an array of shape {tuple(shape)} ({where}): {_ARRAY_WAY_OUT}"


def evaluated(equation: Any, values: Sequence[Any]) -> list[Any]:
    """The results of an equation of a jaxpr."""
    primitive, parameters = equation.primitive, equation.primitive.get_bind_params(equation.params)
    functions: Sequence[Any] = ()
    if isinstance(parameters, tuple):  # as older and newer versions of JAX have it
        functions, parameters = parameters
    results = primitive.bind(*functions, *values, **parameters)
    return list(results) if primitive.multiple_results else [results]


def _literal(atom: Any) -> Known:
    return Known(atom.aval, lambda: np.asarray(atom.val, atom.aval.dtype)[()], is_constant=True)


def _array(value: Any) -> Known:
    return Known(jax.typeof(value), lambda: value)


def _known(equation: Any, values: list[Known]) -> list[Known]:
    """The equation's results, not computed yet."""
    constant = all(x.is_constant for x in values)
    results: list[Any] = []

    def compute(number: int) -> Any:
        if not results:
            inputs = [x.value for x in values]
            with jax.ensure_compile_time_eval() if constant else contextlib.nullcontext():
                found = evaluated(equation, inputs)
            results.extend([np.asarray(x)[()] for x in found] if constant else found)
        return results[number]

    name = next((x.name for x in values if x.name), "")
    return [
        Known(var.aval, lambda number=number: compute(number), constant, name)
        for number, var in enumerate(equation.outvars)
    ]


# Primitives that make views: what they do to the starts and the axes of one.


def _dynamic_slice(replay: Replay, equation: Any, values: list[Any]) -> View:
    view = replay.view(values[0], equation)
    starts = [replay._scalar(x, equation) for x in values[1:]]
    return _part(view, starts, equation.params["slice_sizes"], clamp=True)


def _slice(replay: Replay, equation: Any, values: list[Any]) -> View:
    parameters = equation.params
    if parameters["strides"] is not None and any(stride != 1 for stride in parameters["strides"]):
        replay.check(equation)
    limits = zip(parameters["start_indices"], parameters["limit_indices"], strict=True)
    sizes = [limit - start for start, limit in limits]
    return _part(replay.view(values[0], equation), parameters["start_indices"], sizes, clamp=False)


def _part(view: View, starts: Sequence[Any], sizes: Sequence[int], clamp: bool) -> View:
    """The part of a view from `starts` on."""
    moved = list(view.starts)
    for axis, start, size, extent in zip(view.axes, starts, sizes, view.sizes, strict=True):
        if clamp and extent > size and not isinstance(start, int | np.integer):
            start = lax.clamp(np.asarray(0, start.dtype), start, np.asarray(extent - size, start.dtype))
        elif clamp:
            start = min(max(int(start), 0), extent - size) if isinstance(start, int | np.integer) else 0
        moved[axis] = _sum(moved[axis], start)
    return View(view.base, tuple(moved), view.axes, tuple(sizes))


def _sum(first: Any, second: Any) -> Any:
    if isinstance(first, int | np.integer) and isinstance(second, int | np.integer):
        return int(first) + int(second)
    if isinstance(first, int | np.integer):
        return second if first == 0 else second + np.asarray(first, second.dtype)
    return first if isinstance(second, int | np.integer) and second == 0 else first + second


def _squeeze(replay: Replay, equation: Any, values: list[Any]) -> View:
    view, dropped = replay.view(values[0], equation), equation.params["dimensions"]
    kept = [axis for axis in range(len(view.axes)) if axis not in dropped]
    return View(view.base, view.starts, *(tuple(x[axis] for axis in kept) for x in (view.axes, view.sizes)))


def _reshape(replay: Replay, equation: Any, values: list[Any]) -> Any:
    """Only axes of size 1 may come or go; those that come have no axis of the array, so they have to go."""
    new = equation.params["new_sizes"]
    if not isinstance(values[0], View | Known):
        return values[0] if new == () else replay.check(equation)
    view = replay.view(values[0], equation)
    kept = [axis for axis, size in enumerate(view.sizes) if size != 1]
    if tuple(view.sizes[axis] for axis in kept) != tuple(new):
        raise CannotPrint(replay.of_arrays(equation, new))
    return View(view.base, view.starts, *(tuple(x[axis] for axis in kept) for x in (view.axes, view.sizes)))


def _transpose(replay: Replay, equation: Any, values: list[Any]) -> View:
    view, order = replay.view(values[0], equation), equation.params["permutation"]
    return View(view.base, view.starts, *(tuple(x[axis] for axis in order) for x in (view.axes, view.sizes)))


def _broadcast(replay: Replay, equation: Any, values: list[Any]) -> Any:
    """Of a number: to a vector of one or several, as the indices of a gather are."""
    if isinstance(values[0], View | Known) or any(size != 1 for size in equation.params["shape"]):
        raise CannotPrint(replay.of_arrays(equation, equation.params["shape"]))
    return _Indices((values[0],))


@dataclasses.dataclass(frozen=True, eq=False)
class _Indices:
    """A vector of scalars, as gathers take it."""

    scalars: tuple[Any, ...]


def _concatenate(replay: Replay, equation: Any, values: list[Any]) -> _Indices:
    if len(equation.outvars[0].aval.shape) != 1 or not all(isinstance(x, _Indices | Known) for x in values):
        raise CannotPrint(replay.of_arrays(equation, equation.outvars[0].aval.shape))
    scalars: list[Any] = []
    for value in values:
        if isinstance(value, _Indices):
            scalars += value.scalars
        elif value.is_constant:
            scalars += list(np.asarray(value.value))
        else:
            raise CannotPrint(replay.of_arrays(equation, value.aval.shape))
    return _Indices(tuple(scalars))


def _gather(replay: Replay, equation: Any, values: list[Any]) -> Any:
    """Of one element, or of a row: one index along each of some axes."""
    view, indices = replay.view(values[0], equation), values[1]
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    if isinstance(indices, Known) and indices.is_constant:
        indices = _Indices(tuple(np.asarray(indices.value).reshape(-1)))
    if not isinstance(indices, _Indices) or len(indices.scalars) != len(numbers.start_index_map):
        raise CannotPrint(replay.of_arrays(equation, equation.outvars[0].aval.shape))
    starts: list[Any] = [0] * len(view.axes)
    for axis, index in zip(numbers.start_index_map, indices.scalars, strict=True):
        starts[axis] = index
    part = _part(view, starts, sizes, clamp=True)
    kept = [axis for axis in range(len(view.axes)) if axis not in numbers.collapsed_slice_dims]
    part = View(part.base, part.starts, *(tuple(x[axis] for axis in kept) for x in (part.axes, part.sizes)))
    if equation.params["mode"] != lax.GatherScatterMode.FILL_OR_DROP:
        return part
    inside = np.True_
    for start, size, extent in zip(starts, sizes, view.sizes, strict=True):
        if not isinstance(start, int):
            inside = inside & (start >= np.asarray(0, start.dtype)) & (start <= np.asarray(extent - size, start.dtype))
    element = replay._scalar(part, equation)
    fill = equation.params["fill_value"]
    if fill is None:
        signed = jnp.issubdtype(element.dtype, jnp.signedinteger)
        fill = (
            np.nan if jnp.issubdtype(element.dtype, jnp.floating) else jnp.iinfo(element.dtype).min if signed else True
        )
    return jnp.where(inside, element, np.asarray(fill, element.dtype))


_VIEWS: dict[str, Callable[[Replay, Any, list[Any]], Any]] = dict(
    dynamic_slice=_dynamic_slice,
    slice=_slice,
    squeeze=_squeeze,
    reshape=_reshape,
    transpose=_transpose,
    broadcast_in_dim=_broadcast,
    concatenate=_concatenate,
    gather=_gather,
)
