"""Pool of image embeddings: which rows hold which image, which slots need it, and which images a step encodes.

An image is encoded in the step whose chunk first reaches it, before that step's forward pass. Its rows are kept as long
as a running request has tokens of it to compute; then until others need the room, least recently used first. Videos are
treated alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from jaxengine.models.config.tower import BOTH_WAYS
from jaxengine.scheduler.base.media import AUDIO, Media, MediaItem
from jaxengine.scheduler.base.request import Request
from jaxengine.scheduler.batches.batch import ScheduledBatch
from jaxengine.scheduler.batches.slots import Slots
from jaxengine.scheduler.extension import RankExtension
from jaxengine.scheduler.pages.snapshots import Hits
from jaxengine.scheduler.rank import Rank
from jaxengine.scheduler.scheduler_extension import SchedulerExtension

NAME = "pictures"


@dataclass(frozen=True)
class PictureOptions:
    """Options of a model with a vision tower.

    Attributes:
      num_rows: embeddings that a replica's pool holds.
      max_patches: most patches that a replica encodes in one step.
      whole: whether a step must compute all of an image's remaining tokens or none.
      mrope: whether messages carry M-RoPE positions.
      max_sound_patches: most patches of sounds that a replica encodes in one step, if a second tower encodes sounds; 0
        if one tower encodes all items.
    """

    num_rows: int
    max_patches: int
    whole: bool = False
    mrope: bool = False
    max_sound_patches: int = 0

    def extension(self) -> Pictures:
        """Return a new scheduler extension with these options."""
        return Pictures(self)


class Encode(NamedTuple):
    """Image to be encoded, and the rows of the pool, i32[num_rows], for its embeddings."""

    item: MediaItem
    rows: np.ndarray


# Embeddings of an image: when its slots began (see EncoderRows._generation), and its digest.
_Key = tuple[int, bytes]


class EncoderRows:
    """Pool rows 0 .. num_rows - 1 of one replica, with the slots that need them.

    Slots share the embeddings of an image unless `clear` was called between the times at which they began to need any.

    Attributes:
      num_rows: number of rows.
      whole: whether a step must compute all remaining tokens of an image, or none.
      encodes: images to be encoded in the step being scheduled.
      num_queries, num_hits: number of images that chunks have reached, and of those whose rows were in the pool
        already.
    """

    def __init__(self, num_rows: int, max_patches: int, *, whole: bool = False, max_sound_patches: int = 0):
        """Create an empty pool. num_rows: its size in embeddings. max_patches: most patches that one step encodes.
        whole: whether a step must compute all remaining tokens of an image, or none. max_sound_patches: see
        PictureOptions.
        """
        self.num_rows, self.whole = num_rows, whole
        self._most = {False: max_patches, True: max_sound_patches}  # by the result of `_tower`
        self.encodes: list[Encode] = []
        self.num_queries = self.num_hits = 0
        self._num_patches = dict.fromkeys(self._most, 0)
        self._free = np.arange(num_rows - 1, -1, -1, dtype=np.int32)
        self._num_free = num_rows
        self._generation = 0  # number of calls of `clear`
        self._rows: dict[_Key, np.ndarray] = {}
        self._users: dict[_Key, set[int]] = {}  # slots that need each image, if any do
        self._idle: dict[_Key, None] = {}  # images of this generation that no slot needs, least recently used first
        self._num_idle_rows = 0
        self._needed: dict[int, dict[_Key, int]] = {}  # slot -> image -> position after the item
        self._began: dict[int, int] = {}  # generation in which each slot of _needed began to need images

    @property
    def num_used(self) -> int:
        """Number of rows that some slot needs."""
        return self.num_rows - self._num_free - self._num_idle_rows

    @property
    def num_kept(self) -> int:
        """Number of rows that hold embeddings, needed by a slot or not."""
        return self.num_rows - self._num_free

    def begin_step(self) -> None:
        """Start a step: empty `encodes`, and reset the count of the step's patches."""
        self.encodes, self._num_patches = [], dict.fromkeys(self._most, 0)

    def reach(self, media: Media | None, start: int, count: int, slot: int = -1) -> int:
        """Return how many of a prompt's tokens [start, start + count) this step can compute as far as images are
        concerned: those before Media.joint if it would be cut, and `count` without images (media None). Reserves
        nothing. slot: the prompt's, -1 if it has none yet.
        """
        if media is None or start >= media.end:
            return count
        reached, (begin, end) = self._reach(media, start, count, slot), media.joint_span
        return max(0, begin - start) if begin < start + reached < end else reached

    def _reach(self, media: Media, start: int, count: int, slot: int) -> int:
        """Return `count`, or fewer tokens, so that they end before the first image for which pool rows, or the step's
        patches, do not suffice, or which would be cut although `whole` is set. 0 if that image has the first token.
        Arguments: see `reach`.
        """
        patches = {tower: most - self._num_patches[tower] for tower, most in self._most.items()}
        rows, seen = self._num_free + self._num_idle_rows, set[_Key]()
        for item in _within(media, start, count):
            if self.whole and item.end > start + count:
                return max(0, item.begin - start)
            key = self._key(slot, item)
            if key in seen or key in self._users:
                continue
            seen.add(key)
            rows -= item.num_rows
            if key not in self._idle:
                patches[self._tower(item)] -= item.num_patches
            if min(patches.values()) < 0 or rows < 0:
                return max(0, item.begin - start)
        return count

    def take(self, slot: int, media: Media | None, start: int, count: int) -> None:
        """Reserve for a slot the rows of the images of tokens [start, start + count), which `reach` allowed. Images not
        in the pool are appended to `encodes`, and idle ones may be evicted for them. Each image that is new to the slot
        counts in `num_queries`, and in `num_hits` if it is in the pool.
        """
        if media is None or start >= media.end:
            return
        own, items = self._needed.setdefault(slot, {}), _within(media, start, count)
        self._began.setdefault(slot, self._generation)
        for item in items:  # before any idle image is evicted
            if (key := self._key(slot, item)) in self._idle:
                del self._idle[key]
                self._num_idle_rows -= item.num_rows
                self._users[key] = set()
        for item in items:
            key = self._key(slot, item)
            if key not in own:
                self.num_queries += 1
                self.num_hits += key in self._users
            if key not in self._users:
                self._rows[key] = rows = self._allocate(item.num_rows)
                self._users[key] = set()
                self.encodes.append(Encode(item, rows))
                self._num_patches[self._tower(item)] += item.num_patches
            self._users[key].add(slot)
            own[key] = max(item.end, own.get(key, 0))

    def message(
        self, chunks: Sequence[tuple[int, Media | None, int, int]], num_tokens: int, *, mrope: bool
    ) -> np.ndarray | None:
        """Return the images' section of a step's message, i32 [1, num_tokens], or with M-RoPE i32 [4, num_tokens]: the
        pool row of each token, -1 for none, then its positions in time, height and width (`Media.mrope_positions`), -1
        where the device derives them. None if no token needs the section.

        chunks: the step's last tokens, as (slot, media of the prompt or None, first token, number of tokens); `take`
        must have been called for each. num_tokens: number of tokens of the whole step.
        """
        section = None
        end = num_tokens - sum(count for *_, count in chunks)
        for slot, media, start, count in chunks:
            first, end = end, end + count
            if media is not None and start < media.end:
                if section is None:
                    section = np.full((4 if mrope else 1, num_tokens), -1, np.int32)
                section[0, first:end] = self.index(slot, media, start, count)
                if mrope:
                    section[1:, first:end] = media.mrope_positions(start, count)
        return section

    def index(self, slot: int, media: Media, start: int, count: int) -> np.ndarray:
        """Return i32 [count], the pool row of each of the `count` tokens from `start` on of a slot's prompt. Tokens
        without an image get -1, or BOTH_WAYS if they are in Media.joint.

        Raises KeyError for an image that has no rows (`take`).
        """
        found = np.full(count, -1, np.int32)
        if media.joint is not None:
            first, last = np.searchsorted(media.joint, (start, start + count))
            found[media.joint[first:last] - start] = BOTH_WAYS
        for item in _within(media, start, count):
            first, last = np.searchsorted(item.positions, (start, start + count))
            found[item.positions[first:last] - start] = self._rows[self._key(slot, item)][first:last]
        return found

    def passed(self, slot: int, position: int) -> None:
        """Release the images that a slot no longer needs once its tokens before `position` are computed, which the step
        being scheduled does. Their rows keep their content until they are needed for other images.
        """
        own = self._needed.get(slot)
        if own is None:
            return
        for key in [key for key, end in own.items() if end <= position]:
            self._leave(slot, key)
            del own[key]
        if not own:
            del self._needed[slot], self._began[slot]

    def release(self, slot: int) -> None:
        """Release all images of a slot whose request has lost it. Their rows keep their content until they are needed
        for others.
        """
        for key in self._needed.pop(slot, {}):
            self._leave(slot, key)
        self._began.pop(slot, None)

    def clear(self) -> None:
        """Drop all embeddings: free the rows of those that no slot needs. Slots that need others keep them, and no
        other slot will share them.
        """
        for key in list(self._idle):
            self._evict(key)
        self._generation += 1

    def _key(self, slot: int, item: MediaItem) -> _Key:
        """Return the key of the embeddings of an item that a slot uses, -1 for a prompt without one."""
        return self._began.get(slot, self._generation), item.digest

    def _tower(self, item: MediaItem) -> bool:
        """Return whether the second tower, that of sounds, encodes an item."""
        return self._most[True] > 0 and item.modality == AUDIO

    def _leave(self, slot: int, key: _Key) -> None:
        """Record that a slot no longer needs an image. An image that no slot needs becomes idle, as the one used last,
        and is evicted if `clear` was called since its slots began.
        """
        users = self._users[key]
        users.discard(slot)
        if not users:
            del self._users[key]
            self._idle[key] = None
            self._num_idle_rows += len(self._rows[key])
            if key[0] != self._generation:
                self._evict(key)

    def _allocate(self, count: int) -> np.ndarray:
        """Return `count` free rows, i32 [count], which are then no longer free; idle images are evicted for them, the
        least recently used first. Raises StopIteration if the rows do not suffice.
        """
        while self._num_free < count:
            self._evict(next(iter(self._idle)))
        self._num_free -= count
        return self._free[self._num_free : self._num_free + count].copy()

    def _evict(self, key: _Key) -> None:
        """Free the rows of an idle image, and remove it from `encodes`."""
        rows = self._rows.pop(key)
        del self._idle[key]
        if self.encodes:  # it may have lost its only user in the step that was to encode it
            self.encodes = [each for each in self.encodes if each.rows is not rows]
        self._free[self._num_free : self._num_free + len(rows)] = rows
        self._num_free += len(rows)
        self._num_idle_rows -= len(rows)


