"""Tile sizes: the built-in choice for each target, head dim and direction."""

import jax

from ._codegen import KernelSpec, Layout, MaskKind, Target
from ._context import CUDA_TARGETS, current_target, current_targets
from ._operands import Tile, Tiles
from ._tile_tables import with_tuned
from ._tuning_tpu import pallas_tpu_tiles

XLA_TILE = Tile(block_q=512, block_kv=512)
"""The blocks of the `xla` implementation: large enough that loop overhead is small, small enough to stay in cache."""


def default_tiles(spec: KernelSpec, dtype: str, q_seq: int, kv_seq: int) -> Tiles:
    """The tiles that `spec` runs with unless a tuned table says otherwise."""
    if spec.target == Target.TRITON:
        return _triton_tiles(spec, dtype)
    if spec.target == Target.GLUON_HOPPER:
        return _gluon_tiles(spec)
    return pallas_tpu_tiles(spec, dtype, q_seq, kv_seq)


def _triton_tiles(spec: KernelSpec, dtype: str) -> Tiles:
    return with_tuned(spec, dtype, _built_in_triton_tiles(spec, dtype))


def _built_in_triton_tiles(spec: KernelSpec, dtype: str) -> Tiles:
    """The fastest of a sweep on an H200 among those that spill no register, by architecture and head dim.

    A tile holds the larger head dim rounded up to a power of two. Architectures other than Hopper were not timed: their
    tiles are the largest that spill no register.
    """
    dim = max(64, 1 << (max(spec.qk_dim, spec.v_dim) - 1).bit_length())
    if dtype == "float32":
        return _FLOAT32_TILES[dim]
    capability = compiled_capability()
    if any((spec.softcap, spec.bias, spec.dropout, spec.dense, spec.blocks, spec.scoremod, spec.maskmod)):
        return _option_tiles(spec, dim, hopper=capability == 90)
    if capability == 90:
        return _hopper_tiles(spec, dim)
    if spec.layout.packed:
        return _PACKED_TILES[dim]
    if capability >= 100:
        return (_BLACKWELL_SEGMENT_TILES if spec.segments else _BLACKWELL_TILES)[dim]
    return (_AMPERE_SEGMENT_TILES if spec.segments else _AMPERE_TILES)[dim]


def _hopper_tiles(spec: KernelSpec, dim: int) -> Tiles:
    if dim == 64:
        wide = spec.segments or spec.layout.packed  # in registers
        return Tiles(Tile(64, 64, 4, 3), Tile(64, 64, 4, 3), Tile(32 if wide else 64, 64, 4, 3))
    if dim == 128:
        whole = spec.mask == MaskKind.FULL and not spec.segments
        forward = Tile(128, 128, 8, 3) if whole else Tile(64, 64, 4, 3)
        dq = Tile(128, 64, 8, 3) if whole else Tile(64, 64, 4, 2)
        if spec.layout.packed:
            return Tiles(forward, dq, Tile(16, 64, 4, 3))
        spills = whole and spec.layout == Layout.BHSD  # 16 bytes with the narrower tile, there alone
        return Tiles(forward, dq, Tile(32, 128, 8, 3) if spills else Tile(32, 64, 4, 3))
    wide = spec.v_dim <= 128 or (spec.mask == MaskKind.FULL and not spec.segments)
    forward = Tile(128, 64, 8, 2) if wide else Tile(128, 32, 8, 3)
    return Tiles(forward, Tile(128, 32, 8, 2), Tile(16, 64, 4, 3))


def _option_tiles(spec: KernelSpec, dim: int, hopper: bool) -> Tiles:
    """On Hopper the fastest of a sweep that spill no register with any one option; elsewhere the largest, not timed."""
    if not hopper:
        return _OPTION_TILES[32 if max(spec.qk_dim, spec.v_dim) <= 32 else dim]
    if dim == 64:
        return Tiles(Tile(64, 64, 4, 3), Tile(64, 64, 4, 3), Tile(32, 64, 4, 2), Tile(128, 128, 8, 1))
    if dim == 256:
        return Tiles(Tile(128, 32, 8, 3), Tile(128, 32, 8, 3), Tile(16, 64, 4, 3))
    if spec.bias or spec.scoremod:
        tight = spec.segments or spec.mask == MaskKind.FULL  # in registers
        dbias = Tile(128, 64, 8, 2) if tight else Tile(128, 128, 8, 1)
        return Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(16, 64, 4, 3), dbias)
    return Tiles(Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(16 if spec.softcap else 32, 64, 4, 3))


