"""Loading: in order, beside the event loop, one error for the first that fails, and nobody waits behind a slow host."""

from __future__ import annotations

import asyncio
import base64
import threading
import time

import numpy as np
import pytest

from jaxengine.config.inputs.multimodal import MediaOptions
from jaxengine.media import load as module
from jaxengine.media.load import MediaLoader
from jaxengine.media.parts import MediaPart
from jaxengine.scheduler.base.errors import OverloadedError, RequestError
from jaxengine.turns import OWNER
from tests.jaxengine.media.pictures import PICTURE, PIXELS, PNG, animation, data_url, saved
from tests.jaxengine.media.web_server import web_server


def parts(*sources: object, modality: str = "image") -> list[MediaPart]:
    return [MediaPart(modality, source, f"messages[{at}]") for at, source in enumerate(sources)]


@pytest.fixture
def loader():
    return MediaLoader(MediaOptions(media_loading_thread_count=2))


async def test_what_is_loaded_comes_in_order(loader):
    given = [*parts(*[PIXELS[:, : 1 + at % 8] for at in range(20)]), *parts(animation("GIF"), modality="video")]
    data = await loader.load([given[-1], *given[:-1]])
    assert [image.shape[1] for image in data["image"]] == [1 + at % 8 for at in range(20)]
    assert [len(video.frames) for video in data["video"]] == [4]
    now = loader.load_now(parts(data_url(PNG), PICTURE))
    assert list(now) == ["image"] and all(np.array_equal(image, PIXELS) for image in now["image"])
    assert await loader.load([]) == {} and loader.load_now([]) == {}


async def test_frames_of_a_data_url(loader):
    """vLLM's form of a video that is frames already, one a second: JPEGs with commas between them."""
    jpegs = [saved(PICTURE, "JPEG"), saved(PICTURE.rotate(180), "JPEG")]
    url = "data:Video/JPEG;base64," + ",".join(base64.b64encode(each).decode() for each in jpegs)
    (video,) = (await loader.load(parts(url, modality="video")))["video"]
    frames = (await loader.load(parts(*jpegs)))["image"]
    assert np.array_equal(video.frames, frames) and video.timestamps.tolist() == [0, 1] and video.fps == 1
    for wrong, said in (
        (url + ",", r"frame 2 that has no bytes"),
        (url + ",@", "is not valid base64"),
        (url + "," * 5000, "frames; allowed: 1 to"),
        (url.replace("Video", "image"), "is not valid base64"),
    ):
        with pytest.raises(RequestError, match=rf"^messages\[0\] .*{said}"):
            await loader.load(parts(wrong, modality="video"))
    small = MediaLoader(MediaOptions(max_media_bytes=len(jpegs[0]) + 50))
    with pytest.raises(RequestError, match="max_media_bytes"):
        await small.load(parts(url, modality="video"))


async def test_the_first_that_fails_is_named(loader):
    given = parts(PNG, "data:;base64,@", b"<svg/>")
    for load in (loader.load, lambda each: asyncio.to_thread(loader.load_now, each)):
        with pytest.raises(RequestError, match=r"^messages\[1\] is not valid base64: ") as refusal:
            await load(given)
        assert refusal.value.param == "messages"
    with pytest.raises(RequestError, match=r"^messages\[0\] is an SVG; allowed: PNG"):
        await loader.load(parts(b"<svg/>"))


async def test_all_of_one_prompt_share_the_pixels():
    loader = MediaLoader(MediaOptions(max_media_pixels=100))
    with pytest.raises(RequestError, match="one prompt; allowed: 100"):
        await loader.load(parts(PNG, PNG, PNG))
    assert len((await loader.load(parts(PNG, PNG)))["image"]) == 2


async def test_a_slow_host_is_only_waited_for_by_those_who_asked(monkeypatch):
    with web_server() as server:
        options = MediaOptions(
            media_loading_thread_count=1, allowed_media_domains=("127.0.0.1",), media_fetch_timeout=1.5
        )
        loader = MediaLoader(options)
        slow = asyncio.create_task(loader.load(parts(server.url + "/silent")))
        await asyncio.sleep(0.05)
        await loader.load(parts(PNG))
        assert not slow.done()
        with pytest.raises(RequestError, match="takes longer than 1.5 seconds"):
            await slow
        data = await loader.load(parts(server.url + "/png"))
        assert np.array_equal(data["image"][0], PIXELS)


