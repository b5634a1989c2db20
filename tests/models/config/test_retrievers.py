"""Files of retrievers: the model inside them, by its own fields, and the class of its layers."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.pooler import TOKEN_EMBED, Pooler
from jaxengine.models.config.readers.hf import hf_architecture, with_inner_model
from jaxengine.models.registry import family_of, model_for_hf, read_hf
from jaxengine.models.weights.views.renamed import RenamedSource, with_prefix
from tests.fixtures.drawn_weights import FOLDER


def test_the_model_inside():
    for name, kind, family in (
        ("qwen2_vl_vision", "ColQwen2ForRetrieval", "Qwen2VLForConditionalGeneration"),
        ("qwen2_5_vl_vision", "ColQwen2ForRetrieval", "Qwen2_5_VLForConditionalGeneration"),
        ("paligemma_vision", "ColPaliForRetrieval", "PaliGemmaForConditionalGeneration"),
        ("qwen3_vl_vision", "ColQwen3", "Qwen3VLForConditionalGeneration"),
        ("qwen3_vl_vision", "OpsColQwen3Model", "Qwen3VLForConditionalGeneration"),
        ("qwen3_5_pictures_vision", "ColQwen3_5", "Qwen3_5ForConditionalGeneration"),
        ("qwen3_vl_vision", "Qwen3VLNemotronEmbedModel", "Qwen3VLForConditionalGeneration"),
    ):
        inner = json.loads((FOLDER / name / "config.json").read_text())
        outer = {"architectures": [kind], "model_type": "outer", "embedding_dim": 12, "vlm_config": inner}
        raw = with_inner_model(outer)
        assert raw == inner | {"architectures": [kind], "embedding_dim": 12}
        assert family_of(hf_architecture(ConfigFields(raw))) == (family, TOKEN_EMBED)
        config, plain = read_hf(raw, Pooler()), read_hf(inner)
        assert (config.architecture, config.hidden_size) == (family, plain.hidden_size)
        sees_all = kind in ("ColPaliForRetrieval", "Qwen3VLNemotronEmbedModel")
        assert config.is_causal != sees_all and plain.is_causal
        if not config.is_causal:  # which takes prompts whole, with images or not
            assert config.tower is not None and not config.tower.attends_both_ways
            assert config.tower.whole_prompt == config.max_position_embeddings
    without = {"architectures": ["A"], "vlm_config": None}
    assert with_inner_model(without) == without


def test_names_of_the_weights_inside():
    """As transformers, vLLM's readers of ColQwen3 and the authors' own code write them."""
    own = ("model.layers.0.mlp.up_proj.weight", "lm_head.weight", "{tower}.a.weight")
    for kind, tower, *stored in (
        ("ColQwen2ForRetrieval", "visual", "vlm.language_model.", "vlm.lm_head.", "vlm.visual."),
        ("ColQwen2ForRetrieval", "visual", "vlm.model.language_model.", "vlm.lm_head.", "vlm.model.visual."),
        ("ColQwen2ForRetrieval", "visual", "vlm.model.", "vlm.lm_head.", "vlm.visual."),
        ("ColQwen3", "visual", "vlm.model.language_model.", "vlm.lm_head.", "vlm.model.visual."),
        ("OpsColQwen3Model", "visual", "language_model.", "lm_head.", "visual."),
        ("OpsColQwen3Model", "visual", "language_model.model.", "lm_head.", "visual."),
        ("OpsColQwen3Model", "visual", "model.language_model.", "lm_head.", "model.visual."),
        ("ColQwen3_5", "visual", "language_model.", "lm_head.", "visual."),
        ("ColPaliForRetrieval", "vision_tower", "vlm.language_model.model.", "vlm.language_model.lm_head.")
        + ("vlm.vision_tower.vision_model.",),
        ("ColPaliForRetrieval", "vision_tower", "vlm.model.language_model.", "vlm.lm_head.", "vlm.model.vision_tower."),
    ):
        ends = (each.format(tower=tower).removeprefix(f"{tower}.").removeprefix("model.") for each in own)
        names = [old + end.removeprefix("lm_head.") for old, end in zip(stored, ends, strict=True)]
        source: Any = SimpleNamespace(path="", names=lambda named=names: [*named, "custom_text_proj.weight"])
        known = model_for_hf(kind).checkpoint_names
        found = RenamedSource(with_prefix(source, known, ["custom_text_proj."]), known)
        assert [*found.names()] == [each.format(tower=tower) for each in own] + ["custom_text_proj.weight"], names
