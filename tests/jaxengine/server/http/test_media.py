"""Pictures through every endpoint that takes a conversation: the prompt that reaches the engine, and errors by name."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxengine.api.fair_lock import FairLock
from jaxengine.api.llm import LLM
from jaxengine.media.messages import MediaReader
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.app import create_app
from tests.jaxengine.media.pictures import PICTURE, PIXELS, PNG, animation, data_url, saved
from tests.jaxengine.media.test_parts import Both, OnlyImages
from tests.jaxengine.server.asgi_client import Connection, post
from tests.jaxengine.server.http.test_large_fields import LONGEST_TURN, longest_turn
from tests.jaxengine.server.scripted_engine import ScriptedEngine
from tests.jaxengine.tokens.test_content_format import QWEN

URL = data_url(PNG)
TURNED = data_url(saved(PICTURE.transpose(0), "PNG"))
BASE64 = URL.partition(",")[2]
IMAGE = {"type": "image_url", "image_url": {"url": URL}}


@pytest.fixture
def engine(chat_engine):
    engine = ScriptedEngine(chat_engine, "A dog.", chat_template=QWEN)
    reader = MediaReader(Both(), engine.inputs.config)
    media = SimpleNamespace(reader=reader, made_ready=expanded, stand_alone=lambda prompt: False)
    engine.inputs.media = media
    return engine


class Given(dict):
    """Media by modality in place of a processor's."""

    @property
    def num_tokens(self):
        return {modality: 10 * len(items) for modality, items in self.items()}


def expanded(prompt, text, token_ids):
    """What a model's processor makes of a prompt: ten tokens more for each item. It is looked at as it came."""
    count = sum(map(len, prompt["multi_modal_data"].values()))
    if "colour" in (options := prompt.get("mm_processor_kwargs") or {}):
        raise RequestError("mm_processor_kwargs has 'colour'", param="mm_processor_kwargs")
    if np.shape(prompt["multi_modal_data"].get("image", [PIXELS])[0])[0] == 1:
        raise RequestError("an image must be taller", param="image")
    return {
        "prompt": text,
        "prompt_token_ids": [*token_ids, *[7] * (options.get("tokens", 10) * count)],
        "media": Given(prompt["multi_modal_data"]),
    }


@pytest.fixture
def app(engine):
    return create_app(engine, ServerConfig(served_model_name=("tiny",)))


def user(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts]}]}


CHAT = user({"type": "text", "text": "What?"}, IMAGE, {"type": "image_url", "image_url": TURNED})
ENDPOINTS = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": {
        "input": [
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "What?"},
                    {"type": "input_image", "image_url": URL, "detail": "auto"},
                    {"type": "input_image", "image_url": TURNED},
                ],
            }
        ],
        "instructions": "Look.",
    },
    "/v1/messages": {
        "max_tokens": 9,
        **user(
            {"type": "text", "text": "What?"},
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BASE64}},
            {"type": "image", "source": {"type": "url", "url": TURNED}},
        ),
    },
}


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_the_prompt_has_its_pictures(app, engine, path):
    answer = await post(app, path, model="tiny", **ENDPOINTS[path])
    assert answer.status == 200, answer.body
    prompt = engine.calls[-1][0]
    pad = "<|vision_start|><|image_pad|>"
    assert prompt["prompt"].endswith(f"<|im_start|>user\nWhat?{pad}{pad}<|im_end|>\n")
    assert list(prompt["media"]) == ["image"] and "multi_modal_data" not in prompt
    one, other = prompt["media"]["image"]
    assert np.array_equal(one, PIXELS) and np.array_equal(other, PIXELS[:, ::-1])
    assert prompt["prompt_token_ids"][-20:] == [7] * 20 != prompt["prompt_token_ids"][-21:-1]
    usage = answer.json["usage"]
    given = usage.get("prompt_tokens", usage.get("input_tokens")) + usage.get("cache_creation_input_tokens", 0)
    assert given == len(prompt["prompt_token_ids"])


