"""Writes the types of the messages in jaxengine/server/grpc/*.proto into the same folder, as *.pyi:
`python scripts/generate_stubs.py`. They are committed and shipped; tests/jaxengine/server/grpc/test_grpc_stubs.py holds
them to the protos.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

import grpc_tools
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path("jaxengine/server/grpc")
# What nothing uses: slots and numbers of fields.
UNUSED = (
    r"(?m)^ *__slots__ = \(.*\)\n",
    r"(?m)^ *[A-Z0-9_]+_FIELD_NUMBER: _ClassVar\[int\]\n",
)


def generate() -> dict[Path, str]:
    """Return the contents of every file of types, by its path in the repository. Raises SystemExit if protoc fails."""
    with tempfile.TemporaryDirectory() as folder:
        compile_protos(f"--pyi_out={folder}")
        return {
            path.relative_to(folder): reduced(path.read_text()) for path in sorted((Path(folder) / FOLDER).iterdir())
        }


def descriptors() -> FileDescriptorSet:
    """Return what protoc makes of the protos. Raises SystemExit if it fails."""
    with tempfile.NamedTemporaryFile() as file:
        compile_protos(f"--descriptor_set_out={file.name}")
        return FileDescriptorSet.FromString(Path(file.name).read_bytes())


def compile_protos(option: str) -> None:
    """Run protoc over all protos with one option. Raises SystemExit if it fails."""
    protos = sorted(map(str, (ROOT / FOLDER).glob("*.proto")))
    includes = Path(grpc_tools.__file__).parent / "_proto"
    if protoc.main(["protoc", f"-I{ROOT}", f"-I{includes}", option, *protos]):
        raise SystemExit("protoc has failed")


def reduced(source: str) -> str:
    """Return a file of types without what is UNUSED."""
    for pattern in UNUSED:
        source = re.sub(pattern, "", source)
    return source


if __name__ == "__main__":
    for path, source in generate().items():
        (ROOT / path).write_text(source)
        print(path, file=sys.stderr)
