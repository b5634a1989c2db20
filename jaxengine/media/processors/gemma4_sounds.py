"""Gemma 4's processor of sounds: spectrograms of up to 30 seconds, an embedding for each 40 milliseconds, and marks
around them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxengine.media.base.processor import MediaProcessor
from jaxengine.media.base.samples import RATE, Sound
from jaxengine.media.processors.gemma4 import Gemma4Processor
from jaxengine.media.processors.log_mel import HOP, required_features
from jaxengine.media.processors.paired import PairedProcessor
from jaxengine.media.processors.sounds import SoundProcessor, check_length
from jaxengine.media.processors.usm_mel import UsmMel
from jaxengine.models.config.fields import ConfigFields, ModelConfigError
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.params.errors import ModelFileError

_LONGEST = 30 * RATE
# transformers' ids of tokens that a configuration does not name.
_IDS = {"audio_token_id": 258_881, "boa_token_id": 256_000, "eoa_token_index": 258_883}
# Frames after a sound that are not of it, so that its convolutions see nothing of the next one.
_APART = 2


def gemma4(
    folder: Path | str, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any
) -> MediaProcessor:
    """Return the processor of Gemma4ForConditionalGeneration for the towers that it is served with. folder: of the
    checkpoint; config_json: content of its config.json; model_config: of the model; tokenizer: None without one. One of
    each kind of tower gives a PairedProcessor. Raises ModelFileError, ModelConfigError.
    """
    towers = {tower.hears: replace(model_config, tower=tower, sound_tower=None) for tower in model_config.towers}
    found: list[Any] = []
    for hears, kind in ((False, Gemma4Processor), (True, Gemma4SoundProcessor)):
        if hears in towers:
            found.append(kind(folder, config_json, towers[hears], tokenizer))
    return PairedProcessor(*found) if len(found) > 1 else found[0]


class Gemma4SoundProcessor(SoundProcessor):
    """Processor of the sounds of Gemma4ForConditionalGeneration."""

    chunk = 4  # frames of an embedding

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any):
        fields = ConfigFields(config_json).with_defaults(**_IDS)
        super().__init__(folder, fields.raw, model_config, tokenizer)
        names = "boa_token_id", "eoa_token_id" if fields.has("eoa_token_id") else "eoa_token_index"
        self.marks = tuple(fields.integer(name, minimum=0) for name in names)
        for name, token in zip(names, self.marks, strict=True):
            if token >= model_config.vocab_size:
                raise fields.fail(name, f"a token id below vocab_size {model_config.vocab_size}")

    def read_features(self, folder: Path) -> ConfigFields:
        """Read and set the spectrogram's settings (`mel`). Raises ModelFileError for those that are invalid or not the
        tower's.
        """
        wanted = {"feature_size": self.num_bins, "hop_length": HOP, "hop_length_ms": 10.0, "sampling_rate": RATE}
        fields = required_features(folder, **wanted, dither=0.0)
        try:
            self.mel = UsmMel.read(fields, self.num_bins)
        except ModelConfigError as error:
            raise ModelFileError(folder, str(error)) from None
        return fields

    def spectrogram(self, samples: np.ndarray) -> np.ndarray:
        """Return the frames f32[P, bins] of samples f32[N], and _APART frames of zeros after them."""
        return np.pad(self.mel.of(samples), ((0, _APART), (0, 0)))

    def num_samples(self, sound: Sound) -> int:
        """Return the number of a sound's samples, which is not filled up. Raises RequestError for more than
        30 seconds.
        """
        check_length(sound, _LONGEST)
        return len(sound.samples)

    def num_rows(self, sound: Sound) -> int:
        """Return the number of embeddings of a sound, one for each begun 4 frames."""
        return -(-self._frames(sound) // self.tower.merge)

    def placed(self, sound: Sound, num_frames: int) -> tuple[np.ndarray, np.ndarray]:
        """Return one column, i32[1, num_frames], 0 within the sound and -1 after it, and the rows, -1 after its
        embeddings.
        """
        frames, rows = np.arange(num_frames), np.arange(num_frames // self.tower.merge)
        columns = np.where(frames < self._frames(sound), 0, -1)[None]
        return columns.astype(np.int32), np.where(rows < self.num_rows(sound), rows, -1).astype(np.int32)

    def _frames(self, sound: Sound) -> int:
        """Return the number of spectrogram frames of a sound, of which at most the first _LONGEST samples count."""
        return self.mel.num_frames(min(len(sound.samples), _LONGEST))
