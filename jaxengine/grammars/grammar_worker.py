"""Client of the process that computes token masks. The engine only waits for the process in `wait` and `wait_for`.

A process that takes too long or dies is replaced. The sequence on which it worked fails; the grammars of all others are
compiled again and advanced by their recorded tokens.
"""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from jaxengine.grammars import worker_process as worker
from jaxengine.grammars.worker_process import Advance, Close, Failed, Open, Ready, Start
from jaxengine.workers.process import WorkerProcess

logger = logging.getLogger(__name__)

# Seconds that the process may take to start, to compile a grammar and compute its first mask, and for another mask.
START_SECONDS = 60.0
COMPILE_SECONDS = 10.0  # twice the limit of trials
MASK_SECONDS = 1.0
# Once so many processes in succession have ended before they were ready, all sequences fail.
_MAX_STARTS = 2


class NextMask(NamedTuple):
    """Next token mask of a sequence.

    Attributes:
      key: the sequence's key, as given to `GrammarWorker.open`.
      words: mask of the tokens that may follow the forced ones, i32[num_words] with a bit for each token; None if the
        text can only end.
      seconds: time that the mask took; None for one that came with a compilation.
      forced: tokens that must come first, each the only one that is allowed at its position.
      guessed: (draft, mask of the tokens that may follow it) for the drafts of `advance` after the forced tokens, as
        far as they are allowed.
    """

    key: int
    words: np.ndarray | None
    seconds: float | None
    forced: tuple[int, ...] = ()
    guessed: tuple[tuple[int, np.ndarray], ...] = ()


class GrammarFailure(NamedTuple):
    """Failure of a sequence, which gets no more masks.

    Attributes:
      key: the sequence's key, as given to `GrammarWorker.open`.
      compiled: whether its grammar was compiled, so that it had a first mask.
      reason: why it failed.
    """

    key: int
    compiled: bool
    reason: str


@dataclass
class _Sequence:
    """State of a sequence with a grammar.

    Attributes:
      kind, text, options: the grammar, see worker_process.compile_grammar.
      tokens: tokens of the sequence so far.
      trace: tokens of which the sequence will consist, if they are known.
      opened: whether the current process has compiled its grammar.
      compiled: whether any process has compiled it.
      awaited: whether a mask is due.
      guess: drafts along which masks are due as well.
      suspect: whether a process has ended while it worked on this sequence.
    """

    kind: str
    text: str
    options: dict[str, Any]
    tokens: list[int] = field(default_factory=list)
    trace: Sequence[int] = ()
    opened: bool = False
    compiled: bool = False
    awaited: bool = True
    guess: Sequence[int] = ()
    suspect: bool = False


