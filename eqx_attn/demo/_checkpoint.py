"""A training run in a file: a line of JSON with what it was, and the arrays of the model and the optimiser.

Arrays are whole in it, whatever devices held them, so that a run continues on any number of devices.
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import equinox as eqx

from ._train import History

_FORMAT = "eqx_attn.demo 1"


def save(path: Path, recipe: dict[str, Any], history: History, arrays: Any) -> None:
    """Writes a checkpoint; an earlier one is replaced when the new one is complete.

    `recipe` is JSON: what has to be the same where the run continues.
    """
    header = dict(format=_FORMAT, recipe=recipe, history=dataclasses.asdict(history))
    incomplete = path.with_name(path.name + ".incomplete")
    with incomplete.open("wb") as file:
        file.write(json.dumps(header).encode() + b"\n")
        eqx.tree_serialise_leaves(file, arrays)
    os.replace(incomplete, path)


def load(path: Path, recipe: dict[str, Any], like: Any) -> tuple[History, Any]:
    """History and arrays of a checkpoint; `like` has arrays of the same shapes.

    Raises ValueError where the file is no checkpoint, or that of a run with another recipe.
    """
    try:
        with path.open("rb") as file:
            header = _header(path, file.readline())
            for name, value in recipe.items():
                if (found := header["recipe"].get(name)) != value:
                    option = "--" + name.replace("_", "-")
                    raise ValueError(f"--resume {path} is a run with {option} {found}, and here it is {value}")
            history = header["history"]
            for losses in ("train", "validation"):
                history[losses] = [(step, loss) for step, loss in history[losses]]
            return History(**history), eqx.tree_deserialise_leaves(file, like)
    except (OSError, EOFError, RuntimeError) as error:
        raise ValueError(f"--resume {path} cannot be read: {error}") from error


def _header(path: Path, line: bytes) -> dict[str, Any]:
    try:
        header = json.loads(line)
        if header["format"] == _FORMAT:
            return header
    except (ValueError, TypeError, KeyError):
        pass
    raise ValueError(f"--resume {path} is no checkpoint of this demo: give a file that --checkpoint wrote")
