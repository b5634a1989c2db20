"""Ctrl-C ends the command with status 130 and soon, wherever it comes: in our code, while XLA compiles, in a server."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import TINY_CHECKPOINT

ROOT = Path(__file__).resolve().parents[3]


def start(code, *arguments):
    """A process that can be interrupted also where the tests run in the background."""
    code = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n{code}"
    command = [sys.executable, "-u", "-c", code, *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def interrupt(process):
    """(exit status, seconds that it took, output)"""
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    return process.returncode, time.monotonic() - begin, output


@pytest.mark.parametrize("num_stored", [pytest.param(1, marks=pytest.mark.thorough("an interrupt as later ones")), 6])
def test_ctrl_c_while_steps_are_compiled(tmp_path, num_stored):
    """With an empty cache, in the first program and after a few."""
    options = ("--compile-cache-dir", str(tmp_path / "cache"), "--dtype", "float32", "--skip-tokenizer-init")
    process = start(
        "from jaxengine.commands.process import main; main()",
        *("generate", "--model", str(TINY_CHECKPOINT), "--max-model-len", "64", *options, "hello"),
    )
    while len(list(tmp_path.glob("cache/*.xla"))) < num_stored:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    status, seconds, output = interrupt(process)
    assert status == 130, output
    assert seconds < 30 and "Traceback" not in output


def test_ctrl_c_during_the_imports():
    code = """
import signal, sys
from jaxengine.commands import process

class Finder:
    def find_spec(name, *_):
        if name == "jaxengine.commands.cli":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Finder)
process.main()
"""
    output, _ = (process := start(code)).communicate(timeout=60)
    assert (process.returncode, output) == (130, "")


# A call that no signal interrupts, as a compilation is one.
DEAF = """
import ctypes
from jaxengine.commands import process

def run():
    mutex = ctypes.create_string_buffer(256)  # a pthread_mutex_t, unlocked
    libc = ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)
    print("begun")
    libc.pthread_mutex_lock(mutex)  # for ever, through any signal

process.run_command = run
process.main()
"""


def test_ctrl_c_reaches_a_process_whose_main_thread_is_in_c():
    process = start(DEAF)
    assert process.stdout.readline() == "begun\n"
    time.sleep(0.5)
    status, seconds, _ = interrupt(process)
    assert status == 130 and seconds < 30


LOST = """
import gc, time, weakref
from jaxengine.commands import process

class Gone: pass

def run():
    gone = Gone()
    reference = weakref.ref(gone, lambda _: time.sleep(60))
    print("begun")
    del gone  # nothing is raised out of its callback

process.run_command = run
process.main()
"""


def test_ctrl_c_in_a_callback_that_cannot_raise():
    process = start(LOST)
    assert process.stdout.readline() == "begun\n"
    time.sleep(0.5)
    status, seconds, _ = interrupt(process)
    assert status == 130 and seconds < 30


OWN = """
import signal, time
from jaxengine.commands import process

def run():
    told = []
    signal.signal(signal.SIGINT, lambda *_: told.append(print("drains")))
    print("begun")
    end = time.monotonic() + 60
    while not told and time.monotonic() < end:
        time.sleep(0.1)
    return 7

process.run_command = run
process.main()
"""


def test_a_command_with_its_own_handler_is_left_to_it():
    process = start(OWN)
    assert process.stdout.readline() == "begun\n"
    status, _, output = interrupt(process)
    assert status == 7 and output == "drains\n"
