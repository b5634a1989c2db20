"""Garbage is collected seldom while engines start, and as before once all of them have."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest

from jaxengine.runner.base.garbage import few_collections
from jaxengine.runner.start.open import load_runner


@pytest.fixture(autouse=True)
def usual():
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def test_the_last_start_to_end_brings_back_what_was_before():
    first, second = few_collections(), few_collections()
    with first:
        second.__enter__()
        assert gc.get_threshold() == (100_000, 10, 10)
    assert gc.get_threshold() == (100_000, 10, 10)
    second.__exit__(None, None, None)
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("chosen", [(0, 10, 10), (200_000, 5, 5)])
def test_who_collects_less_or_never_is_left_alone(chosen):
    gc.set_threshold(*chosen)
    with few_collections():
        assert gc.get_threshold() == chosen
    assert gc.get_threshold() == chosen


def test_an_engine_loads_in_it_also_one_that_fails():
    found: list[tuple[int, int, int]] = []

    class Source:
        def closing_on_error(self):
            found.append(gc.get_threshold())
            raise OSError("gone")

    source, config, nothing = (Source(), SimpleNamespace(disable_log_stats=True, kv_cache_dtype="fp8"), None)
    refused: Any = (source, config, nothing, (), nothing)
    with pytest.raises(OSError, match="gone"):
        load_runner(*refused)
    assert found == [(100_000, 10, 10)] and gc.get_threshold() == (700, 10, 10)
