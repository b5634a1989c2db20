"""Drafts of the layer that predicts the token after the next change no token, and are right where it knows what the
model does: of checkpoints made so that it does, by the hidden states alone, or by its keys and values alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxengine import LLM, SamplingParams
from jaxengine.config.base.platforms import PLATFORMS
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.config.features.speculation import MTP
from jaxengine.models.build import Build
from jaxengine.models.registry import build_next_token, read_folder, read_hf
from jaxengine.models.weights.load import load_params
from jaxengine.models.weights.views.renamed import NextTokenSource
from jaxengine.runner.extensions.drafts.open import open_draft
from jaxengine.runner.weights.weight_names import WeightUpdateError
from tests.fixtures.drawn_weights import FOLDER, checkpoint, draw_all
from tests.jaxengine.engine.test_draft_models import accepted_share, assert_counts_on, assert_told
from tests.jaxengine.engine.test_speculation import assert_same, force, workload
from tests.sharding.parallel_cases import OPTIONS
from tests.sharding.parallel_models import GLM4

SIZE = 64
TINY = GLM4 | {
    "hidden_size": SIZE,
    "vocab_size": SIZE,
    "num_hidden_layers": 1,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 0,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "partial_rotary_factor": 1.0,
    "rms_norm_eps": 1e-9,
    "attention_bias": False,
}


def layer_shapes(layer: int) -> dict[str, list[int]]:
    heads, kv_heads, head_dim, ffn = 4, 2, 16, 16
    shapes = {
        "self_attn.q_proj": [heads * head_dim, SIZE],
        "self_attn.k_proj": [kv_heads * head_dim, SIZE],
        "self_attn.v_proj": [kv_heads * head_dim, SIZE],
        "self_attn.o_proj": [SIZE, heads * head_dim],
        "mlp.gate": [2, SIZE],
        **{f"mlp.experts.{each}.{name}_proj": [ffn, SIZE] for each in range(2) for name in ("gate", "up")},
        **{f"mlp.experts.{each}.down_proj": [SIZE, ffn] for each in range(2)},
        **{f"mlp.shared_experts.{name}_proj": [ffn, SIZE] for name in ("gate", "up")},
        "mlp.shared_experts.down_proj": [SIZE, ffn],
        "input_layernorm": [SIZE],
        "post_attention_layernorm": [SIZE],
    }
    return {f"model.layers.{layer}.{name}.weight": shape for name, shape in shapes.items()}


def write(folder, tensors: dict[str, np.ndarray]) -> str:
    """A checkpoint whose embeddings have a root mean square of one, which its norms leave as they are."""
    ones, table = np.ones(SIZE, np.float32), np.sqrt(SIZE) * np.eye(SIZE, dtype=np.float32)
    extra = {f"model.layers.1.{name}.weight": ones for name in ("enorm", "hnorm", "shared_head.norm")}
    bias = {f"model.layers.{layer}.mlp.gate.e_score_correction_bias": np.zeros(2, np.float32) for layer in range(2)}
    shared = {"model.norm.weight": ones, "model.embed_tokens.weight": table}
    folder.mkdir()
    save_file(extra | bias | shared | tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(TINY))
    return str(folder)


def counting(folder) -> str:
    """A model of which token t + 1 follows t, and a layer that reads it off hidden states, of the token not at all."""
    silent = {name: np.zeros(shape, np.float32) for layer in range(2) for name, shape in layer_shapes(layer).items()}
    shift = np.roll(np.eye(SIZE, dtype=np.float32), 1, axis=0)  # of t it makes t + 1
    joined = np.concatenate([np.zeros_like(shift), shift], axis=1)
    return write(folder, silent | {"lm_head.weight": shift, "model.layers.1.eh_proj.weight": joined})


def one_layer(folder) -> str:
    """A model of one layer, and the same layer behind it, which sees the embeddings of all tokens but the first one."""
    drawn = draw_all(layer_shapes(0))
    # Attention far from uniform, so that what came long ago decides; of token 0, with which prompts begin, it takes no
    # notice but for its part of the sum.
    drawn["model.layers.0.self_attn.q_proj.weight"] *= 3
    for name in "kv":
        drawn[f"model.layers.0.self_attn.{name}_proj.weight"][:, 0] = 0
    again = {name.replace("layers.0.", "layers.1."): value for name, value in drawn.items()}
    joined = np.concatenate([np.eye(SIZE, dtype=np.float32), np.zeros((SIZE, SIZE), np.float32)], axis=1)
    head = draw_all({"lm_head.weight": [SIZE, SIZE]})
    return write(folder, drawn | again | head | {"model.layers.1.eh_proj.weight": joined})


def in_blocks(folder: str) -> str:
    """The checkpoint with matrices as DeepSeek-V3 stores them: e4m3 with a scale a block, what joins as it was."""
    model, stored = Path(folder), {}
    for name, value in load_file(model / "model.safetensors").items():
        stored[name] = value
        if "_proj" in name and "eh_proj" not in name:
            scale = np.abs(value).max() / np.float32(448)
            stored[name] = (value / scale).astype(ml_dtypes.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = np.full((1, 1), scale, np.float32)
    save_file(stored, model / "model.safetensors")
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    (model / "config.json").write_text(json.dumps(TINY | {"quantization_config": blocks}))
    return folder


@pytest.fixture(scope="module")
def options(executables_dir):
    known = {"load_format": "auto", "skip_tokenizer_init": True, "num_gpu_blocks_override": 40}
    return OPTIONS | known | {"compile_cache_dir": executables_dir}


@pytest.fixture(scope="module")
def drafts(thorough):
    return {"method": "mtp", "num_speculative_tokens": 2 if thorough else 1}


@pytest.mark.thorough("what has to come together for the test below to draft rightly")
def test_hidden_states_and_tokens_come_together(tmp_path, options, drafts):
    llm = LLM(counting(tmp_path / "model"), **options, speculative_config=drafts)
    assert_counts_on(llm, SIZE, (3, 2)[drafts["num_speculative_tokens"] == 1 :])


def test_keys_and_values_are_those_of_all_tokens_before(tmp_path, options, drafts, thorough):
    model = one_layer(tmp_path / "model")
    drafting = LLM(model, **options, speculative_config=drafts)
    plain = LLM(model, **options) if thorough else drafting
    rng = np.random.default_rng(2)
    lengths, prefix = rng.integers(3, 16, 24), rng.integers(1, SIZE, 20).tolist()
    prompts = [
        {"prompt_token_ids": [0, *prefix * (index % 3 == 0), *rng.integers(1, SIZE, length).tolist()]}
        for index, length in enumerate(lengths)
    ]
    own = {"max_tokens": 20, "ignore_eos": True, "detokenize": False}
    params = [SamplingParams(temperature=0.7 * (index % 2), seed=index, **own) for index in range(len(prompts))]
    force(drafting, 1)
    expected = plain.generate(prompts, params, use_tqdm=False)  # without drafts
    for width in (3, 2)[drafts["num_speculative_tokens"] == 1 :]:
        force(drafting, width)
        drafting.reset_prefix_cache()
        for known in (False, True):
            share = accepted_share(drafting, prompts, params, expected)
            assert share > 0.95, (width, known, share)
    metrics = {metric.name: metric.value for metric in drafting.get_metrics()}
    assert metrics["vllm:num_preemptions"] > 0 and metrics["vllm:prefix_cache_hits"] > 0
    assert drafting.core.engine.scheduler.num_free_pages == 40
    # New weights of the layer change drafts and no token; the model's tensors beside them are left out.
    tensors, name = load_file(Path(model) / "model.safetensors"), "model.layers.1.eh_proj.weight"
    prompts, params, expected = prompts[:8], params[:8], expected[:8]
    for wrong, chunk_bytes in ((True, None), (False, None), (True, 1000), (False, 1000)):
        given = tensors | {name: tensors[name] * (-1 if wrong else 1), "lm_head.weight": np.zeros((1, 1))}
        drafting.update_weights(iter(given.items()), target="draft", chunk_bytes=chunk_bytes)
        share = accepted_share(drafting, prompts, params, expected)
        assert share < 0.6 if wrong else share > 0.95, (wrong, share)
    drafting.update_weights({name: -tensors[name]}, target="draft", strict=False)
    assert accepted_share(drafting, prompts, params, expected) < 0.6
    drafting.update_weights(model, target="draft")
    assert accepted_share(drafting, prompts, params, expected) > 0.95
    with pytest.raises(WeightUpdateError, match="eh_proj.weight: .*missing"):
        drafting.update_weights({each: tensors[each] for each in tensors if each != name}, target="draft")
    assert drafting.weight_version == 0 and drafting.core.runner.compiles.count == 0


def apart(folder: Path) -> tuple[str, str]:
    """The checkpoint of one_layer without the layer behind its own, and that layer alone, under vLLM's name for it."""
    whole, layer = Path(one_layer(folder / "model")), folder / "layer"
    tensors = load_file(whole / "model.safetensors")
    layer.mkdir()
    of_layer = {name: value for name, value in tensors.items() if name.startswith("model.layers.1.")}
    save_file(of_layer, layer / "model.safetensors")
    (layer / "config.json").write_text(json.dumps(TINY | {"architectures": ["Glm4MoeMTPModel"]}))
    save_file({name: tensors[name] for name in tensors.keys() - of_layer.keys()}, whole / "model.safetensors")
    (whole / "config.json").write_text(json.dumps(TINY | {"num_nextn_predict_layers": 0}))
    return str(whole), str(layer)


