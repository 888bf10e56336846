"""Prints a `Program` as lines of a kernel that read as if written by hand.

A value that is used once is printed where it is used; one that is used more often, or has a name in the user's code, gets a
line of its own, and so does what can be computed outside of a loop and costs something.
"""

import dataclasses
import keyword
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from .program import BATCH, HEAD, KEY, Literal, Operand, Program, QUERY, SCORE, Step

_WIDTH = 76
"""Longer expressions are taken apart."""

# How tightly an expression binds, as in Python.
_ATOM, _POWER, _UNARY, _PRODUCT, _SUM, _SHIFT, _AND, _XOR, _OR, _COMPARE = range(10, 0, -1)


@dataclasses.dataclass(frozen=True)
class Form:
    """How an operation is written: a call, or an operator and how tightly it binds; `name` is for a result that needs one."""

    text: str
    name: str
    binds: int = _ATOM


def _infix(symbol: str, name: str, binds: int) -> Form:
    return Form(symbol, name, binds)


OPERATORS = {
    "add": _infix("+", "total", _SUM),
    "sub": _infix("-", "difference", _SUM),
    "mul": _infix("*", "product", _PRODUCT),
    "div": _infix("/", "quotient", _PRODUCT),
    "int_div": _infix("//", "quotient", _PRODUCT),
    "trunc_div": _infix(
        "//", "quotient", _PRODUCT
    ),  # of integers, towards zero as in C; int_div is of no negative ones
    "rem": _infix("%", "rest", _PRODUCT),
    "trunc_rem": _infix("%", "rest", _PRODUCT),  # with the sign of what is divided
    "shift_left": _infix("<<", "shifted", _SHIFT),
    "shift_right": _infix(">>", "shifted", _SHIFT),
    "and": _infix("&", "both", _AND),
    "xor": _infix("^", "either", _XOR),
    "or": _infix("|", "some", _OR),
    "lt": _infix("<", "below", _COMPARE),
    "le": _infix("<=", "below", _COMPARE),
    "gt": _infix(">", "above", _COMPARE),
    "ge": _infix(">=", "above", _COMPARE),
    "eq": _infix("==", "same", _COMPARE),
    "ne": _infix("!=", "other", _COMPARE),
}
PREFIXES = {"neg": Form("-", "negative", _UNARY), "not": Form("~", "opposite", _UNARY)}
CALLS = {
    "abs": Form("abs", "size"),
    "ceil": Form("ceil", "above"),
    "cos": Form("cos", "cosine"),
    "erf": Form("erf", "erf"),
    "exp": Form("exp", "power"),
    "exp2": Form("exp2", "power"),
    "floor": Form("floor", "below"),
    "floor_divide": Form("floor_divide", "quotient"),
    "log": Form("log", "logarithm"),
    "log2": Form("log2", "logarithm"),
    "max": Form("maximum", "larger"),
    "min": Form("minimum", "smaller"),
    "remainder": Form("remainder", "rest"),
    "rsqrt": Form("rsqrt", "inverse_root"),
    "select": Form("where", "chosen"),  # condition, value where it holds, value elsewhere
    "sigmoid": Form("sigmoid", "share"),
    "sin": Form("sin", "sine"),
    "sqrt": Form("sqrt", "root"),
    "tanh": Form("tanh", "squashed"),
}
FORMS = OPERATORS | PREFIXES | CALLS | {"cast": Form("", "number"), "load": Form("", "element")}
"""All operations of a `Step`."""

_CHEAP = ("abs", "ceil", "floor", "max", "min", "select")

HELPERS = ("floor_divide", "remainder", "tanh")
"""Operations for which a Triton kernel has a function of its own."""


def added(pointer: str, offset: str) -> str:
    """A pointer and how far from it."""
    return f"{pointer} + {offset}" if offset else pointer


