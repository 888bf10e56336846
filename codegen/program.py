"""A user's function of one score, as steps on scalars: what is printed into a kernel. Knows nothing of JAX.

`eqx_attn` traces the function and writes a `Program`; kernels name it by its digest, and `find` gives the renderer what was
registered under it.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Collection

from .spec import SpecError

SCORE, BATCH, HEAD, QUERY, KEY = ARGUMENTS = ("score", "batch", "q_head", "q_index", "kv_index")
"""What a score function takes, in order; a mask function takes all but the first."""


@dataclasses.dataclass(frozen=True)
class Literal:
    """A number of a dtype, or a boolean."""

    value: bool | int | float
    dtype: str


type Operand = int | Literal
"""A literal, or the number of a value: first the arguments, then the steps."""


@dataclasses.dataclass(frozen=True)
class Capture:
    """An array that the function closes over: the name that it has in the user's code, its axes and its dtype."""

    name: str
    ndim: int
    dtype: str


@dataclasses.dataclass(frozen=True)
class Step:
    """One operation on scalars.

    `op` is a key of `printer.FORMS`, or "load": the element of capture number `capture` at the operands. `name` is that of
    the variable in the user's code, or "".
    """

    op: str
    operands: tuple[Operand, ...]
    dtype: str
    capture: int | None = None
    name: str = ""


@dataclasses.dataclass(frozen=True)
class Program:
    """A score function `value(score, batch, q_head, q_index, kv_index)`, or a mask function without the score.

    `slope` is the value's derivative by the score, and `load_slopes` has those by elements of floating captures: pairs of a
    step that loads and a derivative. A mask has neither.
    """

    arguments: tuple[str, ...]
    captures: tuple[Capture, ...]
    steps: tuple[Step, ...]
    value: Operand
    slope: Operand | None = None
    load_slopes: tuple[tuple[int, Operand], ...] = ()

    @functools.cached_property
    def digest(self) -> str:
        """Twelve hexadecimal digits: equal programs have equal ones, in every process."""
        return hashlib.sha256(repr(dataclasses.astuple(self)).encode()).hexdigest()[:12]

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def is_mask(self) -> bool:
        """Whether this is a mask function."""
        return self.slope is None

    @property
    def kinds(self) -> tuple[str, ...]:
        """What each argument is: those of `ARGUMENTS` that the function takes."""
        return ARGUMENTS[len(ARGUMENTS) - len(self.arguments) :]

    def step(self, value: Operand) -> Step | None:
        """The step that computes a value; None for arguments and literals."""
        return (
            self.steps[value - len(self.arguments)] if isinstance(value, int) and value >= len(self.arguments) else None
        )

    @functools.cached_property
    def depends(self) -> tuple[frozenset[str], ...]:
        """On which arguments each value depends. Captures may differ from example to example, so loads do on the batch."""
        found = [frozenset((kind,)) for kind in self.kinds]
        for step in self.steps:
            own = {BATCH} if step.op == "load" else set()
            found.append(frozenset(own.union(*(found[x] for x in step.operands if isinstance(x, int)))))
        return tuple(found)

    @property
    def scatters(self) -> bool:
        """Whether scores of one row add to different elements of a captured array's gradient."""
        return any({SCORE, KEY} & self.depends[load] for load, _ in self.load_slopes)

    @functools.cached_property
    def loads(self) -> tuple[int, ...]:
        """The values that are elements of captured arrays."""
        first = len(self.arguments)
        return tuple(first + number for number, step in enumerate(self.steps) if step.op == "load")

    def is_of_distance(self, value: Operand) -> bool:
        """Whether a value depends on the indices of query and key through their difference alone."""
        return self._growth(value) == 0

    def _growth(self, value: Operand) -> int | None:
        """By how much a value grows where both indices grow by 1; None where that is no constant."""
        if isinstance(value, Literal):
            return 0
        step = self.step(value)
        if step is None:
            return int(self.kinds[value] in (QUERY, KEY))
        growths = [self._growth(x) for x in step.operands]
        if all(growth == 0 for growth in growths):
            return 0
        if step.op not in ("add", "sub", "neg") or None in growths:
            return None
        first, *second = [growth for growth in growths if growth is not None]
        return -first if step.op == "neg" else first + second[0] if step.op == "add" else first - second[0]

    def needed(self, outputs: "tuple[Operand, ...]", given: Collection[int] = ()) -> set[int]:
        """The values that some outputs are computed from, and they themselves; nothing of what `given` are computed from."""
        found: set[int] = set()
        open_ends = [x for x in outputs if isinstance(x, int)]
        while open_ends:
            value = open_ends.pop()
            if value in found:
                continue
            found.add(value)
            step = None if value in given else self.step(value)
            open_ends += [] if step is None else [x for x in step.operands if isinstance(x, int)]
        return found


_programs: dict[str, Program] = {}


def register(program: Program) -> str:
    """Makes a program known by its digest, which is returned."""
    _programs[program.digest] = program
    return program.digest


def find(digest: str) -> Program:
    """The program of a digest. Raises `SpecError` where this process has not traced it."""
    if digest not in _programs:
        raise SpecError(
            f"no function of digest {digest} is known here: a kernel's name does not hold the function that it was printed "
            "from; call eqx_attn.attention or eqx_attn.explain with that function first"
        )
    return _programs[digest]
