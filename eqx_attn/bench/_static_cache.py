"""What was measured before, by the program's text: compiling takes long, and a sweep that was interrupted goes on."""

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from .._kernels import cache_directory
from ._static import Block, Kernel, Measured
from ._steps import Step, Steps

_FORMAT = 5  # Of what is kept; to be raised whenever measuring itself changes.


def key_of(program_text: str, device: str, options: dict[str, Any]) -> str:
    """Names a lowered program, for a device and with compiler options, under this compiler."""
    versions = [importlib.metadata.version(package) for package in ("libtpu", "jax")]
    parts = [str(_FORMAT), *versions, device, json.dumps(options, sort_keys=True), program_text]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def recall(key: str) -> Measured | str | None:
    """What `keep` was given for this key: a measurement, or what the compiler said against it."""
    try:
        found = json.loads(_path(key).read_text())
    except (OSError, ValueError):
        return None
    if "error" in found:
        return found["error"]
    return Measured(tuple(map(_kernel, found["kernels"])), found["compile_seconds"])


def keep(key: str, result: Measured | str) -> None:
    """Notes a result; where that cannot be written, it is measured again next time."""
    content = {"error": result} if isinstance(result, str) else dataclasses.asdict(result)
    path = _path(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(descriptor, "w") as file:
            json.dump(content, file)
        os.replace(temporary, path)
    except OSError:
        pass


def _path(key: str) -> Path:
    return cache_directory() / "static" / f"{key}.json"


def _kernel(found: dict[str, Any]) -> Kernel:
    steps, block = found["steps"], found["block"]
    if steps is not None:
        masked = tuple(Step(**step) for step in steps["masked"])
        loops = tuple(map(tuple, steps["loops"]))
        steps = Steps(**{**steps, "whole": Step(**steps["whole"]), "masked": masked, "loops": loops})
    return Kernel(
        **{**found, "grid": tuple(found["grid"]), "steps": steps, "block": None if block is None else Block(**block)}
    )
