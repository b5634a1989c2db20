"""How much one prompt's pictures and videos may take: pixels of all together, processor time of each file."""

from __future__ import annotations

import io
import threading
import time

from jaxengine.media.errors import MediaError

# Seconds of processor time. The largest file that is allowed takes one or two; what is made to be slow takes minutes.
MAX_SECONDS = 10.0
# Pieces that a decoder reads of a file. Those of 32 MiB in the smallest parts that encoders write are some 200,000.
MAX_READS = 1_000_000


class PixelBudget:
    """Pixels that the pictures and frames of one prompt may have together; threads share it."""

    def __init__(self, most: int):
        self._most = most
        self._taken = 0
        self._lock = threading.Lock()

    def take(self, pixels: int) -> None:
        """Raises MediaError where there is no room for so many more."""
        with self._lock:
            if self._taken + pixels > self._most:
                problem = f"has {pixels} pixels, which makes {self._taken + pixels} in one prompt"
                raise MediaError(f"{problem}; allowed are {self._most} (max_media_pixels)")
            self._taken += pixels


class TimedFile(io.BytesIO):
    """A file in memory that a decoder reads piece by piece, and that ends decoders which take too long.

    A file of few bytes can have millions of parts, or have the same pixels decoded a thousand times.
    """

    def __init__(self, data: bytes):
        super().__init__(data)
        self._until = time.thread_time() + MAX_SECONDS
        self._num_reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self.check()
        self._num_reads += 1
        if self._num_reads > MAX_READS:
            raise MediaError(f"has more than {MAX_READS} parts")
        return super().read(size)

    def check(self) -> None:
        """Raises MediaError when the time of this thread is over."""
        if time.thread_time() > self._until:
            raise MediaError(f"takes more than {MAX_SECONDS:.0f} seconds to decode")
