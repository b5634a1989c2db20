"""Rows of media from recorded checkpoints with changed towers, and their prompts' tokens, against transformers."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from jaxengine.media.base.samples import Sound
from jaxengine.media.registry import processor_for
from jaxengine.models.config.readers.hf import read_config_json
from jaxengine.tokens.tokenizer import Tokenizer
from tests.fixtures import changed_towers, omni_checkpoints, picture_checkpoints, sound_checkpoints, unit_pictures
from tests.fixtures.drawn_weights import checkpoint
from tests.fixtures.whisper_checkpoints import RATE
from tests.models.conftest import load_checkpoint
from tests.models.families.pictures import prepared, see

# Whose parts another case has.
FURTHER = ("llava_siglip", "qwen3_vl_short", "qwen3_omni", "glmasr")


def opened(name, folder):
    """The checkpoint of a case, in a folder."""
    recorded = changed_towers.CASES[name][0]
    if recorded in unit_pictures.CASES:
        unit_pictures.write_checkpoint(folder, recorded, checkpoint(recorded))
    else:
        owners = (picture_checkpoints.FILES, picture_checkpoints), (omni_checkpoints.CONFIGS, omni_checkpoints)
        owner = next((owner for names, owner in owners if recorded in names), sound_checkpoints)
        owner.whole_checkpoint(recorded, folder)
    changed_towers.write(name, folder)
    config, model = load_checkpoint(folder)
    tokenizer = Tokenizer.from_hf_folder(folder)
    processor = processor_for(folder, read_config_json(folder), config, tokenizer)
    return SimpleNamespace(config=config, model=model, tokenizer=tokenizer, processor=processor)


def expanded(case, recorded, prompt):
    """Tokens of a prompt, and its processed media in order."""
    if recorded in picture_checkpoints.FILES:
        made, items = prepared(case, prompt)
        return made.token_ids, [items[kind][number] for kind, number in made.order]
    if recorded in unit_pictures.CASES:
        text = unit_pictures.text_of(case.processor.placeholder("image"), 0, len(prompt))
        kind, values = "image", [unit_pictures.picture(index) for index in prompt]
    elif recorded in omni_checkpoints.CONFIGS:
        kind, (text, found) = "image", omni_checkpoints.text_and_media(recorded, prompt)
        values = found[kind]
    else:
        kind, (text, found) = "audio", sound_checkpoints.text_and_sounds(recorded, prompt)
        values = [Sound(each, RATE) for each in found]
    items = [case.processor.process(kind, value, {}) for value in values]
    token_ids = case.tokenizer.encode(text, add_special_tokens=False)
    return case.processor.expand(token_ids, {kind: items}).token_ids, items


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.thorough("as others")] * (name in FURTHER))
        for name in changed_towers.CASES
    ],
)
def test_rows_of_changed_towers(name, tmp_path):
    recorded, prompt, _ = changed_towers.CASES[name]
    case = opened(name, tmp_path)
    token_ids, items = expanded(case, recorded, prompt)
    with np.load(changed_towers.RECORD) as golden:
        wanted_ids, wanted = golden[f"{name}_ids"], golden[name]
    assert list(token_ids) == wanted_ids.tolist()
    found = np.concatenate(see(case, items))[:: changed_towers.STEP]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
