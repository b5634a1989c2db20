"""Log-mel spectrograms of Universal Speech Models, equal to those of transformers' Gemma4AudioFeatureExtractor up to
rounding. NumPy only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxengine.media.base.samples import RATE
from jaxengine.media.processors.log_mel import HOP, htk_filters
from jaxengine.models.config.fields import ConfigFields

# Frames whose spectra are computed at a time.
_BLOCK = 3000
# Limits of settings, within which every spectrogram is finite.
_MOST, _MOST_MILLISECONDS = 1e6, 1000


@dataclass(frozen=True)
class UsmMel:
    """Spectrograms of windows of `window` samples, HOP apart, of which the first is centred at the first sample.

    Attributes:
      num_bins: mel bins of a spectrum.
      window, length: samples of a window, and the length to which it is padded with zeros.
      lowest, highest: limits of the mel bins in hertz.
      emphasis: preemphasis: share of the preceding sample that is subtracted from each sample.
      whole_first: from the first sample of a window, that share of the sample itself is subtracted, not of its
        predecessor.
      scale: factor of samples.
      floor: added to magnitudes before the logarithm.
      mean, deviation: for each bin a number that is subtracted from logarithms, and one by which they are then divided.
    """

    num_bins: int
    window: int
    length: int
    lowest: float
    highest: float
    emphasis: float
    whole_first: bool
    scale: float
    floor: float
    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    @classmethod
    def read(cls, fields: ConfigFields, num_bins: int) -> UsmMel:
        """Return the settings of a feature extractor (`fields`), with transformers' defaults: frame_length_ms (20),
        min_frequency (0), max_frequency (8,000), input_scale_factor (1), preemphasis (0), preemphasis_htk_flavor
        (True), mel_floor (0.001), per_bin_mean (0), per_bin_stddev (1), and fft_overdrive (False), which doubles the
        length of transforms, otherwise the next power of two. frame_length_ms is rounded to samples, at least 2, which
        a frame_length beside it must equal. num_bins: mel bins of the tower.

        Raises ModelConfigError for values out of range.
        """
        if (milliseconds := fields.number("frame_length_ms", 20.0)) > _MOST_MILLISECONDS:
            raise fields.fail("frame_length_ms", f"a number > 0 and <= {_MOST_MILLISECONDS}")
        if (window := round(RATE * milliseconds / 1000)) < 2:
            raise fields.fail("frame_length_ms", f"a number of milliseconds of at least 2 samples, {2000 / RATE}")
        # What transformers writes beside, and does not read.
        fields.require(frame_length=window)
        lowest, highest = _from_zero(fields, "min_frequency", RATE / 2), fields.number("max_frequency", RATE / 2)
        if not lowest + 1 <= highest <= RATE / 2:
            raise fields.fail("max_frequency", f"a number of hertz from min_frequency + 1, {lowest + 1}, to {RATE / 2}")
        if (scale := fields.number("input_scale_factor", 1.0)) > _MOST:
            raise fields.fail("input_scale_factor", f"a number > 0 and <= {_MOST:g}")
        length = 1 << (window - 1).bit_length()
        return cls(
            num_bins=num_bins,
            window=window,
            length=length * (1 + fields.boolean("fft_overdrive", False)),
            lowest=lowest,
            highest=highest,
            emphasis=_from_zero(fields, "preemphasis", 1.0),
            whole_first=fields.boolean("preemphasis_htk_flavor", True),
            scale=scale,
            floor=fields.number("mel_floor", 1e-3),
            mean=_of_bins(fields, "per_bin_mean", num_bins, 0.0, -_MOST),
            deviation=_of_bins(fields, "per_bin_stddev", num_bins, 1.0, 1 / _MOST),
        )

    def num_frames(self, count: int) -> int:
        """Return how many windows, each with one sample more, fit into `count` samples with half a window of silence
        before them; 0 for too few samples.
        """
        return max(0, (count + self.window // 2 - self.window - 1) // HOP + 1)

    def of(self, samples: np.ndarray) -> np.ndarray:
        """Return the spectrogram f32[num_frames, num_bins] of samples f32[N]: for each window, of which the first
        begins half a window before the samples, after scaling and preemphasis, the natural logarithm of the magnitudes
        in each mel bin plus `floor`, less `mean` and divided by `deviation`.
        """
        count = self.num_frames(len(samples))
        padded = np.pad(samples * np.float32(self.scale), (self.window // 2, 0))
        found = np.empty((count, self.num_bins), np.float32)
        if not count:
            return found
        # One sample more than a window, since preemphasis also needs each sample's predecessor.
        windows = np.lib.stride_tricks.sliding_window_view(padded, self.window + 1)[::HOP][:count]
        for first in range(0, count, _BLOCK):
            spectrum = np.fft.rfft(self._emphasised(windows[first : first + _BLOCK]) * self._shape, self.length)
            logs = np.log(np.abs(spectrum) @ self._filters + self.floor)
            found[first : first + _BLOCK] = (logs - np.asarray(self.mean)) / np.asarray(self.deviation)
        return found

    def _emphasised(self, windows: np.ndarray) -> np.ndarray:
        """Return windows f32[N, window + 1] of overlapping samples after preemphasis, [N, window]: each sample minus
        `emphasis` times its predecessor; with `whole_first` the first of a window is only scaled by 1 - emphasis, and
        the last sample has no effect. Without emphasis the first `window` samples are returned.
        """
        if self.emphasis <= 0:
            return windows[:, :-1]
        if not self.whole_first:
            return windows[:, 1:] - self.emphasis * windows[:, :-1]
        first = windows[:, :1] * (1 - self.emphasis)
        return np.concatenate([first, windows[:, 1:-1] - self.emphasis * windows[:, :-2]], axis=1)

    @cached_property
    def _shape(self) -> np.ndarray:
        """Hann window, f32[window]."""
        return np.hanning(self.window + 1)[:-1].astype(np.float32)

    @cached_property
    def _filters(self) -> np.ndarray:
        """Mel filters, [length / 2 + 1, num_bins]."""
        return htk_filters(self.num_bins, self.length, self.lowest, self.highest)


def _from_zero(fields: ConfigFields, name: str, most: float) -> float:
    """Return the field `name`, a number from 0 to `most`; 0.0 if it is missing or null. Raises ModelConfigError for
    other values.
    """
    value = fields.zero_or_more(name)
    if value > most:
        raise fields.fail(name, f"a number from 0 to {most}")
    return value


def _of_bins(fields: ConfigFields, name: str, count: int, default: float, least: float) -> tuple[float, ...]:
    """Return the field `name`, a number from `least` to _MOST for each of `count` bins; `default` for all if the field
    is missing or null.

    Raises ModelConfigError for other values.
    """
    given = fields.raw.get(name)
    try:
        values = np.full(count, default) if given is None else np.asarray(given).reshape(-1)
    except ValueError:  # lists of different lengths
        values = np.zeros(0)
    if values.dtype.kind not in "iuf" or len(values) != count or not ((values >= least) & (values <= _MOST)).all():
        raise fields.fail(name, f"a list of {count} numbers from {least:g} to {_MOST:g}, or null")
    return tuple(values.astype(float).tolist())
