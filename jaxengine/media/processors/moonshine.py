"""Processor of Moonshine: samples of at most 30 seconds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxengine.media.base.processor import Processed
from jaxengine.media.base.samples import RATE, Sound
from jaxengine.media.processors.attended import PieceProcessor
from jaxengine.media.processors.log_mel import required_features
from jaxengine.media.processors.settings import check_options
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.hf import errors_of
from jaxengine.scheduler.base.errors import RequestError

_TINY = 1e-7  # what is added to a variance
_NOTHING = -1  # in the column of patches after a sound


class MoonshineProcessor(PieceProcessor):
    """Processor of MoonshineForConditionalGeneration. Its models have one language each, which requests do not name.

    Attributes:
      start: the token id that begins a transcript.
      size: samples of a patch.
      shortest: samples that the convolutions before the first position span.
      normalizes: whether samples are reduced to mean 0 and variance 1.
    """

    search, window = 5 * RATE, RATE // 10

    def __init__(self, folder: Path, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any):
        """Read the checkpoint's settings, and set the attributes: `normalizes` is do_normalize, by default whether
        there are settings of sounds, `start` is decoder_start_token_id, by default 1.

        folder: of the checkpoint. config_json: content of its config.json. model_config: has the tower's sizes.
        tokenizer: None without one. Raises ModelFileError for settings that are invalid or not the tower's,
        ModelConfigError for a `decoder_start_token_id` that the vocabulary lacks.
        """
        tower: Any = model_config.tower
        self.num_frames, self.size, self.shortest = tower.unit, tower.num_features, tower.shortest
        self.most, self.tokenizer = self.num_frames * self.size, tokenizer
        padding = {"padding_side": "right", "padding_value": 0.0}
        features = required_features(folder, feature_size=1, sampling_rate=RATE, **padding)
        with errors_of(folder):
            self.normalizes = features.boolean("do_normalize", bool(features.raw))
        fields = ConfigFields(config_json)
        self.start = fields.integer("decoder_start_token_id", 1, minimum=0)
        if self.start >= model_config.vocab_size:
            raise fields.fail("decoder_start_token_id", f"a token id below vocab_size {model_config.vocab_size}")
        self.settings = f"{type(self).__name__} {self.num_frames} {self.normalizes}"

    def prompt(self, language: str | None) -> list[int]:
        return [self.start]

    def process(self, modality: str, value: Any, options: Mapping[str, Any], most: int | None = None) -> Processed:
        """Return a Sound as one item: its samples, with do_normalize of mean 0 and variance 1, in patches, padded with
        zeros that do not count, except that a sound of fewer samples than the convolutions span is padded with zeros
        that do. most: not used.

        Raises RequestError for any option, longer sounds, and other values.
        """
        check_options(options, ())
        if not isinstance(value, Sound):
            raise RequestError("this model takes a sound, and no spectrogram of one", param="multi_modal_data")
        self.check_length(value, self.most)
        samples = value.samples
        if self.normalizes and len(samples):
            samples = (samples - samples.mean()) / np.sqrt(samples.var() + _TINY)
        count = max(len(samples), self.shortest)
        patches = np.zeros((self.num_frames, self.size), np.float32)
        patches.reshape(-1)[: len(samples)] = samples
        heard = np.clip(count - self.size * np.arange(self.num_frames), 0, self.size)
        return self.item(patches, np.where(heard > 0, heard, _NOTHING)[None].astype(np.int32))
