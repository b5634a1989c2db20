"""Search for fixed words in a text that arrives in pieces, in linear time."""

from __future__ import annotations

import re
from itertools import pairwise


class Marker:
    """Search for the first of some words anywhere in a text. No word may be a prefix of another."""

    def __init__(self, *words: str):
        """Begin with nothing held. words: at least one, none a prefix of another (asserted)."""
        assert not any(later.startswith(word) for word, later in pairwise(sorted(words))), words
        self._words = words
        self._longest = max(map(len, words))
        self._pattern = re.compile("|".join(map(re.escape, words)))
        self._held = ""

    def read(self, text: str, at: int) -> tuple[str, int, str]:
        """Read `text` from the position `at`, up to and including the first of the words, or to its end.

        Returns (text before the word, new position, the word or ""). A tail of the text that may begin a word is held
        back. It comes with the next call's text or from `take`.
        """
        plain = ""
        if self._held:
            seen = len(self._held)
            # Long enough for a word that begins in the held text.
            probe = self._held + text[at : at + self._longest - 1]
            found = self._pattern.search(probe)
            start = self._open_end(probe) if found is None else found.start()
            if found is not None and start < seen:
                self._held = ""
                return probe[:start], at + found.end() - seen, found.group()
            if start < seen and len(probe) == seen + len(text) - at:
                self._held = probe[start:]
                return probe[:start], len(text), ""
            plain, self._held = self._held, ""
        found = self._pattern.search(text, at)
        if found is not None:
            return plain + text[at : found.start()], found.end(), found.group()
        start = max(at, len(text) - self._longest + 1)
        start += self._open_end(text[start:])
        self._held = text[start:]
        return plain + text[at:start], len(text), ""

    def take(self) -> str:
        """Return and clear the held text, which may be the beginning of a word."""
        held, self._held = self._held, ""
        return held

    def _open_end(self, text: str) -> int:
        """Return the start of the longest suffix of `text` that is a proper prefix of a word; len(text) if there is
        none.
        """
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(word.startswith(text[start:]) for word in self._words):
                return start
        return len(text)


class Opening:
    """Check whether a text begins with one of some words, or sequences of words. White space may precede any word.

    No word or sequence may be a prefix of another.
    """

    def __init__(self, *choices: str | tuple[str, ...]):
        # Each choice that still fits, with the index of its next word and the position in it.
        self._fitting = [((choice,) if isinstance(choice, str) else choice, 0, 0) for choice in choices]
        self._read: list[str] = []

    def read(self, text: str, at: int) -> tuple[int, bool | None]:
        """Read `text` from the position `at`; return (new position, whether all text read begins with a choice).

        None: `text` has ended and does not decide yet. False: the character at the position fits no choice; it is not
        read.
        """
        while at < len(text):
            stepped = [_step(words, index, offset, text[at]) for words, index, offset in self._fitting]
            if not any(stepped):
                return at, False
            self._fitting = [each for each in stepped if each is not None]
            self._read.append(text[at])
            at += 1
            if any(index == len(words) for words, index, _ in self._fitting):
                return at, True
        return at, None

    @property
    def held(self) -> str:
        """All text read so far."""
        return "".join(self._read)


def _step(words: tuple[str, ...], index: int, offset: int, char: str) -> tuple[tuple[str, ...], int, int] | None:
    """Return the state (words, index of the next word, position in it) of one choice after it reads `char`; None if
    `char` does not fit. Before: `offset` characters of word `index` are read; white space is skipped while `offset` is
    0.
    """
    word = words[index]
    if word[offset : offset + 1] == char:
        return (words, index, offset + 1) if offset + 1 < len(word) else (words, index + 1, 0)
    return (words, index, offset) if not offset and char.isspace() else None
