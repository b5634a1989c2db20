"""Engines of tiny models over eight devices: run as a module it prints, for each case named, what came out.

    python -m tests.sharding.parallel_cases FOLDER CACHE CASE ...

needs eight devices (XLA_FLAGS=--xla_force_host_platform_device_count=8).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tokenizers

from jaxengine import LLM, SamplingParams
from tests.sharding.parallel_models import MODELS, MOE

RAGGED = {"all2all_backend": "ragged_all_to_all"}
# model, engine options; `first` is the first of the eight devices to take from
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tp2": ("dense", {"tensor_parallel_size": 2}),
    "tp4": ("dense", {"tensor_parallel_size": 4}),
    "tp8": ("dense", {"tensor_parallel_size": 8}),
    "dp2": ("dense", {"data_parallel_size": 2}),
    "dp4": ("dense", {"data_parallel_size": 4}),
    "pp2": ("tied", {"pipeline_parallel_size": 2}),
    "pp4": ("tied", {"pipeline_parallel_size": 4}),
    "tp2 pp2": ("tied", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    "tp2 dp2": ("dense", {"tensor_parallel_size": 2, "data_parallel_size": 2}),
    "tp2 dp2 pp2": ("tied", {"tensor_parallel_size": 2, "data_parallel_size": 2, "pipeline_parallel_size": 2}),
    "1 kv head, tp4": ("kv1", {"tensor_parallel_size": 4}),
    "1 kv head, tp4, replicated": ("kv1", {"tensor_parallel_size": 4, "replicate_kv_heads": True}),
    "2 kv heads, tp4": ("tied", {"tensor_parallel_size": 4}),
    "2 kv heads, tp4, replicated": ("tied", {"tensor_parallel_size": 4, "replicate_kv_heads": True}),
    "3 kv heads, tp4, the last devices": ("kv3", {"tensor_parallel_size": 4, "first": 4}),
    "3 kv heads, tp3": ("kv3", {"tensor_parallel_size": 3}),
    "phi3 tp2": ("phi3", {"tensor_parallel_size": 2}),
    "phi3 tp4": ("phi3", {"tensor_parallel_size": 4}),
    "phi3 tp2 pp2": ("phi3", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    "phi3 tp8, replicated": ("phi3", {"tensor_parallel_size": 8, "replicate_kv_heads": True}),
    "gemma2 tp2": ("gemma2", {"tensor_parallel_size": 2}),
    "gemma2 tp4": ("gemma2", {"tensor_parallel_size": 4}),
    "gemma2 pp2": ("gemma2", {"pipeline_parallel_size": 2}),
    "gemma2 tp2 dp2 pp2": (
        "gemma2",
        {"tensor_parallel_size": 2, "data_parallel_size": 2, "pipeline_parallel_size": 2},
    ),
    "gemma3n tp2 pp2": (
        "gemma3n",
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "pipeline_layers": (2, 4)},
    ),
    "gemma4 tp2 dp2": ("gemma4", {"tensor_parallel_size": 2, "data_parallel_size": 2}),
    "gemma4 tp8, replicated": ("gemma4", {"tensor_parallel_size": 8, "replicate_kv_heads": True}),
    "gemma4 tp2 pp2": (
        "gemma4",
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "pipeline_layers": (2, 4)},
    ),
    "gemma4_moe tp4": ("gemma4_moe", {"tensor_parallel_size": 4}),
    "gemma4_moe tp2 dp2 ep": (
        "gemma4_moe",
        {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True},
    ),
    "gemma4_moe tp2 pp2": ("gemma4_moe", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    "latent tp4": ("latent", {"tensor_parallel_size": 4}),
    "latent tp4 pp2, replicated": (
        "latent",
        {"tensor_parallel_size": 4, "pipeline_parallel_size": 2, "replicate_kv_heads": True},
    ),
    "latent tp2 dp2 ep": (
        "latent",
        {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True},
    ),
    "sparse tp4": ("sparse", {"tensor_parallel_size": 4}),
    "sparse tp4 pp2, replicated": (
        "sparse",
        {"tensor_parallel_size": 4, "pipeline_parallel_size": 2, "replicate_kv_heads": True},
    ),
    "sparse tp2 dp2 ep": (
        "sparse",
        {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True},
    ),
    "olmo2 tp2": ("olmo2", {"tensor_parallel_size": 2}),
    "olmo2 tp4, replicated": ("olmo2", {"tensor_parallel_size": 4, "replicate_kv_heads": True}),
    "moe tp2": ("moe", {"tensor_parallel_size": 2}),
    "moe tp2 dp2": ("moe", {"tensor_parallel_size": 2, "data_parallel_size": 2}),
    "moe tp2 dp2 ep": (
        "moe",
        {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True},
    ),
    "moe tp4 ep": ("moe", {"tensor_parallel_size": 4, "enable_expert_parallel": True}),
    "moe tp2 dp2 ep ragged": (
        "moe",
        {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True} | RAGGED,
    ),
    "moe tp4 ep ragged": ("moe", {"tensor_parallel_size": 4, "enable_expert_parallel": True} | RAGGED),
    "5 experts, dp2 ep ragged": ("moe5", {"data_parallel_size": 2, "enable_expert_parallel": True} | RAGGED),
    "6 experts, tp4 ep": ("moe6", {"tensor_parallel_size": 4, "enable_expert_parallel": True}),
}
CASES |= {
    "gpt_oss tp2": ("gpt_oss", {"tensor_parallel_size": 2}),
    "gpt_oss tp2 dp2 ep": (
        "gpt_oss",
        {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True},
    ),
    "gpt_oss tp4 ep ragged": ("gpt_oss", {"tensor_parallel_size": 4, "enable_expert_parallel": True} | RAGGED),
    "states tp2": ("states", {"tensor_parallel_size": 2}),
    "states pp2": ("states", {"pipeline_parallel_size": 2}),
    "states tp2 dp2 ep": (
        "states",
        {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True},
    ),
    "convolutions tp2": ("convolutions", {"tensor_parallel_size": 2}),
    "convolutions pp2": ("convolutions", {"pipeline_parallel_size": 2}),
    "convolutions tp2 dp2 ep": (
        "convolutions",
        {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True},
    ),
    "mamba2 tp2": ("mamba2", {"tensor_parallel_size": 2}),
    "mamba2 tp4, replicated": ("mamba2", {"tensor_parallel_size": 4, "replicate_kv_heads": True}),
    "mamba2 pp2": ("mamba2", {"pipeline_parallel_size": 2}),
    "mamba2 tp2 dp2 ep": (
        "mamba2",
        {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True},
    ),
    "glm4 tp4": ("glm4", {"tensor_parallel_size": 4}),
    "glm4 tp2 pp2": ("glm4", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    "glm4 tp4 dp2 ep": (
        "glm4",
        {"tensor_parallel_size": 4, "data_parallel_size": 2, "enable_expert_parallel": True},
    ),
    "glm4 tp4 ep ragged": ("glm4", {"tensor_parallel_size": 4, "enable_expert_parallel": True} | RAGGED),
}
CASES |= {
    "int8 tp2 pp2": ("int8", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    "int8 tp2 dp2 ep": ("int8", {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True}),
    "gates apart tp2": ("gates_apart", {"tensor_parallel_size": 2}),
    "gates apart tp2 dp2 ep": (
        "gates_apart",
        {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True},
    ),
    "awq tp2 pp2": ("awq", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
}
# Drafts of whatever came before, right and wrong; the run on one device has none.
_DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}}
CASES |= {
    "drafts": ("dense", _DRAFTS),
    "drafts tp2 dp2": ("dense", {"tensor_parallel_size": 2, "data_parallel_size": 2} | _DRAFTS),
    "drafts pp2": ("tied", {"pipeline_parallel_size": 2} | _DRAFTS),
    "drafts tp2 dp2 pp2": (
        "tied",
        {"tensor_parallel_size": 2, "data_parallel_size": 2, "pipeline_parallel_size": 2} | _DRAFTS,
    ),
    "drafts gemma2 tp2": ("gemma2", {"tensor_parallel_size": 2} | _DRAFTS),
    "drafts gemma4 tp2": ("gemma4", {"tensor_parallel_size": 2} | _DRAFTS),
    "drafts latent tp4": ("latent", {"tensor_parallel_size": 4} | _DRAFTS),
    "drafts sparse tp2 pp2": ("sparse", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2} | _DRAFTS),
    "drafts latent tp2 dp2 pp2, replicated": (
        "latent",
        {"tensor_parallel_size": 2, "data_parallel_size": 2, "pipeline_parallel_size": 2, "replicate_kv_heads": True}
        | _DRAFTS,
    ),
    "drafts latent tp2 dp2 pp2 ep, replicated": (
        "latent",
        {"tensor_parallel_size": 2, "data_parallel_size": 2, "pipeline_parallel_size": 2, "replicate_kv_heads": True}
        | {"enable_expert_parallel": True}
        | {"speculative_config": _DRAFTS["speculative_config"] | {"num_speculative_tokens": 1}},
    ),
    "drafts moe tp2 dp2 ep": (
        "moe",
        {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True} | _DRAFTS,
    ),
}
# A draft model, which is the model itself: SELF stands for its folder.
SELF = "itself"
_SELF = {"speculative_config": {"method": "draft_model", "model": SELF, "num_speculative_tokens": 3}}
CASES |= {
    "draft model tp2": ("dense", {"tensor_parallel_size": 2} | _SELF),
    "draft model, 2 kv heads, tp4": ("tied", {"tensor_parallel_size": 4} | _SELF),
    "draft model latent tp2 dp2, replicated": (
        "latent",
        {"tensor_parallel_size": 2, "data_parallel_size": 2, "replicate_kv_heads": True} | _SELF,
    ),
    "draft model moe tp2 dp2 ep": (
        "moe",
        {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True} | _SELF,
    ),
}
# Small enough that requests are preempted all the time, in every rank.
OPTIONS = {
    "load_format": "dummy",
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "block_size": 4,
    "num_gpu_blocks_override": 24,
    "compilation_config": {"cudagraph_capture_sizes": [8], "prefill_sizes": [32]},
    "disable_log_stats": True,
}
# The longest request holds 16 pages, or 27 where two cache groups take pages of the pool, 43 where three do.
MORE_PAGES: dict[str, dict[str, Any]] = dict.fromkeys(
    ("gemma2", "gemma4_moe", "gpt_oss"), {"num_gpu_blocks_override": 60}
)
MORE_PAGES |= dict.fromkeys(("gemma3n", "gemma4"), {"num_gpu_blocks_override": 96})


# Of requests that also run in engines with return_sampling_mask.
NO_MASKS = {"return_sampling_mask": False}


def requests() -> tuple[list[dict[str, Any]], list[SamplingParams]]:
    """Greedy and seeded requests, some with a common prefix, with what is computed over the split vocabulary."""
    rng = np.random.default_rng(3)
    prefix = rng.integers(0, 300, 20).tolist()
    prompts, params = [], []
    for index in range(20):
        own = rng.integers(0, 300, int(rng.integers(1, 30))).tolist()
        prompts.append({"prompt_token_ids": prefix + own if index % 3 == 0 else own})
        chosen: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "detokenize": False} | NO_MASKS
        if index >= 16:
            chosen |= {"seed": index, "structured_outputs": {"regex": "[a-z]{2,20}( [0-9]+)+"}, "max_tokens": 20}
        elif index % 4 == 0:
            chosen |= {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2 if index % 8 else None}
        elif index % 4 == 1:
            chosen |= {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "seed": index}
        elif index % 4 == 2:
            chosen |= {
                "temperature": 1.2,
                "min_p": 0.02,
                "seed": index,
                "repetition_penalty": 1.3,
                "frequency_penalty": 1,
            }
        else:
            chosen |= {"temperature": 0.0, "logit_bias": {7: 2.0, 290: 3.0}, "min_tokens": 3}
        params.append(SamplingParams(**chosen))
    # Alone in the end, when every width of drafts is tried, and sure to repeat itself: its drafts are right.
    prompts.append({"prompt_token_ids": [7, 7, 7, 7]})
    chosen = {"temperature": 0.0, "logit_bias": {7: 100.0}, "max_tokens": 40, "ignore_eos": True, "detokenize": False}
    params.append(SamplingParams(**chosen | NO_MASKS))
    return prompts, params


def write_tokenizer(path: Path) -> None:
    """A token for each byte, and an end; the model knows some more."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: index for index, char in enumerate([*alphabet, "<end>"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))