def test_a_layer_is_opened_from_a_checkpoint_of_its_own(tmp_path):
    whole, layer = apart(tmp_path)
    chosen = {"method": "glm4_moe_mtp", "model": layer, "num_speculative_tokens": 1}
    config, model = EngineConfig(model=whole, speculative_config=chosen), read_folder(Path(whole))
    config.resolved(model, PLATFORMS["cpu"])
    draft = open_draft(config, model)
    assert isinstance(draft.weights, NextTokenSource) and draft.config.num_nextn_predict_layers == 1
    head = build_next_token(draft.config, Build("float32"))
    read = load_params(head, draft.weights)
    joined = load_file(Path(layer) / "model.safetensors")["model.layers.1.eh_proj.weight"]
    assert any(np.array_equal(value, joined.T) or np.array_equal(value, joined) for value in jax.tree.leaves(read))
    draft.close()
    for changed, said in (
        ({"vocab_size": 65}, "vocab_size 65, and the model 64"),
        ({"num_hidden_layers": 2}, "num_layers 2, and the model 1"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "architecture Qwen3ForCausalLM, and the model Glm4MoeForCausalLM"),
        ({"num_nextn_predict_layers": 0}, "has no next-token layer that is read"),
    ):
        (Path(layer) / "config.json").write_text(json.dumps(TINY | changed))
        with pytest.raises(ConfigError, match=said):
            open_draft(config, model)


