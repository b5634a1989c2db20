"""Formats of a transcript: subtitles (SubRip, WebVTT) and the objects of verbose_json."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any, NamedTuple

from jaxengine.requests.media.transcripts import Segment
from jaxengine.requests.media.words import Word


class Said(NamedTuple):
    """Segment of a transcript with its text.

    Attributes:
      segment: its times and tokens.
      text: text of its tokens.
      logprob: mean log-probability of its tokens.
      no_speech: probability that its window has no speech; None for a model without a no-speech token.
      words: its words with times; () unless they were requested.
    """

    segment: Segment
    text: str
    logprob: float = 0.0
    no_speech: float | None = None
    words: tuple[Word, ...] = ()


def srt(said: Iterable[Said]) -> str:
    """Return segments as SubRip subtitles: for each a cue, numbered from 1, with its times and its text on one line; ""
    for no segments.
    """
    return "".join(
        f"{number}\n{_clock(each.segment.start, ',')} --> {_clock(each.segment.end, ',')}\n{_line(each.text)}\n\n"
        for number, each in enumerate(said, 1)
    )


def vtt(said: Iterable[Said]) -> str:
    """Return segments as WebVTT subtitles: the header, then for each segment a cue with its times and its text on one
    line.
    """
    cues = (
        f"{_clock(each.segment.start, '.')} --> {_clock(each.segment.end, '.')}\n{_line(each.text)}\n\n"
        for each in said
    )
    return "WEBVTT\n\n" + "".join(cues)


def verbose_segments(said: Iterable[Said], temperature: float) -> list[dict[str, Any]]:
    """Return the `segments` of verbose_json, numbered from 0, with times in seconds, rounded to the millisecond.
    temperature: the request's, which each segment repeats.
    """
    return [
        {
            "id": number,
            "seek": each.segment.seek,
            "start": round(each.segment.start, 3),
            "end": round(each.segment.end, 3),
            "text": each.text,
            "tokens": list(each.segment.tokens),
            "temperature": temperature,
            "avg_logprob": each.logprob,
            "compression_ratio": compression_ratio(each.text),
            "no_speech_prob": each.no_speech,
        }
        for number, each in enumerate(said)
    ]


def compression_ratio(text: str) -> float:
    """Return the size of a text in UTF-8 divided by its size after zlib compression, which is large for a text that
    repeats itself; 0 for an empty text.
    """
    data = text.encode()
    return len(data) / len(zlib.compress(data)) if data else 0.0


def _clock(seconds: float, mark: str) -> str:
    """Return seconds as HH:MM:SS, then `mark` and three digits of milliseconds, rounded."""
    whole = round(seconds * 1000)
    minutes, milliseconds = divmod(whole, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{milliseconds // 1000:02}{mark}{milliseconds % 1000:03}"


def _line(text: str) -> str:
    """Return a text on one line, with single spaces, and with "->" in place of the arrow "-->", which would begin
    another cue.
    """
    return " ".join(text.split()).replace("-->", "->")
