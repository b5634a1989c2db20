"""The disk tier gives back what was written or nothing, whatever happens to its files or to those who write them."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jaxengine.tiers import disk, page_files, shared_total
from jaxengine.tiers.disk import DiskTier
from jaxengine.tiers.shared_total import SharedTotal


def key(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def block(number: int, size: int = 1000) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, size).astype(np.uint8)


@pytest.fixture
def make(tmp_path):
    made: list[DiskTier] = []

    def make(capacity: int | None = None) -> DiskTier:
        made.append(DiskTier(tmp_path / "kv", capacity))
        return made[-1]

    yield make
    for tier in made:
        tier.shutdown()


def write(tier: DiskTier, numbers) -> None:
    for number in numbers:
        assert tier.write(key(number), block(number))
    assert tier.flush(10)


def test_blocks_outlive_the_engine(make):
    write(make(), range(20))
    again = make()
    assert len(again) == 20
    for number in range(20):
        np.testing.assert_array_equal(again.read(key(number)), block(number))
    assert again.read(key(99)) is None and key(99) not in again


def test_two_engines_see_what_the_other_writes(make):
    first, second = make(), make()
    write(first, range(5))
    second._scan()
    assert all(key(number) in second for number in range(5))
    for path in first.folder.rglob("*"):
        if path.name == key(2).hex():
            path.unlink()
    assert second.read(key(2)) is None and key(2) not in second
    first._scan()
    assert key(2) not in first


@pytest.mark.parametrize("where", [0, 3, 20, 55, 70, 1000, -1])
def test_a_changed_byte_is_a_miss(make, where):
    tier = make()
    write(tier, [1])
    path = tier.folder / key(1).hex()[:2] / key(1).hex()
    raw = bytearray(path.read_bytes())
    raw[where] ^= 4
    path.write_bytes(raw)
    assert tier.read(key(1)) is None and tier.num_bad == 1
    assert not path.exists() and key(1) not in tier and tier.num_bytes == 0


def test_many_damaged_files_are_one_warning(make, caplog):
    tier = make()
    write(tier, range(5))
    for path in tier.folder.rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    assert not any(tier.read(key(number)) for number in range(5))
    assert tier.num_bad == 5 and len(caplog.records) == 1


def test_a_folder_that_is_emptied_while_engines_run_is_made_again(make, tmp_path):
    tier = make()
    write(tier, range(5))
    shutil.rmtree(tmp_path)  # and what it lies in
    tier._scan()
    assert not len(tier) and tier.num_bytes == 0
    write(tier, range(5, 9))
    assert tier.num_failed == 0 and tier.folder.stat().st_mode & 0o777 == 0o700
    assert all(np.array_equal(make().read(key(number)), block(number)) for number in range(5, 9))


def test_a_file_that_is_cut_or_has_another_name_is_a_miss(make):
    tier = make()
    write(tier, [1, 2])
    paths = [tier.folder / key(number).hex()[:2] / key(number).hex() for number in (1, 2, 3)]
    paths[0].write_bytes(paths[0].read_bytes()[:-1])
    paths[2].parent.mkdir(exist_ok=True)
    os.rename(paths[1], paths[2])
    assert tier.read(key(1)) is None and tier.read(key(3)) is None and tier.num_bad == 2
    write(tier, [4])
    path = tier.folder / key(4).hex()[:2] / key(4).hex()
    raw = path.read_bytes()
    for size in [*range(len(raw) - 1000 + 1), len(raw) - 1]:  # each length of its header
        path.write_bytes(raw[:size])
        assert tier.read(key(4)) is None and not path.exists()


def test_what_others_leave_in_the_folder_hides_nothing(make):
    """Links to nowhere, pipes, folders and huge files under the names of keys, and names that are no keys."""
    tier = make()
    write(tier, range(40))
    own = tier.folder / key(0).hex()[:2]
    names = [own / f"{own.name}{number:062x}" for number in range(4)]
    names[0].symlink_to("/nowhere")
    os.mkfifo(names[1])
    names[2].mkdir()
    with open(names[3], "wb") as file:
        file.truncate(1 << 40)
    for name in ("ab cd", "AB", "00" + "f" * 62, ".x.tmp", "é"):
        (own / name).touch()
    again = DiskTier(tier.folder, None, 1000)
    for tested in (tier, again):
        tested._scan()
        assert all(key(number) in tested for number in range(40))
        assert bytes.fromhex("00" + "f" * 62) not in tested and b"\xab" not in tested and b"\xab\xcd" not in tested
        assert not any(bytes.fromhex(name.name) in tested for name in names[:3])
    names.append(own / f"{own.name}{4:062x}")
    names[4].symlink_to(own / key(0).hex())
    free = lowest_descriptor()
    for name in names:
        assert again.read(bytes.fromhex(name.name)) is None
    assert not names[1].exists() and not names[3].exists() and lowest_descriptor() == free
    np.testing.assert_array_equal(again.read(key(0)), block(0))
    again.shutdown()


def test_a_file_that_grows_while_it_is_read_takes_no_more_memory(tmp_path, monkeypatch):
    path = tmp_path / "page"
    path.write_bytes(bytes(100))
    before = path.stat()
    path.write_bytes(bytes(5000))
    monkeypatch.setattr("jaxengine.tiers.page_files.os.fstat", lambda number: before)
    assert [len(page_files.content(path, most)) for most in (100, 4999, 5000)] == [0, 0, 5000]


def lowest_descriptor() -> int:
    """The lowest number of a file that is not open."""
    number = os.open(os.devnull, os.O_RDONLY)
    os.close(number)
    return number


def test_a_full_disk_costs_nothing_but_hits(make, monkeypatch, caplog):
    tier, replace = make(), os.replace

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    write(tier, range(3))
    assert tier.num_failed == 3 and len(tier) == 0 and caplog.text.count("No space left") == 1
    assert not [each for each in tier.folder.rglob("*") if each.is_file()]
    monkeypatch.setattr(os, "replace", replace)
    write(tier, range(3))
    assert len(tier) == 3


def test_the_files_used_least_recently_make_room(make):
    tier = make(3500)
    for number in range(3):
        write(tier, [number])
        time.sleep(0.02)
    tier.read(key(0))
    write(tier, [3])
    assert [key(number) in tier for number in range(4)] == [True, False, True, True] and tier.num_bytes <= 3500
    other = make(3500)  # which knows the order by the files' times
    write(other, [4])
    assert [key(number) in other for number in range(5)] == [True, False, False, True, True]


def test_clocks_that_disagree(make, tmp_path):
    """Files and folders of the year 1970 and of the next century, as of a host whose clock is wrong, are found, read,
    and removed for others in the order of their times; what is not there yet is found once it is written.
    """
    first = make(3500)
    write(first, range(3))
    for number, seconds in enumerate((0, 5e9, 4e9)):
        path = next(path for path in first.folder.rglob(key(number).hex()))
        for each in (path, path.parent, first.folder):
            os.utime(each, (seconds, seconds))
    second = make(3500)
    write(second, [3])
    assert [key(number) in second for number in range(4)] == [False, True, True, True]
    assert files_in(tmp_path) <= 3500
    first._scan()
    assert [key(number) in first for number in range(4)] == [False, True, True, True]
    for number in (1, 2, 3):
        np.testing.assert_array_equal(first.read(key(number)), block(number))
    first.remove_older(3600.0)
    assert len(first) == 3  # reading has set their times to now


def files_in(folder: Path) -> int:
    """Total size of the files in a folder."""
    return sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())


def test_the_limit_is_that_of_all_engines_and_models(tmp_path):
    """Two engines write at once, another model's pages lie beside theirs, and a restart has a smaller limit."""
    old = DiskTier(tmp_path / ("a" * 32), 9000)
    write(old, range(4))
    old.shutdown()
    time.sleep(0.02)
    first, second = (DiskTier(tmp_path / ("b" * 32), 6000) for _ in range(2))
    write(first, range(4))
    assert first.num_bytes > 4000 and files_in(tmp_path) <= 6000  # the other model's were used before
    write(second, range(4, 7))
    assert files_in(tmp_path) <= 6000  # neither has looked at what the other wrote
    write(first, [7])
    write(second, [7, 8])
    assert files_in(tmp_path) <= 6000 and first.num_written + second.num_written == 9
    first._scan()
    assert key(8) in first
    third = DiskTier(tmp_path / ("c" * 32), 2500)
    assert 2000 < files_in(tmp_path) <= 2500 and third.num_bytes == 0
    for tier in (first, second, third):
        tier.shutdown()


