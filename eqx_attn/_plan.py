"""From a mask to what the kernels compute with: a band of positions, segment metadata, a dense array."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool

from ._mask_function import FromFunction
from ._masks import BlockSparse, Causal, Chunked, Dense, Dilated, Mask, parts, PrefixLM, Segments, SlidingWindow
from ._mods import Mod
from ._operands import BlockOperands, SegmentOperands
from ._segments import count_of_ids, refine_ids
from .sharding._order import Order

UNBOUNDED = 2**30
"""Stands for a missing bound where the kernel of a window wants both."""

_QUERY_PADDING, _KEY_PADDING = -1, -2


_BEFORE_ALL = -(2**30)
"""The position that stands for a key of a prefix: before that of every query."""


@dataclasses.dataclass(frozen=True)
class _Tokens:
    """Ids and positions, `[batch, seq]` each; padding has an id that no token of the other side has.

    Without positions where no part of the mask asks for them.
    """

    q_ids: Array
    kv_ids: Array
    q_positions: Array | None = None
    kv_positions: Array | None = None

    def operands(self, with_positions: bool) -> SegmentOperands:
        positions = (self.q_positions, self.kv_positions) if with_positions else (None, None)
        return SegmentOperands(self.q_ids, self.kv_ids, *positions)


Positional = Causal | SlidingWindow | PrefixLM | Chunked | Dilated


@dataclasses.dataclass(frozen=True)
class MaskPlan:
    """A mask in the terms of `Operands`; its functions, and where they and a score function have been traced, those."""

    lower: int | None
    upper: int | None
    segments: SegmentOperands | None
    blocks: BlockOperands | None
    dense: Bool[Array, "_ _ _ _"] | None
    functions: tuple[Callable, ...] = ()
    mask_mod: Mod | None = None
    score_mod: Mod | None = None


def plan_mask(
    mask: Mask, batch_shape: tuple[int, ...], q_heads: int, q_seq: int, kv_seq: int, order: Order | None = None
) -> MaskPlan:
    """The plan of `mask` for arrays of these sizes; arrays in it have one batch axis, the product of `batch_shape`.

    With an `order`, in which the arrays' tokens lie, positions are never left to row numbers.
    """
    pieces = parts(mask)
    segments = [piece for piece in pieces if isinstance(piece, Segments)]
    positional = _without_idle_prefixes([piece for piece in pieces if isinstance(piece, Positional)])
    if len(segments) > 1:
        raise ValueError(
            f"mask combines {len(segments)} Segments: give one Segments whose ids tell all groups apart "
            "(for instance first_ids * second_ids.max() + second_ids)"
        )
    shift = 0 if segments else kv_seq - q_seq
    lower, upper = _band(positional, shift)
    if not segments:
        lower, upper = _without_idle_bounds(lower, upper, q_seq, kv_seq)
    sizes = (batch_shape, q_heads, q_seq, kv_seq)
    banded = lower is not None or upper is not None
    if segments:
        tokens = _segment_tokens(segments[0], positional, batch_shape, q_seq, kv_seq, order)
    elif (
        any(isinstance(piece, PrefixLM | Chunked | Dilated) for piece in positional)
        or order is not None
        and (banded or order.padded(q_seq) > q_seq or order.padded(kv_seq) > kv_seq)
    ):
        tokens = _row_tokens(batch_shape, q_seq, kv_seq, order)
    else:
        tokens = None
    if tokens is not None:
        tokens = _refined(tokens, positional, shift)
        tokens = _with_prefixes(tokens, positional, batch_shape)
    return MaskPlan(
        lower,
        upper,
        None if tokens is None else tokens.operands(with_positions=lower is not None or upper is not None),
        _plan_blocks([piece for piece in pieces if isinstance(piece, BlockSparse)], *sizes),
        _plan_dense([piece.visible for piece in pieces if isinstance(piece, Dense)], *sizes),
        tuple(piece.function for piece in pieces if isinstance(piece, FromFunction)),
    )


def _without_idle_prefixes(pieces: list[Positional]) -> list[Positional]:
    """A prefix beside a causal mask of the same alignment shows nothing that the causal mask does not hide.

    Raises ValueError where a prefix stands beside a window: the kernels know one position of a key, and that of a prefix's
    key is before all others.
    """
    prefixes = [piece for piece in pieces if isinstance(piece, PrefixLM)]
    bands = [piece for piece in pieces if isinstance(piece, Causal | SlidingWindow)]
    if not prefixes:
        return pieces
    closed = {b.alignment for b in bands if isinstance(b, Causal) or (b.right == 0)}
    if all(prefix.alignment in closed for prefix in prefixes):
        return [Causal(piece.alignment) if isinstance(piece, PrefixLM) else piece for piece in pieces]
    bounded = [b for b in bands if isinstance(b, Causal) or b.left is not None or b.right is not None]
    if bounded or len(prefixes) > 1:
        other = bounded[0] if bounded else prefixes[1]
        raise ValueError(
            f"mask combines PrefixLM with {other}: the keys of a prefix are seen whatever their position, so that no other "
            "bound on positions can hold for them; give a boolean array for such a mask"
        )
    return pieces


def _band(pieces: list[Positional], shift: int) -> tuple[int | None, int | None]:
    """The intersection of bands, `lower <= kv - q <= upper`; bottom-right ones are moved by `shift`."""
    lower, upper = None, None
    for band in pieces:
        if isinstance(band, Chunked | Dilated):
            continue
        left, right = (band.left, band.right) if isinstance(band, SlidingWindow) else (None, 0)
        offset = shift if band.alignment == "bottom_right" else 0
        if left is not None:
            lower = offset - left if lower is None else max(lower, offset - left)
        if right is not None:
            upper = offset + right if upper is None else min(upper, offset + right)
    return lower, upper


def _without_idle_bounds(
    lower: int | None, upper: int | None, q_seq: int, kv_seq: int
) -> tuple[int | None, int | None]:
    """Row numbers lie between -q_seq and kv_seq: a bound outside never hides a key, and its kernel need not ask."""
    return (
        None if lower is not None and lower <= 1 - q_seq else lower,
        None if upper is not None and upper >= kv_seq - 1 else upper,
    )


def _row_tokens(batch_shape: tuple[int, ...], q_seq: int, kv_seq: int, order: Order | None) -> _Tokens:
    """One segment, with row numbers for positions; under an order, the row numbers that the tokens had."""
    q_rows, kv_rows = (
        jnp.broadcast_to(
            jnp.arange(n, dtype=jnp.int32) if order is None else order.positions(n), (math.prod(batch_shape), n)
        )
        for n in (q_seq, kv_seq)
    )
    return _Tokens(jnp.ones_like(q_rows), jnp.ones_like(kv_rows), q_rows, kv_rows)


def _segment_tokens(
    segments: Segments,
    positional: list[Positional],
    batch_shape: tuple[int, ...],
    q_seq: int,
    kv_seq: int,
    order: Order | None,
) -> _Tokens:
    explicit_positions = segments.explicit_positions
    if order is not None:
        segments = segments.dealt(order.positions, with_positions=bool(positional))
    q_ids, kv_ids = segments.q_ids, segments.kv_ids
    _check_ids("q_ids", q_ids, "query", batch_shape, q_seq)
    _check_ids("kv_ids", kv_ids, "key", batch_shape, kv_seq)
    q_ids, kv_ids = _flat(q_ids, batch_shape), _flat(kv_ids, batch_shape)
    q_ids = jnp.where(q_ids > 0, q_ids, _QUERY_PADDING)
    kv_ids = jnp.where(kv_ids > 0, kv_ids, _KEY_PADDING)
    if not positional:
        return _Tokens(q_ids, kv_ids)
    q_positions, kv_positions = (_flat(x, batch_shape) for x in segments.positions())
    alignments = {piece.alignment for piece in positional}
    if "bottom_right" in alignments:
        if explicit_positions:
            raise ValueError(
                'alignment="bottom_right" together with explicit positions of Segments: the positions already say how '
                'queries and keys are aligned; use alignment="top_left"'
            )
        if len(alignments) > 1:
            raise ValueError(
                "mask combines both alignments with Segments: use one alignment for all of its parts, or give the "
                "positions that you mean to Segments"
            )
        q_positions += count_of_ids(kv_ids, q_ids) - count_of_ids(q_ids, q_ids)
    return _Tokens(q_ids, kv_ids, q_positions, kv_positions)


def _refined(tokens: _Tokens, positional: list[Positional], shift: int) -> _Tokens:
    """The ids divided further, by chunk and by residue: tokens of one id see one another as before."""
    q_seq = tokens.q_ids.shape[1]
    for piece in positional:
        if not isinstance(piece, Chunked | Dilated):
            continue
        assert tokens.q_positions is not None and tokens.kv_positions is not None
        q_positions = tokens.q_positions + (shift if piece.alignment == "bottom_right" else 0)
        positions = jnp.concatenate([q_positions, tokens.kv_positions], axis=1)
        numbers = positions // piece.size if isinstance(piece, Chunked) else positions % piece.step
        ids = refine_ids(jnp.concatenate([tokens.q_ids, tokens.kv_ids], axis=1), numbers)
        q_ids, kv_ids = ids[:, :q_seq], ids[:, q_seq:]
        tokens = dataclasses.replace(
            tokens,
            q_ids=jnp.where(q_ids > 0, q_ids, _QUERY_PADDING),
            kv_ids=jnp.where(kv_ids > 0, kv_ids, _KEY_PADDING),
        )
    return tokens


def _with_prefixes(tokens: _Tokens, positional: list[Positional], batch_shape: tuple[int, ...]) -> _Tokens:
    kv_seq = tokens.kv_ids.shape[1]
    for piece in positional:
        if not isinstance(piece, PrefixLM):
            continue
        per_key = piece.prefix.dtype == jnp.bool_
        wanted = (*batch_shape, kv_seq) if per_key else batch_shape
        try:
            fits = jnp.broadcast_shapes(piece.prefix.shape, wanted) == wanted
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(
                f"PrefixLM's prefix has shape {piece.prefix.shape} and dtype {piece.prefix.dtype}: it broadcasts to "
                f"{'[*batch, kv_seq]' if per_key else '[*batch]'} = {wanted}"
            )
        assert tokens.kv_positions is not None
        prefix = jnp.broadcast_to(piece.prefix, wanted)
        inside = prefix.reshape(-1, kv_seq) if per_key else tokens.kv_positions < prefix.reshape(-1, 1)
        tokens = dataclasses.replace(tokens, kv_positions=jnp.where(inside, _BEFORE_ALL, tokens.kv_positions))
    return tokens


def _plan_blocks(
    maps: list[BlockSparse], batch_shape: tuple[int, ...], q_heads: int, q_seq: int, kv_seq: int
) -> BlockOperands | None:
    if not maps:
        return None
    if len({piece.block_size for piece in maps}) > 1:
        raise ValueError(
            f"mask combines BlockSparse of block sizes {', '.join(str(piece.block_size) for piece in maps)}: repeat the "
            "entries of the coarser map to the finer one's blocks"
        )
    rows, columns = maps[0].block_size
    grid = (-(-q_seq // rows), -(-kv_seq // columns))
    for piece in maps:
        if piece.seen.shape[-2:] != grid:
            raise ValueError(
                f"BlockSparse's seen has shape {piece.seen.shape}: with block_size {piece.block_size}, {q_seq} queries and "
                f"{kv_seq} keys its last axes are {grid}"
            )
    what = "BlockSparse's seen"
    seen = _broadcast_masks([piece.seen for piece in maps], what, batch_shape, q_heads, *grid)
    return BlockOperands(seen, rows, columns)


def _plan_dense(
    arrays: list[Array], batch_shape: tuple[int, ...], q_heads: int, q_seq: int, kv_seq: int
) -> Array | None:
    return _broadcast_masks(arrays, "mask", batch_shape, q_heads, q_seq, kv_seq) if arrays else None


def _broadcast_masks(arrays: list[Array], what: str, batch_shape, q_heads: int, rows: int, columns: int) -> Array:
    full = (*batch_shape, q_heads, rows, columns)
    names = "[*batch, q_heads, q_seq, kv_seq]" if what == "mask" else "[*batch, q_heads, q_blocks, kv_blocks]"
    flat = [flat_scores(array, f"{what} is a boolean array", names, full) for array in arrays]
    return functools.reduce(lambda a, b: a & b, flat)


def flat_scores(array: Array, what: str, names: str, full: tuple[int, ...]) -> Array:
    """`array`, which broadcasts to `full` = `[*batch, heads, rows, columns]`, with one batch axis (1, or all of it).

    Raises ValueError, which calls it `what` and the axes `names`, where it does not broadcast.
    """
    try:
        fits = jnp.broadcast_shapes(array.shape, full) == full
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"{what} of shape {array.shape}, which does not broadcast to {names} = {full}")
    array = array.reshape((1,) * (len(full) - array.ndim) + array.shape)
    batch_shape, rest = full[:-3], array.shape[-3:]
    if any(size != 1 for size in array.shape[:-3]):
        return jnp.broadcast_to(array, (*batch_shape, *rest)).reshape(-1, *rest)
    return array.reshape(1, *rest)


def _check_ids(name: str, ids: Array, of: str, batch_shape: tuple[int, ...], seq: int) -> None:
    if ids.shape[-1] != seq:
        hint = " (with kv_ids not given, q_ids serves the keys too: give kv_ids)" if of == "key" else ""
        raise ValueError(
            f"{name} of Segments has shape {ids.shape}, but {of} has {seq} tokens: give one id per token{hint}"
        )
    try:
        fits = jnp.broadcast_shapes(ids.shape[:-1], batch_shape) == batch_shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"{name} of Segments has shape {ids.shape}, whose leading axes do not broadcast to the batch {batch_shape}"
        )


def _flat(array: Array, batch_shape: tuple[int, ...]) -> Array:
    return jnp.broadcast_to(array, (*batch_shape, array.shape[-1])).reshape(-1, array.shape[-1])