async def test_results_of_tools_have_pictures(app, engine):
    call = {"type": "function_call", "call_id": "a", "name": "camera", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_image", "image_url": URL}]}
    use = {"type": "tool_use", "id": "a", "name": "camera", "input": {}}
    picture = {"type": "image", "source": {"type": "base64", "data": BASE64}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "Here"}, picture]}
    said = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [picture, result]}]
    for path, fields, count in (
        ("/v1/responses", {"input": [call, output]}, 1),
        ("/v1/messages", {"messages": said, "max_tokens": 9}, 2),
    ):
        answer = await post(app, path, model="tiny", **fields)
        assert answer.status == 200, answer.body
        prompt = engine.calls[-1][0]
        assert prompt["prompt"].count("<|image_pad|>") == len(prompt["media"]["image"]) == count


async def test_a_response_goes_on_with_its_pictures(app, engine):
    first = await post(app, "/v1/responses", model="tiny", **ENDPOINTS["/v1/responses"])
    again = await post(app, "/v1/responses", model="tiny", input="And?", previous_response_id=first.json["id"])
    assert again.status == 200 and len(engine.calls[-1][0]["media"]["image"]) == 2


async def test_a_stored_conversation_grows_to_its_bound(engine):
    options = {"max_stored_bytes": 16 << 20, "max_stored_conversation_bytes": 1 << 20}
    app = create_app(engine, ServerConfig(served_model_name=("tiny",), **options))
    path, noise = "/v1/responses", np.random.default_rng(0).integers(0, 256, (256, 256, 3), np.uint8)
    data = saved(Image.fromarray(noise), "PNG")
    picture = {"type": "input_image", "image_url": data_url(data + b"behind" * 100_000)}
    ask = {"model": "tiny", "input": [{"role": "user", "content": [picture]}]}
    previous = {}
    for turn in range(3):
        answer = await post(app, path, **ask, **previous)
        assert answer.status == 200 and answer.json["store"], answer.body
        assert len(engine.calls[-1][0]["media"]["image"]) == turn + 1
        previous = {"previous_response_id": answer.json["id"]}
    # The same picture is stored once, without what is behind it, and counts each time that it must be read.
    assert app.state.store.num_bytes < 320_000
    for more in ({}, {"store": True}, {"background": True}):
        error = (await post(app, path, **ask, **previous, **more)).error
        assert error["param"] == "previous_response_id" and "max_stored_conversation_bytes" in error["message"]
    assert (await post(app, path, **ask, **previous, store=False)).status == 200
    # One request beyond the bound: stored by default means stored if it can be.
    ask["input"][0]["content"] *= 4
    answer = await post(app, path, **ask)
    assert answer.status == 200 and answer.json["store"] is False
    assert (await post(app, path, **ask, store=True)).error["param"] == "input"
    assert app.state.store.num_bytes < 320_000


async def test_what_the_processor_is_told(app, engine, chat_engine):
    """Over chat, responses and /tokenize; refused by name where the model does not know it, or sees nothing."""
    for path in ("/v1/chat/completions", "/v1/responses"):
        await post(app, path, model="tiny", mm_processor_kwargs={"tokens": 3}, **ENDPOINTS[path])
        ids = engine.calls[-1][0]["prompt_token_ids"]
        assert ids[-6:] == [7] * 6 != ids[-7:-1]
        answer = await post(app, path, model="tiny", mm_processor_kwargs={"colour": 3}, **ENDPOINTS[path])
        assert answer.status == 400 and answer.error["param"] == "mm_processor_kwargs", answer.body
        for wrong in (3, {str(number): number for number in range(257)}):
            answer = await post(app, path, model="tiny", mm_processor_kwargs=wrong, **ENDPOINTS[path])
            assert answer.status == 400 and answer.error["param"] == "mm_processor_kwargs", answer.body
    count = (await post(app, "/tokenize", **CHAT)).json["count"]
    assert (await post(app, "/tokenize", mm_processor_kwargs={"tokens": 3}, **CHAT)).json["count"] == count - 14
    assert (await post(app, "/tokenize", mm_processor_kwargs={}, prompt="Hi")).error["param"] == "mm_processor_kwargs"
    hi = {"messages": [{"role": "user", "content": "Hi"}]}
    assert (await post(app, "/v1/chat/completions", mm_processor_kwargs={"tokens": 3}, **hi)).status == 200
    blind = create_app(ScriptedEngine(chat_engine, "Hi"), ServerConfig(served_model_name=("tiny",)))
    answer = await post(blind, "/v1/chat/completions", mm_processor_kwargs={"tokens": 3}, **hi)
    assert answer.status == 400 and answer.error["param"] == "mm_processor_kwargs"
    assert "this model takes text only" in answer.error["message"]
    assert (await post(blind, "/v1/chat/completions", mm_processor_kwargs={}, **hi)).status == 200


