"""Which keys a query may see: masks, how they compose, and what a kernel receives of them."""

from collections.abc import Callable
from typing import Literal

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Integer

from ._segments import ids_from_lengths, ranks_from_lengths, ranks_within_ids

Alignment = Literal["top_left", "bottom_right"]


class Mask(eqx.Module):
    """Base of all masks. `a & b` lets a query see a key where both do."""

    @staticmethod
    def from_function(function: Callable) -> "Mask":
        """A query sees the keys for which `function(batch, q_head, q_index, kv_index)` is True.

        >>> import eqx_attn
        >>> near = eqx_attn.Mask.from_function(lambda batch, q_head, q_index, kv_index: abs(q_index - kv_index) < 8)
        >>> mask = eqx_attn.Causal() & near

        The function is traced once, with int32 scalars, and becomes part of the kernel. It may close over arrays and
        index them, and use what is elementwise in `jax.numpy`; `attention` raises ValueError, which names the line, for what
        kernels have no code for. `batch` counts the examples of the call's batch axes; indices are those of
        the whole arrays (with a `context`, of the original order), on every device and under `jax.vmap`.

        Raises TypeError where `function` cannot be called.
        """
        from ._mask_function import FromFunction

        return FromFunction(function)

    def __and__(self, other: "Mask | Bool[Array, '...']") -> "Mask":
        return And((self, as_mask(other)))

    def __rand__(self, other: "Mask | Bool[Array, '...']") -> "Mask":
        return And((as_mask(other), self))


class Full(Mask):
    """Every query sees every key."""


class Causal(Mask):
    """A query sees the keys at its own position and before.

    `alignment="top_left"` gives query and key of one index the same position; `"bottom_right"` does so for the last
    query and the last key (of each id, with `Segments`).
    """

    alignment: Alignment = eqx.field(static=True, default="top_left")

    def __check_init__(self):
        _check_alignment(self.alignment)


class SlidingWindow(Mask):
    """A query sees `left` keys before its own position, that one, and `right` keys after it.

    Both counts are inclusive and None is unbounded: `SlidingWindow(0, 0)` sees its own position only. `alignment` as for
    `Causal`. Raises ValueError for negative counts.
    """

    left: int | None = eqx.field(static=True)
    right: int | None = eqx.field(static=True)
    alignment: Alignment = eqx.field(static=True, default="top_left")

    def __check_init__(self):
        _check_alignment(self.alignment)
        for side in ("left", "right"):
            count = getattr(self, side)
            if count is not None and (not isinstance(count, int | np.integer) or isinstance(count, bool) or count < 0):
                raise ValueError(
                    f"SlidingWindow's {side} is {count!r}: it counts the keys that a query sees on that side of its own "
                    "position; give an int >= 0, or None for no bound"
                )


