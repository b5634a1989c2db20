"""Part of processors whose placeholder is a text that need not be a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxengine.media.base.processor import Expanded, Processed
from jaxengine.media.processors.tiles import TilesProcessor
from jaxengine.models.params.errors import ModelFileError


class TextPlaceholderProcessor(TilesProcessor):
    """Base class of a TilesProcessor in whose prompts a text stands for an image: its tokens are found and replaced by
    one.
    """

    _placeholder: str
    _written: list[int]

    def place_text(self, path: Path, name: str, text: str) -> None:
        """Let `text` stand for an image. path, name: the file and the field that say so, for the error. Raises
        ModelFileError for a text without tokens.
        """
        self._placeholder, self._written = text, self.ids(text)
        if not self._written:
            raise ModelFileError(path, f"{name} must be a text with tokens, got {text[:100]!r}")

    def placeholder(self, modality: str) -> str:
        """Return the text that stands for an image."""
        return self._placeholder

    def encode(self, text: str, token_ids: Sequence[int]) -> list[int]:
        """Return the token ids of a prompt, with one for each placeholder text, whose tokens may depend on the text
        around it. token_ids: of the whole text; what is before its own, of its beginning, stays there. Token ids of
        another text are returned as they are.
        """
        plain, pieces = self.ids(text), text.split(self._placeholder)
        before = len(token_ids) - len(plain)
        if before < 0 or list(token_ids[before:]) != plain:
            return list(token_ids)
        found = list(token_ids[:before])
        for number, piece in enumerate(pieces):
            found += [*([self.image_id] if number else ()), *(self.ids(piece) if piece else ())]
        return found

    def expand(self, token_ids: Sequence[int], items: Mapping[str, Sequence[Processed]]) -> Expanded:
        """Expand the prompt as UnitProcessor does, after putting one token for each placeholder text in it."""
        found, count, at = list[int](), len(self._written), 0
        while at < len(token_ids):
            written = list(token_ids[at : at + count]) == self._written
            found.append(self.image_id if written else token_ids[at])
            at += count if written else 1
        return super().expand(found, items)

    def ids(self, text: str) -> list[int]:
        """Tokenize a piece of text between special tokens."""
        tokenizer: Any = self.tokenizer
        return tokenizer.encode(text, add_special_tokens=False)
