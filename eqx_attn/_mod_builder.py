"""From jaxprs on scalars to the steps of a `Program`: equal values once, constants folded, what changes nothing left out."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, Literal as JaxprLiteral

from ._codegen import Literal, Program, Step
from ._mod_replay import CannotPrint, evaluated

Range = tuple[int, int]
_INLINED = ("jit", "pjit", "closed_call", "core_call", "remat", "checkpoint", "custom_jvp_call", "custom_vjp_call")


class Builder:
    """Steps so far. `ranges` are the least and the greatest value of each integer argument, None for others."""

    def __init__(self, what: str, dtypes: Sequence[str], ranges: Sequence[Range | None]):
        self.what = what
        self.arguments = len(dtypes)
        self.dtypes, self.ranges = list(dtypes), list(ranges)
        self.steps: list[Step] = []
        self._numbers: dict[Any, int] = {}

    def dtype(self, x: Any) -> str:
        """Of an operand."""
        return x.dtype if isinstance(x, Literal) else self.dtypes[x]

    def range(self, x: Any) -> Range | None:
        """Between which integers an operand lies, as far as that is known."""
        if isinstance(x, Literal):
            return (x.value, x.value) if isinstance(x.value, int) and not isinstance(x.value, bool) else None
        return self.ranges[x]

    def step(self, x: Any) -> Step | None:
        """What computes an operand."""
        return self.steps[x - self.arguments] if isinstance(x, int) and x >= self.arguments else None

    def emit(
        self,
        op: str,
        operands: Sequence[Any],
        dtype: str,
        capture: int | None = None,
        within: Range | None = None,
    ) -> Any:
        """A step, or the number of the equal one that is there."""
        key = (op, tuple(operands), dtype, capture)
        if key not in self._numbers:
            self._numbers[key] = self.arguments + len(self.steps)
            self.steps.append(Step(op, tuple(operands), dtype, capture))
            self.dtypes.append(dtype)
            self.ranges.append(within if within is None or abs(max(within, key=abs)) < 2**31 else None)
        return self._numbers[key]

    def total(self, x: Any, y: Any) -> Any:
        """The sum of two operands."""
        return _add(self, x, y)

    def name(self, x: Any, name: str) -> None:
        """The name that a value has in the user's code; the first one stays."""
        step = self.step(x)
        if step is not None and not step.name and name.isidentifier():
            self.steps[x - self.arguments] = dataclasses.replace(step, name=name)

    def translate(
        self, jaxpr: Jaxpr, constants: Sequence[Any], inputs: Sequence[Any], late: Mapping[Any, Callable] | None = None
    ) -> tuple[list[Any], list[Any]]:
        """The operands that are the jaxpr's outputs, for those that are its first inputs, and the operands of `late`.

        `late` has the other inputs, each with a function of `read` that makes its operand when it is first read.
        """
        late = late or {}
        env: dict[Any, Any] = {
            var: literal(x, x.dtype) for var, x in zip(jaxpr.constvars, map(np.asarray, constants), strict=True)
        }
        env |= zip(jaxpr.invars, inputs, strict=not late)

        def read(atom):
            if isinstance(atom, JaxprLiteral):
                return literal(atom.val, _aval(atom).dtype)
            if atom not in env:
                env[atom] = late[atom](read)
            return env[atom]

        for equation in jaxpr.eqns:
            env |= zip(equation.outvars, self._equation(equation, [read(x) for x in equation.invars]), strict=True)
        return [read(x) for x in jaxpr.outvars], [read(var) for var in late]

    def _equation(self, equation: Any, operands: list[Any]) -> list[Any]:
        name, parameters = equation.primitive.name, equation.params
        integers = [x.aval.dtype.kind in "iu" for x in equation.outvars]
        if all(isinstance(x, Literal) for x in operands):
            return _folded(equation, operands)
        if name in ("jit", "pjit") and parameters["name"] in ("floor_divide", "remainder") and all(integers):
            return [_division(self, parameters["name"], *operands)]
        if name in _INLINED:
            inner = parameters["call_jaxpr" if "call_jaxpr" in parameters else "jaxpr"]
            jaxpr, constants = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())
            return self.translate(jaxpr, constants, operands)[0]
        if name not in _RULES:
            raise CannotPrint(
                f"the derivative of {self.what} needs the primitive {name!r}, for which kernels have no code: write the "
                "function with other operations; implementation='reference' takes any function"
            )
        return [_RULES[name](self, equation, *operands)]

    def finish(
        self,
        arguments: Sequence[str],
        captures: Sequence[Any],
        value: Any,
        slope: Any,
        load_slopes: Sequence[tuple[int, Any]],
    ) -> tuple[Program, list[int]]:
        """The program of what is needed, and which of the captures that are."""
        draft = Program(tuple(arguments), tuple(captures), tuple(self.steps), value, slope, tuple(load_slopes))
        outputs = [value, *([] if slope is None else [slope]), *(x for pair in load_slopes for x in pair)]
        kept = sorted(x for x in draft.needed(tuple(outputs)) if x >= self.arguments)
        numbers = {x: x for x in range(self.arguments)} | {x: self.arguments + i for i, x in enumerate(kept)}
        used = sorted({step.capture for x in kept if (step := self.steps[x - self.arguments]).capture is not None})

        def new(x):
            return numbers[x] if isinstance(x, int) else x

        steps = tuple(
            dataclasses.replace(
                step,
                operands=tuple(map(new, step.operands)),
                capture=None if step.capture is None else used.index(step.capture),
            )
            for step in (self.steps[x - self.arguments] for x in kept)
        )
        program = Program(
            tuple(arguments),
            tuple(captures[i] for i in used),
            steps,
            new(value),
            None if slope is None else new(slope),
            tuple((new(load), new(x)) for load, x in load_slopes),
        )
        return program, used