async def test_the_event_loop_has_its_turn_while_a_large_picture_is_read(loader, monkeypatch):
    threads = set()
    for name in ("fetch", "read_image"):
        real = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *args, real=real: threads.add(threading.current_thread().name[:12]) or real(*args)
        )
    task = asyncio.create_task(loader.load(parts(data_url(PNG + bytes(16 << 20)))))
    num_turns = 0
    while not task.done():
        await asyncio.sleep(0.001)
        num_turns += 1
    assert np.array_equal((await task)["image"][0], PIXELS)
    assert threads == {"decode media"} and num_turns > 1


async def test_there_may_wait_so_many(loader, monkeypatch):
    go = threading.Event()
    monkeypatch.setattr(module, "read_image", lambda *_: go.wait(60))
    monkeypatch.setattr(module, "_MAX_WAITING", 3)
    first = asyncio.create_task(loader.load(parts(1, 2, 3, 4)))
    await asyncio.sleep(0.01)
    with pytest.raises(OverloadedError, match="4 images, videos and sounds wait"):
        await loader.load(parts(5))
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    with pytest.raises(OverloadedError):
        await loader.load(parts(5, 6))  # two run still, though nobody waits for them
    go.set()
    deadline = time.monotonic() + 60
    while loader._num_waiting.total() and time.monotonic() < deadline:
        await asyncio.sleep(0.005)
    assert (await loader.load(parts(7)))["image"] == [True]


async def load_for(owner: str | None, loader: MediaLoader, given: list[MediaPart]):
    OWNER.set(owner)
    return await loader.load(given)


@pytest.mark.parametrize("slow", ["fetch", "read_image", "read_video"])
async def test_the_slow_files_of_one_key_do_not_hold_up_those_of_another(monkeypatch, slow):
    """Whether they drip, or are hard to decode; as many as there are, in one prompt or in many."""
    go, real = threading.Event(), getattr(module, slow)
    monkeypatch.setattr(module, slow, lambda source, *how: go.wait(60) and PNG if source == url else real(source, *how))
    loader, url = MediaLoader(MediaOptions(media_loading_thread_count=4)), "https://a.example/a"
    if slow != "fetch":
        url = b"slow"
    many = parts(*[url] * 100, modality="video" if slow == "read_video" else "image")
    tasks = [asyncio.create_task(load_for("a", loader, many[:1])) for _ in range(20)]
    tasks.append(asyncio.create_task(load_for("a", loader, many)))
    await asyncio.sleep(0.01)
    for _ in range(3):
        data = await load_for("b", loader, [*parts(PNG, data_url(PNG)), *parts(animation("GIF"), modality="video")])
        assert np.array_equal(data["image"][1], PIXELS) and not any(task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    go.set()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_preprocessing_takes_turns_too(loader):
    go = threading.Event()

    async def process(owner: str, function):
        OWNER.set(owner)
        return await loader.process(function)

    slow = [asyncio.create_task(process("a", lambda: go.wait(60))) for _ in range(50)]
    await asyncio.sleep(0.01)
    assert await asyncio.create_task(process("b", lambda: OWNER.get())) == "b"
    go.set()
    assert all(await asyncio.gather(*slow))


async def test_one_key_has_half_of_the_places_in_line(monkeypatch):
    go, loader = threading.Event(), MediaLoader(MediaOptions(media_loading_thread_count=2))
    monkeypatch.setattr(module, "read_image", lambda value, *_: go.wait(60) if value else value)
    monkeypatch.setattr(module, "_MAX_WAITING", 8)
    tasks = [asyncio.create_task(load_for("a", loader, parts(*range(1, 21))))]  # one prompt may have more
    await asyncio.sleep(0.01)
    with pytest.raises(OverloadedError, match="20 images, videos and sounds of this client wait"):
        await asyncio.create_task(load_for("a", loader, parts(1)))
    assert (await asyncio.create_task(load_for("b", loader, parts(0, 0, 0, 0))))["image"] == [0, 0, 0, 0]
    tasks.append(asyncio.create_task(load_for("b", loader, parts(1, 1, 1, 1))))
    await asyncio.sleep(0.01)
    with pytest.raises(OverloadedError, match="8 images, videos and sounds wait"):
        await asyncio.create_task(load_for("c", loader, parts(0)))
    go.set()
    await asyncio.gather(*tasks)
    while loader._num_waiting:
        await asyncio.sleep(0.005)
    assert (await asyncio.create_task(load_for("c", loader, parts(0))))["image"] == [0]
