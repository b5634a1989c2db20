"""An engine proves its kernels before it serves: planted faults are found, replaced, and not looked for again."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxengine import LLM, SamplingParams
from jaxengine.config.base.platforms import PLATFORMS
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.models.kernel_proof import Trial, Verdict
from jaxengine.pallas_kernels.registry import attention_rows
from jaxengine.runner.executables import verdicts
from jaxengine.runner.executables.verdicts import Verdicts
from jaxengine.runner.recorded_engine import about_engine
from jaxengine.runner.start import devices, kernel_proof
from jaxengine.runner.start.ends import ends_heard
from jaxengine.runner.start.open import proven
from tests.jaxengine.runner.planted_kernels import plant

PROMPTS = [{"prompt_token_ids": list(range(3, 3 + length))} for length in (1, 9, 40)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


class Killed(BaseException):
    """In place of a kernel that ends the process, or waits until somebody does."""


def tokens_of(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, PARAMS)]


def use(patch, judge) -> None:
    """Let `judge(call)` make all verdicts; nothing is compiled."""
    patch.setattr(kernel_proof, "lowered_trial", lambda call, **_: Trial(call))
    patch.setattr(kernel_proof, "verdict_of", lambda trial, **_: judge(trial.call))


@pytest.fixture
def served(tiny_options, tmp_path, caplog):
    """Start an engine, return its tokens, the rows that it does not use, and the errors logged meanwhile."""

    def serve(**options):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            llm = LLM(**{**tiny_options, "compile_cache_dir": str(tmp_path), **options})
        try:
            unused = llm._core.engine.runner.stages[0].executables.unused
            return tokens_of(llm), unused, [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
        finally:
            llm.shutdown()

    return serve


def test_planted_faults_are_replaced_and_remembered(served, make_llm, monkeypatch):
    want = tokens_of(make_llm())
    plant(monkeypatch, attention="wrong scale", update="does not compile", matmul="NaN at one shape")
    tokens, unused, errors = served()
    assert tokens == want
    replaced = {op for op, _ in unused}
    assert replaced == {"ragged_paged_attention", "kv_cache_update", "matmul"}, errors
    for op, what in (
        ("ragged_paged_attention", "differs by"),
        ("kv_cache_update", "does not compile: NotImplementedError: no lowering of this primitive"),
        ("matmul", "NaN"),
    ):
        (line,) = (each for each in errors if f"kernel of {op} " in each)
        assert what in line and "float32[" in line and "jaxengine report" in line, line
    # A warm start reads the verdicts: it traces, runs and compiles nothing.
    monkeypatch.setattr(kernel_proof, "lowered_trial", None)
    monkeypatch.setattr(kernel_proof, "recorded_calls", None)
    assert served() == (want, unused, [])


def test_attention_in_plain_xla_where_that_is_chosen(served, make_llm, monkeypatch):
    """Its kernel is neither proven nor run, with a proof and without; others are."""
    want = tokens_of(make_llm())
    with pytest.raises(ConfigError, match="attention_backend is 'PALLAS'; allowed: auto or XLA: cpu has no kernel"):
        served(attention_backend="PALLAS")
    plant(monkeypatch, attention="wrong scale", matmul="NaN at one shape")
    attention = {("ragged_paged_attention", "planted"), ("ragged_paged_attention", "native")}
    assert served(attention_backend="XLA", kernel_proof="off")[1] == attention
    tokens, unused, errors = served(attention_backend="XLA")
    assert tokens == want and unused == attention | {("matmul", "planted")}
    assert not any("ragged_paged_attention" in line for line in errors)
    monkeypatch.setattr(kernel_proof, "recorded_calls", None)  # a warm start looks for no calls
    assert served(attention_backend="XLA") == (want, unused, [])


def test_every_runner_leaves_out_attention_kernels_where_that_is_chosen(make_llm, monkeypatch):
    """Also one that measures or plans only; and what a record says ran is what ran."""
    ops = "ragged_paged_attention", "selected_attention", "block_attention"
    for backend, rows in (("XLA", attention_rows("gpu")), ("auto", set()), ("PALLAS", set())):
        assert {op for op, _ in rows} == (set(ops) if rows else set())
        caches = [SimpleNamespace(unused=frozenset()) for _ in range(2)]
        runner: Any = SimpleNamespace(caches=caches, programs=SimpleNamespace(platform="gpu"))
        config: Any = SimpleNamespace(attention_backend=backend)
        assert devices._choosing_kernels(runner, config) is runner
        assert [each.unused for each in caches] == [rows, rows]
    runner = make_llm()._core.engine.runner
    plant(monkeypatch)
    assert about_engine(runner)["kernels"]["ragged_paged_attention"] == "planted"
    monkeypatch.setattr(runner.last.executables, "unused", frozenset({("ragged_paged_attention", "planted")}))
    assert about_engine(runner)["kernels"]["ragged_paged_attention"] == "attention.xla.attend"


def test_a_proof_that_was_cut_off_twice_has_failed(make_llm, monkeypatch, tmp_path, caplog):
    stages = make_llm()._core.engine.runner.stages
    monkeypatch.setattr(stages[0].executables, "unused", frozenset())  # put back afterwards
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    began: list[str] = []

    def judge(call):
        began.append(call.op)
        if call.op == "kv_cache_update":
            raise Killed
        return Verdict()

    def prove() -> frozenset:
        return kernel_proof.prove_kernels(stages, "quick", str(tmp_path), lambda done, total, what: None)

    with monkeypatch.context() as patched:
        plant(patched)
        use(patched, judge)
        for start in (1, 2):
            own = f"{verdicts._boot()} {ended.pid} {start}"
            patched.setattr(verdicts, "_own", lambda: own)  # noqa: B023
            with pytest.raises(Killed):
                prove()
    plant(monkeypatch)
    use(monkeypatch, judge)
    assert prove() == {("kv_cache_update", "planted")}
    (line,) = (each.getMessage() for each in caplog.records if each.levelname == "ERROR")
    assert "kernel of kv_cache_update is replaced" in line and "ended the process" in line
    assert began.count("kv_cache_update") == 2, "a kernel that was cut off is tried once more"
    assert began.count("ragged_paged_attention") == 2 and prove() == {("kv_cache_update", "planted")}


def test_a_compiler_that_ends_the_process_is_found_one_by_one(make_llm, monkeypatch, tmp_path):
    """While several programs are compiled nobody can tell whose compilation it was: the next start can."""
    stages = make_llm()._core.engine.runner.stages
    monkeypatch.setattr(stages[0].executables, "unused", frozenset())
    monkeypatch.setattr(kernel_proof.os, "cpu_count", lambda: 2)
    plant(monkeypatch)
    threads: list[set[str]] = []

    def start(fault: BaseException | None) -> frozenset:
        threads.append(set())

        def compiled(trial, *_):
            threads[-1].add(threading.current_thread().name.partition("_")[0])
            if fault is not None and trial.call.op == "kv_cache_update":
                raise fault
            return trial

        monkeypatch.setattr(kernel_proof, "compiled_trial", compiled)
        own = f"{verdicts._boot()} {1 << 22} {len(threads)}"  # no process has this number
        monkeypatch.setattr(verdicts, "_own", lambda: own)
        return kernel_proof.prove_kernels(stages, "quick", str(tmp_path), lambda done, total, what: None)

    use(monkeypatch, lambda call: Verdict())
    for fault in (Killed(), Killed()):
        with pytest.raises(Killed):
            start(fault)
    assert start(None) == frozenset()
    pool, alone = {"kernel-proof"}, {threading.current_thread().name.partition("_")[0]}
    assert threads == [pool, alone, alone]
    (found,) = verdicts.all_verdicts(str(tmp_path))
    assert not found["running"] and {text.partition(" ")[0] for text in found["verdicts"]} == {
        *("ragged_paged_attention", "kv_cache_update", "matmul")
    }


def test_somebody_in_a_hurry_says_nothing_of_a_kernel(make_llm, monkeypatch, tmp_path):
    stages = make_llm()._core.engine.runner.stages
    monkeypatch.setattr(stages[0].executables, "unused", frozenset())

    def judge(call):
        raise KeyboardInterrupt

    plant(monkeypatch)
    use(monkeypatch, judge)
    with pytest.raises(KeyboardInterrupt):
        kernel_proof.prove_kernels(stages, "full", str(tmp_path), lambda done, total, what: None)
    (found,) = verdicts.all_verdicts(str(tmp_path))
    assert not found["running"] and not found["verdicts"]


def test_a_process_at_work_is_not_one_that_was_cut_off(tmp_path, monkeypatch):
    environment = ["digest", "jax"]
    found = Verdicts(str(tmp_path), environment)
    found.begin("a")
    monkeypatch.setattr(verdicts, "_own", lambda: "another boot 1 2")
    assert Verdicts(str(tmp_path), environment).unfinished() == []
    found.begin("b")
    assert found.unfinished() == ["b"]
    found.engine("engine", ["b"])
    found.end("b", Verdict()._asdict())
    assert found.unfinished() == [] and found.calls_of("engine") == ["b"]
    assert Verdicts(str(tmp_path), ["digest", "other jax"]).calls_of("engine") is None
    assert [each["environment"] for each in verdicts.all_verdicts(str(tmp_path))] == [["jax"]]


def test_nothing_is_proven_without_kernels_or_when_off(make_llm, monkeypatch):
    runner = make_llm()._core.engine.runner
    monkeypatch.setitem(sys.modules, "jaxengine.runner.start.kernel_proof", None)  # an import of it fails
    assert proven(runner.stages, runner.config, PLATFORMS["cpu"], False) == frozenset()
    plant(monkeypatch)
    off = dataclasses.replace(runner.config, kernel_proof="off")
    assert proven(runner.stages, off, PLATFORMS["cpu"], False) == frozenset()
    with pytest.raises(ImportError):
        proven(runner.stages, runner.config, PLATFORMS["cpu"], False)


def test_option_is_checked():
    with pytest.raises(ConfigError, match="kernel_proof is 'slow'; allowed: quick, full, off"):
        EngineConfig(kernel_proof="slow")


def test_a_proof_that_took_long_is_not_tried_again(tmp_path):
    found = Verdicts(str(tmp_path), ["digest", "jax"])
    found.begin("a")
    found.takes_long("a")
    assert found.unfinished() == ["a", "a"]
    found.forget("a")
    assert found.unfinished() == []


def test_a_note_that_was_left_costs_later_starts_nothing(tmp_path):
    """As a timer writes it whose proof has just ended."""
    found = Verdicts(str(tmp_path), ["digest", "jax"])
    found.engine("engine", ["a"])
    found.begin("a")
    found.end("a", Verdict()._asdict())
    found.takes_long("a")
    later = Verdicts(str(tmp_path), ["digest", "jax"])
    assert later.unfinished() == [] and later.calls_of("engine") == ["a"]


def test_a_warning_is_written_before_the_verdict(monkeypatch, tmp_path):
    """The timer's thread is at work when the proof ends."""
    began, waits = threading.Event(), threading.Event()

    class Slow(Verdicts):
        def takes_long(self, call):
            began.set()
            waits.wait(60)
            super().takes_long(call)

    def judge(call):
        assert began.wait(60)
        threading.Timer(0.05, waits.set).start()
        return Verdict()

    monkeypatch.setattr(kernel_proof, "_LONG", 0.01)
    use(monkeypatch, judge)
    found, call = Slow(str(tmp_path), ["digest", "jax"]), kernel_proof.Call("op", "cpu", "kind", (), {})
    proof = kernel_proof._Proof(found, False, False, jax.devices()[0], lambda *_: None)
    kernel_proof._judge_all([call], proof)
    (file,) = verdicts.all_verdicts(str(tmp_path))
    assert file["running"] == {} and list(file["verdicts"]) == [kernel_proof._text(call, proof)]


