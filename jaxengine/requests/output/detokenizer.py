"""Incremental detokenization: complete characters only, cut at stop strings.

Owns the text of one sequence, independent of sampling and stop token ids.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from jaxengine.requests.params.stop_after import AnswerStops, StopAfter
from jaxengine.requests.params.stop_strings import StopStrings
from jaxengine.tokens.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
# A character has at most four bytes: bytes that are incomplete four tokens later stay so.
MAX_HELD_TOKENS = 4


class IncrementalDetokenizer:
    """The growing text of a sequence.

    Args:
      skip_special_tokens: leave out special tokens.
      spaces_between_special_tokens: False joins adjacent added tokens without the space that some decoders insert; no
        effect for byte-level vocabularies.
      stop: strings that end the text when they appear in it. They may span tokens.
      stop_after: the words around reasoning; stop strings within reasoning do not count.
      include_stop_str_in_output: the text ends after the stop string instead of before it.
      prompt_tail_ids: last ids of the prompt, which determine in some decoders whether the text begins with a space.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        stop: tuple[str, ...] = (),
        stop_after: StopAfter | None = None,
        include_stop_str_in_output: bool = False,
        prompt_tail_ids: Sequence[int] = (),
    ):
        if tokenizer.is_byte_level:
            self._decoder = _ByteDecoder(tokenizer, skip_special_tokens)
        else:
            join = not skip_special_tokens and not spaces_between_special_tokens
            self._decoder = _WindowDecoder(tokenizer, skip_special_tokens, join, prompt_tail_ids)
        self._stop: StopStrings | AnswerStops | None = None
        if stop:
            stops = StopStrings(stop, keep=include_stop_str_in_output)
            self._stop = stops if stop_after is None else AnswerStops(stops, stop_after)
        self._settled: list[str] = []
        self._num_taken = 0

    def append(self, token_ids: Sequence[int], *, check_stop: bool = True) -> str | None:
        """Add token ids; return the stop string that has ended the text, now or before, or None.

        check_stop=False: stop strings that end within this text are ignored (min_tokens); one may begin in it. Text
        after a stop string is dropped.
        """
        return self._take(self._decoder.push(token_ids), check_stop)

    def finish(self) -> str | None:
        """End the text: release held text, an incomplete character as U+FFFD. Returns the stop string that has ended
        the text, or None.
        """
        self._take(self._decoder.flush(), True)
        if self._stop is None:
            return None
        self._settle(self._stop.release())
        return self._stop.met

    @property
    def text(self) -> str:
        """Settled text so far, which later ids do not change. Text that may still become a stop string is not part of
        it.
        """
        if len(self._settled) > 1:
            taken = self._num_taken
            head, tail = "".join(self._settled[:taken]), "".join(self._settled[taken:])
            self._settled = [part for part in (head, tail) if part]
            self._num_taken = 1 if head else 0
        return "".join(self._settled)

    def delta(self) -> str:
        """Return the part of `text` that was added since the last call, and mark it as returned."""
        new = "".join(self._settled[self._num_taken :])
        self._num_taken = len(self._settled)
        return new

    def _take(self, text: str, check_stop: bool) -> str | None:
        """Search decoded text for stop strings, and append what is settled to the text; return the stop string that has
        ended the text, or None. check_stop: whether a stop string that ends in this text counts.
        """
        if self._stop is None:
            self._settle(text)
            return None
        self._settle(self._stop.feed(text, counts=check_stop))
        return self._stop.met

    def _settle(self, text: str) -> None:
        """Add text to the settled text."""
        if text:
            self._settled.append(text)


class _ByteDecoder:
    """Decoder for byte-level vocabularies: ids are bytes, and only incomplete characters are held back."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool):
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.all_special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the complete characters that these ids add, and hold the bytes of an incomplete one. Invalid bytes
        become U+FFFD; skipped ids add nothing.
        """
        skipped = self._skipped
        return self._utf8.decode(b"".join([self._token_bytes(i) for i in token_ids if i not in skipped]))

    def flush(self) -> str:
        """Return the held bytes of an incomplete character as U+FFFD; "" if there are none."""
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    """Decoder for vocabularies that are not byte-level: new text is the text of a window of ids with the new id, minus
    the text of the window without it.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, join_added: bool, tail_ids: Sequence[int]):
        """Begin with the window `tail_ids`, the prompt's last ids. skip_special_tokens: special tokens add nothing.
        join_added: adjacent added tokens get no space between them.
        """
        self._tokenizer = tokenizer
        self._skipped = tokenizer.all_special_ids if skip_special_tokens else frozenset()
        self._joined = tokenizer.added_token_ids if join_added else frozenset()
        self._window = [token_id for token_id in tail_ids if token_id not in self._skipped]
        # The window's first ids have been emitted already; they affect the text of the following ones.
        self._num_known = len(self._window)

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these ids add and that later ones do not change. Skipped ids add nothing; ids that end
        within a character are held.
        """
        return "".join([self._push(token_id) for token_id in token_ids if token_id not in self._skipped])

    def flush(self) -> str:
        """Return the text of the held ids, and shorten the window to these ids."""
        text = self._decode(self._window)[len(self._decode(self._window[: self._num_known])) :]
        self._window, self._num_known = self._window[self._num_known :], len(self._window) - self._num_known
        return text

    def _push(self, token_id: int) -> str:
        """Return the text that one id adds with the ids held before it. "" while the text ends within a character, but
        never with MAX_HELD_TOKENS ids held.
        """
        if token_id in self._joined and self._window and self._window[-1] in self._joined:
            held = self.flush()
            self._window, self._num_known = [token_id], 1
            return held + (self._tokenizer.backend.id_to_token(token_id) or "")
        self._window.append(token_id)
        num_held = len(self._window) - self._num_known
        if num_held < MAX_HELD_TOKENS and self._decode(self._window).endswith(REPLACEMENT):
            return ""
        return self.flush()

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
