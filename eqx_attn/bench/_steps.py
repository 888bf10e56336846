"""What a step of a kernel's grid costs, from its schedule.

A kernel's body stands in the grid's loop and consists of conditional blocks: set-up at a block's first step, one or more
bodies of a step (without a mask, with one, for the tail), and what is written out at the last. A body multiplies matrices
and takes exponentials; set-up and write-out do not do both. What does so inside a body repairs a result that overflowed, and does
not count.
"""

import dataclasses
from collections.abc import Iterator

from ._bundles import Region, Schedule, Work
from ._tpu import Generation, ROWS


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of the grid that runs one body: its cycles, and the share of them in which each unit is busy.

    For matrix units, exponentials and pushes that follows from how long an instruction takes; for the others, transposes
    and other exchanges between lanes ("exchange") too, from the slots for instructions that are used, at least.

    `array` is the share of the matrix units' multipliers that got an operand, padding included, so it bounds the useful
    share from above. `products` is how many products the body makes, of those of the whole body. Loops whose trips depend
    on data count once; one such trip takes `trip_cycles`.
    """

    cycles: int
    units: dict[str, float]
    array: float
    products: float
    spills: int
    trip_cycles: int

    @property
    def full_cycles(self) -> int:
        """Cycles if such loops make as many trips as it takes to make all products of the whole body."""
        if not self.trip_cycles or self.products >= 1:
            return self.cycles
        return round(self.cycles + self.trip_cycles * (1 / self.products - 1))

    @property
    def bound(self) -> str:
        """The unit that is busiest."""
        return max(self.units, key=lambda unit: self.units[unit])


@dataclasses.dataclass(frozen=True)
class Steps:
    """A kernel's steps, by the bodies that they run, and what comes on top; all in cycles of one core.

    `whole` is the body for blocks without hidden scores. `masked` are the others, in the order of their code. `idle` is a
    step that runs no body. `set_up` and `write_out` come on top of some steps; `loops` are the loops in them, as (trips,
    cycles of all). `transfers`, what starts copies between memories, comes on top of steps whose blocks are not those of
    the step before. `trips` are those of the grid's loop on one
    core, two more than steps, in which only transfers are started or awaited; None if they depend on data.
    """

    whole: Step
    masked: tuple[Step, ...]
    idle: int
    set_up: int
    write_out: int
    loops: tuple[tuple[int, int], ...]
    transfers: int
    trips: int | None

    @property
    def steps(self) -> int | None:
        """How many steps of the grid one core makes."""
        return None if self.trips is None else max(1, self.trips - 2)


def steps_of(schedule: Schedule, generation: Generation) -> Steps | None:
    """The steps of a kernel; None if it multiplies no matrices.

    Raises `ValueError` if it has no loop over a grid.
    """
    if not any(region.own.matmuls for region in schedule.root.regions()):
        return None
    loops = list(_outermost_loops(schedule.root))
    if not loops:
        raise ValueError("the kernel has no loop over a grid: give it two steps or more")
    grid = max(loops, key=lambda loop: loop.end - loop.start)
    blocks = list(_blocks(grid, Work()))
    candidates = [block for block in blocks if _multiplies(block.work) and block.work.slots["EUP"]]
    bodies = _bodies(candidates)
    repairs = [block for block in candidates if block not in bodies]
    rest = [
        block for block in blocks if not any(map(block.is_around, bodies)) and not any(map(block.is_inside, repairs))
    ]
    # The outermost condition around the bodies is that this is no turn of transfers alone.
    kernel = next((block for block in blocks[1:] if block.is_around(bodies[0])), blocks[0])
    once = [block for block in rest if block.is_inside(kernel)]
    start = bodies[0].longest_stretch
    most = max(_multiplied(body.work) for body in bodies)
    whole = min(
        (body for body in bodies if _multiplied(body.work) > 0.95 * most), key=lambda body: body.work.slots["VALU"]
    )
    return Steps(
        whole=_step(whole, whole, schedule, generation),
        masked=tuple(_step(body, whole, schedule, generation) for body in bodies if body is not whole),
        idle=round(whole.path.cycles),
        set_up=round(sum(block.work.cycles for block in once if block.region.start < start)),
        write_out=round(sum(block.work.cycles for block in once if block.region.start >= start)),
        loops=tuple(
            _loop(inner) for block in once for inner in block.region.inner if inner.kind == "loop" and inner.trips
        ),
        transfers=round(sum(block.work.cycles for block in rest if block not in once)),
        trips=grid.trips,
    )


def _outermost_loops(region: Region) -> Iterator[Region]:
    """Those in no other; a loop whose trips depend on data is conditional."""
    for inner in region.inner:
        if inner.kind == "loop":
            yield inner
        else:
            yield from _outermost_loops(inner)


def _loop(region: Region) -> tuple[int, int]:
    trips = region.trips or 1
    return trips, round(trips * sum(inner.own.cycles for inner in region.regions()))


@dataclasses.dataclass(frozen=True)
class _Block:
    """A conditional block: its own work, that of its loops included, and what runs around it whenever it does."""

    region: Region
    work: Work
    path: Work
    trip: Work  # One trip of its loops whose trips depend on data.

    @property
    def total(self) -> Work:
        total = Work()
        total.add(self.path)
        total.add(self.work)
        return total

    @property
    def longest_stretch(self) -> int:
        """Where the longest stretch of it begins that no condition interrupts."""
        conditional = sorted((inner.start, inner.end) for inner in self.region.inner if inner.kind == "if")
        starts = [self.region.start, *(end for _, end in conditional)]
        ends = [*(start for start, _ in conditional), self.region.end]
        return max(zip(starts, ends, strict=True), key=lambda stretch: stretch[1] - stretch[0])[0]

    def is_inside(self, other: "_Block") -> bool:
        return other.region.start <= self.region.start and self.region.end <= other.region.end

    def is_around(self, other: "_Block") -> bool:
        return other.is_inside(self)


def _blocks(region: Region, path: Work) -> Iterator[_Block]:
    """The block that `region` is, and those inside."""
    work, trip, conditional = Work(), Work(), []
    pending = [(region, 1, False)]
    while pending:
        part, times, in_trip = pending.pop()
        work.add(part.own, times)
        if in_trip:
            trip.add(part.own, times)
        for inner in part.inner:
            if inner.kind == "loop":
                pending.append((inner, times * (inner.trips or 1), in_trip or inner.trips is None))
            else:
                conditional.append(inner)
    yield _Block(region, work, path, trip)
    around = Work()
    around.add(path)
    around.add(work)
    for inner in sorted(conditional, key=lambda inner: inner.start):
        yield from _blocks(inner, around)


def _bodies(candidates: list[_Block]) -> list[_Block]:
    """Those of blocks that multiply and exponentiate which lie in no other."""
    if not candidates:
        raise ValueError("no block of the kernel multiplies matrices and takes exponentials")
    outer: list[_Block] = []
    for block in candidates:  # A block comes before those inside.
        if not any(map(block.is_inside, outer)):
            outer.append(block)
    return outer


def _multiplies(work: Work) -> bool:
    return bool(work.matmuls)


def _multiplied(work: Work) -> int:
    """Rows that went through the matrix units."""
    return sum(ROWS[kind] * count for (kind, _), count in work.matmuls.items())


def _step(body: _Block, whole: _Block, schedule: Schedule, generation: Generation) -> Step:
    work = body.total
    cycles = max(1.0, work.cycles)
    slots, capacity = work.slots, schedule.capacity
    matrix = sum(generation.matmul_cycles[kind] * count for (kind, _), count in work.matmuls.items())
    push = sum(generation.push_cycles[kind] * count for (kind, _), count in work.pushes.items())
    busy = {
        "matrix": matrix / generation.matrix_units,
        "push": push / generation.matrix_units,
        "vector": slots["VALU"] / capacity["VALU"],
        "exponential": slots["EUP"] * generation.exponential_cycles,
        "exchange": slots["XLU"] / capacity["XLU"],
        "load": slots["VLOAD"] / capacity["VLOAD"],
        "store": slots["VSTORE"] / capacity["VSTORE"],
        "pop": slots["VPOP"] / capacity["VPOP"],
    }
    flops = 2 * generation.matrix_size**2 * _multiplied(work)
    return Step(
        cycles=round(work.cycles),
        units={unit: cost / cycles for unit, cost in busy.items()},
        array=flops / (cycles * generation.flops_per_cycle),
        products=_multiplied(work) / _multiplied(whole.total),
        spills=slots["VSTORE:SPILL"],
        trip_cycles=round(body.trip.cycles),
    )
