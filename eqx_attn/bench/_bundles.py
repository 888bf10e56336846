"""Reading the schedule of a TPU kernel that libtpu dumps: its bundles, and the loops and branches around them.

A bundle is what one core issues in one cycle; the dump before the last one (`packed-bundles-post-ra`) has a line for
each, also for those that only wait. So cycles are counted by counting lines. Branches stand in the bundles with their
targets: forward ones skip what is conditional, backward ones close a loop. Trip counts stand in the list of regions
(`post-bundle-packing-post-ra`), the use of slots in `per-bundle-utilization`.
"""

import collections
import dataclasses
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

DUMP_FLAGS = (
    "--xla_jf_dump_llo_text=true",
    "--xla_jf_dump_llo_pass_label_regex=(packed-bundles-post-ra|post-bundle-packing|pre-delay)",
)
"""For `LIBTPU_INIT_ARGS`, beside `--xla_jf_dump_to=FOLDER`; libtpu reads them when it is loaded."""

_DELAY_SLOTS = 4  # Bundles after a branch that run whether it is taken or not.
_BUNDLE = re.compile(r"^ *(?:0x[0-9a-f]+|0) +(?:[A-Z]{2} *)?: *>* *\{")
_BRANCH = re.compile(r"sbr\.(?:rel|abs)(?: \(!?%\S+?\))? target bundleno = (\d+)")
_MATRIX = re.compile(r"vmat(mul|push)\d?\.((?:\w+(?:\[\d+\])?\.)*)mxu(\d)")  # On 7x with the row of results: `mrb[4]`.
_LOOP = re.compile(r"\s*loop: start=(\d+), step=(\d+), limit=(\d+)")
_REGION = re.compile(r"\s*\$region\d+: .*?(?:// (\w+))?\s*$")
_RANGE = re.compile(r"\s*// region range: \[(\d+), ")


@dataclasses.dataclass
class Work:
    """What some bundles do: how many there are, matrix instructions by (kind, unit), and slots used by name."""

    cycles: float = 0
    matmuls: collections.Counter[tuple[str, str]] = dataclasses.field(default_factory=collections.Counter)
    pushes: collections.Counter[tuple[str, str]] = dataclasses.field(default_factory=collections.Counter)
    slots: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def add(self, other: "Work", times: int = 1) -> None:
        """Adds `times` as much as `other`."""
        self.cycles += times * other.cycles
        for mine, theirs in zip(self._counts(), other._counts(), strict=True):
            for key, count in theirs.items():
                mine[key] += times * count

    def _counts(self) -> tuple[collections.Counter, ...]:
        return self.matmuls, self.pushes, self.slots


@dataclasses.dataclass
class Region:
    """A stretch of bundles: the whole kernel, what a branch may skip, or a loop with as many trips as it has.

    `own` is the work of its bundles that lie in no region inside; `trips` of None depend on data.
    """

    kind: str
    start: int
    end: int
    trips: int | None = 1
    inner: "list[Region]" = dataclasses.field(default_factory=list)
    own: Work = dataclasses.field(default_factory=Work)

    def regions(self) -> "Iterator[Region]":
        """This one and all inside, in the order of their bundles."""
        yield self
        for region in self.inner:
            yield from region.regions()


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A kernel's bundles as a tree, and how many of each slot a bundle has."""

    root: Region
    capacity: dict[str, int]


def dumped_kernels(folder: Path) -> dict[str, Path]:
    """The kernels of which `folder` holds a dump, by their names in the HLO, as the dump of their bundles."""
    pattern = re.compile(r"\d+-(.+)-\d+-packed-bundles-post-ra\.txt")
    found = ((pattern.fullmatch(path.name), path) for path in sorted(folder.iterdir()))
    return {match[1]: path for match, path in found if match and "schedule-analysis" not in path.name}


def read_schedule(bundles_path: Path) -> Schedule:
    """The schedule in a dump.

    Raises `ValueError` where the dump does not look as this libtpu's do.
    """
    prefix = re.sub(r"-\d+-packed-bundles-post-ra\.txt$", "", bundles_path.name)

    def lines(suffix: str) -> list[str]:
        found = [path for path in bundles_path.parent.glob(f"*-{suffix}") if path.name.startswith(prefix + "-")]
        if not found:
            raise ValueError(f"libtpu dumped no {suffix} beside {bundles_path.name}")
        return found[-1].read_text(errors="replace").splitlines()

    return parse_schedule(
        bundles_path.read_text(errors="replace").splitlines(),
        lines("pre-delay_hlo-static-per-bundle-utilization.txt"),
        lines("post-bundle-packing-post-ra.txt"),
    )