class GrammarWorker:
    """Grammars of running sequences, by keys that the caller chooses and uses only once.

    The process is started for the first sequence. It works on one compilation and one mask at a time, and on either in
    order of arrival.

    Attributes:
      start: first message to the process.
    """

    def __init__(
        self,
        tokenizer: str,
        vocab_size: int,
        num_words: int,
        eos_token_ids: Sequence[int],
        *,
        looks_ahead: bool = False,
    ):
        """Store the arguments of the process without starting it.

        tokenizer: text of a tokenizer.json. vocab_size: number of the model's tokens. num_words: number of int32 in a
        mask, with a bit for each token. eos_token_ids: ids that end a text; those outside of the vocabulary are
        ignored, and if none is left, every sequence fails. looks_ahead: whether masks come with the tokens that must
        follow.
        """
        inside = [token_id for token_id in eos_token_ids if token_id < vocab_size]
        self.start = Start(tokenizer, vocab_size, num_words, inside, looks_ahead)
        self._has_end = bool(inside)
        self._sequences: dict[int, _Sequence] = {}
        self._taken: list[NextMask | GrammarFailure] = []
        self._process: WorkerProcess | None = None
        self._num_lost_starts = 0

    @property
    def process(self) -> WorkerProcess | None:
        """Process that computes masks, for callers that wait for its messages; None if there is none. It changes when
        the process is replaced.
        """
        return self._process

    @property
    def has_news(self) -> bool:
        """Whether `take` would return something now."""
        return bool(self._taken)

    @property
    def awaits(self) -> bool:
        """Whether a mask or failure is due, or has arrived and not been taken."""
        return bool(self._taken) or any(each.awaited for each in self._sequences.values())

    @property
    def is_idle(self) -> bool:
        """Whether `awaits` is False and the process does not work for closed sequences either."""
        return not self.awaits and (self._process is None or not (self._compiling or self._masking))

    def launch(self) -> None:
        """Start the process if there is none, so that the first sequence waits less. Do nothing if there is no
        end-of-sequence token.
        """
        if self._process is None and self._has_end:
            self._launch()

    def open(self, key: int, kind: str, text: str, options: Mapping[str, Any], trace: Sequence[int] = ()) -> None:
        """Start a sequence, and the process if there is none, without waiting.

        `take` later returns the sequence's first mask or a failure; always a failure, without a process, for a model
        without an end-of-sequence token. key: one that was never used. kind ("json",
        "regex", "choice", "grammar", "structural_tag"), text, options: see worker_process.compile_grammar. trace:
        tokens of which the sequence will consist; it fails if its grammar does not allow them.
        """
        self._sequences[key] = _Sequence(kind, text, dict(options), trace=trace)
        if not self._has_end:
            self._fail(key, "the model has no end-of-sequence token")
        elif self._process is None:
            self._launch()
        else:
            self._open(key)

    def advance(self, key: int, *token_ids: int, guess: Sequence[int] = ()) -> None:
        """Append tokens to a sequence whose mask has arrived, without waiting. `take` later returns its next mask.

        guess: drafts that may follow these tokens, along which masks are computed as well. Raises KeyError for a
        sequence that was closed or has failed.
        """
        sequence = self._sequences[key]
        sequence.tokens += token_ids
        sequence.awaited, sequence.guess = True, guess
        if sequence.opened:
            self._send_advance(key, list(token_ids))

    def close(self, key: int) -> None:
        """End a sequence; its masks and failures are dropped from now on. Unknown keys are ignored."""
        if self._sequences.pop(key, None) is not None and self._process is not None:
            self._send(Close(key))

    def wait(self, seconds: float) -> None:
        """Wait, at most `seconds`, until `take` has something to return and no mask is due except those of sequences
        whose grammar is being compiled. Return at once if there is no process.
        """
        end = time.monotonic() + seconds
        while not self._taken or any(each.awaited and each.compiled for each in self._sequences.values()):
            left = end - time.monotonic()
            if left <= 0 or self._process is None:
                return
            self._select(self._process, left)

    def wait_for(self, keys: Collection[int], seconds: float) -> None:
        """Wait, at most `seconds`, until no mask is due for any of these sequences. Return at once if there is no
        process.
        """
        end = time.monotonic() + seconds
        while any(key in self._sequences and self._sequences[key].awaited for key in keys):
            left = end - time.monotonic()
            if left <= 0 or self._process is None:
                return
            self._select(self._process, left)

    def take(self) -> list[NextMask | GrammarFailure]:
        """Return the masks and failures that have arrived since the last call, in order of arrival, without waiting.

        Also sends pending messages, and replaces a process that has ended or takes too long.
        """
        self._pump()
        taken, self._taken = self._taken, []
        return taken

    def shutdown(self) -> None:
        """Kill the process and remove all sequences."""
        self._sequences.clear()
        self._kill()

    def _select(self, process: WorkerProcess, seconds: float) -> None:
        """Wait, at most `seconds`, until the process can be read from or written to, and handle its messages."""
        process.wait(seconds)
        self._pump()

    def _launch(self) -> None:
        """Start a process, send it the start message, and open all sequences in it."""
        self._process = WorkerProcess(worker.__name__, worker.Answer)
        self._process.send(self.start)
        self._compiling: collections.deque[int] = collections.deque()
        self._masking: collections.deque[int] = collections.deque()
        self._is_ready, self._refusal = False, ""
        self._launched = self._compiling_since = self._masking_since = time.monotonic()
        for key in self._sequences:
            self._open(key)

    def _open(self, key: int) -> None:
        """Order the process to compile a sequence's grammar and to take its tokens so far."""
        sequence = self._sequences[key]
        sequence.opened = False
        if not self._compiling:
            self._compiling_since = time.monotonic()
        self._compiling.append(key)
        tokens, trace = list(sequence.tokens), list(sequence.trace)
        self._send(Open(key, sequence.kind, sequence.text, sequence.options, tokens, trace))

    def _send_advance(self, key: int, tokens: list[int]) -> None:
        """Order the process to take tokens, and to compute the masks after them and along the drafts."""
        if not self._masking:
            self._masking_since = time.monotonic()
        self._masking.append(key)
        self._send(Advance(key, tokens, list(self._sequences[key].guess)))

    def _send(self, message: worker.Order) -> None:
        """Send a message to the process, which must exist."""
        assert self._process is not None
        self._process.send(message)

    def _pump(self) -> None:
        """Handle the process's messages and send pending ones, without waiting. Do nothing if there is no process.

        A process that has ended, or that takes too long to compile a grammar or to compute a mask, is replaced; the
        reason for its end is logged if it is known. One that takes too long to start is killed without replacement, and
        all sequences fail.
        """
        if self._process is None:
            return
        messages, alive = self._process.receive()
        for message in messages:
            self._handle(message)
        if alive:
            self._check()
            return
        if self._process.error is not None:
            logger.warning("the process that computes masks has failed: %s", self._process.error)
        self._lose()

    def _handle(self, message: worker.Answer) -> None:
        """Handle one answer of the process: Ready, a mask or a failure. Masks that are due and failures are stored for
        `take`; a failure with key -1 is recorded as that of the tokenizer.

        Answers for closed sequences are dropped. If a grammar was compiled again, the tokens that were recorded
        in the meantime are sent now.
        """
        now = time.monotonic()
        if isinstance(message, Ready):
            self._is_ready, self._num_lost_starts, self._compiling_since = True, 0, now
            return
        if isinstance(message, Failed) and message.key < 0:
            self._refusal = f"the tokenizer cannot be used: {message.reason}"
            return
        if message.opened:
            self._compiling.popleft()
            self._compiling_since = now
        else:
            self._masking.popleft()
            self._masking_since = now
        sequence = self._sequences.get(message.key)
        if sequence is None:  # closed in the meantime
            return
        if isinstance(message, Failed):
            del self._sequences[message.key]
            self._taken.append(GrammarFailure(message.key, sequence.compiled, message.reason))
            return
        sequence.opened = sequence.compiled = True
        if message.num_tokens < len(sequence.tokens):  # compiled again, and tokens were appended in the meantime
            self._send_advance(message.key, sequence.tokens[message.num_tokens :])
        elif sequence.awaited:
            sequence.awaited = False
            words = np.frombuffer(message.words, "<i4") if message.words else None
            seconds, forced = None if message.opened else message.seconds, tuple(message.forced)
            masks = [np.frombuffer(each, "<i4") for each in message.guessed]
            guessed = tuple(zip(sequence.guess[len(forced) :], masks, strict=False))
            self._taken.append(NextMask(message.key, words, seconds, forced, guessed))

    def _check(self) -> None:
        """Replace a process that takes too long to compile a grammar or to compute a mask, and fail the sequence it
        works on.

        A process that does not start in time is killed without replacement, and all sequences fail. Must be called
        after all messages of the process have been read.
        """
        now = time.monotonic()
        if not self._is_ready:
            if now - self._launched > START_SECONDS:
                self._give_up(f"the process that computes masks did not start within {START_SECONDS:g} s")
        elif self._compiling and now - self._compiling_since > COMPILE_SECONDS:
            self._replace({self._compiling[0]: f"took more than {COMPILE_SECONDS:g} s to compile"})
        elif self._masking and now - self._masking_since > MASK_SECONDS:
            self._replace({self._masking[0]: f"took more than {MASK_SECONDS:g} s for the mask of one token"})

    def _lose(self) -> None:
        """Replace a process that has ended by itself.

        If this is the second time that a process has ended while it worked on a sequence, that sequence fails. All
        sequences fail if _MAX_STARTS processes in succession end before they are ready, or if the tokenizer cannot be
        used. An end before the process was ready is logged otherwise.
        """
        if not self._is_ready:
            self._num_lost_starts += 1
            if self._refusal or self._num_lost_starts == _MAX_STARTS:
                self._give_up(self._refusal or "the process that computes masks does not start")
            else:
                logger.warning("the process that computes masks ended before it was ready; another one is started")
                self._replace({})
            return
        working = [key for keys in (self._compiling, self._masking) for key in [*keys][:1] if key in self._sequences]
        guilty = [key for key in working if self._sequences[key].suspect]
        for key in working:
            self._sequences[key].suspect = True
        self._replace(dict.fromkeys(guilty, "twice ended the process that worked on it"))

    def _replace(self, guilty: dict[int, str]) -> None:
        """Kill the process, log and fail the sequences of `guilty` (key -> reason), and start another process if any
        sequence is left. Keys of closed sequences are ignored.
        """
        self._kill()
        for key, reason in guilty.items():
            logger.warning("a grammar %s", reason)
            if key in self._sequences:
                self._fail(key, reason)
        if self._sequences:
            self._launch()

    def _give_up(self, reason: str) -> None:
        """Kill the process and fail all sequences for this reason. The next `open` or `launch` starts a new one."""
        self._kill()
        self._num_lost_starts = 0
        for key in list(self._sequences):
            self._fail(key, reason)

    def _fail(self, key: int, reason: str) -> None:
        """Remove a sequence, and store its failure for `take`. Raises KeyError for an unknown key."""
        self._taken.append(GrammarFailure(key, self._sequences.pop(key).compiled, reason))

    def _kill(self) -> None:
        """Kill the process, if there is one, and forget it: the next task starts another one."""
        if self._process is not None:
            self._process.kill()
        self._process = None
