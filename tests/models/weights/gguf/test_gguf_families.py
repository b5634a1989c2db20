"""GGUF files of every architecture that is read: the model and the weights of the checkpoint they were made from."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from jaxengine.checkpoint.model_source import open_model
from jaxengine.config.engine_config import EngineConfig
from jaxengine.models.build import Build
from jaxengine.models.config.readers.gguf import READ_AS
from jaxengine.models.config.readers.hf import read_config_json
from jaxengine.models.families.declared import DeclaredForCausalLM
from jaxengine.models.model_classes import ENCODERS, MODELS
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.source import CheckpointNames, ExpertRows, WeightSource
from jaxengine.models.registry import build_model, read_hf
from jaxengine.models.weights.formats.safetensors import SafetensorsCheckpoint
from jaxengine.models.weights.gguf.layouts import LAYOUTS
from jaxengine.models.weights.load import load_params
from jaxengine.models.weights.views.expert_rows import ExpertRowsSource
from jaxengine.models.weights.views.renamed import RenamedSource
from jaxengine.models.weights.views.stacked import StackedSource
from tests.fixtures.drawn_weights import FOLDER, checkpoint, draw
from tests.fixtures.encoder_models import make_encoder
from tests.models.families.test_golden import assert_close, padded
from tests.models.weights.gguf import further_conversion, gguf_conversion, named_conversion, older_conversion
from tests.models.weights.gguf.gguf_states_conversion import STATES, converted_states
from tests.models.weights.gguf.gguf_writer import U32, gguf_bytes

MODULES = (older_conversion, named_conversion, further_conversion, gguf_conversion)
ARCHITECTURES = {name: architecture for module in MODULES for name, architecture in module.ARCHITECTURES.items()}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
# Recorded checkpoints, and changes to their config.json where the format cannot say all of it.
CASES: dict[str, dict[str, Any]] = {
    "mixtral": {"sliding_window": None},
    "ministral3": {},
    "qwen3_moe": {"mlp_only_layers": [], "norm_topk_prob": True},
    "phi3": {},
    "phi3_longrope": {},
    "granite": {},
    "minicpm": {},
    "seed_oss": {},
    "gemma_untied": {},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {
        "query_pre_attn_scalar": 12,
        "layer_types": None,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "gemma4": {"global_head_dim": 24},
    # Of which the part that reads text alone is in a file.
    "gemma4_moe": {"architectures": ["Gemma4ForCausalLM"], "global_head_dim": 16, "num_global_key_value_heads": 2},
    "olmo2_wide": {"rope_parameters": DEFAULT_ROPE},
    "olmo3": {},
    "smollm3_untied": {"no_rope_layers": None, "no_rope_layer_interval": None},
    "cohere": {},
    "cohere_untied": {"rope_parameters": DEFAULT_ROPE},
    "cohere2_wide": {"layer_types": None, "rope_parameters": DEFAULT_ROPE},
    "exaone4": {"rope_parameters": DEFAULT_ROPE},
    "exaone4_full": {},
    "starcoder2": {"sliding_window": None},
    "nemotron_tied": {"rope_parameters": DEFAULT_ROPE | {"partial_rotary_factor": 0.75}},
    "glm4": {},
    "ernie4_5": {},
    "hunyuan_dense": {},
    "qwen2_moe": {
        "mlp_only_layers": [],
        "norm_topk_prob": False,
        "use_sliding_window": False,
        "layer_types": None,
    },
    "olmoe": {"norm_topk_prob": False},
    "dots1": {"layer_types": None, "sliding_window": None, "scoring_func": "sigmoid"},
    "minimax_m2": {},
    "hunyuan_moe": {},
    "deepseek_v2": {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}},
    "deepseek_v2_groups": {"attention_bias": False},
    "deepseek_v3": {},  # whose file does not say how experts are chosen
    "exaone": {},
    "arcee": {},
    "olmo": {},
    "phi": {},
    "granite_moe": {},
    "gpt_oss": {"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    "llama4": {
        "attention_chunk_size": 8192,
        "attn_scale": 0.1,
        "floor_scale": 8192,
        "layer_types": None,
        "rope_parameters": DEFAULT_ROPE,
    },
}
# Those that further_conversion converts.
CASES |= {
    "gemma3n": {"altup_correct_scale": True, "laurel_rank": 64, "vocab_size_per_layer_input": 128},
    "glm4_moe": {"num_nextn_predict_layers": 0},  # recorded without the layer that files have in addition
    "glm4_moe_plain": {"num_nextn_predict_layers": 0},
    "ernie4_5_moe": {"num_hidden_layers": 2, "moe_norm_min": 1e-12},
    "ernie4_5_moe_tied": {},
    "exaone_moe": {},
    "exaone_moe_short": {"rope_parameters": DEFAULT_ROPE},
    "bailing_moe": {},
    "phimoe": {"router_jitter_noise": 0.01},
    "cohere": {},
    "cohere_untied": {"rope_parameters": DEFAULT_ROPE},
    "cohere2_moe": {"expert_selection_fn": "sigmoid"},
    "stablelm": {},
    "stablelm_norms": {},
}
# Tensors of sizes that llama.cpp fixes, and a table that its converter fills up.
RESIZED = {
    "shared_experts.gate_proj.weight": (24, 64),
    "shared_experts.up_proj.weight": (24, 64),
    "shared_experts.down_proj.weight": (64, 24),
    "laurel.linear_left.weight": (64, 64),
    "laurel.linear_right.weight": (64, 64),
    "model.embed_tokens_per_layer.weight": (128, 60),
}
# Models with states, most of whose logits are compared as well.
STATE_CASES: dict[str, dict[str, Any]] = {
    "qwen3_next": {"mlp_only_layers": [], "num_nextn_predict_layers": 0},
    "qwen3_5": {},
    "qwen3_5_moe": {},
    "lfm2": {},
    "lfm2_moe": {"routed_scaling_factor": 1.0},
    "granite_hybrid": {},
    "granite_hybrid_dense": {"intermediate_size": 56, "time_step_limit": None},
    "nemotron_h": {"hybrid_override_pattern": "M*EME", "num_hidden_layers": 5, "intermediate_size": 24},
}
STATE_CASES |= {
    "falcon_h1_long": {"mamba_d_ssm": 96, "mamba_norm_before_gate": False, "time_step_limit": None},
    "kimi_linear": {},
    "jamba": {},
    "jamba_dense": {},
    "mamba": {},
    "mamba2": {},
}
# Those that named_conversion converts.
CASES |= {
    "afmoe": {},
    "bailing_v3": {
        "expert_swiglu_limit_list": [None, 0.5, 0.0],
        "share_expert_swiglu_limit_list": [0.0, 0.0, 0.7],
    },
    "chatglm": {},
    "deepseek_moe": {},
    "deepseek_v32": {},
    "glm_moe_dsa": {},
    "granite_moe_swa": {"layer_rope_theta": [1e4, 0, 1e4]},
    "granite_moe_shared": {},
    "granite_swa": {"layer_rope_theta": [0, 1e4, 1e4]},
    "granite_swa_bias": {"rope_parameters": DEFAULT_ROPE},
    "hy_v3": {},
    "laguna": {},
    "laguna_elements": {
        "mlp_layer_types": ["dense", *["sparse"] * 2],
        "sliding_window": None,
        "num_attention_heads_per_layer": None,
    },
    "mellum": {},
    "minimax_m3": {
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse"],
        "shared_intermediate_size": 24,
        "swiglu_limit": 7.0,
    },
    "mimo_v2_5": {"sliding_window_size": None},
    "orion": {},
    "plamo3": {},
    "qwen": {"seq_length": 256},
    "step3p5": {
        "rope_scaling": None,
        "layer_types": ["full_attention", *["sliding_attention"] * 2],
        "moe_layers_enum": "1,2",
        "rope_theta": [5000.0, *[50.0] * 2],
        "partial_rotary_factors": [0.5, *[1.0] * 2],
        "swiglu_limits": [0.0, 0.5, 0.0],
        "swiglu_limits_shared": [0.6, 0.0, 0.7],
        "num_nextn_predict_layers": 0,
    },
}
# Those that older_conversion converts.
CASES |= {
    "apertus_tied": {},
    "dbrx": {},
    "decilm": {},
    "decilm_bias": {},
    "deepseek_v4": older_conversion.DEEPSEEK_V4,
    "glm5_next": {
        "text_config": None,
        "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
        **dict.fromkeys(("indexer_types", "mlp_layer_types")),
        "num_hidden_layers": 3,
        "num_nextn_predict_layers": 0,
        "first_k_dense_replace": 1,
    },
    "jais2": {},
    "minicpm3": {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},
    "mpt_odd": {"architectures": ["MptForCausalLM"], "attn_config": {"clip_qkv": 1.1, "alibi_bias_max": 6}},
    "nanbeige": {},
    "nanbeige_plain": {"loop_loss_weights": [], "num_loops": 3},
}
# Layers of a checkpoint that are left, in their order, where the format has no others.
LAYERS = {"nemotron_h": (0, 2, 3, 4, 5), "step3p5": (1, 0, 2), "laguna_elements": (1, 0, 2), "minimax_m3": (0, 1)}
LAYERS |= {"glm5_next": (0, 1, 2), "deepseek_v4": (0, 1, 3)}
CASES |= STATE_CASES
# What GPT-2 calls its sizes, and checkpoints whose matrices the converter arranges otherwise.
GPT2 = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
GPT2 |= {"n_positions": "max_position_embeddings", "layer_norm_epsilon": "layer_norm_eps"}
REARRANGED = ("gpt2", "gpt_neox")
# Models that see, of which files have the text, and whose configuration differs: of one norms of queries have weights.
SEEING = ("muse_glimmer_vision", "deepseek_ocr_vision")
JOINED = ("internlm2", "falcon", "falcon_groups", "bailing_lite", "bloom", "gpt_bigcode", "jais", "baichuan")
CHANGED_WEIGHTS = ("qwen3_moe", "qwen2_moe", "qwen3_next")

_LAYER = re.compile(r"model\.layers\.\d+\.")


def tensors_of(name: str, config: dict[str, Any]) -> dict[str, np.ndarray]:
    source: WeightSource = SafetensorsCheckpoint(checkpoint(name))
    architecture = config["architectures"][0]
    renamed = (
        name.startswith(("gemma4", "granite_moe", "apertus", "minimax_m3", "bailing_v3", "glm5", "deepseek_v4"))
        or name in SEEING
        or architecture in STATES
    )
    if renamed or issubclass(MODELS[architecture], DeclaredForCausalLM):
        source = RenamedSource(source, MODELS[architecture].checkpoint_names)
    if name == "dbrx":
        source = ExpertRowsSource(source, ExpertRows(("w1", "v1"), ("w2",)), config["ffn_config"]["moe_num_experts"])
    count = next(
        (config[each] for each in ("num_local_experts", "num_experts", "moe_num_experts") if each in config), 0
    )
    if count:
        source = StackedSource(source, MODELS[architecture].checkpoint_names.stacked_experts, count)
    if architecture == "DeepseekV2ForCausalLM" and not config["attention_bias"]:
        biases = CheckpointNames(unused=tuple(each for each in source.names() if each.endswith(".bias")) or ("-",))
        source = RenamedSource(source, biases)
    tensors = {tensor: source.read(tensor) for tensor in source.names()}
    source.close()
    if name == "minimax_m3":  # which transformers joins
        ends = ("gate_proj.weight", "up_proj.weight")
        parts = {
            tensor: [tensor]
            if "gate_up" not in tensor
            else [tensor.replace("gate_up_proj.weight", end) for end in ends]
            for tensor in tensors
        }
        tensors = {
            own: values
            for tensor, names in parts.items()
            for own, values in zip(names, np.split(tensors[tensor], len(names)), strict=True)
        }
    resized = {tensor: shape for tensor in tensors for end, shape in RESIZED.items() if tensor.endswith(end)}
    if name == "ernie4_5_moe":  # of whose layers the last has no experts
        tensors = {tensor: values for tensor, values in tensors.items() if ".layers.2." not in tensor}
    if name in ("gemma3n", "minimax_m3"):
        tensors |= {tensor: draw(tensor, shape) for tensor, shape in resized.items()}
    if name in LAYERS:
        places = {f"model.layers.{layer}.": f"model.layers.{place}." for place, layer in enumerate(LAYERS[name])}
        found = {tensor: _LAYER.match(tensor) for tensor in tensors}
        tensors = {
            tensor if match is None else tensor.replace(match[0], places[match[0]], 1): tensors[tensor]
            for tensor, match in found.items()
            if match is None or match[0] in places
        }
    if name in CHANGED_WEIGHTS:  # layers that were dense have experts
        shapes = {tensor: values.shape for tensor, values in tensors.items()}
        first = {tensor: shape for tensor, shape in shapes.items() if tensor.startswith("model.layers.0.mlp.")}
        for layer in range(config["num_hidden_layers"]):
            of_layer = (f"model.layers.{layer}.mlp.", "model.layers.0.mlp.")
            tensors = {tensor: values for tensor, values in tensors.items() if not tensor.startswith(of_layer[0])} | {
                tensor.replace(*of_layer[::-1]): draw(tensor.replace(*of_layer[::-1]), shape)
                for tensor, shape in first.items()
            }
    return tensors


def approximately(value: Any) -> Any:
    """A configuration to compare with: numbers of a GGUF file have float32's precision."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: approximately(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [approximately(each) for each in value]
    return pytest.approx(value, rel=1e-6) if isinstance(value, float) else value


