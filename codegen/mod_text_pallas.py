"""What the templates of TPU kernels ask of the functions that are printed into a kernel.

A function becomes a function of the kernel's file, of scores and of what it reads for them. Elements of captured arrays are
read before the kernel: those that depend on the query or the key alone, or on neither, are arrays like a bias of one row, one
column or one number; those that depend on the distance from one to the other are arrays of one number for each distance.
"""

import dataclasses
import re
from collections.abc import Callable

from .mod_reads import casts_of_elements, indices_in_kernel, is_by_distance, loads_in_kernel, refusals
from .printer import free_name, listing, numbered_name, Pallas, singular
from .program import BATCH, find, HEAD, KEY, Literal, Operand, Program, QUERY, SCORE
from .spec import KernelSpec, SpecError

_INDICES = {
    BATCH: ("batch_indices", "operands.batch_index[:, None, None, None]"),
    HEAD: ("head_indices", "operands.head_index[None, :, None, None]"),
    QUERY: ("q_indices", "operands.q_index[None, None, :, None]"),
    KEY: ("kv_indices", "operands.kv_index[None, None, None]"),
}
"""What kernels call the indices, and those as an array that broadcasts to `[batch, q_heads, q_seq, kv_seq]`."""

_LINE = 120


@dataclasses.dataclass(frozen=True)
class Element:
    """What a kernel reads for each score: an index, or an element of an array.

    `array` is the expression that makes it, and `by_distance` says that it depends on how far the key is from the query.
    """

    name: str
    array: str
    by_distance: bool = False

    @property
    def blocks(self) -> str:
        """The expression for its blocks, where the block sizes are known."""
        if self.by_distance:
            return f"distance_blocks({self.array}, batch, q_seq, kv_seq, block_q, block_kv)"
        return f"score_blocks({self.array}, batch, block_q, block_kv)"


@dataclasses.dataclass(frozen=True)
class Function:
    """A function of the kernel's file: `parameters` has the name of each, and the element that it is (None: the scores)."""

    name: str
    doc: str
    parameters: tuple[tuple[str, Element | None], ...]
    lines: tuple[str, ...]
    result: str

    @property
    def head(self) -> str:
        """Its first line."""
        return f"def {self.name}({', '.join(name for name, _ in self.parameters)}):"

    def call(self, start: str, of: str, indent: int, end: str = "") -> str:
        """The lines of a statement in a kernel, from `start` to `end`, that calls it for a block ("tile") or a "part"."""
        given = ["s" if element is None else _read(element, of) for _, element in self.parameters]
        margin = " " * indent
        line = f"{margin}{start}{self.name}({', '.join(given)}){end}"
        if len(line) <= _LINE:
            return line
        inner = f"{margin}    {', '.join(given)}"
        if len(inner) <= _LINE:
            return f"{margin}{start}{self.name}(\n{inner}\n{margin}){end}"
        rows = "".join(f"{margin}    {argument},\n" for argument in given)
        return f"{margin}{start}{self.name}(\n{rows}{margin}){end}"


@dataclasses.dataclass(frozen=True)
class Gradient:
    """That of what a score function reads: the element, the load's number, and its slope, a function or a number."""

    element: Element
    load: int
    function: Function | None
    number: str


def _read(element: Element, of: str) -> str:
    if of == "part":
        return f"{element.name}_of(part)"
    return f"{element.name}.tile({element.name}_ref{', q_block, kv_block' if element.by_distance else ''})"


