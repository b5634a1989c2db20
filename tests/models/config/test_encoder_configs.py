"""config.json of encoders: the names that repositories had before transformers had the family."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from jaxengine.models.config.fields import ConfigFields, ModelConfigError
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.pooler import CLS, LAST, MEAN, Pooler
from jaxengine.models.registry import family_of, read_hf, usual_pooling
from tests.fixtures.drawn_weights import FOLDER

SIZES = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 40, "max_position_embeddings": 64}
NOMIC = {
    "architectures": ["NomicBertModel"],
    "model_type": "nomic_bert",
    "activation_function": "swiglu",
    "causal": False,
    "layer_norm_epsilon": 1e-12,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "n_embd": 32,
    "n_head": 4,
    "n_inner": 40,
    "n_layer": 2,
    "n_positions": 8192,
    "max_trained_positions": 64,
    "parallel_block": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "type_vocab_size": 2,
    "use_rms_norm": False,
    "vocab_size": 96,
}
NEW = SIZES | {
    "architectures": ["NewModel"],
    "model_type": "new",
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "layer_norm_type": "layer_norm",
    "logn_attention_scale": False,
    "pack_qkv": True,
    "position_embedding_type": "rope",
    "rope_theta": 20000.0,
    "rope_scaling": {"type": "ntk", "factor": 8.0},
    "type_vocab_size": 1,
}

JINA = SIZES | {"architectures": ["JinaBertForMaskedLM"], "model_type": "bert"}
DEBERTA = {"relative_attention": True, "share_att_key": True, "norm_rel_ebd": "layer_norm"}
DEBERTA |= {"pos_att_type": "p2c|c2p", "position_buckets": 256}
JINA |= {"position_embedding_type": "alibi", "feed_forward_type": "geglu"}


def read(config: dict[str, Any]) -> ModelConfig:
    return read_hf(config, Pooler(MEAN))


def test_earlier_names_of_nomic_bert():
    present = SIZES | {"architectures": ["NomicBertModel"], "model_type": "nomic_bert", "type_vocab_size": 2}
    assert read(NOMIC) == read(present)
    assert read({**NOMIC, "n_inner": None}).intermediate_size == 4 * 32
    assert read({**NOMIC, "n_positions": 48}).max_position_embeddings == 48
    # It counts beyond max_trained_positions alone.
    assert read({**NOMIC, "rotary_scaling_factor": 2}) == read(NOMIC)


def test_sizes_that_files_lack():
    base, wide = (768, 12, 12, 3072), (1536, 24, 24, 6144)
    more = {
        "Bert": base,
        "XLMRoberta": base,
        "MPNet": base,
        "Electra": (256, 4, 12, 1024),
        "JinaBert": base,
        "DebertaV2": wide,
    }
    kinds = {"JinaBert": JINA, "DebertaV2": DEBERTA}
    names = ("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size")
    for stem, sizes in more.items():
        raw = {key: value for key, value in kinds.get(stem, {}).items() if key not in SIZES}
        raw |= {"architectures": [f"{stem}Model"]}
        assert read(raw) == read(raw | dict(zip(names, sizes, strict=True))), stem


def test_ntk_of_new_stretches_every_frequency():
    found = read(NEW)
    assert found.architecture == "GteModel" and found.max_position_embeddings == 64
    rope = found.attention[0].rope
    assert rope is not None
    # base * factor to the power of -2 i / d, divided by factor ** (2 / d).
    wanted = (20000.0 * 8) ** (-np.arange(0, 8, 2) / 8) / 8 ** (2 / 8)
    np.testing.assert_allclose(rope.frequencies(), wanted, rtol=1e-6)


@pytest.mark.parametrize(
    ("config", "changes", "match"),
    [
        (NOMIC, {"prenorm": True}, "prenorm must be false or absent"),
        (NOMIC, {"num_experts": 8}, "num_experts must be 0 or absent"),
        (NOMIC, {"rotary_scaling_factor": 2, "max_trained_positions": None}, "rotary_scaling_factor must be absent"),
        (NOMIC, {"activation_function": "gelu"}, "activation_function must be"),
        (JINA, {"position_embedding_type": "absolute"}, 'position_embedding_type must be "alibi"'),
        (JINA, {"feed_forward_type": "original"}, "feed_forward_type must be geglu or reglu, got 'original'"),
        (NEW, {"pack_qkv": False}, "pack_qkv must be true or absent"),
        (NEW, {"position_embedding_type": "absolute"}, "position_embedding_type must be"),
        (NEW, {"type_vocab_size": 10**8}, "type_vocab_size must be at most 43690, with a vocab_size of 96"),
        (NEW, {"rope_scaling": {"type": "ntk", "factor": 8.0, "mixed_b": 0.5}}, "mixed_b must be absent"),
    ],
)
def test_other_choices_are_refused(config: dict[str, Any], changes: dict[str, Any], match: str):
    with pytest.raises(ModelConfigError, match=match):
        read({**config, **changes})


def test_classes():
    for name in ("NomicBert", "Gte", "New", "JinaEmbeddingsV3"):
        assert family_of(f"{name}Model") == (f"{name}Model", "embed")
        assert family_of(f"{name}ForSequenceClassification") == (f"{name}Model", "classify")
    for name, found in {
        "AlbertForPreTraining": ("AlbertModel", "embed"),
        "CamembertForTokenClassification": ("RobertaModel", "token_classify"),
        "CohereCompassTextForSequenceClassification": ("CohereCompassForCausalLM", "classify"),
        "CohereCompassTextModel": ("CohereCompassForCausalLM", "embed"),
        "Data2VecTextModel": ("RobertaModel", "embed"),
        "Gemma3TextForSequenceClassification": ("Gemma3ForCausalLM", "classify"),
        "Gemma3nTextModel": ("Gemma3nForCausalLM", "embed"),
        "Gemma4TextModel": ("Gemma4ForCausalLM", "embed"),
        "Gemma4UnifiedTextModel": ("Gemma4UnifiedForCausalLM", "embed"),
        "Llama4TextModel": ("Llama4ForCausalLM", "embed"),
        "Qwen3_5MoeTextModel": ("Qwen3_5MoeForCausalLM", "embed"),
        "GteNewForSequenceClassification": ("NewModel", "classify"),
        "GPT2ForSequenceClassification": ("GPT2LMHeadModel", "classify"),
        "PhimoeForCausalLM": ("PhiMoEForCausalLM", None),
        "Qwen2ForTokenClassification": ("Qwen2ForCausalLM", "token_classify"),
        "MT5EncoderModel": ("T5EncoderModel", "embed"),
    }.items():
        assert family_of(name) == found
    # With text_config the layers are those of a model that sees; without, or where there is none, a decoder's.
    for name, task in (("Gemma3ForSequenceClassification", "classify"), ("Qwen3_5Model", "embed")):
        stem = name.removesuffix("Model").removesuffix("ForSequenceClassification")
        assert family_of(name, nested=True) == (f"{stem}ForConditionalGeneration", task)
        assert family_of(name) == (f"{stem}ForCausalLM", task)
    assert family_of("MiniMaxM3VLModel", nested=True) == ("MiniMaxM3VLForCausalLM", "embed")
    raw = json.loads((FOLDER / "gemma3_vision" / "config.json").read_text()) | {"architectures": ["Gemma3Model"]}
    assert read_hf(raw, Pooler(LAST)).architecture == "Gemma3ForConditionalGeneration"


def test_poolings_that_files_name():
    for name, kinds in (
        ("CohereCompassTextForSequenceClassification", {None: LAST, "eos": LAST, "bos": CLS, "mean": MEAN}),
        ("LlamaBidirectionalModel", {None: MEAN, "avg": MEAN, "cls": CLS, "last": LAST}),
    ):
        assert {kind: usual_pooling(name, ConfigFields({"pooling": kind})) for kind in kinds} == kinds
        with pytest.raises(ModelConfigError, match="^pooling must be .*mean"):
            usual_pooling(name, ConfigFields({"pooling": "max"}))


def test_xlm_roberta_with_rope_is_jina_embeddings_v3():
    raw = SIZES | {"architectures": ["XLMRobertaModel"], "position_embedding_type": "rotary", "rotary_emb_base": 900.0}
    found = read(raw)
    assert found.architecture == "JinaEmbeddingsV3Model" and found.attention[0].rope.theta == 900.0


def test_what_is_absent_is_what_another_name_of_the_class_means():
    absent = {key: value for key, value in SIZES.items() if key != "vocab_size"}
    for name in ("CamembertModel", "XLMRobertaForMaskedLM"):
        assert read(absent | {"architectures": [name]}).vocab_size == 30522 * 2
    sizes = {"architectures": ["MT5EncoderModel"], "model_type": "mt5"}
    found = read_hf(sizes, Pooler(MEAN))
    assert (found.vocab_size, found.intermediate_size, found.num_layers) == (250112, 1024, 8)


def test_fields_that_transformers_does_not_read_change_nothing():
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 40}
    for name, field in (
        ("DistilBertModel", {"layer_norm_eps": 0.3}),
        ("ModernBertModel", {"rope_theta": 50.0}),
        ("ModernBertModel", {"is_causal": False}),  # as Ettin's encoders say
        ("JinaBertModel", {"is_causal": False}),
    ):
        raw = SIZES | sizes | {"architectures": [name], "feed_forward_type": "geglu"}
        raw |= {"position_embedding_type": "alibi"} if name.startswith("Jina") else {}
        assert read(raw | field) == read(raw)


def test_classifiers_with_heads_of_their_own_are_refused_by_name():
    """Their heads are none that is read: of a decoder's last state, or of an encoder under other names."""
    for name in ("T5ForSequenceClassification", "T5ForTokenClassification", "UMT5ForSequenceClassification"):
        with pytest.raises(ModelConfigError, match=f"the architecture '{name}' is not supported"):
            read_hf(SIZES | {"architectures": [name], "model_type": "eurobert"})