def _aval(atom: Any) -> Any:
    return atom.aval


def literal(value: Any, dtype: Any) -> Literal:
    """A number as a step's operand."""
    dtype = jnp.dtype(dtype)
    if dtype == jnp.bool_:
        return Literal(bool(value), "bool")
    if jnp.issubdtype(dtype, jnp.integer):
        return Literal(int(value), dtype.name)
    number = np.asarray(value).astype(dtype)
    short = float(str(number)) if dtype == jnp.float32 else float(number)
    return Literal(short, dtype.name)


def _folded(equation: Any, operands: list[Literal]) -> list[Literal]:
    values = [np.asarray(x.value, jnp.dtype(x.dtype)) for x in operands]
    with jax.ensure_compile_time_eval():
        results = evaluated(equation, values)
    return [literal(np.asarray(x)[()], x.dtype) for x in results]


def _is(x: Any, *values: float) -> bool:
    return isinstance(x, Literal) and not isinstance(x.value, bool) and x.value in values


def _dtype_of(equation: Any) -> str:
    return jnp.dtype(equation.outvars[0].aval.dtype).name


def _add(b: Builder, x: Any, y: Any) -> Any:
    if _is(x, 0):
        return y
    if _is(y, 0):
        return x
    if isinstance(y, Literal) and y.value < 0 and y.value > -float("inf"):
        return _sub(b, x, Literal(-y.value, y.dtype))
    if isinstance(y, Literal) and (inner := _shifted(b, x)) is not None:
        return _add(b, inner[0], Literal(inner[1] + y.value, y.dtype))
    for one, other in ((x, y), (y, x)):
        if (step := b.step(other)) is not None and step.op == "neg":
            return _sub(b, one, step.operands[0])
    ranges = b.range(x), b.range(y)
    within = (ranges[0][0] + ranges[1][0], ranges[0][1] + ranges[1][1]) if ranges[0] and ranges[1] else None
    return b.emit("add", (x, y), b.dtype(x), within=within)


