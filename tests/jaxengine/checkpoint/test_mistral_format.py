"""Mistral AI's own format, params.json and consolidated.safetensors: recorded checkpoints, written that way, are the
same models."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxengine.checkpoint.model_source import open_model
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.media.open import open_processor
from jaxengine.models.build import Build
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.config.readers.mistral import config_of_params
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.registry import build_model, read_folder, read_hf
from jaxengine.models.weights.formats.safetensors import SafetensorsCheckpoint
from jaxengine.models.weights.load import check_headers
from jaxengine.models.weights.views.mistral import renamed, under_transformers_names
from tests.fixtures.drawn_weights import checkpoint
from tests.fixtures.mistral_chats import tekken
from tests.tables import each_row

SIZES = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "intermediate_size": "hidden_dim",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tied_embeddings",
    "max_position_embeddings": "max_position_embeddings",
    "head_dim": "head_dim",
    "sliding_window": "sliding_window",
}
LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
EXPERTS = {
    "n_routed_experts": "num_experts",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "first_k_dense_replace": "first_k_dense_replace",
    "n_shared_experts": "num_shared_experts",
    "moe_intermediate_size": "expert_hidden_dim",
    "routed_scaling_factor": "routed_scale",
}
VISION = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_channels", "patch_size")
# transformers' names of modules within a layer, and Mistral AI's.
INNER = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{name}_proj": f"attention.w{name}" for name in ("q", "k", "v", "o", "q_a", "q_b", "kv_b")},
    "self_attn.kv_a_proj_with_mqa": "attention.wkv_a_with_mqa",
    "self_attn.q_a_layernorm": "attention.q_a_norm",
    "self_attn.kv_a_layernorm": "attention.kv_a_norm",
    "mlp.gate": "gate",
    "block_sparse_moe.gate": "feed_forward.gate",
}
ENDS = {"weight_scale": "qscale_weight", "input_scale": "qscale_act"}
PARTS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
OUTER = {"embed_tokens": "tok_embeddings", "norm": "norm", "lm_head": "output"}
PROJECTOR = {
    "linear_1": "vision_language_adapter.w_in",
    "linear_2": "vision_language_adapter.w_out",
    "norm": "pre_mm_projector_norm",
    "patch_merger.merging_layer": "patch_merger.merging_layer",
}


def params_of(config: dict) -> dict:
    """A recorded config.json as params.json."""
    text, rope = config.get("text_config", config), config.get("text_config", config)["rope_parameters"]
    params = {to: text[name] for name, to in SIZES.items() if name in text} | {"rope_theta": rope["rope_theta"]}
    if "kv_lora_rank" in text:
        params |= {name: text[name] for name in LATENT}
    if "num_experts_per_tok" in text:
        params["moe"] = {to: text[name] for name, to in EXPERTS.items() if name in text} | {"route_every_n": 1}
    if "layer_types" in text:
        kinds = text["layer_types"]
        params["sliding_window"] = [text["sliding_window"] if kind == "sliding_attention" else None for kind in kinds]
    original = rope.get("original_max_position_embeddings")
    if rope["rope_type"] == "yarn":
        # With mscale = mscale_all_dim whole queries and keys are scaled, in latent attention only.
        scaled = "kv_lora_rank" in text or "mscale_all_dim" not in rope
        scaled = {"apply_scale": scaled, "original_max_position_embeddings": original}
        betas = {"beta": rope.get("beta_fast", 32.0), "alpha": rope.get("beta_slow", 1.0)}
        params["yarn"] = {"factor": rope["factor"], **scaled, **betas}
    if "llama_4_scaling_beta" in rope:
        params["llama_4_scaling"] = {"beta": rope["llama_4_scaling_beta"], "original_max_position_embeddings": original}
    if (vision := config.get("vision_config")) is not None:
        found = {name: vision[name] for name in VISION} | {"image_size": vision["image_size"]}
        found |= {"rope_theta": 10000.0, "image_token_id": config["image_token_index"]}
        found["adapter_bias"] = config["multimodal_projector_bias"]
        if "spatial_merge_size" in config:
            merged = {"spatial_merge_size": config["spatial_merge_size"], "mm_projector_id": "patch_merge"}
            found |= merged | {"add_pre_mm_projector_layer_norm": True}
        params["vision_encoder"] = found
    return params


def name_of(name: str) -> str:
    """Mistral AI's name of a tensor of transformers."""
    name = name.removeprefix("model.").removeprefix("language_model.").removeprefix("model.")
    module, _, end = name.rpartition(".")
    end = ENDS.get(end, end)
    for old, new in PARTS.items():
        module = re.sub(rf"\b{old}$", new, module)
    if module.startswith("vision_tower."):
        module = re.sub(r"attention\.([qkvo])_proj", r"attention.w\1", module.replace("vision_tower", "vision_encoder"))
        return f"{module}.{end}"
    if module.startswith("multi_modal_projector."):
        return f"{PROJECTOR[module.partition('.')[2]]}.{end}"
    if found := re.fullmatch(r"layers\.(\d+)\.(.+)", module):
        inner = INNER.get(found[2]) or re.sub(r"^mlp\.(?=shared|experts)", "", found[2])
        inner = re.sub(r"^mlp\.", "feed_forward.", inner).replace("block_sparse_moe.", "feed_forward.")
        return f"layers.{found[1]}.{inner}.{end}"
    return f"{OUTER[module]}.{end}"


