"""One attention call, resolved: which implementation serves it on which platform, with which tiles."""

import dataclasses
from typing import Any

from ._codegen import KernelSpec, Layout, MaskKind
from ._context import CallContext
from ._operands import Tile, Tiles
from .sharding._context import Placement


@dataclasses.dataclass(frozen=True)
class Route:
    """How one platform computes the call. `spec` is None where the implementation is not a generated kernel."""

    implementation: str
    spec: "KernelSpec | None"
    tiles: Tiles | Tile


@dataclasses.dataclass(frozen=True)
class Call:
    """Everything about a call that is not an array. Hashable, so that it can be a static argument.

    `routes` maps a platform ("cuda", "tpu") to its route; `default` serves every other platform. `context` is what was in
    force at the call; the backward runs after it has ended and restores it. With a `placement` the arrays are global, and
    the routes serve what one device of its axis computes.
    """

    layout: str
    default: Route
    routes: tuple[tuple[str, Route], ...] = ()
    context: CallContext = CallContext((), False)
    placement: Placement | None = None


@dataclasses.dataclass(frozen=True)
class Request:
    """What resolution looks at: shapes, dtype and which features the call uses (`options`, as `KernelSpec` names them).

    `score_mod` and `mask_mod` are the digests of functions. `dealt`: tokens may not lie in their original order.
    """

    layout: str
    dtype: str
    batch: int
    q_seq: int
    kv_seq: int
    q_heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    mask: str
    options: tuple[str, ...] = ()
    deterministic: bool | None = None
    score_mod: str = ""
    mask_mod: str = ""
    dealt: bool = False

    def spec(self, target: Any) -> KernelSpec:
        """The kernel of this request on `target`."""
        options: dict[str, Any] = dict.fromkeys(self.options, True)
        options |= dict(scoremod=self.score_mod, maskmod=self.mask_mod)
        return KernelSpec(target, Layout(self.layout), MaskKind(self.mask), self.qk_dim, self.v_dim, **options)
