"""The stubs are what the protos say, and stay readable for every runtime that pyproject.toml allows."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]
FOLDER = ROOT / "jaxengine" / "server" / "grpc"


def script():
    spec = importlib.util.spec_from_file_location("generate_stubs", ROOT / "scripts" / "generate_stubs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generating_the_stubs_again_changes_nothing():
    made = {ROOT / path: source for path, source in script().generate().items()}
    kept = {path for path in FOLDER.iterdir() if "_pb2" in path.name}
    assert set(made) == kept and len(made) == 6
    changed = [path.name for path, source in made.items() if source != path.read_text()]
    assert not changed, f"run scripts/generate_stubs.py: {changed}"


def test_no_stub_asks_for_the_version_of_the_tools():
    for path in FOLDER.glob("*_pb2*.py"):
        assert not re.search(r"runtime_version|GRPC_GENERATED_VERSION|\d+\.\d+\.\d+", path.read_text()), path.name
