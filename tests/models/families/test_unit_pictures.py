"""Pictures through processors, towers and text models, against what Hugging Face transformers recorded
(tests/fixtures/recorders/unit_pictures.py)."""

from __future__ import annotations

import numpy as np
import pytest

from tests.fixtures.unit_pictures import CASES, SIZES, picture, text_of, video, video_text
from tests.models.conftest import forward
from tests.models.families.unit_runs import open_case, run_prompt

PROMPTS = ((), (0,), (1,), (0, 2), (3, 1))
POSITION_STEP, PIXEL_STEP = 6, 13
TOLERANCE = 1e-4
# What the others have too; those in a thorough run.
ALWAYS = ("llava_next_vision", "internvl_rms_vision", "gemma3_sees_vision")


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    yield open_case(request.param, tmp_path_factory.mktemp(request.param))
    forward.clear_cache()


def test_pixels(case):
    tower = case.model.config.tower
    side, patch = tower.vit.image_size, tower.vit.patch_size
    grid = side // patch
    for index in range(len(SIZES)):
        patches = case.processor.process("image", picture(index), {}).patches
        by_unit = patches.reshape(-1, tower.unit, patches.shape[1])[:, : grid**2]  # behind them ends of lines
        by_patch = by_unit.reshape(-1, grid, grid, 3, patch, patch)
        units = by_patch.transpose(0, 3, 1, 4, 2, 5).reshape(-1, 3, side, side)
        assert len(units) == case.recorded[f"units_{index}"]
        np.testing.assert_allclose(units.ravel()[::PIXEL_STEP], case.recorded[f"pixels_{index}"], rtol=0, atol=1e-5)


def test_logits_and_answers(case, thorough):
    """Of prompts without a picture, with one, with two, each with the answer that transformers gave behind it."""
    if case.name not in ALWAYS and not thorough:
        pytest.skip("a further shape of a tower: --thorough")
    placeholder = case.processor.placeholder("image")
    for number, pictures in enumerate(PROMPTS):
        answer = case.recorded[f"greedy_{number}"]
        text = text_of(placeholder, number, len(pictures))
        token_ids, logits = run_prompt(case, text, pictures, answer[:-1])
        assert token_ids == case.recorded[f"tokens_{number}"].tolist()
        end = len(token_ids)
        kept = np.unique([*range(0, end, POSITION_STEP), end - 1])
        golden = case.recorded[f"logits_{number}"]
        assert np.abs(logits[kept] - golden).max() <= TOLERANCE * np.abs(golden).max()
        assert logits[end - 1 :].argmax(axis=1).tolist() == answer.tolist()


def test_a_video_before_a_picture(case, thorough):
    if "video" not in case.processor.modalities:
        pytest.skip("takes no videos")
    if case.name == "smolvlm_split_vision" and not thorough:
        pytest.skip("a further shape of a tower: --thorough")
    token_ids, logits = run_prompt(case, video_text(case.name), (3,), np.zeros(0, np.int32), video())
    assert token_ids == case.recorded["tokens_video"].tolist()
    golden = case.recorded["logits_video"]
    found = logits[: len(token_ids)][::POSITION_STEP]
    assert np.abs(found - golden).max() <= TOLERANCE * np.abs(golden).max()