def exactly(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: exactly(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return [exactly(each) for each in value] if isinstance(value, tuple) else value


@pytest.fixture
def opened(tmp_path):
    """name of a case -> its config.json, its tensors, and the opened GGUF file that was made of them."""
    sources = []

    def open_case(name: str):
        raw = read_config_json(FOLDER / name)
        config = {**raw, **raw.get("text_config", {}), **CASES.get(name, {})}
        if name in REARRANGED:
            config |= {usual: raw[own] for own, usual in GPT2.items() if own in raw}
            config |= {"num_key_value_heads": config["num_attention_heads"], "rope_theta": 10000.0}
            if "n_inner" in raw:
                config["intermediate_size"] = raw["n_inner"] or 4 * config["hidden_size"]
        tensors = tensors_of(name, config)
        if config["architectures"][0] in STATES:
            convert = converted_states
        else:
            convert = next(each.converted for each in MODULES if config["architectures"][0] in each.ARCHITECTURES)
        (path := tmp_path / "model.gguf").write_bytes(convert(config, tensors))
        sources.append(open_model(EngineConfig(model=str(path), skip_tokenizer_init=True)))
        return config, tensors, sources[-1]

    yield open_case
    for source in sources:
        source.close()


@pytest.mark.parametrize("name", CASES)
def test_the_model_and_its_weights(opened, name):
    config, tensors, source = opened(name)
    longest = source.config.max_position_embeddings
    expected = read_hf(config).up_to(longest)
    # What a window of the whole context or more keeps out is nothing.
    windows = [layer.window if (layer.window or longest) < longest else None for layer in expected.attention]
    layers = zip(expected.attention, windows, strict=True)
    expected = dataclasses.replace(
        expected, attention=tuple(dataclasses.replace(layer, window=window) for layer, window in layers)
    )
    if issubclass(MODELS[expected.architecture], found := MODELS[source.config.architecture]):  # of another config.json
        expected = dataclasses.replace(expected, architecture=found.__name__)
    assert exactly(source.config) == approximately(expected)
    rope = {tensor for tensor in source.weights.names() if tensor.startswith("rope_")}
    assert set(source.weights.names()) - rope == tensors.keys()
    for tensor, values in tensors.items():
        # Norms to which the format adds one lose some of float32's last bits.
        atol = 2e-7 if LAYOUTS[(ARCHITECTURES | STATES)[config["architectures"][0]]].norm_offset else 0
        if tensor.endswith(".A_log"):
            atol = 1e-6
        np.testing.assert_allclose(source.weights.read(tensor), values, rtol=0, atol=atol, err_msg=tensor)
    load_params(build_model(source.config, Build("float32")), source.weights)


@pytest.mark.parametrize(
    "name",
    [
        "phi3_longrope",
        "exaone4_full",
        "deepseek_v3",
        "youtu",
        "qwen3_5",
        "falcon_h1",  # whose file has no multipliers: its weights include them
        "internlm2",
        "falcon_groups",
        *SEEING,
        "gpt_bigcode",
        "jais",
        *(
            pytest.param(name, marks=pytest.mark.thorough("as others"))
            for name in (*REARRANGED, "falcon", "bailing_lite", "bloom")
        ),
    ],
)
def test_logits_are_the_recorded_ones(opened, recorded, paged_run, name):
    _, _, source = opened(name)
    check_logits(source, recorded(name), paged_run)


def check_logits(source, golden, paged_run):
    model = build_model(source.config, Build("float32"))
    nnx.update(model, load_params(model, source.weights))
    for index, prompt in enumerate(golden.prompts):
        logits = paged_run(model).step({"a": prompt}, num_tokens=padded(len(prompt)))["a"]
        assert_close(logits, golden.logits[index])


@pytest.mark.parametrize("name", ["glm4_moe", "exaone_moe", "bailing_moe", "cohere2_moe"])
def test_a_layer_that_predicts_further_tokens_is_not_loaded(tmp_path, monkeypatch, name):
    config = {**read_config_json(FOLDER / name), **CASES[name]}
    tensors, count, size = tensors_of(name, config), config["num_hidden_layers"], config["hidden_size"]
    last = f".layers.{count - 1}."
    tensors |= {key.replace(last, f".layers.{count}."): each for key, each in tensors.items() if last in key}

    def with_layer(metadata, written):
        own = metadata["general.architecture"][1]
        more = {f"{own}.block_count": (U32, count + 1), f"{own}.nextn_predict_layers": (U32, 1)}
        ends = ["nextn.eh_proj", "nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm", "nextn.embed_tokens"]
        ends += ["layer_output_norm", "further_norm"]
        unread = np.zeros((size, size), np.float32)
        added = (gguf_conversion.tensor(f"blk.{count}.{end}.weight", unread) for end in ends)
        return gguf_bytes(metadata | more, [*written, *added])

    monkeypatch.setattr(further_conversion, "gguf_bytes", with_layer)
    (path := tmp_path / "model.gguf").write_bytes(further_conversion.converted(config, tensors))
    source = open_model(EngineConfig(model=str(path), skip_tokenizer_init=True))
    assert len(source.config.attention) == count
    load_params(build_model(source.config, Build("float32")), source.weights)
    source.close()


@pytest.mark.parametrize(
    "name",
    ["bert", "distilbert", "nomic", "modernbert", "modernbert_masked", "jina_v2", "jina_v2 split"]
    + ["embedding_gemma", "jina_v3", "eurobert", "t5", "t5_gated"],
)
def test_an_encoder_and_its_weights(tmp_path, name):
    folder = make_encoder(tmp_path / "folder", name.split()[0])
    config = json.loads((folder / "config.json").read_bytes())
    if name == "embedding_gemma":  # the format cannot say another scale
        config["query_pre_attn_scalar"] = config["head_dim"]
    if name.startswith("t5"):
        config["relative_attention_max_distance"] = 128
    if name == "jina_v3":
        config |= {"hidden_act": "gelu", "layer_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 20000.0}}
    (folder / "config.json").write_text(json.dumps(config))
    prefix = "" if not name.endswith("masked") else "model."
    tensors = {key.removeprefix(prefix): values for key, values in load_file(folder / "model.safetensors").items()}
    file = further_conversion.converted_encoder(config, tensors, split="split" in name)
    (path := tmp_path / "model.gguf").write_bytes(file)
    engines = [EngineConfig(model=str(place), runner="pooling", skip_tokenizer_init=True) for place in (folder, path)]
    expected, found = (open_model(each) for each in engines)
    assert found.pooling is not None and expected.pooling is not None
    assert found.pooling.token_rows == expected.pooling.token_rows
    # Which ends of prompts and biases of MLPs an encoder has is of no matter, or its class says it.
    same: dict[str, Any] = {"architecture": "", "pooler": None, "eos_token_ids": (), "bos_token_id": None}
    same["mlp_bias"] = expected.config.mlp_bias
    if "split" in name:
        same["encoder"] = expected.config.encoder
    shapes = [dataclasses.replace(source.config, **same) for source in (found, expected)]
    assert exactly(shapes[0]) == approximately(shapes[1])
    loaded = [load_params(build_model(source.config, Build("float32")), source.weights) for source in (found, expected)]
    states = [dict(nnx.to_flat_state(state)) for state in loaded]
    # Dense modules are files of their own, which a GGUF file lacks.
    assert states[0].keys() == {key for key in states[1] if key[0] != "dense"}
    for key, values in states[0].items():
        np.testing.assert_allclose(values[...], states[1][key][...], rtol=0, atol=2e-7, err_msg=str(key))
    for source in (found, expected):
        source.close()


def test_rows_in_the_order_of_halves(tmp_path, recorded, paged_run):
    """Rows of heads in files of GLM-4.1V and GLM-OCR, which say how many pairs rotate by each of three positions, are
    in the order that the converter's Glm4Model.normal_to_neox gives those that rotate.
    """
    raw, size = read_config_json(FOLDER / "glm4"), 24
    tensors, order = tensors_of("glm4", raw), [*range(0, 12, 2), *range(1, 12, 2), *range(12, size)]
    for name, values in tensors.items():
        if "q_proj" in name or "k_proj" in name:
            tensors[name] = values.reshape(-1, size, *values.shape[1:])[:, order].reshape(values.shape)
    config = {**raw, "rope_parameters": {**raw["rope_parameters"], "mrope_section": [2, 2, 2, 0]}}
    (path := tmp_path / "model.gguf").write_bytes(gguf_conversion.converted(config, tensors))
    source = open_model(EngineConfig(model=str(path), skip_tokenizer_init=True))
    check_logits(source, recorded("glm4"), paged_run)
    source.close()


def test_decays_of_another_sign(tmp_path):
    """Files of Ling 3 have them above 0, those of other architectures below."""
    config = {**read_config_json(FOLDER / "bailing_v3"), **CASES["bailing_v3"]}

    def negated(name: str, values: np.ndarray):
        return gguf_conversion.tensor(name, -values if name.endswith("ssm_a") else values)

    (path := tmp_path / "model.gguf").write_bytes(
        named_conversion.converted(config, tensors_of("bailing_v3", config), negated)
    )
    source = open_model(EngineConfig(model=str(path), skip_tokenizer_init=True))
    with pytest.raises(ModelFileError, match="must not hold numbers below 0"):
        source.weights.read("model.layers.0.attention.A_log")
    source.close()


def test_every_layout_has_a_family_and_a_case():
    families = {model.gguf_architecture for model in (*MODELS.values(), *ENCODERS.values()) if model.gguf_architecture}
    assert {family.partition(" ")[0] for family in families} == set(LAYOUTS) - set(READ_AS)
    others = [(LAYOUTS[name], LAYOUTS[other]) for name, other in READ_AS.items()]
    assert all(own.permuted == other.permuted for own, other in others)
    # Those of Llama and Qwen are in test_gguf.py, that of Kimi K3 is in test_gguf_arranged.py.
    changed = {**CASES, **dict.fromkeys((*REARRANGED, *JOINED, *SEEING), {})}
    configs = ({**read_config_json(FOLDER / name), **changes} for name, changes in changed.items())
    cases = {config["architectures"][0] for config in configs}
    encoders = {architecture for architecture, _ in further_conversion.ENCODERS.values()}
    others = {"llama", "qwen2", "qwen3", "kimi-k3", *READ_AS, *encoders}
    assert {(ARCHITECTURES | STATES)[case] for case in cases} | others == set(LAYOUTS)
