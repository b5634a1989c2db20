"""DeepSeek-V4: requests served in every way, and checkpoints whose matrices are e4m3 and whose experts are MXFP4."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxengine.models.build import Build
from jaxengine.models.quantization.base.plain import PlainWeight
from jaxengine.models.quantization.base.quantized import QuantizedWeight
from jaxengine.models.registry import build_model, read_folder
from jaxengine.models.weights.formats.safetensors import SafetensorsCheckpoint
from jaxengine.models.weights.load import load_params
from tests.fixtures.drawn_weights import checkpoint

BLOCK = 40
# Not rounded by DeepSeek: routers, what makes keys of blocks, the weights of the indexer's heads, what is no product.
KEPT = re.compile(r"norm|embed|head|gate\.|compressor|weights_proj|hc_|sink|bias|ape|indexer.wk|[qk]_weight|token_map")
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def blocked(tensor: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes in e4m3, a power of two for each block, and what they stand for."""
    rows, columns = (-(-size // BLOCK) for size in tensor.shape)
    scales = np.ones((rows, columns), np.float32) / 64
    codes = (tensor * 64).astype(ml_dtypes.float8_e4m3fn)
    return codes, scales.astype(ml_dtypes.float8_e8m0fnu), codes.astype(np.float32) / 64


def packed(tensor: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pairs of e2m1 codes, an exponent for each 32 inputs of a row, and what they stand for."""
    rows, columns = tensor.shape
    padded = np.pad(tensor, ((0, 0), (0, -columns % 32))).reshape(rows, -1, 32)
    exponents = np.ceil(np.log2(np.abs(padded).max(-1, keepdims=True) / 6 + 1e-9))
    codes = np.abs((padded / 2.0**exponents)[..., None] - E2M1).argmin(-1).astype(np.uint8)
    values = (E2M1[codes] * 2.0**exponents).reshape(rows, -1)[:, :columns]
    codes = codes.reshape(rows, -1)
    pairs = (codes[:, ::2] | codes[:, 1::2] << 4).view(np.int8)
    return pairs, (2.0 ** exponents[..., 0]).astype(ml_dtypes.float8_e8m0fnu), values.astype(np.float32)


def write(source: Path, folder: Path) -> dict[str, np.ndarray]:
    """A checkpoint like `source` as DeepSeek publishes it; returns what its tensors stand for."""
    raw: dict[str, Any] = json.loads((source / "config.json").read_text())
    settings = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": "ue8m0"}
    settings |= {"weight_block_size": [BLOCK, BLOCK]}
    # DeepSeek-V4.1's says it inside.
    nested = "text_config" in raw
    raw |= {"quantization_config": settings | ({"expert_dtype": "fp4"} if nested else {})}
    raw |= {} if nested else {"expert_dtype": "fp4"}
    (folder / "config.json").write_text(json.dumps(raw))
    stored, values = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith("engram.embed.weight"):  # a scale for every 32 elements of a row, of which there are fewer
            codes = (tensor * 8).astype(ml_dtypes.float8_e4m3fn)
            stored[name], values[name] = codes, codes.astype(np.float32) / 8
            scales = np.full((len(tensor), 1), 1 / 8, np.float32)
            stored[name.removesuffix("weight") + "scale"] = scales.astype(ml_dtypes.float8_e8m0fnu)
            continue
        if KEPT.search(name):
            stored[name] = values[name] = tensor
            continue
        codes, scales, values[name] = (packed if ".experts." in name else blocked)(tensor)
        stored[name], stored[name.removesuffix("weight") + "scale"] = codes, scales
    save_file(stored, folder / "model.safetensors")
    return values


@pytest.mark.thorough("formats whose reading is tested by itself, under a family's names")
@pytest.mark.parametrize("family", ["deepseek_v4", "deepseek_v41"])
def test_as_published(family, tmp_path):
    values = write(checkpoint(family), tmp_path)
    model = build_model(read_folder(tmp_path), Build("float32"))
    source = SafetensorsCheckpoint(tmp_path)
    nnx.update(model, load_params(model, source))
    source.close()
    for layer, own in enumerate(model.layers):
        name = f"model.layers.{layer}" if family == "deepseek_v4" else f"layers.{layer}"
        attention = own.attention
        assert isinstance(attention.q_b.weight, QuantizedWeight)
        kept = [attention.contributed.weight] if family == "deepseek_v4" and attention.keys.rate is not None else []
        if family == "deepseek_v41" and own.memory is not None:
            rows = own.memory.table(jnp.arange(len(values[f"{name}.engram.embed.weight"])))
            np.testing.assert_array_equal(rows, values[f"{name}.engram.embed.weight"])
        assert all(isinstance(weight, PlainWeight) for weight in kept)
        for module, weight in (("attn.wq_b", attention.q_b.weight), ("attn.wo_b", attention.out_b.weight)):
            stored = values[f"{name}.{module}.weight"]
            held = weight.matmul(jnp.eye(stored.shape[1]), out_dtype=jnp.float32)
            np.testing.assert_allclose(held, stored.T, rtol=1e-6)
        stored = values[f"{name}.ffn.experts.5.w2.weight"]
        sizes = jnp.zeros(6, jnp.int32).at[5].set(stored.shape[1])
        held = own.mlp.down.grouped_matmul(jnp.eye(stored.shape[1]), sizes, None, jnp.float32)
        np.testing.assert_allclose(held, stored.T, rtol=1e-6)
