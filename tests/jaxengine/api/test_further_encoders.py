"""Encoders of further families, and further heads: answers as transformers gives them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jaxengine import LLM, ConfigError, PoolingParams
from jaxengine.checkpoint.model_source import open_model
from jaxengine.config.engine_config import EngineConfig
from jaxengine.models.build import Build
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.registry import build_model
from jaxengine.models.weights.load import check_source
from tests.fixtures.further_encoders import CASES, MEANS, NAME, SHAPES, make_further_encoder
from tests.fixtures.pooled_prompts import pooled_prompts

OPTIONS = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "max_model_len": 20,
    "block_size": 4,
    "num_gpu_blocks_override": 40,
    "compilation_config": {"cudagraph_capture_sizes": [], "prefill_sizes": []},
    "skip_tokenizer_init": True,
    "disable_log_stats": True,
}
# Frequencies and scales, projected states and inputs, and groups of layers come from nowhere else.
ALWAYS = ("esm", "embedding_gemma2", "albert_groups")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.thorough("as others")) for name in CASES]
)
def test_answers_are_those_of_transformers(name, tmp_path, executables_dir):
    llm = LLM(str(make_further_encoder(tmp_path / "model", name)), **OPTIONS, compile_cache_dir=executables_dir)
    recorded = pooled_prompts(f"{NAME}/{name}")
    params = [PoolingParams(**each.params) for each in recorded]
    found = llm.encode([each.prompt for each in recorded], params, use_tqdm=False)
    pools_mean = llm.core.inputs.pooling.pooler.pooling_type == "MEAN"
    llm.shutdown()
    assert pools_mean == (name in MEANS)
    for each, known in zip(found, recorded, strict=True):
        ours, golden = np.asarray(each.outputs.data), known.answer
        assert ours.shape == golden.shape
        assert np.abs(ours - golden).max() <= 1e-5 * max(1.0, np.abs(golden).max())


def test_every_name_of_a_tensor_is_known(tmp_path):
    assert json.loads(SHAPES.read_text()).keys() == CASES.keys()
    for name in CASES:
        source = open_model(EngineConfig(model=str(make_further_encoder(tmp_path / name, name))))
        assert source.pooling is not None and not source.config.is_causal
        check_source(build_model(source.config, Build("float32")), source.weights)
        source.close()


def test_labels_of_a_file_without_and_poolings_before_a_projection(tmp_path):
    folder = make_further_encoder(tmp_path / "filter", "privacy_filter_tokens")
    raw = json.loads((folder / "config.json").read_text())
    labels = {int(number): label for number, label in raw.pop("id2label").items()}
    for given, found in (({}, labels), ({"id2label": None}, labels), ({"num_labels": 33}, {})):
        (folder / "config.json").write_text(json.dumps(raw | given))
        source = open_model(EngineConfig(model=str(folder)))
        assert source.pooling.labels == found and source.pooling.pooler.token_heads[0].width == 33
        source.close()
    with pytest.raises(ModelFileError, match="another method than mxfp4"):
        open_model(EngineConfig(model=str(folder), hf_overrides={"quantization_config": {"quant_method": "mxfp4"}}))
    gemma = str(make_further_encoder(tmp_path / "gemma", "embedding_gemma2"))
    with pytest.raises(ConfigError, match="pooling_type is 'MAX'; allowed: another type for EmbeddingGemma2Model"):
        open_model(EngineConfig(model=gemma, pooler_config={"pooling_type": "MAX"}))
