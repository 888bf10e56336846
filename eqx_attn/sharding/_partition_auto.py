"""The partitioning step where shardings are only found when a program is compiled: on mesh axes of type Auto."""

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence

from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from .._resolve import warn_once
from ._context import Placement
from ._locations import without_locations
from ._partition_axes import Axes, Division, entries, spec_of, WHOLE
from ._partition_dims import CONTEXT, Dims, DIVIDED
from ._placed_dims import with_context


def partition_when_compiled(
    function: Callable,
    leaves: Sequence[Array],
    dims: Sequence[Dims],
    results: Sequence[Dims],
    q_heads: int,
    kv_heads: int,
    placement: Placement | None = None,
) -> list[Array]:
    """`function(division, *leaves)` for the division that Shardy's propagation finds.

    `dims` and `results` are the dimensions of arguments and results. What propagation leaves sharded otherwise than the
    division asks for is resharded, with one warning.
    """
    shape = dict(q_heads=q_heads, kv_heads=kv_heads)
    for x, of in zip(leaves, dims, strict=True):
        shape.update((name, size) for name, size in zip(of.names, x.shape, strict=True) if name and name not in shape)

    def partition(mesh, argument_shapes, result_shapes):
        del result_shapes
        found = [entries(x.sharding.spec, len(x.shape)) for x in argument_shapes]
        division = _division_of(mesh, dims, found, shape, placement)
        wanted = [division.spec(of) for of in dims]
        _warn_of_moves(dims, found, wanted, None if placement is None else placement.axis)

        def shard(*leaves):
            return without_locations(functools.partial(function, division), leaves)

        shardings = [NamedSharding(mesh, division.spec(of)) for of in results]
        return mesh, shard, tuple(shardings), tuple(NamedSharding(mesh, spec) for spec in wanted)

    @custom_partitioning
    def whole(*leaves):
        return tuple(function(WHOLE, *leaves))

    whole.def_partition(partition, **_rule(dims, results, q_heads, kv_heads))
    return list(whole(*leaves))


def _rule(dims: Sequence[Dims], results: Sequence[Dims], q_heads: int, kv_heads: int) -> dict:
    """Shardy's rule: query heads are key heads times the heads of a group, so that both can be sharded together."""
    packed = any("packed_heads" in of.names for of in dims)
    group = q_heads // kv_heads
    if packed or group == 1:
        of_query, sizes = "q_heads" if packed else "kv_heads", {}
    elif kv_heads == 1:
        of_query, sizes = "group", {}
    else:
        of_query, sizes = "(kv_heads group)", dict(group=group)
    whole: list[str] = ["q_heads"] if packed else []

    def factors(of: Dims) -> str:
        words = []
        for name in of.names:
            if name == "q_heads":
                words.append(of_query)
            elif name and (name == "kv_heads" and kv_heads > 1 or name.startswith(("batch", "mapped", CONTEXT))):
                words.append(name)
            elif name and name not in DIVIDED:
                words.append(name)
                whole.append(name)
            else:
                words.append(f"one{len(whole)}")
                whole.append(words[-1])
        return " ".join(words)

    rule = f"{', '.join(map(factors, dims))} -> {', '.join(map(factors, results))}"
    # Shardy wants them in the order of the rule.
    replicated = [name for name in dict.fromkeys(re.findall(r"\w+", rule)) if name in whole]
    return dict(sharding_rule=rule, need_replication_factors=tuple(replicated), **sizes)


def _division_of(
    mesh: Mesh, dims: Sequence[Dims], found: Sequence[tuple[Axes, ...]], shape: Mapping, placement: Placement | None
) -> Division:
    """What the arguments are sharded over, as far as each dimension divides and no axis is used twice."""
    sizes, used = dict(mesh.shape), set[str]() if placement is None else {placement.axis}
    axes: dict[str, Axes] = {}

    def fitting(name: str, of: Axes, fits: Callable[[int], bool]) -> Axes:
        kept = []
        for axis in of:
            if axis in used or not fits(math.prod(sizes[x] for x in (*kept, axis))):
                break
            kept.append(axis)
        used.update(kept)
        return tuple(kept)

    names = [name for of in dims for name in of.names if name and name.startswith(("mapped", "batch"))]
    for name in dict.fromkeys(names):
        axes[name] = fitting(name, _first(name, dims, found), lambda parts, size=shape[name]: size % parts == 0)
    q_heads, kv_heads = shape["q_heads"], shape["kv_heads"]
    group = q_heads // kv_heads

    def fits(parts):
        return kv_heads % parts == 0 or (q_heads % parts == 0 and group % (q_heads // parts) == 0)

    packed = any("packed_heads" in of.names for of in dims)
    axes["q_heads"] = () if packed else fitting("q_heads", _first("q_heads", dims, found), fits)
    division = _with_kv_heads(Division(sizes, axes), kv_heads)
    return division if placement is None else with_context(placement, division)


def _first(name: str, dims: Sequence[Dims], found: Sequence[tuple[Axes, ...]]) -> Axes:
    """The axes of a dimension in the first array that is sharded along it."""
    for of, spec in zip(dims, found, strict=True):
        for dim, axes in zip(of.names, spec, strict=True):
            if dim == name and axes:
                return axes
    return ()


def _with_kv_heads(division: Division, kv_heads: int) -> Division:
    """Key heads over as many of the query heads' axes as divide them; of the rest each device takes its own."""
    of_query = division.axes["q_heads"]
    shared: list[str] = []
    for axis in of_query:
        if kv_heads % division.size((*shared, axis)):
            break
        shared.append(axis)
    return Division(division.sizes, {**division.axes, "kv_heads": tuple(shared)}, of_query[len(shared) :])


def _warn_of_moves(
    dims: Sequence[Dims],
    found: Sequence[tuple[Axes, ...]],
    wanted: Sequence[PartitionSpec],
    context: str | None,
) -> None:
    """Warns where an array loses axes along which it is sharded, other than the context's; to gain some costs nothing."""
    moved = []
    for of, old, spec in zip(dims, found, wanted, strict=True):
        new = entries(spec, len(old))
        before, after = ([tuple(axis for axis in of if axis != context) for of in axes] for axes in (old, new))
        if any(now[: len(axes)] != axes for axes, now in zip(before, after, strict=True)):
            names = ", ".join(name or "1" for name in of.names)
            moved.append(f"[{names}] from {spec_of(old)} to {spec}")
    if moved:
        warn_once(
            f"eqx_attn.attention reshards {'; '.join(dict.fromkeys(moved))}. Devices share out batch and heads, and all arrays "
            "of a call alike: shard its inputs and what follows it so; for sequences over devices give "
            "context=eqx_attn.ContextParallel(axis)"
        )
