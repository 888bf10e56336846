"""What lies in `generated/` against what should: comparing and writing."""

import contextlib
import dataclasses
import os
import tempfile
from pathlib import Path

from .matrix import checked_in
from .render import render


def package_root() -> Path:
    """The folder that holds `codegen`, `templates` and `generated`: a checkout's root, or `eqx_attn` in a wheel."""
    return Path(__file__).parent.parent


def generated_folder() -> Path:
    """Where the checked-in kernels lie."""
    return package_root() / "generated"


def is_checkout() -> bool:
    """Whether this is a working copy, as opposed to an installed package, whose files are not ours to rewrite."""
    return (package_root() / "pyproject.toml").exists()


@dataclasses.dataclass(frozen=True)
class Difference:
    """How a folder of kernels differs from the rendered ones. All are paths relative to the folder."""

    missing: tuple[str, ...]
    drifted: tuple[str, ...]
    orphaned: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.missing or self.drifted or self.orphaned)


def expected() -> dict[str, str]:
    """The path below `generated/` and the text of every checked-in kernel."""
    return {f"{spec.name}.py": render(spec) for spec in checked_in()}


def compare(folder: Path, texts: dict[str, str]) -> Difference:
    """How the Python files below `folder` differ from `texts`, a dictionary from relative path to text."""
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*.py")}
    return Difference(
        missing=tuple(sorted(texts.keys() - found)),
        drifted=tuple(sorted(path for path in texts.keys() & found if _read(folder / path) != texts[path])),
        orphaned=tuple(sorted(found - texts.keys())),
    )


def write(folder: Path, texts: dict[str, str]) -> Difference:
    """Writes what is missing or drifted, deletes what is orphaned, and returns what it found to do."""
    difference = compare(folder, texts)
    for path in (*difference.missing, *difference.drifted):
        replace(folder / path, texts[path])
    for path in difference.orphaned:
        (folder / path).unlink()
        with contextlib.suppress(OSError):  # A folder that still holds something stays.
            (folder / path).parent.rmdir()
    return difference


def replace(path: Path, text: str) -> None:
    """Writes a file at once: a reader sees the old text or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.chmod(temporary, 0o644)  # mkstemp's own mode is private.
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _read(path: Path) -> str:
    return path.read_bytes().decode("utf-8", errors="replace")
