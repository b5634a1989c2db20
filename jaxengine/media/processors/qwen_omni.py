"""Processors of the thinkers of Qwen2.5-Omni and Qwen3-Omni: images, videos and sounds, and M-RoPE positions of prompts
that have several of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxengine.media.base.processor import Expanded, MediaProcessor, Processed
from jaxengine.media.base.samples import Sound
from jaxengine.media.processors.log_mel import HOP, log_mel
from jaxengine.media.processors.mrope import whole_times
from jaxengine.media.processors.paired import PairedProcessor
from jaxengine.media.processors.qwen2_vl import Qwen2_5VLProcessor, Qwen2VLProcessor
from jaxengine.media.processors.qwen3_vl import Qwen3VLProcessor
from jaxengine.media.processors.sounds import Qwen2AudioProcessor, Qwen3SoundProcessor, SoundProcessor
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.scheduler.base.media import AUDIO

# transformers' ids of tokens that a configuration does not name.
_IDS = {"vision_start_token_id": 151652, "vision_end_token_id": 151653}
# Frames of silence after a sound, which its last window of samples reaches.
_APART = 2


class _Timed(Qwen2VLProcessor):
    """Processor whose videos have M-RoPE positions in proportion to seconds.

    Attributes:
      per_second: positions in time per second of video.
    """

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any):
        """Read the checkpoint's settings, and set per_second, position_id_per_seconds of config.json (default: 25).
        Raises ModelConfigError or ModelFileError for missing or invalid settings.
        """
        super().__init__(folder, config_json, model_config, tokenizer)
        self.per_second = ConfigFields(config_json).number("position_id_per_seconds", 25)

    def times(self, item: Processed) -> np.ndarray:
        """Return the temporal M-RoPE position of each of an item's steps relative to the first, i64[grid[0]], rounded
        down; 0 for a single step. Raises RequestError for a video that lasts too long.
        """
        if len(item.seconds) < 2:
            return np.zeros(item.grid[0], np.int64)
        # In float32, as transformers counts them.
        steps = np.arange(item.grid[0], dtype=np.float32) * np.float32(item.seconds[1])
        return whole_times(steps * np.float32(self.per_second))


class Qwen2_5OmniImages(_Timed, Qwen2_5VLProcessor):
    """Processor of the images and videos of Qwen2.5-Omni."""


class Qwen3OmniImages(_Timed):
    """Processor of the images and videos of Qwen3-Omni: Qwen2-VL's, with the patches of Qwen3-VL."""

    defaults = Qwen3VLProcessor.defaults
    image_defaults = Qwen3VLProcessor.image_defaults
    default_bounds = Qwen3VLProcessor.default_bounds


class Qwen2_5OmniSounds(Qwen2AudioProcessor):
    """Processor of the sounds of Qwen2.5-Omni: windows of two seconds, with 25 embeddings per second."""

    chunk = 4  # frames of an embedding
    token_fields = ("audio_token_id",)

    def num_samples(self, sound: Sound) -> int:
        """Return the number of samples of a sound, padded to whole frames and _APART more frames of silence."""
        return -(-len(sound.samples) // HOP) * HOP + _APART * HOP

    def spectrogram(self, samples: np.ndarray) -> np.ndarray:
        """Return the spectrogram f32[P, bins] of samples f32[N], without the last _APART frames, which are silence."""
        return log_mel(samples, self.num_bins)[:-_APART]


class Qwen3OmniSounds(Qwen3SoundProcessor):
    """Processor of the sounds of Qwen3-Omni: a sound that is shorter than a chunk is not padded."""

    def placed(self, sound: Sound, num_frames: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (columns, rows) of a sound with num_frames frames: one column, i32[1, num_frames], 0 within the sound
        and -1 after it (the tower's `cut` if there is a single chunk), and rows, i32, the numbers of its embeddings and
        -1 where there is none.
        """
        columns, rows = super().placed(sound, num_frames)
        return (np.where(columns < 0, self.tower.cut, columns) if num_frames == self.chunk else columns), rows


class OmniProcessor(PairedProcessor):
    """Processors of images and of sounds of a model with M-RoPE, in which sounds have the positions of text tokens."""

    def __init__(self, seeing: Any, hearing: SoundProcessor):
        """Store the processors, and add the placeholder of sounds to the token_ids of `seeing`, a Qwen2VLProcessor."""
        super().__init__(seeing, hearing)
        seeing.token_ids = {**seeing.token_ids, AUDIO: hearing.token_id}

    def expand(self, token_ids: Sequence[int], items: Mapping[str, Sequence[Processed]]) -> Expanded:
        """Return the prompt expanded for its images, videos and sounds together, with M-RoPE positions.

        Raises RequestError for another number of items than placeholders.
        """
        return self.seeing.expand(token_ids, items)


def qwen2_5_omni(folder: Path, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any) -> Any:
    """Return the processor of Qwen2.5-Omni for the towers that it is served with.

    Arguments and errors are those of jaxengine.media.registry.processor_for.
    """
    return _processor(Qwen2_5OmniImages, Qwen2_5OmniSounds, folder, config_json, model_config, tokenizer)


def qwen3_omni(folder: Path, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any) -> Any:
    """Return the processor of Qwen3-Omni for the towers that it is served with.

    Arguments and errors are those of jaxengine.media.registry.processor_for.
    """
    return _processor(Qwen3OmniImages, Qwen3OmniSounds, folder, config_json, model_config, tokenizer)


def _processor(
    images: type[Qwen2VLProcessor],
    sounds: type[Qwen2AudioProcessor | Qwen3SoundProcessor],
    folder: Path,
    config_json: Mapping[str, Any],
    model_config: ModelConfig,
    tokenizer: Any,
) -> MediaProcessor:
    """Return the processor of the towers that model_config has: an OmniProcessor for both, or that of the only one.

    images, sounds: classes of the two processors. Other arguments and errors are those of
    jaxengine.media.registry.processor_for; fields of thinker_config in config_json take precedence.
    """
    thinker = {**_IDS, **config_json, **(config_json.get("thinker_config") or {})}
    # Qwen2.5-Omni has other names for these fields.
    ids = {f"{kind}_token_id": thinker.get(f"{kind}_token_index") for kind in ("image", "video", AUDIO)}
    thinker = {**{name: token for name, token in ids.items() if token is not None}, **thinker}
    return OmniProcessor.of_towers(images, sounds, folder, thinker, model_config, tokenizer)
