"""The folder of recorded steps: whole files or none, the last ones only, and errors that say what is wrong."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import deserialize

from jaxengine.records import step_file
from jaxengine.records.folder import ENGINE_FILE, LOCK_FILE, StepFolder, find_step, read_about, step_files
from jaxengine.records.step_file import RecordError, read_step, write_step
from jaxengine.records.step_pages import StepRow, pages_of
from tests.tables import each_row

ABOUT = {
    "versions": {"jax": "1"},
    "platform": "cpu",
    "device": "cpu",
    "options": {"seed": 0},
    "model": {"architecture": "A"},
}
ARRAYS = {
    "message": np.arange(6, dtype=np.int32).reshape(1, 6),
    "pages/data": np.arange(24, dtype=np.float32).reshape(3, 8),
    "half": np.array([1.5, -2], ml_dtypes.bfloat16),
    "codes": np.array([[1], [2]], ml_dtypes.float8_e4m3fn),
    "flags": np.array([True, False]),
    "nothing": np.zeros((0, 4), np.float32),
    "number": np.array(3, np.uint32),
}


def opened(path: Path, *, steps: int = 3, size: int = 1 << 20, **changes) -> StepFolder:
    return StepFolder(path, ABOUT | changes, steps, size)


def test_a_step_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "step-00000000.safetensors"
    write_step(path, {"step": 0}, ARRAYS)
    step = read_step(path)
    assert step.about == {"step": 0} and step.damaged() == []
    for name, array in ARRAYS.items():
        found = step.arrays[name]
        assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes()), name
    assert {name for name, _ in deserialize(path.read_bytes())} == set(ARRAYS)  # any safetensors library reads it


def test_a_changed_bit_is_found(tmp_path):
    path = tmp_path / "step"
    write_step(path, {}, ARRAYS)
    content = bytearray(path.read_bytes())
    for value, found in ((13.0, ("pages/data", [1])), (5, ("message", []))):
        wanted = (np.float32(value) if isinstance(value, float) else np.int32(value)).tobytes()
        at = content.rindex(wanted)
        content[at] ^= 1
        path.write_bytes(content)
        assert read_step(path).damaged() == [found]
        content[at] ^= 1


def test_the_oldest_steps_make_room(tmp_path):
    folder = opened(tmp_path / "a", steps=3)
    assert [folder.write({}, ARRAYS) for _ in range(5)] == [0, 1, 2, 3, 4]
    assert [*step_files(folder.path)] == [2, 3, 4]
    size = step_files(folder.path)[4].stat().st_size
    folder.close()
    folder = opened(tmp_path / "a", steps=9, size=2 * size)  # started again: it counts on
    assert folder.write({}, ARRAYS) == 5 and [*step_files(folder.path)] == [4, 5]
    small = opened(tmp_path / "b", size=100)
    assert small.write({}, ARRAYS) is None and small.num_too_large == 1 and not step_files(small.path)


def test_a_full_disk_leaves_whole_files_only(tmp_path, monkeypatch):
    folder = opened(tmp_path / "a")
    folder.write({}, ARRAYS)

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(step_file.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        folder.write({}, ARRAYS)
    assert sorted(os.listdir(folder.path)) == [ENGINE_FILE, LOCK_FILE, "step-00000000.safetensors"]
    assert find_step(folder.path, None).about["step"] == 0


def test_a_killed_process_leaves_whole_files_only(tmp_path):
    code = """
import os, sys
from pathlib import Path
from jaxengine.records import step_file
from tests.jaxengine.records.test_folder import ARRAYS, opened
folder = opened(Path(sys.argv[1]))
folder.write({}, ARRAYS)
step_file.os.fsync = lambda descriptor: os._exit(9)
folder.write({}, ARRAYS)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")], cwd=Path(__file__).parents[3], timeout=120)
    assert done.returncode == 9
    assert [*step_files(tmp_path / "a")] == [0] and len([*(tmp_path / "a").glob(".*.tmp")]) == 1
    assert opened(tmp_path / "a").write({}, ARRAYS) == 1
    assert not [*(tmp_path / "a").glob(".*.tmp")]


