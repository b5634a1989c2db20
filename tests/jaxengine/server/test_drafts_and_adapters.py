"""A server process with drafts and adapters: its options reach the engine behind it, and change no text."""

from __future__ import annotations

import json

import httpx
import pytest

from tests.fixtures.adapters import write_adapter

SHAPES = {f"model.layers.{layer}.self_attn.o_proj": (32, 32) for layer in range(2)}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 1}
ASKED = {"prompt": "one two three one two three one two", "max_tokens": 40, "ignore_eos": True}


@pytest.fixture(scope="module")
def served(make_server, tmp_path_factory):
    folder = write_adapter(tmp_path_factory.mktemp("sql") / "sql", SHAPES, seed=1, std=2.0, target_modules=["o_proj"])
    few = {"cudagraph_capture_sizes": [], "prefill_sizes": []}
    options = {
        "compilation_config": few,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "enable_lora": True,
        "max_lora_rank": 8,
        "lora_modules": (f"sql={folder}",),
    }
    return make_server(fresh=True, speculative_config=DRAFTS, served_model_name=("base",), **options)


def ask(server, model: str, temperature: float) -> str:
    body = {**ASKED, "model": model, "temperature": temperature, "seed": 5}
    return httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]


def streamed(server, model: str, temperature: float) -> str:
    body = {**ASKED, "model": model, "temperature": temperature, "seed": 5, "stream": True}
    with httpx.stream("POST", f"{server.base_url}/v1/completions", json=body, timeout=60) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {")]
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines)


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_texts_are_those_of_a_server_with_neither(served, server, temperature):
    plain = httpx.get(f"{server.base_url}/v1/models", timeout=60).json()["data"][0]["id"]
    expected = ask(server, plain, temperature)
    assert ask(served, "base", temperature) == streamed(served, "base", temperature) == expected
    adapted = ask(served, "sql", temperature)
    assert adapted == streamed(served, "sql", temperature) != expected
    assert [model["id"] for model in httpx.get(f"{served.base_url}/v1/models", timeout=60).json()["data"]] == [
        "base",
        "sql",
    ]


def test_what_is_counted(served):
    ask(served, "base", 0)
    lines = httpx.get(f"{served.base_url}/metrics", timeout=60).text.splitlines()
    counts = {line.split("{")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}
    assert counts["vllm:spec_decode_num_draft_tokens_total"] > 0
    assert counts["jaxengine:compilations_since_ready_total"] == 0
    assert any(line.startswith("vllm:lora_requests_info") for line in lines)
