"""A served model that sees, asked with OpenAI's own client: every endpoint with the same picture, and a second turn;
and over gRPC."""

from __future__ import annotations

import base64

import grpc
import httpx
import numpy as np
import pytest
from openai import BadRequestError, OpenAI
from PIL import Image
from safetensors.numpy import save

from jaxengine.server.grpc.client import Client, bad_fields
from tests.fixtures.picture_checkpoints import picture, whole_checkpoint
from tests.jaxengine.media.pictures import data_url, saved
from tests.jaxengine.server.server_process import start_server

OPTIONS = {
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "dtype": "float32",
    "block_size": 8,
    "num_gpu_blocks_override": 200,
    "compilation_config": '{"prefill_sizes": [], "cudagraph_capture_sizes": []}',
    "served_model_name": ["sees"],
    "enable_mm_embeds": True,
    "grpc_port": 0,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory, executables_dir):
    model = whole_checkpoint("qwen2_5_vl_vision", tmp_path_factory.mktemp("sees"))
    server = start_server({**OPTIONS, "model": str(model), "compile_cache_dir": executables_dir})
    yield server
    server.stop()


@pytest.fixture
def client(server):
    return OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0)


def url(seed: int, kind: str = "PNG") -> str:
    return data_url(saved(Image.fromarray(picture(seed, 40, 48)), kind))


def message(*pictures: str, text: str = "What is this?") -> dict:
    shown = [{"type": "image_url", "image_url": {"url": each}} for each in pictures]
    return {"role": "user", "content": [{"type": "text", "text": text}, *shown]}


def chat(client: OpenAI, *messages: dict, **options):
    return client.chat.completions.create(
        model="sees", messages=list(messages), temperature=0, max_tokens=8, logprobs=True, **options
    )


def scores(completion) -> list[float]:
    return [round(each.logprob, 3) for each in completion.choices[0].logprobs.content]


def test_every_way_to_ask_sees_the_same(server, client):
    first = chat(client, message(url(1)))
    again = chat(client, message(url(1, "BMP")))
    assert scores(first) == scores(again) and first.usage.prompt_tokens == again.usage.prompt_tokens
    assert again.usage.prompt_tokens_details.cached_tokens > 20
    streamed = list(chat(client, message(url(1)), stream=True))
    text = "".join(each.choices[0].delta.content or "" for each in streamed if each.choices)
    assert text == first.choices[0].message.content
    others = [
        chat(client, message(url(2))),
        chat(client, message(url(1), url(2))),
        chat(client, message(url(2), url(1))),
    ]
    assert len({tuple(scores(each)) for each in (first, *others)}) == 4
    shown = [each.usage.prompt_tokens_details.multimodal_tokens for each in (first, *others)]
    counts = [others[1].usage.prompt_tokens - first.usage.prompt_tokens - 2] * 2  # with a token on each side
    assert shown == [{"image": count} for count in (*counts, sum(counts), sum(counts))]
    assert "multimodal_tokens" not in chat(client, message()).usage.prompt_tokens_details.model_extra
    parts = [{"type": "input_text", "text": "What is this?"}, {"type": "input_image", "image_url": url(1)}]
    response = client.responses.create(
        model="sees", input=[{"role": "user", "content": parts}], temperature=0, max_output_tokens=8
    )
    assert (response.output_text, response.usage.input_tokens) == (text, first.usage.prompt_tokens)
    source = {"type": "base64", "media_type": "image/png", "data": url(1).partition(",")[2]}
    content = [{"type": "text", "text": "What is this?"}, {"type": "image", "source": source}]
    body = {"model": "sees", "max_tokens": 8, "temperature": 0, "messages": [{"role": "user", "content": content}]}
    answer = httpx.post(f"{server.base_url}/v1/messages", json=body, timeout=60).json()
    assert answer["content"][0]["text"] == text
    counted = httpx.post(
        f"{server.base_url}/tokenize", json={"model": "sees", "messages": [message(url(1))]}, timeout=60
    ).json()
    assert counted["count"] == first.usage.prompt_tokens


def test_the_status_page_is_told_of_the_encoder(server, client):
    """One call for two pictures, and none when they come again."""

    def status():
        return httpx.get(f"{server.base_url}/status.json", timeout=60).json()

    before = status()["pictures"]
    for known in (0, 2):
        chat(client, message(url(8), url(9)))
        after = status()["pictures"]
        counted = {name: after[name] - before[name] for name in ("calls", "items")}
        assert counted["items"] == 2 and 1 <= counted["calls"] <= 2, known
    assert 0 <= after["embeddings_used"] <= after["embeddings_kept"] <= after["embeddings"]
    assert after["queries"] >= after["hits"] and after["patches"] > before["patches"]
    assert status()["memory"]["embeddings"] > 0


