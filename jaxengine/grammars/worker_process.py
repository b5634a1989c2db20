"""Process that compiles grammars and computes token masks with llguidance. It may be killed at any time.

It is started by `grammar_worker` and by `trials`, and ends with its parent, whatever it is computing. One thread reads
messages, one compiles grammars one at a time and computes their first masks, and the main thread computes all other
masks.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import sys
import threading
import time
from collections import OrderedDict
from typing import Any

import llguidance
import msgspec

from jaxengine.grammars.tag_rules import lark_of
from jaxengine.workers.connection import Connection

# Resources that a matcher may use before llguidance gives up. Those not given here have the library's defaults.
_LIMITS = llguidance.LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
_MAX_MEMORY_BYTES = 8 << 30
# Number of compiled grammars that are kept for later requests with the same grammar.
_MAX_CACHED = 16
_MAX_REASON = 500
# A mask looks ahead, where only one token or a draft may follow, for at most so many tokens and so many seconds of the
# thread's processor time in succession, which is far less than a step waits. It does not look ahead after a mask that
# took _QUICK_SECONDS.
_MAX_AHEAD, _AHEAD_SECONDS, _QUICK_SECONDS = 32, 0.01, 0.001
# Phrases in the library's messages, and clearer ones. The second is for a schema that only refers to itself.
_PHRASES = {
    "Enable 'coerce_one_of' option to approximate oneOf with anyOf": "anyOf, or lenient, is",
    "NoExtensionBias": "no text can fit it",
    "\n<non-verbose/>": "",
}
# Two niceness values of a thread that compiles, and the seconds after which it gets the second one. A hostile grammar
# must not slow down a model that runs on the same cores; an ordinary one takes milliseconds.
_NICE, _NICE_IF_LONG, _LONG_SECONDS = 10, 19, 0.1


class Start(msgspec.Struct, tag=True, array_like=True):
    """First message to the process.

    Attributes:
      tokenizer: text of a tokenizer.json.
      vocab_size: number of the model's tokens.
      num_words: number of int32 (little-endian) in a mask, with a bit for each token.
      eos_token_ids: tokens that may end a text.
      looks_ahead: whether masks come with the tokens that must follow.
    """

    tokenizer: str
    vocab_size: int
    num_words: int
    eos_token_ids: list[int]
    looks_ahead: bool = False


class Open(msgspec.Struct, tag=True, array_like=True):
    """Order to compile a grammar, take `tokens`, and answer with the mask of the next token.

    Attributes:
      key: the sequence's key in later messages and answers.
      kind, text, options: arguments of `compile_grammar`.
      tokens: tokens to take before the mask is computed.
      trace: tokens of which the text will consist; the answer is Failed if the grammar does not allow them.
    """

    key: int
    kind: str
    text: str
    options: dict[str, Any]
    tokens: list[int]
    trace: list[int] = []


class Advance(msgspec.Struct, tag=True, array_like=True):
    """Order to take more tokens, and to answer with the mask of the next token.

    Attributes:
      key: the sequence's key.
      tokens: the sequence's tokens since the last message.
      guess: proposed drafts that may follow these tokens.
    """

    key: int
    tokens: list[int]
    guess: list[int] = []


class Close(msgspec.Struct, tag=True, array_like=True):
    """Order to end the sequence `key`. It is the only message that is not answered."""

    key: int


class Ready(msgspec.Struct, tag=True, array_like=True):
    """Answer that the tokenizer has been read."""


class Mask(msgspec.Struct, tag=True, array_like=True):
    """Answer with the tokens that a sequence may take next.

    Attributes:
      key: the sequence's key.
      opened: whether this answers an Open.
      num_tokens: number of the sequence's tokens before `forced`.
      forced: tokens that must follow, each the only one that is allowed at its position.
      words: mask of the tokens that are allowed after `forced`; empty if the grammar can only end there, with no forced
        tokens.
      guessed: if `forced` are the first proposed drafts, the masks after the further drafts that are allowed.
      seconds: time that it took.
    """

    key: int
    opened: bool
    num_tokens: int
    forced: list[int]
    words: bytes
    guessed: list[bytes]
    seconds: float


class Failed(msgspec.Struct, tag=True, array_like=True):
    """Answer that the sequence `key` is closed because its grammar cannot be used, or has failed, for this `reason`.
    opened: whether this answers an Open.
    """

    key: int
    opened: bool
    reason: str


Order = Start | Open | Advance | Close
Answer = Ready | Mask | Failed


class GrammarError(ValueError):
    """Error for a grammar that cannot be used; the message says why."""


def compile_grammar(kind: str, text: str, options: Any, tokenizer: llguidance.LLTokenizer | None = None) -> str:
    """Return a constraint of StructuredOutputsParams in llguidance's notation.

    kind: what `text` is: a schema for "json", a regular expression for "regex", a JSON list of strings for "choice",
    rules as JSON for "structural_tag" (jaxengine.grammars.tag_rules), and Lark or GBNF for "grammar" and any other
    kind. options: llguidance's options for schemas, not used by other kinds. tokenizer: the model's, only needed for
    "structural_tag". Raises ValueError for a "choice" that is not JSON and for GBNF that cannot be parsed, and
    TypeError for a "choice" that is not a list of strings. Other errors are only found by llguidance's matcher.
    """
    if kind == "json":
        return llguidance.LLMatcher.grammar_from_json_schema(text, overrides=options)
    if kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(text)
    if kind == "choice":
        return llguidance.LLMatcher.grammar_from_regex("|".join(map(re.escape, json.loads(text))))
    if kind == "structural_tag":
        assert tokenizer is not None
        return llguidance.grammar_from("lark", lark_of(text, tokenizer))
    # llguidance takes a grammar for GBNF unless a line begins with `start:`, and Lark's may begin with `?start:`.
    return llguidance.grammar_from("grammar" if "::=" in text else "lark", text)


class Matchers:
    """Matchers of the open sequences, by key. One thread calls `open` and another `advance`; any thread may call
    `expect` and `close`.
    """

    def __init__(self, start: Start):
        """Read the tokenizer of `start`, with all of its tokens if these are more than vocab_size. Ends that it lacks,
        which a model with a larger vocabulary may have, are ignored. Raises llguidance's error for a tokenizer that
        cannot be used, also if it has none of the ends.
        """
        try:
            self._tokenizer = llguidance.LLTokenizer(
                start.tokenizer, n_vocab=start.vocab_size, eos_token=start.eos_token_ids
            )
        except ValueError:  # a tokenizer that has more tokens than the model, or lacks one of the ends
            size = llguidance.LLTokenizer(start.tokenizer).vocab_size
            ends = [token_id for token_id in start.eos_token_ids if token_id < size]
            self._tokenizer = llguidance.LLTokenizer(
                start.tokenizer, n_vocab=max(size, start.vocab_size), eos_token=ends
            )
        self._num_bytes = 4 * start.num_words
        self._inside = (1 << start.vocab_size) - 1
        self._ends = sum(1 << token_id for token_id in start.eos_token_ids)
        self._looks_ahead, self._ahead_seconds = start.looks_ahead, 0.0
        self._cached: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._expected: set[int] = set()
        self._matchers: dict[int, tuple[llguidance.LLMatcher, int]] = {}
        self._lock = threading.Lock()

    def expect(self, key: int) -> None:
        """Register a sequence that will be opened, unless it is closed before."""
        with self._lock:
            self._expected.add(key)

    def close(self, key: int) -> None:
        """Remove a sequence that is open or expected. Unknown keys are ignored."""
        with self._lock:
            self._expected.discard(key)
            self._matchers.pop(key, None)

    def open(self, message: Open) -> Mask | Failed:
        """Compile a sequence's grammar, unless it is cached, and return the first mask, after message.tokens. Return
        Failed and close the sequence if the grammar cannot be used or does not allow the trace or the tokens, or if the
        sequence has been closed. Raises TypeError for a "choice" that is not a list of strings.
        """
        start = time.perf_counter()
        try:
            with self._lock:
                if message.key not in self._expected:
                    raise GrammarError("closed")
            matcher = self._compile(message).deep_copy()
            _check_trace(matcher, message.trace)
            words = self._next(matcher, message.tokens)
        except (ValueError, RecursionError) as error:
            return self._fail(message.key, True, error)
        with self._lock:
            if message.key in self._expected:
                self._matchers[message.key] = matcher, len(message.tokens)
        return Mask(message.key, True, len(message.tokens), [], words, [], time.perf_counter() - start)

    def advance(self, message: Advance, others_wait: bool = False) -> Mask | Failed:
        """Take message.tokens and return the next mask; with looks_ahead, and if this took less than _QUICK_SECONDS,
        also the tokens that must follow and the masks along message.guess. Return Failed and close the sequence if the
        grammar does not allow the tokens or the sequence has been closed.

        others_wait: whether other messages were waiting when the last one was answered. Then only what is left of the
        time for looking ahead is used.
        """
        start, begin = time.perf_counter(), time.thread_time()
        if not others_wait:
            self._ahead_seconds = _AHEAD_SECONDS
        try:
            with self._lock:
                if message.key not in self._matchers:
                    raise GrammarError("closed")
                matcher, num_tokens = self._matchers[message.key]
                num_tokens += len(message.tokens)
                self._matchers[message.key] = matcher, num_tokens
            forced, words, guessed = list[int](), self._next(matcher, message.tokens), list[bytes]()
            if self._looks_ahead and time.thread_time() - begin < _QUICK_SECONDS:
                forced, words, guessed = self._look_ahead(matcher, words, message.guess)
        except ValueError as error:
            return self._fail(message.key, False, error)
        return Mask(message.key, False, num_tokens, forced, words, guessed, time.perf_counter() - start)

    def _fail(self, key: int, opened: bool, error: Exception) -> Failed:
        """Close a sequence, and return a Failed with at most _MAX_REASON characters of the error's text, in which the
        phrases of _PHRASES are replaced. opened: whether it answers an Open.
        """
        self.close(key)
        reason = str(error) or type(error).__name__
        for theirs, ours in _PHRASES.items():
            reason = reason.replace(theirs, ours)
        return Failed(key, opened, reason[:_MAX_REASON])

    def _compile(self, message: Open) -> llguidance.LLMatcher:
        """Return the matcher of the message's grammar in its initial state, which the caller must copy.

        The grammar is compiled unless it is among the last _MAX_CACHED ones. Raises ValueError for a grammar that
        cannot be used, TypeError for a "choice" that is not a list of strings.
        """
        name = repr((message.kind, message.text, message.options))
        matcher = self._cached.pop(name, None)
        if matcher is None:
            grammar = compile_grammar(message.kind, message.text, message.options, self._tokenizer)
            matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
            self._next(matcher, [])  # all copies share the tables that the first mask builds
        self._cached[name] = matcher
        if len(self._cached) > _MAX_CACHED:
            self._cached.popitem(last=False)
        return matcher

    def _next(self, matcher: llguidance.LLMatcher, tokens: list[int]) -> bytes:
        """Advance the matcher by `tokens` and return the mask after them, with a bit for each token id in little-endian
        bytes; b"" if the text can only end. Raises GrammarError if the grammar does not allow these tokens, or if no
        token may follow.
        """
        if tokens:
            matcher.consume_tokens(tokens)
        if not matcher.is_error() and matcher.is_stopped():
            return b""
        allowed = 0 if matcher.is_error() else int.from_bytes(matcher.compute_bitmask(), "little") & self._inside
        if matcher.is_error():
            raise GrammarError(matcher.get_error())
        if not allowed:
            raise GrammarError("no token of the vocabulary continues the text")
        return allowed.to_bytes(self._num_bytes, "little") if allowed & ~self._ends else b""

    def _look_ahead(
        self, matcher: llguidance.LLMatcher, words: bytes, guess: list[int]
    ) -> tuple[list[int], bytes, list[bytes]]:
        """Return the tokens that must follow, each the only one that is allowed at its position; the mask after them;
        and the masks after further proposed drafts.

        words: the mask at the matcher's position. guess: drafts that may follow. It looks at most _MAX_AHEAD tokens
        ahead, and no longer than the remaining time, which is reduced. The matcher keeps its position; a failure ahead
        is only reported when the matcher gets there.
        """
        run, masks, num_forced = list[int](), [words], 0
        matcher_ahead, begin = None, time.thread_time()
        while len(run) < _MAX_AHEAD and time.thread_time() - begin < self._ahead_seconds:
            index = len(run)
            token = _only(masks[-1]) if index == num_forced else None
            is_forced = token is not None
            if token is None:
                if index >= len(guess) or run != guess[:index] or not _allows(masks[-1], guess[index]):
                    break
                token = guess[index]
            try:
                matcher_ahead = matcher_ahead or matcher.deep_copy()
                words = self._next(matcher_ahead, [token])
            except ValueError:
                break
            if not (words or is_forced):  # the text may end there, which the sampler must choose
                break
            run.append(token)
            masks.append(words)
            num_forced += is_forced
        self._ahead_seconds -= time.thread_time() - begin  # failed attempts count as well
        return run[:num_forced], masks[num_forced], masks[num_forced + 1 :]


def _check_trace(matcher: llguidance.LLMatcher, trace: list[int]) -> None:
    """Raise GrammarError if a matcher in its initial state does not allow a text that begins with the tokens `trace`.
    The matcher is not changed.
    """
    if trace and (count := matcher.deep_copy().try_consume_tokens(trace)) < len(trace):
        problem = f"it does not allow token {trace[count]} of trace_decode_token_ids after {count} tokens of its text"
        raise GrammarError(problem)


def _only(words: bytes) -> int | None:
    """Return the id of the only token that a mask (little-endian bits) allows; None if it allows several or none."""
    allowed = int.from_bytes(words, "little")
    return allowed.bit_length() - 1 if allowed and not allowed & (allowed - 1) else None


def _allows(words: bytes, token_id: int) -> bool:
    """Return whether the mask `words` (little-endian bits) allows token_id; False for a token beyond its end."""
    return token_id // 8 < len(words) and words[token_id // 8] >> token_id % 8 & 1 > 0


def _be_nice(thread: int, value: int) -> None:
    """Set the niceness of a thread, given by its native id, to `value` (19 is the lowest priority). Do nothing for a
    thread that has ended, and on other systems than Linux. Raises OSError if the system refuses.
    """
    if sys.platform == "linux":  # where each thread has its own priority
        with contextlib.suppress(ProcessLookupError):  # the thread has just ended
            os.setpriority(os.PRIO_PROCESS, thread, value)


def main() -> None:
    """Serve the parent process until the connection ends, at which the process exits with status 0; it exits with
    status 1 after an error in a thread.

    The first message is a Start, which is answered with Ready. If its tokenizer cannot be used, send Failed with key -1
    and return.
    """
    connection = Connection(Order, _MAX_MEMORY_BYTES)
    compilations: queue.SimpleQueue[Open] = queue.SimpleQueue()
    masks: queue.SimpleQueue[Advance] = queue.SimpleQueue()
    messages = connection.receive()
    try:
        matchers = Matchers(next(messages))
    except Exception as error:
        connection.send(Failed(-1, True, str(error)[:_MAX_REASON]))
        return
    connection.send(Ready())

    def read() -> None:
        """Pass the parent's messages to the threads that answer them. The process exits with status 0 when the
        connection ends, 1 after an error.
        """
        try:
            for message in messages:
                if isinstance(message, Open):
                    matchers.expect(message.key)
                    compilations.put(message)
                elif isinstance(message, Advance):
                    masks.put(message)
                else:
                    matchers.close(message.key)
        finally:
            os._exit(1)

    def compile_one(message: Open) -> None:
        """Compile the message's grammar and send its first mask or failure, with low priority. An error ends the
        process.
        """
        try:
            _be_nice(threading.get_native_id(), _NICE)
            connection.send(matchers.open(message))
        except BaseException:
            os._exit(1)

    def compile_all() -> None:
        """Compile the grammars in the queue, one at a time, until the process ends. One that takes a long time
        continues with a still lower priority. If the loop itself fails, the process exits with status 1.
        """
        try:
            while True:
                # Each gets a new thread, because a thread cannot raise its priority again.
                thread = threading.Thread(target=compile_one, args=(compilations.get(),), daemon=True)
                thread.start()
                thread.join(_LONG_SECONDS)
                if thread.is_alive() and thread.native_id is not None:
                    _be_nice(thread.native_id, _NICE_IF_LONG)
                    thread.join()
        finally:
            os._exit(1)

    for target in (read, compile_all):
        threading.Thread(target=target, daemon=True).start()
    others_wait = False
    while True:
        connection.send(matchers.advance(masks.get(), others_wait))
        others_wait = not masks.empty()