class Triton:
    """Triton's words."""

    @staticmethod
    def call(function: str, arguments: list[str]) -> str:
        """A function of the language, or of the kernel's file."""
        return f"{'' if function in HELPERS else 'tl.'}{function}({', '.join(arguments)})"

    @staticmethod
    def cast(value: str, dtype: str) -> str:
        """`value` binds tightly."""
        return f"{value}.to(tl.{'int1' if dtype == 'bool' else dtype})"

    @classmethod
    def load(cls, array: str, indices: list[str]) -> str:
        """From where an example's entry of the array begins, `array_at`; `array_1` is the size of its second axis."""
        return f"tl.load({added(f'{array}_at', cls.offset(array, indices))})"

    @staticmethod
    def offset(array: str, indices: list[str]) -> str:
        """How far from there an element is."""
        offset = ""
        for axis, index in enumerate(indices):
            if offset:
                offset = f"({offset})" if " + " in offset else offset
                offset = f"{offset} * {array}_{axis}" + (f" + {index}" if index != "0" else "")
            elif index != "0":
                offset = index
        return offset

    @staticmethod
    def number(text: str, dtype: str) -> str:
        """A literal where nothing else tells the dtype."""
        return text

    index_binds = _PRODUCT
    functions: Mapping[str, str] = {}  # for operators that mean something else in this language
    infinity, minus_infinity = 'float("inf")', 'float("-inf")'


class Jax:
    """The words of jax.numpy."""

    @staticmethod
    def call(function: str, arguments: list[str]) -> str:
        """A function of jax.numpy, or of jax.lax and jax.nn where it is there."""
        if function in ("rsqrt", "erf"):
            return f"jax.lax.{function}({', '.join(arguments)})"
        if function == "sigmoid":
            return f"jax.nn.sigmoid({', '.join(arguments)})"
        return f"jnp.{function}({', '.join(arguments)})"

    @staticmethod
    def cast(value: str, dtype: str) -> str:
        """`value` binds tightly."""
        return f"{value}.astype(jnp.{'bool_' if dtype == 'bool' else dtype})"

    @staticmethod
    def load(array: str, indices: list[str]) -> str:
        """An element."""
        return f"{array}[{', '.join(indices) or '()'}]"

    @staticmethod
    def number(text: str, dtype: str) -> str:
        """A literal where nothing else tells the dtype."""
        return text if dtype == "bool" else f"jnp.{dtype}({text})"

    index_binds = _COMPARE
    functions: Mapping[str, str] = {"trunc_div": "jax.lax.div", "trunc_rem": "jax.lax.rem"}
    infinity, minus_infinity = "jnp.inf", "-jnp.inf"


class Pallas(Jax):
    """Those of Pallas kernels for TPUs, which have a function of their own for what the hardware is inexact at."""

    @staticmethod
    def call(function: str, arguments: list[str]) -> str:
        """A function of jax.numpy, or of the kernel's file."""
        return f"tanh({', '.join(arguments)})" if function == "tanh" else Jax.call(function, arguments)


@dataclasses.dataclass(frozen=True)
class Line:
    """A line that names a value, and on which arguments that depends."""

    name: str
    text: str
    depends: frozenset[str]

    def __str__(self) -> str:
        return f"{self.name} = {self.text}"


@dataclasses.dataclass(frozen=True)
class Listing:
    """The lines that some outputs need, in order, and the outputs as expressions of how tight binding.

    `offsets` say where the elements of some loads lie, from where their array's entry begins; "" is there.
    """

    lines: tuple[Line, ...]
    outputs: tuple[str, ...]
    binds: tuple[int, ...]
    offsets: tuple[str, ...] = ()

    def between(self, known: Collection[str], given: Collection[str]) -> list[str]:
        """The lines that can be written where the arguments `given` are known, and could not where `known` are."""
        return [
            str(line)
            for line in self.lines
            if line.depends <= set(given) and not (known and line.depends <= set(known))
        ]

    def factor(self, number: int = 0) -> str:
        """An output to be multiplied with something behind it."""
        text = self.outputs[number]
        return text if self.binds[number] >= _PRODUCT else f"({text})"


