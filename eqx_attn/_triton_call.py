"""Calls a Triton kernel from JAX.

The only file that talks to Triton's compiler and, through `jax.ffi`, to jaxlib's Triton launcher. A call is a primitive
of our own: tracing records what to launch, lowering for CUDA compiles the kernel for the capability that was decided at
trace time, and XLA launches it. So a kernel lowers on a machine without a GPU, and nothing is compiled for a trace
that is lowered for another platform.
"""

import contextlib
import contextvars
import dataclasses
import functools
import os
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxtyping import Array

from ._context import CUDA_TARGETS, current_target, current_targets, interpreting
from ._triton_arguments import Argument, Descriptor, Pointer, Scalar, TensorDescriptor
from ._triton_interpreter import LANGUAGE_LOCK, run_interpreted
from ._triton_launch import Launch, record_launch
from ._triton_versions import ptx_version, require_launcher, require_triton

# What one block may use, in bytes; the rest of an SM's memory is reserved or L1.
_SHARED_MEMORY = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}


def current_capability() -> int:
    """The compute capability to compile for, such as 90: that of `eqx_attn.target(...)`, else of the first local GPU.

    **Raises:** `ValueError` if the target is not an NVIDIA GPU, or if there is neither a target nor a GPU.
    """
    name = current_target("cuda")
    if name is not None:
        return CUDA_TARGETS[name]
    if current_targets():
        (name,) = current_targets()
        raise ValueError(f"triton_call: eqx_attn.target({name!r}) is not an NVIDIA GPU; use eqx_attn.target('sm_90a').")
    device = jax.local_devices()[0]
    # "9.0"; on a GPU of another maker it has letters.
    capability = str(getattr(device, "compute_capability", "")).replace(".", "")
    if device.platform != "gpu" or not capability.isdecimal():
        raise ValueError(
            f"triton_call: no NVIDIA GPU to compile for (the first device is {device.device_kind!r}); name one with "
            "eqx_attn.target('sm_90a'), or run on the CPU inside eqx_attn.interpret()."
        )
    return int(capability)


@dataclasses.dataclass(frozen=True)
class CompiledKernel:
    """A kernel as machine code: what a launch needs to know, and the texts that tests inspect."""

    name: str
    capability: int
    num_warps: int
    num_ctas: int
    shared_bytes: int
    ttir: str
    ptx: str
    cubin: bytes
    tensor_descriptors: tuple[dict[str, Any], ...]


_compiled: dict[Any, CompiledKernel] = {}
_collected: contextvars.ContextVar[list[CompiledKernel] | None] = contextvars.ContextVar("collected", default=None)


@contextlib.contextmanager
def collect_compiled() -> Iterator[list[CompiledKernel]]:
    """Yields a list to which every kernel is appended that is lowered inside, each once."""
    token = _collected.set(kernels := [])
    try:
        yield kernels
    finally:
        _collected.reset(token)


def compile_kernel(
    kernel: Any,
    signature: dict[str, str],
    constants: dict[str, Any],
    *,
    capability: int,
    num_warps: int,
    num_stages: int,
    divisible_by_16: frozenset[str] = frozenset(),
) -> CompiledKernel:
    """Compiles a kernel for an architecture, which need not be present, and keeps it in memory and on disk.

    **Arguments:**

    - `kernel`: a `triton.jit` or Gluon function.
    - `signature`: Triton types ("*fp32", "i32", "constexpr") of all parameters by name.
    - `constants`: values of the `tl.constexpr` parameters.
    - `divisible_by_16`: names of the pointers and integers that are multiples of 16.

    **Raises:** `ValueError` if the kernel needs more shared memory than the architecture has.
    """
    triton: Any = require_triton()
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    options = dict(num_warps=num_warps, num_stages=num_stages, ptx_version=ptx_version(), enable_fp_fusion=True)
    attributes = {
        (position,): [["tt.divisibility", 16]] for position, name in enumerate(signature) if name in divisible_by_16
    }
    # A Gluon kernel is lowered by another pipeline. Sent through Triton's it compiles as well, and runs slowly.
    source_type = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    with LANGUAGE_LOCK:
        source = source_type(kernel, signature, constants, attributes)
        key = (source.hash(), capability, *options.items())
        if key not in _compiled:
            cache = triton.knobs.cache
            with cache.scope():
                cache.dir = _cache_directory(cache.dir)
                compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
            _compiled[key] = _checked(compiled, capability)
    collected = _collected.get()
    if collected is not None and _compiled[key] not in collected:
        collected.append(_compiled[key])
    return _compiled[key]


