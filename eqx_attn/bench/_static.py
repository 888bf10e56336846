"""Compiling a function for an absent TPU with libtpu, and measuring the Pallas kernels in it."""

import dataclasses
import functools
import json
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.extend
import numpy as np

from ._bundles import DUMP_FLAGS, dumped_kernels, read_schedule, Schedule
from ._steps import Steps, steps_of
from ._tpu import GENERATIONS


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of arrays to compile.

    `block(call)` says which scores a step of a Pallas call computes; kernels whose names `names` does not match anywhere
    are not measured.
    """

    function: Callable
    arguments: tuple
    block: "Callable[[PallasCall], Block]"
    names: str = ""
    compiler_options: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Block:
    """The scores of a step of a kernel's grid: those of so many queries and keys of each of some heads."""

    queries: int
    keys: int
    heads: int

    @property
    def scores(self) -> int:
        """How many there are."""
        return self.queries * self.keys * self.heads


@dataclasses.dataclass(frozen=True)
class PallasCall:
    """What a traced function says of one of its kernels. An extent of the grid is None where it depends on data.

    `blocks` and `arrays` hold the shapes of each operand that is cut into blocks, by the name of the kernel's argument.
    """

    name: str
    grid: tuple[int | None, ...]
    semantics: tuple[str, ...]
    blocks: dict[str, tuple[int, ...]]
    arrays: dict[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A compiled kernel, `bundles` long; `steps` and `block` are None if it multiplies no matrices."""

    name: str
    vmem: int
    bundles: int
    grid: tuple[int | None, ...]
    steps: Steps | None
    block: Block | None

    @property
    def cores(self) -> int | None:
        """How many cores share the grid; None where the number of steps depends on data."""
        extents = [extent for extent in self.grid if extent is not None]
        if self.steps is None or self.steps.steps is None or len(extents) < len(self.grid):
            return None
        return round(math.prod(extents) / self.steps.steps)


@dataclasses.dataclass(frozen=True)
class Measured:
    """The kernels of a program, in the order in which they run, and how long compiling took."""

    kernels: tuple[Kernel, ...]
    compile_seconds: float


def start_dumping(folder: Path) -> Path:
    """Has libtpu, which must not be loaded yet, dump schedules into a new folder inside `folder`, and returns that."""
    folder = Path(tempfile.mkdtemp(dir=folder))
    flags = (os.environ.get("LIBTPU_INIT_ARGS", ""), f"--xla_jf_dump_to={folder}", *DUMP_FLAGS)
    os.environ["LIBTPU_INIT_ARGS"] = " ".join(flags).strip()
    return folder


def measure(program: Program, device: str, folder: Path) -> Measured | str:
    """Compiles and measures, or returns what the compiler says against the program. Results are kept in the user's cache.

    `folder` is what `start_dumping` returned; it is empty afterwards.
    """
    from ._static_cache import keep, key_of, recall

    start = time.perf_counter()
    calls, lowered = lower(program, device)
    key = key_of(lowered.as_text(), device, program.compiler_options)
    if (known := recall(key)) is not None:
        return known
    try:
        kernels = compiled_kernels(program, device, calls, lowered, folder)
        result = Measured(kernels, time.perf_counter() - start)
    except jax.errors.JaxRuntimeError as error:
        result = " ".join(str(error).split())[:400]
    keep(key, result)
    return result


def lower(program: Program, device: str) -> tuple[list[PallasCall], Any]:
    """The program lowered for a device, and the Pallas calls in it."""
    mesh = mesh_of(device)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    arguments = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding), program.arguments
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = jax.jit(program.function).trace(*arguments)
        return list(pallas_calls(traced.jaxpr.jaxpr)), traced.lower(lowering_platforms=("tpu",))


def compiled_kernels(
    program: Program, device: str, calls: list[PallasCall], lowered: Any, folder: Path | None
) -> tuple[Kernel, ...]:
    """Compiles, and measures what libtpu dumps into `folder`; where that is None, the kernels have no steps.

    Raises `JaxRuntimeError` where the compiler refuses.
    """
    try:
        hlo = lowered.compile(compiler_options=program.compiler_options or None).as_text() or ""
        dumps = {} if folder is None else dumped_kernels(folder)
        by_name = {call.name: call for call in calls}
        kernels = []
        for name, vmem in vmem_of_kernels(hlo):
            if re.search(program.names, name):
                call = by_name[re.sub(r"\.\d+$", "", name)]
                schedule = None if folder is None else _schedule(name, dumps)
                steps = None if schedule is None else steps_of(schedule, GENERATIONS[device])
                block = None if steps is None else program.block(call)
                bundles = 0 if schedule is None else schedule.root.end
                kernels.append(Kernel(call.name, vmem, bundles, call.grid, steps, block))
        return tuple(kernels)
    finally:
        for path in folder.iterdir() if folder is not None else ():
            path.unlink()


def _schedule(name: str, dumps: dict[str, Path]) -> Schedule:
    if name not in dumps:
        raise ValueError(f"libtpu dumped no schedule of {name}; it has one of {', '.join(dumps)}")
    return read_schedule(dumps[name])


def vmem_of_kernels(hlo: str) -> Iterator[tuple[str, int]]:
    """The Pallas kernels of a compiled TPU program and the bytes of VMEM of each, from XLA's own text."""
    calls = re.split(r"^(?=\s*(?:ROOT )?%\S+ = )", hlo, flags=re.MULTILINE)  # An instruction may have several lines.
    for call in calls:
        name = re.match(r"\s*(?:ROOT )?%(\S+)", call)
        if name and 'custom_call_target="tpu_custom_call"' in call:
            used = re.search(r'"used_scoped_memory_configs":(\[.*?\])', call)
            spaces = json.loads(used[1]) if used else []
            yield name[1], sum(int(space["size"]) for space in spaces if space["memory_space"] == "1")


def pallas_calls(jaxpr: Any) -> Iterator[PallasCall]:
    """The Pallas calls of a jaxpr, also those inside of other equations."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield _call(equation.params)
        else:
            for inner in jax.extend.core.jaxprs_in_params(equation.params):
                yield from pallas_calls(inner)


def _call(params: dict[str, Any]) -> PallasCall:
    grid = params["grid_mapping"]
    names = params["jaxpr"].debug_info.arg_names[grid.num_index_operands :]
    mappings = dict(zip(names, grid.block_mappings, strict=False))
    return PallasCall(
        name=params["name"],
        grid=tuple(extent if isinstance(extent, int) else None for extent in grid.grid),
        semantics=tuple(map(str, getattr(params["compiler_params"], "dimension_semantics", None) or ())),
        blocks={name: tuple(map(_extent, mapping.block_shape)) for name, mapping in mappings.items()},
        arrays={name: mapping.array_aval.shape for name, mapping in mappings.items()},
    )


def _extent(size: Any) -> int:
    """Of a block along one axis; a squeezed axis has one."""
    return size if isinstance(size, int) else getattr(size, "block_size", 1)


@functools.cache
def mesh_of(device: str) -> jax.sharding.Mesh:
    """One absent device of a TPU generation."""
    from jax.experimental import topologies

    generation = GENERATIONS[device]
    topology = topologies.get_topology_desc(platform="tpu", topology_name=generation.topology, **generation.chip_config)
    return jax.sharding.Mesh(np.array(topology.devices).reshape(-1)[:1], ("device",))
