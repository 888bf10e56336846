"""From a spec to its module: checked in, else in the user's cache, else rendered now."""

import functools
import importlib.util
import os
import stat
import sys
import tempfile
import types
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ._codegen import digests, KernelSpec, render, REPOSITORY


class KernelCacheError(RuntimeError):
    """A kernel that is not checked in could not be rendered into the cache, or what lies there is not to be trusted."""


@functools.cache
def load_kernel(spec: KernelSpec) -> types.ModuleType:
    """The module of `spec`, whose `forward` and `backward` follow the contract of the generated kernels."""
    checked_in = REPOSITORY / "generated" / f"{spec.name}.py"
    path = checked_in if checked_in.is_file() else _rendered(spec)
    name = f"eqx_attn.generated.{spec.name.replace('/', '.')}"
    module_spec = importlib.util.spec_from_file_location(name, path)
    if module_spec is None or module_spec.loader is None:
        raise KernelCacheError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    module_spec.loader.exec_module(module)
    return module


def is_checked_in(spec: KernelSpec) -> bool:
    """Whether `generated/` holds the kernel, so that nothing needs to be rendered."""
    return (REPOSITORY / "generated" / f"{spec.name}.py").is_file()


def cache_directory() -> Path:
    """Where kernels that are not checked in are kept: `$EQX_ATTN_CACHE_DIR`, else `$XDG_CACHE_HOME/eqx_attn/<version>`."""
    chosen = os.environ.get("EQX_ATTN_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    try:
        release = version("eqx_attn")
    except PackageNotFoundError:
        release = "checkout"
    return base / "eqx_attn" / release


def _rendered(spec: KernelSpec) -> Path:
    if os.environ.get("EQX_ATTN_NO_CODEGEN", "") not in ("", "0"):
        raise KernelCacheError(
            f"the kernel {spec.name} is not checked in and EQX_ATTN_NO_CODEGEN is set: add this spec to codegen/matrix.py and "
            "run python -m codegen, or unset the variable"
        )
    text = render(spec)
    path = cache_directory() / "kernels" / f"{spec.name}.py"
    try:
        cache_directory().mkdir(mode=0o700, parents=True, exist_ok=True)  # one that is there is the user's to arrange
        path.parent.mkdir(parents=True, exist_ok=True)
        for folder in (path.parent, path.parent.parent):
            _keep_private(folder)
        if not path.is_file() or path.read_text() != text:
            _replace(path, text)
    except OSError as error:
        raise KernelCacheError(
            f"the kernel {spec.name} is not checked in and cannot be written to {path.parent} ({error.strerror}): set "
            "EQX_ATTN_CACHE_DIR to a folder that you can write to"
        ) from None
    _check_trusted(path)
    return path


def _keep_private(folder: Path) -> None:
    """What lies here is executed: only its owner may write to it."""
    if folder.stat().st_uid == os.getuid():
        folder.chmod(0o700)


def _replace(path: Path, text: str) -> None:
    """Write in one step, so that another process sees the old file or the new one and never half of it."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _check_trusted(path: Path) -> None:
    for place in (path, path.parent):
        state = place.stat()
        if state.st_uid != os.getuid() or state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise KernelCacheError(
                f"{place} is owned or writable by somebody else, and what it holds would be executed: set EQX_ATTN_CACHE_DIR "
                "to a folder of your own"
            )
    stated, actual = digests(path.read_text())
    if stated != actual:
        raise KernelCacheError(f"{path} is not what was rendered (its digest differs): delete it and try again")