async def test_a_video_and_no_picture(app, engine):
    video = {"type": "video_url", "video_url": {"url": data_url(animation("GIF"))}}
    assert (await post(app, "/v1/chat/completions", **user(video))).status == 200
    prompt = engine.calls[-1][0]
    assert "<|video_pad|>" in prompt["prompt"] and prompt["media"]["video"][0].frames.shape == (4, 6, 8, 3)
    assert (await post(app, "/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}])).status == 200
    assert "media" not in engine.calls[-1][0]


async def test_tokens_are_counted_as_they_are_asked_for(app, engine):
    await post(app, "/v1/chat/completions", **CHAT)
    count = len(engine.calls[-1][0]["prompt_token_ids"])
    assert (await post(app, "/tokenize", **CHAT)).json["count"] == count
    counted = await post(app, "/v1/messages/count_tokens", messages=ENDPOINTS["/v1/messages"]["messages"])
    assert counted.json["input_tokens"] == count


async def test_what_a_processor_does_not_take_came_with_the_messages(app, engine):
    flat = data_url(saved(PICTURE.crop((0, 0, 8, 1)), "PNG"))
    image = {"type": "input_image", "image_url": flat}
    for path, param, fields in (
        ("/v1/chat/completions", "messages", user(image)),
        ("/v1/responses", "input", {"input": [{"role": "user", "content": [image]}]}),
    ):
        answer = await post(app, path, model="tiny", **fields)
        assert answer.status == 400 and answer.error["message"] == "an image must be taller", answer.body
        assert answer.error["param"] == param and not engine.calls


async def test_pictures_that_make_too_many_tokens(app, engine):
    answer = await post(app, "/v1/chat/completions", **user(*[IMAGE] * 25))
    assert answer.status == 400 and "tokens > 255 maximum" in answer.error["message"]
    assert answer.error["param"] == "messages"


BROKEN = "data:image/png;base64,AAAA"
SPOILT = {
    "/v1/chat/completions": (user(IMAGE, {"type": "image_url", "image_url": {"url": BROKEN}}), "messages"),
    "/v1/responses": (
        {"instructions": "x", "input": [{"role": "user", "content": [{"type": "input_image", "image_url": BROKEN}]}]},
        "input",
    ),
    "/v1/messages": (
        {"system": "x", "max_tokens": 9, **user({"type": "image", "source": {"type": "base64", "data": "AAAA"}})},
        "messages",
    ),
}
PLACES = {
    "/v1/chat/completions": "messages[0].content[1].image_url",
    "/v1/responses": "input[0].content[0].image_url",
    "/v1/messages": "messages[0].content[0].source",
}


@pytest.mark.parametrize("path", SPOILT)
async def test_an_error_names_the_picture(app, path, engine):
    fields, param = SPOILT[path]
    answer = await post(app, path, model="tiny", **fields)
    assert answer.status == 400 and not engine.calls
    error = answer.json["error"]
    assert error["message"].startswith(PLACES[path] + " is a file of an unknown type; allowed: PNG"), error
    assert error.get("param", param) == param


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a_model_of_text_alone_refuses_pictures(chat_engine, path):
    app = create_app(ScriptedEngine(chat_engine, "Hi"), ServerConfig(served_model_name=("tiny",)))
    answer = await post(app, path, model="tiny", **ENDPOINTS[path])
    assert answer.status == 400
    assert "this model takes no image: " in answer.json["error"]["message"]


async def test_a_model_of_pictures_refuses_videos(app, engine):
    engine.inputs.media.reader = MediaReader(OnlyImages(), engine.inputs.config)
    shown = {"type": "video_url", "video_url": {"url": data_url(animation("GIF"))}}
    answer = await post(app, "/v1/chat/completions", model="tiny", **user(IMAGE, shown))
    assert answer.status == 400 and not engine.calls
    wanted = "this model takes no video: messages[0].content[1].video_url; it takes images, so give frames that matter"
    assert answer.json["error"]["message"].startswith(wanted) and answer.json["error"]["param"] == "messages"


@pytest.mark.parametrize(
    ("path", "fields", "says"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "assistant", "content": [IMAGE]}]},
            "messages[0].content[0] is an image, video or sound in a message of role 'assistant'; allowed: one",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "input_file", "input_file": {}}]}]},
            "messages[0].content[0].type is 'input_file'; allowed: text, refusal, input_text, ",
        ),
        (
            "/v1/chat/completions",
            user(IMAGE, {"type": "image_url", "image_url": "https://a.example"}),
            "may be fetched",
        ),
        ("/v1/chat/completions", {**CHAT, "truncate_prompt_tokens": 3}, "cannot be cut short"),
        ("/v1/chat/completions", {**CHAT, "use_beam_search": True, "n": 2}, "only allowed without images"),
        (
            "/v1/responses",
            {"input": [{"role": "assistant", "content": [{"type": "input_image", "image_url": URL}]}]},
            "input[0].content holds a part of type 'input_image'",
        ),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "input[0].content[0].file_id is given, but this server keeps no files",
        ),
        (
            "/v1/messages",
            {"max_tokens": 9, "messages": [{"role": "assistant", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].type is 'image'; allowed for assistant: text, thinking, tool_use",
        ),
        (
            "/v1/messages",
            {"max_tokens": 9, **user({"type": "image", "source": {"type": "file", "file_id": "f"}})},
            "messages[0].content[0].source is of type 'file'; allowed",
        ),
        (
            "/v1/messages",
            {"max_tokens": 9, **user({"type": "document", "source": {}})},
            "messages[0].content[0].type is 'document'; allowed for user: text, image, tool_result",
        ),
    ],
)
async def test_what_is_refused(app, engine, path, fields, says):
    answer = await post(app, path, model="tiny", **fields)
    assert answer.status == 400 and says in answer.json["error"]["message"], answer.body
    assert not engine.calls


