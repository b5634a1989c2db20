"""Expressions of configuration files match as Python's do, and always end."""

from __future__ import annotations

import random
import re

import pytest

from jaxengine.models.config.readers.name_patterns import Effort, NamePattern, PatternError
from tests.tables import each_row

ATOMS = [
    "a",
    "b",
    ".",
    r"\.",
    "[ab]",
    "[^a]",
    "[]a]",
    r"\w",
    r"\d",
    r"[\d]",
    r"\b",
    "^",
    "$",
    r"\A",
    r"\Z",
    r"\B",
    "A",
    r"\x61",
]
OPENINGS = ["(", "(?:", "(?i:", "(?s:", "(?m:", "(?-i:"]
REPEATS = ["*", "+", "?", "*?", "+?", "??", "{2}", "{1,}", "{,2}", "{0,3}", "{2,3}?"]


def drawn(rng: random.Random, depth: int) -> str:
    kind = 0 if depth == 0 else rng.random()
    if kind < 0.35:
        return rng.choice(ATOMS)
    if kind < 0.55:
        return drawn(rng, depth - 1) + drawn(rng, depth - 1)
    if kind < 0.65:
        return f"(?:{drawn(rng, depth - 1)}|{drawn(rng, depth - 1)})"
    if kind < 0.75:
        return f"{rng.choice(OPENINGS)}{drawn(rng, depth - 1)})"
    if kind < 0.9:
        return f"(?:{drawn(rng, depth - 1)}){rng.choice(REPEATS)}"
    return f"{rng.choice(['(?=', '(?!', '(?<=', '(?<!'])}{drawn(rng, depth - 1)})"


def test_matches_are_those_of_python():
    rng, tried, found = random.Random(0), 0, 0
    while tried < 1500:
        source = drawn(rng, 4)
        try:
            expected = re.compile(source)
        except re.error:  # a lookbehind of several widths
            continue
        tried, pattern = tried + 1, NamePattern(source)
        for _ in range(4):
            name, effort = "".join(rng.choices("ab. 1A\n", k=rng.randrange(7))), Effort()
            whole, begun = expected.fullmatch(name) is not None, expected.match(name) is not None
            assert pattern.fullmatch(name, effort) == whole, (source, name)
            assert pattern.match(name, effort) == begun, (source, name)
            found += whole
    assert found > 400


@each_row(
    "source, name, matches",
    [
        (r"(?P<part>q|k)_proj", "q_proj", True),
        (r"(?#only these)q_proj", "q_proj", True),
        ("(?i)Q_PROJ", "q_proj", True),
        (r"(?i:Q)_PROJ", "q_proj", False),
        ("q{1}_{,}proj", "q__proj", True),
        ("a{x}", "a{x}", True),
        (r"(a+)+$", "a" * 3000 + "!", False),
        (r"(a|a)*$", "a" * 3000 + "!", False),
        (r"(.*)*(.*)*(.*)*!", "a" * 300, False),
        (r"((a?){9999}){9999}", "a" * 50, True),
        ("(?=" * 30 + "a" + ")" * 30 + "a", "a", True),
    ],
)
def test_expressions(source, name, matches):
    assert NamePattern(source).fullmatch(name, Effort()) is matches


@each_row(
    "source, says",
    [
        (r"(a)\1", "without backreferences"),
        (r"(?P<x>a)(?P=x)", "without backreferences"),
        (r"(a)(?(1)b|c)", "conditions"),
        ("(?>a+)", "atomic groups"),
        ("a++", "possessive repeats"),
        ("(?x)a", "flag x"),
        ("(", "missing"),
        ("a" * 4097, "at most 4096 characters"),
        ("(" * 50 + ")" * 50, "groups in each other"),
        ("(" * 2000 + ")" * 2000, "regular expression"),
        (7, "a regular expression of"),
    ],
)
def test_expressions_that_are_refused(source, says):
    with pytest.raises(PatternError, match=says):
        NamePattern(source)


def test_effort_is_shared_and_ends():
    pattern, effort = NamePattern("a.*b"), Effort(20)
    with pytest.raises(PatternError, match="in 20 steps"):
        for _ in range(20):
            pattern.match("ab", effort)
