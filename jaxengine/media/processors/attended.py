"""Processors of sounds that all tokens of a prompt attend to: a prompt has one sound and no placeholder of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from jaxengine.media.base.processor import Expanded, Processed
from jaxengine.media.base.samples import RATE, Sound
from jaxengine.media.processors.settings import check_options
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.scheduler.base.media import AUDIO, TranscriptRules


class AttendedProcessor:
    """Preprocessing of sounds that layers attend to; implements MediaProcessor, but for `process`.

    Attributes:
      modalities: kinds of items that are taken.
      num_frames: number of patches of an item, the tower's unit.
      num_columns: number of columns of its patches.
      rules: constraints on the tokens of transcripts; None for none.
      tokenizer: the model's; None without one.
    """

    modalities: tuple[str, ...] = (AUDIO,)
    num_frames: int
    num_columns = 0
    rules: TranscriptRules | None = None
    tokenizer: Any

    def encode(self, text: str, token_ids: Sequence[int] = ()) -> list[int]:
        """Return the token ids of a prompt without special tokens, with which the tokenizer would otherwise begin a
        transcript. token_ids: not used.
        """
        del token_ids
        return self.tokenizer.encode(text, add_special_tokens=False)

    def placeholder(self, modality: str) -> str:
        """Return ""."""
        return ""

    def item(self, patches: np.ndarray, columns: np.ndarray) -> Processed:
        """Return the item of a sound, with one row, 0. patches: f32[num_frames, F]; columns: i32[C, num_frames]."""
        return Processed(patches, columns, np.zeros(1, np.int32), 1, (1, self.num_frames, 1))

    def grid_of(self, num_rows: int, grid: tuple[int, int, int] | None) -> tuple[int, int, int]:
        """Raise RequestError, since sounds cannot be given as embeddings."""
        raise RequestError("sounds are not given as embeddings", param="multi_modal_data")

    def largest(self, modality: str, size: tuple[int, int] | None = None, num_frames: int | None = None) -> Processed:
        """Return the item of the longest sound, whatever the arguments; its patches are f32[self.num_frames, 0]."""
        columns = np.zeros((self.num_columns, self.num_frames), np.int32)
        return self.item(np.zeros((self.num_frames, 0), np.float32), columns)

    def with_options(self, options: Mapping[str, Any]) -> Self:
        check_options(options, ())
        return self

    def expand(self, token_ids: Sequence[int], items: Mapping[str, Sequence[Processed]]) -> Expanded:
        """Return the prompt unchanged, with one sound at position 0. Raises RequestError unless exactly one sound is
        given.
        """
        count = len(items.get(AUDIO, ()))
        if count != 1:
            raise RequestError(f"multi_modal_data has {count} sounds; allowed: 1", param="multi_modal_data")
        return Expanded(list(token_ids), [np.zeros(1, np.int32)], [(AUDIO, 0)])

    def check_length(self, sound: Sound, most: int) -> None:
        """Raise RequestError for a sound of more than `most` samples."""
        if len(sound.samples) > most:
            problem = f"a sound of {sound.seconds:g} seconds is given; a prompt has at most {most / RATE:g}"
            raise RequestError(f"{problem}: transcriptions of a server take longer ones", param="multi_modal_data")


class PieceProcessor(AttendedProcessor):
    """Processor of a model without timestamps, whose transcript of a long sound is those of its pieces.

    A sound of more than `most` samples is cut where it is quietest: each piece ends in the last `search` samples of the
    most that it may have, before the first of the windows of `window` samples there with the least energy. A tail of
    such a search of fewer samples than a window, or of the same number, is cut in its middle. This is how transformers'
    CohereAsrFeatureExtractor cuts.

    Attributes:
      most: samples of the longest sound that a prompt takes, at least 1.
      search, window: see above; at least 1.
      languages: codes of the languages of which a request may name one; empty if requests name none.
    """

    num_columns = 1
    most: int
    search: int
    window: int
    languages: Sequence[str] = ()

    @abstractmethod
    def prompt(self, language: str | None) -> list[int]:
        """Return the token ids that request a transcript. language: one of `languages`; None for the usual one."""

    def separator(self, language: str | None) -> str:
        """Return the text between the transcripts of two pieces of a sound: a space."""
        return " "

    def pieces(self, samples: np.ndarray) -> list[np.ndarray]:
        """Return the parts, in order, of samples f32[N], N >= 1, of at most `most` samples each; views. Each but the
        last ends at the quietest place of the last `search` samples that it may have.
        """
        found, begin = [], 0
        while begin + self.most < len(samples):
            end = self._quietest(samples, max(begin, begin + self.most - self.search), begin + self.most)
            found.append(samples[begin : (end := max(begin + 1, end))])
            begin = end
        return [*found, samples[begin:]]

    def _quietest(self, samples: np.ndarray, begin: int, end: int) -> int:
        """Return the index in samples f32[N], from `begin` on and before `end`, at which a piece ends: the beginning of
        the window of `window` samples with the least mean square, the last window left out; the middle if there is no
        other.
        """
        count = (end - begin - 1) // self.window  # the last window is not considered
        if count < 1:
            return (begin + end) // 2
        windows = samples[begin : begin + count * self.window].reshape(count, self.window)
        return begin + int(np.argmin(np.square(windows).mean(axis=1))) * self.window
