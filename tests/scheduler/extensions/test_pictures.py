"""Embeddings of pictures: encoded before the step that needs them, there as long as one does, never anybody else's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jaxengine.models.config.tower import BOTH_WAYS
from jaxengine.scheduler.base.media import Media, MediaItem
from jaxengine.scheduler.base.request import FinishReason
from jaxengine.scheduler.extensions.pictures import EncoderRows, PictureOptions
from tests.scheduler.fake_device import VOCAB_SIZE
from tests.scheduler.loop import Loop, check_output, make

PLACEHOLDER = 7
NUM_ROWS, MAX_PATCHES = 20, 32


def item(name: str, positions, patches_per_row: int = 2) -> MediaItem:
    """A picture whose patches say whose they are."""
    positions = np.asarray(positions, np.int32)
    patches = np.zeros((len(positions) * patches_per_row, 1), np.float32)
    return MediaItem("image", name.encode(), positions, patches, np.zeros((1, len(patches)), np.int32), positions * 0)


def random_media(rng: np.random.Generator, length: int) -> Media | None:
    """Pictures of few kinds at random places, some with tokens between their embeddings."""
    items, end = [], 0
    while len(items) < 4:
        first = end + int(rng.integers(0, 6))
        # A name says how many embeddings there are, as a digest does.
        count = int(rng.integers(1, 9))
        step = 1 + count % 2
        positions = first + step * np.arange(count)
        if positions[-1] >= length - 1:
            break
        end = positions[-1] + 1
        items.append(item(f"{count} of {rng.integers(3)}", positions))
    if not items:
        return None
    places = rng.integers(0, 50, (3, length)).astype(np.int32)
    return Media(tuple(items), places, int(rng.integers(-5, 5)))


class SeeingLoop(Loop):
    """Writes what is encoded, and looks whether each token of each step finds its own picture there."""

    def __init__(self, *, whole: bool = False, **changes):
        super().__init__(pictures=PictureOptions(NUM_ROWS, MAX_PATCHES, whole=whole, mrope=True), **changes)
        self.whole, self.pools = whole, self.scheduler.extension("pictures").rows
        self.embeddings = [np.full(NUM_ROWS, None, object) for _ in self.scheduler.ranks]
        self.num_encoded = 0

    def check(self, step):
        super().check(step)
        for rank, batch, held in zip(self.scheduler.ranks, step.batches, self.embeddings, strict=True):
            encodes = batch.sections.get("pictures", [])
            assert sum(each.item.num_patches for each in encodes) <= MAX_PATCHES
            written = np.concatenate([each.rows for each in encodes]) if encodes else np.empty(0)
            assert len(np.unique(written)) == len(written), "two pictures in one row"
            for each in encodes:
                self.num_encoded += 1
                held[each.rows] = [(each.item.digest, row) for row in range(each.item.num_rows)]
            rows = self.pools[rank.index]
            assert 0 <= rows.num_used <= rows.num_kept <= NUM_ROWS
            self.check_tokens(rank, batch, held)

    def check_tokens(self, rank, batch, held):
        end, sees = batch.num_decode, False
        section = batch.message.get("pictures")
        for row in range(batch.num_decode, batch.num_rows):
            slot, count = int(batch.slots[row]), int(batch.num_scheduled[row])
            first, end = end, end + count
            request = rank.slots.requests[slot]
            media, start = request.media, int(rank.slots.num_computed[slot]) - count
            wanted = (
                {}
                if media is None
                else {
                    int(position): (each.digest, number)
                    for each in media.items
                    for number, position in enumerate(each.positions)
                }
            )
            places_of = [] if media is None else [set(each.positions.tolist()) for each in media.items]
            if self.whole:
                assert not any({start + count - 1, start + count} <= each for each in places_of), "half a picture"
            behind = media is None or start >= media.end
            sees |= not behind
            if section is None:
                assert behind, "a step without what a token needs"
                continue
            for token in range(count):
                embed, position = int(section[0, first + token]), start + token
                assert (held[embed] if embed >= 0 else None) == wanted.get(position)
                known = not behind and media.rope_positions is not None and position < request.num_prompt_tokens
                places = media.rope_positions[:, position].tolist() if known else [-1] * 3
                assert section[1:, first + token].tolist() == places
        assert sees == (section is not None)
        if section is not None:
            assert (section[:, : batch.num_decode] == -1).all()


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("num_pages", [64, 20])
def test_every_token_finds_its_picture(num_ranks, num_pages):
    rng = np.random.default_rng(num_ranks + num_pages)
    loop, requests = SeeingLoop(num_ranks=num_ranks, num_pages=num_pages), []
    for index in range(160):
        length = int(rng.integers(2, 56))
        media = random_media(rng, length) if rng.random() < 0.7 else None
        prompt = rng.integers(0, VOCAB_SIZE, length)
        for each in media.items if media else ():
            prompt[each.positions] = PLACEHOLDER
        requests.append(make(index, prompt, int(rng.integers(1, min(9, 64 - length) + 1)), media=media))
        loop.scheduler.add_request(requests[-1])
        for _ in range(int(rng.integers(0, 4))):
            loop.step()
        if rng.random() < 0.1:
            loop.scheduler.finish(requests[int(rng.integers(len(requests)))], FinishReason.ABORT)
    loop.run()
    for request in requests:
        if request.finish_reason != "abort" and request.media is None:
            check_output(request)
        assert request.finish_reason in ("abort", "length", "stop")
    ranks = loop.pools
    assert loop.num_encoded and sum(each.num_hits for each in ranks) > 20
    assert [each.num_used for each in ranks] == [0] * num_ranks, "somebody who has gone still needs a picture"
    assert num_pages == 64 or loop.scheduler.num_preemptions > 3
    for each in ranks:
        each.clear()
        assert each.num_kept == 0


def test_a_picture_that_came_before_is_not_encoded_again():
    loop = SeeingLoop(enable_prefix_caching=False)
    for index in range(3):
        loop.scheduler.add_request(make(index, [1, *[PLACEHOLDER] * 8, 2], 2, media=Media((item("a", range(1, 9)),))))
        loop.run()
    assert loop.num_encoded == 1
    (rows,) = loop.pools
    assert (rows.num_queries, rows.num_hits) == (3, 2)


def test_a_known_prefix_needs_no_picture():
    """Another picture in its place is another prefix."""
    loop, cached = SeeingLoop(), []
    for name in "aab":
        media = Media((item(name, range(1, 8)),))
        request = make(f"{len(cached)}", [1, *[PLACEHOLDER] * 7, 2, 3, 4], 2, media=media)
        loop.scheduler.add_request(request)
        loop.run()
        cached.append((request.num_cached_tokens, loop.num_encoded))
        loop.scheduler.extension("pictures").reset_cache()
    assert cached == [(0, 1), (8, 1), (0, 2)]


def test_pages_are_told_apart_by_what_is_seen():
    def hashes(*items: MediaItem) -> list[bytes]:
        request = make("x", [PLACEHOLDER] * 16, media=Media(items) if items else None)
        return request.extend_page_hashes(request.prompt_token_ids, 4)

    plain, seen = hashes(), hashes(item("a", range(5, 11)))
    assert plain[0] == seen[0] and len({*plain[1:], *seen[1:]}) == 6
    assert hashes(item("a", range(5, 11))) == seen
    assert hashes(item("b", range(5, 11)))[1:] != seen[1:] and hashes(item("a", range(6, 12)))[1:] != seen[1:]
    # The same picture beginning in the page before shows other rows in this one.
    assert hashes(item("a", range(4, 10)))[1] != seen[1]


def test_a_chunk_ends_before_a_picture_that_has_no_room():
    rows = EncoderRows(10, 16)
    media = Media((item("a", range(2, 6)), item("b", range(8, 13)), item("c", range(14, 18))))
    assert rows.reach(media, 0, 20) == 8, "8 patches of 16, then 10 more"
    rows.take(0, media, 0, 8)
    assert [each.item.digest for each in rows.encodes] == [b"a"] and rows.index(0, media, 0, 8).tolist()[6:] == [-1, -1]
    assert rows.reach(media, 8, 4) == 0
    rows.begin_step()
    rows.passed(0, 8)
    assert rows.reach(media, 8, 12) == 6 and rows.reach(media, 18, 5) == 5
    rows.take(0, media, 8, 6)
    # Another slot may have the rows that nobody needs, and those of the first one are not given away.
    rows.begin_step()
    other = Media((replace_name(media.items[2], "d"),))
    assert rows.reach(other, 14, 4) == 4
    rows.take(1, other, 14, 4)
    assert rows.reach(media, 14, 4) == 0 and rows.num_used == 9
    rows.release(1)
    assert rows.encodes[0].item.digest == b"d" and rows.reach(media, 14, 4) == 4
    rows.take(0, media, 14, 4)
    assert [each.item.digest for each in rows.encodes] == [b"c"], "what nobody needs any more is not encoded over c"


def test_new_weights_encode_a_picture_that_a_running_request_has():
    """With kv="keep" the running request goes on with what it has; the next one gets what the new weights make."""
    loop = SeeingLoop(enable_prefix_caching=False, max_num_batched_tokens=8)
    for index in range(2):
        loop.scheduler.add_request(make(index, [1, *[PLACEHOLDER] * 8, 2], 2, media=Media((item("a", range(1, 9)),))))
        loop.step()
        for extension in loop.scheduler.extensions:
            extension.reset_cache()
    loop.run()
    assert loop.num_encoded == 2 and loop.pools[0].num_kept == 0


def test_embeddings_from_before_a_clear_are_those_of_their_slots_alone():
    """New weights come while slot 0 has half of its image to compute, and keeps what it has: slot 1 gets its own."""
    rows, media = EncoderRows(8, 32), Media((item("a", range(1, 5)),))
    rows.take(0, media, 0, 3)
    rows.begin_step()
    rows.clear()
    assert rows.reach(media, 3, 2, 0) == 2 and rows.reach(media, 0, 6) == 6
    rows.take(0, media, 3, 2)
    assert not rows.encodes and rows.num_used == 4
    rows.take(1, media, 0, 6)
    own = [rows.index(slot, media, 1, 4).tolist() for slot in (0, 1)]
    assert [each.rows.tolist() for each in rows.encodes] == own[1:] and not set(own[0]) & set(own[1])
    rows.passed(0, 5)
    assert rows.num_kept == 4, "nobody can find the older ones any more"
    rows.release(1)
    rows.begin_step()
    rows.take(0, media, 0, 6)
    assert not rows.encodes and rows.index(0, media, 1, 4).tolist() == own[1]


def test_a_prefix_is_computed_at_once():
    """Also where its images have no room, and its pages are those of no other prompt."""
    rows, items = EncoderRows(20, 16, whole=True), (item("a", range(1, 5)), item("b", range(8, 12)))
    media = Media(items, joint=np.arange(16), joint_digest=b"one")
    assert [rows.reach(media, *span) for span in ((0, 15), (0, 16), (8, 8), (0, 20), (16, 4))] == [0, 16, 8, 20, 4]
    rows.take(0, media, 0, 16)
    found = rows.index(0, media, 0, 20)
    assert (found >= 0).nonzero()[0].tolist() == [*range(1, 5), *range(8, 12)]
    assert set(found[[0, 5, 6, 7, *range(12, 16)]]) == {BOTH_WAYS} and set(found[16:]) == {-1}
    assert EncoderRows(20, 8, whole=True).reach(media, 0, 16) == 0, "8 patches of 16"
    each = [make("x", [PLACEHOLDER] * 16, media=replace(media, joint_digest=digest)) for digest in (b"one", b"two")]
    pages = [request.extend_page_hashes(request.prompt_token_ids, 4) for request in each]
    assert len({*pages[0], *pages[1]}) == 8


def test_images_with_text_between_them_are_computed_at_once():
    """Tokens before and after them may be in other steps, and those of a known prefix are not computed again."""
    rows, items = EncoderRows(20, 16, whole=True), (item("a", range(5, 9)), item("b", range(12, 16)))
    joint = np.asarray([*range(4, 9), *range(11, 17)])
    media = Media(items, joint=joint, joint_digest=b"one")
    spans = ((0, 3), (0, 4), (0, 9), (0, 12), (4, 12), (4, 13), (0, 30), (8, 8), (8, 9), (16, 1), (17, 5))
    assert [rows.reach(media, *span) for span in spans] == [3, 4, 4, 4, 0, 13, 30, 0, 9, 1, 5]
    assert EncoderRows(20, 8, whole=True).reach(media, 0, 20) == 4, "8 patches of 16"
    rows.take(0, media, 0, 20)
    found = rows.index(0, media, 2, 18)
    assert (found >= 0).nonzero()[0].tolist() == [*range(3, 7), *range(10, 14)]
    assert (found == BOTH_WAYS).nonzero()[0].tolist() == [2, 9, 14] and found[[0, 1, 7, 8, 15]].tolist() == [-1] * 5
    marks = [media.marks(size) for size in (3, 4, 64)]
    assert [b"one" in own.get(page, b"") for own, page in zip(marks, (1, 1, 0), strict=True)] == [True] * 3
    assert 0 not in marks[0] and b"one" not in marks[0][2]


def test_a_second_tower_has_a_limit_of_its_own():
    rows = EncoderRows(30, 8, max_sound_patches=12)
    sounds = [replace(item(name, range(first, first + 4)), modality="audio") for name, first in (("b", 6), ("d", 18))]
    media = Media((item("a", range(1, 5)), sounds[0], item("c", range(12, 16)), sounds[1]))
    assert rows.reach(media, 0, 30) == 12, "8 patches of images are a step's; those of the sound are others"
    rows.take(0, media, 0, 12)
    assert [each.item.digest for each in rows.encodes] == [b"a", b"b"]
    rows.begin_step()
    assert rows.reach(media, 12, 18) == 18
    together = Media(tuple(sounds))
    assert EncoderRows(30, 8, max_sound_patches=12).reach(together, 0, 30) == 18, "16 patches of sounds are too many"
    assert EncoderRows(30, 16).reach(together, 0, 30) == 30, "one tower's limit is that of all items"


@pytest.mark.parametrize("num_snapshots", [0, 4])
def test_whole_pictures_in_a_crowd(num_snapshots):
    """Nor is one split where a state is to be saved."""
    rng, loop = np.random.default_rng(0), SeeingLoop(whole=True, num_pages=20, num_snapshots=num_snapshots)
    requests = []
    for index in range(60):
        length = int(rng.integers(2, 50))
        media = random_media(rng, length)
        prompt = rng.integers(0, VOCAB_SIZE, length)
        for each in media.items if media else ():
            prompt[each.positions] = PLACEHOLDER
        requests.append(make(index, prompt, 4, media=media))
        loop.scheduler.add_request(requests[-1])
        loop.step()
    loop.run()
    assert all(request.finish_reason in ("length", "stop") for request in requests) and loop.num_encoded


def replace_name(each: MediaItem, name: str) -> MediaItem:
    return replace(each, digest=name.encode())


def test_a_sound_has_no_part_without_an_embedding():
    """The second window of Qwen2.5-Omni's sounds of 2.005 to 2.02 seconds makes none."""
    rows = np.array([0, 1, -1, 2, -1, -1], np.int32)
    patches = np.arange(12, dtype=np.float32)[:, None]
    whole = MediaItem("audio", b"s", np.array([5, 6, 7], np.int32), patches, np.zeros((0, 12), np.int32), rows)
    parts = Media((whole,)).in_windows(4, 2).items
    assert [part.positions.tolist() for part in parts] == [[5, 6], [7]]
    assert [part.rows.tolist() for part in parts] == [[0, 1], [-1, 0]]
    assert [part.patches.ravel().tolist() for part in parts] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len({part.digest for part in parts} | {b"s"}) == 3


def test_marks_around_a_picture_may_be_elsewhere_than_text():
    """What comes after its last embedding counts with it, and a page with a mark alone is not one of text."""
    places = np.asarray([[0, 1, 2, 3, 3, 3, 3, 3, 3, 6, 7, 8], [0, 1, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8]], np.int32)[
        [0, 1, 1]
    ]
    media = Media((item("a", range(4, 8)),), places, -3)
    assert media.end == 9 and Media(media.items, None, 0).end == 8
    assert media.marks(4).keys() == {0, 1, 2} and media.marks(8).keys() == {0, 1}
    straight = np.where(np.arange(12) < 4, np.arange(12), places)
    straight[:, 8:] = np.arange(5, 9)
    text = Media(media.items, straight.astype(np.int32), -3)
    assert text.end == 8 and text.marks(4).keys() == {1}
    # In a page with embeddings too: a mark before the next image, or the same token as text.
    elsewhere = places.copy()
    elsewhere[1:, 11] -= 1
    assert Media(media.items, places, -3).marks(16) != Media(media.items, elsewhere, -3).marks(16)
