"""Which mesh axes shard which dimension of a call: read from the arrays' types, checked, and shared out."""

import dataclasses
from collections.abc import Iterable, Mapping

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, get_abstract_mesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from ._partition_dims import CONTEXT, Dims, HEADS

Axes = tuple[str, ...]


def mesh_of(arrays: Iterable[Array]) -> AbstractMesh:
    """The mesh of the context, or else of the arrays' types; an empty one where there is none."""
    mesh = get_abstract_mesh()
    if mesh.empty:
        meshes = (getattr(jax.typeof(x), "sharding", None) for x in arrays)
        return next((x.mesh for x in meshes if x is not None and not x.mesh.empty), mesh)
    return mesh


def axes_of_type(mesh: Mesh | AbstractMesh, kind: AxisType) -> Axes:
    """The names of a mesh's axes of one kind."""
    return tuple(name for name, of in zip(mesh.axis_names, mesh.axis_types, strict=True) if of == kind)


def entries(spec: PartitionSpec, ndim: int) -> tuple[Axes, ...]:
    """The axes of each dimension of an array."""
    whole = (*spec, *(None,) * (ndim - len(spec)))
    return tuple(() if x is None else x if isinstance(x, tuple) else (x,) for x in whole)


def spec_of(axes: Iterable[Axes]) -> PartitionSpec:
    """The inverse of `entries`."""
    return PartitionSpec(*(None if not x else x[0] if len(x) == 1 else x for x in axes))


def typed_entries(x: Array) -> tuple[Axes, ...]:
    """The axes of each dimension that the type of an array names: explicit ones."""
    return entries(jax.typeof(x).sharding.spec, x.ndim)


def resharded(mesh: AbstractMesh, x: Array, spec: PartitionSpec) -> Array:
    """`x` with this spec in its type."""
    if typed_entries(x) == entries(spec, x.ndim) and not jax.typeof(x).sharding.mesh.empty:
        return x
    return jax.reshard(x, NamedSharding(mesh, spec))


@dataclasses.dataclass(frozen=True)
class Division:
    """The mesh axes that share out each dimension of a call.

    `of_heads` are those of the query's heads beyond the axes that shard the key's heads as well: there each device holds
    more kv heads than it needs, and takes those of its own query heads.
    """

    sizes: Mapping[str, int]
    axes: Mapping[str, Axes]
    of_heads: Axes = ()

    def spec(self, dims: Dims) -> PartitionSpec:
        """The spec of an array."""
        return spec_of(self.axes.get(name, ()) if name else () for name in dims.names)

    def size(self, axes: Axes) -> int:
        """The number of devices along some axes."""
        return int(np.prod([self.sizes[axis] for axis in axes]))

    def parts(self, name: str) -> int:
        """How many parts a dimension is in."""
        return self.size(self.axes.get(name, ()))

    def summed(self, dims: Dims) -> Axes:
        """The axes over which the gradient of an array is summed: those that share out scores, but not the array."""
        own = {axis for name in dims.names if name for axis in self.axes.get(name, ())}
        shared = [axis for name in ("batch", "q_heads") for axis in self.axes.get(name, ())]
        return tuple(axis for axis in shared if axis not in own)


WHOLE = Division({}, {})
"""Everything on one device."""


def divide(
    arrays: Mapping[str, tuple[Dims, tuple[Axes, ...]]], sizes: Mapping[str, int], q_heads: int, kv_heads: int
) -> Division:
    """The division that query, key and value have: by name, their dimensions and the axes of each.

    Raises ValueError where they do not fit one another, or where more is sharded than batch and heads.
    """
    axes = _agreed(arrays, sizes)
    of_query, of_key = (_several(axes.get(name, ()), sizes) for name in HEADS)
    named = _named(arrays)
    if of_query[: len(of_key)] != of_key:
        raise ValueError(
            f"the heads of query and key are sharded over different axes, {of_query} and {of_key} ({named}): shard both over "
            "the same, or the heads of key and value over none, for instance jax.reshard(key, ...)"
        )
    if of_query and any("packed_heads" in dims.names for dims, _ in arrays.values()):
        raise ValueError(
            f"the heads of query are sharded over {of_query}, and those of key and value are packed ({named}): give key and "
            "value apart to eqx_attn.attention, or shard the batch alone"
        )
    beyond = of_query[len(of_key) :]
    division = Division(sizes, axes, beyond)
    parts = division.size(of_query)
    if kv_heads % parts == 0:
        return Division(sizes, {**axes, "kv_heads": axes.get("q_heads", ())})
    if (q_heads // kv_heads) % (q_heads // parts):
        raise ValueError(
            f"{q_heads} query heads over {parts} devices are {q_heads // parts} each, which for {kv_heads} key/value heads cuts "
            f"groups of {q_heads // kv_heads} heads apart ({named}): shard heads over a number of devices that divides "
            f"kv_heads, or that kv_heads divides"
        )
    return division


def _several(axes: Axes, sizes: Mapping[str, int]) -> Axes:
    """Those of more than one device: others are in types, and divide nothing."""
    return tuple(axis for axis in axes if sizes[axis] > 1)


def _agreed(arrays, sizes: Mapping[str, int]) -> dict[str, Axes]:
    """The axes of each dimension, on which all arrays that have it agree but for axes of one device."""
    axes: dict[str, Axes] = {}
    first: dict[str, str] = {}
    for array, (dims, found) in arrays.items():
        for name, of in zip(dims.names, found, strict=True):
            if name is None:
                continue
            if _several(of, sizes) and name not in HEADS and not name.startswith(("batch", "mapped")):
                raise ValueError(_not_shared_out(array, name, dims, found, sizes))
            if _several(axes.setdefault(name, of), sizes) != _several(of, sizes):
                raise ValueError(
                    f"{first[name]} and {array} are sharded differently along {name} ({_named(arrays)}): reshard one of them "
                    f"before the call, for instance jax.reshard({array}, ...)"
                )
            first.setdefault(name, array)
    used = [axis for name, of in axes.items() if name != "kv_heads" for axis in _several(of, sizes)]
    if len(set(used)) < len(used):
        raise ValueError(f"one mesh axis shards two dimensions of the call ({_named(arrays)}): use each for one")
    # An axis of one device stays in the type of the first dimension that has it, which is one of the query and the output.
    kept: set[str] = set()
    for name, of in axes.items():
        if name == "kv_heads":
            axes[name] = _several(of, sizes)
        else:
            axes[name] = tuple(axis for axis in of if axis not in kept)
            kept.update(of)
    return axes


def _not_shared_out(array: str, name: str, dims: Dims, found, sizes: Mapping[str, int]) -> str:
    spec = spec_of(found)
    where = f"{array} of dimensions [{', '.join(x or '1' for x in dims.names)}] is sharded as {spec}"
    if name.removeprefix(CONTEXT) in ("q_seq", "kv_seq"):
        axes = next(of for n, of in zip(dims.names, found, strict=True) if n == name)
        axis = _several(axes, sizes)[0]
        return (
            f"{where}, along its sequence: say how the devices share it, with context=eqx_attn.ContextParallel({axis!r}), or "
            f"gather it first with jax.reshard({array}, ...)"
        )
    if name == "packed_heads":
        return (
            f"{where}, along heads that are packed: a shard would not hold query, key and value of the same heads; give "
            "query, key and value apart to eqx_attn.attention, or shard the batch alone"
        )
    return f"{where}, along its head dim: each device needs whole heads; jax.reshard({array}, ...) first"


def _named(arrays) -> str:
    return ", ".join(f"{array}: {spec_of(found)}" for array, (_, found) in arrays.items())