def test_what_further_encoders_refuse():
    rows = (
        ("EsmModel", {"position_embedding_type": "relative_key"}, "position_embedding_type must be absolute or rotary"),
        ("EsmModel", {"token_dropout": True, "position_embedding_type": "rotary"}, "mask_token_id is missing"),
        ("EsmModel", {"is_folding_model": True}, "is_folding_model must be false or absent"),
        ("RoFormerModel", {"rotary_value": 2}, "rotary_value must be true or false"),
        ("AlbertModel", {"num_hidden_groups": 64}, "num_hidden_groups must be at most num_hidden_layers = "),
        ("AlbertModel", {"inner_group_num": 1 << 20}, "inner_group_num must be at most .*, with num_hidden_layers"),
        ("RemBertModel", {"input_embedding_size": 1 << 20}, "input_embedding_size must be at most"),
        ("T5EncoderModel", {"feed_forward_proj": "gated-x"}, "feed_forward_proj must be gelu, .* with gated-"),
        ("T5EncoderModel", {"relative_attention_num_buckets": 3}, "relative_attention_num_buckets must be at least 4"),
    )
    for name, changes, message in rows:
        with pytest.raises(ModelConfigError, match=message):
            read(SIZES | {"architectures": [name]} | changes)


def test_t5_takes_any_activation_with_or_without_a_gate():
    for kind, (activation, gated) in {"silu": ("silu", False), "gated-gelu": ("gelu_new", True)}.items():
        encoder = read({"architectures": ["T5EncoderModel"], "feed_forward_proj": kind}).encoder
        assert encoder is not None and (encoder.activation, encoder.gated) == (activation, gated)
