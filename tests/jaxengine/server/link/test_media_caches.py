"""Pictures between an API process and the engine: what is sent, what both keep, and what happens when they part."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from jaxengine.config.base.errors import ConfigError
from jaxengine.config.inputs.encoder import KEY_REPLICATED, OFF, PROCESSOR, SHARED_MEMORY, EncoderOptions, check_encoder
from jaxengine.engine.extensions.pictures import MediaStats
from jaxengine.media.base.processor import Expanded, Processed
from jaxengine.media.embeds import Embeds
from jaxengine.requests.media.inputs import MediaInputs
from jaxengine.scheduler.base.media import EMBEDS, Media, MediaItem
from jaxengine.scheduler.base.token_params import TokenParams
from jaxengine.server.link import messages, submit_messages
from jaxengine.server.link.media_messages import MediaMessage, MissingMediaError, media_message, read_media
from jaxengine.server.link.media_receiver import MediaReceiver
from jaxengine.server.link.media_senders import KeySender, MediaSender
from jaxengine.server.link.shared_media import Arena, SharedSender

# Of pictures of 8 x 8 pixels, as their processor makes them: 16 patches of 12 numbers, no columns, 16 rows.
SIZE = 16 * 12 * 4 + 16 * 4


class Squares:
    """A processor: each square of 2 x 2 pixels is a patch, and a prompt is its placeholders."""

    modalities = ("image",)
    settings = "squares"
    num_processed = 0

    def placeholder(self, modality):
        return "<image>"

    def process(self, modality, value, options, most=None):
        self.num_processed += 1
        height, width = value.shape[0] // 2, value.shape[1] // 2
        patches = value.reshape(height, 2, width, 2, 3).swapaxes(1, 2).reshape(height * width, 12)
        rows = np.arange(height * width, dtype=np.int32)
        columns = np.zeros((0, height * width), np.int32)
        return Processed(patches.astype(np.float32), columns, rows, len(rows), (1, height, width))

    def grid_of(self, num_rows, grid):
        return 1, 1, num_rows

    def expand(self, token_ids, items):
        ends = np.cumsum([item.grid[1] * item.grid[2] for item in items["image"]])
        positions = [
            np.arange(end - item.num_rows, end, dtype=np.int32)
            for end, item in zip(ends.tolist(), items["image"], strict=True)
        ]
        return Expanded([0] * int(ends[-1]), positions, [("image", index) for index in range(len(ends))])


class Pair:
    """An API process and the engine, with the wire between them as it is."""

    def __init__(self, sender, kept=0):
        options = {
            "mm_processor_kwargs": None,
            "max_model_len": 1 << 12,
            "max_encoder_patches": 1 << 12,
            "num_encoder_rows": 1 << 12,
        }
        config = SimpleNamespace(mm_processor_cache_bytes=10 * SIZE, **options)
        tower = SimpleNamespace(unit=4, merge=1, hears=False, num_parts=1, whole_prompt=0, by_place=False)
        self.processor = Squares()
        self.inputs = MediaInputs(self.processor, [tower], config)  # pyright: ignore[reportArgumentType]
        self.inputs.cache = sender.cache or self.inputs.cache
        self.sender, self.stats, self.kept, self.number = sender, MediaStats(), kept, 0
        self.receiver = MediaReceiver(kept, self.stats)
        self.runner = asyncio.Runner()

    def close(self):
        self.sender.close()
        self.receiver.clear()
        self.runner.close()

    def prepare(self, *pictures):
        """What becomes of a prompt with these pictures."""
        _, media = self.inputs.read([0], {"image": list(pictures)}, None)
        request = SimpleNamespace(media=media)
        return SimpleNamespace(requests=[request])

    def message(self, prepared, whole=False):
        """(what came of the request's pictures over the wire, its bytes)."""
        self.runner.run(self.sender.complete(prepared, whole=whole))
        self.number += 1
        pictures = self.sender.message(self.number, prepared.requests[0].media, whole=whole)
        fields = {"params": TokenParams(), "max_tokens": 1, "eos_token_ids": (), "stop_token_ids": (), "priority": 0}
        fields |= {"arrival_time": 0.0, "deadline": 0.0, "cache_salt": None, "lora": None, "client": ""}
        wire = messages.encode(
            submit_messages.Submit(
                number=self.number,
                members=[],
                prompt_token_ids=b"",
                per_step=False,
                text_ends=False,
                media=pictures,
                **fields,
            )
        )
        read = messages.decode_to_engine(wire)
        assert isinstance(read, submit_messages.Submit) and read.media is not None
        return read.media, len(wire)

    def send(self, *pictures, whole=False):
        """A request that the engine reads; the bytes of its message."""
        return self.read(pictures, *self.message(self.prepare(*pictures), whole))

    def read(self, pictures, message, size):
        media = self.receiver.read(message)
        self.sender.has_read(self.number)
        for item, picture in zip(media.items, pictures, strict=True):
            expected = Squares().process("image", picture, {})
            np.testing.assert_array_equal(item.patches, expected.patches)
            np.testing.assert_array_equal(item.rows, expected.rows)
            assert item.columns.shape == expected.columns.shape and len(item.positions) == expected.num_rows
        return size


def picture(number, side=8):
    return np.random.RandomState(number).randint(0, 256, (side, side, 3)).astype(np.uint8)


@pytest.fixture
def make():
    """make(kind, pictures): a Pair with room for so many pictures, or any of a MediaSender."""
    made = []

    def make_pair(kind, pictures=4):
        size = pictures * SIZE
        senders = {KEY_REPLICATED: lambda: KeySender(size), SHARED_MEMORY: lambda: SharedSender(size, size)}
        sender = kind if isinstance(kind, MediaSender) else senders.get(kind, MediaSender)()
        made.append(Pair(sender, size if kind == KEY_REPLICATED else 0))
        return made[-1]

    yield make_pair
    for pair in made:
        pair.close()


@pytest.fixture(params=[KEY_REPLICATED, SHARED_MEMORY])
def pair(request, make):
    return make(request.param)


def test_the_second_use_sends_no_pixels(pair):
    large = picture(1, 16)
    first = pair.send(large)
    again = pair.send(large)
    pixels = 64 * 12 * 4
    assert again < pixels / 3 and pair.processor.num_processed == 1
    shared = isinstance(pair.sender, SharedSender)
    assert (first < pixels / 3) == shared
    assert pair.stats.socket_bytes == (0 if shared else pixels + 64 * 4)
    assert pair.stats.shared_bytes == (2 * (pixels + 64 * 4) if shared else 0)


def test_without_a_cache_between_them_all_pixels_are_sent(make):
    pair = make(PROCESSOR)
    assert pair.send(picture(1)) == pair.send(picture(1)) > SIZE
    assert pair.processor.num_processed == 1 and pair.inputs.cache.num_bytes == SIZE
    pair.inputs.cache = None  # mm_processor_cache_gb 0
    pair.send(picture(1))
    assert pair.processor.num_processed == 2 and pair.receiver.num_bytes == 0


def test_a_thousand_pictures_stay_within_the_bound(pair):
    """Both sides keep the same all the while, in whatever order pictures come again."""
    draws = np.random.RandomState(0)
    for number in range(1000):
        pair.send(picture(number))
        if number % 9 == 0:
            pair.send(*(picture(old) for old in {max(0, number - int(draws.randint(8))), number}))
        assert pair.sender.num_bytes <= 4 * SIZE and pair.receiver.num_bytes in (0, pair.sender.num_bytes)
    if isinstance(pair.sender, KeySender):
        assert pair.receiver._kept._values.keys() == pair.sender._keys._values.keys()
        # Of values the API process has none.
        assert all(made.patches.nbytes == made.columns.nbytes == 0 for made, _ in pair.sender._keys._values.values())


def test_a_picture_that_goes_while_its_request_is_prepared_is_made_again(pair):
    pair.send(picture(0))
    prepared = pair.prepare(picture(0))
    assert pair.processor.num_processed == 1
    for number in range(1, 9):
        pair.send(picture(number))
    pair.read([picture(0)], *pair.message(prepared))
    assert pair.processor.num_processed == 10


def test_a_new_picture_takes_no_place_of_one_of_the_same_request(pair):
    for number in range(4):
        pair.send(picture(number))
    size = pair.send(picture(8), picture(9), picture(0), picture(1), picture(9))
    assert size < 4 * SIZE and pair.processor.num_processed == 6


def test_a_new_connection_begins_with_nothing(pair):
    pair.send(picture(0))
    prepared, late = pair.prepare(picture(0)), pair.message(pair.prepare(picture(0)))
    pair.sender.lost()
    old, pair.receiver = pair.receiver, MediaReceiver(pair.kept, pair.stats)
    assert pair.sender.num_bytes == 0
    pair.read([picture(0)], *pair.message(prepared))
    assert pair.processor.num_processed == 2
    # What the old connection still brings is read of what it kept, and not of the new one's.
    pair.receiver = old
    pair.read([picture(0)], *late)


def test_an_engine_that_has_forgotten_gets_the_pixels(pair):
    pair.send(picture(0))
    message, _ = pair.message(pair.prepare(picture(0), picture(1)))
    pair.receiver.clear()
    if isinstance(pair.sender, SharedSender):
        pair.read([picture(0), picture(1)], message, 0)  # it has kept nothing anyway
        message.items[0].place.offset = 1 << 40
    with pytest.raises(MissingMediaError):
        pair.receiver.read(message)
    pair.sender.refused()
    assert pair.send(picture(0), picture(1), whole=True) > 2 * SIZE
    # What was sent again counts; memory that cannot be read is not tried again.
    assert (pair.send(picture(0)) > SIZE) == isinstance(pair.sender, SharedSender)


def test_values_in_shared_memory_wait_until_they_are_read(make):
    pair = make(SHARED_MEMORY, 2)
    unread = [(number, pair.message(pair.prepare(picture(number)))) for number in range(5)]
    # Two found a place, which nobody may have before they are read; the others were sent.
    assert [bool(message.memory) for _, (message, _) in unread] == [True, True, False, False, False]
    for number, (message, size) in unread:
        pair.read([picture(number)], message, size)
    assert pair.message(pair.prepare(picture(5)))[0].memory
    pair.sender.reset()
    assert pair.sender.num_bytes == 0 and len(pair.sender._old) == 1
    pair.sender.has_read(pair.number)
    assert not pair.sender._old


def test_large_items_are_not_shared(make):
    pair = make(SharedSender(16 * SIZE, SIZE))
    assert pair.send(picture(0)) < SIZE < 4 * SIZE < pair.send(picture(1, 16))
    assert pair.sender.num_bytes == SIZE


def test_joint_tokens_cross():
    empty = np.zeros((0, 1), np.int32)
    item = MediaItem("image", b"a", np.arange(2, dtype=np.int32), np.zeros((2, 3), np.float32), empty, empty[:, 0])
    sent = Media((item,), rope_delta=3, joint=np.asarray([0, 1, 6], np.int32), joint_digest=b"all")
    wire = msgspec.msgpack.encode(media_message(sent, []))
    found = read_media(msgspec.msgpack.decode(wire, type=MediaMessage), [item])
    assert (found.rope_delta, found.joint_digest, found.end) == (3, b"all", 7) and found.joint is not None
    assert found.joint.tolist() == [0, 1, 6]


def test_parts_of_memory_are_joined_again():
    arena, draws, taken = Arena(1 << 14), np.random.RandomState(1), {}
    for number in range(2000):
        if taken and draws.randint(2):
            offset = list(taken)[draws.randint(len(taken))]
            arena.give(offset, taken.pop(offset))
        elif (offset := arena.take(size := int(draws.randint(1, 2000)))) is not None:
            taken[offset] = size
            arena.write(offset, (bytes([number % 256]) * size,))
        spans = sorted((offset, offset + size) for offset, size in taken.items())
        assert all(end <= begin for (_, end), (begin, _) in zip(spans, spans[1:], strict=False))
        assert arena.num_bytes == sum(-(-size // 64) * 64 for size in taken.values()) <= 1 << 14
    for offset, size in taken.items():
        arena.give(offset, size)
    assert arena.take(1 << 14) == 0
    arena.close()


def test_nothing_of_the_memory_is_left(make):
    before, descriptors = sorted(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))
    pair = make(SHARED_MEMORY)
    for number in range(6):
        pair.send(picture(number))
        pair.sender.reset()
    assert sorted(os.listdir("/dev/shm")) == before
    pair.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert "jaxengine-pictures" not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("path", ["/etc/passwd", "/proc/1/fd/../../../etc/passwd", "/proc/self/fd/0", "relative"])
def test_the_engine_opens_nothing_else(path, make):
    pair = make(SHARED_MEMORY)
    message, _ = pair.message(pair.prepare(picture(0)))
    with pytest.raises(MissingMediaError):
        pair.receiver.read(MediaMessage(message.items, None, 0, message.epoch, path))


def test_other_pixels_have_another_digest(pair):
    """A client says nothing of digests: one bit of a picture, and it is another."""
    one = picture(0)
    other = one.copy()
    other[7, 7, 2] ^= 1
    pair.send(one)
    pair.send(other)
    assert pair.processor.num_processed == 2
    (digest,), (same,), (another,) = (
        [item.digest for item in pair.prepare(each).requests[0].media.items] for each in (one, one.copy(), other)
    )
    assert digest == same != another and len(digest) == 32
    assert pair.prepare(one.reshape(4, 16, 3)).requests[0].media.items[0].digest != digest


def test_what_cannot_be_sent_is_not_taken_for_sent(make):
    pair = make(KEY_REPLICATED)
    pair.send(picture(0))
    prepared = pair.prepare(picture(0))
    pair.sender.reset()
    with pytest.raises(RuntimeError, match="not recomputed"):
        pair.sender.message(1, prepared.requests[0].media)


@pytest.mark.parametrize(
    ("options", "count", "kind", "api", "engine", "size"),
    [
        ({}, 0, PROCESSOR, "keys and values", "nothing", 4),
        ({}, 1, KEY_REPLICATED, "keys", "keys and values", 4),
        ({}, 3, PROCESSOR, "keys and values", "nothing", 12),
        ({"mm_processor_cache_type": "shm"}, 0, PROCESSOR, "keys and values", "nothing", 4),
        ({"mm_processor_cache_type": "shm"}, 1, SHARED_MEMORY, "keys, and values in shared memory", "nothing", 4),
        ({"mm_processor_cache_type": "shm"}, 2, PROCESSOR, "keys and values", "nothing", 8),
        ({"mm_processor_cache_gb": 0}, 1, OFF, "nothing", "nothing", 0),
    ],
)
def test_what_lies_where(options, count, kind, api, engine, size):
    assert EncoderOptions(**options).mm_cache_placement(count) == {
        "kind": kind,
        "api_process": api,
        "engine": engine,
        "max_bytes": size << 30,
    }


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mm_processor_cache_type": "fifo"}, "mm_processor_cache_type is 'fifo'"),
        ({"mm_shm_cache_max_object_size_mb": 0}, "mm_shm_cache_max_object_size_mb is 0"),
        ({"mm_processor_cache_gb": -1}, "mm_processor_cache_gb is -1"),
    ],
)
def test_options_that_are_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        check_encoder(EncoderOptions(**options))


@pytest.mark.parametrize("kind", [PROCESSOR, KEY_REPLICATED, SHARED_MEMORY])
def test_embeddings_cross_as_they_are(make, kind):
    pair, rows = make(kind), np.arange(30, dtype=np.float32).reshape(5, 6)
    pair.inputs._row_size = 6
    for _ in range(2):
        message, _ = pair.message(pair.prepare(Embeds(rows, None)))
        (item,) = pair.receiver.read(message).items
        pair.sender.has_read(pair.number)
        assert item.modality == EMBEDS and item.num_patches == 0 and item.num_rows == 5
        np.testing.assert_array_equal(item.patches, rows)
