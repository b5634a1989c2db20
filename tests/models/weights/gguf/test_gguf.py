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
    U16,
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
    assert file.biased == {f"attn_{part}"}


@pytest.mark.parametrize("chunk", [1, 300, 1 << 18])
def test_parts_are_cut_out_of_the_whole(opened, monkeypatch, chunk):
    monkeypatch.setattr("jaxengine.models.weights.gguf.file.CHUNK_BYTES", chunk)
    entries = [tensor("blk.0.attn_q.weight", 32, 8)[0], tensor("blk.0.attn_q.bias", 32)[0]]
    blocks = b"".join(b"\x00\x3c" + bytes([number] * 32) for number in range(12))
    file = opened(gguf_bytes(llama_metadata(), [*entries, ("output.weight", (96, 4), GGML_Q8_0, blocks)]))
    weight, bias, head = (file.read(name) for name in file.names())
    names = list(file.names())
    # Rows of 4 heads of 8, in and across heads.
    for rows in (slice(0, 32), slice(8, 16), slice(5, 6), slice(3, 21), slice(31, 32), slice(0, 0), slice(8, 8)):
        np.testing.assert_array_equal(file.read(names[0], rows), weight[rows])
        np.testing.assert_array_equal(file.read(names[0], rows, slice(2, 5)), weight[rows, 2:5])
        np.testing.assert_array_equal(file.read(names[1], rows), bias[rows])
    np.testing.assert_array_equal(file.read(names[2], slice(1, 3), slice(30, 70)), head[1:3, 30:70])


@pytest.mark.parametrize(
    ("architecture", "kind", "shape"),
    [("qwen2", "weight", (32, 8)), ("qwen3", "weight", (32, 8)), ("olmo", "bias", (32,))],
)
def test_rows_of_other_architectures_stay(opened, architecture, kind, shape):
    entry, values = tensor(f"blk.0.attn_q.{kind}", *shape)
    metadata = {
        "general.architecture": (STRING, architecture),
        f"{architecture}.attention.head_count": (U32, 4),
    }
    file = opened(gguf_bytes(metadata, [entry]))
    np.testing.assert_array_equal(file.read(f"model.layers.0.self_attn.q_proj.{kind}"), values)


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


HEADS: dict[str, writer.Value] = {"qwen3moe.attention.head_count": (U32, 4)}
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
        gguf_bytes({"general.architecture": (STRING, "rwkv7")}, []),
        "supported: llama, qwen2, qwen3",
    ),
    "misspelt architecture": (
        gguf_bytes({"general.architecture": (STRING, "qwen_3")}, []),
        "'qwen_3' is not supported, the nearest is qwen3; supported: llama",
    ),
    "no head count": (gguf_bytes({"general.architecture": (STRING, "llama")}, []), "positive number, got None"),
    "head count 0": (metadata_with(**{"llama.attention.head_count": (U32, 0)}), "positive number, got 0"),
    "split": (metadata_with(**{"split.count": (U16, 3)}), r"first of 3 files, so its name must end in -00001-of-00003"),
    "second part": (
        metadata_with(**{"split.count": (U16, 3), "split.no": (U16, 1)}),
        "is file 2 of 3 of a split model; name the first",
    ),
    "part 3 of 3": (metadata_with(**{"split.count": (U16, 3), "split.no": (U16, 3)}), "got 3 of 3"),
    "parts in words": (metadata_with(**{"split.count": (STRING, "3")}), "got 0 of '3'"),
    "tensor twice": (file_with(EMBEDDING, EMBEDDING), "tensor name given twice"),
    "two names for one": (file_with(NORM, ("model.norm.weight", *NORM[1:])), "stands for model.norm.weight"),
    "no dimension": (file_with(("x", (), GGML_F32, bytes(4))), "1 to 4 dimensions, got 0"),
    "five dimensions": (file_with(("x", (1,) * 5, GGML_F32, bytes(4))), "1 to 4 dimensions, got 5"),
    "dimension 0": (file_with(("x", (32, 0), GGML_F32, b"")), "is 0"),
    "product overflows": (file_with(("x", (2**32, 2**32, 2**32), GGML_F32, bytes(64))), "cut short"),
    "tensor type 9": (file_with(("x", (32,), 9, bytes(36))), r"tensor type Q8_1 \(9\) is not supported"),
    "tensor type 28": (file_with(("x", (4,), 28, bytes(32))), r"tensor type F64 \(28\) is not supported"),
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
    "joined experts of odd rows": (
        file_with(tensor("blk.0.ffn_gate_up_exps.weight", 2, 3, 4)[0]),
        "each in 2 equal parts, got",
    ),
    "an expert twice": (
        file_with(tensor("blk.0.ffn_up_exps.weight", 2, 3, 4)[0], tensor("blk.0.ffn_up.1.weight", 3, 4)[0]),
        "as does blk.0.ffn_up_exps.weight",
    ),
    "joined experts of odd blocks": (
        file_with(("blk.0.ffn_gate_up_exps.bias", (32, 2), GGML_Q4_0, bytes(36))),
        "each in 2 equal parts, got",
    ),
    "two factors of a matrix": (
        file_with(("blk.0.attn_v.scale", (2,), GGML_F32, bytes(8))),
        "must be one factor of model.layers.0.self_attn.v_proj.weight",
    ),
    "factor of no matrix": (
        file_with(("blk.0.attn_v.scale", (1,), GGML_F32, bytes(4))),
        "factor of model.layers.0.self_attn.v_proj.weight, which is not in the file",
    ),
    "factor of no inputs": (
        file_with(("blk.0.attn_v.input_scale", (1,), GGML_F32, bytes(4))),
        "factor of model.layers.0.self_attn.v_proj.weight, which is not in the file",
    ),
    "odd head": (file_with(tensor("blk.0.attn_q.weight", 12, 32)[0]), "not an even number for each of 4 heads"),
    "cut in the data": (SMALL[:-32], "cut short"),
    "cut in the header": (SMALL[:200], "announced|cut short"),
    "bytes at the end": (SMALL + bytes(32), "follow the last tensor"),
}