def _shifted(b: Builder, x: Any) -> tuple[Any, int] | None:
    """An integer that is another one plus a literal, as these two."""
    step = b.step(x)
    if (
        step is None
        or step.op not in ("add", "sub")
        or b.dtype(x) != "int32"
        or not isinstance(step.operands[1], Literal)
    ):
        return None
    number = step.operands[1].value
    return step.operands[0], number if step.op == "add" else -number


def _sub(b: Builder, x: Any, y: Any) -> Any:
    if _is(y, 0):
        return x
    if _is(x, 0):
        return _neg(b, y)
    if isinstance(y, Literal) and (inner := _shifted(b, x)) is not None:
        return _add(b, inner[0], Literal(inner[1] - y.value, y.dtype))
    if (step := b.step(y)) is not None and step.op == "neg":
        return _add(b, x, step.operands[0])
    ranges = b.range(x), b.range(y)
    within = (ranges[0][0] - ranges[1][1], ranges[0][1] - ranges[1][0]) if ranges[0] and ranges[1] else None
    return b.emit("sub", (x, y), b.dtype(x), within=within)


def _neg(b: Builder, x: Any) -> Any:
    if isinstance(x, Literal):
        return Literal(-x.value, x.dtype)
    if (step := b.step(x)) is not None and step.op == "neg":
        return step.operands[0]
    if step is not None and step.op == "sub":
        return _sub(b, *step.operands[::-1])
    within = b.range(x)
    return b.emit("neg", (x,), b.dtype(x), within=within and (-within[1], -within[0]))


def _mul(b: Builder, x: Any, y: Any) -> Any:
    for one, other in ((x, y), (y, x)):
        if _is(one, 1):
            return other
        if _is(one, -1):
            return _neg(b, other)
    within = None
    if (first := b.range(x)) and (second := b.range(y)):
        corners = [m * n for m in first for n in second]
        within = (min(corners), max(corners))
    return b.emit("mul", (x, y), b.dtype(x), within=within)


