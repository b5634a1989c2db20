"""Models whose tokens attend to the keys that an indexer selects: what is refused, and weights in blocks of fp8."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxengine.config.base.platforms import PLATFORMS
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.models.build import Build
from jaxengine.models.quantization.base.plain import PlainWeight
from jaxengine.models.quantization.base.quantized import QuantizedWeight
from jaxengine.models.registry import build_model, read_folder
from jaxengine.models.weights.formats.safetensors import SafetensorsCheckpoint
from jaxengine.models.weights.load import load_params
from jaxengine.runner.start.devices import build_split, choose_stages
from jaxengine.sharding.stages import Stage
from tests.fixtures.drawn_weights import FOLDER, checkpoint

MODEL = read_folder(FOLDER / "glm_moe_dsa")
BLOCK = 40
# Not stored in fp8 by DeepSeek: routers, the weights of the indexer's heads, and what is no product of a layer.
KEPT = re.compile(r"norm|embed_tokens|lm_head|mlp\.gate\.|weights_proj|bias")


def test_what_is_refused():
    with pytest.raises(ConfigError, match="rl_exact is True; allowed: False: GlmMoeDsaForCausalLM selects keys"):
        EngineConfig.from_options(rl_exact=True).resolved(MODEL, PLATFORMS["cpu"])
    # By themselves, stages keep both together.
    resolved = EngineConfig.from_options(pipeline_parallel_size=2).resolved(MODEL, PLATFORMS["cpu"])
    with pytest.raises(ConfigError, match="layer 3 attends to keys as selected by the indexer of layer 2, which is in"):
        build_split(MODEL, resolved, resolved.mesh_layout(MODEL), Stage(3, 4, is_first=False))
    stages = choose_stages(MODEL, resolved, resolved.mesh_layout(MODEL))
    assert [list(stage.layers) for stage in stages] == [[0, 1], [2, 3]]


def write_blocks(source: Path, folder: Path) -> dict[str, np.ndarray]:
    """A checkpoint like `source` with codes in e4m3 and a scale for each block; returns what the codes stand for."""
    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    raw = json.loads((folder / "config.json").read_text())
    settings = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": "ue8m0"}
    raw["quantization_config"] = settings | {"weight_block_size": [BLOCK, BLOCK]}
    (folder / "config.json").write_text(json.dumps(raw))
    stored, values = {}, {}
    for path in source.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            if KEPT.search(name):
                stored[name] = values[name] = tensor
                continue
            rows, columns = (-(-size // BLOCK) for size in tensor.shape)
            padded = np.pad(
                tensor, [(0, n * BLOCK - size) for n, size in zip((rows, columns), tensor.shape, strict=True)]
            )
            blocks = padded.reshape(rows, BLOCK, columns, BLOCK)
            scales = np.abs(blocks).max((1, 3)).astype(np.float32) / 448 + np.float32(1e-9)
            codes = (blocks / scales[:, None, :, None]).astype(ml_dtypes.float8_e4m3fn)
            whole = (codes.astype(np.float32) * scales[:, None, :, None]).reshape(padded.shape)
            values[name] = np.ascontiguousarray(whole[: tensor.shape[0], : tensor.shape[1]])
            stored[name] = codes.reshape(padded.shape)[: tensor.shape[0], : tensor.shape[1]].copy()
            stored[f"{name}_scale_inv"] = scales
    save_file(stored, folder / "model.safetensors")
    return values


@pytest.mark.thorough("a further family of a format whose reading is tested by itself")
def test_blocks_of_fp8(tmp_path):
    """The indexer's products are codes like others, and the weights of its heads are as they are stored."""
    values = write_blocks(checkpoint("deepseek_v32"), tmp_path / "fp8")
    model = build_model(read_folder(tmp_path / "fp8"), Build("float32"))
    source = SafetensorsCheckpoint(tmp_path / "fp8")
    nnx.update(model, load_params(model, source))
    source.close()
    for layer, own in enumerate(model.layers):
        indexer = own.attention.indexer
        for name, weight in (
            ("wq_b", indexer.q.weight),
            ("wk", indexer.k.weight),
            ("weights_proj", indexer.weights.weight),
        ):
            stored = values[f"model.layers.{layer}.self_attn.indexer.{name}.weight"]
            assert isinstance(weight, PlainWeight if name == "weights_proj" else QuantizedWeight)
            held = weight.matmul(jnp.eye(stored.shape[1]), out_dtype=jnp.float32)
            np.testing.assert_allclose(held, stored.T, rtol=1e-6)
