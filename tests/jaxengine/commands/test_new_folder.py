"""What a command writes is there whole or not at all, however the process is told to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from jaxengine.commands import convert
from jaxengine.commands.cli import main
from jaxengine.commands.new_folder import new_folder
from jaxengine.models.params.errors import ModelFileError
from tests.conftest import TINY_CHECKPOINT


def test_it_has_its_name_at_the_end(tmp_path):
    with new_folder(tmp_path / "deep" / "out") as part:
        (part / "file").write_text("whole")
        assert not (tmp_path / "deep" / "out").exists()
        with (
            pytest.raises(ModelFileError, match="out.part: exists, .*; remove it if no process is writing it"),
            new_folder(tmp_path / "deep" / "out"),
        ):
            pass
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("file")] == ["deep/out/file"]


@pytest.mark.parametrize(("number", "status"), [("SIGINT", None), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_takes_away_what_was_begun(tmp_path, number, status):
    number = getattr(signal, number)
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt if status is None else SystemExit) as ended, new_folder(tmp_path / "out"):
        # The process that ends where Ctrl-C is not heard at once leaves this to us.
        assert signal.getsignal(number) is not before
        os.kill(os.getpid(), number)
    assert getattr(ended.value, "code", None) == status
    assert not list(tmp_path.iterdir()) and signal.getsignal(number) is before


def test_a_signal_that_is_ignored_stays_so(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
    try:
        with new_folder(tmp_path / "out"):
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (tmp_path / "out").is_dir()


def test_nothing_is_left_of_a_model_that_was_not_written(tmp_path, monkeypatch, capsys):
    def interrupted(folder, *_, **__):
        (folder / "weights").mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(convert, "save_checkpoint", interrupted)
    assert main(["convert", str(TINY_CHECKPOINT), str(tmp_path / "out"), "--disable-log-stats"]) == 130
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_one_message(tmp_path):
    """tensorstore's error for it is no OSError, and orbax's threads would log it, each with its traceback."""
    # Modules compiled under the limit would be kept cut off, for every later process to stumble over.
    program = (
        "import resource, sys; sys.dont_write_bytecode = True;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, 1 << 14));"
        "from jaxengine.commands.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, "convert", str(TINY_CHECKPOINT), str(tmp_path / "out")]
    ended = subprocess.run([*command, "--disable-log-stats"], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    *before, last = ended.stderr.splitlines()
    assert last.startswith(f"jaxengine: error: {tmp_path / 'out.part'}: cannot be written: ValueError: ")
    assert not any("Traceback" in line or "ERROR" in line for line in before), before
    assert not list(tmp_path.iterdir())


def test_nothing_is_left_of_what_threads_write_after_a_failure(tmp_path):
    """As a library's that has more files under way when one of them fails."""

    def write_on(part: Path) -> None:
        for number in range(60):
            with suppress(OSError):  # while the folder is removed
                (part / "weights").mkdir(parents=True, exist_ok=True)
                (part / "weights" / str(number)).write_bytes(b"0")
            time.sleep(0.005)

    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(RuntimeError), new_folder(tmp_path / "out") as part:
            writing = pool.submit(write_on, part)
            raise RuntimeError
        writing.result()
    assert not list(tmp_path.iterdir())
