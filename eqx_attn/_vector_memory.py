"""Which TPU is lowered for, and how much of its core's vector memory a kernel may use."""

import jax
from jax.sharding import get_abstract_mesh

from ._context import current_target, TPU_TARGETS

_MIB = {"v4": 16, "v5e": 128, "v5p": 64, "v6e": 128, "7x": 64}
_GENERATIONS = {kind: name for name, (kind, _) in TPU_TARGETS.items()}
_GENERATIONS |= {"TPU v5e": "v5e", "TPU v5p": "v5p", "TPU v6e": "v6e", "TPU7": "7x"}  # that JAX knows too


def tpu_generation() -> str | None:
    """The TPU that is lowered for: what `eqx_attn.target` names, or JAX's device; None where neither is known."""
    device = get_abstract_mesh().abstract_device
    kind = device.device_kind if device is not None else None
    if kind is None and jax.default_backend() == "tpu":
        kind = jax.local_devices()[0].device_kind
    return current_target("tpu") or _GENERATIONS.get(kind or "")


def vmem_limit_bytes() -> int:
    """Three quarters of the vector memory of the TPU that is lowered for; where none is known, of the smallest since v5."""
    return _MIB[tpu_generation() or "v5p"] * 2**20 * 3 // 4
