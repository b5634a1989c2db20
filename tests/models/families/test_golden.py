"""Logits of every family against those that Hugging Face transformers recorded (tests/fixtures/record_models.py)."""

from __future__ import annotations

import numpy as np
import pytest

NAMES = ("llama", "llama_yarn", "llama3_sharded", "llama_bias", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")
TOLERANCE = 1e-4  # of the largest logit


def assert_close(ours: np.ndarray, golden: np.ndarray) -> None:
    assert ours.shape == golden.shape
    assert np.abs(ours - golden).max() <= TOLERANCE * np.abs(golden).max()


@pytest.mark.parametrize("name", NAMES)
def test_whole_prompt(name, recorded, paged_run):
    case = recorded(name)
    run = paged_run(case.model)
    for index, prompt in enumerate(case.prompts):
        logits = run.step({str(index): prompt}, num_tokens=40)[str(index)]
        assert_close(logits, case.logits[index])


@pytest.mark.parametrize("name", NAMES)
def test_prefill_in_chunks_then_decode(name, recorded, paged_run):
    case = recorded(name)
    run, prompt = paged_run(case.model), case.prompts[0]
    parts = [run.step({"a": chunk}, num_tokens=40)["a"] for chunk in np.split(prompt[:21], [7, 8, 18])]
    parts += [run.step({"a": prompt[i : i + 1]}, num_tokens=2)["a"] for i in range(21, len(prompt))]
    assert_close(np.concatenate(parts), case.logits[0])


@pytest.mark.parametrize("name", NAMES)
def test_two_sequences_at_different_stages(name, recorded, paged_run):
    case = recorded(name)
    run, (long, short) = paged_run(case.model), case.prompts
    first = run.step({"long": long[:20]}, num_tokens=40)["long"]
    mixed = run.step({"long": long[20:21], "short": short[:6]}, num_tokens=40)
    decode = [run.step({"short": short[6 + i : 7 + i], "long": long[21 + i : 22 + i]}, num_tokens=2) for i in range(3)]
    assert_close(np.concatenate([first, mixed["long"], *(d["long"] for d in decode)]), case.logits[0][:24])
    assert_close(np.concatenate([mixed["short"], *(d["short"] for d in decode)]), case.logits[1])
