"""Finds stop strings in text that arrives in pieces of any size. Knows nothing of tokens.

Every stop string is followed by its own Knuth-Morris-Pratt automaton, so that where the pieces are cut makes no
difference, and the automata also say how much of the text may still turn out to be the beginning of a stop string.
"""

from __future__ import annotations


class _Automaton:
    """How many characters of `pattern` the text read so far ends with."""

    def __init__(self, pattern: str):
        self.pattern = pattern
        self.matched = 0
        # _fallback[n]: the longest proper beginning of pattern[:n] that is also its end.
        self._fallback = [0, 0]
        for char in pattern[1:]:
            self._fallback.append(self._after(self._fallback[-1], char))

    def _after(self, matched: int, char: str) -> int:
        while matched and self.pattern[matched] != char:
            matched = self._fallback[matched]
        return matched + (self.pattern[matched] == char)

    def read(self, char: str) -> bool:
        """Whether the pattern ends with this character. Nothing but `go_on` may come after it has."""
        self.matched = self._after(self.matched, char)
        return self.matched == len(self.pattern)

    def go_on(self) -> None:
        """Looks for the next match: the end of this one may be its beginning."""
        self.matched = self._fallback[self.matched]


class StopStrings:
    """Lets text through up to the first stop string to be completed; of several completed at once, the longest.

    keep: let the stop string itself through as well; nothing needs to be held back then.
    met: the stop string that was found, None before.
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
        """Text that is settled now: it comes before any stop string, and is the beginning of none.

        counts=False: a stop string that ends in this text is text; one that begins here may end, and count, later.
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
        """The text held back: no more comes."""
        held, self._held = self._held, ""
        return held