@pytest.fixture
def ask(server):
    """A question over gRPC about what is in `part`: the text and the number of tokens of the prompt."""
    with Client(server.grpc_address) as client:

        def asked(part: dict, **options) -> tuple[str, int]:
            parts = [{"text": "What is this?"}, part]
            answer = client.generate([{"role": "user", "parts": parts}], temperature=0, max_new_tokens=8, **options)
            return answer.outputs[0].text, answer.prompt_info.num_prompt_tokens

        yield asked


def test_grpc_tells_the_processor_what_http_does(client, ask):
    shown, file = url(1), {"image": {"data": base64.b64decode(url(1).partition(",")[2])}}
    counts = []
    for options in ({}, {"max_pixels": 512}):
        whole = chat(client, message(shown), extra_body={"mm_processor_kwargs": options})
        assert ask(file, mm_processor_kwargs=options) == (whole.choices[0].message.content, whole.usage.prompt_tokens)
        counts.append(whole.usage.prompt_tokens)
    assert counts[1] < counts[0]
    for options in ({"max_pixels": "many"}, {"min_tiles": 3}):
        with pytest.raises(grpc.RpcError, match="mm_processor_kwargs") as refused:
            ask(file, mm_processor_kwargs=options)
        assert bad_fields(refused.value) == ["messages.mm_processor_kwargs"]


def test_embeddings_come_over_grpc_as_over_http(client, ask):
    rows = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    texts = {}
    for name, values in (("one", rows), ("other", -rows)):
        data = save({"rows": values})
        given = {"image_embeds": base64.b64encode(data).decode(), "image_grid_thw": [1, 4, 4]}
        part = {"type": "image_embeds", "image_embeds": given}
        whole = chat(client, {"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]})
        texts[name] = whole.choices[0].message.content
        found = ask({"image_embeds": {"data": data, "image_grid_thw": [1, 4, 4]}})
        assert found == (texts[name], whole.usage.prompt_tokens)
    assert texts["one"] != texts["other"]
    for wrong, told in (
        ({"data": save({"rows": rows})}, "embeddings of an image need image_grid_thw"),
        ({"data": save({"rows": rows[:, :3]}), "image_grid_thw": [1, 4, 4]}, "have 3 numbers each; allowed: 64"),
        ({"data": b"\x80\4pickled"}, r"parts\[1\]\.image_embeds .* may contain code"),
        ({"data": save({"rows": rows}), "image_grid_thw": [4]}, "image_grid_thw .* three whole numbers"),
    ):
        with pytest.raises(grpc.RpcError, match=told) as refused:
            ask({"image_embeds": wrong})
        assert bad_fields(refused.value) == ["messages"]


def test_a_second_turn_knows_the_first(client):
    question = message(url(3))
    answer = chat(client, question).choices[0].message.content
    turns = [question, {"role": "assistant", "content": answer}, {"role": "user", "content": "And now?"}]
    second = chat(client, *turns)
    assert second.usage.prompt_tokens_details.cached_tokens > 20
    assert scores(second) != scores(chat(client, message(url(4)), *turns[1:]))


def test_what_is_wrong_is_told_and_disturbs_nobody(server, client):
    before = scores(chat(client, message(url(1))))
    for wrong, told in (
        ("data:image/png;base64,AAAA", "image_url"),
        ("https://127.0.0.1/dog.png", "allowed_media_domains"),
        ("file:///etc/passwd", "allowed_local_media_path"),
        (data_url(saved(Image.new("RGB", (2, 500)), "PNG")), "longer side"),
    ):
        with pytest.raises(BadRequestError, match=told):
            chat(client, message(wrong))
    with pytest.raises(BadRequestError, match="max_model_len"):
        chat(client, message(*[url(1)] * 9))
    assert scores(chat(client, message(url(1)))) == before
    metrics = httpx.get(f"{server.base_url}/metrics", timeout=60).text
    assert "jaxengine:compilations_since_ready_total" not in metrics or _value(metrics) == 0


def _value(metrics: str) -> float:
    line = next(each for each in metrics.splitlines() if each.startswith("jaxengine:compilations_since_ready"))
    return float(line.rpartition(" ")[2])
