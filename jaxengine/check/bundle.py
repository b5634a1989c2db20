"""A bundle: folder of serialised executables, with a manifest that describes each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxengine.config.engine_config import ConfigError

MANIFEST = "manifest.json"


def make_folder(path: str) -> str:
    """Create the folder if it is missing; return its absolute path.

    Raises:
      ConfigError: the folder holds files that are not a bundle.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()) and not (folder / MANIFEST).exists():
        raise ConfigError("bundle", path, "a new folder, an empty one, or one that an earlier check wrote")
    return str(folder.resolve())


def write_manifest(path: str, settings: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Write the manifest: target, program, size and SHA-256 of every executable, and the versions that compiled them.

    path: the bundle's folder, which must hold the executables that the rows name as "file". Rows without a "file", of
    programs that did not compile, are left out. settings: model and options of the check.
    """
    from jaxengine.results import machine

    folder = Path(path)
    entries = []
    for row in rows:
        if "file" in row:
            digest = hashlib.sha256((folder / row["file"]).read_bytes()).hexdigest()
            names = ("target", "program", "file", "serialized_bytes")
            entries.append({**{name: row[name] for name in names}, "sha256": digest})
    content = {"settings": settings, "executables": entries, "made_with": machine()}
    (folder / MANIFEST).write_text(json.dumps(content, indent=1) + "\n")
