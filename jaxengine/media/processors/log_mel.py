"""Log-mel spectrograms, equal to those of transformers' WhisperFeatureExtractor up to rounding. NumPy only."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from jaxengine.media.base.samples import RATE
from jaxengine.media.processors.settings import WHOLE
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.hf import errors_of
from jaxengine.models.params.files import read_object

# Windows of 25 milliseconds, 10 apart, at the one rate of the models.
_WINDOW, HOP = 400, 160
# Names of the settings in the file of all processors, and the file that has only them.
_FEATURES = ("feature_extractor", "audio_processor", "preprocessor_config.json")
# Frames whose spectra are computed at a time.
_BLOCK = 3000
_FLOOR, _RANGE = 1e-10, 8.0


def read_features(folder: Path, num_bins: int) -> ConfigFields:
    """Return a checkpoint's settings of spectrograms, without fields if it has none.

    folder: folder of the checkpoint. Raises ModelFileError for settings other than this module's and `num_bins` mel
    bins.
    """
    wanted = {"feature_size": num_bins, "n_fft": _WINDOW, "hop_length": HOP, "sampling_rate": RATE}
    return required_features(folder, **wanted, dither=0.0, padding_side="right", padding_value=0.0)


def required_features(folder: Path, **wanted: Any) -> ConfigFields:
    """Return the fields of a checkpoint's feature extractor, feature_extractor or audio_processor of
    processor_config.json, else preprocessor_config.json; without fields if it has none.

    folder: folder of the checkpoint. wanted: values by field. Raises ModelFileError if the checkpoint has another value
    for one of these fields.
    """
    whole = read_object(folder, WHOLE) or {}
    own = next((whole[key] for key in _FEATURES[:-1] if whole.get(key)), None)
    fields = ConfigFields(own or read_object(folder, _FEATURES[-1]) or {})
    with errors_of(folder / _FEATURES[-1]):
        fields.require(**wanted)
    return fields


def log_mel(samples: np.ndarray, num_bins: int) -> np.ndarray:
    """Return the log-mel spectrogram f32[N // HOP, num_bins] of samples f32[N], which are mirrored at both ends."""
    return log_spectrogram(samples, slaney_filters(num_bins), len(samples) // HOP)


def log_spectrogram(samples: np.ndarray, filters: np.ndarray, count: int) -> np.ndarray:
    """Return the log power f32[count, B] in each band of windows of samples f32[N], mirrored at both ends; the first
    window is centred at the first sample, and they are HOP samples apart.

    filters: f64[length / 2 + 1, B], weights of frequencies, where length is that of the Fourier transforms. With x the
    base-10 logarithm of a power (at least _FLOOR), raised to the largest less 8 if it is below, the result is
    (x + 4) / 4.
    """
    half, length = _WINDOW // 2, 2 * (len(filters) - 1)
    padded = np.pad(samples, half, mode="reflect" if len(samples) > half else "symmetric")
    windows = np.lib.stride_tricks.sliding_window_view(padded, _WINDOW)[::HOP][:count]
    shape = np.hanning(_WINDOW + 1)[:-1].astype(np.float32)
    power = np.empty((count, filters.shape[1]), np.float32)
    for first in range(0, count, _BLOCK):
        spectrum = np.fft.rfft(windows[first : first + _BLOCK] * shape, length)
        power[first : first + _BLOCK] = (np.abs(spectrum) ** 2) @ filters
    logs = np.log10(np.maximum(power, _FLOOR))
    logs = np.maximum(logs, logs.max() - _RANGE)
    return ((logs + 4.0) / 4.0).astype(np.float32)


@lru_cache
def slaney_filters(num_bins: int, length: int = _WINDOW) -> np.ndarray:
    """Return triangular filters over frequencies, [length / 2 + 1, num_bins], of equal area, evenly spaced on Slaney's
    mel scale. length: length of Fourier transforms. The array is cached: do not change it.
    """
    edges = _hertz(np.linspace(0.0, _mel(RATE / 2), num_bins + 2))
    return triangles(edges, length) * (2.0 / (edges[2:] - edges[:-2]))


@lru_cache
def htk_filters(num_bins: int, length: int, lowest: float = 0.0, highest: float = RATE / 2) -> np.ndarray:
    """Return triangular filters over frequencies, [length / 2 + 1, num_bins], from `lowest` to `highest` hertz, evenly
    spaced on HTK's mel scale. length: length of Fourier transforms. The array is cached: do not change it.
    """
    low, high = (2595.0 * np.log10(1.0 + each / 700.0) for each in (lowest, highest))
    mels = np.linspace(low, high, num_bins + 2)
    return triangles(700.0 * (10.0 ** (mels / 2595.0) - 1.0), length)


def triangles(edges: np.ndarray, length: int) -> np.ndarray:
    """Return [length / 2 + 1, B]: for each frequency of a Fourier transform of this length, the height of triangle b,
    which rises from 0 at edges[b] to 1 at edges[b + 1] and falls to 0 at edges[b + 2].

    edges: f64[B + 2], in hertz.
    """
    frequencies, widths = np.linspace(0, RATE // 2, length // 2 + 1), np.diff(edges)
    slopes = edges[None, :] - frequencies[:, None]
    down, up = -slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]
    return np.maximum(0, np.minimum(down, up))


# Slaney's scale: 200/3 Hz each up to 1,000 Hz, and logarithmic above, 27 for a factor of 6.4.
_LINEAR, _KNEE, _STEP = 200.0 / 3, 1000.0, np.log(6.4) / 27.0


def _mel(hertz: float) -> float:
    """Return a frequency in hertz as mels on Slaney's scale."""
    return hertz / _LINEAR if hertz < _KNEE else _KNEE / _LINEAR + float(np.log(hertz / _KNEE)) / _STEP


def _hertz(mels: np.ndarray) -> np.ndarray:
    """Return mels on Slaney's scale as hertz."""
    above = _KNEE * np.exp(_STEP * (mels - _KNEE / _LINEAR))
    return np.where(mels < _KNEE / _LINEAR, mels * _LINEAR, above)
