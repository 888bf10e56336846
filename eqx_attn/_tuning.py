"""Tile sizes: the built-in choice for each target, head dim and direction."""

from ._codegen import KernelSpec, Target
from ._operands import Tile, Tiles

XLA_TILE = Tile(block_q=512, block_kv=512)
"""The blocks of the `xla` implementation: large enough that loop overhead is small, small enough to stay in cache."""


def default_tiles(spec: KernelSpec, dtype: str, q_seq: int, kv_seq: int) -> Tiles:
    """The tiles that `spec` runs with unless a tuned table says otherwise."""
    if spec.target == Target.TRITON:
        return _triton_tiles(spec, dtype)
    from ._tuning_tpu import pallas_tpu_tiles

    return pallas_tpu_tiles(spec, dtype, q_seq, kv_seq)


def _triton_tiles(spec: KernelSpec, dtype: str) -> Tiles:
    """By the larger head dim, rounded up to a power of two, since that is what a tile holds."""
    dim = 1 << (max(spec.qk_dim, spec.v_dim) - 1).bit_length()
    if dtype == "float32":
        return _FLOAT32_TILES[64 if dim <= 64 else dim]
    return _HALF_TILES[64 if dim <= 64 else dim]


_HALF_TILES = {
    64: Tiles(Tile(128, 64, 4, 3), Tile(128, 64, 4, 3), Tile(64, 128, 4, 3)),
    128: Tiles(Tile(128, 128, 8, 2), Tile(128, 64, 8, 2), Tile(64, 128, 8, 2)),
    256: Tiles(Tile(128, 64, 8, 2), Tile(64, 32, 8, 1), Tile(32, 64, 8, 1)),
}
_FLOAT32_TILES = {
    64: Tiles(Tile(64, 32, 4, 2), Tile(64, 32, 4, 2), Tile(32, 64, 4, 2)),
    128: Tiles(Tile(64, 32, 4, 2), Tile(64, 32, 8, 1), Tile(32, 64, 8, 1)),
    256: Tiles(Tile(32, 32, 4, 1), Tile(32, 16, 8, 1), Tile(16, 32, 8, 1)),
}