class Segments(Mask):
    """A token sees only keys of its own segment: packed documents, padding, cross-attention between packed rows.

    **Arguments:**

    - `q_ids`: integer `[*batch, q_seq]`, the segment of each query. Any distinct ids in any order; ids <= 0 are padding,
        which sees nothing and is seen by nothing.
    - `kv_ids`: integer `[*batch, kv_seq]`, the same for the keys. Defaults to `q_ids`.
    - `q_positions`, `kv_positions`: integer, the token's position inside its segment in *original* order, for `Causal` and
        `SlidingWindow`. The default is its rank among the tokens of its id. Give both or neither (`q_positions` alone
        serves both sides where `kv_ids` is not given).

    Leading axes broadcast against the batch axes of query and key.
    """

    # Only what was given, so that a mask is made at once; the rest follows when a call asks for it.
    _queries: "Integer[Array, '*batch q_seq'] | _Lengths"
    _keys: "Integer[Array, '*batch kv_seq'] | _Lengths | None"
    _q_positions: Integer[Array, "*batch q_seq"] | None
    _kv_positions: Integer[Array, "*batch kv_seq"] | None

    def __init__(self, q_ids, kv_ids=None, q_positions=None, kv_positions=None):
        self_attention = kv_ids is None
        if self_attention and kv_positions is not None:
            raise ValueError(
                "Segments got kv_positions without kv_ids: give kv_ids too, or q_positions alone for both sides"
            )
        if not self_attention and (q_positions is None) != (kv_positions is None):
            missing = "q_positions" if q_positions is None else "kv_positions"
            raise ValueError(f"Segments got positions for one side only: give {missing} too, or neither")
        self._queries = _ids_or_lengths("q_ids", q_ids)
        self._keys = None if self_attention else _ids_or_lengths("kv_ids", kv_ids)
        self._q_positions = _positions("q_positions", q_positions, "q_ids", self._queries)
        self._kv_positions = _positions("kv_positions", kv_positions, "kv_ids", self._keys)

    @classmethod
    def from_lengths(cls, q_lengths, q_seq: int, kv_lengths=None, kv_seq: int | None = None) -> "Segments":
        """Segments that lie one after the other, from their lengths `[*batch, segments]`; the rest of a row is padding.

        `q_seq` and `kv_seq` are the lengths of the rows; lengths of 0 are allowed. Keys default to the queries' lengths.
        """
        queries = _Lengths(_integers("q_lengths", q_lengths), q_seq)
        if kv_lengths is None and kv_seq is None:
            return cls(queries)
        if kv_lengths is None or kv_seq is None:
            raise ValueError("Segments.from_lengths takes kv_lengths and kv_seq together: give both, or neither")
        return cls(queries, _Lengths(_integers("kv_lengths", kv_lengths), kv_seq))

    @property
    def explicit_positions(self) -> bool:
        """Whether positions were given."""
        return self._q_positions is not None

    @property
    def q_ids(self) -> Integer[Array, "*batch q_seq"]:
        """The segment of each query."""
        return _ids_of(self._queries)

    @property
    def kv_ids(self) -> Integer[Array, "*batch kv_seq"]:
        """The segment of each key."""
        return self.q_ids if self._keys is None else _ids_of(self._keys)

    @property
    def q_positions(self) -> Integer[Array, "*batch q_seq"]:
        """Given, or ranks within the ids, which each access computes."""
        return self.positions()[0]

    @property
    def kv_positions(self) -> Integer[Array, "*batch kv_seq"]:
        """Given, or ranks within the ids, which each access computes."""
        return self.positions()[1]

    def positions(self) -> "tuple[Integer[Array, '*batch q_seq'], Integer[Array, '*batch kv_seq']]":
        """Of queries and keys; where both have the same, they are computed once."""
        queries = _ranks_of(self._queries) if self._q_positions is None else self._q_positions
        if self._keys is None:
            return queries, queries
        return queries, _ranks_of(self._keys) if self._kv_positions is None else self._kv_positions

    def dealt(self, places: "Callable[[int], np.ndarray]", with_positions: bool = True) -> "Segments":
        """The same for arrays whose tokens lie in another order; `places(seq)` says which token is at each place.

        Ids and positions that were given are in the arrays' order already. Lengths speak of the original order, and so do
        ranks, which become explicit (`with_positions`).
        """
        q_ids, q_positions = _dealt(self._queries, self._q_positions, places, with_positions)
        kv_ids, kv_positions = _dealt(self._keys, self._kv_positions, places, with_positions)
        return Segments(q_ids, kv_ids, q_positions, kv_positions)


class _Lengths(eqx.Module):
    """Ids by the lengths of their segments."""

    lengths: Integer[Array, "*batch segments"]
    seq: int = eqx.field(static=True)


class PrefixLM(Mask):
    """A query sees the keys at its own position and before, and all keys of the prefix.

    **Arguments:**

    - `prefix`: integers that broadcast to `[*batch]`, how many positions from the first on belong to the prefix (of each
        segment, with `Segments`); or booleans `[*batch, kv_seq]`, True for keys of the prefix.
    - `alignment`: as for `Causal`.
    """

    prefix: Integer[Array, "*batch"] | Bool[Array, "*batch kv_seq"]
    alignment: Alignment = eqx.field(static=True, default="top_left")

    def __init__(self, prefix, alignment: Alignment = "top_left"):
        _check_alignment(alignment)
        prefix = jnp.asarray(prefix)
        if prefix.dtype != jnp.bool_ and not jnp.issubdtype(prefix.dtype, jnp.integer):
            raise TypeError(f"PrefixLM's prefix has dtype {prefix.dtype}: give lengths (integers) or booleans per key")
        self.prefix = prefix
        self.alignment = alignment


class Chunked(Mask):
    """A query sees the keys of its own chunk: positions are cut into chunks of `size`, from position 0 on.

    `Causal() & Chunked(8192)` is the local attention of Llama 4. `alignment` as for `Causal`. Raises ValueError where `size`
    is below 1.
    """

    size: int = eqx.field(static=True)
    alignment: Alignment = eqx.field(static=True, default="top_left")

    def __check_init__(self):
        _check_alignment(self.alignment)
        _check_count("Chunked's size", self.size)


class Dilated(Mask):
    """A query sees every `step`-th key, counted from its own position in both directions.

    `SlidingWindow(255 * 4, 0) & Dilated(4)` sees 256 keys, four apart. `alignment` as for `Causal`. Raises ValueError where
    `step` is below 1.
    """

    step: int = eqx.field(static=True)
    alignment: Alignment = eqx.field(static=True, default="top_left")

    def __check_init__(self):
        _check_alignment(self.alignment)
        _check_count("Dilated's step", self.step)


