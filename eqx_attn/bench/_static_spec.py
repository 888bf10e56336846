"""The programs of our own kernels, for the static measure, and what their steps are worth."""

import dataclasses
import importlib
import math
from typing import Any, Literal

from .. import _codegen
from .._codegen import KernelSpec
from .._operands import Tile, Tiles
from ._static import Block, Kernel, Measured, PallasCall, Program
from ._tpu import GENERATIONS

Direction = Literal["fwd", "bwd"]
DIRECTIONS: tuple[Direction, ...] = ("fwd", "bwd")
BATCH, HEADS = 1, 4
"""Of the measured calls; two heads at least, since a step may compute two heads of 64."""

Overrides = tuple[tuple[str, tuple[tuple[str, int], ...]], ...]
"""Fields of tiles to change: ((tiles' field, ((tile's field, value), ...)), ...)."""


def spec_program(
    name: str, direction: Direction, device: str, seq: int, overrides: Overrides = (), out_dtype: str | None = None
) -> Program:
    """The forward or backward of a kernel, with the default tiles but for `overrides`."""
    compilers = importlib.import_module(f"{_codegen._package}.compilers")
    spec = KernelSpec.from_name(name)
    shape = compilers.Shape(batch=BATCH, seq=seq, q_heads=HEADS, kv_heads=HEADS)
    tiles = tiles_of(spec, device, seq, overrides)
    forward, backward = compilers.functions(spec, device, shape, tiles)
    function, arguments = forward if direction == "fwd" else backward
    *arrays, operands = arguments
    arguments = (*arrays, dataclasses.replace(operands, out_dtype=out_dtype))
    return Program(function, arguments, lambda call: block_of(call, seq, spec.qk_dim))


def tiles_of(spec: Any, device: str, seq: int, overrides: Overrides = ()) -> Tiles:
    """The default tiles of a spec on a device, changed."""
    from .._context import target
    from .._tuning import default_tiles

    with target(device):
        tiles = default_tiles(spec, "bfloat16", seq, seq)
    for field, changes in overrides:
        tile = getattr(tiles, field, None)
        if not isinstance(tile, Tile):
            known = [field.name for field in dataclasses.fields(tiles) if getattr(tiles, field.name) is not None]
            raise ValueError(f"--tile {field}: there is no such kernel; {spec.name} has {', '.join(known)}")
        names = [field.name for field in dataclasses.fields(tile)]
        for changed, _ in changes:
            if changed not in names:
                raise ValueError(f"--tile {field}: a tile has no {changed}; it has {', '.join(names)}")
        tiles = dataclasses.replace(tiles, **{field: dataclasses.replace(tile, **dict(changes))})
    return tiles


def block_of(call: PallasCall, seq: int, qk_dim: int) -> Block:
    """Which scores a step of one of our kernels computes, from its blocks of `q_ref` and `k_ref`."""
    heads, queries = _heads_and_rows(call, "q_ref", seq, qk_dim)
    _, keys = _heads_and_rows(call, "k_ref", seq, qk_dim)
    return Block(queries, keys, heads)


def _heads_and_rows(call: PallasCall, name: str, seq: int, dim: int) -> tuple[int, int]:
    if name not in call.blocks:
        raise ValueError(f"kernel {call.name} has no argument {name}; it has {', '.join(call.blocks)}")
    block, array = call.blocks[name], call.arrays[name]
    rows = next(size for size, whole in zip(block, array, strict=True) if seq <= whole < seq + size)
    return max(1, math.prod(block) // (rows * dim)), rows


def flops_per_score(qk_dim: int, v_dim: int, direction: Direction) -> int:
    """Useful operations of a score: two products forward, five backward (of which kernels may compute some twice)."""
    return 2 * (qk_dim + v_dim) if direction == "fwd" else 2 * (3 * qk_dim + 2 * v_dim)


def products_of(kernel: str, qk_dim: int, v_dim: int) -> int:
    """The operations of a score that one of our kernels makes for its results, from its name."""
    scores_and_weights = 2 * (qk_dim + v_dim)
    if "dq" in kernel:
        return scores_and_weights + 2 * qk_dim
    if "dkv" in kernel or "dk" in kernel:
        return 2 * scores_and_weights
    return flops_per_score(qk_dim, v_dim, "bwd") if "backward" in kernel else scores_and_weights


def useful_of(kernel: Kernel, device: str, qk_dim: int, v_dim: int) -> float:
    """One kernel's useful share of the matrix units' peak, in a step with a whole block."""
    steps, block = kernel.steps, kernel.block
    assert steps is not None and block is not None
    flops = products_of(kernel.name, qk_dim, v_dim) * block.scores
    return flops / (steps.whole.full_cycles * GENERATIONS[device].flops_per_cycle)


@dataclasses.dataclass(frozen=True)
class Share:
    """Of a direction: cycles of a step of its first kernel and of as much of the others, and the useful share."""

    cycles: float
    useful: float


def share_of(measured: Measured, device: str, flops: int) -> Share:
    """All kernels of a call together: the useful share of the matrix units' peak in steps with whole blocks.

    `flops` are the useful operations of a score. Kernels without products are left out: they are no part of a step.

    Raises `ValueError` where none has products.
    """
    steps = [(kernel.steps, kernel.block) for kernel in measured.kernels]
    parts = [
        (steps.whole.full_cycles, block.scores) for steps, block in steps if steps is not None and block is not None
    ]
    if not parts:
        names = ", ".join(kernel.name for kernel in measured.kernels) or "there is none"
        raise ValueError(f"no kernel of the program multiplies matrices ({names}), so its step has no useful share")
    per_score = sum(cycles / scores for cycles, scores in parts)
    return Share(per_score * parts[0][1], flops / (per_score * GENERATIONS[device].flops_per_cycle))