def _checked(compiled: Any, capability: int) -> CompiledKernel:
    metadata = compiled.metadata
    limit = 1024 * _SHARED_MEMORY.get(capability, 227)
    if metadata.shared > limit:
        raise ValueError(
            f"triton kernel {metadata.name}: needs {metadata.shared} bytes of shared memory, but a block on capability "
            f"{capability} has {limit}; use smaller tiles (block_q, block_kv) or fewer num_stages."
        )
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        raise ValueError(f"triton kernel {metadata.name}: needs scratch in global memory, which is not passed.")
    return CompiledKernel(
        name=metadata.name,
        capability=capability,
        # Warp specialisation adds warps to those asked for.
        num_warps=metadata.num_warps,
        num_ctas=metadata.num_ctas,
        shared_bytes=metadata.shared,
        ttir=compiled.asm.get("ttir", ""),
        ptx=compiled.asm["ptx"],
        cubin=compiled.asm["cubin"],
        tensor_descriptors=tuple(metadata.tensordesc_meta or ()),
    )


def _cache_directory(default: str) -> str:
    """Where Triton keeps compiled kernels: a directory that can be written, also where the home cannot."""
    chosen = os.environ.get("EQX_ATTN_CACHE_DIR")
    directory = os.path.join(chosen, "triton") if chosen else default
    try:
        os.makedirs(directory, exist_ok=True)
        if os.access(directory, os.W_OK | os.X_OK):
            return directory
    except OSError:
        pass
    return _temporary_cache().name


@functools.cache
def _temporary_cache() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="eqx_attn_triton_")


triton_call_p = Primitive("triton_call")
triton_call_p.multiple_results = True


@triton_call_p.def_abstract_eval
def _abstract_eval(*arrays: Any, launch: Launch, capability: int) -> list[ShapedArray]:
    del arrays, capability
    return [ShapedArray(output.shape, output.dtype) for output in launch.outputs]


@functools.lru_cache(maxsize=1024)
def _jitted(launch: Launch, capability: int) -> Any:
    return jax.jit(functools.partial(triton_call_p.bind, launch=launch, capability=capability))


@triton_call_p.def_impl
def _eager(*arrays: Array, launch: Launch, capability: int) -> list[Array]:
    return _jitted(launch, capability)(*arrays)


def _launcher_parameters(launcher: Any, arguments: Sequence[Argument], compiled: CompiledKernel) -> list[Any]:
    """What jaxlib's launcher passes: an address, a number, or a TMA descriptor followed by its shape and strides."""
    descriptors = iter(compiled.tensor_descriptors)
    parameters = []
    for argument in arguments:
        match argument:
            case Pointer():
                parameters.append(launcher.create_array_parameter(0, 16))
            case Scalar():
                parameters.append(launcher.create_scalar_parameter(argument.value, argument.type))
            case Descriptor():
                parameters.append(_tma_parameter(launcher, argument, next(descriptors)))
                parameters += [launcher.create_scalar_parameter(extent, "i32") for extent in argument.shape]
                parameters += [launcher.create_scalar_parameter(stride, "i64") for stride in argument.strides]
    return parameters


def _tma_parameter(launcher: Any, argument: Descriptor, metadata: dict[str, Any]) -> Any:
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    return launcher.create_tma_descriptor_parameter(
        elem_type=TMA_DTYPE_DEVICE_TO_HOST[metadata["elem_type"]],
        swizzle=metadata["swizzle"],
        shape=argument.shape,
        strides=argument.strides,
        block_shape=metadata["block_size"],
        oob_fill=0,
    )


def _compile(launch: Launch, capability: int) -> CompiledKernel:
    kernel, parameters = launch.kernel, launch.parameters
    return compile_kernel(
        kernel,
        {name: parameters[name].type if name in parameters else "constexpr" for name in kernel.arg_names},
        launch.constants,
        capability=capability,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        divisible_by_16=frozenset(name for name, argument in parameters.items() if argument.divisible_by_16),
    )


def _lower(ctx: Any, *arrays: Any, launch: Launch, capability: int) -> Any:
    launcher = require_launcher()
    compiled = _compile(launch, capability)
    kernel = launcher.TritonKernel(
        compiled.name,
        compiled.num_warps,
        compiled.num_ctas,
        compiled.shared_bytes,
        compiled.ptx,
        compiled.ttir,
        capability,
    )
    parameters = _launcher_parameters(launcher, launch.arguments, compiled)
    call = launcher.TritonKernelCall(kernel, *(*launch.grid, 1, 1)[:3], parameters)
    opaque = zlib.compress(call.to_proto(compiled.name, b""))
    # The launcher hands over as many buffers as there are parameters, the arrays' first: an updated one is passed once.
    lowering = jax.ffi.ffi_lowering(
        "triton_kernel_call_ffi", operand_output_aliases=launch.aliases(len(arrays)) or None
    )
    return lowering(ctx, *arrays, opaque=opaque)


