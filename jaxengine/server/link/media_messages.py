"""Pictures and videos in a Submit: arrays as raw bytes, or where the engine finds them."""

from __future__ import annotations

import msgspec
import numpy as np

from scheduler.media import Media, MediaItem


class Place(msgspec.Struct, array_like=True):
    """Where an item's patches, columns and rows lie behind each other in shared memory, and the bytes of each."""

    offset: int
    sizes: tuple[int, int, int]


class Item(msgspec.Struct, array_like=True):
    """A MediaItem, arrays as raw bytes; num_patches tells their shapes.

    Attributes:
      pixels: patches, columns and rows; None where the receiver keeps them, or they are in shared memory.
      keep: whether the sender counts on the receiver to keep them.
    """

    modality: str
    digest: bytes
    num_patches: int
    positions: bytes
    cached: bool | None
    pixels: tuple[bytes, bytes, bytes] | None = None
    place: Place | None = None
    keep: bool = False


class MediaMessage(msgspec.Struct, array_like=True):
    """A Media; rope_positions as raw bytes.

    Attributes:
      epoch: of the sender; another one than before says that nothing counts as kept that came earlier.
      memory: the file of the shared memory of this epoch; "" where no item lies in any.
    """

    items: list[Item]
    rope_positions: bytes | None
    rope_delta: int
    epoch: int = 0
    memory: str = ""


class MissingMediaError(Exception):
    """A message counts on pixels that are not here; whole ones, sent again, are taken."""


def pixels_of(item: MediaItem) -> tuple[bytes, bytes, bytes]:
    """f32 patches, i32 columns and rows, as raw bytes."""
    return _bytes(item.patches, np.float32), _bytes(item.columns, np.int32), _bytes(item.rows, np.int32)


def message_item(
    item: MediaItem, pixels: tuple[bytes, bytes, bytes] | None, place: Place | None = None, *, keep: bool = False
) -> Item:
    """An item with its pixels, or without."""
    positions = _bytes(item.positions, np.int32)
    return Item(item.modality, item.digest, len(item.patches), positions, item.cached, pixels, place, keep)


def media_message(media: Media, items: list[Item], epoch: int = 0, memory: str = "") -> MediaMessage:
    """What a prompt's Media says, with these items."""
    places = None if media.rope_positions is None else _bytes(media.rope_positions, np.int32)
    return MediaMessage(items, places, media.rope_delta, epoch, memory)


def read_item(item: Item, pixels: tuple[bytes, bytes, bytes]) -> MediaItem:
    """The item with these pixels, which its arrays are views of. Raises ValueError for bytes that make no arrays."""
    patches, columns, rows = pixels
    return MediaItem(
        item.modality,
        item.digest,
        np.frombuffer(item.positions, np.int32),
        np.frombuffer(patches, np.float32).reshape(item.num_patches, -1),
        np.frombuffer(columns, np.int32).reshape(-1, item.num_patches),
        np.frombuffer(rows, np.int32),
        item.cached,
    )


def read_media(message: MediaMessage, items: list[MediaItem]) -> Media:
    """The Media of a message, with these items."""
    places = message.rope_positions
    places = None if places is None else np.frombuffer(places, np.int32).reshape(3, -1)
    return Media(tuple(items), places, message.rope_delta)


def _bytes(array: np.ndarray, dtype: type) -> bytes:
    return np.ascontiguousarray(array, dtype).tobytes()
