"""Words of a transcript with their times: tokens are aligned with the sound and grouped into words.

Words and times equal those of transformers for Whisper. Shape letters: N tokens, S positions of the sound.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

# Codes of languages that are written without spaces.
_UNSPACED = frozenset(("zh", "ja", "th", "lo", "my", "yue"))
# Text around a boundary of tokens that lies within a word (next to an apostrophe, or to a separator inside a number),
# and marks before a number that belong to it.
_INSIDE, _BEFORE_NUMBER = re.compile(r".?(\d[.,:]\d|\w['\u2019]\w).?"), "-.\u2212"
# Punctuation that belongs to the following word, and to the preceding word.
_BEFORE, _AFTER = "\"'“¡¿([{-", "\"'.。,，!！?？:：”)]}、"
_BROKEN = "\ufffd"
# What a step of an alignment path advances: token and position, only the token, only the position.
_BOTH, _TOKEN, _POSITION = range(3)


class Word(NamedTuple):
    """Word of a transcript, with its start and end in seconds of the sound."""

    text: str
    start: float
    end: float


def token_positions(alignment: np.ndarray) -> np.ndarray:
    """Return the position of the sound at which each token begins, i64[N], by dynamic time warping: on the path through
    `alignment` with the largest sum among those on which neither tokens nor positions decrease.

    alignment: f32[N, S], N and S >= 1. Sums are rounded to float32, and ties resolved, as in transformers.
    """
    num_tokens, num_positions = alignment.shape
    cost, enters = -alignment.astype(np.float64), np.zeros((num_tokens, num_positions), np.int8)
    # The last two diagonals of the sums. Element i + 1 of diagonal d is for token i at position d - i; element 0 is
    # padding.
    older, newer = (np.full(num_tokens + 1, np.inf, np.float32) for _ in range(2))
    older[0] = 0
    for number in range(num_tokens + num_positions - 1):
        tokens = np.arange(max(0, number - num_positions + 1), min(num_tokens, number + 1))
        both, token, position = older[tokens], newer[tokens], newer[tokens + 1]
        entered = np.where((token < both) & (token < position), _TOKEN, _POSITION)
        entered[(both < token) & (both < position)] = _BOTH
        enters[tokens, number - tokens] = entered
        best = np.choose(entered, (both, token, position))
        older, newer = newer, np.full(num_tokens + 1, np.inf, np.float32)
        newer[tokens + 1] = cost[tokens, number - tokens] + best
    found, token, position = np.zeros(num_tokens, np.int64), num_tokens - 1, num_positions - 1
    while token >= 0:
        found[token] = position
        entered = enters[token, position]
        token, position = token - (entered != _POSITION), position - (entered != _TOKEN)
    return found


def find_words(
    decode: Callable[[Sequence[int]], str], tokens: Sequence[int], times: np.ndarray, language: str
) -> Iterator[Word]:
    """Yield the words of a transcript with their times, without the punctuation around them. For example, 3.14 and
    l'eau are one word each, and real-time is two.

    decode: returns the text of tokens. tokens: tokens of the text, without timestamps. times: f64[N, 2], seconds at
    which each token begins and ends, which are rounded to 0.01. language: code of the language.
    """
    words: list[tuple[str, list[int]]] = []
    for text, members in group_words(decode, tokens, language):
        last = words[-1][0] if words else ""
        if _INSIDE.fullmatch(last[-2:] + text[:2]):
            words[-1] = last + text, words[-1][1] + members
        else:
            words.append((text, members))
    for text, members in words:
        if word := _bare(text):
            yield Word(word, round(float(times[members[0], 0]), 2), round(float(times[members[-1], 1]), 2))


def _bare(text: str) -> str:
    """Return a text without white space and punctuation (Unicode's categories P) at its ends, but with a sign or point
    directly before a leading number if the text begins with a space. "" if nothing remains.
    """
    whole = text.strip()
    kept = [i for i, each in enumerate(whole) if not (each.isspace() or unicodedata.category(each).startswith("P"))]
    if not kept:
        return ""
    first, last = kept[0], kept[-1] + 1
    is_signed = whole[first].isdecimal() and first == 1 and whole[0] in _BEFORE_NUMBER and text[:1] == " "
    return whole[first - is_signed : last]


def group_words(
    decode: Callable[[Sequence[int]], str], tokens: Sequence[int], language: str
) -> list[tuple[str, list[int]]]:
    """Return (word, indices of its tokens) for each word of a text, with spaces and punctuation.

    decode: returns the text of tokens. language: code of the language. A space or a punctuation character begins a
    word; then punctuation is joined to a neighbouring word. In languages without spaces (Chinese, Japanese, ...) every
    character is a word.
    """
    words: list[tuple[str, list[int]]] = []
    for text, members in _characters(decode, tokens):
        begins = language in _UNSPACED or text.startswith(" ") or text.strip() in string.punctuation
        if begins or not words:
            words.append((text, members))
        else:
            words[-1] = words[-1][0] + text, words[-1][1] + members
    return _with_next(words)


def _characters(decode: Callable[[Sequence[int]], str], tokens: Sequence[int]) -> Iterator[tuple[str, list[int]]]:
    """Yield (text, indices of its tokens) for the shortest runs of tokens that decode to complete characters, or to
    bytes that are also invalid in the whole text. decode: returns the text of tokens.
    """
    whole, done, members = decode(tokens), 0, []
    for number in range(len(tokens)):
        members.append(number)
        text = decode([tokens[each] for each in members])
        at = done + text.find(_BROKEN)
        if _BROKEN not in text or at >= len(whole) or whole[at] == _BROKEN:
            yield text, members
            done, members = done + len(text), []


def _with_next(words: list[tuple[str, list[int]]]) -> list[tuple[str, list[int]]]:
    """Return the words, (text, indices of its tokens), with punctuation joined to the word to which it belongs.

    Opening punctuation after a space is joined to the following word. Closing punctuation is joined to the preceding
    word, unless that ends with a space.
    """
    joined: list[tuple[str, list[int]]] = []
    for text, members in reversed(words):
        last = joined[-1] if joined else None
        if last is not None and text.startswith(" ") and text.strip() in _BEFORE:
            joined[-1] = text + last[0], members + last[1]
        else:
            joined.append((text, members))
    found: list[tuple[str, list[int]]] = []
    for text, members in reversed(joined):
        if found and not found[-1][0].endswith(" ") and text in _AFTER:
            found[-1] = found[-1][0] + text, found[-1][1] + members
        else:
            found.append((text, members))
    return found
