"""Adapters beside what else changes a product or a step: quantised weights, and drafts."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxengine import LLM, LoRARequest, RequestError, SamplingParams
from tests.conftest import TINY_CHECKPOINT, TINY_OPTIONS
from tests.fixtures.adapters import merged, write_adapter
from tests.fixtures.pooling_models import make_model
from tests.jaxengine.engine.test_speculation import force

OPTIONS = TINY_OPTIONS | {
    "max_model_len": 64,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "num_gpu_blocks_override": 96,
    "compilation_config": {"cudagraph_capture_sizes": [], "prefill_sizes": []},
    "enable_lora": True,
    "max_loras": 2,
    "max_lora_rank": 8,
}


@pytest.mark.thorough("a server with both is asked in test_drafts_and_adapters.py")
def test_tokens_are_those_without_drafts(tmp_path):
    adapters = [
        LoRARequest(f"a{number}", number, write_adapter(tmp_path / str(number), TINY_CHECKPOINT, seed=number))
        for number in (1, 2, 3)
    ]
    rng = np.random.default_rng(0)
    rows = [(rng.integers(0, 128, 5).tolist() * 4, [*adapters, None][number % 4]) for number in range(16)]
    prompts, chosen = ([row[part] for row in rows] for part in (0, 1))
    few = {int(token): 30.0 for token in rng.integers(0, 128, 3)}
    params = [
        SamplingParams(temperature=number % 3 / 2, seed=number, max_tokens=24, ignore_eos=True, logit_bias=few)
        for number in range(16)
    ]
    found = []
    for drafts in ({}, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}):
        with LLM(str(TINY_CHECKPOINT), **OPTIONS, **drafts) as llm:
            if drafts:
                force(llm, 4)
            outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=chosen)
            found.append([list(output.outputs[0].token_ids) for output in outputs])
            assert llm.core.runner.compiles.count == 0
            metrics = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    assert found[0] == found[1]
    assert metrics["vllm:spec_decode_num_accepted_tokens"] > 20


def test_vectors_of_a_pooling_model(tmp_path):
    """As of merged weights; rows with adapters and without share a batch. Pairs of texts have an adapter each."""
    adapters = [
        LoRARequest(f"a{seed}", seed, write_adapter(tmp_path / f"a{seed}", TINY_CHECKPOINT, seed=seed))
        for seed in (1, 2)
    ]
    prompts = [[5, 6, 7, 8, 9], [20, 21], [5, 6, 7, 8, 9]]
    words = make_model(tmp_path / "words", "mean")
    texts = {"runner": "pooling", "skip_tokenizer_init": False, "tokenizer": str(words)}

    def score(llm, adapters):
        pairs = ("w5 w9", ["w77 w12", "w5 w9"])
        return [each.outputs.score for each in llm.score(*pairs, use_tqdm=False, lora_request=adapters)]

    def embedded(model, lora_request=None, **options):
        with LLM(str(model), **OPTIONS | texts | options) as llm:
            if lora_request is not None:
                plain, tuned = score(llm, None), score(llm, adapters[0])
                np.testing.assert_allclose(score(llm, [adapters[0], None]), [tuned[0], plain[1]], atol=1e-5)
                np.testing.assert_allclose(score(llm, (None, adapters[0])), [plain[0], tuned[1]], atol=1e-5)
                assert abs(tuned[0] - plain[0]) > 1e-3
            outputs = llm.embed(
                [{"prompt_token_ids": each} for each in prompts], use_tqdm=False, lora_request=lora_request
            )
            with pytest.raises(RequestError, match="one or None for each of the 3 prompts"):
                llm.embed([{"prompt_token_ids": each} for each in prompts], use_tqdm=False, lora_request=adapters)
            return np.array([each.outputs.embedding for each in outputs])

    found = embedded(TINY_CHECKPOINT, [adapters[0], None, adapters[1]])
    for row, adapter in enumerate((adapters[0], None, adapters[1])):
        model = TINY_CHECKPOINT if adapter is None else merged(tmp_path / f"m{row}", TINY_CHECKPOINT, adapter.lora_path)
        np.testing.assert_allclose(found[row], embedded(model)[row], atol=1e-5)
    assert np.abs(found[0] - found[2]).max() > 1e-2


def test_adapters_on_quantised_weights(tmp_path):
    """int8 by channel, as beside the weights that it stands for."""
    plain, weights = tmp_path / "plain", load_file(TINY_CHECKPOINT / "model.safetensors")
    for name, weight in weights.items():
        if ".layers." in name and weight.ndim == 2:
            scales = np.abs(weight).max(axis=1, keepdims=True) / np.float32(127)
            weights[name] = np.rint(weight / scales) * scales
    plain.mkdir()
    save_file(weights, plain / "model.safetensors")
    shutil.copy(TINY_CHECKPOINT / "config.json", plain)
    adapter = LoRARequest("a", 1, write_adapter(tmp_path / "a", TINY_CHECKPOINT, seed=1))
    prompts, params = [[5, 6, 7, 8, 9], [20, 21]], SamplingParams(temperature=0, max_tokens=8, logprobs=0)
    found, scores = [], []
    for model, quantization in ((str(TINY_CHECKPOINT), "int8"), (str(plain), None)):
        with LLM(model, **OPTIONS, quantization=quantization) as llm:
            for chosen in (None, adapter):
                outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=chosen)
                found.append([list(output.outputs[0].token_ids) for output in outputs])
                scores.append([output.outputs[0].cumulative_logprob for output in outputs])
    assert found[:2] == found[2:] and found[0] != found[1]
    np.testing.assert_allclose(scores[:2], scores[2:], rtol=1e-4)