def listing(
    program: Program,
    outputs: Iterable[Operand],
    language: type[Triton] | type[Jax],
    names: Mapping[str, str],
    arrays: Mapping[int, str],
    taken: Collection[str] = (),
    loads: Sequence[int] = (),
    given: Mapping[int, str] | None = None,
) -> Listing:
    """Prints what `outputs` need, and where the elements of `loads` lie.

    `names` are those of the arguments by kind, `arrays` those of the captures by number, `taken` names that no line may have.
    `given` are the names of values that need not be computed.
    """
    steps = [program.step(load) for load in loads]
    ends = (*outputs, *(operand for step in steps if step is not None for operand in step.operands))
    given = given or {}
    taken = {*taken, *names.values(), *arrays.values(), *given.values()}
    printer = _Printer(program, ends, language, names, arrays, taken, given)
    texts = [printer.expression(output) for output in outputs]
    offsets = [printer.offset(step) for step in steps if step is not None]
    return Listing(
        tuple(printer.lines), tuple(text for text, _ in texts), tuple(binds for _, binds in texts), tuple(offsets)
    )


def function_lines(program: Program, language: type[Triton] | type[Jax]) -> list[str]:
    """The function alone, as lines that end with what becomes of the score, or which keys are kept; for reports."""
    names = dict(zip(program.kinds, program.arguments, strict=True)) | {SCORE: "scores"}
    arrays = {number: capture.name for number, capture in enumerate(program.captures)}
    printed = listing(program, [program.value], language, names, arrays)
    return [*map(str, printed.lines), f"{'keep' if program.is_mask else 'scores'} = {printed.outputs[0]}"]