def in_pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows whose halves of a head are rotated together, so that neighbours are."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def written(name: str, folder: Path, **changes) -> tuple[dict, dict[str, np.ndarray]]:
    """A recorded checkpoint in Mistral AI's format; returns its config.json and tensors. changes: of params.json."""
    source = checkpoint(name)
    config, tensors = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    text, stored = config.get("text_config", config), {}
    heads = {"self_attn.q": text["num_attention_heads"], "self_attn.k": text["num_key_value_heads"]}
    heads |= {f".attention.{each}": config.get("vision_config", {}).get("num_attention_heads") for each in "qk"}
    for key, value in tensors.items():
        if key.endswith(("experts.gate_up_proj", "experts.down_proj")):  # [experts, out, in]
            up = "gate_up" in key
            for number, matrix in enumerate(value):
                parts = zip(("w1", "w3"), np.split(matrix, 2), strict=True) if up else [("w2", matrix)]
                layer = re.search(r"layers\.(\d+)\.", key)
                stored |= {f"layers.{layer[1]}.experts.{number}.{part}.weight": rows for part, rows in parts}
            continue
        count = next((count for end, count in heads.items() if f"{end}_proj.weight" in key), None)
        is_matrix = count is not None and value.ndim == 2
        stored[name_of(key)] = in_pairs(value, count) if is_matrix else value
    folder.mkdir(exist_ok=True)
    (folder / "params.json").write_text(json.dumps(params_of(config) | changes))
    save_file({key: np.ascontiguousarray(value) for key, value in stored.items()}, folder / "consolidated.safetensors")
    return config, tensors


NAMES = (
    *("mistral", "ministral", "ministral3", "mixtral", "mistral4"),
    *("mistral3_pictures_vision", "mistral4_pictures_vision", "pixtral_vision"),
)


def theirs_of(key: str, tensors: dict[str, np.ndarray]) -> tuple[str, np.ndarray]:
    """The recorded tensor, or part of a stack of experts, with the model's name `key`: (its name, its values)."""
    stacked = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", key)
    ends = {"down": "down_proj"}.get(stacked[3], "gate_up_proj") if stacked else ""
    own = f"{stacked[1]}.{ends}" if stacked else key
    spelt = (own, own.replace("model.", "model.language_model.", 1), f"model.{own}", f"language_model.{own}")
    name = next(each for each in (*spelt, key) if each in tensors)
    if not stacked or name == key:
        return name, tensors[name]
    matrix = tensors[name][int(stacked[2])]
    return name, matrix if stacked[3] == "down" else np.split(matrix, 2)[stacked[3] == "up"]


