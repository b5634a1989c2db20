"""Schedules of a model that attends to sounds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from jaxengine.scheduler.extensions.sounds import MAX_ALIGNED, RankSounds, SoundOptions


def test_a_step_aligns_few_prompts_and_admits_others():
    """Alignments of so many texts are in the memory plan."""
    rank = RankSounds(SoundOptions(num_rows=1, max_frames=8))
    hits: Any = object()
    aligned: Any = SimpleNamespace(params=SimpleNamespace(alignment=(0, 1)), media=None)
    other: Any = SimpleNamespace(params=SimpleNamespace(alignment=None), media=None)
    for _ in range(2):
        rank.begin()
        for _ in range(MAX_ALIGNED):
            assert rank.chunk(aligned, 0, 7, hits) == 7
            rank.admit(aligned, 7, hits)
            rank.admit(other, 7, hits)
        assert (rank.chunk(aligned, 0, 7, hits), rank.chunk(other, 0, 7, hits), rank.chunk(aligned, 4, 3)) == (0, 7, 3)
