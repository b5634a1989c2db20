"""Regular expressions of configuration files for names of modules, matched in bounded time.

Python's `re` backtracks, so an expression in a file could take unbounded time ("(a+)+$"). Here each part of an
expression maps the set of positions at which a match may begin, an integer with a bit per position, to the set of those
at which it may end. Lookaheads are evaluated on the name's mirror image.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, field
from functools import cached_property

MAX_EXPRESSION, MAX_STEPS, _MAX_DEPTH = 4096, 20_000_000, 40
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\\\]])*+\]", re.DOTALL)
_ESCAPE = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|N\{[^}]*\}|0[0-7]{0,2}|[1-3][0-7]{2}|.)", re.DOTALL
)
_QUANTIFIER = re.compile(r"(?:([*+?])|\{(?:([0-9]+)|([0-9]*),([0-9]*))\})([?+]?)")
_GROUP = re.compile(r"\((?:\?(?:P<\w+>|([:=!>]|<[=!]|#[^)]*\)|P=|\(|([a-zA-Z]*)(-[a-zA-Z]+)?([:)]))))?")
_ANCHORS = ("^", "$", r"\A", r"\Z", r"\b", r"\B")
_UNSUPPORTED = "a regular expression without backreferences, conditions, atomic groups, possessive repeats and flag x"


class PatternError(ValueError):
    """Error of an expression that is refused. The text says what is allowed."""


class Effort:
    """Number of steps that matching the expressions of one file may still take."""

    def __init__(self, steps: int = MAX_STEPS):
        self._limit = self._left = steps

    def spend(self) -> None:
        """Count a step. Raises PatternError if no step was left."""
        self._left -= 1
        if self._left < 0:
            raise PatternError(f"regular expressions that match this model's names in {self._limit:,} steps")


class NamePattern:
    """Regular expression with the syntax and meaning of Python's `re`, without features that need backtracking. Raises
    PatternError for an invalid, unsupported or too long expression.
    """

    def __init__(self, source: str):
        """Parse the expression `source`. Raises PatternError if it is not a text, too long, invalid or unsupported."""
        if not isinstance(source, str) or len(source) > MAX_EXPRESSION:
            raise PatternError(f"a regular expression of at most {MAX_EXPRESSION} characters")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                re.compile(source)
        except (re.error, RecursionError, OverflowError) as error:
            raise PatternError(f"a regular expression: {error}") from None
        self._root = _Parser(source).parse()

    def fullmatch(self, name: str, effort: Effort) -> bool:
        """Return whether the expression matches the whole name. Spends steps of `effort`. Raises PatternError if they
        do not suffice.
        """
        return bool(self._root.ends(1, _Text(name, effort)) >> len(name))

    def match(self, name: str, effort: Effort) -> bool:
        """Return whether the expression matches a beginning of the name. Spends steps of `effort`. Raises PatternError
        if they do not suffice.
        """
        return self._root.ends(1, _Text(name, effort)) != 0


@dataclass(eq=False)
class _Text:
    """Name, or mirror image of a name, to be matched.

    Attributes:
      name: the text itself.
      effort: steps that matching may still take.
      origin: the name of which this is the mirror image; None for a name itself.
      where: cache of the sets of positions of a name at which zero-width parts of the expression hold.
    """

    name: str
    effort: Effort
    origin: _Text | None = None
    where: dict[_Zero, int] = field(default_factory=dict)

    @property
    def backward(self) -> bool:
        """Whether this is the mirror image of another text, `origin`."""
        return self.origin is not None

    @cached_property
    def mirror(self) -> _Text:
        """Mirror image of this text; for a mirror image, the original."""
        return self.origin or _Text(self.name[::-1], self.effort, self)

    @property
    def everywhere(self) -> int:
        """Set of all positions, including the one after the last character."""
        return (2 << len(self.name)) - 1

    @cached_property
    def positions(self) -> dict[str, int]:
        """Map from each character in the name to the set of positions before its occurrences, an integer with a bit for
        each.
        """
        found: dict[str, int] = {}
        for index, char in enumerate(self.name):
            found[char] = found.get(char, 0) | 1 << index
        return found

    def flip(self, positions: int) -> int:
        """Return the positions in the mirror image that correspond to a set of positions in this text."""
        return int(f"{positions:0{len(self.name) + 1}b}"[::-1], 2)


class _Node:
    """Part of an expression."""

    def ends(self, starts: int, text: _Text) -> int:
        """Return the set of positions at which this part may end if it begins at one of `starts`. Sets are integers
        with a bit for each position. Spends a step of text.effort for each part tried. Raises PatternError if no step
        is left.
        """
        raise NotImplementedError


class _One(_Node):
    """Part that matches one character: a literal, a class, an escape or a dot. Each character is tested by `re`, and
    the result cached.
    """

    def __init__(self, source: str, flags: int):
        self._pattern = re.compile(source, flags)
        self._known: dict[str, bool] = {}

    def _takes(self, char: str) -> bool:
        """Return whether the part matches this character."""
        if (known := self._known.get(char)) is None:
            known = self._known[char] = self._pattern.fullmatch(char) is not None
        return known

    def before(self, text: _Text) -> int:
        """Return the set of positions before each character of the text that this part matches."""
        return sum(where for char, where in text.positions.items() if self._takes(char))

    def ends(self, starts: int, text: _Text) -> int:
        text.effort.spend()
        return (starts & self.before(text)) << 1


class _Sequence(_Node):
    """Parts that match one after the other. In a mirror image they match in reverse order."""

    def __init__(self, parts: list[_Node]):
        self._parts = parts

    def ends(self, starts: int, text: _Text) -> int:
        text.effort.spend()
        for part in reversed(self._parts) if text.backward else self._parts:
            if not starts:
                break
            starts = part.ends(starts, text)
        return starts


class _Choice(_Node):
    """Alternatives, any of which may match."""

    def __init__(self, options: list[_Node]):
        self._options = options

    def ends(self, starts: int, text: _Text) -> int:
        text.effort.spend()
        found = 0
        for option in self._options:
            found |= option.ends(starts, text)
        return found


class _Repeat(_Node):
    """Part that matches from `least` to `most` times, both included; None for any number."""

    def __init__(self, body: _Node, least: int, most: int | None):
        self._body, self._least, self._more = body, least, None if most is None else most - least

    def ends(self, starts: int, text: _Text) -> int:
        """Return the set of positions at which `least` to `most` repetitions may end if they begin at one of `starts`.
        Spends a step, and those of each repetition tried. Raises PatternError if no step is left.
        """
        text.effort.spend()
        # A repetition longer than the name includes empty matches, which can be repeated without end.
        for _ in range(min(self._least, len(text.name) + 1)):
            if not starts:
                return 0
            starts = self._body.ends(starts, text)
        if self._more is None and isinstance(self._body, _One):
            # The carry of the addition propagates through each run of such characters.
            run = self._body.before(text)
            return (((starts & run) + run) ^ run) | starts
        found = new = starts
        rounds = 0
        while new and (self._more is None or rounds < self._more):
            new = self._body.ends(new, text) & ~found
            found |= new
            rounds += 1
        return found


class _Zero(_Node):
    """Zero-width part, such as an anchor, which holds at some positions of a name."""

    def ends(self, starts: int, text: _Text) -> int:
        """Return those of `starts` at which the part holds. The set of such positions is computed once for each name.
        Spends a step. Raises PatternError if no step is left.
        """
        text.effort.spend()
        forward = text.origin or text
        if (where := forward.where.get(self)) is None:
            where = forward.where[self] = self.holds(forward)
        return starts & (text.flip(where) if text.backward else where)

    def holds(self, text: _Text) -> int:
        """Return the set of positions of a name, not a mirror image, at which this part holds. Raises PatternError if
        effort runs out.
        """
        raise NotImplementedError


class _Anchor(_Zero):
    """Anchor or word boundary, tested by `re` at each position."""

    def __init__(self, source: str, flags: int):
        self._pattern = re.compile(source, flags)

    def holds(self, text: _Text) -> int:
        return sum(1 << at for at in range(len(text.name) + 1) if self._pattern.match(text.name, at))


class _Look(_Zero):
    """Lookahead, or lookbehind if `behind`, which holds where `body` matches or, if `negative`, does not match."""

    def __init__(self, body: _Node, *, behind: bool, negative: bool):
        self._body, self._behind, self._negative = body, behind, negative

    def holds(self, text: _Text) -> int:
        if self._behind:
            found = self._body.ends(text.everywhere, text)
        else:
            found = text.flip(self._body.ends(text.everywhere, text.mirror))
        return text.everywhere & ~found if self._negative else found


class _Parser:
    """Parser of an expression that `re` has accepted."""

    def __init__(self, source: str):
        self._source, self._at, self._depth = source, 0, 0

    def parse(self) -> _Node:
        """Return the syntax tree of the whole expression. Raises PatternError for unsupported syntax."""
        return self._choice(0)

    def _choice(self, flags: int) -> _Node:
        """Parse alternatives up to the end or an unmatched ")", which is not consumed, and return their tree. flags:
        flags of `re`. Raises PatternError for unsupported syntax, and for groups nested too deeply.
        """
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise PatternError(f"a regular expression of at most {_MAX_DEPTH} groups in each other")
        options: list[list[_Node]] = [[]]
        while self._at < len(self._source) and (char := self._source[self._at]) != ")":
            if char == "|":
                self._at += 1
                options.append([])
            elif char == "(":
                part, flags = self._group(flags)
                if part is not None:
                    options[-1].append(self._quantified(part))
            else:
                options[-1].append(self._quantified(self._single(flags)))
        self._depth -= 1
        return _Sequence(options[0]) if len(options) == 1 else _Choice([_Sequence(each) for each in options])

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Match a pattern at the parser's position, advance past the match and return it. If the pattern does not
        match, return None and stay.
        """
        if found := pattern.match(self._source, self._at):
            self._at = found.end()
        return found

    def _single(self, flags: int) -> _Node:
        """Parse a character, a class or an anchor, advance past it, and return its node. flags: flags of `re`. Raises
        PatternError for a backreference.
        """
        found = self._take(_ESCAPE) or self._take(_CLASS)
        source = found[0] if found else self._source[self._at]
        self._at += 0 if found else 1
        if source[0] == "\\" and source[1] in "123456789" and len(source) == 2:
            raise PatternError(_UNSUPPORTED)
        if source in _ANCHORS:
            return _Anchor(source, flags)
        return _One(source if found or source == "." else re.escape(source), flags)

    def _group(self, flags: int) -> tuple[_Node | None, int]:
        """Parse a group and advance past it. Returns its node (None for a comment or flags) and the flags that hold
        after it. flags: flags of `re` that hold before it. Raises PatternError for atomic and conditional groups,
        backreferences, and the flag x.
        """
        found = self._take(_GROUP)
        assert found is not None
        kind, end = found[1] or "", found[4]
        if kind.startswith("#"):
            return None, flags
        if kind in (">", "P=", "(") or "x" in (found[2] or "") + (found[3] or ""):
            raise PatternError(_UNSUPPORTED)
        inner = (flags | _flags(found[2])) & ~_flags(found[3])
        if end == ")":
            return None, inner
        body = self._choice(inner)
        self._at += 1
        if kind in ("=", "!", "<=", "<!"):
            body = _Look(body, behind=kind[0] == "<", negative=kind[-1] == "!")
        return body, flags

    def _quantified(self, part: _Node) -> _Node:
        """Parse a quantifier, if there is one at the parser's position, and return a node that repeats `part`
        accordingly; without one, `part`. Raises PatternError for a possessive quantifier.
        """
        if (found := self._take(_QUANTIFIER)) is None:
            return part
        if found[5] == "+":
            raise PatternError(_UNSUPPORTED)
        if found[1]:
            return _Repeat(part, 1 if found[1] == "+" else 0, 1 if found[1] == "?" else None)
        least = int(found[2] or found[3] or 0)
        most = int(found[2]) if found[2] else int(found[4]) if found[4] else None
        return _Repeat(part, least, most)


def _flags(letters: str | None) -> int:
    """Return the flags of `re` for these letters; 0 for None. Other letters are ignored: "u" is the default, and `re`
    has refused "L".
    """
    known = {"a": re.ASCII, "i": re.IGNORECASE, "m": re.MULTILINE, "s": re.DOTALL}
    return sum(known.get(letter, 0) for letter in {*(letters or "")})