def run(folder: str, cache: str, model: str, options: dict[str, Any]) -> dict[str, Any]:
    """One engine's tokens and logprobs for `requests`, and what it did."""
    return answers(open_engine(folder, cache, model, options))


def open_engine(folder: str, cache: str, model: str, options: dict[str, Any]) -> LLM:
    path = Path(folder, model)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(MODELS[model]))
    write_tokenizer(path)
    options = dict(options)
    chosen = options.get("speculative_config", {})
    if chosen.get("model") == SELF:
        options["speculative_config"] = chosen | {"model": str(path)}
    first = options.pop("first", None)
    devices = None if first is None else jax.devices()[first:]
    return LLM(str(path), devices=devices, compile_cache_dir=cache, **OPTIONS | MORE_PAGES.get(model, {}), **options)


def answers(llm: LLM) -> dict[str, Any]:
    """Do as `run`, with an engine that is there."""
    outputs = llm.generate(*requests(), use_tqdm=False)
    metrics = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    load = llm.get_expert_load()
    if load is not None:  # padding goes to no expert, every token to as many as it should
        wanted = metrics["jaxengine:scheduled_tokens"] * MOE["num_experts_per_tok"]
        experts = llm.core.inputs.model_config.experts
        assert experts is not None and load.shape == (2, experts.num_experts), load
        assert load.sum(axis=1).tolist() == [wanted] * 2, (load, wanted)
    return {
        "tokens": [output.outputs[0].token_ids for output in outputs],
        "logprobs": [
            [(token, score.logprob) for step in output.outputs[0].logprobs for token, score in sorted(step.items())]
            for output in outputs
            if output.outputs[0].logprobs
        ],
        "prompt_logprobs": [
            [(token, score.logprob) for step in output.prompt_logprobs[1:] for token, score in sorted(step.items())]
            for output in outputs
            if output.prompt_logprobs
        ],
        "preemptions": metrics["vllm:num_preemptions"],
        "prefix_hits": metrics["vllm:prefix_cache_hits"],
        "compilations": metrics["jaxengine:compilations_since_ready"],
        "accepted": metrics.get("vllm:spec_decode_num_accepted_tokens"),
        "drafts": metrics.get("vllm:spec_decode_num_draft_tokens"),
    }


def differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """What of two results is not equal; logprobs may differ by rounding."""
    wrong = []
    for index, (one, other) in enumerate(zip(found["tokens"], wanted["tokens"], strict=True)):
        if one != other:
            wrong.append(f"tokens of request {index}: {one} instead of {other}")
    for name in ("logprobs", "prompt_logprobs"):
        for one, other in zip(found[name], wanted[name], strict=True):
            same = [token for token, _ in one] == [token for token, _ in other]
            if not same or not np.allclose([x for _, x in one], [x for _, x in other], atol=1e-4):
                wrong.append(f"{name} differ")
    return wrong


def main(folder: str, cache: str, *names: str) -> None:
    assert jax.device_count() == 8
    alone: dict[str, dict[str, Any]] = {}
    for name in names:
        model, options = CASES[name]
        if model not in alone:
            alone[model] = run(folder, cache, model, {})
        found = run(folder, cache, model, options)
        row = {key: found[key] for key in ("preemptions", "prefix_hits", "compilations", "accepted", "drafts")}
        print(json.dumps({"case": name, **row, "wrong": differences(found, alone[model])}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
