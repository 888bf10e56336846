"""The demo on several devices: rows over the axis "data", their tokens over the axis "context"."""

import contextlib
import dataclasses
from typing import Any

import equinox as eqx
import jax
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec

from ..sharding._context import ContextParallel, OrderName, Strategy

AXES = ("data", "context")


@dataclasses.dataclass(frozen=True)
class Splits:
    """Over how many devices rows and tokens are spread."""

    data: int = 1
    context: int = 1

    @classmethod
    def parse(cls, text: str) -> "Splits":
        """From `"data=2,context=4"`. Raises ValueError for anything else."""
        sizes: dict[str, int] = {}
        for part in text.split(","):
            name, equals, size = part.partition("=")
            if name not in AXES or name in sizes or not equals or not size.isdecimal() or int(size) < 1:
                raise ValueError(f"{part!r} is none of data=N and context=N: write for instance data=2,context=4")
            sizes[name] = int(size)
        return cls(**sizes)

    @property
    def devices(self) -> int:
        """How many devices that takes."""
        return self.data * self.context

    def parallel(self, strategy: Strategy, order: OrderName) -> ContextParallel | None:
        """The context of the model's attention; None where each device has whole rows."""
        return None if self.context == 1 else ContextParallel("context", strategy, order)

    def check(self, batch: int, length: int, context: ContextParallel | None) -> None:
        """Raises ValueError where a batch cannot be dealt to the devices."""
        if batch % self.data:
            raise ValueError(f"--batch {batch} is no multiple of data={self.data}: each device takes as many rows")
        if context is None:
            return
        # `reorder` exchanges equal parts of each device's tokens, which for stripes are those of one device for another.
        parts = {"contiguous": 1, "dual_chunk": 2, "striped": self.context}[context.order]
        if length % (parts * self.context):
            raise ValueError(
                f"--length {length} is no multiple of {parts * self.context}, as context={self.context} takes with order "
                f"{context.order!r}: each device takes as many tokens"
            )

    def mesh(self) -> Mesh:
        """Raises ValueError where there are fewer devices."""
        found = jax.devices()
        if len(found) < self.devices:
            raise ValueError(
                f"--mesh data={self.data},context={self.context} takes {self.devices} devices, and JAX has {len(found)} "
                f"({found[0].platform}): take fewer, or simulate them with JAX_PLATFORMS=cpu"
            )
        sizes = (self.data, self.context)
        return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * 2, devices=found[: self.devices])


def simulate(devices: int) -> None:
    """As many devices of the CPU, unless JAX has counted them already. Other platforms have what they have."""
    with contextlib.suppress(RuntimeError):  # JAX has been in use: `Splits.mesh` says what is missing
        jax.config.update("jax_num_cpu_devices", devices)


def by_rows(tree: Any) -> Any:
    """`tree` inside `jax.jit`, with the first axis of its arrays over "data" if there is a mesh."""
    return _constrained(tree, PartitionSpec("data"))


def replicated(tree: Any) -> Any:
    """`tree` inside `jax.jit`, with its arrays whole on each device if there is a mesh."""
    return _constrained(tree, PartitionSpec())


def _constrained(tree: Any, spec: PartitionSpec) -> Any:
    if set(AXES) - set(jax.sharding.get_abstract_mesh().axis_names):
        return tree
    return jax.tree.map(lambda x: lax.with_sharding_constraint(x, spec) if eqx.is_array(x) else x, tree)
