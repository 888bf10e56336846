"""What templates ask of the functions that are printed into a kernel: names, parameters, and lines for each of its loops."""

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence

from .printer import added, free_name, HELPERS, Listing, listing, Triton
from .program import BATCH, find, HEAD, KEY, Literal, Program, QUERY, SCORE
from .spec import KernelSpec

_OWN = ("mod_slope",)
"""Names that templates give to what they make of a function."""

_INDICES = {BATCH: "batch_index", HEAD: "head_index", QUERY: "q_index", KEY: "kv_index"}
"""The operands that hold global indices."""


class ModText:
    """The score function and the mask function of a spec, each of which may be missing. `taken` are the kernel's own names."""

    def __init__(self, spec: KernelSpec, taken: set[str]):
        self.score = find(spec.scoremod) if spec.scoremod else None
        self.mask = find(spec.maskmod) if spec.maskmod else None
        taken = {*taken, *_OWN, *HELPERS, *(f"{name}_ptr" for name in _INDICES.values())}
        self._programs = [program for program in (self.score, self.mask) if program is not None]
        self._names = {SCORE: "scores"}
        for kind in (kind for kind in _INDICES if self._uses(kind)):
            given = [
                name
                for program in self._programs
                for k, name in zip(program.kinds, program.arguments, strict=True)
                if k == kind
            ]
            name = next((name for name in given if name not in taken), _INDICES[kind])
            self._names[kind] = free_name(name, taken)
        for kind in _INDICES:
            self._names.setdefault(kind, _INDICES[kind])
        self._captures: list[tuple[str, int, str]] = []
        self._named: list[dict[int, str]] = []
        for program in self._programs:
            of = "score" if program is self.score else "mask"
            names = {number: _array_name(capture.name, taken) for number, capture in enumerate(program.captures)}
            self._named.append(names)
            self._captures += [
                (names[number], capture.ndim, f"operands.{of}_arrays[{number}]")
                for number, capture in enumerate(program.captures)
            ]
        self._taken = taken

    def __bool__(self) -> bool:
        return bool(self._programs)

    def _uses(self, kind: str) -> bool:
        return any(
            kind in program.kinds and program.kinds.index(kind) in program.needed(_outputs(program))
            for program in self._programs
        )

    @property
    def indices(self) -> list[str]:
        """The index operands that the functions use."""
        return [name for kind, name in _INDICES.items() if self._uses(kind)]

    @property
    def helpers(self) -> list[str]:
        """The functions that the kernel's file needs."""
        used = {step.op for program in self._programs for step in program.steps}
        return [name for name in HELPERS if name in used]

    @functools.cached_property
    def arrays(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """For each captured array its name, and the kernel's parameters with what a call passes for them."""
        words = {word for found in self._listings.values() for word in re.findall(r"\w+", str(found))}
        found = []
        for name, ndim, array in self._captures:
            parameters = [(f"{name}_ptr", array), (f"{name}_share", f"batch // {array}.shape[0]")]
            if ndim:
                parameters.append((f"{name}_size", f"math.prod({array}.shape[1:])"))
            sizes = [(f"{name}_{axis}", f"{array}.shape[{axis + 1}]") for axis in range(1, ndim)]
            found.append((name, parameters + [size for size in sizes if size[0] in words]))
        return found

    @functools.cached_property
    def _listings(self) -> dict[str, Listing]:
        """Of the score's value, of that and its slope, of that and the captures' slopes, and of the mask."""
        found = {}
        taken = self._taken
        for program, arrays in zip(self._programs, self._named, strict=True):
            printed = functools.partial(
                listing, program, language=Triton, names=self._names, arrays=arrays, taken=taken
            )
            if program is self.score:
                loads = [load for load, _ in program.load_slopes]
                slopes = [slope for _, slope in program.load_slopes]
                found["value"] = printed([program.value])
                assert program.slope is not None
                found["slope"] = printed([program.value, program.slope])
                found["captured"] = printed([program.value, *slopes], loads=loads)
                taken = taken | {line.name for of in found.values() for line in of.lines}
            else:
                found["mask"] = printed([program.value])
        return found

    def pointers(self) -> list[str]:
        """Where the entries of an example begin."""
        return [
            f"{name}_at = {name}_ptr + batch // {name}_share" + (f" * {name}_size" if ndim else "")
            for name, ndim, _ in self._captures
        ]

    def index(self, kind: str, pointer: str, across: str = "") -> list[str]:
        """The line that loads an index; none where no function uses it."""
        if not self._uses(kind):
            return []
        return [f"{self._names[kind]} = tl.load({_INDICES[kind]}_ptr + {pointer}){across}"]

    def lines(self, of: str, known: Sequence[str], given: Sequence[str]) -> list[str]:
        """Of "value", "slope", "captured" or "mask", what can be computed where `given` is known and could not be where `known` is."""
        return self._listings[of].between(known, given) if of in self._listings else []

    def outer(self, of: str, known: Sequence[str], given: Sequence[str]) -> list[str]:
        """The lines of both functions that lie outside of the innermost loop."""
        return self.lines(of, known, given) + self.lines("mask", known, given)

    def value(self, of: str) -> str:
        """What becomes of `scores`, to be multiplied, after the lines of the same name."""
        assert self.score is not None
        text = self._listings[of].factor()
        depends = isinstance(self.score.value, int) and SCORE in self.score.depends[self.score.value]
        return text if depends else f"(tl.zeros_like(scores) + {text})"

    @functools.cached_property
    def loads(self) -> list["LoadText"]:
        """What the score function reads of floating arrays, and what becomes of its gradient."""
        if self.score is None:
            return []
        listed, found, names = self._listings["captured"], [], set[str]()
        for number, (load, slope) in enumerate(self.score.load_slopes):
            step, depends = self.score.step(load), self.score.depends[load]
            assert step is not None and step.capture is not None
            array = self._named[0][step.capture]
            over_rows, over_columns = not {QUERY, SCORE} & depends, not {KEY, SCORE} & depends
            name = free_name(f"d{array}" if over_rows or over_columns else f"d{array}_part", names)
            text = "" if slope == Literal(1.0, "float32") else listed.factor(number + 1)
            early = "scores" in re.findall(r"\w+", text)
            found.append(
                LoadText(
                    name=name,
                    number=load,
                    capture=step.capture,
                    array=array,
                    slope=f"{name}_slope" if early else text,
                    line=f"{name}_slope = {listed.outputs[number + 1]}" if early else "",
                    place=added(f"d{array}_sums_at", listed.offsets[number]),
                    rows=over_columns,
                    columns=over_rows and not over_columns,
                )
            )
        return found

    @property
    def row_results(self) -> list["LoadText"]:
        """Those that are summed in rows."""
        return [load for load in self.loads if load.rows]

    @property
    def buffers(self) -> list["Buffer"]:
        """The gradients that are summed up in their places."""
        found = {
            load.capture: Buffer(f"d{load.array}_sums", load.array, load.capture)
            for load in self.loads
            if not load.rows
        }
        return list(found.values())

    @property
    def results(self) -> list[str]:
        """What the kernel of the captures' gradients returns, by name."""
        return [load.name for load in self.row_results] + [buffer.name for buffer in self.buffers]

    @property
    def slope(self) -> str:
        """The derivative of the value, "" where it is 1."""
        if self.score is None or self.score.slope == Literal(1.0, "float32"):
            return ""
        return self._listings["slope"].outputs[1]

    @property
    def slope_name(self) -> str:
        """What the derivative is called: its own text where that is a name, else that of a line."""
        return self.slope if self.slope.isidentifier() and self.slope != "scores" else _OWN[0]

    def condition(self) -> str:
        """What the mask function says; "" without one."""
        return self._listings["mask"].outputs[0] if "mask" in self._listings else ""


@dataclasses.dataclass(frozen=True)
class LoadText:
    """One element that the score function reads: `number` in its program, `capture` of which array, `slope` "" for 1.

    `line` has to come first where the slope depends on the score, before that is changed.

    Its gradient is summed over keys where all keys read the same (`rows`), else added at `place`, where all queries read the
    same (`columns`) after a sum over them.
    """

    name: str
    number: int
    capture: int
    array: str
    slope: str
    line: str
    place: str
    rows: bool
    columns: bool


@dataclasses.dataclass(frozen=True)
class Buffer:
    """The gradient of the captured array `array`, number `number`."""

    name: str
    array: str
    number: int


def _array_name(name: str, taken: set[str]) -> str:
    """A name of which the kernel has none of the names that belong to it."""
    while True:
        name = free_name(name, taken)
        others = {f"{name}_{word}" for word in ("at", "ptr", "share", "size")} | {
            f"d{name}{word}" for word in ("", "_ptr", "_part", "_slope", "_sums", "_sums_at", "_sums_ptr")
        }
        if not others & taken:
            taken |= others
            return name


def _outputs(program: Program) -> tuple:
    return (program.value, *(() if program.slope is None else (program.slope,)), *(x for _, x in program.load_slopes))


def mod_text(spec: KernelSpec, render_without: Callable[[], str]) -> ModText:
    """The functions of a spec; `render_without` gives the kernel's text without them."""
    if not spec.scoremod and not spec.maskmod:
        return ModText(spec, set())
    return ModText(spec, set(re.findall(r"[A-Za-z_]\w*", render_without())))
