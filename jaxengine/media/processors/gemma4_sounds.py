"""Processor of Gemma 4's sounds: spectrograms of up to 30 seconds, an embedding for each 40 milliseconds, and tokens
before and after them.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.hf import errors_of

_LONGEST = 30 * RATE
# transformers' ids of tokens that a configuration does not name.
_IDS = {"audio_token_id": 258_881, "boa_token_id": 256_000, "eoa_token_index": 258_883}
# Frames of silence after a sound, so that its convolutions do not reach the next sound.
_APART = 2


def gemma4(
    folder: Path | str, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any
) -> MediaProcessor:
    """Return the processor of Gemma4ForConditionalGeneration for the towers that it is served with; a PairedProcessor
    for one tower of each kind.

    Arguments and errors are those of jaxengine.media.registry.processor_for.
    """
    kinds = Gemma4Processor, Gemma4SoundProcessor
    return PairedProcessor.of_towers(*kinds, folder, config_json, model_config, tokenizer)


class Gemma4SoundProcessor(SoundProcessor):
    """Processor of the sounds of Gemma4ForConditionalGeneration."""

    chunk = 4  # frames of an embedding

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any):
        """Read the checkpoint's settings, and set `marks`, the tokens before and after a sound: boa_token_id, and
        eoa_token_id or else eoa_token_index, of which, as of the placeholder, _IDS has defaults. Raises
        ModelConfigError for invalid token ids, ModelFileError for invalid settings.
        """
        fields = ConfigFields(config_json).with_defaults(**_IDS)
        super().__init__(folder, fields.raw, model_config, tokenizer)
        names = "boa_token_id", "eoa_token_id" if fields.has("eoa_token_id") else "eoa_token_index"
        self.marks = tuple(fields.integer(name, minimum=0) for name in names)
        for name, token in zip(names, self.marks, strict=True):
            if token >= model_config.vocab_size:
                raise fields.fail(name, f"a token id below vocab_size {model_config.vocab_size}")

    def read_features(self, folder: Path) -> ConfigFields:
        """Read the spectrogram's settings, set `mel`, and return the settings.

        Raises ModelFileError for settings that are invalid or not the tower's.
        """
        wanted = {"feature_size": self.num_bins, "hop_length": HOP, "hop_length_ms": 10.0, "sampling_rate": RATE}
        fields = required_features(folder, **wanted, dither=0.0, padding_side="right")
        with errors_of(folder):
            self.mel = UsmMel.read(fields, self.num_bins)
        return fields

    def spectrogram(self, samples: np.ndarray) -> np.ndarray:
        """Return the spectrogram f32[P, bins] of samples f32[N], with _APART frames of zeros at its end."""
        return np.pad(self.mel.of(samples), ((0, _APART), (0, 0)))

    def num_samples(self, sound: Sound) -> int:
        """Return the number of samples of a sound, which is not padded. Raises RequestError for more than 30
        seconds.
        """
        check_length(sound, _LONGEST)
        return len(sound.samples)

    def num_rows(self, sound: Sound) -> int:
        """Return the number of embeddings of a sound: its frames divided by tower.merge, rounded up."""
        return -(-self.held(sound) // self.tower.merge)

    def held(self, sound: Sound) -> int:
        """Return the number of spectrogram frames of a sound, of which only the first _LONGEST samples count."""
        return self.mel.num_frames(min(len(sound.samples), _LONGEST))
