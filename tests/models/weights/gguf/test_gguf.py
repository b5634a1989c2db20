"""GGUF files as checkpoints: what is read, under which names and in which order, and what is refused."""

from __future__ import annotations

import os
import struct

import ml_dtypes
import numpy as np
import pytest

from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.weights.gguf.file import GGUFFile, unpermute_rows
from jaxengine.models.weights.gguf.layout import GGUFLayout
from tests.models.weights.gguf import gguf_writer as writer
from tests.models.weights.gguf.gguf_writer import (
    ARRAY,
    BOOL,
    F32,
    I32,
    STRING,
    U8,
    U32,
    U64,
    gguf_bytes,
    llama_metadata,
)
from tests.tables import each_row

GGML_F32, GGML_F16, GGML_Q4_0, GGML_Q8_0, GGML_BF16 = 0, 1, 2, 8, 30


def floats(values: np.ndarray) -> bytes:
    return values.astype("<f4").tobytes()


def tensor(name: str, *shape: int, seed: int = 0) -> tuple[writer.Tensor, np.ndarray]:
    """A random float32 tensor as the writer wants it, and its values in row-major shape."""
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return (name, shape[::-1], GGML_F32, floats(values)), values


@pytest.fixture
def opened(tmp_path):
    """Writes bytes to a file and opens it; closes it after the test."""
    files = []

    def open_bytes(raw: bytes) -> GGUFFile:
        path = tmp_path / "model.gguf"
        path.write_bytes(raw)
        files.append(GGUFFile(path))
        return files[-1]

    yield open_bytes
    for file in files:
        file.close()


def test_metadata_of_every_type(opened):
    values = {
        "a.u8": (U8, 200),
        "a.u64": (U64, 2**64 - 1),
        "a.f32": (F32, 0.5),
        "a.yes": (BOOL, True),
        "a.text": (STRING, "grüße"),
        "a.numbers": (ARRAY, (I32, [3, -1])),
        "a.names": (ARRAY, (STRING, ["x", ""])),
        "a.nested": (ARRAY, (ARRAY, [(U8, [1]), (U8, [])])),
    }
    metadata = opened(gguf_bytes(llama_metadata(**values), [])).metadata
    assert {key: metadata[key] for key in list(values)[:5]} == {
        key: value for key, (_, value) in list(values.items())[:5]
    }
    assert metadata["a.yes"] is True
    assert metadata["a.numbers"].dtype == np.int32 and metadata["a.numbers"].tolist() == [3, -1]
    assert metadata["a.names"] == ["x", ""]
    assert [part.tolist() for part in metadata["a.nested"]] == [[1], []]


