"""Search for stop strings in text that arrives in pieces of any size, and the rule of fields that hold strings.

Each stop string has a Knuth-Morris-Pratt automaton, so that results do not depend on where pieces are cut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxengine.scheduler.base.errors import refuse


class _Automaton:
    """Knuth-Morris-Pratt automaton of one pattern.

    Its state `matched` is the length of the longest prefix of the pattern that ends the text read so far.
    """

    def __init__(self, pattern: str):
        self.pattern = pattern
        self.matched = 0
        # _fallback[n]: length of the longest proper prefix of pattern[:n] that is also its suffix.
        self._fallback = [0, 0]
        for char in pattern[1:]:
            self._fallback.append(self._after(self._fallback[-1], char))

    def _after(self, matched: int, char: str) -> int:
        """Return the number of characters matched after reading `char`, if `matched` characters were matched before;
        the state does not change.
        """
        while matched and self.pattern[matched] != char:
            matched = self._fallback[matched]
        return matched + (self.pattern[matched] == char)

    def read(self, char: str) -> bool:
        """Read the next character of the text; return whether it completes the pattern. After a match only `go_on` may
        be called.
        """
        self.matched = self._after(self.matched, char)
        return self.matched == len(self.pattern)

    def go_on(self) -> None:
        """Continue the search after a complete match: its longest suffix that begins the pattern stays matched."""
        self.matched = self._fallback[self.matched]


class StopStrings:
    """Filter that passes text up to the first completed stop string; of several completed at once, the longest.

    keep: pass the stop string too; then no text is held back. met: the stop string that was found, else None. Raises
    ValueError for an empty stop string.
    """

    def __init__(self, stop: tuple[str, ...], *, keep: bool):
        if not all(stop):
            raise ValueError("a stop string must not be empty")
        self._automata = [_Automaton(pattern) for pattern in stop]
        self._first_chars = frozenset(pattern[0] for pattern in stop)
        self._keep = keep
        self._held = ""
        self.met: str | None = None

    def feed(self, text: str, *, counts: bool = True) -> str:
        """Read text. Return the text that is settled: what precedes any stop string and cannot be the beginning of one,
        or with `keep` everything up to the end of the first stop string. Sets `met` when one is completed; returns ""
        in later calls.

        counts=False: a stop string that ends within this text is ignored; one that begins in it may end, and count,
        later.
        """
        if self.met is not None:
            return ""
        if not any(automaton.matched for automaton in self._automata) and self._first_chars.isdisjoint(text):
            return text
        for length, char in enumerate(text, 1):
            completed = [automaton for automaton in self._automata if automaton.read(char)]
            if completed and counts:
                self.met = max((automaton.pattern for automaton in completed), key=len)
                passed = self._held + text[:length]
                self._held = ""
                return passed if self._keep else passed[: len(passed) - len(self.met)]
            for automaton in completed:
                automaton.go_on()
        passed = self._held + text
        held = 0 if self._keep else max(automaton.matched for automaton in self._automata)
        self._held = passed[len(passed) - held :]
        return passed[: len(passed) - held]

    def release(self) -> str:
        """Return and clear the held text, at the end of the input."""
        held, self._held = self._held, ""
        return held


def texts_rule(at_most: int, max_chars: int) -> Callable[[str, Any], tuple[str, ...]]:
    """Return a rule that accepts a string or a list of at most `at_most` non-empty strings with at most `max_chars`
    characters in total, and returns a tuple. The rule raises RequestError for other values.
    """

    def check(name: str, value: Any) -> tuple[str, ...]:
        texts = (value,) if isinstance(value, str) else value
        whole = isinstance(texts, (list, tuple)) and len(texts) <= at_most
        if not whole or not all(isinstance(text, str) and text for text in texts):
            raise refuse(name, value, f"a string or a list of at most {at_most} strings, none of them empty")
        if sum(map(len, texts)) > max_chars:
            raise refuse(name, value, f"at most {max_chars} characters altogether")
        return tuple(texts)

    return check
