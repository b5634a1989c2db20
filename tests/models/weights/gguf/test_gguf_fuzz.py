"""Damaged GGUF files: whatever is in them, they are read or refused with a ModelFileError, in little memory."""

from __future__ import annotations

import random
import struct
import tracemalloc

import pytest

from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.weights.gguf import header
from jaxengine.models.weights.gguf.dequant import FORMATS
from jaxengine.models.weights.gguf.file import GGUFFile
from tests.models.weights.gguf.gguf_writer import (
    ARRAY,
    BOOL,
    F64,
    I32,
    STRING,
    U8,
    U32,
    U64,
    gguf_bytes,
    llama_metadata,
)

NUM_FILES, NUM_FILES_THOROUGH = 500, 10_000
MAX_PEAK_BYTES = 1 << 20
LENGTHS = (0, 1, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**61, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1)


def valid_file() -> bytes:
    """One tensor of every type, one metadata entry of every kind: about 4 KiB."""
    metadata = llama_metadata(
        **{
            "general.alignment": (U32, 32),
            "tokenizer.ggml.tokens": (ARRAY, (STRING, ["a", "", "Ġthe", "<s>"])),
            "tokenizer.ggml.token_type": (ARRAY, (I32, [1, 1, 1, 3])),
            "nested": (ARRAY, (ARRAY, [(U8, [1, 2]), (STRING, ["x"])])),
            "yes": (BOOL, True),
            "large": (U64, 2**40),
            "real": (F64, 0.5),
        }
    )
    tensors = [
        (f"blk.{kind}.ffn_up.weight", (form.values, 2), kind, bytes(range(1, 1 + form.nbytes)) * 2)
        for kind, form in FORMATS.items()
    ]
    tensors.append(("blk.0.attn_q.weight", (2, 16), 0, bytes(128)))
    return gguf_bytes(metadata, tensors)


def damaged(raw: bytes, rng: random.Random) -> bytes:
    """One to four wounds; most of them where the header is, as tensor data has no wrong values."""
    data = bytearray(raw)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) if rng.random() < 0.2 else min(len(data), 1400))
        match rng.randrange(6):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at] = rng.randrange(256)
            case 2:
                data[at : at + 8] = struct.pack("<Q", rng.choice(LENGTHS))
            case 3:
                data[at : at + 4] = struct.pack("<I", rng.choice(LENGTHS) & 0xFFFFFFFF)
            case 4:
                del data[at : at + rng.choice((1, 8, 32, len(data)))]
            case 5:
                data[at:at] = data[at : at + rng.choice((1, 8, 32, 64))]
        if not data:
            break
    return bytes(data)


@pytest.fixture
def traced():
    tracemalloc.start()
    yield
    tracemalloc.stop()


def test_damaged_files(tmp_path, traced, thorough):
    raw, rng, path = valid_file(), random.Random(20261120), tmp_path / "model.gguf"
    count, refused = NUM_FILES_THOROUGH if thorough else NUM_FILES, 0
    for number in range(count):
        path.write_bytes(damaged(raw, rng))
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        try:
            with GGUFFile(path) as file:
                for name in file.names():
                    file.read(name)
        except ModelFileError:
            refused += 1
        _, peak = tracemalloc.get_traced_memory()
        assert peak - before < MAX_PEAK_BYTES, f"file {number} took {peak - before} bytes"
    # Damage that hits tensor data or text goes unnoticed, all other damage does not.
    assert count // 2 < refused < count


def test_the_undamaged_file_is_read(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(valid_file())
    with GGUFFile(path) as file:
        assert sum(file.read(name).size for name in file.names()) == 2 * sum(f.values for f in FORMATS.values()) + 32


def test_a_crowd_of_empty_strings_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxengine.models.weights.gguf.header.MAX_ITEMS", 1000)
    path = tmp_path / "model.gguf"
    for value in ((STRING, [""] * 1000), (ARRAY, [(U8, [])] * 300)):
        path.write_bytes(gguf_bytes(llama_metadata(crowd=(ARRAY, value)), []))
        with pytest.raises(ModelFileError, match="more than 1000 strings and lists"):
            GGUFFile(path)
    path.write_bytes(gguf_bytes(llama_metadata(crowd=(ARRAY, (STRING, [""] * 900))), []))
    with GGUFFile(path) as file:
        assert len(file.metadata["crowd"]) == 900


def test_counts_of_the_header_have_limits(tmp_path, monkeypatch):
    """Lowered ones: files that reach the real limits take megabytes."""
    path = tmp_path / "model.gguf"
    path.write_bytes(valid_file())
    with GGUFFile(path) as file:
        num_tensors = len(list(file.names()))
    for limit, value, message in (
        ("MAX_TENSORS", num_tensors - 1, f"tensors, at most {num_tensors - 1} are allowed"),
        ("MAX_ITEMS", 12, "metadata holds more than 12 strings and lists"),
        ("MAX_NESTING", 1, "arrays nested deeper than 1"),
    ):
        with monkeypatch.context() as lowered, pytest.raises(ModelFileError, match=message):
            lowered.setattr(header, limit, value)
            GGUFFile(path)
