"""Images and videos of Molmo 2: crops, tokens, which of them attend to each other, and what is refused."""

from __future__ import annotations

import tracemalloc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxengine.media.processors.molmo2 import stretched
from jaxengine.models.params.errors import ModelFileError
from jaxengine.requests.media.inputs import MediaInputs
from jaxengine.scheduler.base.errors import RequestError
from tests.fixtures.picture_checkpoints import frames, picture
from tests.jaxengine.media.test_unit_processors import processor
from tests.scheduler.loop import make

NAME = "molmo2_vision"
# Its tokens: of the beginning and a video, after the whole image's start, ends, starts, columns, embeddings, an image.
BOS, VIDEO, FRAME_END, FRAME, LOW, END, START, COLUMN, PATCH, IMAGE = (117, 118, *range(120, 128))


def test_tokens(tmp_path):
    """A beginning where there is none; every token of an image attends to the others, wherever it comes from."""
    made: Any = processor(tmp_path, NAME)
    item = made.process("image", picture(1, 20, 30), {})
    own = [LOW, *[PATCH, PATCH, COLUMN] * 2, END, START, *[PATCH, PATCH, PATCH, COLUMN] * 2, END]
    assert item.num_rows == 10 and item.crops == ((2, 2), (2, 3))
    for prompt in ([5, IMAGE, 6, COLUMN], [BOS, 5, IMAGE, 6, COLUMN]):
        expanded = made.expand(prompt, {"image": [item]})
        assert expanded.token_ids == [BOS, 5, *own, 6, COLUMN]
        assert expanded.joint.tolist() == [*range(2, 2 + len(own)), len(own) + 3]
    assert made.expand([5, COLUMN], {}) == ([5, COLUMN], [], [], None, 0, None)
    video = made.process("video", SimpleNamespace(frames=frames(2, 3, 8, 9), fps=4.0, frames_indices=[0, 2, 8]), {})
    expanded, shown = made.expand([5, VIDEO, 6], {"video": [video]}), [FRAME, *[PATCH] * 4, FRAME_END]
    # The times are words that the tokenizer does not know.
    assert expanded.token_ids == [BOS, 5, 0, *shown, 0, *shown, 0, *shown, 6]
    assert video.seconds == (0.0, 0.5, 2.0) and made.tokenizer.decode([0]) == "w0"
    assert expanded.joint.tolist() == [each for each, token in enumerate(expanded.token_ids) if token in shown]


def test_crops(tmp_path):
    """An image has at most as many crops as a request or an engine says; none has more embeddings than the largest."""
    made: Any = processor(tmp_path, NAME)
    for (height, width), crops in (((30, 75), 3), ((90, 40), 3), ((11, 13), 1), ((24, 24), 1), ((13, 12), 1)):
        assert made.num_units(height, width, {}) == 1 + crops
        assert made.num_units(height, width, {"max_crops": 1}) == 2
    for most, rows in ((1, 8), (3, 4 + 8), (4, 4 + 10)):
        other = made.with_options({"max_crops": most})
        found = other.largest("image")
        assert (found.num_rows, len(found.patches)) == (rows, 16 * (1 + most)), most
    with pytest.raises(RequestError, match="max_crops must be an integer from 1 to 64, got '0'"):
        made.process("image", picture(1, 20, 30), {"max_crops": 0})


def test_halves_are_rounded_to_even():
    shown = np.asarray([[0, 1], [2, 5]], np.uint8)[..., None].repeat(3, axis=2)
    assert stretched(shown, 2, 4)[..., 0].tolist() == [[0, 0, 1, 1], [2, 3, 4, 5]]
    assert stretched(shown, 1, 1)[0, 0].tolist() == [2] * 3, "the mean of four"
    assert stretched(shown[:, :1], 3, 1)[:, 0, 0].tolist() == [0, 1, 2]