class PallasModText:
    """The score function and the mask function of a spec, each of which may be missing. `taken` are the kernel's own names.

    Raises `SpecError` where the kernels do not have a function.
    """

    def __init__(self, spec: KernelSpec, taken: set[str]):
        self.score = find(spec.scoremod) if spec.scoremod else None
        self.mask = find(spec.maskmod) if spec.maskmod else None
        self._taken = {*taken, "tanh", "jnp", "jax", "lax"}
        self._elements: dict[object, Element] = {}
        self._functions: dict[str, Function] = {}
        for program in (self.score, self.mask):
            if program is None:
                continue
            if reasons := refusals(program):
                raise SpecError("; ".join(reasons))
            self._read(program)
            self._print(program)

    def __bool__(self) -> bool:
        return self.score is not None or self.mask is not None

    def _read(self, program: Program) -> None:
        """Gives names to what the program reads in the kernel."""
        of = "mask" if program.is_mask else "score"
        for load in loads_in_kernel(program):
            step = program.step(load)
            assert step is not None and step.capture is not None
            by_distance, depends = is_by_distance(program, load), program.depends[load]
            side = "" if by_distance else "q_" if QUERY in depends else "kv_" if KEY in depends else ""
            name = step.name or side + singular(program.captures[step.capture].name)
            function = "elements_by_distance" if by_distance else "elements"
            array = f'{function}(operands, "{of}", {load})'
            self._elements[of, load] = Element(self._free(name), array, by_distance)
        for kind in indices_in_kernel(program):
            if kind not in self._elements:
                name, array = _INDICES[kind]
                self._elements[kind] = Element(self._free(name), array)

    def _free(self, name: str) -> str:
        """A name of which the kernel has none of the names that belong to it."""
        while True:
            name = free_name(name, self._taken)
            others = {f"{name}_ref", f"{name}_of", f"d{name}", f"d{name}_ref", f"_{name}_gradient", f"_d{name}_kernel"}
            if not others & self._taken:
                self._taken |= others
                return name

    def _print(self, program: Program) -> None:
        if program.is_mask:
            self._add(program, "mask", "_mask_mod", "Which keys the mask's function shows.", program.value)
            return
        self._add(program, "value", "_score_mod", "What the score function makes of scores.", program.value)
        assert program.slope is not None
        self._add(program, "slope", "_score_derivative", "Its derivative by the score.", program.slope)
        for load, slope in program.load_slopes:
            name = self._elements["score", load].name
            self._add(program, f"slope {load}", f"_derivative_by_{name}", f"Its derivative by {name}.", slope)

    def _add(self, program: Program, key: str, name: str, doc: str, output: Operand) -> None:
        """Prints the function that computes one value, unless that is a number."""
        if isinstance(output, Literal) and key not in ("value", "mask"):
            return
        of = "mask" if program.is_mask else "score"
        taken = {"tanh", "jnp", "jax"}
        kinds = {kind: free_name(given, taken) for kind, given in zip(program.kinds, program.arguments, strict=True)}
        kinds[SCORE] = numbered_name("scores", taken)
        given = {load: numbered_name(self._elements[of, load].name, taken) for load in loads_in_kernel(program)}
        # The kernel reads float32 whatever the array is, so that a cast to it is the element itself.
        known = given | {cast: given[load] for cast, load in casts_of_elements(program).items() if load in given}
        printed = listing(program, [output], Pallas, kinds, {}, taken, given=known)
        words = set(re.findall(r"[A-Za-z_]\w*", " ".join([*map(str, printed.lines), printed.outputs[0]])))
        parameters = [(name, self._elements[of, load]) for load, name in given.items() if name in words]
        parameters += [(kinds[kind], self._elements[kind]) for kind in _INDICES if kinds[kind] in words]
        scores = kinds[SCORE]
        result = printed.outputs[0]
        if key == "value" and not (isinstance(output, int) and SCORE in program.depends[output]):
            result = f"jnp.zeros_like({scores}) + {printed.factor()}"
            words.add(scores)
        first = [(scores, None)] if scores in words else []
        self._functions[key] = Function(name, doc, (*first, *parameters), tuple(map(str, printed.lines)), result)

    @property
    def elements(self) -> list[Element]:
        """What the kernels read."""
        return list(self._elements.values())

    @property
    def names(self) -> list[str]:
        """The names of what the kernels read."""
        return [element.name for element in self.elements]

    @property
    def functions(self) -> list[Function]:
        """Those of the kernel's file."""
        return list(self._functions.values())

    @property
    def of_distances(self) -> bool:
        """Whether a kernel has to know where its block lies."""
        return any(element.by_distance for element in self.elements)

    def is_by_distance(self, name: str) -> bool:
        """Whether an element depends on the distance."""
        return any(element.by_distance for element in self.elements if element.name == name)

    @property
    def imports(self) -> list[str]:
        """What the kernel's file needs of `eqx_attn._device` for the functions."""
        words = " ".join(element.blocks for element in self.elements)
        found = [name for name in ("distance_blocks", "elements", "elements_by_distance") if f"{name}(" in words]
        found += ["element_gradients"] if self.gradients else []
        return found + (["tanh"] if self._uses_tanh else [])

    @property
    def _uses_tanh(self) -> bool:
        text = " ".join(line for function in self.functions for line in (*function.lines, function.result))
        return re.search(r"\btanh\(", text) is not None

    @property
    def needs_score_blocks(self) -> bool:
        """Whether some element is not by distance."""
        return not all(element.by_distance for element in self.elements)

    def has(self, key: str) -> bool:
        """Whether there is this function: "value", "slope" or "mask"."""
        return key in self._functions

    def call(self, key: str, start: str, of: str, indent: int, end: str = "") -> str:
        """A statement that calls it: `Function.call`."""
        return self._functions[key].call(start, of, indent, end)

    @property
    def slope(self) -> str:
        """The derivative by the score: "mod_slope" after its call, or a number; "" where it is 1."""
        if self.score is None or self.score.slope == Literal(1.0, "float32"):
            return ""
        return "mod_slope" if self.has("slope") else str(self._number(self.score.slope))

    @property
    def gradients(self) -> list[Gradient]:
        """Those of what the score function reads of floating arrays."""
        if self.score is None:
            return []
        return [
            Gradient(
                self._elements["score", load],
                load,
                self._functions.get(f"slope {load}"),
                "" if slope == Literal(1.0, "float32") else self._number(slope),
            )
            for load, slope in self.score.load_slopes
        ]

    def _number(self, value: Operand | None) -> str:
        """A literal as text, "" for other values."""
        if not isinstance(value, Literal):
            return ""
        return repr(value.value) if value.value >= 0 else f"({value.value!r})"


def pallas_mod_text(spec: KernelSpec, render_without: Callable[[], str]) -> PallasModText:
    """The functions of a spec; `render_without` gives the kernel's text without them."""
    if not spec.scoremod and not spec.maskmod:
        return PallasModText(spec, set())
    return PallasModText(spec, set(re.findall(r"[A-Za-z_]\w*", render_without())))
