"""How much of a TPU core's vector memory a kernel may use."""

import jax
from jax.sharding import get_abstract_mesh

from ._context import current_target, TPU_TARGETS

_MIB = {"v4": 16, "v5e": 128, "v5p": 64, "v6e": 128, "7x": 64}


def vmem_limit_bytes() -> int:
    """Three quarters of the vector memory of the TPU that is lowered for; of the smallest where none is known."""
    name = tpu_generation()
    return (_MIB[name] if name else min(_MIB.values())) * 2**20 * 3 // 4


def tpu_generation() -> str | None:
    """The TPU that is lowered for, as `target` names it; None where none is known."""
    return current_target("tpu") or _generation_here()


def _generation_here() -> str | None:
    device = get_abstract_mesh().abstract_device
    kind = device.device_kind if device is not None else None
    if kind is None and jax.default_backend() == "tpu":
        kind = jax.local_devices()[0].device_kind
    return next((name for name, (known, _) in TPU_TARGETS.items() if known == kind), None)
