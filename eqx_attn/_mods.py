"""Score and mask functions of users: traced once, written as a `Program`, with what they close over as arrays beside it."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AbstractMesh, use_abstract_mesh
from jaxtyping import Array

from ._codegen import ARGUMENTS, Capture, Literal, register
from ._mod_builder import Builder, literal, Range
from ._mod_names import argument_names, captured_name
from ._mod_replay import Known, Load, Replay

_SCORE, _MASK = "score_mod", "Mask.from_function's function"


@dataclasses.dataclass(frozen=True, eq=False)
class Mod:
    """A traced function. `function` is what the user gave, `captures` the arrays of the program, in its order."""

    function: Callable
    program: Any
    captures: tuple[Known, ...]

    @property
    def digest(self) -> str:
        """What kernels are named by."""
        return self.program.digest

    def arrays(self) -> tuple[Array, ...]:
        """The captured arrays as operands, `[1, *shape]`: one entry for all examples. They may be traced."""
        return tuple(jnp.asarray(known.value)[None] for known in self.captures)

    @property
    def is_traced(self) -> bool:
        """Whether a captured array has no value yet."""
        return any(isinstance(known.value, Tracer) for known in self.captures)


def trace_score_mod(function: Callable, sizes: Sequence[int], dtype: str) -> Mod:
    """`function(score, batch, q_head, q_index, kv_index)` for scores of `dtype`; `sizes` bound the four indices.

    Raises TypeError where the function does not return one floating number, and `CannotPrint`.
    """
    return _trace(function, _SCORE, ARGUMENTS, [jnp.dtype(dtype)], sizes)


def trace_mask_mod(functions: Sequence[Callable], sizes: Sequence[int]) -> Mod:
    """The conjunction of functions `(batch, q_head, q_index, kv_index) -> bool`."""
    first, *others = functions
    if not others:
        return _trace(first, _MASK, ARGUMENTS[1:], [], sizes)

    def all_of(batch, q_head, q_index, kv_index):
        seen = first(batch, q_head, q_index, kv_index)
        for function in others:
            seen = seen & function(batch, q_head, q_index, kv_index)
        return seen

    return _trace(all_of, _MASK, ARGUMENTS[1:], [], sizes)


def check_score_mod(function: Any) -> None:
    """Raises TypeError where a score function cannot be called."""
    _check_callable(function, "score_mod", ARGUMENTS)


def check_mask_function(function: Any) -> None:
    """Raises TypeError where a mask function cannot be called."""
    _check_callable(function, "Mask.from_function", ARGUMENTS[1:])


def _check_callable(function: Any, what: str, kinds: Sequence[str]) -> None:
    if not callable(function):
        raise TypeError(f"{what} is a {type(function).__name__}: give a function ({', '.join(kinds)}) of scalars")


def _trace(function: Callable, what: str, kinds: Sequence[str], floats: list, sizes: Sequence[int]) -> Mod:
    is_mask = not floats
    scalars = [jax.ShapeDtypeStruct((), dtype) for dtype in (*floats, *[jnp.dtype("int32")] * 4)]
    # A function of its own each time: JAX keeps what it traced, and the same function may close over other values later.
    closed = jax.make_jaxpr(lambda *x: function(*x))(*scalars)
    _check_result(what, kinds, closed.out_avals, is_mask)
    known = [Known(jax.typeof(x), lambda x=x: x, name=captured_name(function, x)) for x in closed.consts]

    def replay(arguments, elements=None):
        found = Replay(what, elements)
        value = found.run(closed.jaxpr, known, arguments)
        return found, value if is_mask else jnp.asarray(value, floats[0])

    ranges: list[Range | None] = [*[None] * len(floats), *((0, size - 1) for size in sizes)]
    with use_abstract_mesh(AbstractMesh((), ())):  # scalars are on no mesh, wherever the arrays are
        translation = _Translation(Builder(what, [x.dtype.name for x in scalars], ranges), replay, scalars)
        slope, load_slopes = (None, []) if is_mask else translation.slopes()
    program, used = translation.builder.finish(
        argument_names(function, tuple(kinds)),
        [Capture(x.name or "captured", x.aval.ndim, jnp.dtype(x.aval.dtype).name) for x in translation.captures],
        translation.value,
        slope,
        load_slopes,
    )
    register(program)
    return Mod(function, program, tuple(translation.captures[i] for i in used))


class _Translation:
    """The function's value as steps, then its derivatives. `replay(arguments, elements)` evaluates it."""

    def __init__(self, builder: Builder, replay: Callable, scalars: Sequence[jax.ShapeDtypeStruct]):
        self.builder, self.replay, self.scalars = builder, replay, scalars
        self.loads = self._loads()
        self.elements = [jax.ShapeDtypeStruct((), load.dtype) for load in self.loads]
        self.captures: list[Known] = []
        self.value, self.inputs = self._forward()

    def _loads(self) -> list[Load]:
        """What the function reads, in order: found out by an evaluation whose result is not used."""
        found = []
        jax.make_jaxpr(lambda *x: found.append(self.replay(x)[0]))(*self.scalars)
        return found[0].loads

    def _forward(self) -> tuple[Any, list[Any]]:
        """The operand that is the value, and those that are arguments and elements."""
        static: list[Any] = []

        def run(arguments, elements):
            found, value = self.replay(arguments, elements)
            static[:] = [[x if isinstance(x, int) else None for x in of] for of in found.indices]
            return value, [[x for x in of if not isinstance(x, int)] for of in found.indices], found.named

        closed, shape = jax.make_jaxpr(run, return_shape=True)(self.scalars, self.elements)
        jaxpr = closed.jaxpr
        _, indices, _ = jax.tree.unflatten(jax.tree.structure(shape), jaxpr.outvars)
        late = {
            var: functools.partial(self._element, load, fixed, moving)
            for var, load, fixed, moving in zip(
                jaxpr.invars[len(self.scalars) :], self.loads, static, indices, strict=True
            )
        }
        arguments = list(range(len(self.scalars)))
        outputs, elements = self.builder.translate(jaxpr, closed.consts, arguments, late)
        value, _, named = jax.tree.unflatten(jax.tree.structure(shape), outputs)
        for name, operand in named.items():
            self.builder.name(operand, name)
        return value, arguments + elements

    def _element(self, load: Load, fixed: Sequence[int | None], moving: Sequence[Any], read: Callable) -> Any:
        """The step that loads an element, whose indices have been translated."""
        of_moving = iter(moving)
        indices = [read(next(of_moving)) if x is None else literal(x, "int32") for x in fixed]
        numbers = [number for number, known in enumerate(self.captures) if known is load.base]
        if not numbers:
            numbers = [len(self.captures)]
            self.captures.append(load.base)
        dtype = jnp.dtype(load.base.aval.dtype).name
        element = self.builder.emit("load", indices, dtype, numbers[0])
        return element if dtype == load.dtype.name else self.builder.emit("cast", [element], load.dtype.name)

    def slopes(self) -> tuple[Any, list[tuple[int, Any]]]:
        """The derivatives by the score, and by each floating element that is read."""
        floating = [i for i, x in enumerate(self.elements) if jnp.issubdtype(x.dtype, jnp.floating)]

        def run(arguments, elements):
            score, *others = arguments

            def value(score, learned):
                of_all = list(elements)
                for i, x in zip(floating, learned, strict=True):
                    of_all[i] = x
                return self.replay([score, *others], of_all)[1]

            result, pull_back = jax.vjp(value, score, [elements[i] for i in floating])
            return pull_back(jnp.ones_like(result))

        closed = jax.make_jaxpr(run)(self.scalars, self.elements)
        (slope, *others), _ = self.builder.translate(closed.jaxpr, closed.consts, self.inputs)
        found: dict[int, Any] = {}
        for i, operand in zip(floating, others, strict=True):
            load = self.inputs[len(self.scalars) + i]
            if isinstance(operand, Literal) and operand.value == 0:
                continue
            if (step := self.builder.step(load)) is not None and step.op == "cast":
                load = step.operands[0]
            found[load] = self.builder.total(found[load], operand) if load in found else operand
        return slope, list(found.items())


def _check_result(what: str, kinds: Sequence[str], avals: Sequence[Any], is_mask: bool) -> None:
    wanted = "one boolean" if is_mask else "one floating number"
    found = [f"{x.dtype}{list(x.shape)}" for x in avals]
    kind = jnp.bool_ if is_mask else jnp.floating
    if len(avals) != 1 or avals[0].shape != () or not jnp.issubdtype(avals[0].dtype, kind):
        raise TypeError(
            f"{what} returns {', '.join(found) or 'nothing'}: it is a function ({', '.join(kinds)}) of scalars, and returns "
            f"{wanted}"
        )
