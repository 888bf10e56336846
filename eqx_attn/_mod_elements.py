"""What functions of scores read of arrays, as TPU kernels get it: read before the kernel, its gradients put back behind it.

An element that depends on the query or the key alone, or on neither, is an array like a bias of one row, one column or one
number. One that depends on how far the key is from the query has an entry for each distance of their rows in the arrays, from
that of the last query and the first key on; for that the indices have to be in step, as in contiguous order they are.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from ._mod_evaluate import Evaluation
from ._operands import Operands


def elements(operands: Operands, of: str, load: int) -> Array:
    """What the "score" or "mask" function reads, in 32 bits or booleans: `[batch, q_heads, q_seq, kv_seq]` or 1 instead."""
    return _plain(_evaluation(operands, of, operands.q_index, operands.kv_index)(load))


def elements_by_distance(operands: Operands, of: str, load: int) -> Array:
    """The same for each distance of rows, `[batch, q_heads, 1, q_seq + kv_seq - 1]` or 1 instead of batch and heads."""
    return _plain(_evaluation(operands, of, jnp.zeros(1, jnp.int32), distances(operands))(load))


def distances(operands: Operands) -> Array:
    """By how much the index of the key is larger than that of the query, for each distance of rows."""
    q_index, kv_index = operands.q_index, operands.kv_index
    assert q_index is not None and kv_index is not None
    rows = jnp.arange(1 - q_index.size, kv_index.size, dtype=jnp.int32)
    return kv_index[jnp.maximum(rows, 0)] - q_index[jnp.maximum(-rows, 0)]


def element_gradients(operands: Operands, gradients: Mapping[int, Callable[[], Array]]) -> list[Array]:
    """The gradients of the score function's arrays that are asked for, in float32.

    `gradients` make that of what is read, like `elements` or `elements_by_distance`, for each load by its number.
    """
    totals = [jnp.zeros(x.shape, jnp.float32) for x in operands.score_arrays]
    program: Any = operands.score_mod
    for load, gradient in gradients.items():
        number = program.step(load).capture
        if not operands.mod_gradients[number]:
            continue
        by_distance = {"q_index", "kv_index"} <= program.depends[load]
        places = (
            (jnp.zeros(1, jnp.int32), distances(operands)) if by_distance else (operands.q_index, operands.kv_index)
        )
        totals[number] = _evaluation(operands, "score", *places).added(totals[number], load, gradient())
    return [x for x, wanted in zip(totals, operands.mod_gradients, strict=True) if wanted]


def _evaluation(operands: Operands, of: str, q_index: Any, kv_index: Any) -> Evaluation:
    program, arrays = (
        (operands.score_mod, operands.score_arrays) if of == "score" else (operands.mask_mod, operands.mask_arrays)
    )
    batch, heads = operands.batch_index, operands.head_index
    assert batch is not None and heads is not None
    arguments = dict(
        batch=batch[:, None, None, None],
        q_head=heads[None, :, None, None],
        q_index=q_index[None, None, :, None],
        kv_index=kv_index[None, None, None, :],
    )
    return Evaluation(program, arguments, arrays, batch.size)


def _plain(x: Array) -> Array:
    """In a dtype that TPU kernels read."""
    if x.dtype == jnp.bool_:
        return x
    return x.astype(jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32)