def _refuse_to_lower(ctx: Any, *arrays: Any, launch: Launch, capability: int) -> Any:
    del arrays, capability
    raise ValueError(
        f"triton_call: {launch.kernel.__name__} is being lowered for {', '.join(ctx.module_context.platforms)}, but "
        "Triton kernels need an NVIDIA GPU; use eqx_attn.interpret() to run them on the CPU, or lower with "
        "lowering_platforms=('cuda',) inside eqx_attn.target('sm_90a')."
    )


mlir.register_lowering(triton_call_p, _refuse_to_lower)
mlir.register_lowering(triton_call_p, _lower, platform="cuda")


def triton_call(
    kernel: Any,
    *inputs: Array | TensorDescriptor | int | float,
    outputs: Sequence[jax.ShapeDtypeStruct | TensorDescriptor],
    updated: Sequence[Array] = (),
    grid: tuple[int, ...],
    num_warps: int,
    num_stages: int,
    constants: dict[str, Any],
) -> tuple[Array, ...]:
    """Launches a Triton kernel on the GPU, or runs it under Triton's interpreter inside `eqx_attn.interpret()`.

    **Arguments:**

    - `kernel`: a `triton.jit` or `gluon.jit` function. Its parameters are the inputs, then the updated arrays, then
        the outputs, in order; the `tl.constexpr` ones may stand anywhere.
    - `inputs`: arrays (passed as pointers to row-major elements), descriptors, ints (int32, int64 beyond 31 bits),
        floats (float32).
    - `outputs`: shape and dtype of each output (a pointer for the kernel, or a descriptor). What the kernel does not
        write is undefined.
    - `updated`: arrays that the kernel reads and writes in place. Their new values are returned after the outputs; XLA
        copies an array first where its old value is still needed.
    - `grid`: up to three numbers of programs.
    - `num_warps`, `num_stages`: warps per program, stages of the software pipeline.
    - `constants`: values of the `tl.constexpr` parameters. Those with a default may be left out.

    **Returns:** the output arrays, then the updated ones.

    **Raises:** at trace time, naming the argument:

    - `TypeError`: the parameters do not add up, or an input is of another type.
    - `ValueError`: there is no GPU to compile for; bfloat16 or Gluon under the interpreter.
    - `ImportError`: Triton is missing, or of another version.
    """
    require_triton()
    launch, arrays = record_launch(kernel, inputs, updated, outputs, grid, num_warps, num_stages, constants)
    if interpreting():
        return _call_interpreted(launch, arrays)
    capability = current_capability()
    if capability < 90 and any(isinstance(argument, Descriptor) for argument in launch.arguments):
        raise ValueError(
            f"triton_call: {kernel.__name__} takes a TensorDescriptor, which needs the tensor memory accelerator of "
            f"capability 90 and up, and is compiled for {capability}; pass the array and its strides instead."
        )
    return tuple(triton_call_p.bind(*arrays, launch=launch, capability=capability))


def _call_interpreted(launch: Launch, arrays: list[Array]) -> tuple[Array, ...]:
    kernel = launch.kernel
    if kernel.is_gluon():
        raise ValueError(f"triton_call: {kernel.__name__} is a Gluon kernel, and Gluon has no interpreter.")
    for array in (*arrays, *launch.outputs):
        if array.dtype == jnp.bfloat16:
            raise ValueError(
                f"triton_call: {kernel.__name__} has a bfloat16 array of shape {array.shape}. Triton's interpreter "
                "computes bfloat16 products wrongly; use float16 or float32 inside eqx_attn.interpret()."
            )
    new = launch.outputs[: len(launch.outputs) - launch.updated]
    outputs = [(output.shape, np.dtype(output.dtype)) for output in new]

    def run(*values: Any) -> tuple[np.ndarray, ...]:
        values = tuple(np.asarray(value) for value in values)
        return run_interpreted(
            kernel, launch.parameters, values, outputs, launch.grid, launch.constants, updated=launch.updated
        )

    return tuple(jax.pure_callback(run, launch.outputs, *arrays, vmap_method="sequential"))