@each_row(
    ("name", "expected"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("output.weight", "lm_head.weight"),
        ("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("blk.11.attn_k.bias", "model.layers.11.self_attn.k_proj.bias"),
        ("blk.2.attn_v.weight", "model.layers.2.self_attn.v_proj.weight"),
        ("blk.2.attn_output.weight", "model.layers.2.self_attn.o_proj.weight"),
        ("blk.2.attn_q_norm.weight", "model.layers.2.self_attn.q_norm.weight"),
        ("blk.2.attn_k_norm.weight", "model.layers.2.self_attn.k_norm.weight"),
        ("blk.2.attn_norm.weight", "model.layers.2.input_layernorm.weight"),
        ("blk.2.ffn_norm.weight", "model.layers.2.post_attention_layernorm.weight"),
        ("blk.2.ffn_gate.weight", "model.layers.2.mlp.gate_proj.weight"),
        ("blk.2.ffn_up.weight", "model.layers.2.mlp.up_proj.weight"),
        ("blk.2.ffn_down.weight", "model.layers.2.mlp.down_proj.weight"),
        ("rope_freqs.weight", "rope_freqs.weight"),
        ("blk.2.ffn_gate_exps.weight", "model.layers.2.mlp.experts.{expert}.gate_proj.weight"),
        ("blk.2.ffn_gate_shexp.weight", "blk.2.ffn_gate_shexp.weight"),
        ("blk.02.attn_q.weight", "blk.02.attn_q.weight"),
    ],
)
def test_names(name, expected):
    assert GGUFLayout().canonical_name(name) == expected


@pytest.mark.parametrize("version", [2, 3])
def test_tensors_in_row_major_order(opened, version):
    entry, values = tensor("blk.0.ffn_up.weight", 6, 32)
    file = opened(gguf_bytes(llama_metadata(), [entry], version=version))
    name = "model.layers.0.mlp.up_proj.weight"
    assert list(file.names()) == [name] and file.shape(name) == (6, 32)
    np.testing.assert_array_equal(file.read(name), values)


def test_half_types_keep_their_dtype_and_blocks_become_float32(opened):
    values = np.linspace(-2, 2, 64, dtype=np.float32).reshape(2, 32)
    blocks = b"\x00\x3c" + bytes(range(32)) + b"\x00\x38" + bytes(range(32))
    tensors = [
        ("blk.0.attn_v.weight", (32, 2), GGML_F16, values.astype(np.float16).tobytes()),
        ("blk.0.ffn_down.weight", (32, 2), GGML_BF16, values.astype(ml_dtypes.bfloat16).tobytes()),
        ("token_embd.weight", (32, 2), GGML_Q8_0, blocks),
    ]
    file = opened(gguf_bytes(llama_metadata(), tensors))
    half, brain, quantised = (file.read(name) for name in file.names())
    assert (half.dtype, brain.dtype, quantised.dtype) == (np.float16, ml_dtypes.bfloat16, np.float32)
    np.testing.assert_array_equal(half, values.astype(np.float16))
    np.testing.assert_array_equal(brain, values.astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(quantised, np.outer([1, 0.5], np.arange(32)))


def test_a_tensor_of_many_chunks(opened, monkeypatch):
    monkeypatch.setattr(
        "jaxengine.models.weights.gguf.file.CHUNK_BYTES", 250
    )  # two rows of Q8_0 blocks, and one is left over
    blocks = b"".join(b"\x00\x3c" + bytes([number] * 32) for number in range(9))
    file = opened(gguf_bytes(llama_metadata(), [("output.weight", (96, 3), GGML_Q8_0, blocks)]))
    np.testing.assert_array_equal(file.read("lm_head.weight"), np.repeat(np.arange(9), 32).reshape(3, 96))


def permute_as_the_converter_does(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's convert_hf_to_gguf.py, LlamaModel.permute."""
    shape = rows.shape
    return rows.reshape(num_heads, 2, shape[0] // num_heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


@pytest.mark.parametrize(("part", "rows", "heads"), [("q", 32, 4), ("k", 16, 2)])
def test_query_and_key_rows_of_llama_files_are_put_back(opened, part, rows, heads):
    rng = np.random.default_rng(1)
    weight, bias = rng.standard_normal((rows, 8), np.float32), rng.standard_normal(rows, np.float32)
    tensors = [
        (f"blk.0.attn_{part}.weight", (8, rows), GGML_F32, floats(permute_as_the_converter_does(weight, heads))),
        (f"blk.0.attn_{part}.bias", (rows,), GGML_F32, floats(permute_as_the_converter_does(bias, heads))),
    ]
    file = opened(gguf_bytes(llama_metadata(), tensors))
    name = f"model.layers.0.self_attn.{part}_proj"
    np.testing.assert_array_equal(file.read(f"{name}.weight"), weight)
    np.testing.assert_array_equal(file.read(f"{name}.bias"), bias)


@pytest.mark.parametrize("chunk", [1, 300, 1 << 18])
def test_parts_are_cut_out_of_the_whole(opened, monkeypatch, chunk):
    monkeypatch.setattr("jaxengine.models.weights.gguf.file.CHUNK_BYTES", chunk)
    entries = [tensor("blk.0.attn_q.weight", 32, 8)[0], tensor("blk.0.attn_q.bias", 32)[0]]
    blocks = b"".join(b"\x00\x3c" + bytes([number] * 32) for number in range(12))
    file = opened(gguf_bytes(llama_metadata(), [*entries, ("output.weight", (96, 4), GGML_Q8_0, blocks)]))
    weight, bias, head = (file.read(name) for name in file.names())
    names = list(file.names())
    # Rows of 4 heads of 8, in and across heads.
    for rows in (slice(0, 32), slice(8, 16), slice(5, 6), slice(3, 21), slice(31, 32)):
        np.testing.assert_array_equal(file.read(names[0], rows), weight[rows])
        np.testing.assert_array_equal(file.read(names[0], rows, slice(2, 5)), weight[rows, 2:5])
        np.testing.assert_array_equal(file.read(names[1], rows), bias[rows])
    np.testing.assert_array_equal(file.read(names[2], slice(1, 3), slice(30, 70)), head[1:3, 30:70])


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_rows_of_other_architectures_stay(opened, architecture):
    entry, values = tensor("blk.0.attn_q.weight", 32, 8)
    metadata = {
        "general.architecture": (STRING, architecture),
        f"{architecture}.attention.head_count": (U32, 4),
    }
    file = opened(gguf_bytes(metadata, [entry]))
    np.testing.assert_array_equal(file.read("model.layers.0.self_attn.q_proj.weight"), values)


def test_unpermute_rows_by_hand():
    # Two heads of four rows: stored 0 2 1 3 means rows 0 1 | 2 3 of the two halves.
    assert unpermute_rows(np.array([0, 2, 1, 3, 4, 6, 5, 7]), 2).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


EMBEDDING, _ = tensor("token_embd.weight", 4, 32)
NORM, _ = tensor("output_norm.weight", 32)


def file_with(*tensors: writer.Tensor, **wrong) -> bytes:
    return gguf_bytes(llama_metadata(), list(tensors), **wrong)


def metadata_with(**values: writer.Value) -> bytes:
    return gguf_bytes(llama_metadata(**values), [])


def raw_metadata(raw: bytes) -> bytes:
    """A file whose only metadata entry is given as bytes."""
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + raw


SMALL = file_with(EMBEDDING, NORM)
NESTED: writer.Value = (U8, [])
for _ in range(5):
    NESTED = (ARRAY, [NESTED])

REFUSED = {
    "empty": (b"", "empty"),
    "three bytes": (b"GGU", "announced"),
    "other magic": (file_with(magic=b"GGML"), "not a GGUF file"),
    "version 1": (file_with(version=1), "version 1"),
    "version 4": (file_with(version=4), "version 4"),
    "big-endian": (file_with(version=3 << 24), "big-endian"),
    "too many tensors for the file": (file_with(num_tensors=2**64 - 1), "entries announced"),
    "more tensors than there are": (
        file_with(EMBEDDING, num_tensors=2),
        "bytes announced|entries announced|dimensions",
    ),
    "too many keys for the file": (file_with(num_keys=2**63), "entries announced"),
    "key longer than the file": (raw_metadata(struct.pack("<Q", 2**62) + bytes(64)), "at most 65535"),
    "text longer than the file": (raw_metadata(writer.text("a") + struct.pack("<IQ", STRING, 2**64 - 1)), "announced"),
    "array longer than the file": (
        raw_metadata(writer.text("a") + struct.pack("<IIQ", ARRAY, U64, 2**61)),
        "announced",
    ),
    "array of texts": (raw_metadata(writer.text("a") + struct.pack("<IIQ", ARRAY, STRING, 2**40)), "announced"),
    "key given twice": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + writer.key_value("a", U8, 1) * 2,
        "key given twice",
    ),
    "value type 13": (raw_metadata(writer.text("a") + struct.pack("<I", 13) + bytes(8)), "unknown value type 13"),
    "array of type 13": (raw_metadata(writer.text("a") + struct.pack("<IIQ", ARRAY, 13, 0)), "unknown value type 13"),
    "bool of 2": (raw_metadata(writer.text("a") + struct.pack("<IB", BOOL, 2)), "bool must be 0 or 1"),
    "text not UTF-8": (metadata_with(a=(STRING, b"\xff\xfe")), "not UTF-8"),
    "deep nesting": (metadata_with(a=(ARRAY, NESTED)), "nested deeper"),
    "alignment 0": (metadata_with(**{"general.alignment": (U32, 0)}), "power of two"),
    "alignment 24": (metadata_with(**{"general.alignment": (U32, 24)}), "power of two"),
    "alignment 2**31": (metadata_with(**{"general.alignment": (U32, 2**31)}), "power of two"),
    "alignment a text": (metadata_with(**{"general.alignment": (STRING, "32")}), "power of two"),
    "no architecture": (gguf_bytes({}, []), "architecture None"),
    "other architecture": (
        gguf_bytes({"general.architecture": (STRING, "mamba")}, []),
        "supported: llama, qwen2, qwen3",
    ),
    "misspelt architecture": (
        gguf_bytes({"general.architecture": (STRING, "qwen_3")}, []),
        "'qwen_3' is not supported, the nearest is qwen3; supported: llama",
    ),
    "no head count": (gguf_bytes({"general.architecture": (STRING, "llama")}, []), "positive number, got None"),
    "head count 0": (metadata_with(**{"llama.attention.head_count": (U32, 0)}), "positive number, got 0"),
    "split": (metadata_with(**{"split.count": (U32, 3)}), "split model"),
    "tensor twice": (file_with(EMBEDDING, EMBEDDING), "tensor name given twice"),
    "two names for one": (file_with(NORM, ("model.norm.weight", *NORM[1:])), "stands for model.norm.weight"),
    "no dimension": (file_with(("x", (), GGML_F32, bytes(4))), "1 to 4 dimensions, got 0"),
    "five dimensions": (file_with(("x", (1,) * 5, GGML_F32, bytes(4))), "1 to 4 dimensions, got 5"),
    "dimension 0": (file_with(("x", (32, 0), GGML_F32, b"")), "is 0"),
    "product overflows": (file_with(("x", (2**32, 2**32, 2**32), GGML_F32, bytes(64))), "cut short"),
    "tensor type 10": (file_with(("x", (256,), 10, bytes(84))), r"tensor type Q2_K \(10\) is not supported"),
    "tensor type 23": (file_with(("x", (256,), 23, bytes(136))), r"tensor type IQ4_XS \(23\) is not supported"),
    "tensor type 4": (file_with(("x", (32,), 4, bytes(64))), "tensor type 4 is not supported"),
    "half a block": (file_with(("x", (48,), GGML_Q4_0, bytes(64))), "multiple of 32"),
    "unaligned data": (file_with(NORM, offsets=[8]), "not aligned to 32"),
    "data beyond the end": (file_with(NORM, offsets=[64]), "cut short"),
    "data far beyond the end": (file_with(NORM, offsets=[2**64 - 32]), "cut short"),
    "overlap": (file_with(EMBEDDING, NORM, offsets=[0, 480]), "overlaps"),
    "experts without matrices": (
        file_with(tensor("blk.0.ffn_up_exps.weight", 8)[0]),
        "matrices of at most 4096 experts",
    ),
    "too many experts": (file_with(tensor("blk.0.ffn_up_exps.weight", 4097, 1)[0]), "matrices of at most 4096 experts"),
    "odd head": (file_with(tensor("blk.0.attn_q.weight", 12, 32)[0]), "no even number for 4 heads"),
    "cut in the data": (SMALL[:-32], "cut short"),
    "cut in the header": (SMALL[:200], "announced|cut short"),
    "bytes at the end": (SMALL + bytes(32), "follow the last tensor"),
}


@pytest.mark.parametrize(("raw", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(opened, raw, message):
    with pytest.raises(ModelFileError, match=message) as refusal:
        opened(raw)
    assert refusal.value.path.endswith("model.gguf") and refusal.value.path in str(refusal.value)


def test_the_small_file_itself_is_fine(opened):
    assert set(opened(SMALL).names()) == {"model.embed_tokens.weight", "model.norm.weight"}


def test_what_is_no_file(tmp_path):
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)
    for path in (tmp_path, fifo, tmp_path / "absent", tmp_path / "a\0b"):
        with pytest.raises(ModelFileError, match="must be a regular file|cannot be read"):
            GGUFFile(path)


def test_reading_after_the_file_shrank_or_was_closed(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(SMALL)
    with GGUFFile(path) as file:
        os.truncate(path, len(SMALL) - 64)
        with pytest.raises(ModelFileError, match="became shorter"):
            file.read("model.norm.weight")
    with pytest.raises(ModelFileError, match="closed"):
        file.read("model.norm.weight")
    with pytest.raises(ModelFileError, match="no such tensor"):
        file.read("lm_head.weight")


def test_a_refused_file_is_closed(opened):
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    for _ in range(20):
        with pytest.raises(ModelFileError):
            opened(SMALL[:-32])
    if before is None:
        pytest.skip("this system does not list open files")
    assert len(os.listdir("/proc/self/fd")) == before


def test_names_from_the_file_reach_a_message_short_and_on_one_line(opened):
    with pytest.raises(ModelFileError) as refusal:
        opened(metadata_with(**{"evil\n" * 2000: (BOOL, True), "general.alignment": (STRING, "9" * 9999)}))
    assert len(str(refusal.value)) < 500
    with pytest.raises(ModelFileError) as refusal:
        opened(raw_metadata(writer.text("evil\n" * 2000) + struct.pack("<I", 13)))
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 500
