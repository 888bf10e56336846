"""Tile sizes of GPU kernels that were found by timing them: `python -m eqx_attn.bench --tune`.

A table is one JSON file for a device: by target, head dims, kind of kernel ("causal", "window_segments", ...), direction
("fwd", "bwd") and field of `Tiles`. The user's own, in the cache, goes before the repository's.
"""

import contextlib
import contextvars
import dataclasses
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from ._codegen import KernelSpec, Layout
from ._context import current_target, current_targets, interpreting
from ._kernels import cache_directory
from ._operands import Tile, Tiles

REPOSITORY_TABLES = Path(__file__).parent / "tiles"
_STANDS_FOR = {"sm_90a": "NVIDIA H200"}
"""The device whose table serves an architecture that is lowered for and not there, and devices of it without a table."""

_FIELDS = {field.name for field in dataclasses.fields(Tile)}


@dataclasses.dataclass
class Trial:
    """Tiles that a kernel runs with while they are tried out. `used` says whether a call asked for them."""

    spec: KernelSpec
    fields: dict[str, Tile]
    used: bool = False


_trial: contextvars.ContextVar[Trial | None] = contextvars.ContextVar("trial", default=None)


@contextlib.contextmanager
def trial(spec: KernelSpec, fields: dict[str, Tile]) -> Iterator[Trial]:
    """Inside, calls that `spec` serves are traced with these tiles, in this thread; those of no table in other fields."""
    token = _trial.set(tried := Trial(spec, fields))
    try:
        yield tried
    finally:
        _trial.reset(token)


def with_tuned(spec: KernelSpec, dtype: str, tiles: Tiles) -> Tiles:
    """`tiles`, with those that were tuned for this kernel and device in their place. Tables hold none for float32."""
    tried = _trial.get()
    if tried is not None and tried.spec == spec:
        tried.used = True
        return dataclasses.replace(tiles, **tried.fields)
    if dtype == "float32":
        return tiles
    for path in reversed(tables_here()):  # the first has the last word
        tiles = dataclasses.replace(tiles, **tuned_tiles(path, spec))
    return tiles


def tables_here() -> tuple[Path, ...]:
    """The tables of the device that is lowered for, the most specific one first; none under an interpreter."""
    if interpreting():
        return ()
    if current_targets():
        device = _STANDS_FOR.get(current_target("cuda") or "")
        return () if device is None else (table_path(REPOSITORY_TABLES, device),)
    device = jax.local_devices()[0]
    if device.platform != "gpu":
        return ()
    names = [device.device_kind]
    if device.compute_capability == "9.0":
        names.append(_STANDS_FOR["sm_90a"])
    own = table_path(user_tables(), device.device_kind)
    return (own, *(table_path(REPOSITORY_TABLES, name) for name in dict.fromkeys(names)))


def user_tables() -> Path:
    """The folder of the user's own tables."""
    return cache_directory() / "tiles"


def table_path(folder: Path, device: str) -> Path:
    """The file of a device, `NVIDIA_H200.json` for an "NVIDIA H200"."""
    return folder / (re.sub(r"[^A-Za-z0-9]+", "_", device).strip("_") + ".json")


def tuned_tiles(path: Path, spec: KernelSpec) -> dict[str, Tile]:
    """The fields of `Tiles` that a table holds for a kernel. A layout without an entry of its own has that of `bshd`."""
    if spec.scoremod or spec.maskmod:
        return {}
    kinds = table_of(path).get(str(spec.target), {}).get(dims_of(spec), {})
    plain = kind_of(dataclasses.replace(spec, layout=Layout.BSHD)) if spec.layout is Layout.BHSD else None
    entry = kinds.get(kind_of(spec)) or kinds.get(plain, {})
    found = {field: sizes["tile"] for fields in entry.values() for field, sizes in fields.items()}
    return {field: Tile(**sizes) for field, sizes in found.items() if sizes.keys() <= _FIELDS}


def dims_of(spec: KernelSpec) -> str:
    """The head dims as a table has them, "qk128_v128"."""
    return f"qk{spec.qk_dim}_v{spec.v_dim}"


def kind_of(spec: KernelSpec) -> str:
    """The kernel's mask and options, and its layout unless that is `bshd`, as a table has them."""
    layout = [] if spec.layout is Layout.BSHD else [str(spec.layout)]
    return "_".join([str(spec.mask), *spec.options, *layout])


def table_of(path: Path) -> dict[str, Any]:
    """What a table holds; nothing where there is no such file, or one that cannot be read."""
    try:
        return _read(path, path.stat().st_mtime_ns)
    except (OSError, ValueError):
        return {}


@functools.lru_cache(maxsize=8)
def _read(path: Path, changed: int) -> dict[str, Any]:
    return json.loads(path.read_text())