def test_folders_of_other_engines_and_versions(tmp_path):
    opened(tmp_path / "a").write({}, ARRAYS)
    with pytest.raises(RecordError, match="another engine .model, versions differ.; name a new folder"):
        opened(tmp_path / "a", versions={"jax": "2"}, model={"architecture": "B"})
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine.txt").write_text("kept")
    (tmp_path / "b" / ".mine.tmp").write_text("kept")
    with pytest.raises(RecordError, match="has no engine.json"):
        opened(tmp_path / "b")
    assert sorted(os.listdir(tmp_path / "b")) == [".mine.tmp", "mine.txt"]
    about = json.loads((tmp_path / "a" / ENGINE_FILE).read_text())
    for text, match in (
        (json.dumps({**about, "format": 99}), "format 99; this version of jaxengine reads 1"),
        (json.dumps({key: about[key] for key in ("format", "weights")}), "lacks versions, platform"),
        ("[1", "cannot be read"),
        ("[]", "cannot be read"),
    ):
        (tmp_path / "a" / ENGINE_FILE).write_text(text)
        with pytest.raises(RecordError, match=match):
            read_about(tmp_path / "a")


def test_a_folder_is_of_one_engine_at_a_time(tmp_path):
    folder = opened(tmp_path / "a")
    being_written = folder.path / ".step-00000000.safetensors.tmp"
    others = [folder.path / name for name in (".mine.tmp", ".step-1.tmp")]
    for file in (being_written, *others):
        file.touch()
    with pytest.raises(RecordError, match="an engine that runs now records to .*; name a new folder"):
        opened(tmp_path / "a")
    assert being_written.exists() and folder.write({}, ARRAYS) == 0
    being_written.touch()
    folder.close()
    assert opened(tmp_path / "a").write({}, ARRAYS) == 1  # dropped at once, and closed so
    assert not being_written.exists() and all(file.exists() for file in others)
    with pytest.raises(RecordError, match="another engine .platform differ."):
        opened(tmp_path / "a", platform="tpu")
    opened(tmp_path / "a")


def test_what_users_sent_is_their_own(tmp_path):
    (tmp_path / "a").mkdir(mode=0o755)
    for name in ("a", "b"):
        folder = opened(tmp_path / name)
        folder.write({}, ARRAYS)
        assert folder.path.stat().st_mode & 0o777 == 0o700
        modes = {file.name: file.stat().st_mode & 0o777 for file in folder.path.iterdir()}
        assert len(modes) == 3 and set(modes.values()) == {0o600}, modes


def test_steps_that_are_not_there_or_cut_short(tmp_path):
    folder = opened(tmp_path / "a", steps=9)
    with pytest.raises(RecordError, match="no recorded step"):
        find_step(folder.path, None)
    for _ in range(5):
        folder.write({}, ARRAYS)
    files = step_files(folder.path)
    files[2].unlink()
    with pytest.raises(RecordError, match="has no step 2; it has 0 to 1, 3 to 4"):
        find_step(folder.path, 2)
    content = files[3].read_bytes()
    for size in (0, 4, 40, len(content) - 1):
        files[3].write_bytes(content[:size])
        with pytest.raises(RecordError, match="cut short"):
            find_step(folder.path, 3)
    for changed in (content.replace(b'"I32"', b'"X32"'), b"\xff" * 200, content.replace(b"[1, 6]", b"[9, 9]")):
        files[3].write_bytes(changed)
        with pytest.raises(RecordError, match="cut short, or no recorded step"):
            find_step(folder.path, 3)


def test_weights_are_told_apart(tmp_path):
    folder = opened(tmp_path / "a")
    assert [folder.weights(version, {"w": digest}) for version, digest in ((0, "a"), ("x", "b"), (0, "a"))] == [0, 1, 0]
    assert [entry["version"] for entry in read_about(folder.path)["weights"]] == [0, "x"]
    folder.close()
    assert opened(tmp_path / "a").weights("x", {"w": "b"}) == 1


TABLE = np.array([[10, 11, 12, 13], [20, 21, 22, 23]])


@each_row(
    "rows, window, written, pages",
    [
        ([(0, 0, 3)], None, False, [10]),
        ([(0, 0, 5)], None, False, [10, 11]),
        ([(0, 8, 1), (1, 3, 2)], None, False, [10, 11, 12, 20, 21]),
        ([(0, 8, 1), (1, 3, 2)], None, True, [12, 20, 21]),
        ([(0, 12, 1)], 4, False, [12, 13]),
        ([(0, 12, 1)], 1, False, [13]),
        ([], None, False, []),
    ],
)
def test_pages_that_a_step_sees_and_writes(rows, window, written, pages):
    found = pages_of(TABLE, [StepRow(*row, True) for row in rows], window, 4, written=written)
    assert found == pages
