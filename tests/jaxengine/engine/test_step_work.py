"""Counts of enable_mfu_metrics equal what the model's shape says of the tokens that were computed."""

from __future__ import annotations

import json
import math

import pytest

from jaxengine import LLM, SamplingParams
from jaxengine.models.params.declare import declared_params
from tests.conftest import TINY_CHECKPOINT

PROMPT, ANSWER = 27, 9


def counted(llm: LLM) -> list[float]:
    """Operations, bytes read, bytes written."""
    names = ("flops", "read_bytes", "write_bytes")
    values = {each.name: each.value for each in llm.get_metrics() if "estimated" in each.name}
    return [values[f"vllm:estimated_{name}_per_gpu"] for name in names]


def test_the_work_of_one_request(tiny_options):
    """A prompt in one step, then a token a step; each token attends to itself and to all before it."""
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, detokenize=False)
    with LLM(**tiny_options | {"enable_mfu_metrics": True}) as llm:
        llm.generate([{"prompt_token_ids": list(range(3, 3 + PROMPT))}], params, use_tqdm=False)
        flops, read, written = counted(llm)
        (stage,) = llm.core.runner.stages
        sizes = {each.path: math.prod(each.shape) for each in declared_params(stage.programs.model)}
    config = json.loads((TINY_CHECKPOINT / "config.json").read_text())
    num_layers, num_heads, size = (config[name] for name in ("num_hidden_layers", "num_attention_heads", "head_dim"))
    hidden, head = config["hidden_size"], config["hidden_size"] * config["vocab_size"]  # the embedding is the LM head
    matrices = sum(count for path, count in sizes.items() if "norm" not in str(path)) - head
    tokens, item = PROMPT + ANSWER - 1, 4  # the last token of an answer is not computed
    attention = 4 * num_layers * num_heads * size * tokens * (tokens + 1) // 2
    assert flops == pytest.approx(2 * matrices * tokens + 2 * head * ANSWER + attention)
    cached = 2 * num_layers * config["num_key_value_heads"] * size * item
    keys = sum(range(PROMPT, tokens + 1)) * cached
    assert read == pytest.approx(ANSWER * item * sum(sizes.values()) + tokens * hidden * item + keys)
    assert written == pytest.approx(tokens * cached)