def _within(media: Media, start: int, count: int) -> list[MediaItem]:
    """Return the items of a prompt whose range [begin, end) meets its tokens [start, start + count), in order."""
    return [item for item in media.items if item.begin < start + count and item.end > start]


class EncoderPools(SchedulerExtension):
    """Base of scheduler extensions with an EncoderRows pool for each replica."""

    ranks: Sequence[RankEncoderPool]

    def __init__(self, options: Any):
        """Store the options. `start` creates the pools."""
        self._options = options

    @property
    def rows(self) -> list[EncoderRows]:
        """Pool of each replica."""
        return [rank.rows for rank in self.ranks]

    def reset_cache(self) -> None:
        """Drop the embeddings in the pools of all replicas; slots keep those that they need (EncoderRows.clear)."""
        for rows in self.rows:
            rows.clear()


class RankEncoderPool(RankExtension):
    """Base of one replica's pool in its schedule. Its section of a batch, named `section`, lists the items to be
    encoded before the forward pass.

    Attributes:
      rows: the pool's rows.
    """

    section: ClassVar[str]
    rows: EncoderRows

    def begin(self) -> None:
        self.rows.begin_step()

    def complete(self, batch: ScheduledBatch) -> None:
        """Add the items to be encoded as a section of the batch, if there are any."""
        if self.rows.encodes:
            batch.sections[self.section] = self.rows.encodes

    def release(self, slot: int) -> None:
        """Release all items of the slot; they stay in the pool until their rows are needed for others."""
        self.rows.release(slot)


