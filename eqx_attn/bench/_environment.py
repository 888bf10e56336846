"""What a result was measured with: device, versions, commit."""

import contextlib
import importlib.metadata
import os
import subprocess
from pathlib import Path

import jax

from .._codegen import REPOSITORY

_PACKAGES = ("jax", "jaxlib", "triton", "libtpu", "equinox", "numpy")
_PEERS = ("nvidia-cudnn-cu13", "fa4-jax", "flash-attn3-jax", "tokamax")  # where installed


def versions() -> dict[str, str]:
    """Versions of what decides speed, as far as it is installed, and of CUDA or XLA as the backend tells it."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            module = _imported_version(package)
            if module:
                found[package] = module
    for package in _PEERS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    backend = " ".join(str(jax.devices()[0].client.platform_version).split())
    return {**found, "backend": backend[:120]}


def _imported_version(package: str) -> str | None:
    """The version of a package that lies on the path without metadata."""
    try:
        return getattr(__import__(package), "__version__", None)
    except ImportError:
        return None


def commit(given: str | None = None) -> str:
    """The commit that was measured: what is given, else `$EQX_ATTN_COMMIT`, else what git says, else "unknown"."""
    if chosen := given or os.environ.get("EQX_ATTN_COMMIT"):
        return chosen
    try:
        head = _git("rev-parse", "HEAD")
        return head + ("-modified" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    found = subprocess.run(["git", "-C", str(Path(REPOSITORY)), *arguments], capture_output=True, text=True, check=True)
    return found.stdout.strip()


def device_kind() -> str:
    """The first device's name, such as "NVIDIA H200"."""
    return jax.devices()[0].device_kind