def test_a_checkpoint_in_the_other_format_is_the_same_model(tmp_path):
    for name in NAMES:
        folder = tmp_path / name
        config, tensors = written(name, folder)
        source, usual = open_model(EngineConfig(skip_tokenizer_init=True, model=str(folder))), read_hf(config)
        found, length = source.config, usual.max_position_embeddings
        if usual.tower is not None:  # the recorded towers have another activation than all of Mistral AI's
            assert found.tower.activation == "silu"
            found = dataclasses.replace(found, tower=dataclasses.replace(found.tower, activation="gelu"))
            processor = open_processor(folder, found)
            assert processor.longest == config["vision_config"]["image_size"] and processor.rounds
        layers = tuple(
            dataclasses.replace(each, window=None) if (each.window or 0) >= length else each for each in usual.attention
        )
        assert found == dataclasses.replace(usual, attention=layers, bos_token_id=1, eos_token_ids=(2,)), name
        compared = set()
        for key in source.weights.names():
            theirs, expected = theirs_of(key, tensors)
            compared.add(theirs)
            assert source.weights.shape(key) == expected.shape, key
            np.testing.assert_array_equal(source.weights.read(key), expected, err_msg=key)
            if expected.ndim == 2:  # a part of a matrix
                rows, columns = slice(len(expected) // 3, len(expected) - 1), slice(1, expected.shape[1])
                np.testing.assert_array_equal(source.weights.read(key, rows, columns), expected[rows, columns])
        assert compared == tensors.keys(), name
        source.close()


def test_images_are_as_large_as_in_the_library(tmp_path):
    """Rows and columns of an image's tokens, as mistral-common 1.13.1 counts them, and the marks between them."""
    written("mistral3_pictures_vision", tmp_path)
    params = json.loads((tmp_path / "params.json").read_text())
    params["vision_encoder"]["image_token_id"] = 10
    (tmp_path / "params.json").write_text(json.dumps(params))
    (tmp_path / "tekken.json").write_text(json.dumps(tekken(13)))
    config = EngineConfig(model=str(tmp_path))
    source = open_model(config)
    source.close()
    processor = open_processor(tmp_path, source.config, tokenizer=source.load_tokenizer(config))
    for size, grid in {(64, 64): (8, 8), (99, 130): (7, 8), (52, 200): (3, 8), (1, 40): (1, 5)}.items():
        assert processor.merged(processor.largest("image", size))[1:] == grid, size
    image = processor.process("image", np.zeros((16, 24, 3), np.uint8), {})
    ids = processor.expand([137, 10, 138], {"image": [image]}).token_ids
    assert ids == [137, 10, 10, 10, 12, 10, 10, 10, 13, 138]


def test_rows_that_were_rotated_in_pairs_are_rotated_in_halves(tmp_path):
    """Scores of a query and a key at two positions, rotated as Mistral AI's inference code does it and as models do."""
    folder, rng = tmp_path / "model", np.random.default_rng(0)
    written("mistral", folder)
    stored = load_file(folder / "consolidated.safetensors")
    view = open_model(EngineConfig(skip_tokenizer_init=True, model=str(folder))).weights
    x, angles = rng.standard_normal((2, 64)), 10000.0 ** -(np.arange(8) / 8)

    def turned(rows: np.ndarray, position: int, *, pairs: bool) -> np.ndarray:
        rows = rows.reshape(-1, 8, 2) if pairs else rows.reshape(-1, 2, 8).swapaxes(1, 2)
        return (rows[..., 0] + 1j * rows[..., 1]) * np.exp(1j * position * angles)

    scores = []
    for pairs in (True, False):
        q, k = (
            turned(stored[f"layers.0.attention.w{n}.weight"] @ x[at], place, pairs=True)
            if pairs
            else turned(view.read(f"model.layers.0.self_attn.{n}_proj.weight") @ x[at], place, pairs=False)
            for at, (n, place) in enumerate((("q", 9), ("k", 4)))
        )
        scores.append((q[:2] * k[0].conj()).sum(-1).real)
    np.testing.assert_allclose(*scores, rtol=1e-5)
    view.close()


def test_fp8_is_read_as_stored(tmp_path):
    written("mistral", tmp_path, quantization={"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"})
    path = tmp_path / "consolidated.safetensors"
    stored, codes = load_file(path), {}
    for name, value in stored.items():
        if re.search(r"(attention|feed_forward)\.w\w\.weight", name):
            scale = np.float32(np.abs(value).max() / 448)
            codes |= {name: (value / scale).astype(ml_dtypes.float8_e4m3fn)}
            scales = {"qscale_weight": scale, "qscale_act": np.float32(0.25)}
            codes |= {name.replace("weight", end): np.reshape(held, 1) for end, held in scales.items()}
    save_file(stored | codes, path)
    source = open_model(EngineConfig(skip_tokenizer_init=True, model=str(tmp_path)))
    check_headers(build_model(source.config, Build("float32")), source.weights, kinds=True)
    assert source.config.quantization.method == "fp8"
    assert source.weights.shape("model.layers.1.mlp.up_proj.weight_scale") == (1,)
    held = source.weights.read("model.layers.0.self_attn.q_proj.weight").astype(np.float32)
    scale = source.weights.read("model.layers.0.self_attn.q_proj.weight_scale")
    expected = load_file(checkpoint("mistral") / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    np.testing.assert_allclose(held * scale, expected, atol=0.07)
    source.close()


def test_packed_weights_have_the_order_of_their_rows(tmp_path):
    """compressed-tensors in Mistral AI's format: only tensors with the matrix's rows are put into another order."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    settings = {"quant_method": "compressed_tensors", "format": "pack-quantized", "config_groups": groups}
    written("mistral", tmp_path, quantization=settings)
    path, rng, name = tmp_path / "consolidated.safetensors", np.random.default_rng(0), "layers.0.attention.wq.weight"
    packed = {}
    for key, value in load_file(path).items():
        if not re.search(r"(attention|feed_forward)\.w\w\.weight", key):
            packed[key] = value
            continue
        rows, columns = value.shape
        packed[f"{key}_packed"] = rng.integers(0, 1 << 30, (rows, columns // 8), np.int32)
        packed[f"{key}_scale"] = np.ones((rows, columns // 16), np.float32)
        packed[f"{key}_shape"] = np.array([rows, columns])
    save_file(packed, path)
    options = {"skip_tokenizer_init": True, "model": str(tmp_path)}
    source = open_model(EngineConfig(**options))
    check_headers(build_model(source.config, Build("float32")), source.weights, kinds=True)
    held = source.weights.read("model.layers.0.self_attn.q_proj.weight_packed")
    np.testing.assert_array_equal(in_pairs(held, 4), packed[f"{name}_packed"])
    assert (held != packed[f"{name}_packed"]).any()
    shape = source.weights.read("model.layers.0.self_attn.q_proj.weight_shape")
    np.testing.assert_array_equal(shape, packed[f"{name}_shape"])
    source.close()
    save_file(packed | {f"{name}_zero_point": np.ones((8, 4), np.int32)}, path)
    with pytest.raises(ModelFileError, match=r"must have rows of 4 heads of even size, got \(8, 4\) .*zero_point"):
        open_model(EngineConfig(**options))
    with pytest.raises(ModelConfigError, match="quantization.ignore must be a list of names of modules, got 'x'"):
        config_of_params(PLAIN | {"quantization": settings | {"ignore": "x"}})


def test_a_stored_head_and_a_pooling_model(tmp_path):
    written("mistral", tmp_path, tied_embeddings=True)
    assert not open_model(EngineConfig(skip_tokenizer_init=True, model=str(tmp_path))).config.tie_word_embeddings
    pooled = open_model(EngineConfig(skip_tokenizer_init=True, model=str(tmp_path), runner="pooling"))
    assert pooled.pooling is not None and "model.layers.0.self_attn.q_proj.weight" in pooled.weights.names()
    pooled.close()


def test_options_choose_a_format(tmp_path):
    """With both formats in a folder the usual one counts, unless an option says otherwise."""
    written("mistral", tmp_path, max_position_embeddings=96)
    both = checkpoint("mistral")
    (tmp_path / "config.json").write_bytes((both / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((both / "model.safetensors").read_bytes())

    def opened(**options):
        source = open_model(EngineConfig(skip_tokenizer_init=True, model=str(tmp_path), **options))
        source.close()
        return source.config.max_position_embeddings, type(source.weights).__name__

    assert opened() == opened(config_format="hf", load_format="safetensors") == (64, "SafetensorsCheckpoint")
    assert opened(config_format="mistral", load_format="mistral") == (96, "MistralSource")
    assert opened(config_format="mistral") == (96, "SafetensorsCheckpoint")
    (tmp_path / "config.json").unlink()
    assert opened() == (96, "SafetensorsCheckpoint")
    with pytest.raises(ModelFileError, match="has no config.json; name a folder"):
        opened(config_format="hf")
    (tmp_path / "consolidated.safetensors").unlink()
    with pytest.raises(
        ModelFileError, match="neither consolidated.safetensors nor consolidated.safetensors.index.json"
    ):
        opened(load_format="mistral")
    with pytest.raises(ConfigError, match="config_format is 'gguf'; allowed: auto, hf, mistral"):
        EngineConfig(config_format="gguf")


def test_names_decide_whether_a_checkpoint_is_in_this_format(tmp_path):
    """Some prefix all of the text model's names; those of InternLM's base model are the same but for wqkv."""
    config = read_folder(checkpoint("mistral"))

    def has_this_format(*names: str) -> bool:
        save_file({f"{name}.weight": np.zeros((64, 64), np.float32) for name in names}, tmp_path / "model.safetensors")
        source = SafetensorsCheckpoint(tmp_path)
        found = under_transformers_names(source, config)
        source.close()
        return found is not source

    assert has_this_format("tok_embeddings", "layers.0.attention.wq")
    assert has_this_format("language_model.tok_embeddings", "language_model.layers.0.attention.wq")
    assert not has_this_format("tok_embeddings", "layers.0.attention.wqkv", "layers.0.attention.wo")
    assert not has_this_format("model.embed_tokens", "model.layers.0.self_attn.q_proj")


PLAIN = {"dim": 64, "n_layers": 4, "n_heads": 4, "hidden_dim": 80, "vocab_size": 128, "norm_eps": 1e-5}
LARGE = {"q_lora_rank": 28, "kv_lora_rank": 20, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 14}
SIZES_SEEN = {"hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
SEEN = SIZES_SEEN | {"num_channels": 3, "image_size": 64, "patch_size": 8, "rope_theta": 1e4, "image_token_id": 10}
YARN = {"original_max_position_embeddings": 16, "factor": 4, "apply_scale": False}


def test_fields_of_params_json():
    for changes, expected in (
        ({"sliding_window": 8}, {"sliding_window": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
        ({"max_seq_len": 77}, {"max_position_embeddings": 77, "architectures": ["MistralForCausalLM"]}),
        ({}, {"max_position_embeddings": 128_000, "num_key_value_heads": 4, "head_dim": 16, "sliding_window": None}),
        ({"_sliding_window": [200000, 8]}, {"layer_types": ["full_attention", "sliding_attention"] * 2}),
        ({"yarn": YARN, "llama_4_scaling": None}, {"model_type": "mistral"}),
        (LARGE, {"architectures": ["Mistral4ForCausalLM"], "first_k_dense_replace": 4}),
        ({"quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "NO_SCALES"}}, {}),
    ):
        config = config_of_params(PLAIN | changes)
        assert expected.items() <= config.items(), (changes, config)
        read_hf(config)
    assert config["quantization_config"]["activation_scheme"] == "dynamic"


@each_row(
    ("changes", "message"),
    [
        ({"dim": None}, "dim is missing"),
        ({"dim": "64"}, "dim must be an integer"),
        ({"model_type": "mamba"}, "model_type must be \"transformer\" or absent, got 'mamba'"),
        ({"ada_rms_norm_t_cond": True}, "ada_rms_norm_t_cond must be absent: what it means is not known, got True"),
        ({"sliding_window": [8, 9]}, "sliding_window must be windows of one size"),
        ({"sliding_window": [8, None, 8]}, "sliding_window must be a list of a length that divides n_layers = 4"),
        ({"sliding_window": 8, "_sliding_window": 8}, "_sliding_window must be absent beside sliding_window"),
        ({"moe": {"num_experts": 4, "num_experts_per_tok": 2, "jitter": 1}}, "moe.jitter must be absent"),
        (LARGE | {"moe": {"num_experts": 4, "num_expert_groups": 2}}, "moe.num_expert_groups must be 1 or absent"),
        ({"yarn": YARN | {"gamma": 2}}, "yarn.gamma must be absent"),
        (
            {"yarn": YARN, "llama_4_scaling": {"beta": 0.1, "original_max_position_embeddings": 8}},
            "llama_4_scaling.original_max_position_embeddings must be yarn's, 16, got 8",
        ),
        ({"quantization": {"qformat_weight": "nvfp4"}}, "quantization.qformat_weight must be 'fp8_e4m3'"),
        ({"multimodal": {"whisper_model_args": {}}}, "multimodal.whisper_model_args must be absent"),
        ({"vision_encoder": SEEN | {"mm_projector_id": "patch_merge"}}, "vision_encoder.mm_projector_id must be"),
        ({"vision_encoder": SEEN, **LARGE}, "vision_encoder.mm_projector_id must be absent, or of a text model of"),
        ({"vision_encoder": SEEN | {"tiles": 4}}, "vision_encoder.tiles must be absent"),
    ],
)
def test_what_params_json_may_not_say(changes, message):
    with pytest.raises(ModelConfigError, match=re.escape(message)):
        config_of_params(PLAIN | changes)


def test_faults_name_the_file(tmp_path):
    written("mistral", tmp_path, n_heads=0)
    with pytest.raises(ModelFileError, match="params.json: n_heads must be an integer >= 1"):
        open_model(EngineConfig(skip_tokenizer_init=True, model=str(tmp_path)))
    written("mistral", tmp_path, n_kv_heads=3)
    with pytest.raises(ModelFileError, match="params.json: num_"):
        read_folder(tmp_path)
    assert renamed("layers.3.attention.k_fake_quantizer.qscale_act") == "model.layers.3.self_attn.k_scale"
    assert renamed("rope.freqs") == "rope.freqs"