class Pictures(EncoderPools):
    """Scheduler extension with the embedding pools of all replicas."""

    name: ClassVar[str] = NAME

    def start(self, ranks: Sequence[Rank]) -> None:
        self.ranks = [RankPictures(self._options, rank.slots) for rank in ranks]


class RankPictures(RankEncoderPool):
    """One replica's embedding pool in its schedule."""

    section = NAME

    def __init__(self, options: PictureOptions, slots: Slots):
        """Create an empty pool, for the prompts in these slots."""
        sounds = options.max_sound_patches
        self.rows = EncoderRows(options.num_rows, options.max_patches, whole=options.whole, max_sound_patches=sounds)
        self._slots = slots
        self._mrope = options.mrope

    def chunk(self, request: Request, start: int, count: int, hits: Hits | None = None) -> int:
        """Return how many of the `count` tokens from `start` on the step can compute as far as images are concerned
        (EncoderRows.reach). hits: not used.
        """
        return self.rows.reach(request.media, start, count, request.slot)

    def reserve(self, request: Request, start: int, count: int) -> None:
        """Reserve pool rows for the images of these tokens; images not in the pool are added to those to be encoded."""
        self.rows.take(request.slot, request.media, start, count)

    def complete(self, batch: ScheduledBatch) -> None:
        """Add the images to be encoded to the batch as a section and the pool rows of its tokens to its message, each
        only if there are any, and release the images that the chunks pass.
        """
        super().complete(batch)
        slots = batch.slots[batch.num_decode :].tolist()
        if not slots:
            return
        counts = batch.num_scheduled[batch.num_decode :].tolist()
        starts = self._slots.num_computed[slots].tolist()
        chunks = [
            (slot, self._slots.requests[slot].media, start, count)
            for slot, start, count in zip(slots, starts, counts, strict=True)
        ]
        message = self.rows.message(chunks, batch.num_tokens, mrope=self._mrope)
        if message is not None:
            batch.message[NAME] = message
        for slot, start, count in zip(slots, starts, counts, strict=True):
            self.rows.passed(slot, start + count)
