"""Decodes sound files and arrays to samples of one channel at the rate of a model.

WAV is read here, other files with PyAV (FFmpeg), which the extra `video` installs. What an untrusted file can reach of
FFmpeg is limited as for videos (video_files).
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxengine.config.inputs.multimodal import MediaOptions
from jaxengine.media.base.errors import MediaError
from jaxengine.media.base.samples import RATE, Sound, Spectrogram
from jaxengine.media.decoding.bounds import MAX_SECONDS, SecondsBudget
from jaxengine.media.decoding.file_types import described, sound_type
from jaxengine.media.decoding.images import check_bytes, read_file
from jaxengine.media.decoding.resample import resampled, resampled_parts

MIN_RATE, MAX_RATE, MAX_CHANNELS = 1_000, 384_000, 8
# FFmpeg's names of demuxers, by file_types.SOUNDS.
_DEMUXERS = {"MP3": "mp3", "FLAC": "flac", "Ogg": "ogg", "MP4": "mov", "WebM": "matroska", "WAV": "wav"}
_CODECS = ("mp3", "mp3float", "mp2", "mp2float", "flac", "vorbis", "opus", "libopus", "aac", "alac")
_PCM = {(1, 8): "u1", (1, 16): "<i2", (1, 24): "", (1, 32): "<i4", (3, 32): "<f4", (3, 64): "<f8"}
_ALAW, _MULAW, _EXTENSIBLE = 6, 7, 0xFFFE
_PCM |= {(_ALAW, 8): "u1", (_MULAW, 8): "u1"}
# Limit of samples, far above any scale, within which every spectrogram is finite.
_LOUDEST = 1e10
FORMS = "the bytes or Path of a file, an array of samples at the rate of the model, or a pair (array, rate)"


def read_sound(value: Any, options: MediaOptions, budget: SecondsBudget, model_rate: int = RATE) -> Sound | Spectrogram:
    """Return a sound at model_rate samples per second, with channels averaged; a Spectrogram, or a Sound at that rate,
    is returned unchanged.

    value: see FORMS; arrays are [N] or [channels, N], of floats from -1 to 1, int16 or int32. budget: budget of the
    prompt; decoded seconds are taken from it before they are stored. model_rate: samples a second of the result, and of
    an array that is given without a rate. Blocks while it reads and decodes. Raises MediaError for other values, a file
    that is damaged, of an unknown type, too large or too long, no samples, and samples beyond _LOUDEST.
    """
    if isinstance(value, Spectrogram) or (isinstance(value, Sound) and value.rate == model_rate):
        return value
    if isinstance(value, Sound):
        value = value.samples, value.rate
    if isinstance(value, Path):
        value = read_file(value, options.max_media_bytes)
    if isinstance(value, (bytes, bytearray, memoryview)):
        check_bytes(len(value), options.max_media_bytes)
        return _decode(bytes(value), budget, model_rate)
    rate: Any = model_rate
    if isinstance(value, (tuple, list)) and len(value) == 2 and not np.isscalar(value[0]):
        value, rate = value
    if isinstance(value, list):
        try:
            value = np.asarray(value)
        except (ValueError, OverflowError):  # lists of different lengths, numbers beyond 64 bits
            raise MediaError(f"is a list that is not of numbers; allowed: {FORMS}") from None
    if not isinstance(value, np.ndarray):
        raise MediaError(f"is a {type(value).__name__}; allowed: {FORMS}")
    return _at_rate(_mono(value), _checked_rate(rate), budget, model_rate)


def _decode(data: bytes, budget: SecondsBudget, model_rate: int) -> Sound:
    """Decode the bytes of a sound file by its type, at model_rate samples per second; take its seconds from the
    prompt's budget.

    Raises MediaError for other types, damage, more seconds than the budget has, and no samples.
    """
    name = sound_type(data)
    if name is None:
        raise MediaError(
            f"{described(data)}; allowed: WAV, and with PyAV {', '.join(n for n in _DEMUXERS if n != 'WAV')}"
        )
    if name == "WAV":
        samples, rate = _read_wav(data, budget)
        return _checked(resampled(samples, rate, model_rate), model_rate)
    return _checked(_read_av(data, name, budget, model_rate), model_rate)


def _read_wav(data: bytes, budget: SecondsBudget) -> tuple[np.ndarray, int]:
    """Return (samples f32[N], rate) of a WAV file, and take its seconds from the budget. Only its first data chunk is
    read; one that is cut short, as far as it goes.

    Raises MediaError for a damaged header, a format that is not supported, no samples, and more seconds than the budget
    has.
    """
    form: tuple[int, int, int, int] | None = None
    for kind, chunk in _chunks(data):
        if kind == b"fmt ":
            if len(chunk) < 16:
                raise MediaError("is a WAV file with a damaged header")
            form = _wav_form(chunk)
        elif kind == b"data":
            if form is None:
                raise MediaError("is a WAV file without a header")
            code, channels, rate, bits = form
            budget.take(len(chunk) // (channels * bits // 8) / rate)
            return _wav_samples(chunk, code, channels, bits), rate
    raise MediaError("is a WAV file without samples")


def _chunks(data: bytes) -> Iterator[tuple[bytes, memoryview]]:
    """Yield (kind, content) of the chunks of a RIFF file; content is a view, shorter than announced if the file is cut.
    Samples announced as 0 bytes, as by a program that writes a stream, are all that follow.
    """
    view, at = memoryview(data), 12
    while at + 8 <= len(data):
        size = int.from_bytes(data[at + 4 : at + 8], "little")
        if data[at : at + 4] == b"data" and not size:
            size = len(data)
        yield data[at : at + 4], view[at + 8 : at + 8 + size]
        at += 8 + size + size % 2


def _wav_form(chunk: memoryview) -> tuple[int, int, int, int]:
    """Return (format code, channels, rate, bits of a sample) of a WAV header, `chunk`, of at least 16 bytes. The code
    of an extensible header is that of its subformat.

    Raises MediaError for formats that are not in _PCM, and for rates and numbers of channels that are not allowed.
    """
    code, channels = (int.from_bytes(chunk[at : at + 2], "little") for at in (0, 2))
    rate, bits = int.from_bytes(chunk[4:8], "little"), int.from_bytes(chunk[14:16], "little")
    if code == _EXTENSIBLE and len(chunk) >= 26:
        code = int.from_bytes(chunk[24:26], "little")
    if (code, bits) not in _PCM:
        allowed = "PCM of 8, 16, 24, 32 bits, floats, A-law, mu-law"
        raise MediaError(f"is a WAV file of format {code} with {bits} bits; allowed: {allowed}")
    if not 1 <= channels <= MAX_CHANNELS:
        raise MediaError(f"has {channels} channels; allowed: 1 to {MAX_CHANNELS}")
    return code, channels, _checked_rate(rate), bits


def _wav_samples(chunk: memoryview, code: int, channels: int, bits: int) -> np.ndarray:
    """Return the complete frames of a chunk of WAV data as f32[N], channels averaged. (code, bits): a key of _PCM, the
    format code and the bits of a number.
    """
    width = channels * bits // 8
    whole = chunk[: len(chunk) // width * width]
    if bits == 24:
        parts = np.frombuffer(whole, np.uint8).reshape(-1, 3).astype(np.int32)
        values: np.ndarray = ((parts[:, 0] << 8) | (parts[:, 1] << 16) | (parts[:, 2] << 24)).astype(np.int32)
    else:
        values = np.frombuffer(whole, _PCM[code, bits])
    if code in (_ALAW, _MULAW):
        values = _linear(np.arange(256), code == _MULAW)[values]
    return _mono(values.reshape(-1, channels).T)


def _linear(codes: np.ndarray, is_mu: bool) -> np.ndarray:
    """Return the samples, int16, of codes of 8 bits of ITU-T G.711's mu-law (is_mu) or A-law: a sign, three bits of an
    exponent and four of a mantissa.
    """
    codes = codes ^ (0xFF if is_mu else 0x55)
    mantissa, exponent = codes & 15, codes >> 4 & 7
    if is_mu:
        sizes = ((mantissa * 8 + 132) << exponent) - 132
    else:
        sizes = (mantissa * 16 + 8 + 256 * (exponent > 0)) << np.maximum(exponent - 1, 0)
    return np.where((codes >= 128) == is_mu, -sizes, sizes).astype(np.int16)


def _read_av(data: bytes, name: str, budget: SecondsBudget, model_rate: int) -> np.ndarray:
    """Return samples f32[N] at model_rate of a sound file, decoded by PyAV, and take their seconds from the budget.

    name: the file's type, a key of _DEMUXERS. Samples are resampled while they are decoded, because a small file may
    have many. Raises MediaError without PyAV, for a damaged file, no sound in it, a codec that is not allowed, and more
    seconds than the budget has.
    """
    try:
        import av  # pyright: ignore[reportMissingImports]
    except ImportError:
        problem = f"is in the form {name}, for which this installation has no decoder"
        raise MediaError(f"{problem}; pip install 'jaxengine[video]', or send WAV") from None
    try:
        # Only these bytes: no protocol to open other sources with.
        with av.open(io.BytesIO(data), format=_DEMUXERS[name], options={"protocol_whitelist": ""}) as container:
            stream = _av_stream(container, name)
            parts = _av_parts(container, stream, budget)
            return resampled_parts(parts, stream.codec_context.sample_rate, model_rate)
    except MediaError:
        raise
    except Exception as error:  # errors of FFmpeg and its libraries
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise MediaError(f"is in the form {name} and damaged or cut short ({why})") from None


def _av_stream(container: Any, name: str) -> Any:
    """Return the first sound stream of a PyAV container. name: the file's type, for errors.

    Raises MediaError if there is none, and for a codec or rate that is not allowed.
    """
    if not container.streams.audio:
        raise MediaError(f"is in the form {name} and has no sound in it")
    stream = container.streams.audio[0]
    codec = stream.codec_context
    if codec.name not in _CODECS and not codec.name.startswith("pcm_"):
        raise MediaError(f"is a {name} file of the codec {codec.name!r}; allowed: {', '.join(_CODECS)}")
    _checked_rate(codec.sample_rate)
    return stream


def _av_parts(container: Any, stream: Any, budget: SecondsBudget) -> Iterator[np.ndarray]:
    """Yield the samples of a sound stream as they are decoded, f32[n] each, channels averaged; take their seconds from
    the budget. Packets that cannot be decoded, such as padding after an MP3, are left out, as FFmpeg's programs do.

    container, stream: objects of PyAV. Raises MediaError if the rate changes, for too many channels, more seconds than
    the budget has, and more than 6 * MAX_SECONDS seconds of decoding.
    """
    rate, until = stream.codec_context.sample_rate, time.monotonic() + 6 * MAX_SECONDS
    for packet in container.demux(stream):
        if time.monotonic() > until:
            raise MediaError(f"takes more than {6 * MAX_SECONDS:.0f} seconds to decode")
        try:
            frames = packet.decode()
        except ValueError:  # PyAV's InvalidDataError
            continue
        for frame in frames:
            if frame.sample_rate != rate or not 1 <= frame.layout.nb_channels <= MAX_CHANNELS:
                raise MediaError(f"changes its rate, or has more than {MAX_CHANNELS} channels")
            values = frame.to_ndarray()
            if not frame.format.is_planar:
                values = values.reshape(-1, frame.layout.nb_channels).T
            budget.take(values.shape[-1] / rate)
            yield _mono(values)


def _mono(values: np.ndarray) -> np.ndarray:
    """Return samples f32[N] of an array [N] or [channels, N], channels averaged; uint8, int16 and int32 are scaled to
    -1 to 1.

    Raises MediaError for other types and shapes, and more than MAX_CHANNELS channels.
    """
    kind = values.dtype
    if values.ndim not in (1, 2) or (values.ndim == 2 and not 1 <= values.shape[0] <= MAX_CHANNELS):
        raise MediaError(f"is an array of shape {list(values.shape)}; allowed: [N] and [1 to {MAX_CHANNELS}, N]")
    if kind == np.uint8:
        samples = (values.astype(np.float32) - 128) / 128
    elif kind in (np.int16, np.int32):
        samples = values.astype(np.float32) / (1 << (8 * kind.itemsize - 1))
    elif kind.kind == "f":
        with np.errstate(over="ignore"):  # refused as infinite
            samples = values.astype(np.float32)
    else:
        raise MediaError(f"is an array of {kind}; allowed: floats, int16 and int32")
    return samples.mean(axis=0) if samples.ndim == 2 and len(samples) > 1 else samples.reshape(-1)


def _checked_rate(rate: Any) -> int:
    """Return a rate in samples per second as an int. Raises MediaError unless it is a whole number from MIN_RATE to
    MAX_RATE.
    """
    is_real = isinstance(rate, (int, float, np.integer, np.floating)) and not isinstance(rate, bool)
    if not is_real or not math.isfinite(rate) or rate != int(rate):
        raise MediaError(f"has the rate {str(rate)[:50]}; allowed: whole numbers of samples a second")
    if not MIN_RATE <= rate <= MAX_RATE:
        raise MediaError(f"has the rate {int(rate)}; allowed: {MIN_RATE} to {MAX_RATE} samples a second")
    return int(rate)


def _at_rate(samples: np.ndarray, rate: int, budget: SecondsBudget, model_rate: int) -> Sound:
    """Return samples f32[N] at `rate` as a Sound, resampled to model_rate; take their seconds from the budget.

    Raises MediaError for more seconds than the budget has, no samples, and samples beyond _LOUDEST.
    """
    budget.take(len(samples) / rate)
    return _checked(resampled(samples, rate, model_rate), model_rate)


def _checked(samples: np.ndarray, rate: int) -> Sound:
    """Return samples f32[N] at `rate` as a Sound. Raises MediaError if there are none, or some are not numbers of at
    most _LOUDEST.
    """
    if not len(samples):
        raise MediaError("has no samples")
    if not -_LOUDEST <= samples.min() <= samples.max() <= _LOUDEST:  # which is false for NaN
        raise MediaError(f"has samples that are not finite, or beyond {_LOUDEST:g}; allowed: floats from -1 to 1")
    return Sound(samples, rate)
