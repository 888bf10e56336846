"""One kernel file through a real compiler, and what the compiler tells of the result."""

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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

_TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "7x": "tpu7x:2x2x1"}


def compile_tpu(spec: KernelSpec, device: str) -> dict[str, dict[str, int | str]]:
    """Compiles for a TPU generation. Returns, for each kernel, the bytes of VMEM that the compiler gave it."""
    sharding = jax.sharding.NamedSharding(_mesh(device), jax.sharding.PartitionSpec())
    found = {}
    for function, shapes in functions(spec, device):
        arguments = jax.tree.map(
            lambda shape: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding), shapes
        )
        with jax.sharding.use_abstract_mesh(_mesh(device).abstract_mesh):
            compiled = jax.jit(function).trace(*arguments).lower(lowering_platforms=("tpu",)).compile()
        kernels = dict(vmem_of_kernels(compiled.as_text() or ""))
        if not kernels:
            raise AssertionError(f"{function.__name__} compiled to a program without a Pallas kernel")
        found |= kernels
    return found


def vmem_of_kernels(hlo: str) -> Iterator[tuple[str, dict[str, int | str]]]:
    """The Pallas kernels of a compiled TPU program and the VMEM of each, from XLA's own text."""
    for line in hlo.splitlines():
        if 'custom_call_target="tpu_custom_call"' not in line:
            continue
        name = re.match(r"\s*(?:ROOT )?%?([\w\-]+)", line)
        used = re.search(r'"used_scoped_memory_configs":(\[.*?\])', line)
        spaces = json.loads(used[1]) if used else []
        yield (
            (name[1] if name else "?"),
            {"vmem": sum(int(space["size"]) for space in spaces if space["memory_space"] == "1")},
        )


@functools.cache
def _mesh(device: str) -> jax.sharding.Mesh:
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(platform="tpu", topology_name=_TOPOLOGIES[device])
    return jax.sharding.Mesh(np.array(topology.devices).reshape(-1)[:1], ("device",))


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
