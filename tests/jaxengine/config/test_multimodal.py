"""Options of pictures and videos: the forms they are given in, and what is not allowed."""

from __future__ import annotations

import argparse
import dataclasses

import pytest

from jaxengine.config.command_line import given_options
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.config.engine_flags import add_engine_options
from tests.tables import each_row


def from_words(*words: str) -> EngineConfig:
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    return EngineConfig.from_options(**given_options(parser.parse_args(words), EngineConfig))


def test_what_holds_where_nothing_is_said():
    config = EngineConfig()
    assert config.mm_limit("image") == config.mm_limit("video") == 999 and config.mm_size("image") is None
    assert config.allowed_media_domains == () and config.allowed_local_media_path == ""
    assert config.background == (255, 255, 255) and config.video_sampling == (32, -1)


@pytest.mark.parametrize("given", ['{"image": 2, "video": 0}', "image=2,video=0", " image = 2 , video=0"])
def test_limits_on_a_command_line(given):
    config = from_words("--limit-mm-per-prompt", given)
    assert config.mm_limit("image") == 2 and config.mm_limit("video") == 0
    assert config == EngineConfig(limit_mm_per_prompt={"image": 2, "video": 0}) and config.mm_limit("audio") == 999
    assert EngineConfig(limit_mm_per_prompt={"audio": 0}).mm_limit("audio") == 0


def test_language_model_only_means_limits_of_zero():
    for words in (("--language-model-only",), ("--language-model-only", "--limit-mm-per-prompt", "image=2")):
        config = from_words(*words)
        assert config.mm_limit("image") == config.mm_limit("video") == 0


def test_limits_with_sizes():
    config = EngineConfig(limit_mm_per_prompt={"image": {"count": 2, "width": 512, "height": 256}})
    assert config.mm_limit("image") == 2 and config.mm_size("image") == (256, 512)
    assert config.mm_limit("video") == 999
    hints = {
        "video": {"count": 1, "num_frames": 8, "width": 640, "height": 640},
        "audio": {"count": 2, "length": 480000},
    }
    config = EngineConfig(limit_mm_per_prompt=hints)
    assert (config.mm_size("video"), config.mm_frames("video"), config.mm_frames("image")) == ((640, 640), 8, None)
    assert (config.mm_limit("video"), config.mm_limit("audio")) == (1, 2)


def test_the_other_options():
    config = from_words(
        *("--allowed-media-domains", "A.example.", "bücher.example", "--allowed-local-media-path", "/srv/media"),
        *(
            "--media-io-kwargs",
            '{"video": {"num_frames": -1, "fps": 2}, "image": {"rgba_background_color": [0, 1, 2]}}',
        ),
        *("--mm-processor-kwargs", '{"max_pixels": 1000}', "--max-media-bytes", "64M", "--media-fetch-timeout", "3"),
    )
    assert config.allowed_media_domains == ("a.example", "xn--bcher-kva.example")
    assert config.video_sampling == (-1, 2) and config.background == (0, 1, 2)
    assert config.mm_processor_kwargs == {"max_pixels": 1000} and config.max_media_bytes == 64 << 20
    assert config.media_fetch_timeout == 3.0 and config.allowed_local_media_path == "/srv/media"
    assert EngineConfig(**dataclasses.asdict(config)) == config


@each_row(
    ("options", "says"),
    [
        ({"limit_mm_per_prompt": "image:2"}, "limit_mm_per_prompt is 'image:2'; allowed: {"),
        ({"limit_mm_per_prompt": "image=" + "9" * 5000}, "limit_mm_per_prompt is 'image=9"),
        ({"limit_mm_per_prompt": 2}, "limit_mm_per_prompt is 2; allowed: a dict such as"),
        ({"limit_mm_per_prompt": {"sound": 1}}, "limit_mm_per_prompt has 'sound'; it may have image, video, audio"),
        ({"limit_mm_per_prompt": {"audio": {"width": 1}}}, "limit_mm_per_prompt.audio has 'width'; it may have count"),
        (
            {"limit_mm_per_prompt": {"image": -1}},
            "limit_mm_per_prompt.image.count is -1; allowed: a whole number, 0 to",
        ),
        ({"limit_mm_per_prompt": {"image": True}}, "limit_mm_per_prompt.image.count is True"),
        ({"limit_mm_per_prompt": {"image": {"num_frames": 3}}}, "limit_mm_per_prompt.image has 'num_frames'"),
        ({"limit_mm_per_prompt": {"video": {"width": 0}}}, "limit_mm_per_prompt.video.width is 0"),
        (
            {"limit_mm_per_prompt": {"video": {"width": 8}}},
            "limit_mm_per_prompt.video has only one of width and height",
        ),
        (
            {"limit_mm_per_prompt": {"video": {"num_frames": 4097}}},
            "limit_mm_per_prompt.video.num_frames is 4097; allowed: a whole number, 1 to 4096",
        ),
        ({"limit_mm_per_prompt": {"video": {"length": 8}}}, "limit_mm_per_prompt.video has 'length'"),
        ({"limit_mm_per_prompt": {"audio": {"length": 0}}}, "limit_mm_per_prompt.audio.length is 0"),
        ({"allowed_media_domains": 3}, "allowed_media_domains is 3; allowed: a list of hosts"),
        ({"allowed_media_domains": ["https://a.example"]}, "has 'https://a.example'; give names of hosts"),
        ({"allowed_media_domains": ["a" * 70]}, "allowed: a list of hosts"),
        ({"allowed_local_media_path": "media"}, "is 'media', which is not an absolute path; begin it with /"),
        ({"allowed_local_media_path": 3}, "allowed_local_media_path is 3"),
        ({"media_loading_thread_count": 0}, "media_loading_thread_count is 0; allowed: a whole number, 1 to 256"),
        ({"mm_processor_kwargs": [1]}, "mm_processor_kwargs is [1]"),
        ({"media_io_kwargs": {"audio": {}}}, "media_io_kwargs has 'audio': {}; it may have image and video"),
        ({"media_io_kwargs": {"video": 3}}, "media_io_kwargs has 'video': 3"),
        (
            {"media_io_kwargs": {"video": {"speed": 3}}},
            "media_io_kwargs.video has 'speed'; it may have num_frames, fps",
        ),
        ({"media_io_kwargs": {"video": {"num_frames": 0}}}, "media_io_kwargs.video.num_frames is 0"),
        ({"media_io_kwargs": {"video": {"fps": 0}}}, "media_io_kwargs.video.fps is 0; allowed: -1, or more than 0"),
        ({"media_io_kwargs": {"image": {"rgba_background_color": [1, 2]}}}, "allowed: three numbers from 0 to 255"),
        ({"media_io_kwargs": {"image": {"rgba_background_color": [1, 2, 256]}}}, "rgba_background_color is 256"),
        ({"media_io_kwargs": {"image": {"image_mode": "L"}}}, "image_mode is 'L'; allowed: 'RGB'"),
        ({"max_media_bytes": "much"}, "max_media_bytes cannot be read"),
        ({"max_image_pixels": 10**9}, "max_image_pixels is 1000000000; allowed: a whole number, 1 to 89478485"),
        ({"max_media_pixels": 1.5}, "max_media_pixels is 1.5"),
        ({"media_fetch_timeout": 0}, "media_fetch_timeout is 0; allowed: 0.1 to 3600 seconds"),
    ],
)
def test_what_is_not_allowed_is_named(options, says):
    with pytest.raises(ConfigError) as refusal:
        EngineConfig.from_options(**options)
    assert says in str(refusal.value)
    assert refusal.value.param.partition(".")[0] == next(iter(options))
