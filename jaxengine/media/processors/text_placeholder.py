"""Bases of processors whose placeholder is a text that need not be a token."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxengine.media.base.processor import Expanded, Processed
from jaxengine.media.processors.tiles import TilesProcessor
from jaxengine.models.params.errors import ModelFileError


class TextPlaceholder:
    """Part of a processor in whose prompts a text stands for an image: the text's tokens are replaced by one token.

    Attributes:
      tokenizer: the model's jaxengine.tokens.tokenizer.Tokenizer.
      image_id: the token.
    """

    tokenizer: Any
    image_id: Any
    _placeholder: str
    _written: list[int]

    def place_text(self, path: Path, name: str, text: str) -> None:
        """Set `text` as the placeholder of images. path, name: the file and the field that have it, for the error.

        Raises ModelFileError for a text without tokens.
        """
        self._placeholder, self._written = text, self.ids(text)
        if not self._written:
            raise ModelFileError(path, f"{name} must be a text with tokens, got {text[:100]!r}")

    def placeholder(self, modality: str) -> str:
        """Return the text that stands for an image."""
        return self._placeholder

    def encode(self, text: str, token_ids: Sequence[int]) -> list[int]:
        """Return the token ids of a prompt `text`, with image_id for each placeholder text.

        token_ids: token ids of the whole text (see `with_one_token`).
        """
        return with_one_token(text, token_ids, self._placeholder, self.image_id, self.tokenizer)

    def with_tokens(self, token_ids: Sequence[int]) -> list[int]:
        """Return a prompt's token ids with image_id in place of the tokens of each placeholder text."""
        found, count, at = list[int](), len(self._written), 0
        while at < len(token_ids):
            written = list(token_ids[at : at + count]) == self._written
            found.append(self.image_id if written else token_ids[at])
            at += count if written else 1
        return found

    def ids(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens around it."""
        return self.tokenizer.encode(text, add_special_tokens=False)


class TextPlaceholderProcessor(TextPlaceholder, TilesProcessor):
    """Base class of a TilesProcessor in whose prompts a text stands for an image."""

    def expand(self, token_ids: Sequence[int], items: Mapping[str, Sequence[Processed]]) -> Expanded:
        """Return the expanded prompt of UnitProcessor.expand, after replacing the tokens of each placeholder text by
        image_id.

        Raises RequestError for another number of items than placeholders.
        """
        return super().expand(self.with_tokens(token_ids), items)


def with_one_token(
    text: str, token_ids: Sequence[int], placeholder: str | re.Pattern[str], token: int, tokenizer: Any
) -> list[int]:
    """Return the token ids of a prompt `text`, with `token` for each occurrence of `placeholder`, a text or a pattern.
    Other arguments are those of `with_tokens_of`.
    """
    pattern = re.compile(re.escape(placeholder)) if isinstance(placeholder, str) else placeholder
    return with_tokens_of(text, token_ids, pattern, lambda _: token, tokenizer)


def with_tokens_of(
    text: str,
    token_ids: Sequence[int],
    pattern: re.Pattern[str],
    token_of: Callable[[str], int],
    tokenizer: Any,
) -> list[int]:
    """Return the token ids of a prompt `text`, with one token for each text that `pattern` matches. token_of: function
    from such a text to the token.

    token_ids: token ids of the whole text, tokenized with or without special tokens at its beginning, which are kept.
    The text between placeholders is tokenized again, because tokens may depend on the text around them. Token ids that
    are not those of `text` are returned unchanged.
    """
    plain: list[int] = tokenizer.encode(text, add_special_tokens=False)
    before = len(token_ids) - len(plain)
    if before < 0 or list(token_ids[before:]) != plain:
        return list(token_ids)
    found, end = list(token_ids[:before]), 0
    for match in pattern.finditer(text):
        found += [*_encoded(text[end : match.start()], tokenizer), token_of(match[0])]
        end = match.end()
    return [*found, *_encoded(text[end:], tokenizer)]


def _encoded(text: str, tokenizer: Any) -> Sequence[int]:
    """Return the token ids of a text, without special tokens around it; none of an empty one."""
    return tokenizer.encode(text, add_special_tokens=False) if text else ()
