"""Processor of MOSS-Transcribe-Diarize: windows of a sound, with the seconds that have passed as text among their
embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from jaxengine.media.base.processor import Expanded, Processed
from jaxengine.media.base.samples import Sound
from jaxengine.media.processors.audioflamingo3 import MOST_SECONDS, AudioFlamingo3Processor
from jaxengine.media.processors.settings import WHOLE
from jaxengine.media.processors.sounds import AskedTranscripts, frames_of
from jaxengine.media.processors.units import check_placeholders
from jaxengine.models.config.fields import ConfigFields, ModelConfigError
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.hf import errors_of
from jaxengine.models.params.files import read_object
from jaxengine.scheduler.base.media import AUDIO


class MossTranscribeProcessor(AskedTranscripts, AudioFlamingo3Processor):
    """Processor of MossTranscribeDiarizeForConditionalGeneration.

    Attributes:
      per_second: embeddings that count as a second.
      every: seconds from one time in the prompt to the next; 0 for none.
    """

    longest: ClassVar[int] = MOST_SECONDS
    usual_token = 151671
    around = ("<|audio_start|>", "<|audio_end|>")

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any):
        """Read the checkpoint's settings, and set per_second (audio_tokens_per_second, 12.5 by default) and every
        (time_marker_every_seconds, 2). Raises the errors of AudioFlamingo3Processor, ModelFileError for values out of
        range and an audio_merge_size other than the tower's, and ModelConfigError for times in prompts without a
        tokenizer.
        """
        super().__init__(folder, config_json, model_config, tokenizer)
        fields = ConfigFields(read_object(Path(folder), WHOLE) or {})
        with errors_of(Path(folder) / WHOLE):
            fields.require(audio_merge_size=self.tower.joined)
            self.per_second = fields.number("audio_tokens_per_second", 12.5)
            self.every = fields.integer("time_marker_every_seconds", 2, minimum=0)
            if self.every > MOST_SECONDS:
                raise fields.fail("time_marker_every_seconds", f"0 to {MOST_SECONDS}")
        if self.every and tokenizer is None:
            raise ModelConfigError("this model's sounds need its tokenizer: leave skip_tokenizer_init False")
        self.settings = f"{self.settings} {self.per_second} {self.every}"

    def num_rows(self, sound: Sound) -> int:
        """Return the number of embeddings of a sound, one for each tower.merge frames that it begins."""
        return -(-frames_of(sound) // self.tower.merge)

    def pieces(self, num_rows: int) -> list[int]:
        """Return the tokens of a sound of num_rows embeddings: placeholders and, after those of each `every` seconds,
        the tokens of their number in decimal digits; no times if these seconds have less than one embedding. The number
        of embeddings between times is rounded down.
        """
        step = int(self.per_second * self.every)
        if step <= 0:
            return [self.token_id] * num_rows
        found: list[int] = []
        times = range(self.every, int(num_rows / self.per_second) + 1, self.every)
        for seconds in times:
            found += [self.token_id] * step + self.tokenizer.encode(str(seconds), add_special_tokens=False)
        return found + [self.token_id] * (num_rows - step * len(times))

    def length(self, item: Processed) -> int:
        """Return the number of tokens of a sound (`item`) in an expanded prompt."""
        return len(self.pieces(item.num_rows))

    def expand(self, token_ids: Sequence[int], items: Mapping[str, Sequence[Processed]]) -> Expanded:
        """Return the prompt with each placeholder replaced by the `pieces` of its sound. items: by modality, in the
        order of the prompt.

        Raises RequestError for another number of sounds than placeholders.
        """
        sounds = items.get(AUDIO, ())
        shown = self.token_id if self.tokenizer is None else self.placeholder(AUDIO)
        check_placeholders("sound", shown, len(self.found(token_ids)), len(sounds))
        out: list[int] = []
        positions: list[np.ndarray] = []
        for token in token_ids:
            own = self.pieces(sounds[len(positions)].num_rows) if token == self.token_id else [token]
            if token == self.token_id:
                places = np.flatnonzero(np.asarray(own) == token)
                positions.append((len(out) + places).astype(np.int32))
            out += own
        return Expanded(out, positions, [(AUDIO, number) for number in range(len(sounds))])
