"""What TPU kernels compute of a user's function themselves, and what is read for them before; why they do not have a function."""

import functools

from .program import BATCH, HEAD, KEY, Program, QUERY, SCORE

_NARROW = {"float16", "float64", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int64"}
"""The dtypes that TPU kernels do not compute functions in."""


def refusals(program: Program) -> list[str]:
    """Why TPU kernels do not have this function; empty where they do."""
    what = "Mask.from_function's function" if program.is_mask else "score_mod"
    reasons = []
    for load in loads_in_kernel(program):
        step, depends = program.step(load), program.depends[load]
        assert step is not None and step.capture is not None
        array = f"{what} reads {program.captures[step.capture].name!r} at a place that depends on"
        if SCORE in depends:
            reasons.append(f"{array} the score, which TPU kernels cannot look up: compute the number from the score")
        elif {QUERY, KEY} <= depends and not program.is_of_distance(load):
            reasons.append(
                f"{array} q_index and kv_index, and not through kv_index - q_index alone: TPU kernels read one number for "
                "each distance; make an array for all queries and keys before the call, and give it as bias or boolean mask"
            )
    steps = [step for value in sorted(values_in_kernel(program)) if (step := program.step(value)) and step.op != "load"]
    narrow = sorted({step.dtype for step in steps} & _NARROW)
    if narrow:
        reasons.append(f"{what} computes in {narrow[0]}, which TPU kernels do not: write .astype(jnp.float32)")
    return reasons


def reads_by_distance(program: Program) -> bool:
    """Whether the function reads an array at places that depend on the distance of query and key."""
    return any(is_by_distance(program, load) for load in loads_in_kernel(program))


@functools.lru_cache(maxsize=256)
def values_in_kernel(program: Program) -> frozenset[int]:
    """The values that a kernel computes or reads: not those that only say where an element lies."""
    ends = [program.value, *([] if program.slope is None else [program.slope])]
    ends += [x for pair in program.load_slopes for x in pair]
    return frozenset(program.needed(tuple(ends), program.loads))


def loads_in_kernel(program: Program) -> list[int]:
    """The elements that a kernel computes with."""
    return [load for load in program.loads if load in values_in_kernel(program)]


def casts_of_elements(program: Program) -> dict[int, int]:
    """The values that are an element of a floating array as float32, and that element."""
    found = {}
    for number, step in enumerate(program.steps, len(program.arguments)):
        element = step.operands[0] if step.op == "cast" and step.dtype == "float32" else None
        read = None if element is None else program.step(element)
        if isinstance(element, int) and read is not None and read.op == "load" and "float" in read.dtype:
            found[number] = element
    return found


def indices_in_kernel(program: Program) -> list[str]:
    """The indices that a kernel computes with."""
    return [kind for kind in (BATCH, HEAD, QUERY, KEY) if program.kinds.index(kind) in values_in_kernel(program)]


def is_by_distance(program: Program, load: int) -> bool:
    """Whether an element depends on query and key."""
    return {QUERY, KEY} <= program.depends[load]
