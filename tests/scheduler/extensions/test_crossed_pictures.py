"""Schedules of a model whose layers attend to images."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from jaxengine.scheduler.base.media import Media, MediaItem
from jaxengine.scheduler.extensions.crossed_pictures import CrossedPictureOptions, RankCrossedPictures


def request(slot: int, *names: str) -> Any:
    """A request whose prompt has an image at every third token, from the second on."""
    none = np.zeros((0, 2), np.int32)
    items = [
        MediaItem("image", name.encode(), np.asarray([1 + 3 * index], np.int32), np.zeros((2, 1)), none, none)
        for index, name in enumerate(names)
    ]
    media = Media(tuple(items), joint=np.arange(1), joint_digest="".join(names).encode()) if items else None
    return SimpleNamespace(slot=slot, media=media)


def test_all_images_of_a_prompt_are_encoded_with_its_first_tokens_and_kept_to_its_end():
    rank, hits = RankCrossedPictures(CrossedPictureOptions(num_rows=3, max_patches=4)), object()
    first, second, third, text = request(0, "a", "b", "a"), request(1, "b", "c"), request(2, "d"), request(3)
    rank.begin()
    assert rank.chunk(first, 0, 2, hits) == 2  # both images, though the chunk reaches the first alone
    rank.reserve(first, 0, 2)
    assert [each.item.digest for each in rank.rows.encodes] == [b"a", b"b"]
    assert (rank.chunk(second, 0, 9, hits), rank.chunk(text, 0, 9, hits)) == (0, 9)  # four patches are the step's
    rank.reserve(text, 0, 9)
    rows = rank.rows_of(first)
    assert rows[0] == rows[2] != rows[1] and rank.rows_of(text) == []
    rank.begin()
    assert rank.chunk(first, 2, 5) == 5
    rank.reserve(first, 2, 5)
    assert rank.chunk(second, 4, 3, hits) == 3  # whatever prefix is cached
    rank.reserve(second, 4, 3)
    assert [each.item.digest for each in rank.rows.encodes] == [b"c"] and rank.rows_of(second)[0] == rows[1]
    rank.begin()
    assert rank.chunk(third, 0, 9, hits) == 0  # no row is free
    rank.release(0)
    assert rank.chunk(third, 0, 9, hits) == 9 and rank.rows.num_used == 2
    rank.reserve(third, 0, 9)
    assert rank.rows_of(third) == [rows[0]]
