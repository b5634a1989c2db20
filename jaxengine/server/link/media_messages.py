"""Images and videos in a Submit: arrays as raw bytes or by their location in shared memory."""

from __future__ import annotations

import msgspec
import numpy as np

from jaxengine.scheduler.base.media import Media, MediaItem


class Place(msgspec.Struct, array_like=True):
    """Location of an item in shared memory: patches, columns and rows, contiguous from byte `offset`, with `sizes`
    bytes.
    """

    offset: int
    sizes: tuple[int, int, int]


class Item(msgspec.Struct, array_like=True):
    """A MediaItem, with arrays as raw bytes.

    Attributes:
      modality, digest, positions, cached: the fields of MediaItem; positions as i32.
      num_patches: number of patches, which determines the arrays' shapes.
      pixels: patches, columns and rows; None if the receiver has them or they are in shared memory.
      place: location of the pixels in shared memory; None if they are not there.
      keep: whether the sender relies on the receiver to cache the pixels.
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
    """A Media, with arrays as raw bytes.

    Attributes:
      items: images and videos in the order of the prompt.
      rope_positions: i32[3, tokens]; None for a model without M-RoPE.
      rope_delta, joint_digest: the fields of Media. joint: i32, or None.
      epoch: number of the sender's cache state; when it changes, nothing sent earlier counts as cached.
      memory: path of this epoch's shared memory; "" if no item is in it.
    """

    items: list[Item]
    rope_positions: bytes | None
    rope_delta: int
    epoch: int = 0
    memory: str = ""
    joint: bytes | None = None
    joint_digest: bytes = b""


class MissingMediaError(Exception):
    """Error of a message that relies on pixels which are not cached here. Resending it with all pixels succeeds."""


def pixels_of(item: MediaItem) -> tuple[bytes, bytes, bytes]:
    """Return an item's f32 patches, i32 columns and i32 rows as raw bytes, in the machine's byte order."""
    return array_bytes(item.patches, np.float32), array_bytes(item.columns, np.int32), array_bytes(item.rows, np.int32)


def message_item(
    item: MediaItem, pixels: tuple[bytes, bytes, bytes] | None, place: Place | None = None, *, keep: bool = False
) -> Item:
    """Return an item in the form of a message.

    pixels: as returned by `pixels_of`; None if the receiver has them or they are at `place`. place: location in shared
    memory; None if the pixels are not there. keep: whether the sender relies on the receiver to cache the pixels.
    """
    positions = array_bytes(item.positions, np.int32)
    return Item(item.modality, item.digest, len(item.patches), positions, item.cached, pixels, place, keep)


def media_message(media: Media, items: list[Item], epoch: int = 0, memory: str = "") -> MediaMessage:
    """Return a prompt's Media in the form of a message, with `items` in place of its own. epoch, memory: fields of
    MediaMessage.
    """
    places = None if media.rope_positions is None else array_bytes(media.rope_positions, np.int32)
    joint = None if media.joint is None else array_bytes(media.joint, np.int32)
    return MediaMessage(items, places, media.rope_delta, epoch, memory, joint, media.joint_digest)


def read_item(item: Item, pixels: tuple[bytes, bytes, bytes]) -> MediaItem:
    """Return the MediaItem of a message's item and its pixels. Its arrays are read-only views of the bytes.

    pixels: f32 patches, i32 columns and i32 rows as raw bytes, as returned by `pixels_of`. Raises ValueError for bytes
    that cannot be divided into `item.num_patches` patches.
    """
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
    """Return the Media of a message, with `items` in place of its own. rope_positions is a view i32[3, tokens], or
    None.
    """
    places = message.rope_positions
    places = None if places is None else np.frombuffer(places, np.int32).reshape(3, -1)
    joint = None if message.joint is None else np.frombuffer(message.joint, np.int32)
    return Media(tuple(items), places, message.rope_delta, joint, message.joint_digest)


def array_bytes(array: np.ndarray, dtype: type) -> bytes:
    """Return an array's values, converted to `dtype`, as bytes in C order and the machine's byte order."""
    return array.astype(dtype, copy=False).tobytes()