@pytest.mark.thorough("layers of drafts are quantised as others are")
@pytest.mark.parametrize("own", [True, False], ids=["own", "apart"])
def test_a_layer_of_a_quantised_model_or_of_another_checkpoint(own, tmp_path, options):
    model, layer = (in_blocks(one_layer(tmp_path / "model")), None) if own else apart(tmp_path)
    drafts = {"method": "mtp", "num_speculative_tokens": 1, "model": layer}
    drafting = LLM(model, **options, speculative_config=drafts)
    rng = np.random.default_rng(3)
    prompts = [{"prompt_token_ids": [0, *rng.integers(1, SIZE, length).tolist()]} for length in range(3, 15)]
    params = [SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)] * len(prompts)
    force(drafting, 1)
    expected = drafting.generate(prompts, params, use_tqdm=False)  # without drafts
    force(drafting, 2)
    assert accepted_share(drafting, prompts, params, expected) > 0.95
    layers = {
        row["modules"]: row["format"] for row in drafting.core.utility("weights") if row["modules"].startswith("layers")
    }
    assert_told(drafting, layers | {"joined": "as it is"})


@pytest.mark.thorough("minutes of compiling")
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_families(family, tmp_path, executables_dir):
    raw = json.loads((FOLDER / family / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    options = OPTIONS | {"model": str(tmp_path), "skip_tokenizer_init": True, "num_gpu_blocks_override": 60}
    options["compile_cache_dir"] = executables_dir
    plain = LLM(**options)
    for count in (1, 3, 7):
        drafting = LLM(**options, speculative_config={"method": "mtp", "num_speculative_tokens": count})
        force(drafting, 8 if count == 7 else None)
        for temperature in (0.0, 0.7, 1.0):
            prompts, params = workload(temperature, 100, text=False)
            expected = plain.generate(prompts, params, use_tqdm=False)
            assert_same(drafting.generate(prompts, params, use_tqdm=False), expected)


def test_models_without_such_a_layer_say_so():
    config = EngineConfig(speculative_config={"method": "deepseek_mtp", "num_speculative_tokens": 1})
    assert config.speculative_config is not None and config.speculative_config.method == MTP
    with pytest.raises(ConfigError, match="num_nextn_predict_layers of this Glm4MoeForCausalLM is 0"):
        config.resolved(read_hf(GLM4), PLATFORMS["cpu"])
    with pytest.raises(ConfigError, match="the 2 next-token layers of this Step3p5ForCausalLM are not"):
        config.resolved(read_hf(json.loads((FOLDER / "step3p5" / "config.json").read_text())), PLATFORMS["cpu"])
    config.resolved(read_hf(TINY), PLATFORMS["cpu"])
    drafts = {"method": "mtp", "num_speculative_tokens": 1}
    more: dict[str, Any] = {"load_format": "auto", "skip_tokenizer_init": True, "speculative_config": drafts}
    with pytest.raises(ConfigError, match="this checkpoint has no such layer; give speculative_config.model"):
        LLM(str(checkpoint("qwen3_next")), **OPTIONS | more)
