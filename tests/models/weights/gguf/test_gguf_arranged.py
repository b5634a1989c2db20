"""Tensors of delta nets whose rows and columns GGUF files have in another order, quantised ones too."""

from __future__ import annotations

import numpy as np
import pytest

from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.weights.gguf.file import GGUFFile
from tests.models.weights.gguf.gguf_conversion import tensor
from tests.models.weights.gguf.gguf_states_conversion import converted_states
from tests.tables import each_row

NET = "model.layers.0.linear_attn"
HIDDEN, KEYS, VALUES, K_SIZE = 64, 2, 6, 32
MATRICES = {"in_proj_z": 1, "in_proj_qkv": 1, "out_proj": 1, "in_proj_a": 0, "in_proj_b": 0}


def config_of(architecture: str, v_size: int) -> dict:
    return {
        "architectures": [architecture],
        "num_hidden_layers": 1,
        "max_position_embeddings": 64,
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "head_dim": 32,
        "num_key_value_heads": 1,
        "vocab_size": 8,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": K_SIZE,
        "linear_num_key_heads": KEYS,
        "linear_num_value_heads": VALUES,
        "linear_value_head_dim": v_size,
    }


def tensors_of(architecture: str, v_size: int) -> dict[str, np.ndarray]:
    rng, keys, values = np.random.default_rng(5), KEYS * K_SIZE, VALUES * v_size
    apart = {"in_proj_qkv": 2 * keys + values, "in_proj_z": values, "in_proj_a": VALUES, "in_proj_b": VALUES}
    joined = {"in_proj_qkvz": 2 * (keys + values), "in_proj_ba": 2 * VALUES}
    rows = apart if architecture == "Qwen3_5ForCausalLM" else joined
    shapes = {f"{name}.weight": (count, HIDDEN) for name, count in rows.items()}
    shapes |= {"out_proj.weight": (HIDDEN, values), "A_log": (VALUES,), "dt_bias": (VALUES,)}
    shapes["conv1d.weight"] = (2 * keys + values, 4)
    return {f"{NET}.{name}": rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def in_blocks(name: str, values: np.ndarray):
    """Matrices as Q8_0, others as float32."""
    if values.ndim < 2 or values.shape[-1] % 32:
        return tensor(name, values)
    blocks = values.reshape(-1, 32)
    scales = (np.abs(blocks).max(1, keepdims=True) / 127).astype(np.float16)
    codes = np.rint(blocks / scales.astype(np.float32)).astype(np.int8)
    raw = np.concatenate([scales.view(np.uint8), codes.view(np.uint8)], axis=1)
    return name, values.shape[::-1], 8, raw.tobytes()


@pytest.fixture
def opened(tmp_path):
    files = []

    def open_case(architecture: str, v_size: int, store=in_blocks, **changes: object):
        config, tensors = {**config_of(architecture, v_size), **changes}, tensors_of(architecture, v_size)
        path = tmp_path / f"{len(files)}.gguf"
        path.write_bytes(converted_states(config, tensors, store))
        files.append(GGUFFile(path))
        return files[-1], tensors

    yield open_case
    for file in files:
        file.close()


@each_row(
    ("architecture", "v_size", "kept"),
    [
        ("Qwen3_5ForCausalLM", 32, ["in_proj_a", "in_proj_b", "in_proj_qkv", "in_proj_z", "out_proj"]),
        # Heads of 16 columns divide blocks, so this one is read as values only.
        ("Qwen3_5ForCausalLM", 16, ["in_proj_a", "in_proj_b", "in_proj_qkv", "in_proj_z"]),
        ("Qwen3NextForCausalLM", 32, ["in_proj_ba", "in_proj_qkvz", "out_proj"]),
    ],
)
def test_blocks_in_the_order_of_the_checkpoint(opened, architecture, v_size, kept):
    file, tensors = opened(architecture, v_size)
    assert sorted(file.names()) == sorted(tensors)
    for name, values in tensors.items():
        assert file.shape(name) == values.shape
        read = file.read(name)
        np.testing.assert_allclose(
            read, values, atol=0.03 if name.endswith("proj.weight") or "in_proj" in name else 1e-6
        )
        for rows in (slice(0, 0), slice(5, 6), slice(1, len(values) - 1)):
            np.testing.assert_array_equal(file.read(name, rows), read[rows])
        if values.ndim == 2 and values.shape[1] > 32:
            np.testing.assert_array_equal(file.read(name, slice(2, 5), slice(32, 64)), read[2:5, 32:64])
    assert sorted(file.formats()) == [f"{NET}.{name}" for name in kept]
    whole = {name: file.read(f"{NET}.{name}.weight") for name in kept}
    file.keep(f"{NET}.{name}" for name in kept)
    for name, values in whole.items():
        codes, scales = (file.read(f"{NET}.{name}.{kind}", slice(1, 5)) for kind in ("codes", "scales"))
        np.testing.assert_array_equal(codes * np.repeat(scales, 32, axis=1), values[1:5])


def test_parts_of_different_formats_are_read_as_values(opened):
    def store(name: str, values: np.ndarray):
        return tensor(name, values) if "attn_gate" in name else in_blocks(name, values)

    file, tensors = opened("Qwen3NextForCausalLM", 32, store)
    assert sorted(file.formats()) == [f"{NET}.in_proj_ba", f"{NET}.out_proj"]
    name = f"{NET}.in_proj_qkvz.weight"
    np.testing.assert_allclose(file.read(name), tensors[name], atol=0.03)


@each_row(
    ("changes", "message"),
    [
        ({"linear_num_key_heads": 4}, "ssm.time_step_rank must be a multiple of ssm.group_count"),
        ({"linear_num_key_heads": 0}, "must be a positive number, got 0 .*qwen35.ssm.group_count"),
        ({"linear_key_head_dim": 2**30}, "delta nets of more than 4194304 rows are not supported"),
        ({"linear_key_head_dim": 16}, "must have the rows and columns of .*in_proj_qkv.weight"),
    ],
)
def test_impossible_heads(tmp_path, changes, message):
    raw = converted_states(config_of("Qwen3_5ForCausalLM", 32), tensors_of("Qwen3_5ForCausalLM", 32))
    fields = {"linear_num_key_heads": "ssm.group_count", "linear_key_head_dim": "ssm.state_size"}
    for field, value in changes.items():
        key = f"qwen35.{fields[field]}".encode()
        at = raw.index(key) + len(key) + 4
        raw = raw[:at] + value.to_bytes(4, "little") + raw[at + 4 :]
    (path := tmp_path / "model.gguf").write_bytes(raw)
    with pytest.raises(ModelFileError, match=message):
        GGUFFile(path)


def test_states_do_not_grow(opened):
    file, _ = opened("Qwen3_5ForCausalLM", 32, lambda name, values: tensor(name, -values))
    with pytest.raises(ModelFileError, match="must not hold numbers above 0"):
        file.read(f"{NET}.A_log")