def _gluon_tiles(spec: KernelSpec) -> Tiles:
    """The trials' best on an H200 among those that spill no register. The warps include the one that loads."""
    if spec.qk_dim == 64:
        masked = spec.mask != MaskKind.FULL  # which takes registers
        forward = Tile(192, 64, 16, 4) if masked else Tile(192, 128, 16, 3)
        return Tiles(forward, Tile(128, 128, 12, 3), Tile(64, 128, 12, 4))
    return Tiles(Tile(128, 128, 12, 2), Tile(128, 64, 12, 3), Tile(64, 128, 12, 3))


def compiled_capability() -> int:
    """The capability that is compiled for; 80 where there is none, under the interpreter."""
    if current_targets():
        return CUDA_TARGETS.get(current_target("cuda") or "", 80)
    device = jax.local_devices()[0]
    return int(device.compute_capability.replace(".", "")) if device.platform == "gpu" else 80


_AMPERE_TILES = {
    64: Tiles(Tile(64, 64, 4, 3), Tile(64, 32, 4, 2), Tile(32, 32, 4, 2)),
    128: Tiles(Tile(64, 64, 8, 2), Tile(64, 32, 4, 2), Tile(16, 64, 4, 2)),
    256: Tiles(Tile(64, 32, 8, 2), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
}
_AMPERE_SEGMENT_TILES = {
    64: Tiles(Tile(64, 32, 4, 2), Tile(64, 32, 8, 2), Tile(32, 64, 8, 2)),
    128: Tiles(Tile(64, 64, 8, 2), Tile(64, 32, 4, 2), Tile(32, 32, 4, 2)),
    256: Tiles(Tile(64, 32, 8, 2), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
}
_BLACKWELL_TILES = {
    64: Tiles(Tile(64, 64, 4, 3), Tile(64, 32, 4, 2), Tile(32, 32, 4, 2)),
    128: Tiles(Tile(64, 32, 4, 3), Tile(64, 32, 8, 2), Tile(32, 32, 4, 2)),
    256: Tiles(Tile(32, 32, 4, 2), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
}
_BLACKWELL_SEGMENT_TILES = {
    64: Tiles(Tile(64, 64, 4, 3), Tile(64, 32, 4, 2), Tile(32, 64, 8, 2)),
    128: Tiles(Tile(64, 64, 4, 3), Tile(64, 32, 8, 2), Tile(32, 32, 4, 2)),
    256: Tiles(Tile(32, 32, 4, 2), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
}
_OPTION_TILES = {
    32: Tiles(Tile(64, 32, 8, 2), Tile(64, 32, 8, 2), Tile(32, 64, 8, 2)),
    64: Tiles(Tile(64, 32, 8, 2), Tile(64, 32, 8, 2), Tile(32, 32, 8, 2)),
    128: Tiles(Tile(64, 32, 8, 2), Tile(64, 32, 4, 2), Tile(16, 64, 8, 1)),
    256: Tiles(Tile(32, 32, 8, 2), Tile(32, 32, 8, 1), Tile(16, 32, 8, 1)),
}
_PACKED_TILES = _OPTION_TILES | {
    64: Tiles(Tile(64, 32, 8, 2), Tile(64, 32, 8, 2), Tile(32, 32, 4, 2)),
    128: Tiles(Tile(64, 32, 8, 2), Tile(32, 32, 4, 2), Tile(16, 64, 8, 1)),
}
_FLOAT32_TILES = {
    64: Tiles(Tile(64, 32, 4, 2), Tile(64, 32, 4, 2), Tile(32, 64, 4, 2)),
    128: Tiles(Tile(64, 32, 4, 2), Tile(64, 32, 8, 1), Tile(32, 64, 8, 1)),
    256: Tiles(Tile(32, 32, 4, 1), Tile(32, 16, 8, 1), Tile(16, 32, 8, 1)),
}
