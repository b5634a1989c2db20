"""jaxengine.rl.marin: marin's inference context over an engine; jaxengine.rl.marin_serving: its serving backend.

With what marin_base.py records of marin.
"""

from __future__ import annotations

import importlib
import json
import sys
import urllib.request
from dataclasses import dataclass, replace

import numpy as np
import pytest

import jaxengine
from jaxengine import LLM, SamplingParams
from jaxengine.rl.marin_serving import JaxengineBackend
from tests.jaxengine.rl import marin_base as marin
from tests.jaxengine.server.conftest import chat_model, chat_options
from tests.tables import each_row

__all__ = ["chat_model", "chat_options"]

DECODING = marin.DecodingConfig(max_output_tokens=6, seed=3, temperature=1.0, ignore_eos=True)


@dataclass
class Spec:
    """marin's ModelSpec."""

    model_path: str
    model: str = "org/name"
    num_chips: int = 1
    tensor_parallel_size: int = 1
    dtype: str = "float32"
    max_model_len: int | None = 64
    chat_template_content: str | None = "{{ messages[0].content }}"


@pytest.fixture(scope="module")
def bridge():
    """jaxengine.rl.marin."""
    sys.modules.update(marin.as_modules())
    try:
        yield importlib.import_module("jaxengine.rl.marin")
    finally:
        for name in (*marin.as_modules(), "jaxengine.rl.marin"):
            del sys.modules[name]


@pytest.fixture(scope="module")
def context(bridge, chat_options):
    context = bridge.JaxengineInferenceContext(LLM(**chat_options))
    yield context
    context.shutdown()


def test_completions_of_a_batch(context):
    llm = context._llm
    one, other = context.batch_completions(["Hi", "Hello"], 2, DECODING, system_prompt="Be brief.")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    params = SamplingParams(n=2, max_tokens=6, seed=3, temperature=1.0, ignore_eos=True, logprobs=0)
    (expected,) = llm.chat(messages, params, use_tqdm=False)
    assert [choice.index for choice in one.choices] == [0, 1] and one.model == llm.core.config.model
    for choice, output in zip(one.choices, expected.outputs, strict=True):
        assert context.response_tokens_from_choice(choice).tolist() == [*output.token_ids]
        assert context.tokenize_prompt("Hi", choice).tolist() == expected.prompt_token_ids
        assert choice.message.content == output.text and choice.finish_reason == "length"
        logprobs = [each[token].logprob for token, each in zip(output.token_ids, output.logprobs, strict=True)]
        assert [each.logprob for each in choice.logprobs.content] == logprobs
    assert one.choices[0].response_token_ids != one.choices[1].response_token_ids
    assert context.tokenize_prompt("Hi", system_prompt="Be brief.").tolist() == expected.prompt_token_ids
    (again,) = context.batch_completions([messages], 2, DECODING)
    assert [each.response_token_ids for each in again.choices] == [each.response_token_ids for each in one.choices]
    assert other.usage.completion_tokens == 12 and context.batch_completions([], 1, DECODING) == []
    assert context.get_metrics()["vllm:generation_tokens"] >= 24
    (ended,) = context.batch_completions(
        [messages], 1, replace(DECODING, stop_token_ids=[expected.outputs[0].token_ids[2]])
    )
    assert ended.choices[0].finish_reason == "stop" and len(ended.choices[0].response_token_ids) <= 3


def test_batches_of_tokenized_rollouts(context):
    sampling = marin.TokenSamplingParameters(max_tokens=5, temperature=1.0, seed=3)
    requests = [marin.TokenizedRolloutRequest(f"r{n}", (5, 6, 7 + n), sampling, 2) for n in range(2)]
    assert context.supports_token_rollouts()
    batch = marin.TokenizedRolloutBatchRequest("b", "tokenizer", "policy", tuple(requests))
    found = context.generate_token_rollouts(batch)
    assert (found.batch_id, found.tokenizer, found.policy, found.failures) == ("b", "tokenizer", "policy", ())
    assert [(each.request_id, each.generation_index) for each in found.rollouts] == [
        ("r0", 0),
        ("r0", 1),
        ("r1", 0),
        ("r1", 1),
    ]
    first = found.rollouts[0]
    assert first.prompt_mask == (False,) * 3 and first.completion_mask == (True,) * len(first.completion_token_ids)
    assert len(first.completion_logprobs) == len(first.completion_token_ids)
    ends = replace(sampling, stop_token_ids=(first.completion_token_ids[1],))
    batch = marin.TokenizedRolloutBatchRequest("b", "t", "p", (replace(requests[0], sampling=ends),))
    stopped = context.generate_token_rollouts(batch).rollouts[0]
    assert stopped.completion_token_ids == first.completion_token_ids[: len(stopped.completion_token_ids)]
    assert (stopped.finish_reason, stopped.stop_token_id) == ("stop", stopped.completion_token_ids[-1])


