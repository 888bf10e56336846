"""The positions that a mask compares, for whatever else depends on a token's position."""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Int32

from .._masks import Mask, parts, Segments
from .._segments import count_of_ids
from ..sharding._order import Order


def mask_positions(
    mask: Mask, q_seq: int, kv_seq: int, order: Order | None = None
) -> tuple[Int32[Array, " q_seq"], Int32[Array, " kv_seq"]]:
    """Positions of queries and keys: those of `Segments`, or row numbers.

    Where the mask is aligned "bottom_right" the queries' positions are moved so that the last query (of each id) has
    the position of the last key. With an `order`, in which the tokens lie, row numbers are those of the original order.
    """
    pieces = parts(mask)
    bottom_right = any(getattr(piece, "alignment", None) == "bottom_right" for piece in pieces)
    for piece in pieces:
        if isinstance(piece, Segments):
            piece = piece if order is None else piece.dealt(order.positions)
            q_positions, kv_positions = piece.positions()
            if bottom_right:
                q_ids, kv_ids = piece.q_ids, piece.kv_ids
                q_positions += count_of_ids(kv_ids, q_ids) - count_of_ids(q_ids, q_ids)
            return q_positions, kv_positions
    shift = kv_seq - q_seq if bottom_right else 0
    rows = functools.partial(jnp.arange, dtype=jnp.int32) if order is None else order.positions
    return jnp.asarray(rows(q_seq)) + shift, jnp.asarray(rows(kv_seq))
