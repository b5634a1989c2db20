"""Images, videos and sounds for the scheduler: their positions in a prompt, and their patches to be encoded."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

# Modality of items that are given as embeddings.
EMBEDS = "embeds"
AUDIO = "audio"
# Limit of TranscriptRules.begin, the tokens that are not chosen first.
MAX_BEGIN = 256


@dataclass(frozen=True, eq=False, slots=True)
class MediaItem:
    """Image, video or sound of one prompt.

    A sound that all tokens attend to (TowerConfig.crosses) has one position, the first one: with it, the digests of the
    pages that begin with this token differ from sound to sound.

    Attributes:
      modality: "image", "video" or "audio"; with EMBEDS, `patches` are the embeddings themselves, and nothing is
        encoded.
      digest: digest of its decoded pixels and all processing of them; equal digests mean equal embeddings.
      positions: i32 [n], the prompt positions of its n embeddings, ascending.
      patches: f32 [P, F], input of the model's tower (jaxengine.models.config.tower), padded to a multiple of its unit.
      columns: i32 [C, P], integer inputs of each patch, -1 in padding.
      rows: i32 [P / merge], index among the n embeddings of each output row of the tower, -1 for one that is not used.
      cached: whether its processed form was found in the cache when its prompt was read; None without such a cache.
    """

    modality: str
    digest: bytes
    positions: np.ndarray
    patches: np.ndarray
    columns: np.ndarray
    rows: np.ndarray
    cached: bool | None = None

    @property
    def num_rows(self) -> int:
        """Number of its embeddings, one for each of `positions`."""
        return len(self.positions)

    @property
    def num_patches(self) -> int:
        """Number of patches to be encoded; 0 for an item that came as embeddings."""
        return 0 if self.modality == EMBEDS else len(self.patches)

    @property
    def num_bytes(self) -> int:
        """Size of its input of the tower, or of its embeddings, in bytes."""
        return self.patches.nbytes + self.columns.nbytes + self.rows.nbytes

    @property
    def begin(self) -> int:
        """First position of the item in the prompt."""
        return int(self.positions[0])

    @property
    def end(self) -> int:
        """Position after the last one of the item."""
        return int(self.positions[-1]) + 1

    def in_windows(self, unit: int, merge: int) -> Iterator[MediaItem]:
        """Yield a sound of more than `unit` patches in parts of at most `unit` patches, in order, each with its own
        digest. Parts without any embedding are left out. Only the first part keeps `cached`. Yield any other item as it
        is.

        merge: patches of an output row; it must divide `unit`.
        """
        count = len(self.patches)
        if self.modality != AUDIO or count <= unit:
            yield self
            return
        begin = 0
        for number, first in enumerate(range(0, count, unit)):
            span, rows = slice(first, first + unit), self.rows[first // merge : (first + unit) // merge]
            end = begin + int((rows >= 0).sum())
            if end == begin:  # the last few frames of a sound may be too short
                continue
            yield MediaItem(
                modality=self.modality,
                digest=hashlib.sha256(self.digest + number.to_bytes(4, "little")).digest(),
                positions=self.positions[begin:end],
                patches=self.patches[span],
                columns=self.columns[:, span],
                rows=np.where(rows < 0, -1, rows - begin).astype(np.int32),
                cached=None if number else self.cached,
            )
            begin = end


@dataclass(frozen=True, eq=False, slots=True)
class Media:
    """All images, videos and sounds of a prompt.

    Attributes:
      items: in the prompt's order, at least one.
      rope_positions: i32 [3, num_prompt_tokens], M-RoPE positions of its tokens in time, height and width; None for a
        model that rotates queries and keys by token positions.
      joint, joint_digest: positions i32 [n], ascending, of the tokens that attend to each other in both directions,
        images or not, and the SHA-256 of everything from the first of them to the last; None and empty if only the
        tokens of one image do. A step computes all of these tokens that are not computed yet, and what is between them,
        or none.
      rope_delta: M-RoPE position, in each of the three, minus token position of a token after the prompt.
      end: position after the last item, the last token of `joint`, and the last token whose M-RoPE positions are not
        those of text; later tokens need nothing from here but rope_delta.
      num_tokens: number of the prompt's tokens that stand for embeddings, by the modality that the caller named; empty
        for embeddings that are a prompt themselves.
    """

    items: tuple[MediaItem, ...]
    rope_positions: np.ndarray | None = None
    rope_delta: int = 0
    joint: np.ndarray | None = None
    joint_digest: bytes = b""
    end: int = field(init=False)
    num_tokens: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Compute `end`: the position after the last item, the joint tokens, and M-RoPE positions that rope_delta does
        not give.
        """
        end = max(self.items[-1].end, self.joint_span[1])
        if self.rope_positions is not None:
            after = self.rope_positions[:, end:]
            elsewhere = np.flatnonzero((after != np.arange(end, end + after.shape[1]) + self.rope_delta).any(axis=0))
            end += int(elsewhere[-1]) + 1 if elsewhere.size else 0
        object.__setattr__(self, "end", end)

    @property
    def joint_span(self) -> tuple[int, int]:
        """First position of `joint`, and the position after its last; (0, 0) without such tokens."""
        return (0, 0) if self.joint is None else (int(self.joint[0]), int(self.joint[-1]) + 1)

    def in_windows(self, unit: int, merge: int) -> Media:
        """Return a copy with long sounds split into parts that are encoded separately (MediaItem.in_windows)."""
        return replace(self, items=tuple(part for item in self.items for part in item.in_windows(unit, merge)))

    def marks(self, page_size: int) -> dict[int, bytes]:
        """Return, by page number, bytes that distinguish a page with embeddings from other pages with the same tokens.

        They contain, for each item with embeddings in the page, its digest, which of its rows these are, and their
        offsets in the page. If the three M-RoPE positions of a token in the page differ from each other, the M-RoPE
        positions of the page's tokens are added. The page with the first token of `joint` has joint_digest. Pages
        without any of these have no entry. page_size: tokens of a page.
        """
        found = {self.joint_span[0] // page_size: self.joint_digest} if self.joint_digest else dict[int, bytes]()
        for item in self.items:
            pages = item.positions // page_size
            for page in np.unique(pages).tolist():
                row, end = np.searchsorted(pages, (page, page + 1)).tolist()
                where = np.asarray([row, end, *item.positions[row:end] % page_size], np.int32)
                found[page] = found.get(page, b"") + item.digest + where.tobytes()
        if self.rope_positions is not None:
            elsewhere = np.flatnonzero((self.rope_positions != self.rope_positions[0]).any(axis=0)) // page_size
            for page in np.unique(elsewhere).tolist():
                places = self.rope_positions[:, page * page_size : (page + 1) * page_size]
                found[page] = found.get(page, b"") + places.tobytes()
        return found

    def mrope_positions(self, start: int, count: int) -> np.ndarray:
        """Return i32 [3, count], the rope_positions of the `count` tokens from `start` on; -1 for tokens after the
        prompt, and for all tokens if the model has no M-RoPE.
        """
        found = np.full((3, count), -1, np.int32)
        if self.rope_positions is not None:
            own = self.rope_positions[:, start : start + count]
            found[:, : own.shape[1]] = own
        return found


@dataclass(frozen=True, kw_only=True)
class TranscriptRules:
    """Rules of a model's transcripts, by token ids.

    Attributes:
      first_timestamp: the timestamp of 0.00 seconds. All higher ids are timestamps, and the id before it requests a
        transcript without them.
      eos: the token that ends a transcript; text tokens have lower ids.
      tasks: the tokens that name a task, one of which a prompt has; empty for a model that only transcribes.
      suppressed: tokens that are never chosen. begin: at most MAX_BEGIN tokens that are not chosen first.
      most_initial: last timestamp that a transcript may begin with, -1 for no limit.
    """

    first_timestamp: int
    eos: int
    tasks: tuple[int, ...] = ()
    suppressed: tuple[int, ...] = ()
    begin: tuple[int, ...] = ()
    most_initial: int = -1

    def is_timed(self, prompt: Sequence[int]) -> bool:
        """Return whether a transcript after this prompt has timestamps: the prompt names a task, if the model has
        several, and does not contain the token that requests a transcript without them.
        """
        has_task = not self.tasks or any(task in prompt for task in self.tasks)
        return has_task and self.first_timestamp - 1 not in prompt
