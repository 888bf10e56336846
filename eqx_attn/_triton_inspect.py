"""What a compiled Triton kernel costs, found without a GPU: registers, spills, shared memory, tensor-core use."""

import dataclasses
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Callable
from typing import Any

import jax

from ._triton_call import collect_compiled, CompiledKernel
from ._triton_versions import require_triton

_TENSOR_CORE = re.compile(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\.[\w.:]+")


@dataclasses.dataclass(frozen=True)
class KernelReport:
    """Per thread: registers and bytes spilled (stores and loads). Per block: bytes of shared memory.

    `tensor_core_instructions` are the distinct ones in the PTX; `warnings` are the assembler's, for instance that it
    had to make asynchronous products wait for each other.
    """

    name: str
    capability: int
    num_warps: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    tensor_core_instructions: tuple[str, ...]
    warnings: tuple[str, ...]


def compile_for_target(function: Callable, *arguments: Any) -> tuple[CompiledKernel, ...]:
    """Compiles every Triton kernel that a function launches, for the device of the current `eqx_attn.target(...)`.

    **Arguments:**

    - `function`: is traced with the arguments, which may be ShapeDtypeStructs, and lowered for CUDA; nothing runs.
    """
    with collect_compiled() as kernels:
        # A new function each time: JAX would not lower one that it has lowered before.
        traced = jax.jit(lambda *values: function(*values)).trace(*arguments)
        traced.lower(lowering_platforms=("cuda",))
    return tuple(kernels)


def inspect_compiled(compiled: CompiledKernel) -> KernelReport:
    """Assembles the kernel's PTX once more, with the assembler in Triton's wheel, and reads what that reports.

    **Raises:** `RuntimeError` with the assembler's message if it refuses the PTX.
    """
    output = _assemble(compiled)
    registers = re.search(r"Used (\d+) registers", output)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", output)
    if registers is None or spills is None:
        raise RuntimeError(f"triton kernel {compiled.name}: cannot read the output of ptxas -v:\n{output}")
    return KernelReport(
        name=compiled.name,
        capability=compiled.capability,
        num_warps=compiled.num_warps,
        registers=int(registers[1]),
        spill_bytes=int(spills[1]) + int(spills[2]),
        shared_bytes=compiled.shared_bytes,
        tensor_core_instructions=tuple(sorted(set(_TENSOR_CORE.findall(compiled.ptx)))),
        warnings=tuple(line.strip() for line in output.splitlines() if "warning" in line.lower()),
    )


def _assemble(compiled: CompiledKernel) -> str:
    require_triton()
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    with tempfile.TemporaryDirectory() as directory:
        source = pathlib.Path(directory) / "kernel.ptx"
        source.write_text(compiled.ptx)
        command = [
            get_ptxas(compiled.capability).path,
            "-v",
            f"--gpu-name={sm_arch_from_capability(compiled.capability)}",
            str(source),
            f"--output-file={directory}/kernel.cubin",
        ]
        result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"triton kernel {compiled.name}: ptxas refuses it:\n{result.stderr}")
    return result.stdout + result.stderr