def test_long_lines_are_not_widened():
    """Resizing takes memory for the result's pixels, not for all columns of the lines that it reads."""
    shown = np.zeros((40, 8000, 3), np.uint8)
    tracemalloc.start()
    try:
        stretched(shown, 30, 20)
        assert tracemalloc.get_traced_memory()[1] < shown.nbytes / 2
    finally:
        tracemalloc.stop()


def test_what_is_refused(tmp_path):
    made: Any = processor(tmp_path, NAME)
    image, video = made.process("image", picture(1, 20, 30), {}), made.process("video", frames(2, 3, 8, 9), {})
    for prompt, items, message in (
        ([VIDEO, VIDEO], {"video": [video] * 2}, "has images or one video, got 2 videos"),
        ([VIDEO, IMAGE], {"video": [video], "image": [image]}, "has images or one video, got 1 videos and 1 images"),
        ([5], {"video": [video]}, "there must be one for each"),
        ([IMAGE], {"image": [image] * 2}, "there must be one for each"),
    ):
        with pytest.raises(RequestError, match=message):
            made.expand(prompt, items)
    for changes, message in (
        ({"size": {"height": 24, "width": 36}}, "size must be 24 by 24, the tower's image_size"),
        ({"patch_size": 8}, "patch_size must be 6, the tower's"),
        ({"resample": 3}, "resample must be 2, bilinear"),
        ({"max_crops": 65}, "max_crops must be from 1 to 64"),
        ({"overlap_margins": [2, 2]}, "overlap_margins must be two numbers whose sum is less than a crop's 4 patches"),
        ({"overlap_margins": [1]}, "overlap_margins must be two integers >= 0"),
        ({"pooling_size": [1, 2]}, "pooling_size must be .* with at most 4 windows of a crop"),
        ({"pooling_size": [4, 4]}, "pooling_size must be two numbers whose product is at most 9"),
    ):
        with pytest.raises(ModelFileError, match=message):
            processor(tmp_path, NAME, **changes)


def test_all_images_are_one_unit(tmp_path):
    """A known prefix ends before the first image if an image is added, or a word between images."""
    made: Any = processor(tmp_path, NAME)
    options = {"mm_processor_kwargs": None, "max_model_len": 256, "mm_processor_cache_bytes": 0}
    limits = {"max_encoder_patches": 96, "num_encoder_rows": 40, "max_num_batched_tokens": 60, "max_num_seqs": 4}
    config: Any = SimpleNamespace(**options, **limits, long_prefill_token_threshold=0)
    inputs = MediaInputs(made, [made.tower], config)
    shown = [picture(seed, 20, 30) for seed in (1, 2, 1)]

    def pages(words: list[int], count: int) -> list[bytes]:
        prompt = [BOS, *range(3, 10), *[token for word in words for token in (IMAGE, word)]][: 8 + 2 * count]
        token_ids, media = inputs.read(prompt, {"image": shown[:count]}, None)
        assert media is not None and media.joint_span[0] == 8
        request = make("x", token_ids, media=media)
        return request.extend_page_hashes(request.prompt_token_ids, 4)

    one, two, other = pages([11, 12], 1), pages([11, 12], 2), pages([13, 12], 2)
    for a, b in ((one, two), (two, other)):
        assert a[:2] == b[:2] and not {*a[2:]} & {*b[2:]}
    assert pages([11, 12], 2) == two
    config.max_num_batched_tokens = 59
    with pytest.raises(
        RequestError, match=r"first image of a prompt to the last at once: .* at most 55 tokens, got 56"
    ):
        pages([11, 12, 13], 3)
    config.max_num_batched_tokens, config.long_prefill_token_threshold = 60, 50
    with pytest.raises(RequestError, match=r"at most 50 tokens, got 56 \(raise long_prefill_token_threshold\)"):
        pages([11, 12, 13], 3)
    config.long_prefill_token_threshold, config.max_encoder_patches = 0, 95
    with pytest.raises(RequestError, match="encodes all images of a prompt at once: 96 patches, where at most 95"):
        pages([11, 12, 13], 3)
