"""Finding fixed words in a text that comes in pieces, each character looked at once."""

from __future__ import annotations


class Marker:
    """Finds one word anywhere in a text. The word's first character stands nowhere else in it.

    So a match that fails holds no beginning of another one, and what it held is plain text.
    """

    def __init__(self, word: str):
        assert len(word) > 1 and word[0] not in word[1:], word
        self.word = word
        self._matched = 0

    def read(self, text: str, at: int) -> tuple[str, int, bool]:
        """Reads `text` from `at`: (what is certainly plain text, where to go on, whether the word is complete)."""
        plain = []
        while at < len(text):
            if not self._matched:
                start = text.find(self.word[0], at)
                if start < 0:
                    plain.append(text[at:])
                    return "".join(plain), len(text), False
                plain.append(text[at:start])
                self._matched, at = 1, start + 1
            elif text[at] == self.word[self._matched]:
                self._matched, at = self._matched + 1, at + 1
                if self._matched == len(self.word):
                    self._matched = 0
                    return "".join(plain), at, True
            else:
                plain.append(self.take())
        return "".join(plain), at, False

    def take(self) -> str:
        """What is held of a word that did not come to its end."""
        held, self._matched = self.word[: self._matched], 0
        return held


class Opening:
    """Whether a text begins with a word, white space before it aside."""

    def __init__(self, word: str):
        self._word = word
        self._space: list[str] = []
        self._matched = 0

    def read(self, text: str, at: int) -> tuple[int, bool | None]:
        """(where to go on, whether it does), None while that is open."""
        while at < len(text):
            char = text[at]
            if char == self._word[self._matched]:
                self._matched += 1
                if self._matched == len(self._word):
                    return at + 1, True
            elif not self._matched and char.isspace():
                self._space.append(char)
            else:
                return at, False
            at += 1
        return at, None

    @property
    def held(self) -> str:
        """All that was read."""
        return "".join(self._space) + self._word[: self._matched]
