"""What is known of the checked-in kernels: compiled for which devices, verified on which.

Both files hold one entry a spec, `{"digest": ..., KEY: {device: details}}`. An entry counts only while the digest is
that of the kernel's body, so a changed kernel loses its record.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from .files import replace


@dataclasses.dataclass(frozen=True)
class Record:
    """One such file below `generated/`; `key` names what its entries map."""

    file_name: str
    key: str

    def read(self, folder: Path) -> dict[str, dict[str, Any]]:
        """All entries, by the spec's name; none where the file does not exist yet."""
        path = folder / self.file_name
        return json.loads(path.read_text()) if path.exists() else {}

    def lookup(self, entries: dict[str, dict[str, Any]], name: str, digest: str) -> dict[str, Any]:
        """What `entries` say of the kernel `name` whose body has this digest: device -> details."""
        entry = entries.get(name, {})
        return entry.get(self.key, {}) if entry.get("digest") == digest else {}

    def add(self, folder: Path, found: dict[str, tuple[str, dict[str, Any]]], known: set[str]) -> None:
        """Adds `{name: (digest, {device: details})}`; entries of specs outside `known` are dropped."""
        entries = {name: entry for name, entry in self.read(folder).items() if name in known}
        for name, (digest, devices) in found.items():
            entries[name] = {"digest": digest, self.key: {**self.lookup(entries, name, digest), **devices}}
        replace(folder / self.file_name, json.dumps(entries, indent=1, sort_keys=True) + "\n")


COMPILED = Record("COMPILED.json", "targets")
VERIFIED = Record("VERIFIED.json", "devices")
