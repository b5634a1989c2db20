"""Files of retrievers: the model inside them, by its own fields, and the class of its layers."""

from __future__ import annotations

import json

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.pooler import TOKEN_EMBED, Pooler
from jaxengine.models.config.readers.hf import hf_architecture, with_inner_model
from jaxengine.models.registry import family_of, read_hf
from tests.fixtures.drawn_weights import FOLDER


def test_the_model_inside():
    for name, kind, family in (
        ("qwen2_vl_vision", "ColQwen2ForRetrieval", "Qwen2VLForConditionalGeneration"),
        ("qwen2_5_vl_vision", "ColQwen2ForRetrieval", "Qwen2_5_VLForConditionalGeneration"),
        ("paligemma_vision", "ColPaliForRetrieval", "PaliGemmaForConditionalGeneration"),
        ("qwen3_vl_vision", "ColQwen3", "Qwen3VLForConditionalGeneration"),
        ("qwen3_vl_vision", "OpsColQwen3Model", "Qwen3VLForConditionalGeneration"),
    ):
        inner = json.loads((FOLDER / name / "config.json").read_text())
        outer = {"architectures": [kind], "model_type": "outer", "embedding_dim": 12, "vlm_config": inner}
        raw = with_inner_model(outer)
        assert raw == inner | {"architectures": [kind], "embedding_dim": 12}
        assert family_of(hf_architecture(ConfigFields(raw))) == (family, TOKEN_EMBED)
        config, plain = read_hf(raw, Pooler()), read_hf(inner)
        assert (config.architecture, config.hidden_size) == (family, plain.hidden_size)
        assert config.is_causal == (kind != "ColPaliForRetrieval") and plain.is_causal
        if not config.is_causal:  # which takes prompts whole, with images or not
            assert config.tower is not None and not config.tower.attends_both_ways
            assert config.tower.whole_prompt == config.max_position_embeddings
    without = {"architectures": ["A"], "vlm_config": None}
    assert with_inner_model(without) == without
