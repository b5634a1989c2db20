"""Files of processors with damaged values: read, or refused with one error that names the file or the field."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxengine.media.registry import processor_class
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.config.readers.hf import CONFIG_FILE, read_config_json
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.registry import read_hf
from jaxengine.tokens.tokenizer import Tokenizer
from tests.fixtures import omni_checkpoints, picture_checkpoints, sound_checkpoints, unit_pictures, whisper_checkpoints
from tests.fixtures.drawn_weights import FOLDER
from tests.models.damage import STRANGE, damaged_value
from tests.tables import each_row

FILES = (
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
    *("generation_config.json", CONFIG_FILE),
)
Make = Callable[[str, Any], Any]


def folders(root: Path) -> Iterator[Path]:
    """Folders of a checkpoint of each family that sees or hears."""
    for module, names in (
        (sound_checkpoints, sound_checkpoints.CONFIGS),
        (whisper_checkpoints, whisper_checkpoints.CONFIGS),
        (picture_checkpoints, picture_checkpoints.FILES),
        (omni_checkpoints, omni_checkpoints.CONFIGS),
    ):
        yield from (module.whole_checkpoint(name, root / name) for name in names if "wide" not in name)
    for name in unit_pictures.CASES:
        (folder := root / name).mkdir()
        shutil.copy(FOLDER / name / CONFIG_FILE, folder)
        unit_pictures.write_files(folder, name)
        yield folder


def maker(folder: Path) -> Make:
    """A function that opens the processor of a folder with another content of one file."""
    raw, contents = read_config_json(folder), {name: (folder / name) for name in FILES if (folder / name).exists()}
    config, tokenizer = read_hf(raw), Tokenizer.from_hf_folder(folder)

    def make(name: str, content: Any) -> Any:
        own, before = raw, contents[name].read_text()
        if name == CONFIG_FILE:
            own = content
        else:
            contents[name].write_text(json.dumps(content))
        try:
            made = processor_class(config.architecture)(folder, own, config, tokenizer)
            return [(made.placeholder(modality), made.largest(modality)) for modality in made.modalities]
        finally:
            contents[name].write_text(before)

    return make


def test_damaged_settings(tmp_path, thorough):
    used = refused = 0
    for folder in folders(tmp_path):
        make, names = maker(folder), [name for name in FILES if (folder / name).exists()]
        for number in range(300 if thorough else 2):
            rng = random.Random(f"{folder.name}/{number}")
            name = rng.choice(names)
            content = json.loads((folder / name).read_text())
            key = rng.choice(list(content))
            damaged = {**content, key: rng.choice(STRANGE)} if rng.random() < 0.5 else damaged_value(content, rng)
            if name == CONFIG_FILE and not isinstance(damaged, dict):
                continue
            try:
                make(name, damaged)
                used += 1
            except (ModelFileError, ModelConfigError) as error:
                refused += 1
                assert len(str(error)) < 2000 and "\n" not in str(error), (folder.name, number)
    assert min(used, refused) > (used + refused) // 5


@pytest.fixture(scope="module")
def whisper(tmp_path_factory) -> Make:
    return maker(whisper_checkpoints.whole_checkpoint("whisper_sound", tmp_path_factory.mktemp("whisper")))


BELOW = "below vocab_size"


@each_row(
    ("changes", "message"),
    [
        ({"decoder_start_token_id": "1"}, "decoder_start_token_id must be an integer"),
        ({"decoder_start_token_id": 2**31 - 1}, f"decoder_start_token_id must be a token id {BELOW}"),
        ({"no_timestamps_token_id": -1}, "no_timestamps_token_id must be an integer >= 0"),
        ({"eos_token_id": []}, f"eos_token_id must be a token id {BELOW}"),
        ({"eos_token_id": None}, "eos_token_id must be"),
        ({"eos_token_id": [[3]]}, f"eos_token_id must be a token id {BELOW}"),
        ({"suppress_tokens": "abc"}, f"suppress_tokens must be a token id {BELOW}"),
        ({"suppress_tokens": [1, None]}, "suppress_tokens must be"),
        ({"suppress_tokens": [1, 2**63]}, "suppress_tokens must be"),
        ({"suppress_tokens": [-2]}, "suppress_tokens must be"),
        ({"begin_suppress_tokens": list(range(257))}, "begin_suppress_tokens must be .* at most 256"),
        ({"begin_suppress_tokens": {"a": 1}}, "begin_suppress_tokens must be"),
        ({"lang_to_id": {"<|en|>": "1"}}, f"lang_to_id must be a mapping of names to token ids {BELOW}"),
        ({"lang_to_id": ["<|en|>"]}, "lang_to_id must be a mapping"),
        ({"task_to_id": {"transcribe": True}}, "task_to_id must be a mapping"),
        ({"max_initial_timestamp_index": [1]}, "max_initial_timestamp_index must be an integer >= 0"),
        ({"max_initial_timestamp_index": -1}, "max_initial_timestamp_index must be an integer >= 0"),
        ({"suppress_tokens": None, "max_initial_timestamp_index": 2**31 - 1, "begin_suppress_tokens": [-1]}, None),
    ],
)
def test_what_a_generation_config_of_whisper_must_not_say(changes, message, whisper):
    content = {**whisper_checkpoints.generation_config("whisper_sound"), **changes}
    if message is None:
        assert whisper("generation_config.json", content)
        return
    with pytest.raises(ModelFileError, match=message):
        whisper("generation_config.json", content)
