"""Granite Docling and BLIP-2: what configurations may leave out, names of tensors, refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.registry import model_for_hf, read_hf
from tests.fixtures.drawn_weights import FOLDER
from tests.tables import each_row

DOCLING, BLIP2 = (
    json.loads((FOLDER / name / "config.json").read_text()) for name in ("granite_docling_vision", "blip2_vision")
)


def test_defaults():
    """A file without any field has the defaults of transformers' classes."""
    config = read_hf({key: DOCLING[key] for key in ("architectures", "model_type")})
    tower: Any = config.tower
    assert (config.hidden_size, config.num_layers, config.vocab_size, config.max_position_embeddings) == (
        *(1024, 28, 133800),
        32768,
    )
    assert (config.logit_scale, config.residual_multiplier, config.attention[0].scale) == (0.25, 0.263, 0.015625)
    assert (tower.first_multiplier, config.tie_word_embeddings, config.eos_token_ids) == (12.0, True, (100257,))
    assert (tower.deepstack_layers, tower.merge, tower.unit, tower.vit.num_layers) == ((3, 7, 10), 16, 1024, 12)
    config = read_hf({key: BLIP2[key] for key in ("architectures", "model_type")})
    tower = config.tower
    assert (config.hidden_size, config.num_layers, config.vocab_size, config.intermediate_size) == (
        *(768, 12, 50272),
        3072,
    )
    assert (tower.vit.hidden_size, tower.vit.num_layers, tower.vit.num_positions, tower.merge) == (1408, 39, 257, 8)
    queries = tower.queries
    assert (queries.hidden_size, queries.num_layers, queries.cross_every, queries.norm_eps) == (768, 12, 2, 1e-12)


def test_names():
    names = model_for_hf("GraniteDoclingForConditionalGeneration").checkpoint_names
    assert names.renamed("model.text_model.layers.0.mlp.up_proj.weight") == "model.layers.0.mlp.up_proj.weight"
    assert names.renamed("model.vision_model.connector.ln_in.bias") == "connector.ln_in.bias"
    for part in ("model.vision_model.connector.fine.projection.weight", "model.density_router.fc1.bias", "mtp.0.x"):
        assert names.is_unused(part)
    names = model_for_hf(read_hf(BLIP2).architecture).checkpoint_names
    for stored, ours in (
        ("language_model.model.decoder.layers.0.fc1.bias", "model.layers.0.fc1.bias"),
        ("language_model.model.decoder.final_layer_norm.bias", "model.norm.bias"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("qformer.layernorm.bias", "qformer.layernorm.bias"),
    ):
        assert names.renamed(stored) == ours


@each_row(
    ("raw", "where", "change", "message"),
    [
        (DOCLING, "vision_config", {"out_hidden_size": 60}, "out_hidden_size must be the hidden_size of the text, 64"),
        (DOCLING, "vision_config", {"scale_factor": 3}, "scale_factor must be such that it divides the 4 patches"),
        (
            DOCLING,
            "vision_config",
            {"deepstack_visual_indexes": 3},
            "deepstack_visual_indexes must be a list of layers",
        ),
        (DOCLING, "text_config", {"model_type": "llama"}, "model_type must be granite_docling_text in text_config"),
        (
            BLIP2,
            "text_config",
            {"model_type": "t5"},
            "model_type must be that of a decoder (...ForCausalLM) in docs/models.md, got 't5'",
        ),
        (BLIP2, "text_config", {"word_embed_proj_dim": 48}, "word_embed_proj_dim must be 64 or absent, got 48"),
        (BLIP2, "qformer_config", {"use_qformer_text_input": True}, "use_qformer_text_input must be false or absent"),
        (BLIP2, "qformer_config", {"num_attention_heads": 5}, "num_attention_heads must be a divisor of hidden_size"),
        (BLIP2, None, {"num_query_tokens": 1025}, "num_query_tokens must be an integer from 1 to 1024"),
    ],
)
def test_refused(raw: dict[str, Any], where: str | None, change: dict[str, Any], message: str):
    changed = raw | change if where is None else raw | {where: raw[where] | change}
    with pytest.raises(ModelConfigError) as error:
        read_hf(changed)
    assert message in str(error.value)