@pytest.mark.parametrize(("raw", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(opened, raw, message):
    with pytest.raises(ModelFileError, match=message) as refusal:
        opened(raw)
    assert refusal.value.path.endswith("model.gguf") and refusal.value.path in str(refusal.value)


def write_parts(folder, total: int = 3) -> list[np.ndarray]:
    """Writes a model in three files with a matrix each; returns the matrices. total: as the first one says."""
    matrices, count = [], 3
    for number in range(count):
        entry, values = tensor(f"blk.{number}.ffn_up.weight", 2 + number, 32, seed=number)
        of_part: dict[str, writer.Value] = {"split.no": (U16, number), "split.count": (U16, count)}
        own = llama_metadata(**of_part, **{"split.tensors.count": (I32, total)}) if number == 0 else of_part
        path = folder / f"m-Q8-{number + 1:05}-of-{count:05}.gguf"
        path.write_bytes(gguf_bytes(own, [entry]))
        matrices.append(values)
    return matrices


def test_a_split_model_is_read_from_all_of_its_files(tmp_path):
    matrices = write_parts(tmp_path)
    with GGUFFile(tmp_path / "m-Q8-00001-of-00003.gguf") as file:
        names = [f"model.layers.{number}.mlp.up_proj.weight" for number in range(3)]
        assert list(file.names()) == names and file.architecture == "llama"
        for name, values in zip(names, matrices, strict=True):
            np.testing.assert_array_equal(file.read(name), values)
    with pytest.raises(ModelFileError, match="closed"):
        file.read(names[2])


@pytest.mark.parametrize(
    ("named", "change", "message"),
    [
        (
            1,
            lambda folder: (folder / "m-Q8-00002-of-00003.gguf").unlink(),
            "m-Q8-00002-of-00003.gguf must be beside it",
        ),
        (2, lambda folder: None, "is file 2 of 3 of a split model; name the first, m-Q8-00001-of-00003.gguf"),
        (
            1,
            lambda folder: (folder / "m-Q8-00003-of-00003.gguf").replace(folder / "m-Q8-00002-of-00003.gguf"),
            "m-Q8-00003-of-00003.gguf must be beside it",
        ),
        (
            1,
            lambda folder: (folder / "m-Q8-00002-of-00003.gguf").write_bytes(
                (folder / "m-Q8-00003-of-00003.gguf").read_bytes()
            ),
            r"00002-of-00003.gguf: must be file 2 of 3 by its split.no and split.count, got \(2, 3\)",
        ),
        (
            1,
            lambda folder: write_parts(folder, 4),
            "announces 4 tensors, but all files have 3",
        ),
    ],
)
def test_a_split_model_that_is_not_whole(tmp_path, named, change, message):
    write_parts(tmp_path)
    change(tmp_path)
    with pytest.raises(ModelFileError, match=message):
        GGUFFile(tmp_path / f"m-Q8-{named:05}-of-00003.gguf")


@pytest.mark.parametrize("name", ["blk.0.ffn_up.weight", "blk.0.ffn_up.scale"])
def test_no_two_files_of_a_split_model_have_the_same_tensor(tmp_path, name):
    for number in range(2):
        of_part: dict[str, writer.Value] = {"split.no": (U16, number), "split.count": (U16, 2)}
        own = llama_metadata(**of_part) if number == 0 else of_part
        entry = name, (1,), GGML_F32, floats(np.ones(1))
        (tmp_path / f"m-{number + 1:05}-of-00002.gguf").write_bytes(gguf_bytes(own, [entry]))
    with pytest.raises(ModelFileError, match=f"stands for .*, as does {name}"):
        GGUFFile(tmp_path / "m-00001-of-00002.gguf")


def test_experts_stacked_joined_and_one_by_one(opened):
    """The same matrices in the three forms that converters have written."""
    rng = np.random.default_rng(0)
    gate, up = (rng.standard_normal((3, 6, 32)).astype(np.float32) for _ in range(2))

    def entry(name: str, values: np.ndarray) -> writer.Tensor:
        return name, values.shape[::-1], GGML_F32, floats(values)

    stacked = [entry("blk.0.ffn_gate_exps.weight", gate), entry("blk.0.ffn_up_exps.weight", up)]
    joined = [entry("blk.0.ffn_gate_up_exps.weight", np.concatenate([gate, up], axis=1))]
    alone = [
        entry(f"blk.0.ffn_{name}.{expert}.weight", values[expert])
        for name, values in (("gate", gate), ("up", up))
        for expert in range(3)
    ]
    for tensors in (stacked, joined, alone):
        file = opened(gguf_bytes({"general.architecture": (STRING, "qwen3moe"), **HEADS}, tensors))
        assert len(list(file.names())) == 6
        for expert in range(3):
            for name, values in (("gate", gate), ("up", up)):
                found = file.read(f"model.layers.0.mlp.experts.{expert}.{name}_proj.weight")
                np.testing.assert_array_equal(found, values[expert])


def test_factors_of_matrices_multiply_them(opened):
    """As files of NVFP4 have them, one for a matrix or one for each expert; those of inputs are left out."""
    tensors = [tensor("blk.0.attn_v.weight", 2, 32), tensor("blk.0.ffn_up_exps.weight", 3, 2, 32)]
    factors = [
        ("blk.0.attn_v.scale", (1,), GGML_F32, floats(np.array([0.5]))),
        ("blk.0.attn_v.input_scale", (1,), GGML_F32, floats(np.array([7.0]))),
        ("blk.0.ffn_up_exps.scale", (3,), GGML_F32, floats(np.array([1.0, -2.0, 4.0]))),
        ("blk.0.ffn_up_exps.input_scale", (3,), GGML_F32, floats(np.ones(3))),
    ]
    entries = [entry for entry, _ in tensors]
    file = opened(gguf_bytes({"general.architecture": (STRING, "qwen3moe"), **HEADS}, entries + factors))
    assert len(list(file.names())) == 4
    np.testing.assert_array_equal(file.read("model.layers.0.self_attn.v_proj.weight"), tensors[0][1] / 2)
    for expert, factor in enumerate((1, -2, 4)):
        found = file.read(f"model.layers.0.mlp.experts.{expert}.up_proj.weight")
        np.testing.assert_array_equal(found, tensors[1][1][expert] * factor)


def test_factors_of_kept_matrices_multiply_their_scales(opened):
    blocks = bytes([0x38] * 4 + [0x21] * 32)  # scales 1; codes 0.5 and 1, doubled here
    tensors = [
        ("blk.0.attn_v.weight", (64, 1), 40, blocks),
        ("blk.0.attn_v.scale", (1,), GGML_F32, floats(np.array([0.25]))),
    ]
    file, module = opened(gguf_bytes(llama_metadata(), tensors)), "model.layers.0.self_attn.v_proj"
    whole = file.read(f"{module}.weight")
    assert set(whole.ravel().tolist()) == {0.125, 0.25}
    file.keep([module])
    codes, scales = file.read(f"{module}.codes"), file.read(f"{module}.scales")
    assert (scales == 0.125).all() and set(codes.ravel().tolist()) == {1, 2}
    np.testing.assert_array_equal(np.repeat(scales, 16, axis=1) * codes, whole)


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
