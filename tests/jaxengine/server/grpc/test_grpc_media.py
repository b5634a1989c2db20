"""Pictures in conversations over gRPC: the prompt that the engine is asked with, and what is refused."""

from __future__ import annotations

import base64
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxengine.media.messages import MediaReader
from jaxengine.requests.inputs import InputProcessor
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.grpc import inference_pb2 as pb
from jaxengine.server.grpc.convert import RequestReader
from tests.fixtures.whisper_checkpoints import sound
from tests.jaxengine.media.pictures import PIXELS, PNG, animation, data_url
from tests.jaxengine.media.test_parts import Both
from tests.jaxengine.server.http.test_audio import wav


class Hears(Both):
    modalities = ("audio",)


def reader(chat_engine, media=True, model=Both) -> RequestReader:
    inputs = chat_engine.inputs
    own = InputProcessor(inputs.config, inputs.model_config, inputs.tokenizer, inputs.generation_defaults)
    if media:
        scripted: Any = SimpleNamespace(reader=MediaReader(model(), own.config), made_ready=expanded)
        scripted.stand_alone = lambda prompt: False
        own.media = scripted
    return RequestReader(own, ServerConfig())


def expanded(prompt, text, token_ids):
    """What a model's processor makes of a prompt: a token more."""
    return {
        "prompt_token_ids": [*token_ids, 7],
        "media": prompt["multi_modal_data"],
        "options": prompt["mm_processor_kwargs"],
    }


def ask(*parts, content: str = "", **fields) -> pb.GenerateRequest:
    return pb.GenerateRequest(messages={"messages": [{"role": "user", "content": content, "parts": parts}]}, **fields)


async def test_the_prompt_has_its_pictures(chat_engine):
    request = ask(
        {"text": "What?"},
        {"image": {"data": PNG}},
        {"image": {"url": data_url(PNG)}},
        {"video": {"data": animation("GIF")}},
    )
    made = await reader(chat_engine).generation(request, stream=False)
    text = chat_engine.inputs.tokenizer.decode(made.prompt["prompt_token_ids"])
    assert "What?\n<image>\n<image>\n<video>" in text
    assert all(np.array_equal(image, PIXELS) for image in made.prompt["media"]["image"])
    assert len(made.prompt["media"]["image"]) == 2 and made.prompt["prompt_token_ids"][-1] == 7
    assert made.prompt["media"]["video"][0].frames.shape == (4, 6, 8, 3)
    assert await reader(chat_engine).encode_messages(request.messages) == made.prompt["prompt_token_ids"]
    texts = await reader(chat_engine, media=False).generation(ask({"text": "Hi"}, {"text": "there"}), stream=False)
    joined = await reader(chat_engine).generation(ask(content="Hi\nthere"), stream=False)
    assert texts.prompt == joined.prompt and "media" not in texts.prompt


async def test_the_prompt_has_its_sounds(chat_engine):
    data = wav(sound(1, 0.1))
    url = f"data:audio/wav;base64,{base64.b64encode(data).decode()}"
    request = ask({"text": "What?"}, {"audio": {"data": data}}, {"audio": {"url": url}})
    made = await reader(chat_engine, model=Hears).generation(request, stream=False)
    text = chat_engine.inputs.tokenizer.decode(made.prompt["prompt_token_ids"])
    assert "What?\n<audio>\n<audio>" in text
    assert [len(each.samples) for each in made.prompt["media"]["audio"]] == [1600, 1600]


async def test_whole_numbers_reach_the_processor_as_integers(chat_engine):
    request = ask({"image": {"data": PNG}})
    request.messages.mm_processor_kwargs.update(
        {"max_pixels": 64, "ratio": 0.5, "size": {"sides": [1, 2]}, "all": True}
    )
    made = await reader(chat_engine).generation(request, stream=False)
    options = made.prompt["options"]
    assert options == {"max_pixels": 64, "ratio": 0.5, "size": {"sides": [1, 2]}, "all": True}
    assert type(options["max_pixels"]) is int and type(options["size"]["sides"][0]) is int


@pytest.mark.parametrize(
    ("request_", "media", "says"),
    [
        (
            ask({"image": {"data": PNG}}),
            False,
            r"takes no image: messages.messages\[0\].parts\[0\].image; it takes text",
        ),
        (
            ask({"audio": {"data": b"RIFF"}}),
            True,
            r"takes no audio: messages.messages\[0\].parts\[0\].audio; it takes images and videos",
        ),
        (
            ask({"image": {"data": b"<svg/>"}}),
            True,
            r"^messages.messages\[0\].parts\[0\].image is an SVG; allowed: PNG",
        ),
        (ask({"image": {"url": "https://a.org"}}), True, "none may be fetched"),
        (ask({"image": {}}), True, r"parts\[0\].image is empty; allowed: data and url"),
        (ask({}), True, r"parts\[0\] is empty; allowed: text, image, video, audio and image_embeds"),
        (ask({"image_embeds": {}}), True, r"parts\[0\].image_embeds is empty; data is required"),
        (ask({"image_embeds": {"data": b"\x80\4"}}), True, r"parts\[0\].image_embeds is given as .* enable_mm_embeds"),
        (ask({"text": "a"}, content="b"), True, r"messages\[0\] has both content and parts"),
        (ask({"image": {"data": PNG}}, truncate_prompt_tokens=3), True, "cannot be cut short"),
    ],
)
async def test_what_is_refused(chat_engine, request_, media, says):
    with pytest.raises(RequestError, match=says) as refusal:
        await reader(chat_engine, media).generation(request_, stream=False)
    assert refusal.value.param in ("messages", "truncate_prompt_tokens")
