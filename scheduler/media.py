"""Pictures and videos as the scheduler sees them: where in a prompt they stand, and what is to be encoded for that."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# The modality of what comes encoded.
EMBEDS = "embeds"


@dataclass(frozen=True, eq=False, slots=True)
class MediaItem:
    """A picture or a video of one prompt.

    Attributes:
      modality: "image" or "video"; EMBEDS: `patches` are its rows, and there is nothing to encode.
      digest: of its decoded pixels and of all that was done with them; equal digests mean equal embeddings.
      positions: i32[n], the prompt's positions in which its n embeddings stand, ascending.
      patches: f32[P, F], what the model's tower is given (jaxengine.models.config.tower), filled up to a multiple of
        its unit.
      columns: i32[C, P], what is said of each, -1 of what fills up.
      rows: i32[P / merge], which of the n embeddings each row of the tower's is, -1 for one that is not used.
      cached: whether it was found made ready when its prompt was read; None where nothing of the kind is kept.
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
        return len(self.positions)

    @property
    def num_patches(self) -> int:
        """Number of patches to be encoded; 0 for an item that came as embeddings."""
        return 0 if self.modality == EMBEDS else len(self.patches)

    @property
    def begin(self) -> int:
        """Its first position."""
        return int(self.positions[0])

    @property
    def end(self) -> int:
        """The position after its last one."""
        return int(self.positions[-1]) + 1


@dataclass(frozen=True, eq=False, slots=True)
class Media:
    """All images and videos of a prompt.

    Attributes:
      items: in the prompt's order, at least one.
      rope_positions: i32[3, num_prompt_tokens], M-RoPE positions of its tokens in time, height and width; None for a
        model that rotates queries and keys by token positions.
      rope_delta: M-RoPE position, in each of the three, minus token position of a token after the prompt.
    """

    items: tuple[MediaItem, ...]
    rope_positions: np.ndarray | None = None
    rope_delta: int = 0

    @property
    def end(self) -> int:
        """The position after the last item: later tokens need nothing from here but rope_delta."""
        return self.items[-1].end

    def marks(self, page_size: int) -> dict[int, bytes]:
        """Return for each page of the prompt with embeddings, by its number, bytes that tell it from other pages with
        the same tokens.

        That is, of each item with embeddings in the page, its digest, which of its rows these are, and their places in
        the page. Pages without embeddings have no entry. page_size: in tokens.
        """
        found: dict[int, bytes] = {}
        for item in self.items:
            pages = item.positions // page_size
            for page in np.unique(pages).tolist():
                row, end = np.searchsorted(pages, (page, page + 1)).tolist()
                where = np.asarray([row, end, *item.positions[row:end] % page_size], np.int32)
                found[page] = found.get(page, b"") + item.digest + where.tobytes()
        return found

    def places(self, start: int, count: int) -> np.ndarray:
        """i32[3, count], rope_positions of the `count` tokens of the sequence from `start` on; -1 for those behind the
        prompt, and for all where the model has none."""
        found = np.full((3, count), -1, np.int32)
        if self.rope_positions is not None:
            own = self.rope_positions[:, start : start + count]
            found[:, : own.shape[1]] = own
        return found
