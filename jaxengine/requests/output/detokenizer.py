"""Incremental detokenisation of one sequence: its text grows by complete characters and is cut at stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from jaxengine.requests.params.stop_after import AnswerStops, StopAfter
from jaxengine.requests.params.stop_strings import StopStrings
from jaxengine.tokens.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
# A character has at most four bytes, so bytes that are still incomplete after four tokens will never be complete.
MAX_HELD_TOKENS = 4


class IncrementalDetokenizer:
    """Detokenizer of one sequence, whose text grows with each call of `append`.

    Args:
      skip_special_tokens: leave special tokens out of the text.
      spaces_between_special_tokens: False joins adjacent added tokens without the space that some decoders insert. It
        has no effect for byte-level vocabularies.
      stop: strings that end the text when they appear in it. They may span tokens.
      stop_after: the words around reasoning; stop strings within reasoning are ignored.
      include_stop_str_in_output: end the text after the stop string instead of before it.
      prompt_tail_ids: last ids of the prompt. With some decoders they determine whether the text begins with a space.
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
        """Add token ids. Return the stop string that has ended the text, now or earlier, or None.

        check_stop: False ignores stop strings that end within the text of these ids (min_tokens); one that begins in it
        still counts. Text after a stop string is dropped.
        """
        return self._take(self._decoder.push(token_ids), check_stop)

    def finish(self) -> str | None:
        """End the text: add the text that was held back, with an incomplete character as U+FFFD. Return the stop string
        that has ended the text, or None.
        """
        self._take(self._decoder.flush(), True)
        if self._stop is None:
            return None
        self._settle(self._stop.release())
        return self._stop.met

    @property
    def text(self) -> str:
        """Text so far that later ids cannot change. Text that may still become a stop string is not included."""
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
        """Search decoded text for stop strings, and append what later ids cannot change to the text. Return the stop
        string that has ended the text, or None. check_stop: whether a stop string that ends in this text counts.
        """
        if self._stop is None:
            self._settle(text)
            return None
        self._settle(self._stop.feed(text, counts=check_stop))
        return self._stop.met

    def _settle(self, text: str) -> None:
        """Append text that later ids cannot change."""
        if text:
            self._settled.append(text)


class _ByteDecoder:
    """Decoder for byte-level vocabularies: each id stands for bytes. Only incomplete characters are held back."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool):
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.all_special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the complete characters that these ids add, and hold back the bytes of an incomplete one. Invalid
        bytes become U+FFFD; skipped ids add nothing.
        """
        skipped = self._skipped
        return self._utf8.decode(b"".join([self._token_bytes(i) for i in token_ids if i not in skipped]))

    def flush(self) -> str:
        """Return U+FFFD for the bytes of an incomplete character that are held back; "" if there are none."""
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    """Decoder for vocabularies that are not byte-level. The text of a new id is the text of a window of ids that ends
    with it, minus the text of the window without it.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, join_added: bool, tail_ids: Sequence[int]):
        """Begin with the window `tail_ids`, the prompt's last ids. skip_special_tokens: leave special tokens out.
        join_added: put no space between adjacent added tokens.
        """
        self._tokenizer = tokenizer
        self._skipped = tokenizer.all_special_ids if skip_special_tokens else frozenset()
        self._joined = tokenizer.added_token_ids if join_added else frozenset()
        self._window = [token_id for token_id in tail_ids if token_id not in self._skipped]
        # Number of ids at the beginning of the window whose text has been returned. They affect the text after them.
        self._num_known = len(self._window)

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these ids add and that later ones cannot change. Skipped ids add nothing; ids whose text
        ends within a character are held back.
        """
        return "".join([self._push(token_id) for token_id in token_ids if token_id not in self._skipped])

    def flush(self) -> str:
        """Return the text of the ids that are held back, and shorten the window to these ids."""
        text = self._decode(self._window)[len(self._decode(self._window[: self._num_known])) :]
        self._window, self._num_known = self._window[self._num_known :], len(self._window) - self._num_known
        return text

    def _push(self, token_id: int) -> str:
        """Return the text of one id and of the ids held back before it. It is "" as long as the text ends within a
        character and fewer than MAX_HELD_TOKENS ids are held back.
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
