"""Calls whose sequences lie on a mesh axis, in one of its orders, against the oracle in the original order."""

import dataclasses
import math

import calls
import jax
import jax.numpy as jnp
import numpy as np
import oracle
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import eqx_attn
from eqx_attn._masks import And, Dense, Mask
from eqx_attn.sharding import positions

AXES = ("data", "fsdp", "tensor", "context")


def mesh_of(splits: dict[str, int], kind: AxisType) -> jax.sharding.Mesh:
    count = math.prod(splits.values())
    return jax.make_mesh(
        tuple(splits.values()), tuple(splits), axis_types=(kind,) * len(splits), devices=jax.devices()[:count]
    )


@dataclasses.dataclass(frozen=True)
class Stored:
    """The order in which arrays of a call are stored on a mesh."""

    mesh: jax.sharding.Mesh
    context: eqx_attn.ContextParallel

    def places(self, seq: int) -> np.ndarray:
        devices = self.mesh.shape[self.context.axis]
        return positions(self.context, seq, devices) if seq % devices == 0 else np.arange(seq)

    def stored(self, x, **axes: str):
        """`x` with the named axes (`seq=1`, ...) in the stored order."""
        for axis in axes.values():
            if x.shape[axis] > 1:
                x = jnp.take(x, self.places(x.shape[axis]), axis=axis)
        return x

    def original(self, x: np.ndarray, *axes: int) -> np.ndarray:
        for axis in axes:
            if x.shape[axis] > 1:
                x = np.take(x, np.argsort(self.places(x.shape[axis])), axis=axis)
        return x

    def put(self, x, *dims: str):
        """`x` as a trainer shards it: batch over data x fsdp, heads over tensor, tokens over the context's axis."""
        axes = dict(batch=("data", "fsdp"), heads=("tensor",), seq=(self.context.axis,))
        spec = []
        for size, dim in zip(x.shape, dims, strict=True):
            names = tuple(name for name in axes.get(dim, ()) if name in self.mesh.shape)
            parts = math.prod(self.mesh.shape[name] for name in names)
            spec.append(names if names and size % parts == 0 else None)
        return jax.device_put(x, NamedSharding(self.mesh, PartitionSpec(*spec)))

    def mask(self, mask: Mask) -> Mask:
        if isinstance(mask, And):
            return And(tuple(map(self.mask, mask.masks)))
        if isinstance(mask, eqx_attn.Segments):
            return jax.tree.map(lambda x: self.stored(x, seq=x.ndim - 1), mask)
        if isinstance(mask, Dense):
            return Dense(self.stored(mask.visible, rows=-2, columns=-1))
        return mask


def check(mesh, context, inputs, mask=calls.FULL, extras=calls.NONE, dropout=None, **options):
    """Output, lse, largest scores and all gradients against the oracle, with random cotangents."""
    if dropout is not None:
        kept = calls.kept_by(dropout, oracle.score_shape(inputs))
        extras = dataclasses.replace(extras, kept=kept, rate=dropout.rate)
    wanted = oracle.expected(inputs, mask, extras=extras)
    found = results(mesh, context, inputs, mask, extras, dropout, **options)
    assert found.keys() == wanted.keys()
    oracle.assert_matches(found, wanted, wanted)


def results(mesh, context, inputs, mask, extras, dropout=None, implementation="xla", **options):
    """As `calls.results`, in the original order, of arrays in the stored order."""
    order = Stored(mesh, context)
    seq = 1 if inputs.layout == "bshd" else 2
    dims = ("batch", "seq", "heads", "dim") if seq == 1 else ("batch", "heads", "seq", "dim")
    kept = {
        name: order.put(order.stored(getattr(inputs, name), seq=seq), *dims)
        for name in ("query", "key", "value", "dout")
    }
    kept["dlse"] = order.put(order.stored(inputs.dlse, seq=2), "batch", "heads", "seq")
    bias = None if extras.bias is None else order.stored(extras.bias, rows=2, columns=3)
    with jax.set_mesh(mesh):
        found = calls.results(
            dataclasses.replace(inputs, **kept),
            order.mask(mask),
            dataclasses.replace(extras, bias=bias),
            dropout,
            implementation=implementation,
            context=context,
            **options,
        )
    axes = dict(out=(seq,), dq=(seq,), dk=(seq,), dv=(seq,), lse=(2,), dbias=(2, 3))
    return {name: order.original(x, *axes.get(name, ())) for name, x in found.items()}