def test_a_shared_total_that_is_lost_or_locked(tmp_path, monkeypatch):
    """It is counted anew; an engine that cannot lock it writes nothing, and reads."""
    tier, total = DiskTier(tmp_path / ("a" * 32), 3500), tmp_path / shared_total.NAME
    write(tier, range(3))
    assert int.from_bytes(total.read_bytes(), "little") == files_in(tier.folder) == tier.num_bytes
    total.write_bytes(b"x")
    write(tier, [3])
    assert files_in(tier.folder) <= 3500
    monkeypatch.setattr(shared_total, "_LOCK_SECONDS", 0.0)
    with SharedTotal(tmp_path).held():
        write(tier, [4])
        assert tier.num_failed == 1 and tier.read(key(3)) is not None
    write(tier, [4])
    total.unlink()
    total.symlink_to(tmp_path / "elsewhere")
    write(tier, [5])
    assert tier.num_failed == 2 and key(4) in tier and not (tmp_path / "elsewhere").exists()
    tier.shutdown()


def test_files_that_cannot_be_removed_stay_known(make, monkeypatch):
    tier = make(3500)
    write(tier, range(3))

    def fails(*arguments, **more):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", fails)
    write(tier, range(3, 6))
    assert tier.num_failed == 3 and all(tier.read(key(number)) is not None for number in range(3))
    assert files_in(tier.folder) <= 3500


