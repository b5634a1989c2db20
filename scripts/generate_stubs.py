"""Writes the Python stubs of jaxengine/server/grpc/*.proto into the same folder: `python scripts/generate_stubs.py`.

They are committed and shipped; tests/jaxengine/server/grpc/test_grpc_stubs.py holds them to the protos.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path("jaxengine/server/grpc")
# The tools stamp their own version into the stubs, and older runtimes then refuse them. These stubs use nothing that is
# younger than protobuf 6 and grpcio 1.70, which pyproject.toml asks for.
STAMPS = (
    r"# Protobuf Python Version: .*\n",
    r"from google\.protobuf import runtime_version as _runtime_version\n",
    r"_runtime_version\.ValidateProtobufRuntimeVersion\((?:.|\n)*?\n\)\n",
    r"import warnings\n",
    r"GRPC_GENERATED_VERSION = (?:.|\n)*?\n    \)\n",
)
# What nothing uses and would be half of their size: slots and numbers of fields in the types, places in the serialised
# descriptor, which only protobuf without C needs to copy a message's descriptor, classes of grpcio's experimental API,
# and those of other servers.
UNUSED = (
    r"\n\nclass \w+Servicer:(?:.|\n)*",
    r"(?m)^ *__slots__ = \(.*\)\n",
    r"(?m)^ *[A-Z0-9_]+_FIELD_NUMBER: _ClassVar\[int\]\n",
    r"(?m)^  _globals\['\w+'\]\._serialized_(?:start|end)=\d+\n",
    r"\n\n # This class is part of an EXPERIMENTAL API\.\n(?:(?!\n\n\n).|\n(?!\n\n))*",
)


def generate() -> dict[Path, str]:
    """Return the contents of every stub, by its path in the repository. Raises SystemExit if protoc fails."""
    protos = sorted(str(path.relative_to(ROOT)) for path in (ROOT / FOLDER).glob("*.proto"))
    includes = Path(grpc_tools.__file__).parent / "_proto"
    with tempfile.TemporaryDirectory() as folder:
        outputs = [f"--{kind}_out={folder}" for kind in ("python", "pyi", "grpc_python")]
        if protoc.main(["protoc", f"-I{ROOT}", f"-I{includes}", *outputs, *(str(ROOT / name) for name in protos)]):
            raise SystemExit("protoc has failed")
        return {
            path.relative_to(folder): reduced(path.read_text()) for path in sorted((Path(folder) / FOLDER).iterdir())
        }


def reduced(source: str) -> str:
    """Return a stub without the lines in which the tools state their own versions, and without what is UNUSED."""
    for pattern in (*STAMPS, *UNUSED):
        source = re.sub(pattern, "", source)
    return source


if __name__ == "__main__":
    for path, source in generate().items():
        (ROOT / path).write_text(source)
        print(path, file=sys.stderr)
