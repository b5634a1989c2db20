"""Limits of a prompt's media: pixels and seconds in total, and processor time per file."""

from __future__ import annotations

import io
import threading
import time

from jaxengine.media.base.errors import MediaError

# Seconds of processor time. The largest allowed file takes one or two; maliciously slow files take minutes.
MAX_SECONDS = 10.0
# Limit of a decoder's reads. A file of 32 MiB in the smallest parts that encoders write has some 200,000.
MAX_READS = 1_000_000
# Limit of the bytes that a decoder reads, as a multiple of the file's: animations are read three times.
MAX_PASSES = 8
# Tolerance for rounding errors of added seconds.
_ROUNDING = 1e-3


class PixelBudget:
    """Number of pixels that the images and frames of one prompt may have in total. Thread-safe."""

    def __init__(self, most: int):
        self._most = most
        self._taken = 0
        self._lock = threading.Lock()

    def take(self, pixels: int) -> None:
        """Take `pixels` from the budget. Raises MediaError if it does not suffice; then nothing is taken."""
        with self._lock:
            if self._taken + pixels > self._most:
                problem = f"has {pixels} pixels, which makes {self._taken + pixels} in one prompt"
                raise MediaError(f"{problem}; allowed: {self._most} (max_media_pixels)")
            self._taken += pixels


class SecondsBudget:
    """Seconds that the sounds of one prompt may last in total. Thread-safe."""

    def __init__(self, most: int):
        self._most = most
        self._taken = 0.0
        self._lock = threading.Lock()

    def take(self, seconds: float) -> None:
        """Add `seconds` to those taken. Raises MediaError if the budget is exceeded; they are counted in any case."""
        with self._lock:
            self._taken += seconds
            if self._taken > self._most + _ROUNDING:
                problem = f"makes the sounds of its prompt longer than {self._most} seconds"
                raise MediaError(f"{problem} (max_audio_seconds, or what max_model_len has room for)")


class TimedFile(io.BytesIO):
    """File in memory that limits its decoder's time, reads and bytes.

    `read` and `check` raise MediaError once the thread that opened the file and decodes it has used MAX_SECONDS of
    processor time. `read` also raises after more than MAX_READS reads, or MAX_PASSES times the file's bytes and 1 MiB:
    a small file may have millions of parts, or parts that overlap.
    """

    def __init__(self, data: bytes):
        super().__init__(data)
        self._until = time.thread_time() + MAX_SECONDS
        self._num_reads = 0
        self._bytes_left = MAX_PASSES * len(data) + (1 << 20)

    def read(self, size: int | None = -1, /) -> bytes:
        """Read at most `size` bytes, all for -1 or None. Raises MediaError beyond the limits of time, reads and
        bytes.
        """
        self.check()
        self._num_reads += 1
        if self._num_reads > MAX_READS:
            raise MediaError(f"has more than {MAX_READS} parts")
        read = super().read(size)
        self._bytes_left -= len(read)
        if self._bytes_left < 0:
            raise MediaError(f"has parts that lie over each other: they make {MAX_PASSES} times its bytes")
        return read

    def check(self) -> None:
        """Raise MediaError if this thread has used up the time for the file."""
        if time.thread_time() > self._until:
            raise MediaError(f"takes more than {MAX_SECONDS:.0f} seconds to decode")
