"""`ContextParallel`: sequences over the devices of a mesh axis, and what a call keeps of it."""

import dataclasses
from typing import Any, get_args, Literal

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from ._order import Order

Strategy = Literal["ring", "all_gather", "all_to_all"]
OrderName = Literal["contiguous", "dual_chunk", "striped"]


@dataclasses.dataclass(frozen=True)
class ContextParallel:
    """Sequences are spread over the devices of one mesh axis: `attention(..., context=ContextParallel("context"))`.

    Queries, keys and values are global arrays whose sequence axis is sharded over `axis`; so is the result.

    **Arguments:**

    - `axis`: the name of the mesh axis. The mesh is that of the arrays' types (explicit axes) or of `jax.set_mesh`.
    - `strategy`: what moves. `"ring"`: keys and values go round, from device to device, while each computes with those it
        has (Liu et al. 2023, arXiv:2310.01889); memory per device falls with the number of devices. `"all_gather"`: each
        device gathers all keys and values. `"all_to_all"`: each device gets whole sequences of some heads (Jacobs et al. 2023,
        arXiv:2309.14509), so query heads must divide.
    - `order`: how tokens lie in the arrays. `"contiguous"`: in order, which leaves devices idle under a causal mask.
        `"dual_chunk"`: of 2n chunks device r holds chunks r and 2n-1-r, so that all have equal work under a causal mask.
        `"striped"`: tokens are dealt in turn, `stripe` at a time (Brandon et al. 2023, arXiv:2311.09431); equal work under
        windows and documents too. `eqx_attn.sharding.reorder` puts arrays in this order.
    - `stripe`: tokens of one stripe. The default of 1 balances to the token; the kernels tell whole blocks from masked ones by
        the extremes of their positions, so that longer stripes gain them nothing. A `BlockSparse` mask needs stripes
        that are multiples of its blocks.

    Positions of masks, ranks inside `Segments` and dropout mean the original order; ids, explicit positions, bias and boolean
    masks are given in the arrays' order, as the arrays are. Raises ValueError for unknown names.
    """

    axis: str
    strategy: Strategy = "ring"
    order: OrderName = "contiguous"
    stripe: int = 1

    def __post_init__(self):
        if not isinstance(self.axis, str):
            raise TypeError(f"ContextParallel's axis is {self.axis!r}: give the name of one mesh axis")
        for name, known in (("strategy", get_args(Strategy)), ("order", get_args(OrderName))):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"ContextParallel's {name} is {getattr(self, name)!r}: it is one of {', '.join(known)}"
                )
        if not isinstance(self.stripe, int) or isinstance(self.stripe, bool) or self.stripe < 1:
            raise ValueError(f"ContextParallel's stripe is {self.stripe!r}: it counts tokens; give an int >= 1")
        if self.stripe != 1 and self.order != "striped":
            raise ValueError(
                f"ContextParallel's stripe is {self.stripe} with order={self.order!r}: stripes are order='striped'"
            )

    def order_on(self, mesh: Mesh | AbstractMesh) -> Order:
        """The order on the devices of a mesh."""
        return Order(self.order, self.stripe, mesh.shape[self.axis])


@dataclasses.dataclass(frozen=True)
class Placement:
    """How the sequences of one call lie on the devices of an axis; static.

    `seen[q_rank][kv_rank]` says whether the tokens of two devices may see each other, where positions alone decide; None
    where data does. Then the extremes of `summary_blocks` blocks of each device's tokens tell.
    """

    axis: str
    order: Order
    strategy: str
    mesh: Mesh | AbstractMesh
    seen: tuple[tuple[bool, ...], ...] | None
    bias_dimensions: tuple[str | None, ...] = ()

    @property
    def devices(self) -> int:
        """How many the axis has."""
        return self.order.devices

    @property
    def summary_blocks(self) -> int:
        """In how many blocks the extremes of a device's tokens are taken."""
        return self.order.summary_blocks()


def mesh_of(context: ContextParallel, *arrays: Any) -> Mesh | AbstractMesh:
    """The mesh that has the context's axis: that of the arrays' types, the current one, or that of concrete arrays.

    Raises ValueError where there is none, or where the axis is already manual.
    """
    meshes = [jax.typeof(x).sharding.mesh for x in arrays] + [jax.sharding.get_abstract_mesh()]
    concrete = [x.sharding for x in arrays if isinstance(x, jax.Array) and not isinstance(x, Tracer)]
    meshes += [sharding.mesh for sharding in concrete if isinstance(sharding, NamedSharding)]
    for mesh in meshes:
        if mesh is not None and context.axis in mesh.axis_names:
            if context.axis in mesh.manual_axes:
                raise ValueError(
                    f"context={context}: axis {context.axis!r} is manual here, inside a jax.shard_map over it; call attention "
                    "outside of it, or leave the axis out of shard_map's axis_names: arrays are global along it"
                )
            return mesh
    found = [mesh.axis_names for mesh in meshes if mesh is not None and mesh.axis_names]
    raise ValueError(
        f"context={context}: no mesh here has an axis {context.axis!r}"
        + (f", only {found[0]}" if found else "")
        + "; use `with jax.set_mesh(mesh):`, or arrays that are sharded over explicit axes"
    )
