"""Videos: which frames are taken and when they are shown, from animations and from Python; what is refused;
settings of frames that are not those of pictures."""

from __future__ import annotations

import builtins
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, WebPImagePlugin

from jaxengine.config.inputs.multimodal import MediaOptions
from jaxengine.media.base.errors import MediaError
from jaxengine.media.base.frames import Video, sample_frames
from jaxengine.media.decoding.bounds import PixelBudget, TimedFile
from jaxengine.media.decoding.videos import read_video
from jaxengine.requests.media.inputs import digest_of
from tests.fixtures.unit_pictures import picture
from tests.jaxengine.media.pictures import PICTURE, PIXELS, PNG, animation, saved
from tests.jaxengine.media.test_unit_processors import processor
from tests.tables import each_row

OPTIONS = MediaOptions()
FRAMES = np.stack([PIXELS, PIXELS[::-1], PIXELS[:, ::-1]])


def read(value: Any, options: MediaOptions = OPTIONS) -> Video:
    return read_video(value, options, PixelBudget(options.max_media_pixels))


def with_sampling(**sampling: Any) -> MediaOptions:
    return MediaOptions(media_io_kwargs={"video": sampling})


@pytest.mark.parametrize(
    ("total", "seconds", "sampling", "indices"),
    [
        (100, None, (4, -1), [0, 33, 66, 99]),
        (3, None, (32, -1), [0, 1, 2]),
        (5, None, (-1, -1), [0, 1, 2, 3, 4]),
        (1, None, (32, -1), [0]),
        (100, 10.0, (-1, 0.5), [0, 24, 49, 74, 99]),
        (100, 10.0, (3, 0.5), [0, 49, 99]),
        (100, 10.0, (32, 0.01), [0]),
        (10, None, (-1, 5), list(range(10))),
    ],
)
def test_frames_are_taken_evenly(total, seconds, sampling, indices):
    assert sample_frames(total, seconds, sampling).tolist() == indices


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_an_animation(form):
    video = read(animation(form))
    assert video.frames.dtype == np.uint8 and video.frames.shape == (4, 6, 8, 3)
    assert video.frames[:, 0, 0, 0].tolist() == [0, 40, 80, 120]
    assert video.total_num_frames == 4 and video.fps == pytest.approx(10)
    assert video.timestamps == pytest.approx([0, 0.1, 0.2, 0.3])
    two = read(animation(form), with_sampling(num_frames=2))
    assert two.frames[:, 0, 0, 0].tolist() == [0, 120] and two.frames_indices.tolist() == [0, 3]
    assert two.timestamps == pytest.approx([0, 0.3])
    assert read(animation(form, frames=6), with_sampling(fps=5)).frames_indices.tolist() == [0, 2, 5]


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_frames_between_those_that_are_taken_have_their_own_times(form):
    pictures = [Image.new("RGB", (4, 4), (grey,) * 3) for grey in (0, 50, 100, 150, 200)]
    options: dict[str, Any] = {"duration": [100, 200, 300, 400, 1000], "save_all": True, "append_images": pictures[1:]}
    data = saved(pictures[0], form, **options, **({"lossless": True} if form == "WEBP" else {}))
    for sampling in ({"num_frames": 2}, {"num_frames": 2, "fps": 1}):
        video = read(data, with_sampling(**sampling))
        assert video.frames_indices.tolist() == [0, 4] and video.timestamps == pytest.approx([0, 1])
        assert video.fps == pytest.approx(2.5)


def test_every_frame_of_an_animation_is_timed(monkeypatch):
    """Also the many between two that are taken."""
    checks, real = [], TimedFile.check
    monkeypatch.setattr(TimedFile, "check", lambda file: checks.append(1) or real(file))
    decoded, get_next = [], WebPImagePlugin.WebPImageFile._get_next
    monkeypatch.setattr(
        WebPImagePlugin.WebPImageFile, "_get_next", lambda image: decoded.append(len(checks)) or get_next(image)
    )
    read(animation("WEBP", frames=6), with_sampling(num_frames=2))
    assert len(decoded) == len(set(decoded)) == 6