def test_a_killed_writer_leaves_whole_files(make, tmp_path):
    code = f"""
import sys; from pathlib import Path
from tests.jaxengine.tiers.test_disk import DiskTier, block, key
tier = DiskTier(Path({str(tmp_path / "kv")!r}))
for number in range(10**6):
    tier.write(key(number), block(number, 200_000)); tier.flush(10)
    print(number, flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        while int(writer.stdout.readline()) < 20:
            pass
        writer.kill()
    tier = make()
    assert len(tier) >= 20
    for number in range(len(tier)):
        np.testing.assert_array_equal(tier.read(key(number)), block(number, 200_000))
    assert tier.num_bad == 0


def test_rests_of_killed_writers_are_removed(make, monkeypatch):
    tier = make()
    write(tier, [1])
    rest = tier.folder / key(1).hex()[:2] / ".abc.tmp"
    rest.write_bytes(b"x")
    assert len(make()) == 1 and rest.exists()  # another engine may be writing it
    os.utime(rest.parent, (0, 0))  # nothing is written to it from now on
    later = make()
    monkeypatch.setattr(page_files, "REST_SECONDS", -1.0)
    later._scan()
    assert len(later) == 1 and not rest.exists()


def test_other_subfolders_do_not_matter(make):
    tier = make()
    write(tier, [1])
    for name in ("zz", "\u0661\u0662", key(1).hex()[:2].upper()):
        (tier.folder / name).mkdir()
    tier._scan()
    assert list(tier._known) == list(make()._known) == [key(1)]


def test_a_key_that_is_dropped_while_its_file_is_written_has_none(make, monkeypatch):
    tier, replace = make(), os.replace

    def late(*paths):
        tier.drop(key(1))
        replace(*paths)

    monkeypatch.setattr(disk.os, "replace", late)
    write(tier, [1])
    assert key(1) not in tier and tier.num_bytes == 0 and tier.read(key(1)) is None
