"""Resampling of sounds by a polyphase filter: a sinc with a Kaiser window (beta 5) that ends after ten of its zeros.

The filter is that of scipy.signal.resample_poly, and the results are equal up to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

_ZEROS, _BETA = 10, 5.0


def resampled(samples: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    """Return samples f32[ceil(N * wanted / rate)] at `wanted` samples per second, from f32[N] at `rate`. Silence is
    assumed before and after them. For equal rates the result is `samples` itself.
    """
    common = math.gcd(rate, wanted)
    up, down = wanted // common, rate // common
    if up == down:
        return samples
    taps, before = _phases(up, down)
    num_taps, total = taps.shape[1], -(-len(samples) * up // down)
    padded = np.concatenate([np.zeros(num_taps, np.float32), samples, np.zeros(num_taps + down, np.float32)])
    out = np.empty(total, np.float32)
    for first in range(min(up, total)):
        # Every up-th output has the same taps; its input samples begin `down` later.
        count = -(-(total - first) // up)
        start = num_taps + (first * down + before) // up - num_taps + 1
        windows = np.lib.stride_tricks.sliding_window_view(padded[start:], num_taps)[::down][:count]
        out[first::up] = windows @ taps[(first * down + before) % up]
    return out


def resampled_parts(parts: Iterable[np.ndarray], rate: int, wanted: int, block: int = 1 << 20) -> np.ndarray:
    """Return the joined parts f32[n], resampled from `rate` to `wanted` samples per second, with the same result as
    `resampled`, without holding more than about two blocks of the input in memory.

    block: input samples that are resampled at a time.
    """
    common = math.gcd(rate, wanted)
    up, down = wanted // common, rate // common
    # Whole multiples of `down`, so that every block begins at an output.
    context = -(-(2 * _ZEROS * max(up, down) // up + 2) // down) * down
    size, skipped = -(-block // down) * down, context * up // down
    out, held, count = [], [np.zeros(context, np.float32)], context
    for part in parts:
        held.append(part)
        count += len(part)
        while count >= size + 2 * context:
            joined = np.concatenate(held)
            end = (context + size) * up // down
            out.append(resampled(joined[: size + 2 * context], rate, wanted)[skipped:end])
            held, count = [joined[size:]], count - size
    out.append(resampled(np.concatenate(held), rate, wanted)[skipped:])
    return np.concatenate(out)


def _phases(up: int, down: int) -> tuple[np.ndarray, int]:
    """Return the filter for a rate of up / down times the old one, cut into its phases, f32[up, taps] in the order of
    samples, and the number of taps before its middle.
    """
    widest = max(up, down)
    before = _ZEROS * widest
    offsets = np.arange(-before, before + 1, dtype=np.float64)
    taps = np.sinc(offsets / widest) * np.kaiser(len(offsets), _BETA)
    taps *= up / taps.sum()
    num_taps = -(-len(taps) // up)
    padded = np.pad(taps, (0, num_taps * up - len(taps)))
    return np.ascontiguousarray(padded.reshape(num_taps, up).T[:, ::-1], np.float32), before