@pytest.mark.parametrize("path", ENDPOINTS)
def test_others_have_their_turn_while_a_large_picture_comes(app, path):
    large = data_url(PNG + bytes(15 << 20))
    body = json.dumps({"model": "tiny", **ENDPOINTS[path]}).replace(BASE64, large.partition(",")[2]).encode()

    async def run():
        await post(app, path, model="tiny", **ENDPOINTS[path])  # the first request of a process looks at the vocabulary
        connection = Connection(app, path, *(body[at : at + (1 << 18)] for at in range(0, len(body), 1 << 18)))
        assert await longest_turn(connection) < LONGEST_TURN
        assert connection.status == 200

    asyncio.run(run())


def test_llm_chat_makes_the_same_prompt(engine):
    """Its pictures are loaded before it is its turn."""
    asked, lock = [], FairLock()
    reader = engine.inputs.media.reader
    real = reader.read
    reader.read = lambda messages: real(messages) if not lock._is_taken else pytest.fail("others wait for a picture")
    llm = SimpleNamespace(core=SimpleNamespace(inputs=engine.inputs), _lock=lock)
    llm.generate = lambda prompts, *_, **__: asked.extend(prompts)
    picture = {"type": "image", "image": PICTURE}
    LLM.chat(llm, [user(picture, "What?")["messages"], [{"role": "user", "content": "Hi"}]])  # pyright: ignore
    assert "<|image_pad|>What?" in asked[0]["prompt"] and asked[0]["prompt_token_ids"]
    assert np.array_equal(asked[0]["multi_modal_data"]["image"][0], PIXELS)
    assert "multi_modal_data" not in asked[1]
    with pytest.raises(RequestError, match=r"messages\[0\].content\[0\].image is an SVG"):
        LLM.chat(llm, user({"type": "image", "image": b"<svg/>"})["messages"])  # pyright: ignore