class _Printer:
    def __init__(self, program, outputs, language, names, arrays, taken, given):
        self.program, self.outputs, self.language = program, outputs, language
        self.arrays, self.taken, self.lines = arrays, {*taken, *HELPERS}, []
        self.done = {number: (names[kind], _ATOM) for number, kind in enumerate(program.kinds)}
        self.done |= {value: (name, _ATOM) for value, name in given.items()}
        needed = program.needed(outputs, given)
        self.users: dict[int, list[Operand | None]] = {value: [] for value in needed}
        for value in sorted(needed):
            step = None if value in given else program.step(value)
            for operand in () if step is None else step.operands:
                if isinstance(operand, int):
                    self.users[operand].append(value)
        for output in outputs:
            if isinstance(output, int):
                self.users[output].append(None)

    def expression(self, value: Operand) -> tuple[str, int]:
        """The text of a value where it is used; its own lines are written on the way."""
        if isinstance(value, Literal):
            return self._literal(value)
        if value not in self.done:
            step = self.program.step(value)
            assert step is not None
            text, binds = self._composed(step)
            if self._has_line(value, step):
                return self._name(value, step, text)
            self.done[value] = text, binds
        return self.done[value]

    def offset(self, step: Step) -> str:
        """Where the element of a load lies, for Triton."""
        return Triton.offset(self.arrays[step.capture], [self._bound(x, _PRODUCT) for x in step.operands])

    def _name(self, value: int, step: Step, text: str) -> tuple[str, int]:
        if step.name:
            name = free_name(step.name, self.taken)
        else:
            name = numbered_name(self._invented(step, _place(self.program.depends[value])), self.taken)
        self.lines.append(Line(name, text, self.program.depends[value]))
        self.done[value] = name, _ATOM
        return self.done[value]

    def _composed(self, step: Step) -> tuple[str, int]:
        """A step's text; where it is too long, its longest parts get lines of their own first."""
        while True:
            for operand in step.operands:
                self.expression(operand)
            text, binds = self._text(step)
            inner: dict[int, str] = {
                x: self.done[x][0]
                for x in step.operands
                if isinstance(x, int) and (self.done[x][1] < _ATOM or self._is_call(x))
            }
            if len(text) <= _WIDTH or not inner:
                return text, binds
            longest = max(inner, key=lambda x: len(inner[x]))
            part = self.program.step(longest)
            assert part is not None
            self._name(longest, part, inner[longest])

    def _is_call(self, operand: Operand) -> bool:
        return isinstance(operand, int) and "(" in self.done[operand][0]

    def _has_line(self, value: int, step: Step) -> bool:
        users = self.users[value]
        if step.op in PREFIXES and all(self._is_atom(x) for x in step.operands):
            return False
        if step.name or len(users) > 1:
            return True
        return self._costs(value) and any(
            user is not None and _place(self.program.depends[user]) != _place(self.program.depends[value])
            for user in users
        )

    def _is_atom(self, operand: Operand) -> bool:
        return isinstance(operand, Literal) or self.done[operand][1] == _ATOM and not self._is_call(operand)

    def _costs(self, value: int) -> bool:
        """Whether a value is worth keeping from being computed again in an inner loop."""
        step = self.program.step(value)
        return step is not None and (step.op == "load" or step.op in CALLS and step.op not in _CHEAP)

    def _text(self, step: Step) -> tuple[str, int]:
        if step.op == "load":
            binds = self.language.index_binds
            return self.language.load(self.arrays[step.capture], [self._bound(x, binds) for x in step.operands]), _ATOM
        if step.op == "cast":
            return self.language.cast(self._bound(step.operands[0], _ATOM), step.dtype), _ATOM
        form = FORMS[step.op]
        if step.op in PREFIXES:
            return form.text + self._bound(step.operands[0], _UNARY), _UNARY
        if step.op in CALLS:
            texts = [self.expression(x)[0] for x in step.operands]
            if step.op == "select" and all(isinstance(x, Literal) for x in step.operands[1:]):
                texts[1] = self.language.number(texts[1], step.dtype)
            return self.language.call(form.text, texts), _ATOM
        left, right = step.operands
        if (function := self.language.functions.get(step.op)) is not None:
            return f"{function}({', '.join(self.expression(x)[0] for x in step.operands)})", _ATOM
        # A comparison of comparisons would chain, and what stands to the right of an operator is computed first.
        left_binds = form.binds + (form.binds == _COMPARE)
        return f"{self._bound(left, left_binds)} {form.text} {self._bound(right, form.binds + 1)}", form.binds

    def _bound(self, operand: Operand, binds: int) -> str:
        text, own = self.expression(operand)
        return text if own >= binds else f"({text})"

    def _literal(self, literal: Literal) -> tuple[str, int]:
        value = literal.value
        if isinstance(value, float) and abs(value) == float("inf"):
            text = self.language.infinity if value > 0 else self.language.minus_infinity
            return text, _UNARY if text.startswith("-") else _ATOM
        if isinstance(value, float) and value != value:
            return 'float("nan")', _ATOM
        text = repr(value)
        return text, _UNARY if text.startswith("-") else _ATOM

    def _invented(self, step: Step, place: str) -> str:
        """A name for a value that has none in the user's code."""
        side = {QUERY: "q_", KEY: "kv_"}.get(place, "")
        if step.op == "cast" and isinstance(step.operands[0], int):
            inner = self.program.step(step.operands[0])
            return self._invented(inner, place) if inner is not None else side + FORMS["cast"].name
        if step.op != "load":
            return side + FORMS[step.op].name
        array = self.arrays[step.capture]
        one = singular(array)
        return side + one if side or one != array else f"{array}_element"


def singular(name: str) -> str:
    """The name of one of several, as far as that is seen from an s."""
    return re.sub(r"(?<=[sx])es$|(?<!s)s$", "", name)


def free_name(name: str, taken: set[str]) -> str:
    """`name`, or a variation that is not among `taken`, to which it is added."""
    return numbered_name(f"own_{name}" if name in taken or keyword.iskeyword(name) else name, taken)


def numbered_name(name: str, taken: set[str]) -> str:
    """`name`, with a number behind it where it is among `taken`, to which the result is added."""
    chosen, number = name, 1
    while chosen in taken or keyword.iskeyword(chosen):
        number += 1
        chosen = f"{name}_{number}"
    taken.add(chosen)
    return chosen


def _place(depends: frozenset[str]) -> str:
    """Where in a kernel's loops something is first known."""
    if SCORE in depends or {QUERY, KEY} <= depends:
        return SCORE
    return QUERY if QUERY in depends else KEY if KEY in depends else HEAD if HEAD in depends else BATCH
