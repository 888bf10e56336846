"""The programs of other public TPU kernels, for the static measure: JAX's splash attention, and tokamax's."""

import importlib
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp

from ._static import Block, Program

PEERS = {"jax_splash": "jax", "tokamax_splash": "tokamax"}
"""The package of each."""

PEER_TILES = ((1024, 1024, 512), (2048, 2048, 1024))
"""Blocks of queries, of keys, and of keys per product, of which each peer's best counts. Others were slower on v6e."""

_MORE_VMEM = {"xla_tpu_scoped_vmem_limit_kib": str(48 * 1024)}
"""Peers leave the limit to XLA's flag, whose default of 16 MiB on some generations rules out their best tiles."""


def installed_peers() -> list[str]:
    """Those whose package can be imported."""
    return [peer for peer, package in PEERS.items() if importlib.util.find_spec(package) is not None]


def peer_program(
    peer: str,
    direction: str,
    head_dim: int,
    mask: str,
    seq: int,
    heads: int,
    tile: tuple[int, int, int],
    segments: bool = False,
) -> Program:
    """The forward or the fused backward of a peer. `tile` is its block of queries, of keys, and of keys per product.

    With `segments`, padding at the end is hidden by a segment mask.
    """
    block_q, block_kv, compute = tile
    blocks = dict(
        block_q=block_q,
        block_kv=block_kv,
        block_kv_compute=compute,
        block_q_dkv=block_q,
        block_kv_dkv=block_kv,
        block_kv_dkv_compute=compute,
        use_fused_bwd_kernel=True,
    )
    splash, kernel = (_jax_splash if peer == "jax_splash" else _tokamax_splash)(mask, seq, heads, blocks)
    array = jax.ShapeDtypeStruct((heads, seq, head_dim), jnp.bfloat16)

    ids = splash.SegmentIds(jnp.ones(seq, jnp.int32), jnp.ones(seq, jnp.int32)) if segments else None

    def forward(query, key, value):
        return kernel(query, key, value, segment_ids=ids)

    def backward(query, key, value, dout):
        return jax.vjp(forward, query, key, value)[1](dout)

    function, arguments = (forward, (array,) * 3) if direction == "fwd" else (backward, (array,) * 4)
    names = "_dkv_|_dq_" if direction == "bwd" else ""  # Not the forward that comes before.
    return Program(function, arguments, lambda call: Block(block_q, block_kv, 1), names, _MORE_VMEM)


def _jax_splash(mask: str, seq: int, heads: int, blocks: dict[str, Any]) -> tuple[Any, Any]:
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as splash,
        splash_attention_mask as masks,
    )

    kind = masks.CausalMask if mask == "causal" else masks.FullMask
    head_masks = masks.MultiHeadMask([kind((seq, seq)) for _ in range(heads)])
    sizes = splash.BlockSizes(**blocks)
    return splash, splash.make_splash_mha(head_masks, block_sizes=sizes, head_shards=1, q_seq_shards=1)


def _tokamax_splash(mask: str, seq: int, heads: int, blocks: dict[str, Any]) -> tuple[Any, Any]:
    # Not in its public interface, but what it runs on a TPU.
    splash = importlib.import_module(f"{_TOKAMAX}.splash_attention_kernel")
    masks = importlib.import_module(f"{_TOKAMAX}.splash_attention_mask")
    kind = masks.CausalMask if mask == "causal" else masks.FullMask
    config = splash.SplashConfig(**blocks, use_base2_exp=True, use_experimental_scheduler=True)
    return splash, splash.make_splash_mha_single_device(kind((seq, seq)), config=config)


_TOKAMAX = "tokamax._src.ops.experimental.tpu.splash_attention"