def test_a_frame_that_names_no_time_is_shown_for_a_tenth_of_a_second():
    pictures = [Image.new("L", (4, 4), grey) for grey in (0, 200)]
    video = read(saved(pictures[0], "GIF", save_all=True, append_images=pictures[1:]))
    assert video.timestamps == pytest.approx([0, 0.1])


def test_a_still_picture_is_one_frame():
    video = read(PNG)
    assert np.array_equal(video.frames, PIXELS[None]) and video.total_num_frames == 1


def test_frames_of_python(tmp_path):
    (tmp_path / "a.gif").write_bytes(animation("GIF"))
    assert len(read(tmp_path / "a.gif").frames) == 4
    for value in (FRAMES, list(FRAMES), [Image.fromarray(frame) for frame in FRAMES], tuple(FRAMES)):
        video = read(value)
        assert np.array_equal(video.frames, FRAMES) and video.fps is None and video.timestamps is None
        assert video.frames_indices.tolist() == [0, 1, 2] and read(video) is video
    video = read((FRAMES, {"fps": 2.0, "frames_indices": [0, 4, 8], "total_num_frames": 10}))
    assert video.timestamps is not None and video.timestamps.tolist() == [0, 2, 4]
    assert video.total_num_frames == 10 and video.fps == 2.0
    for indices, total in (([0, 4, 8], 9), ([1, 1, 4], 5)):
        video = read((FRAMES, {"frames_indices": indices}))
        assert video.frames_indices.tolist() == indices and video.total_num_frames == total


def test_videos_are_told_apart_by_all_that_is_said_of_them():
    """Also by numbers whose digits are alike together: SmolVLM's prompt names the length, which both determine."""
    times = np.zeros(1)
    known = {digest_of("video", Video(FRAMES[:1], times, times, *each), {}, "") for each in ((1.0, 23), (1.02, 3))}
    assert len(known) == 2


@each_row(
    ("value", "message"),
    [
        (b"", "has no bytes; allowed: MP4, WebM, and animated GIF, WebP and PNG"),
        (saved(PICTURE, "JPEG"), "is a JPEG; allowed: MP4"),
        (b"<svg/>", "is an SVG"),
        (b"RIFF\0\0\0\0AVI LIST", "is an AVI"),
        (animation("GIF")[:-60], "is a GIF that is damaged or cut short"),
        (animation("WEBP")[:-60], "is a WebP that is damaged or cut short"),
        (animation("PNG")[:-60], "is a PNG that is damaged or cut short"),
        (FRAMES / 255, r"array of float64 and shape \[3, 6, 8, 3\]; allowed: uint8 of shape \[N, H, W, 3\]"),
        (FRAMES[0], r"shape \[6, 8, 3\]"),
        (FRAMES[:0], "has 0 frames; allowed: 1 to 4096"),
        (np.zeros((5000, 1, 1, 3), np.uint8), "has 5000 frames"),
        ([], "is an empty list; allowed:"),
        (7, "is a int; allowed:"),
        (["a.png"], "has a frame 0 that is a str"),
        ([PIXELS, PIXELS[:4]], "frames of 8 x 6 and 8 x 4 pixels; all must have one size"),
        (
            (FRAMES, {"speed": 2}),
            "has 'speed' in addition to its frames; allowed: fps, frames_indices, total_num_frames",
        ),
        ((FRAMES, {"fps": 0}), "an fps that is not a number from 1e-06 to 1e\\+06"),
        ((FRAMES, {"fps": 10**400}), "an fps that is not a number from"),
        ((FRAMES, {"fps": 5e-324, "total_num_frames": 10**6}), "an fps that is not a number from"),
        ((FRAMES, {"total_num_frames": 10**400}), "a total_num_frames or frames_indices above 2147483647"),
        ((FRAMES, {"frames_indices": [0, 1]}), "frames_indices that are not 3 non-decreasing"),
        ((FRAMES, {"frames_indices": [2, 1, 0]}), "frames_indices that are not 3 non-decreasing"),
        ((FRAMES, {"frames_indices": ["a"] * 3}), "frames_indices"),
        ((FRAMES, {"total_num_frames": 2}), "frames_indices beyond its total_num_frames, 2"),
        (Path("/nowhere.mp4"), "cannot be read"),
    ],
)
def test_what_is_no_video(value, message):
    with pytest.raises(MediaError, match=message):
        read(value)