def test_weights_of_levanter(context):
    """In the shapes that `haliax.state_dict.to_state_dict` gives of levanter's Llama: 4 heads, 2 of keys, 8 wide."""
    llm, drawn = context._llm, np.random.default_rng(0)
    sizes = {"model.embed_tokens": (49152, 32), "model.norm": (32,)}
    shapes = {"q_proj": (2, 2, 8, 32), "k_proj": (2, 8, 32), "v_proj": (2, 8, 32), "o_proj": (32, 4, 8)}
    for layer in range(2):
        head = f"model.layers.{layer}"
        sizes |= {f"{head}.self_attn.{name}": shape for name, shape in shapes.items()}
        sizes |= {f"{head}.mlp.gate_proj": (64, 32), f"{head}.mlp.up_proj": (64, 32), f"{head}.mlp.down_proj": (32, 64)}
        sizes |= {f"{head}.input_layernorm": (32,), f"{head}.post_attention_layernorm": (32,)}
    state = {f"{name}.weight": drawn.normal(size=size).astype(np.float32) for name, size in sizes.items()}
    whole = {
        name: array.reshape(32, 32) if "q_proj" in name or "o_proj" in name else array for name, array in state.items()
    }
    whole |= {name: array.reshape(16, 32) for name, array in state.items() if "k_proj" in name or "v_proj" in name}
    llm.update_weights(whole)
    expected = llm.weight_info(checksum=True)
    llm.update_weights({"model.norm.weight": np.ones(32, np.float32)}, strict=False)
    assert context.reload_model(None, state) is None
    found = llm.weight_info(checksum=True)
    assert {**found, "weight_version": 0} == {**expected, "weight_version": 0} and found != expected
    with pytest.raises(jaxengine.RequestError, match=r"model.norm.weight"):
        context.reload_model(None, {name: array for name, array in state.items() if name != "model.norm.weight"})
    with pytest.raises(ValueError, match="a model or a state_dict"):
        context.reload_model(None, None)


def test_log_probabilities_of_another_temperature_are_refused(context):
    with pytest.raises(ValueError, match="processed_logprobs"):
        context.batch_completions(["Hi"], 1, replace(DECODING, temperature=0.7))


@each_row(
    ("changes", "problem"),
    [
        ({"num_chips": 3, "tensor_parallel_size": 2}, "must divide num_chips, 3, got 2"),
        ({"num_chips": 0}, "must divide num_chips, 0, got 1"),
    ],
)
def test_chips_that_no_split_uses(changes, problem):
    with pytest.raises(ValueError, match=problem), JaxengineBackend().serve(replace(Spec("x"), **changes)):
        pass


@pytest.mark.thorough("starts servers")
def test_the_serving_backend(chat_model, executables_dir):
    options = ("--load-format", "dummy", "--block-size", "8", "--num-gpu-blocks-override", "64", "--max-num-seqs", "2")
    backend = JaxengineBackend(extra_args=(*options, "--compile-cache-dir", executables_dir))
    with backend.serve(Spec(chat_model)) as served:
        served.check_alive()
        body = {"model": served.model_id, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        head = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{served.base_url}/v1/chat/completions", json.dumps(body).encode(), head)
        answer = json.load(urllib.request.urlopen(request))
        assert answer["model"] == "org/name" and answer["usage"]["completion_tokens"] <= 4
    with pytest.raises(RuntimeError, match="ended with status"):
        served.check_alive()
    with pytest.raises(RuntimeError, match="ended with status 2 before"), backend.serve(Spec("/no/such/folder")):
        pass
    hasty = replace(backend, startup_timeout_seconds=0.1)
    with pytest.raises(RuntimeError, match="not ready within"), hasty.serve(Spec(chat_model)):
        pass
