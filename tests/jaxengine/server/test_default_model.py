"""A server with the default model's real weights, by the clients that people have: OpenAI's, an evaluation's, gRPC's.

With two API processes, whose server the examples have as well, and with one in a thorough run.
"""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import httpx
import openai
import pydantic
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from jaxengine import SamplingParams
from jaxengine.bench.workloads import recorded

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    coastal: bool
    population: int = pydantic.Field(ge=0, le=100_000_000)


@pytest.fixture(scope="module", params=[1, 2], ids=["one API process", "two API processes"])
def served(make_smollm_server, request):
    if request.param == 1 and not request.config.getoption("--thorough"):
        pytest.skip("half a minute: --thorough")
    return make_smollm_server(api_server_count=request.param)


@pytest.fixture(scope="module")
def client(served):
    return openai.OpenAI(api_key="none", base_url=served.base_url + "/v1", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def chat():
    chat = recorded("CHAT")
    ids = {"prompts": [*map(list, chat.prompts)], "reference": [*map(list, chat.reference)]}
    return {**ids, "max_tokens": chat.max_tokens[0]} | json.loads(
        (Path(__file__).parents[2] / "fixtures" / "chat_workload.json").read_text()
    )


def ask(chat, **changes):
    messages = chat["messages"][0]
    return {"model": "smollm", "messages": messages, "temperature": 0, "max_tokens": chat["max_tokens"], **changes}


def test_an_answer_is_the_recorded_one_whole_and_streamed(client, chat, smollm):
    reference = chat["reference"][0][:16]  # tests/test_workloads.py has it to its end
    expected, asked = smollm.core.inputs.require_tokenizer().decode(reference), ask(chat, max_tokens=len(reference))
    answer = client.chat.completions.create(**asked)
    assert answer.choices[0].message.content == expected
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == expected
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens == len(reference)


def test_logprobs_of_the_tokens_that_were_chosen(client, chat, smollm):
    answer = client.chat.completions.create(**ask(chat, logprobs=True, top_logprobs=3, max_tokens=8))
    entries = answer.choices[0].logprobs.content
    assert all(entry.token == entry.top_logprobs[0].token and len(entry.top_logprobs) == 3 for entry in entries)
    assert (
        bytes(byte for entry in entries for byte in entry.bytes).decode().startswith(answer.choices[0].message.content)
    )


def test_a_schema_is_kept_and_parsed(client):
    messages = [{"role": "user", "content": "Describe a city as JSON."}]
    answer = client.chat.completions.parse(
        model="smollm", messages=messages, response_format=City, max_tokens=200, temperature=0, seed=1
    )
    assert isinstance(answer.choices[0].message.parsed, City)


def test_a_tool_that_must_be_called_is_called(client):
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    forced = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", forced):
        answer = client.chat.completions.create(
            model="smollm", messages=messages, tools=[WEATHER], tool_choice=choice, max_tokens=100, temperature=0
        )
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name == "get_weather" and set(json.loads(call.function.arguments)) == {"city"}


def test_lm_eval_scores_as_the_engine_does(served, smollm, tmp_path):
    """Its own class for `local-completions`: token ids, echo and logprobs."""
    completions = pytest.importorskip("lm_eval.models.openai_completions", reason="pip install --no-deps lm_eval")
    from lm_eval.api.instance import Instance

    (tmp_path / "tokenizer.json").write_text(smollm.core.inputs.require_tokenizer().backend.to_str())
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    pairs = [("The capital of France is", " Paris."), ("The capital of France is", " fishing."), ("2 + 2 =", " 4")]
    model = completions.LocalCompletionsAPI(
        base_url=served.base_url + "/v1/completions",
        model="smollm",
        tokenizer=str(tmp_path),
        tokenizer_backend="huggingface",
        num_concurrent=2,
        batch_size=2,
        max_length=256,
        max_retries=1,
    )
    found = model.loglikelihood([Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)])
    encode, totals = smollm.core.inputs.require_tokenizer().encode, []
    for (context, continuation), (total, is_greedy) in zip(pairs, found, strict=True):
        ids, first = encode(context + continuation), len(encode(context))
        params = SamplingParams(max_tokens=1, prompt_logprobs=1)
        (output,) = smollm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
        scores = [scores[token] for token, scores in list(zip(ids, output.prompt_logprobs, strict=True))[first:]]
        assert total == pytest.approx(sum(score.logprob for score in scores), abs=1e-4)
        assert is_greedy == all(score.rank == 1 for score in scores)
        totals.append(total)
    assert totals[0] > totals[1]
    stop = [Instance("generate_until", {}, ("The capital of France is", {"until": ["."], "max_gen_toks": 8}), 0)]
    assert "Paris" in model.generate_until(stop)[0]


def test_a_client_that_knows_nothing_but_reflection(served, chat):
    with grpc.insecure_channel(served.grpc_address) as channel:
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        method = pool.FindServiceByName("jaxengine.v1.Inference").FindMethodByName("Generate")
        asked = ParseDict(
            {
                "token_ids": {"ids": chat["prompts"][0]},
                "temperature": 0,
                "stopping": {"max_new_tokens": 8},
                "response": {"output_token_ids": True},
            },
            GetMessageClass(method.input_type)(),
        )
        call = channel.unary_unary(
            f"/{method.containing_service.full_name}/{method.name}",
            request_serializer=type(asked).SerializeToString,
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        answer = MessageToDict(call(asked, timeout=120), preserving_proto_field_name=True)
    assert answer["outputs"][0]["token_ids"] == chat["reference"][0][:8]


def test_nothing_was_compiled(served):
    lines = httpx.get(served.base_url + "/metrics", timeout=60).text.splitlines()
    (value,) = [
        line.split()[-1]
        for line in lines
        if line.startswith("jaxengine:compilations_since_ready") and "created" not in line
    ]
    assert float(value) == 0