def parse_schedule(bundle_lines: Iterable[str], slot_lines: list[str], region_lines: Iterable[str]) -> Schedule:
    """`read_schedule` on the lines of the three dumps of a kernel."""
    bundles = list(_bundles(bundle_lines))
    names = [name.strip() for name in slot_lines[1].split(",")]
    capacity = dict(zip(names, map(int, slot_lines[2].split()), strict=True))
    slots = [dict(zip(names, map(int, line.split()), strict=True)) for line in slot_lines[4:]]
    if not bundles or len(slots) != len(bundles):
        raise ValueError(f"libtpu dumped {len(bundles)} bundles but the use of slots of {len(slots)}")
    root = _tree(bundles, _trip_counts(region_lines))
    owners = [root] * len(bundles)
    for region in root.regions():  # An inner region comes after the one around it.
        owners[region.start : region.end] = [region] * len(owners[region.start : region.end])
    for owner, bundle, used in zip(owners, bundles, slots, strict=True):
        owner.own.add(_work(bundle, used))
    return Schedule(root, capacity)


def _bundles(lines: Iterable[str]) -> Iterator[str]:
    """The text of each bundle; comments of more than one line continue it."""
    current: list[str] = []
    for line in lines:
        if _BUNDLE.match(line):
            if current:
                yield "\n".join(current)
            current = [line]
        elif current:
            current.append(line)
    if current:
        yield "\n".join(current)


def _work(bundle: str, used: dict[str, int]) -> Work:
    work = Work(cycles=1, slots=collections.Counter(used))
    found = _MATRIX.findall(bundle) if "vmat" in bundle else []
    if len(found) != bundle.count("vmatmul") + bundle.count("vmatpush"):
        raise ValueError(f"libtpu dumped a matrix instruction of unknown form: {bundle}")
    for operation, modifiers, unit in found:
        counts = work.matmuls if operation == "mul" else work.pushes
        counts[_kind(modifiers.split(".")), unit] += 1
    return work


def _kind(modifiers: list[str]) -> str:
    """The kind of a matrix instruction's operand, as the tables of `Generation` name it."""
    if "lmr" in modifiers:  # The moving operand was transposed in a matrix unit, and comes in half as many rows.
        return "half"
    if "bf16" in modifiers:
        return "bf16"
    return "8bit" if any(re.match(r"[fsu]8", modifier) for modifier in modifiers) else "f32"


def _trip_counts(lines: Iterable[str]) -> dict[int, int]:
    """By the number of a loop's first bundle, as far as they do not depend on data."""
    found, trips, in_body = {}, None, False
    for line in lines:
        if match := _LOOP.match(line):
            start, step, limit = map(int, match.groups())
            trips = -(-(limit - start) // step)
        elif line.lstrip().startswith("loop:"):
            trips = None
        elif match := _REGION.match(line):
            in_body = match[1] == "loop_body"
        elif in_body and (match := _RANGE.match(line)):
            if trips is not None:
                found[int(match[1])] = trips
            trips, in_body = None, False
    return found


def _tree(bundles: list[str], trips: dict[int, int]) -> Region:
    """The regions, from the branches. Those of a compiler nest; one that crosses another is cut at its end."""
    root = Region("kernel", 0, len(bundles))
    around = [root]
    # Where a loop may make no trip, the condition around it comes first.
    for kind, start, end in sorted(_spans(bundles), key=lambda span: (span[1], -span[2], span[0])):
        while start >= around[-1].end:
            around.pop()
        end = min(end, around[-1].end)
        # Code that was moved in front of a loop's body leaves the body's region a few bundles further on.
        counts = [
            trips[first] for first in sorted(trips, key=lambda first: abs(first - start)) if abs(first - start) <= 8
        ]
        region = Region(kind, start, end, (counts or [None])[0] if kind == "loop" else 1)
        around[-1].inner.append(region)
        around.append(region)
    return root


def _spans(bundles: list[str]) -> set[tuple[str, int, int]]:
    found = set()
    for number, bundle in enumerate(bundles):
        for match in _BRANCH.finditer(bundle) if "sbr." in bundle else ():
            target, after = int(match[1]), number + 1 + _DELAY_SLOTS
            if target <= number + 1:
                found.add(("loop", target, min(after, len(bundles))))
            elif after < target:
                found.add(("if", after, target))
    return found
