"""Trials of grammars that have not been compiled yet, separate from grammars in use, with clients served in turn.

A grammar that takes too long is killed together with its process, which holds no other grammar, and its verdict is
recorded, so that the next request with it is refused, or served, at once. There are two processes, and a client gets
only one at a time: a client that sends many slow grammars delays only itself.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxengine.grammars import worker_process as worker
from jaxengine.grammars.worker_process import Close, Failed, Open, Ready, Start
from jaxengine.workers.process import WorkerProcess

logger = logging.getLogger(__name__)

TRIAL_SECONDS = 5.0  # to compile a grammar, with its first mask
NUM_PROCESSES = 2
_START_SECONDS = 60.0
_MAX_REMEMBERED = 4096
# Refusals expire, since the machine may only have been busy.
_FORGIVEN_SECONDS = 600.0


class Verdict(NamedTuple):
    """Result of the trial of a key's grammar.

    Attributes:
      key: as given to `GrammarTrials.add`.
      reason: why the grammar cannot be used; None if it can.
      seconds: time that its compilation took.
    """

    key: int
    reason: str | None
    seconds: float


@dataclass
class _Candidate:
    """Grammar to be tried.

    Attributes:
      digest: SHA-256 of the grammar.
      message: the order to the process that compiles it.
      keys: the client's keys that wait for the verdict.
      attempts: number of processes that ended while they compiled it.
    """

    digest: bytes
    message: Open
    keys: list[int]
    attempts: int = 0


@dataclass
class _Trial:
    """Process for trials, and the grammar that it tries.

    Attributes:
      process: the process.
      since: time.monotonic seconds at which the trial began, or the process's start until it is ready.
      is_ready: whether it has read the tokenizer.
      client: client whose grammar it tries.
      candidate: the grammar that it tries; None when it is idle.
    """

    process: WorkerProcess
    since: float
    is_ready: bool = False
    client: str = ""
    candidate: _Candidate | None = None


@dataclass
class GrammarTrials:
    """Queue of grammars to be tried (compiled within limits) in separate processes before they are used.

    Attributes:
      start: first message to a process for trials, the same as to the process that serves grammars.
    """

    start: Start
    # By digest of a grammar: (reason, seconds) of its verdict, and time.monotonic of the verdict.
    _known: OrderedDict[bytes, tuple[str | None, float, float]] = field(default_factory=OrderedDict)
    # Waiting grammars by client, in the order of the clients' turns.
    _waiting: OrderedDict[str, deque[_Candidate]] = field(default_factory=OrderedDict)
    _trials: list[_Trial] = field(default_factory=list)
    _verdicts: list[Verdict] = field(default_factory=list)

    @property
    def awaits(self) -> bool:
        """Whether a verdict is due, or known and not taken."""
        return bool(self._verdicts or self._waiting) or any(trial.candidate for trial in self._trials)

    @property
    def has_news(self) -> bool:
        """Whether `take` would return something now."""
        return bool(self._verdicts)

    @property
    def processes(self) -> list[WorkerProcess]:
        """Processes that are trying a grammar now."""
        return [trial.process for trial in self._trials if trial.candidate]

    def add(self, key: int, client: str, kind: str, text: str, options: Mapping[str, Any]) -> None:
        """Queue a grammar for trial in the client's turn, without waiting; `take` returns the verdict, at once if it is
        known.

        Equal grammars of a client that wait are tried once. key: chosen by the caller, used once. kind, text, options:
        as in worker_process.compile_grammar.
        """
        digest = hashlib.sha256(repr((kind, text, sorted(options.items()))).encode("utf-8", "surrogatepass")).digest()
        if self._judge([key], digest):
            return
        candidates = self._waiting.setdefault(client, deque())
        for candidate in candidates:
            if candidate.digest == digest:
                candidate.keys.append(key)
                return
        candidates.append(_Candidate(digest, Open(0, kind, text, dict(options), []), [key]))
        self._begin()

    def drop(self, key: int) -> None:
        """Remove a key with its verdict; a trial that runs only for it continues to its end."""
        for candidates in self._waiting.values():
            for candidate in candidates:
                if key in candidate.keys:
                    candidate.keys.remove(key)
        for trial in self._trials:
            if trial.candidate and key in trial.candidate.keys:
                trial.candidate.keys.remove(key)
        self._verdicts = [verdict for verdict in self._verdicts if verdict.key != key]

    def take(self) -> list[Verdict]:
        """Return the verdicts that have become known since the last call, and begin the next trials; does not wait."""
        for trial in list(self._trials):
            self._look_after(trial)
        self._begin()
        verdicts, self._verdicts = self._verdicts, []
        return verdicts

    def shutdown(self) -> None:
        """Kill the processes and remove every key; verdicts on grammars are kept."""
        for trial in self._trials:
            trial.process.kill()
        self._trials.clear()
        self._waiting.clear()
        self._verdicts.clear()

    def _begin(self) -> None:
        """Begin the next trials, one per client, until all processes are busy or no client without a running trial
        waits.

        A grammar whose verdict has become known in the meantime gets it without a trial, and one without keys is
        dropped.
        """
        while True:
            busy = {trial.client for trial in self._trials if trial.candidate}
            client = next((each for each in self._waiting if each not in busy), None)
            if client is None or len(busy) == NUM_PROCESSES:
                return
            candidates = self._waiting.pop(client)
            candidate = candidates.popleft()
            if candidates:  # behind all other clients
                self._waiting[client] = candidates
            if candidate.keys and not self._judge(candidate.keys, candidate.digest):
                self._try(client, candidate)

    def _try(self, client: str, candidate: _Candidate) -> None:
        """Begin to compile a candidate's grammar for `client`, which must have no running trial, in an idle process or
        a new one.
        """
        trial = next((each for each in self._trials if each.candidate is None), None)
        if trial is None:
            trial = _Trial(WorkerProcess(worker.__name__, worker.Answer), time.monotonic())
            trial.process.send(self.start)
            self._trials.append(trial)
        trial.client, trial.candidate = client, candidate
        if trial.is_ready:
            trial.since = time.monotonic()
        trial.process.send(candidate.message)

    def _look_after(self, trial: _Trial) -> None:
        """Handle the messages of a trial's process, and record the verdict on its grammar.

        Ends a process that takes too long to start or to compile, and an idle one if no grammar waits and there is
        another process.
        """
        messages, alive = trial.process.receive()
        candidate, now = trial.candidate, time.monotonic()
        for message in messages:
            if isinstance(message, Ready):
                trial.is_ready, trial.since = True, now
            elif candidate is not None and trial.is_ready:
                trial.candidate = None
                trial.process.send(Close(candidate.message.key))
                reason = message.reason if isinstance(message, Failed) else None
                self._learn(candidate, reason, now - trial.since)
        if not alive:
            self._lose(trial)
        elif trial.candidate and now - trial.since > (TRIAL_SECONDS if trial.is_ready else _START_SECONDS):
            self._lose(trial, f"took more than {TRIAL_SECONDS:g} s to compile")
        elif trial.candidate is None and not self._waiting and any(other is not trial for other in self._trials):
            self._end(trial)

    def _lose(self, trial: _Trial, reason: str | None = None) -> None:
        """End a trial whose process has ended by itself (reason None), or is to be killed for `reason`, and decide
        about its grammar.

        The grammar is refused for the reason, or if a process has ended at it for the second time, which is logged;
        otherwise it is tried again. If the process has never been ready, the verdict is that the grammar can be used.
        """
        self._end(trial)
        candidate = trial.candidate
        if candidate is None:
            return
        if not trial.is_ready:  # the process that serves grammars does not start either, and reports why
            self._verdicts += [Verdict(key, None, 0.0) for key in candidate.keys]
            return
        candidate.attempts += 1
        if reason is None and candidate.attempts < 2:
            self._waiting.setdefault(trial.client, deque()).appendleft(candidate)
            return
        reason = reason or "twice ended the process that worked on it"
        logger.warning("a grammar %s", reason)
        self._learn(candidate, reason, time.monotonic() - trial.since)

    def _end(self, trial: _Trial) -> None:
        """Kill a trial's process, and remove the trial."""
        trial.process.kill()
        self._trials.remove(trial)

    def _learn(self, candidate: _Candidate, reason: str | None, seconds: float) -> None:
        """Record the verdict on a candidate's grammar, and report it to the keys that wait for it.

        reason: why it cannot be used; None if it can. seconds: time that it took. Of more than _MAX_REMEMBERED verdicts
        the least recently used is removed.
        """
        self._known[candidate.digest] = reason, seconds, time.monotonic()
        if len(self._known) > _MAX_REMEMBERED:
            self._known.popitem(last=False)
        self._verdicts += [Verdict(key, reason, seconds) for key in candidate.keys]

    def _judge(self, keys: list[int], digest: bytes) -> bool:
        """Report the verdict on the grammar `digest` to these keys if it is known; return whether it is. A refusal
        older than _FORGIVEN_SECONDS is removed and counts as unknown.
        """
        if digest not in self._known:
            return False
        reason, seconds, when = self._known[digest]
        if reason is not None and time.monotonic() - when > _FORGIVEN_SECONDS:
            del self._known[digest]
            return False
        self._known.move_to_end(digest)
        self._verdicts += [Verdict(key, reason, seconds) for key in keys]
        return True
