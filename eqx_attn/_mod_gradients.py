"""The gradients of the arrays that a score function reads, beside a kernel: blockwise, in plain JAX, for any device."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ._blockwise_parts import (
    blocks_of,
    clear_padding,
    kv_block,
    kv_range,
    no_mod_gradients,
    pad_kv,
    pad_operands,
    rows_of_backward,
    score_gradient,
)
from ._codegen import KernelSpec, Target
from ._operands import Operands, Tile


def sums_in_kernel(spec: KernelSpec, operands: Operands) -> bool:
    """Whether the kernel sums these gradients, in an order that is not the same in each run where elements are scattered."""
    if spec.target == Target.PALLAS_TPU:
        return True
    return not operands.deterministic or not operands.score_mod.scatters


def mod_gradients(
    q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array, dlse: Array, operands: Operands, tile: Tile
) -> list[Array]:
    """Those that `operands.mod_gradients` asks for, in float32 or float64; arrays are laid out `bhsd`."""
    blocks = blocks_of(q, k, tile)
    (q, dout), (k, v) = clear_padding(operands, (q, dout), (k, v))
    operands = pad_operands(operands, blocks)
    k_rows, v_rows = pad_kv(k, blocks), pad_kv(v, blocks)
    rows, _ = rows_of_backward(q, out, lse, dout, dlse, blocks)

    def of_queries(totals, block):
        i, *of_block = block

        def of_keys(j, totals):
            keys, values = kv_block(k_rows, blocks, j), kv_block(v_rows, blocks, j)
            _, gradient, _, mod = score_gradient(of_block, keys, values, operands, blocks, i, j)
            assert mod is not None
            return mod.scattered(totals, gradient)

        return lax.fori_loop(*kv_range(operands, blocks, i), of_keys, totals), None

    numbers = jnp.arange(blocks.q_blocks, dtype=jnp.int32)
    totals, _ = lax.scan(of_queries, no_mod_gradients(operands, blocks.wide), (numbers, *rows))
    return [x for x in totals if x is not None]
