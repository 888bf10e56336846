"""Whether what Triton kernels need is installed, and in versions that are known to work."""

import os
import warnings
from typing import Any

import jax

_TRITON_VERSIONS = ("3.9",)
_JAX_VERSIONS = ("0.11", "0.12")
_INSTALL = "install what is known to work with `pip install 'eqx_attn[cuda]'` (triton 3.9.0, jax 0.11.2 or 0.12.0.1)"


def require_triton() -> Any:
    """Imports Triton and returns it.

    **Raises:** `ImportError` naming what to install if Triton or JAX is missing or of a version not known to work.
    """
    try:
        import triton
    except ImportError as error:
        raise ImportError(f"eqx_attn: Triton kernels need Triton, which is not installed; {_INSTALL}.") from error
    versions = (("triton", triton.__version__, _TRITON_VERSIONS), ("jax", jax.__version__, _JAX_VERSIONS))
    for name, found, known in versions:
        if ".".join(found.split(".")[:2]) not in known:
            raise ImportError(f"eqx_attn: {name} {found} is not known to work for Triton kernels; {_INSTALL}.")
    return triton


def require_launcher() -> Any:
    """Imports jaxlib's Triton launcher, which also registers it with XLA, and returns it.

    **Raises:** `ImportError` naming what to install if the CUDA plugin is missing or of another version than jaxlib.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            from jaxlib import gpu_triton
        except ImportError as error:
            raise ImportError(f"eqx_attn: this jaxlib has no Triton launcher; {_INSTALL}.") from error
    if not hasattr(gpu_triton, "TritonKernelCall"):
        reason = f" ({caught[0].message})" if caught else ", missing or of another version than jaxlib"
        raise ImportError(f"eqx_attn: Triton kernels need JAX's CUDA plugin{reason}; {_INSTALL}.")
    return gpu_triton


def ptx_version() -> int:
    """The PTX version to emit, such as 88 for 8.8: at most 88, and one that the installed CUDA takes.

    The environment variable `EQX_ATTN_PTX_VERSION` overrides it.
    """
    if chosen := os.environ.get("EQX_ATTN_PTX_VERSION"):
        if not chosen.isdecimal():
            raise ValueError(f"EQX_ATTN_PTX_VERSION must be a number such as 88, found {chosen!r}.")
        return int(chosen)
    try:
        from jax._src.lib import cuda_versions
    except ImportError:
        return 88
    if cuda_versions is None:  # no plugin
        return 88
    cuda = cuda_versions.cuda_runtime_build_version()  # 13000 is CUDA 13.0
    major, minor = cuda // 1000, cuda % 1000 // 10
    # CUDA 12.6 and 12.5 both have PTX 8.5.
    return 88 if major >= 13 else min(88, 80 + minor - (minor >= 6))