ENDS = """
import ctypes, os, signal, sys, threading, time
from jaxengine.runner.start.ends import ends_heard
try:
    with ends_heard(lambda: print("heard", flush=True)):
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        if sys.argv[1] == "python":
            time.sleep(20)
        libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        while True:  # the second time for ever, in C code, in which no handler of Python's runs
            libc.pthread_mutex_lock(mutex)
finally:
    print("cleaned", flush=True)
"""


def test_sigterm_ends_a_proof(monkeypatch, tmp_path, make_llm):
    for where, said in (("python", ["cleaned", "heard"]), ("c", ["heard"])):
        done = subprocess.run([sys.executable, "-c", ENDS, where], capture_output=True, text=True, timeout=60)
        assert (done.returncode, sorted(done.stdout.split())) == (128 + signal.SIGTERM, said), done.stderr
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        ended = threading.Event()
        with ends_heard(ended.set):
            os.kill(os.getpid(), signal.SIGTERM)
            assert ended.wait(60)
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    stages = make_llm()._core.engine.runner.stages
    monkeypatch.setattr(stages[0].executables, "unused", frozenset())

    def judge(call):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    plant(monkeypatch)
    use(monkeypatch, judge)
    try:
        with pytest.raises(SystemExit):
            kernel_proof.prove_kernels(stages, "full", str(tmp_path), lambda done, total, what: None)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
    (found,) = verdicts.all_verdicts(str(tmp_path))
    assert not found["running"] and not found["verdicts"]
