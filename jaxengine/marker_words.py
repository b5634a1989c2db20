"""Recognition of words in a model's markers that its vocabulary may have as tokens of their own."""

from __future__ import annotations

import re

# Words in angle brackets, Mistral's [TOOL_CALLS], DeepSeek's between bars. PLaMo 3's tokens are the beginnings and the
# end of its markers, and MiniMax M3's stands before each of its tags.
_WORDS = re.compile(r"(<\|plamo:(?:begin|end)_|:plamo\|>|\]<\]minimax\[>\[|<[^<>]*>|\[[A-Z_/]+\]|｜[^｜]*｜)")


def marker_parts(text: str) -> list[str]:
    """Return the non-empty parts of `text`, in order: the words that may be tokens of their own, and the text before,
    between and after them.
    """
    return [part for part in _WORDS.split(text) if part]
