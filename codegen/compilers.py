"""One kernel file through a real compiler, and what the compiler tells of the result."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from .spec import KernelSpec, Layout, MaskKind

WINDOW = 1024
MAP_BLOCK = 128


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of a representative call."""

    batch: int
    seq: int
    q_heads: int
    kv_heads: int


# A grouped call of ordinary size. The lengths are no multiple of any tile, so that the code of the last block is there.
RAGGED = Shape(batch=2, seq=4000, q_heads=8, kv_heads=2)

_schedules: Path | None = None  # Where libtpu dumps what it schedules, if it was asked to.


def dump_schedules(folder: Path) -> None:
    """Has libtpu, which must not be loaded yet, tell cycles as well."""
    global _schedules
    from eqx_attn.bench._static import start_dumping

    _schedules = start_dumping(folder)


def compile_tpu(spec: KernelSpec, device: str) -> dict[str, dict[str, int | str]]:
    """Compiles for a TPU generation. Returns, for each kernel, the bytes of VMEM that the compiler gave it.

    After `dump_schedules`, also the cycles of a step with a whole block and the useful share of the matrix units' peak.
    """
    from eqx_attn.bench._static import compiled_kernels, lower, Program
    from eqx_attn.bench._static_spec import block_of, useful_of

    found = {}
    for function, arguments in functions(spec, device):
        program = Program(function, arguments, lambda call: block_of(call, RAGGED.seq, spec.qk_dim))
        kernels = compiled_kernels(program, device, *lower(program, device), _schedules)
        if not kernels:
            raise AssertionError(f"{function.__name__} compiled to a program without a Pallas kernel")
        for kernel in kernels:
            found[kernel.name] = {"vmem": kernel.vmem}
            if kernel.steps is not None:
                useful = useful_of(kernel, device, spec.qk_dim, spec.v_dim)
                found[kernel.name] |= {"cycles": kernel.steps.whole.full_cycles, "useful": f"{useful:.0%}"}
    return found


def compile_cuda(spec: KernelSpec, device: str) -> dict[str, dict[str, int | str]]:
    """Compiles for a compute capability. Returns registers, shared memory, spills and tensor-core instructions."""
    from eqx_attn._triton_inspect import compile_for_target, inspect_compiled

    found = {}
    for function, arguments in functions(spec, device):
        kernels = compile_for_target(function, *arguments)
        if not kernels:
            raise AssertionError(f"{function.__name__} launches no Triton kernel")
        for report in map(inspect_compiled, kernels):
            found[report.name] = {
                "registers": report.registers,
                "shared": report.shared_bytes,
                "spill": report.spill_bytes,
                "tensor_core": " ".join(sorted({short_name(name) for name in report.tensor_core_instructions})),
            }
    return found


def short_name(instruction: str) -> str:
    """`wgmma m64n128k16` for `wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16`."""
    shape = re.search(r"\.(m\d+n\d+k\d+)", instruction)
    return " ".join([instruction.split(".")[0], *(shape.groups() if shape else ())])


def functions(spec: KernelSpec, device: str, shape: Shape = RAGGED, tiles: Any = None) -> list[tuple[Callable, tuple]]:
    """`forward` and `backward` of the kernel with representative arguments, as shapes; `tiles` of None are the defaults."""
    from eqx_attn._context import target
    from eqx_attn._kernels import load_kernel
    from eqx_attn._tuning import default_tiles

    module = load_kernel(spec)
    if tiles is None:
        with target(device):
            tiles = default_tiles(spec, "bfloat16", shape.seq, shape.seq)

    def forward(arrays, operands):
        with target(device):
            return module.forward(*arrays, operands, tiles)

    def backward(arrays, out, lse, dout, dlse, operands):
        with target(device):
            return module.backward(*arrays, out, lse, dout, dlse, operands, tiles)

    out = _array(spec, shape, shape.q_heads, spec.v_dim)
    lse = jax.ShapeDtypeStruct((shape.batch, shape.q_heads, shape.seq), jnp.float32)
    arrays, operands = _arrays(spec, shape), _operands(spec, shape)
    return [(forward, (arrays, operands)), (backward, (arrays, out, lse, out, lse, operands))]


def _arrays(spec: KernelSpec, shape: Shape) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The arrays of a call, in the spec's layout."""
    q_heads, kv_heads = shape.q_heads, shape.kv_heads
    heads = {Layout.QKV: (q_heads + 2 * kv_heads,), Layout.KV: (q_heads, 2 * kv_heads)}
    dims = (spec.qk_dim, spec.qk_dim, spec.v_dim)
    counts = heads.get(spec.layout, (q_heads, kv_heads, kv_heads))
    return tuple(_array(spec, shape, *x) for x in zip(counts, dims, strict=False))


def _array(spec: KernelSpec, shape: Shape, heads: int, dim: int) -> jax.ShapeDtypeStruct:
    middle = (heads, shape.seq) if spec.layout is Layout.BHSD else (shape.seq, heads)
    return jax.ShapeDtypeStruct((shape.batch, *middle, dim), jnp.bfloat16)


def _operands(spec: KernelSpec, shape: Shape) -> Any:
    """One array of each kind that the spec has, the bias per head, and one map of blocks for all heads."""
    from eqx_attn._operands import BlockOperands, Operands, SegmentOperands

    def array(shape, dtype) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    batch, seq, q_heads = shape.batch, shape.seq, shape.q_heads
    tokens, index = array((batch, seq), jnp.int32), array((seq,), jnp.int32) if spec.dropout else None
    positions = None if spec.mask is MaskKind.FULL else tokens
    map_shape = (1, 1, -(-seq // MAP_BLOCK), -(-seq // MAP_BLOCK))
    return Operands(
        scale=spec.qk_dim**-0.5,
        lower=-WINDOW if spec.mask is MaskKind.WINDOW else None,
        upper=None if spec.mask is MaskKind.FULL else 0,
        softcap=50.0 if spec.softcap else None,
        dropout_rate=0.1 if spec.dropout else 0.0,
        bias_gradient=spec.bias,
        max_logit=spec.maxlogit,
        heads_of_kv=shape.kv_heads if spec.layout.packed else None,
        segments=SegmentOperands(tokens, tokens, positions, positions) if spec.segments else None,
        blocks=BlockOperands(array(map_shape, jnp.bool_), MAP_BLOCK, MAP_BLOCK) if spec.blocks else None,
        dense=array((batch, 1, seq, seq), jnp.bool_) if spec.dense else None,
        bias=array((1, q_heads, seq, seq), jnp.bfloat16) if spec.bias else None,
        sinks=array((1, q_heads), jnp.float32) if spec.sinks else None,
        dropout_seed=array((batch, q_heads), jnp.uint32) if spec.dropout else None,
        q_index=index,
        kv_index=index,
    )
