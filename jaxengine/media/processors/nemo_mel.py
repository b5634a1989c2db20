"""Log-mel spectrograms of NeMo's models (Parakeet, Cohere Transcribe), whose bins have mean 0 and variance 1.

They are those of transformers' ParakeetFeatureExtractor and CohereAsrFeatureExtractor up to rounding, with the noise
that the latter adds. NumPy only.
"""

from __future__ import annotations

import numpy as np

from jaxengine.media.processors.log_mel import HOP, slaney_filters

LENGTH, WINDOW = 512, 400  # samples of a Fourier transform, and of a window
_LEAST_POWER, _TINY = 2.0**-24, 1e-5  # what is added to a power, and to a standard deviation
_BLOCK = 16  # numbers that are drawn together


def nemo_mel(samples: np.ndarray, num_bins: int, preemphasis: float, dither: float = 0.0) -> np.ndarray:
    """Return f32[N // HOP, num_bins] of samples f32[N] of two frames or more: natural logarithms of the power in each
    band, reduced to mean 0 and deviation 1 over the frames of a bin. Windows are centred at every HOP-th sample, and
    what lies outside of the sound is zero.

    preemphasis: share of each sample that is taken off the next one. dither: deviation of the noise that is added to
    samples; 0 for none.
    """
    if dither:
        samples = samples + np.float32(dither) * noise(len(samples))
    samples = np.append(samples[:1], samples[1:] - np.float32(preemphasis) * samples[:-1])
    count, margin = len(samples) // HOP, (LENGTH - WINDOW) // 2
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(samples, LENGTH // 2), LENGTH)[::HOP][:count]
    shape = np.pad(np.hanning(WINDOW), margin).astype(np.float32)
    power = np.abs(np.fft.rfft(windows * shape)) ** 2
    logs = np.log(power @ slaney_filters(num_bins, LENGTH) + _LEAST_POWER)
    return ((logs - logs.mean(axis=0)) / (logs.std(axis=0, ddof=1) + _TINY)).astype(np.float32)


def noise(count: int) -> np.ndarray:
    """Return f32[count], count >= 16, the normal numbers that torch.randn draws on a CPU with `count` as its seed.

    The Mersenne twister's 24 lower bits are uniform in [0, 1). Of each block of 16 numbers the i-th and the i + 8-th
    become two normal ones (Box & Muller 1958): sqrt(-2 log(1 - u)) times cosine and sine of 2 pi v. If there is a rest,
    the last 16 are drawn again.
    """

    def normal(drawn: np.ndarray) -> np.ndarray:
        uniform = (drawn & 0xFFFFFF).astype(np.float64) * 2.0**-24
        u, v = np.split(uniform.reshape(-1, 2, _BLOCK // 2), 2, axis=1)
        radius, angle = np.sqrt(-2.0 * np.log(1.0 - u)), 2.0 * np.pi * v
        return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)

    rest = count % _BLOCK
    raw = np.random.RandomState(count % 2**32).randint(0, 2**32, count + (_BLOCK if rest else 0), dtype=np.uint32)
    found = np.zeros(count, np.float32)
    found[: count - rest] = normal(raw[: count - rest])
    if rest:
        found[-_BLOCK:] = normal(raw[count:])
    return found
