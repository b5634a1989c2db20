"""Decoded sounds, and spectrograms that a model's processor computes of parts of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Samples per second that most models with sounds take.
RATE = 16_000


@dataclass(frozen=True, eq=False)
class Sound:
    """Sound of one channel. samples: f32[N], `rate` per second, from -1 to 1."""

    samples: np.ndarray
    rate: int = RATE

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return len(self.samples) / self.rate


@dataclass(frozen=True, eq=False)
class Spectrogram:
    """Part of a sound's spectrogram, as its model's processor computes it. frames: f32[P, bins]."""

    frames: np.ndarray
