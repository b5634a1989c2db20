"""Pictures in messages: every way to write one, its name in an error, and what is refused before it is read."""

from __future__ import annotations

from typing import Any

import pytest

from jaxengine.config.inputs.multimodal import MediaOptions
from jaxengine.media.load import read_multi_modal_data
from jaxengine.media.parts import PlacedPart, collect_media
from jaxengine.scheduler.base.errors import RequestError
from tests.jaxengine.media.pictures import PICTURE, PIXELS, PNG, data_url
from tests.tables import each_row

URL = data_url(PNG)
OPTIONS = MediaOptions(allowed_media_domains=("media.example",))
TEXT = {"type": "text", "text": "What is it?"}


class Both:
    """A model that takes pictures and videos."""

    modalities = ("image", "video")

    def placeholder(self, modality: str) -> str:
        return f"<{modality}>"


class OnlyImages(Both):
    modalities = ("image",)


def collect(*parts: Any, role: str = "user", model: Any = Both(), options: MediaOptions = OPTIONS) -> Any:  # noqa: B008
    return collect_media([{"role": role, "content": [*parts]}], model, options)


@pytest.mark.parametrize(
    ("part", "modality", "key", "source"),
    [
        ({"type": "image_url", "image_url": {"url": URL}}, "image", "image_url", URL),
        ({"type": "image_url", "image_url": {"url": URL, "detail": "low"}}, "image", "image_url", URL),
        ({"type": "image_url", "image_url": URL, "uuid": "a"}, "image", "image_url", URL),
        (
            {"type": "image_url", "image_url": "https://media.example/a"},
            "image",
            "image_url",
            "https://media.example/a",
        ),
        ({"type": "input_image", "image_url": URL, "detail": "auto", "file_id": None}, "image", "image_url", URL),
        ({"type": "image", "source": {"type": "base64", "data": "AAAA"}}, "image", "source", "data:;base64,AAAA"),
        ({"type": "image", "source": {"type": "url", "url": URL}}, "image", "source", URL),
        ({"type": "image", "image": PICTURE}, "image", "image", PICTURE),
        ({"type": "image", "image": URL}, "image", "image", URL),
        ({"type": "image", "url": URL}, "image", "url", URL),
        ({"type": "image_pil", "image_pil": PICTURE}, "image", "image_pil", PICTURE),
        ({"type": "video_url", "video_url": {"url": URL}}, "video", "video_url", URL),
        ({"type": "video", "video": [PICTURE]}, "video", "video", [PICTURE]),
        ({"type": "video", "url": URL}, "video", "url", URL),
    ],
)
def test_every_way_to_write_one(part, modality, key, source):
    messages, (found,) = collect(TEXT, part)
    assert messages == [{"role": "user", "content": [TEXT, {"type": modality}]}]
    assert (found.modality, found.source, found.param) == (modality, source, "messages")
    assert found.where == f"messages[0].content[1].{key}"


def test_the_order_is_that_of_the_messages():
    one, other = ({"type": "image", "image": each} for each in (PICTURE, PIXELS))
    given = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [one, TEXT]},
        {"role": "assistant", "content": "A dog."},
        {"role": "tool", "content": [other], "name": "camera"},
        {"role": "user", "content": ["as text", {"type": "video", "video": [PICTURE]}]},
    ]
    messages, parts = collect_media(given, Both(), OPTIONS)
    assert [part.source for part in parts] == [PICTURE, PIXELS, [PICTURE]]
    assert messages[0] is given[0] and messages[2] is given[2]
    assert messages[3] == {"role": "tool", "content": [{"type": "image"}], "name": "camera"}
    assert messages[4]["content"] == ["as text", {"type": "video"}]
    assert given[1]["content"][0] is one, "the caller's messages are left alone"


@pytest.mark.parametrize(
    "messages",
    [None, "Hi", [], [3], [{"role": "user"}], [{"content": "Hi"}], [{"content": [TEXT, "Hi", 3, {"type": []}]}]],
)
def test_what_holds_no_picture_is_left_as_it_is(messages):
    assert collect_media(messages, None, OPTIONS) == (messages, [])


