"""Grammars that are new: what came of them is remembered, and whoever sends slow ones waits for himself.

Processes are stopped where a test needs a slow grammar, so that it is slow on every machine.
"""

from __future__ import annotations

import os
import signal
import time

import llguidance
import pytest

from jaxengine.grammars import trials as trials_module
from jaxengine.grammars.trials import GrammarTrials, Verdict
from jaxengine.grammars.worker_process import Start

BYTES = llguidance.LLTokenizer("byte")
START = Start("byte", BYTES.vocab_size, -(-BYTES.vocab_size // 32), [BYTES.eos_token])
LIMIT = 60.0  # seconds that no test should need


@pytest.fixture
def trials():
    made = GrammarTrials(START)
    yield made
    for trial in made._trials:
        os.kill(trial.process.process.pid, signal.SIGCONT)
    made.shutdown()


def verdicts_of(trials, *keys) -> dict[int, Verdict]:
    found: dict[int, Verdict] = {}
    end = time.monotonic() + LIMIT
    while not found.keys() >= set(keys):
        assert time.monotonic() < end, f"no verdicts of {set(keys) - found.keys()}"
        found |= {verdict.key: verdict for verdict in trials.take()}
        time.sleep(0.005)
    return found


def stop_next_trial_of(trials, monkeypatch, client):
    """Stops the process that gets this client's next grammar, before it does; gives the list that the trial enters."""
    stopped: list = []
    begin = trials._try

    def begin_stopped(name, candidate):
        if stopped or name != client:
            begin(name, candidate)
            return
        idle = [trial for trial in trials._trials if trial.candidate is None]
        for trial in idle:
            os.kill(trial.process.process.pid, signal.SIGSTOP)
        begin(name, candidate)
        stopped.extend(trial for trial in trials._trials if trial.candidate is candidate)
        for trial in idle:
            if trial not in stopped:
                os.kill(trial.process.process.pid, signal.SIGCONT)
        os.kill(stopped[0].process.process.pid, signal.SIGSTOP)
        stopped[0].is_ready = True  # as if it had begun, where it is new

    monkeypatch.setattr(trials, "_try", begin_stopped)
    return stopped


def warm(trials, client="warm", key=1000):
    trials.add(key, client, "regex", f"w{key}", {})
    return verdicts_of(trials, key)[key]


def test_what_came_of_a_grammar_is_remembered(trials):
    trials.add(1, "a", "regex", "[a-z]+", {})
    trials.add(2, "a", "regex", "(", {})
    trials.add(3, "b", "regex", "[a-z]+", {})
    found = verdicts_of(trials, 1, 2, 3)
    assert found[1].reason is None and found[3].reason is None
    assert found[2].reason
    processes = trials.processes
    for key, text in ((4, "[a-z]+"), (5, "(")):
        trials.add(key, "c", "regex", text, {})
    assert trials.has_news and trials.processes == processes  # nobody was asked again
    again = {verdict.key: verdict.reason for verdict in trials.take()}
    assert again == {4: None, 5: found[2].reason}
    assert not trials.awaits


def test_slow_grammars_of_one_client_delay_no_other(trials, monkeypatch):
    warm(trials)
    stop = stop_next_trial_of(trials, monkeypatch, "slow")
    for key in range(20):
        trials.add(key, "slow", "regex", f"s{key}", {})
    (stopped,) = stop
    for key in range(100, 103):
        trials.add(key, "other", "regex", f"o{key}", {})
        assert verdicts_of(trials, key)[key].reason is None
    assert stopped in trials._trials and stopped.candidate is not None  # all along
    # Too slow: it fails, it is remembered, and the next of the same client has its turn.
    monkeypatch.setattr(trials_module, "TRIAL_SECONDS", 0.0)
    failed = stopped.candidate.keys[0]
    trials.take()
    monkeypatch.undo()
    trials.add(50, "third", "regex", f"s{failed}", {})
    found = verdicts_of(trials, 50, *(key for key in range(20) if key != failed))
    assert found[50].reason == "took more than 0 s to compile"
    assert all(found[key].reason is None for key in range(20) if key != failed)


def test_clients_take_turns(trials, monkeypatch):
    monkeypatch.setattr(trials_module, "NUM_PROCESSES", 1)
    for client in ("a", "b", "c"):
        for number in range(3):
            trials.add(ord(client) * 10 + number, client, "regex", f"{client}{number}", {})
    order: list[str] = []
    end = time.monotonic() + LIMIT
    while len(order) < 9:
        assert time.monotonic() < end
        order += [chr(verdict.key // 10) for verdict in trials.take()]
    # The first began while nobody else was there.
    assert order == ["a", "a", "b", "c", "a", "b", "c", "b", "c"]
    assert not trials.awaits


def test_a_failure_is_forgiven_after_a_while(trials, monkeypatch):
    trials.add(1, "a", "regex", "(", {})
    verdicts_of(trials, 1)
    monkeypatch.setattr(trials_module, "_FORGIVEN_SECONDS", -1.0)
    trials.add(2, "a", "regex", "(", {})
    assert not trials.has_news and verdicts_of(trials, 2)[2].reason  # tried again, and no better


def test_what_is_remembered_is_bounded(trials, monkeypatch):
    monkeypatch.setattr(trials_module, "_MAX_REMEMBERED", 3)
    for key in range(6):
        trials.add(key, "a", "regex", f"k{key}", {})
    verdicts_of(trials, *range(6))
    assert len(trials._known) == 3


def test_a_grammar_that_ends_its_process_twice_fails(trials, monkeypatch):
    warm(trials)
    stopped = stop_next_trial_of(trials, monkeypatch, "a")
    trials.add(1, "a", "regex", "aaa", {})
    for number in range(2):
        (trial,) = stopped
        trial.process.process.kill()
        trial.process.process.wait(LIMIT)
        if number == 0:
            monkeypatch.undo()
            stopped = stop_next_trial_of(trials, monkeypatch, "a")
            end = time.monotonic() + LIMIT
            while not stopped:
                assert time.monotonic() < end and not trials.take()
    assert verdicts_of(trials, 1)[1].reason == "twice ended the process that worked on it"


def test_who_leaves_hears_nothing(trials):
    warm(trials)
    trials.add(1, "a", "regex", "first", {})
    trials.add(2, "a", "regex", "second", {})
    trials.drop(1)
    trials.drop(2)
    trials.add(3, "a", "regex", "third", {})
    assert verdicts_of(trials, 3).keys() == {3}
    assert not trials.awaits
