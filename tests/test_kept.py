"""Engines and servers that tests share are ended when no file uses them."""

from __future__ import annotations

import pytest

from tests import kept
from tests.kept import MAX_IDLE_FILES, MAX_KEPT, Kept


@pytest.fixture
def ended(monkeypatch) -> list:
    monkeypatch.setattr(kept, "_all", [])
    return []


def test_a_value_is_made_once_until_few_files_have_asked_for_it(ended):
    values = Kept(ended.append)
    assert [values.get("a", lambda: 1), values.get("a", lambda: 2)] == [1, 1]
    for _ in range(MAX_IDLE_FILES):
        kept.file_ended()
        assert not ended
    kept.file_ended()
    assert ended == [1] and values.get("a", lambda: 3) == 3


def test_the_ones_used_least_recently_are_ended_at_the_end_of_a_file(ended):
    values = Kept(ended.append)
    for number in range(MAX_KEPT + 2):
        values.get(number, lambda number=number: number)
    values.get(0, lambda: "again")
    assert not ended, "a file may use all that it asks for"
    kept.file_ended()
    assert ended == [1, 2]
    values.end_all()
    assert sorted(ended) == list(range(MAX_KEPT + 2))


def test_what_has_died_is_made_again(ended):
    values = Kept(ended.append, lambda value: value != "dead")
    values.get("a", lambda: "dead")
    assert values.get("a", lambda: "alive") == "alive" and ended == ["dead"]