@each_row(
    ("part", "message"),
    [
        ({"type": "image_url"}, r'content\[0\].image_url must be {"url": ...} or an address, got None'),
        ({"type": "image_url", "image_url": 3}, "got 3"),
        ({"type": "image_url", "image_url": {"url": ["a"]}}, "must be"),
        ({"type": "image_url", "image_url": ""}, "must be"),
        ({"type": "image_url", "image_url": {"url": URL, "detail": "huge"}}, "detail is 'huge'; allowed: auto, low"),
        ({"type": "image_url", "image_url": {"url": URL, "detail": []}}, r"detail is \[\]"),
        ({"type": "image_url", "image_url": {"url": "ftp://a/b"}}, "image_url has the scheme 'ftp'; allowed:"),
        ({"type": "image_url", "image_url": {"url": "a.png"}}, "image_url begins with 'a.png'"),
        ({"type": "image_url", "image_url": {"url": "https://evil.example/a"}}, "from which nothing may be fetched"),
        ({"type": "image_url", "image_url": {"url": "file:///a"}}, "is a local file; none may be read"),
        ({"type": "image_url", "image_url": {}, "uuid": "a"}, "must be"),
        (
            {"type": "input_image", "file_id": "file-1"},
            r"content\[0\].file_id is given, but this server keeps no files",
        ),
        ({"type": "image"}, "of type 'image' must have image or url"),
        ({"type": "image", "image": PICTURE, "url": URL}, "must have image or url"),
        ({"type": "image", "source": {"type": "file", "file_id": "a"}}, "source is of type 'file'; allowed"),
        ({"type": "image", "source": {"type": "base64", "data": 3}}, "source is of type 'base64'; allowed"),
        ({"type": "image", "source": "a"}, "source is of type 'a'"),
        ({"type": "image_pil"}, "must have image_pil"),
        ({"type": "video"}, "must have video or url"),
        ({"type": "video_url", "video_url": None}, "video_url must be"),
        ({"type": "audio_url", "audio_url": 3}, "audio_url must be .* got 3"),
        ({"type": "audio"}, "must have audio or url"),
        ({"type": "input_audio", "input_audio": {}}, 'input_audio must be {"data": base64, "format": ...}'),
        ({"type": "input_audio", "input_audio": {"data": 3, "format": "wav"}}, "input_audio must be"),
        ({"type": "input_audio", "input_audio": {"data": "AA"}}, "format is None; allowed: wav, mp3"),
        ({"type": "input_audio", "input_audio": {"data": "AA", "format": "mid"}}, "format is 'mid'; allowed: wav, mp3"),
    ],
)
def test_parts_that_are_refused(part, message):
    with pytest.raises(RequestError, match=message) as refusal:
        collect(part)
    assert refusal.value.param == "messages" and str(refusal.value).startswith("messages[0].content[0]")


def test_parts_of_other_kinds_are_refused_by_their_type():
    file = {"type": "input_file", "input_file": {}}
    for parts in ([file], [TEXT, file], [{"type": "image", "image": PICTURE}, file]):
        with pytest.raises(RequestError, match=r"content\[\d\].type is 'input_file'; allowed: text, refusal, inp"):
            collect(*parts)
    assert collect(TEXT, file, model=None) == ([{"role": "user", "content": [TEXT, file]}], []), "a template's affair"


def test_an_answer_holds_no_pictures():
    with pytest.raises(
        RequestError,
        match=r"messages\[0\].content\[0\] is an image, video or sound in a message of role 'assistant'; allowed",
    ):
        collect({"type": "image", "image": PICTURE}, role="assistant")


def test_a_model_that_takes_none():
    image, video = {"type": "image", "image": PICTURE}, {"type": "video", "video": [PICTURE]}
    for part, model, says in (
        (image, None, r"takes no image: messages\[0\].content\[0\].image; it takes text"),
        ({"type": "audio", "audio": [0.0]}, OnlyImages(), r"takes no audio: .*; it takes images"),
        (video, OnlyImages(), r"takes no video: messages\[0\].content\[0\].video; it takes images, so give frames"),
    ):
        with pytest.raises(RequestError, match=says) as refusal:
            collect(part, model=model)
        assert refusal.value.param == "messages"


def test_there_may_be_so_many():
    image, video = {"type": "image", "image": PICTURE}, {"type": "video", "video": [PICTURE]}
    options = MediaOptions(limit_mm_per_prompt={"image": {"count": 2}, "video": {"count": 0}})
    collect(image, image, options=options)
    with pytest.raises(RequestError, match="messages has 3 images; allowed: at most 2, by limit_mm_per_prompt"):
        collect(image, image, image, options=options)
    with pytest.raises(RequestError, match="messages has 1 video; allowed: at most 0"):
        collect(image, video, options=options)


def test_a_part_of_another_api_has_its_name_there():
    part = PlacedPart({"type": "input_image", "image_url": URL}, "input[3].content[0]")
    _, (found,) = collect(TEXT, part)
    assert found.where == "input[3].content[0].image_url" and found.param == "input"
    for kind, said in (("input_image", "image_url must be"), ("input_file", "type is 'input_file'; allowed: text")):
        with pytest.raises(RequestError, match=rf"^input\[3\].content\[0\].{said}") as refusal:
            collect(PlacedPart({"type": kind}, "input[3].content[0]"))
        assert refusal.value.param == "input"


def test_multi_modal_data_of_a_prompt():
    video = [PICTURE, PICTURE]
    parts = read_multi_modal_data({"image": [PICTURE, URL], "video": video})
    assert [(part.modality, part.source, part.where) for part in parts] == [
        ("image", PICTURE, "multi_modal_data['image'][0]"),
        ("image", URL, "multi_modal_data['image'][1]"),
        ("video", video, "multi_modal_data['video']"),
    ]
    assert [part.source for part in read_multi_modal_data({"video": [video, URL]})] == [video, URL]
    assert [part.source for part in read_multi_modal_data({"image": PIXELS})] == [PIXELS]
    assert read_multi_modal_data({"image": None, "video": []}) == []
    for data, says in (
        (3, "must be a dict of image, video, audio, got 3"),
        ({"sound": 3}, "has the key 'sound'; allowed"),
    ):
        with pytest.raises(RequestError, match=says) as refusal:
            read_multi_modal_data(data)
        assert refusal.value.param == "multi_modal_data"