def _div(b: Builder, x: Any, y: Any) -> Any:
    if _is(y, 1):
        return x
    if b.dtype(x)[:3] in ("int", "uin"):
        if (first := b.range(x)) and (second := b.range(y)) and first[0] >= 0 < second[0]:
            return b.emit("int_div", (x, y), b.dtype(x), within=(first[0] // second[1], first[1] // second[0]))
        return b.emit("trunc_div", (x, y), b.dtype(x))
    return b.emit("div", (x, y), b.dtype(x))


def _rem(b: Builder, x: Any, y: Any) -> Any:
    if (first := b.range(x)) and (second := b.range(y)) and first[0] >= 0 < second[0]:
        return b.emit("rem", (x, y), b.dtype(x), within=(0, min(first[1], second[1] - 1)))
    return b.emit("trunc_rem", (x, y), b.dtype(x))


def _division(b: Builder, op: str, x: Any, y: Any) -> Any:
    """Python's own, which round down."""
    if _is(y, 1):
        return x if op == "floor_divide" else Literal(0, b.dtype(x))
    first, second = b.range(x), b.range(y)
    if first and second and first[0] >= 0 < second[0]:
        return (_div if op == "floor_divide" else _rem)(b, x, y)
    within = None
    if second and second[0] > 0:
        within = (0, second[1] - 1)
        if op == "floor_divide":
            corners = [m // n for m in first for n in second] if first else []
            within = (min(corners), max(corners)) if corners else None
    return b.emit(op, (x, y), b.dtype(x), within=within)


def _compare(op: str) -> Callable:
    holds = dict(
        lt=lambda x, y: True if x[1] < y[0] else False if x[0] >= y[1] else None,
        le=lambda x, y: True if x[1] <= y[0] else False if x[0] > y[1] else None,
        eq=lambda x, y: False if x[1] < y[0] or y[1] < x[0] else True if x[0] == x[1] == y[0] == y[1] else None,
    )
    swapped = dict(gt="lt", ge="le")

    def rule(b: Builder, equation: Any, x: Any, y: Any) -> Any:
        if (first := b.range(x)) and (second := b.range(y)):
            if op in swapped:
                known = holds[swapped[op]](second, first)
            else:
                known = holds["eq" if op == "ne" else op](first, second)
                known = known if op != "ne" or known is None else not known
            if known is not None:
                return Literal(known, "bool")
        return b.emit(op, (x, y), "bool")

    return rule


def _extreme(op: str) -> Callable:
    def rule(b: Builder, x: Any, y: Any) -> Any:
        if x == y:
            return x
        first, second = b.range(x), b.range(y)
        within = None
        if first and second:
            if op == "max":
                if first[0] >= second[1] or second[0] >= first[1]:
                    return x if first[0] >= second[1] else y
                within = (max(first[0], second[0]), max(first[1], second[1]))
            else:
                if first[1] <= second[0] or second[1] <= first[0]:
                    return x if first[1] <= second[0] else y
                within = (min(first[0], second[0]), min(first[1], second[1]))
        operands = (y, x) if isinstance(x, Literal) else (x, y)
        return b.emit(op, operands, b.dtype(x), within=within)

    return rule


_max, _min = _extreme("max"), _extreme("min")


def _select(b: Builder, condition: Any, elsewhere: Any, where: Any) -> Any:
    """As `select_n`, whose first case is that of False."""
    if isinstance(condition, Literal):
        return where if condition.value else elsewhere
    if elsewhere == where:
        return where
    if (step := b.step(condition)) is not None and step.op == "not":
        return _select(b, step.operands[0], where, elsewhere)
    within = None
    if (first := b.range(where)) and (second := b.range(elsewhere)):
        within = (min(first[0], second[0]), max(first[1], second[1]))
    return b.emit("select", (condition, where, elsewhere), b.dtype(where), within=within)


def _logic(op: str) -> Callable:
    def rule(b: Builder, equation: Any, x: Any, y: Any) -> Any:
        if b.dtype(x) != "bool":
            return b.emit(op, (x, y), b.dtype(x))
        if op == "xor":
            return b.emit("ne", (x, y), "bool")
        for one, other in ((x, y), (y, x)):
            if isinstance(one, Literal):
                return other if one.value == (op == "and") else one
        return x if x == y else b.emit(op, (x, y), "bool")

    return rule


def _not(b: Builder, x: Any) -> Any:
    if (step := b.step(x)) is not None and step.op == "not":
        return step.operands[0]
    return b.emit("not", (x,), b.dtype(x))


def _cast(b: Builder, equation: Any, x: Any) -> Any:
    dtype = _dtype_of(equation)
    if dtype == b.dtype(x):
        return x
    if dtype == "bool":
        return b.emit("ne", (x, literal(0, b.dtype(x))), "bool")
    return b.emit("cast", (x,), dtype, within=b.range(x) if dtype[:3] in ("int", "uin") else None)


def _abs(b: Builder, x: Any) -> Any:
    within = b.range(x)
    if within and within[0] >= 0:
        return x
    return b.emit("abs", (x,), b.dtype(x), within=within and (0, max(-within[0], within[1])))


def _sign(b: Builder, x: Any) -> Any:
    zero, one, minus = (literal(n, b.dtype(x)) for n in (0, 1, -1))
    positive = _select(b, b.emit("gt", (x, zero), "bool"), zero, one)
    return _select(b, b.emit("lt", (x, zero), "bool"), positive, minus)


def _integer_pow(b: Builder, equation: Any, x: Any) -> Any:
    exponent = equation.params["y"]
    one = literal(1, b.dtype(x))
    result, power, left = one, x, abs(exponent)
    while left:
        if left & 1:
            result = power if result == one else _mul(b, result, power)
        left >>= 1
        power = _mul(b, power, power) if left else power
    return _div(b, one, result) if exponent < 0 else result


def _pow(b: Builder, equation: Any, x: Any, y: Any) -> Any:
    if not (isinstance(x, Literal) and x.value > 0) and not _is_positive(b, x):
        raise CannotPrint(
            f"{b.what} raises a number that may be negative to a power: kernels compute powers of positive bases; write "
            "jnp.exp2(exponent * jnp.log2(base)), or base ** n with a Python integer n"
        )
    if b.dtype(y) != b.dtype(x):
        y = b.emit("cast", (y,), b.dtype(x)) if not isinstance(y, Literal) else literal(y.value, b.dtype(x))
    if _is(x, 2):
        return b.emit("exp2", (y,), b.dtype(x))
    log = literal(np.log2(x.value), x.dtype) if isinstance(x, Literal) else b.emit("log2", (x,), b.dtype(x))
    return b.emit("exp2", (_mul(b, y, log),), b.dtype(x))


def _is_positive(b: Builder, x: Any) -> bool:
    """Not below 0, as far as the step tells."""
    if isinstance(x, Literal):
        return x.value >= 0
    step = b.step(x)
    if step is None:
        return (b.range(x) or (-1, 0))[0] >= 0
    if step.op in ("exp", "exp2", "abs", "sqrt", "sigmoid"):
        return True
    if step.op == "cast":
        return (b.range(step.operands[0]) or (-1, 0))[0] >= 0
    if step.op == "mul" and step.operands[0] == step.operands[1]:
        return True
    if step.op == "max":
        return any(_is_positive(b, operand) for operand in step.operands)
    return step.op in ("add", "mul", "div") and all(_is_positive(b, operand) for operand in step.operands)


def _plain(op: str) -> Callable:
    return lambda b, equation, *operands: b.emit(op, operands, _dtype_of(equation))


def _same(b: Builder, equation: Any, x: Any) -> Any:
    return x


def _without_equation(rule: Callable) -> Callable:
    return lambda b, equation, *operands: rule(b, *operands)


def _one(b: Builder, x: Any) -> Literal:
    return literal(1, b.dtype(x))


_RULES: dict[str, Callable] = {
    name: _without_equation(rule)
    for name, rule in dict(
        add=_add,
        add_any=_add,
        sub=_sub,
        neg=_neg,
        mul=_mul,
        div=_div,
        rem=_rem,
        max=_max,
        min=_min,
        select_n=_select,
        abs=_abs,
        sign=_sign,
        square=lambda b, x: _mul(b, x, x),
        one_minus_square=lambda b, x: _sub(b, _one(b, x), _mul(b, x, x)),  # in the derivative of tanh
        clamp=lambda b, low, x, high: _min(b, _max(b, x, low), high),
        log1p=lambda b, x: b.emit("log", (_add(b, x, _one(b, x)),), b.dtype(x)),
        expm1=lambda b, x: _sub(b, b.emit("exp", (x,), b.dtype(x)), _one(b, x)),
        tan=lambda b, x: b.emit("div", [b.emit(op, (x,), b.dtype(x)) for op in ("sin", "cos")], b.dtype(x)),
        is_finite=lambda b, x: b.emit("lt", (_abs(b, x), Literal(float("inf"), b.dtype(x))), "bool"),
    ).items()
}
_RULES |= {name: _compare(name) for name in ("lt", "le", "gt", "ge", "eq", "ne")}
_RULES |= {name: _logic(name) for name in ("and", "or", "xor")}
_RULES |= {
    name: _plain(name) for name in ("ceil", "cos", "erf", "exp", "exp2", "floor", "log", "rsqrt", "sin", "sqrt", "tanh")
}
_RULES |= dict(
    convert_element_type=_cast,
    copy=_same,
    integer_pow=_integer_pow,
    logistic=_plain("sigmoid"),
    pow=_pow,
    reduce_sum=_same,  # of no axes, as some derivatives have it on a mesh
    shift_left=_plain("shift_left"),
    shift_right_arithmetic=_plain("shift_right"),
    stop_gradient=_same,
)
_RULES["not"] = _without_equation(_not)
