"""Tower of Music Flamingo (Ghosh et al. 2025, arXiv:2511.10289): Audio Flamingo 3's, whose rows rotate by their time in
the sound before the MLP.

Further shape letters: U windows, S rows of a window, E elements of a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.sound.audioflamingo3 import (
    AudioFlamingo3Tower,
    AudioFlamingo3TowerConfig,
    read_audioflamingo3,
)
from jaxengine.models.vision.base.layers import rope_frequencies

# transformers' defaults of fields that a file lacks.
_THETA, _SHARE, _FRAME_SECONDS = 1200.0, 0.2, 0.01
_MOST_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class MusicFlamingoTowerConfig(AudioFlamingo3TowerConfig):
    """Sizes of the tower. Its column "window" has the number of a frame's window in its sound, beside "sound" of Audio
    Flamingo 3.

    Attributes:
      rotated: number of elements of a row, rounded up to whole pairs, that rotate by the window; as many further ones
        rotate by the row in its window.
      theta: base of their frequencies, and divisor of the numbers of windows and rows.
      row_seconds: seconds from one row to the next.
    """

    rotated: int
    theta: float
    row_seconds: float

    def make(self, hidden_size: int, build: Build) -> nnx.Module:
        return MusicFlamingoTower(self, hidden_size, build)


def read_musicflamingo(fields: ConfigFields) -> MusicFlamingoTowerConfig:
    """Return the tower's configuration from a config.json. The share `partial_rotary_factor` (default: 0.2) of a row's
    elements, rounded up to whole pairs, rotates by the window, and as many further elements by the row.

    Raises ModelConfigError for wrong fields, for a share of which two do not fit into a row, for a `rope_theta`
    (default: 1200) below the number of rows of a window, and for an `audio_frame_step` (default: 0.01) above
    _MOST_SECONDS.
    """
    own = read_audioflamingo3(fields)
    rope = ConfigFields(fields.mapping("rope_parameters") or {})
    share = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", _SHARE))
    theta = rope.number("rope_theta", fields.number("rope_theta", _THETA))
    if not 1 <= share * own.sizes.size <= own.sizes.size or _pairs(own.sizes.size, share) * 4 > own.sizes.size:
        raise fields.fail("rope_parameters", f"of a partial_rotary_factor of up to half of {own.sizes.size} elements")
    if theta < own.unit // own.merge:
        raise fields.fail("rope_parameters", f"of a rope_theta of {own.unit // own.merge}, rows of a window, or more")
    if (seconds := fields.number("audio_frame_step", _FRAME_SECONDS)) > _MOST_SECONDS:
        raise fields.fail("audio_frame_step", f"a number > 0 and <= {_MOST_SECONDS:g}")
    return MusicFlamingoTowerConfig(
        **{**vars(own), "columns": ("sound", "window")},
        rotated=int(own.sizes.size * share),
        theta=theta,
        row_seconds=seconds * own.merge,
    )


def _pairs(size: int, share: float) -> int:
    """Return the number of pairs of elements that rotate by the window: those of a `share` of `size` elements."""
    return -(-int(size * share) // 2)


class MusicFlamingoTower(AudioFlamingo3Tower):
    """Tower of Music Flamingo."""

    config: MusicFlamingoTowerConfig

    def placed(self, x: jax.Array, columns: jax.Array) -> jax.Array:
        """Return the rows x [U * S, E] of U windows with their first elements rotated in float32, in pairs of
        neighbours. columns: i32[C, P].

        With frequencies f, the pairs of the row t of window w rotate by -2 pi T w / theta f and, after them, as many by
        -2 pi T 2 pi t / theta f, where T is the row's time in seconds.
        """
        config, num_rows = self.config, self.config.unit // self.config.merge
        window = jnp.maximum(columns[1, :: config.unit], 0).astype(jnp.float32)
        row = jnp.arange(num_rows, dtype=jnp.float32)
        seconds = window[:, None] * (num_rows * config.row_seconds) + row * config.row_seconds
        freqs = rope_frequencies(config.rotated, config.theta).astype(np.float32)
        of_window = (window / config.theta)[:, None, None] * freqs
        of_row = (row / config.theta * (2 * math.pi))[:, None] * freqs
        shape = len(window), num_rows, len(freqs)
        parts = jnp.concatenate([jnp.broadcast_to(of_window, shape), jnp.broadcast_to(of_row, shape)], axis=-1)
        angles = (parts * (seconds * (-2 * math.pi))[..., None]).reshape(len(x), -1)
        cos, sin, count = jnp.cos(angles), jnp.sin(angles), 2 * angles.shape[1]
        pairs = x[:, :count].astype(jnp.float32).reshape(len(x), -1, 2)
        a, b = pairs[..., 0], pairs[..., 1]
        turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(len(x), count)
        return jnp.concatenate([turned.astype(x.dtype), x[:, count:]], axis=1)
