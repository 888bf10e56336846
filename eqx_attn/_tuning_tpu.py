"""Tile sizes of the TPU kernels."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

from ._codegen import KernelSpec, MaskKind
from ._operands import Tile, Tiles
from ._vector_memory import tpu_generation

LANES = 128
"""A TPU's vector registers hold 8 rows (sublanes) of 128 lanes; block sizes are multiples of 128."""

_PART = 256
"""Rows of the parts of a block (`inner_q`, `inner_kv`), or more. A part of 128 rows takes nearly as long."""

_STEP = 72
"""What a step without a mask costs beside its queries, in queries."""


def fit_block(block: int, seq: int, map_block: int | None = None) -> int:
    """The block size for `seq` rows: at most `block`, a multiple of 128, with little left over in the last block.

    Where that makes it larger by a fifteenth at most, it is a multiple of 256, so that it consists of whole parts.

    With a map whose blocks have `map_block` rows it divides those, so that a block is hidden or seen as a whole; where no
    multiple of 128 does, it is small, so that fewer blocks are seen in part.

    Raises `ValueError` unless `block` is a positive multiple of 128.
    """
    if block < LANES or block % LANES:
        raise ValueError(f"a tile of {block} rows: TPU kernels take positive multiples of {LANES}")
    if map_block is not None and map_block < seq:
        if map_block % LANES == 0:
            return max(size for size in range(LANES, block + 1, LANES) if map_block % size == 0)
        block = min(block, 2 * LANES)
    blocks = -(-seq // block)
    fitted, whole = (-(-seq // (blocks * rows)) * rows for rows in (LANES, _PART))
    return whole if whole <= block and 15 * whole <= 16 * fitted else fitted


def fit_chunk(block_q: int, block_kv: int) -> int:
    """The rows of equal chunks of a block of keys: a multiple of 128, with at most 2**20 scores where that is possible."""
    sizes = [size for size in range(LANES, block_kv + 1, LANES) if block_kv % size == 0]
    return max((size for size in sizes if size * block_q <= 2**20), default=sizes[0])


def pallas_tpu_tiles(spec: KernelSpec, dtype: str, q_seq: int, kv_seq: int) -> Tiles:
    """The tiles that `spec` runs with: those of the generation's table, `tiles/GENERATION.json`, or else general ones.

    Kernels shrink a block to the sequence.
    """
    tiles = _general_tiles(spec, dtype)
    generation = tpu_generation()
    if dtype == "float32":
        return tiles
    if generation is not None:
        tiles = dataclasses.replace(tiles, **tuned_tiles(generation, kind_of(spec), max(spec.qk_dim, spec.v_dim)))
    if kind_of(spec) != "full":
        return tiles
    return dataclasses.replace(
        tiles, **{name: _fit_queries(getattr(tiles, name), q_seq) for name in ("forward", "dq", "dkv")}
    )


def _fit_queries(tile: Tile, q_seq: int) -> Tile:
    """A smaller block of queries where that leaves less beyond the end, all of which is computed.

    A step costs, besides its queries, as much as `_STEP` more (benchmarks/NOTES.md). Of keys nothing beyond the end is computed.
    """
    sizes = [tile.block_q, *range(1024, tile.block_q, _PART)]
    return dataclasses.replace(tile, block_q=min(sizes, key=lambda size: -(-q_seq // size) * (size + _STEP)))


def kind_of(spec: Any) -> str | None:
    """What tables call kernels like this one; None for those that they do not hold.

    Options that take vector memory or bring other loops need tiles of their own.
    """
    if any((spec.blocks, spec.dense, spec.bias, spec.dropout, spec.maxlogit, spec.scoremod, spec.maskmod)):
        return None
    return f"{spec.mask}_segments" if spec.segments else str(spec.mask)


def tuned_tiles(generation: str, kind: str | None, head_dim: int) -> dict[str, Tile]:
    """The fields of `Tiles` that a generation's table holds for a kind of kernel, from the next larger head dim."""
    dims = _table(generation).get(kind, {}) if kind else {}
    larger = [dim for dim in map(int, dims) if dim >= head_dim]
    return {field: Tile(**sizes) for field, sizes in dims[str(min(larger))].items()} if larger else {}


@functools.cache
def _table(generation: str) -> dict[str, dict[str, dict[str, dict[str, int]]]]:
    """By kind of kernel, head dim and field of `Tiles`; written by `python -m eqx_attn.bench --tune --static`."""
    path = Path(__file__).parent / "tiles" / f"{generation}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _general_tiles(spec: KernelSpec, dtype: str) -> Tiles:
    """Tiles for any generation.

    From static schedules (benchmarks/NOTES.md): larger blocks keep the matrix unit busier, up to 2048 rows, but a mask
    wastes more of a larger block, and compilation takes longer: much longer for float32, whose products are made of six.
    """
    if dtype == "float32":
        return Tiles(Tile(512, 512), Tile(512, 512), Tile(512, 512))
    bias_gradient = Tile(512, 512) if tpu_generation() == "v4" else Tile(1024, 1024)
    return Tiles(_forward_tile(spec), _backward_tile(spec), _backward_tile(spec), bias_gradient)


def _forward_tile(spec: KernelSpec) -> Tile:
    """Of a kernel of bfloat16 arrays."""
    if tpu_generation() == "v4":
        return Tile(512, 512, inner_q=512)  # in a quarter of the others' vector memory
    functions = spec.scoremod or spec.maskmod
    exact = spec.bias or spec.dense or spec.maxlogit or functions
    if spec.segments or spec.blocks or exact or spec.mask is MaskKind.WINDOW:
        return Tile(1024, 1024, inner_q=512)
    tall = spec.mask is MaskKind.CAUSAL or max(spec.qk_dim, spec.v_dim) <= 64
    inner_q, inner_kv = (512, 256) if tall else (256, 512)
    return Tile(2048, 2048, inner_q=inner_q, inner_kv=inner_kv)


def _backward_tile(spec: KernelSpec) -> Tile:
    """Of a kernel of bfloat16 arrays."""
    generation, dim = tpu_generation(), max(spec.qk_dim, spec.v_dim)
    if generation == "v4":
        return Tile(512, 512)  # in a quarter of the others' vector memory
    inner_q = 512 if generation == "7x" and dim <= 128 else 256
    large_units = generation not in ("v5e", "v5p")  # 256 x 256, which take longer to fill
    wide = {MaskKind.FULL: large_units or dim <= 128, MaskKind.CAUSAL: large_units, MaskKind.WINDOW: False}[spec.mask]
    functions = spec.scoremod or spec.maskmod
    plain = not (spec.segments or spec.blocks or spec.bias or spec.dense or spec.dropout or functions)
    return Tile(1024, 2048 if wide and plain else 1024, inner_q=inner_q)
