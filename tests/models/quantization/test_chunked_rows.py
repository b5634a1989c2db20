"""A joined projection whose rows, and the blocks of whose scales, are those of several devices one after the other, as
MiMo-V2.5 stores it in 8 bits.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.quantization.base.quantized import CODES, SCALES
from jaxengine.models.registry import build_model, read_folder, read_hf
from jaxengine.models.weights.formats.safetensors import SafetensorsCheckpoint
from jaxengine.models.weights.load import check_source, load_params
from tests.fixtures.drawn_weights import checkpoint

NAME, BLOCK = "mimo_v2_5", 16
KEPT = ["lm_head", "o_proj", "mlp.gate", "gate_proj", "up_proj", "down_proj"]
QKV = "model.layers.{}.self_attn.qkv_proj"


def in_chunks(rows: np.ndarray, kv_heads: int, chunks: int = 2) -> np.ndarray:
    """The rows of q, k and v in the order of MiMo-V2.5's files in 8 bits."""
    parts = np.split(rows, np.cumsum([4 * 24, kv_heads * 24]))
    return np.concatenate([np.split(part, chunks)[chunk] for chunk in range(chunks) for part in parts])


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """(Folder of the checkpoint in 8 bits, by layer the matrices that it stands for, in its order)."""
    folder = tmp_path_factory.mktemp("chunks") / "fp8"
    shutil.copytree(checkpoint(NAME), folder)
    tensors, matrices = load_file(folder / "model.safetensors"), []
    for layer, kv_heads in enumerate((2, 4, 4)):
        rows = in_chunks(tensors.pop(f"{QKV.format(layer)}.weight"), kv_heads)
        codes, scales, values = [], [], []
        for chunk in np.split(rows, 2):
            for first in range(0, len(chunk), BLOCK):  # the last block of a chunk is cut off
                tiles = np.split(chunk[first : first + BLOCK], rows.shape[1] // BLOCK, axis=1)
                own = np.array([np.abs(tile).max() / 448 for tile in tiles], np.float32)
                held = [(tile / scale).astype(ml_dtypes.float8_e4m3fn) for tile, scale in zip(tiles, own, strict=True)]
                codes.append(np.concatenate(held, axis=1))
                values.append(codes[-1].astype(np.float32) * np.repeat(own, BLOCK))
                scales.append(own)
        tensors[f"{QKV.format(layer)}.weight"] = np.concatenate(codes)
        tensors[f"{QKV.format(layer)}.weight_scale_inv"] = np.stack(scales)
        matrices.append(np.concatenate(values))
    save_file(tensors, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    quantization = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
    raw["quantization_config"] = {**quantization, "modules_to_not_convert": KEPT}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder, matrices


def test_blocks_begin_anew_in_each_chunk(stored):
    folder, matrices = stored
    model = build_model(read_folder(folder), Build("float32"))
    source, _ = check_source(model, file := SafetensorsCheckpoint(folder))
    for layer, expected in enumerate(matrices):
        rows = slice(len(expected) // 2 - 5, len(expected) - 3)  # of both chunks
        codes = source.read(f"{QKV.format(layer)}.{CODES}", rows).astype(np.float32)
        scales = np.repeat(source.read(f"{QKV.format(layer)}.{SCALES}", rows), BLOCK, axis=1)
        np.testing.assert_array_equal(codes * scales, expected[rows])
    assert len(matrices[0]) // 2 % BLOCK  # so that blocks of the whole would differ
    file.close()


def test_rows_are_put_in_the_order_of_heads(stored, tmp_path):
    plain = read_folder(checkpoint(NAME))
    chunked = replace(read_folder(stored[0]), quantization=None)
    tensors = load_file(checkpoint(NAME) / "model.safetensors")
    for layer, kv_heads in enumerate((2, 4, 4)):
        tensors[f"{QKV.format(layer)}.weight"] = in_chunks(tensors[f"{QKV.format(layer)}.weight"], kv_heads)
    save_file(tensors, tmp_path / "model.safetensors")
    found = []
    for config, folder in ((plain, checkpoint(NAME)), (chunked, tmp_path)):
        source = SafetensorsCheckpoint(folder)
        found.append(dict(nnx.to_flat_state(load_params(build_model(config, Build("float32")), source))))
        source.close()
    assert found[0].keys() == found[1].keys()
    for path, values in found[0].items():
        np.testing.assert_array_equal(values.get_value(), found[1][path].get_value(), err_msg=str(path))


def test_heads_that_cannot_be_divided_are_an_error(stored):
    raw = json.loads((stored[0] / "config.json").read_text())
    for changes, text in (
        ({"swa_num_key_value_heads": 1}, "swa_num_key_value_heads must be a multiple of num_key_value_heads, 2, got 1"),
        ({"attention_projection_layout": "split"}, 'attention_projection_layout must be "fused_qkv" or absent'),
        ({"swa_head_dim": 16}, "swa_head_dim must be 24 or absent, got 16"),
    ):
        with pytest.raises(ModelConfigError, match=text):
            read_hf(raw | changes)
