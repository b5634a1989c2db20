"""A folder of serialised executables and the manifest that tells what each is for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxengine.config.engine_config import ConfigError

MANIFEST = "manifest.json"


def make_folder(path: str) -> str:
    """The folder, made where it is missing.

    Raises:
      ConfigError: it holds something else already.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()) and not (folder / MANIFEST).exists():
        raise ConfigError("bundle", path, "a new folder, an empty one, or one that an earlier check wrote")
    return str(folder.resolve())


def write_manifest(path: str, settings: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Names every executable with its target, program, size, digest and the versions that made it."""
    from jaxengine.bench.report import machine

    folder = Path(path)
    entries = []
    for row in rows:
        if "file" in row:
            digest = hashlib.sha256((folder / row["file"]).read_bytes()).hexdigest()
            names = ("target", "program", "file", "serialized_bytes")
            entries.append({**{name: row[name] for name in names}, "sha256": digest})
    content = {"settings": settings, "executables": entries, "made_with": machine()}
    (folder / MANIFEST).write_text(json.dumps(content, indent=1) + "\n")
