"""Turns: no owner holds the places of the others, whatever it has in line; what is given up leaves the line."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import Future
from contextvars import copy_context
from typing import Any

import pytest

import jaxengine.turns
from jaxengine.turns import OWNER, FairThreads, Turns, share_of
from tests.tables import each_row


@each_row(
    ("waiting", "ended", "started"),
    [
        # One owner has half of four places; the next that comes finds one at once.
        ("aaaa", "", "aa"),
        ("aaaab", "", "aba"),
        ("aaaabbbb", "", "abab"),
        # Whoever has had a turn goes behind the others.
        ("aaabbbc", "", "abca"),
        ("aaaaaabc", "aa", "aabcaa"),
        # Nobody is named: nobody has to be waited for.
        ("------", "", "----"),
    ],
)
def test_who_starts(waiting, ended, started):
    turns: Turns[int] = Turns(4)
    order = ""

    def start() -> None:
        nonlocal order
        while (turn := turns.start()) is not None:
            order += turn[0] or "-"

    if ended:  # those that ran before the others came
        turns.push("a", -1)
        turns.push("a", -2)
        start()
    for number, owner in enumerate(waiting[2:] if ended else waiting):
        turns.push(None if owner == "-" else owner, number)
    start()
    for owner in ended:
        turns.end(owner)
    start()
    assert order == started


def test_pairs_take_turns_by_their_first_names():
    """A client with many addresses has half of the places, as has one address of many clients."""
    turns: Turns[int] = Turns(4)

    def started(*waiting: tuple[str | None, str | None]) -> list[Any]:
        for owner in waiting:
            turns.push(owner, 0)
        return [turn[0] for turn in iter(turns.start, None)]

    many = [("a", f"silent {number}") for number in range(6)]
    assert started(*many) == many[:2] and started(("b", "x")) == [("b", "x")] and started(("c", "y")) == [("c", "y")]
    for owner in (*many[:2], ("b", "x"), ("c", "y")):
        turns.end(owner)
    assert started() == many[2:4] and started(("b", "z"), ("c", "z"), ("d", "z")) == [("b", "z"), ("c", "z")]
    for owner in (many[2], ("b", "z")):
        turns.end(owner)
    # Without a name of the client, addresses alone share the places.
    assert started((None, "z"), (None, "p"), (None, "q")) == [many[4], ("d", "z")]
    for owner in (many[3], many[4], ("c", "z"), ("d", "z")):
        turns.end(owner)
    assert started() == [(None, "z"), many[5], (None, "p"), (None, "q")] and turns.start() is None
    for owner in ((None, "z"), many[5], (None, "p"), (None, "q")):
        turns.end(owner)
    assert not turns._queues and not turns._running and not turns._num_running


def test_many_addresses_of_one_client_slow_nobody_down(monkeypatch):
    turns: Turns[int] = Turns(4)
    for number in range(300):
        turns.push(("a", f"silent {number}"), number)
    turns.push(("b", "x"), 0)
    looked, names = [], jaxengine.turns._names
    monkeypatch.setattr(jaxengine.turns, "_names", lambda owner: looked.append(owner) or names(owner))
    assert [turn[0] for turn in iter(turns.start, None)] == [("a", "silent 0"), ("b", "x"), ("a", "silent 1")]
    turns.end(("b", "x"))
    assert turns.start() is None and len(looked) < 20


@each_row(("owner", "total", "share"), [(None, 8, 8), ("a", 8, 4), ("a", 3, 1), ("a", 1, 1), (None, 1, 1)])
def test_shares(owner, total, share):
    assert share_of(owner, total) == share


def test_every_item_gets_its_turn_in_its_owners_order():
    turns: Turns[int] = Turns(3)
    for number in range(60):
        turns.push("abc"[number % 7 % 3], number)
    running, seen = [], []
    while (turn := turns.start()) or running:
        if turn is None:
            turns.end(running.pop(0))
            continue
        running.append(turn[0])
        seen.append(turn)
        assert len(running) <= 3
    for owner in "abc":
        own = [number for each, number in seen if each == owner]
        assert own == sorted(own)
    assert len(seen) == 60 and turns.start() is None
    assert not turns._running and not turns._queues


def submitted(threads: FairThreads, owner: str | None, function, *args) -> Future:
    def submit() -> Future:
        OWNER.set(owner)
        return threads.submit(function, *args)

    return copy_context().run(submit)


def test_one_owner_cannot_hold_all_threads():
    threads, go, names = FairThreads(4, "some"), threading.Event(), []
    slow = [submitted(threads, "a", go.wait, 60) for _ in range(20)]
    quick = submitted(threads, "b", lambda: names.append((OWNER.get(), threading.current_thread().name[:4])))
    quick.result(60)
    assert names == [("b", "some")]
    assert sum(each.running() for each in slow) <= 2
    go.set()
    assert all(each.result(60) for each in slow)


def test_what_is_cancelled_is_dropped_with_all_it_holds():
    threads, go = FairThreads(2, "some"), threading.Event()
    running = submitted(threads, "a", go.wait, 60)
    waiting = [submitted(threads, "a", bytes, 100) for _ in range(50)]
    kept = waiting.pop()
    assert all(each.cancel() for each in waiting)
    assert len(threads._turns._queues["a"]["a"]) == 1
    go.set()
    assert kept.result(60) == bytes(100) and running.result(60)
    assert not threads._turns._queues


def test_a_call_sees_that_the_process_is_ending():
    """It need not be waited for for ever."""
    wait = "\n    while threading.main_thread().is_alive(): time.sleep(0.001)"
    submits = "threads = FairThreads(1, 'some')\nfor _ in range(3): threads.submit(call)"
    code = f"import threading, time\nfrom jaxengine.turns import FairThreads\ndef call():{wait}\n{submits}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_call_without_a_thread_fails_and_holds_no_place(monkeypatch):
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threads = FairThreads(1, "some")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="start new thread"):
                submitted(threads, "a", divmod, 7, 2).result(60)
    assert submitted(threads, "a", divmod, 7, 2).result(60) == (3, 1)


def test_an_error_is_the_callers_and_ends_the_turn():
    threads = FairThreads(1, "some")
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            submitted(threads, "a", divmod, 1, 0).result(60)
    assert submitted(threads, "b", divmod, 7, 2).result(60) == (3, 1)