class BlockSparse(Mask):
    """A map says which blocks of keys each block of queries sees. Blocks that it hides cost nothing.

    **Arguments:**

    - `seen`: booleans that broadcast to `[*batch, q_heads, q_blocks, kv_blocks]`, traced or not.
    - `block_size`: the queries and the keys of a block, an integer for both or a pair. Blocks count from token 0 by row
        numbers, also with `Segments`; the last one may be cut off. Multiples of 128 are served best.
    """

    seen: Bool[Array, "..."]
    block_size: tuple[int, int] = eqx.field(static=True)

    def __init__(self, seen, block_size: int | tuple[int, int] = 128):
        seen = jnp.asarray(seen)
        if seen.dtype != jnp.bool_ or seen.ndim < 2:
            raise TypeError(
                f"BlockSparse's seen has shape {seen.shape} and dtype {seen.dtype}: give booleans "
                "[..., q_blocks, kv_blocks]"
            )
        sizes = block_size if isinstance(block_size, tuple) else (block_size, block_size)
        for size in sizes:
            _check_count("BlockSparse's block_size", size)
        self.seen, self.block_size = seen, sizes


class Dense(Mask):
    """A boolean array, True where a query sees a key; broadcasts to `[*batch, q_heads, q_seq, kv_seq]`."""

    visible: Bool[Array, "..."]


class And(Mask):
    """Visible where all of `masks` are."""

    masks: tuple[Mask, ...]


def as_mask(mask) -> Mask:
    """A `Mask` from what `attention` accepts: a mask, "causal", None (full), or a boolean array (True is visible)."""
    if isinstance(mask, Mask):
        return mask
    if mask is None:
        return Full()
    if isinstance(mask, str):
        if mask == "causal":
            return Causal()
        raise ValueError(
            f'mask is {mask!r}: the only mask with a name is "causal"; others are eqx_attn.SlidingWindow(...), ...'
        )
    if hasattr(mask, "dtype") and hasattr(mask, "shape"):
        if mask.dtype != jnp.bool_:
            raise TypeError(
                f"mask is an array of {mask.dtype}: a mask is boolean, True where a query sees a key (write `mask != 0`)"
            )
        return Dense(jnp.asarray(mask))
    raise TypeError(f"mask is a {type(mask).__name__}: give an eqx_attn mask, 'causal', or a boolean array")


def parts(mask: Mask) -> list[Mask]:
    """The masks that `mask` is the conjunction of, without `Full`."""
    if isinstance(mask, And):
        return [part for inner in mask.masks for part in parts(inner)]
    return [] if isinstance(mask, Full) else [mask]


def _check_alignment(alignment):
    if alignment not in ("top_left", "bottom_right"):
        raise ValueError(f"alignment is {alignment!r}: it is 'top_left' or 'bottom_right'")


def _check_count(what, count):
    if not isinstance(count, int | np.integer) or isinstance(count, bool) or count < 1:
        raise ValueError(f"{what} is {count!r}: give an int >= 1")


def _integers(name: str, values) -> Array:
    values = jnp.asarray(values)
    if not jnp.issubdtype(values.dtype, jnp.integer):
        raise TypeError(f"{name} has dtype {values.dtype}: give integers, for instance {name}.astype(jnp.int32)")
    if values.ndim == 0:
        raise ValueError(f"{name} is a scalar: its last axis names the tokens")
    return values.astype(jnp.int32)


def _ids_or_lengths(name: str, values) -> "Array | _Lengths":
    return values if isinstance(values, _Lengths) else _integers(name, values)


def _ids_of(given: "Array | _Lengths") -> Array:
    return ids_from_lengths(given.lengths, given.seq) if isinstance(given, _Lengths) else given


def _ranks_of(given: "Array | _Lengths") -> Array:
    if isinstance(given, _Lengths):
        return ranks_from_lengths(given.lengths, given.seq)
    return ranks_within_ids(given)


def _dealt(given, positions, places, with_positions):
    if given is None:
        return None, None
    if isinstance(given, _Lengths):
        order = places(given.seq)
        return _ids_of(given)[..., order], _ranks_of(given)[..., order]
    if positions is None and with_positions:
        order = places(given.shape[-1])
        original = _ranks_of(given[..., np.argsort(order)])
        positions = original[..., order]
    return given, positions


def _positions(name: str, positions, ids_name: str, ids) -> Array | None:
    if positions is None:
        return None
    positions = _integers(name, positions)
    if positions.shape[-1] != ids.shape[-1]:
        raise ValueError(
            f"{name} has shape {positions.shape} and {ids_name} {ids.shape}: the last axes, one entry a token, must be equal"
        )
    return positions