def test_an_animation_that_claims_frames_without_end():
    data = animation("PNG")
    at = data.index(b"acTL") + 4
    with pytest.raises(MediaError, match="frames; allowed: 1 to 100000|is a PNG that is damaged"):
        read(data[:at] + b"\x7f\xff\xff\xff" + data[at + 4 :])


def test_pixels_of_all_frames_count_together():
    few = MediaOptions(max_media_pixels=4 * 48 - 1)
    for value in (animation("GIF"), np.zeros((4, 6, 8, 3), np.uint8), [PICTURE] * 4):
        with pytest.raises(MediaError, match=r"allowed: 191 \(max_media_pixels\)"):
            read(value, few)
    with pytest.raises(MediaError, match="8 x 6 pixels; allowed: 1 to 47"):
        read(animation("GIF"), MediaOptions(max_image_pixels=47))


def test_without_a_decoder_the_error_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def without_av(name, *args, **options):
        if name == "av":
            raise ImportError
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without_av)
    with pytest.raises(MediaError, match=r"is a MP4 file, for which .*; pip install 'jaxengine\[video\]'"):
        read(b"\0\0\0\x18ftypisom\0\0\0\0")


def container(form: str, codec: str, count: int = 20) -> bytes:
    """A video whose frame i is grey of 10 i, ten a second."""
    av = pytest.importorskip("av", reason="the extra `video` is not installed")
    file = io.BytesIO()
    with av.open(file, "w", format=form) as output:
        stream = output.add_stream(codec, rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for number in range(count):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 10 * number, np.uint8), format="rgb24")
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return file.getvalue()


@pytest.mark.parametrize(("form", "codec"), [("mp4", "libx264"), ("webm", "libvpx-vp9")])
def test_a_container(form, codec):
    data = container(form, codec)
    video = read(data, with_sampling(num_frames=4))
    assert video.frames.shape == (4, 48, 64, 3) and video.frames_indices.tolist() == [0, 6, 12, 19]
    assert np.abs(video.frames[:, 24, 32, 0].astype(int) - [0, 60, 120, 190]).max() <= 3
    assert video.timestamps == pytest.approx([0, 0.6, 1.2, 1.9]) and video.fps == pytest.approx(10)
    with pytest.raises(MediaError, match="is a .* file (that is damaged or cut short|without a frame)"):
        read(data[:400])
    with pytest.raises(MediaError, match="64 x 48 pixels; allowed"):
        read(data, MediaOptions(max_image_pixels=3000))


@pytest.mark.parametrize("name", ["internvl", "llava_onevision", "llava_next_video", "perception_lm", "smolvlm"])
def test_frames_have_the_settings_of_videos(tmp_path, name):
    """Where they are not those of pictures. A checkpoint whose frames are no squares of the tower takes no videos."""
    name = f"{name}_vision"
    own, frames = {"image_std": [0.4] * 3, "image_mean": [0.3] * 3}, np.stack([picture(0)] * 2)
    alike, made = processor(tmp_path, name, **own), processor(tmp_path, name)
    settings = json.loads((tmp_path / "preprocessor_config.json").read_text())
    path = tmp_path / "video_preprocessor_config.json"
    path.write_text(json.dumps(settings | own))
    apart = processor(tmp_path, name)
    assert np.array_equal(apart.process("video", frames, {}).patches, alike.process("video", frames, {}).patches)
    assert np.array_equal(apart.process("image", picture(0), {}).patches, made.process("image", picture(0), {}).patches)
    assert apart.settings not in (alike.settings, made.settings)
    size = "max_image_size" if name.startswith("smolvlm") else "size"
    path.write_text(json.dumps(settings | {size: {"longest_edge": 12}, "crop_size": 12}))
    assert processor(tmp_path, name).modalities == ("image",)
