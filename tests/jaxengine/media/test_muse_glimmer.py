"""Images and videos of Muse Glimmer: sizes, tokens around embeddings, and what is refused."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest

from jaxengine.media.processors.muse_glimmer import MuseGlimmerProcessor
from jaxengine.models.config.readers.hf import read_config_json
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.registry import read_hf
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.tokens.tokenizer import Tokenizer
from tests.fixtures.picture_checkpoints import frames, picture, whole_checkpoint

NAME = "muse_glimmer_vision"
# (height, width) of an image, side of a square, most squares -> (height, width) that transformers' smart_resize has.
SIZES = (
    (*(9, 9, 28, 64), 28, 28),
    (*(45, 45, 8, 64), 48, 48),  # 40 is as near
    (*(1883, 60, 8, 144), 536, 16),
    (*(762, 1363, 56, 144), 504, 896),
    (*(12, 376, 8, 144), 8, 376),
    (*(1794, 36, 56, 4), 784, 56),  # more than the most: each side is rounded
    (*(34, 2765, 28, 4), 28, 504),
)


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    folder = whole_checkpoint(NAME, tmp_path_factory.mktemp(NAME))

    def opened(tokenizer: bool = True, **changes: Any) -> MuseGlimmerProcessor:
        path, raw = folder / "processor_config.json", read_config_json(folder)
        before = path.read_text()
        whole = json.loads(before)
        path.write_text(json.dumps({kind: settings | changes for kind, settings in whole.items()}))
        try:
            return MuseGlimmerProcessor(
                folder, raw, read_hf(raw), Tokenizer.from_hf_folder(folder) if tokenizer else None
            )
        finally:
            path.write_text(before)

    return opened


def test_sizes_are_those_of_transformers():
    for *given, height, width in SIZES:
        tall, wide, side, most = given
        processor: Any = SimpleNamespace(factor=side)
        assert MuseGlimmerProcessor.scaled(processor, tall, wide, most) == (height, width), given
    with pytest.raises(RequestError, match="at most 200 times the shorter one"):
        MuseGlimmerProcessor.scaled(SimpleNamespace(factor=8), 1, 201, 4)  # type: ignore[arg-type]


def test_the_largest_are_as_large_as_any(opened):
    made = opened()
    assert made.largest("image").num_rows == 113 and made.largest("image", (9, 9)).grid == (1, 2, 2)
    # Frames of 1:200 are a line of more squares than the limit.
    wide = made.process("video", SimpleNamespace(frames=frames(1, 3, 4, 800), fps=2.0, frames_indices=[0, 1, 2]), {})
    assert wide.num_rows == made.largest("video", num_frames=3).num_rows == 2 * 49
    more = made.with_options({"max_image_tokens": 210, "max_video_frame_tokens": 4})
    assert more.limits == {"image": 210, "video": 12} and made.limits == {"image": 64, "video": 12}
    assert math.prod(more.largest("image").grid) == 840
    assert made.process("image", picture(1, 90, 70), {"max_image_tokens": 4}).num_rows <= 4


def test_what_is_not_possible_is_refused(opened):
    made, image = opened(), picture(1, 8, 8)
    for options, said in (({"max_pixels": 4}, "has 'max_pixels'"), ({"max_image_tokens": 0}, "an integer from 1 to")):
        with pytest.raises(RequestError, match=said):
            made.process("image", image, options)
    with pytest.raises(RequestError, match="an item of image makes 4 patches"):
        made.process("image", image, {}, most=3)
    blind = opened(tokenizer=False)
    with pytest.raises(RequestError, match="a prompt with an image needs the model's tokenizer"):
        blind.expand([261], {"image": [blind.process("image", image, {})]})
    for changes, said in (
        ({"patch_size": 14}, "patch_size must be 4 or absent"),
        ({"frame_timestamp_format": "{timestamp}"}, "frame_timestamp_format must be"),
        ({"max_image_tokens": 1 << 17}, "max_image_tokens must be 1 to 65536"),
    ):
        with pytest.raises(ModelFileError, match=said):
            opened(**changes)
