"""The folders of executables: whose files are read, what is left where nothing can be kept, which folder it is."""

from __future__ import annotations

import errno
import logging
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import jaxengine
from jaxengine.config.engine_config import ConfigError
from jaxengine.runner.executables import executable_files
from jaxengine.runner.executables.executable_files import ExecutableFiles

NAME = "0123.xla"
ANOTHER_UID = os.geteuid() + 1234
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder as `install -d` makes it, in one that others may not write to."""
    made = tmp_path / "executables"
    made.mkdir(mode=0o755)
    return made


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """The user's home; his environment says nothing of caches."""
    for name in ("XDG_CACHE_HOME", "JAXENGINE_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def write(folder, payload=b"code"):
    ExecutableFiles(str(folder)).write(NAME, payload)


def read(folder):
    return ExecutableFiles(str(folder)).read(NAME)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_was_written_is_read(folder):
    write(folder)
    assert read(folder) == b"code"
    assert names(folder) == [NAME, "key"] and (folder / "key").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o666, 0o664, 0o646])
def test_a_file_that_others_may_write_is_ignored(folder, mode, caplog):
    write(folder)
    (folder / NAME).chmod(mode)
    assert read(folder) is None and "is ignored" in caplog.text


def test_a_link_is_passed_over(folder, tmp_path):
    write(folder)
    (folder / NAME).rename(tmp_path / "elsewhere")
    (folder / NAME).symlink_to(tmp_path / "elsewhere")
    assert read(folder) is None


def test_a_pipe_does_not_hold_the_start_up(folder):
    os.mkfifo(folder / NAME, 0o600)
    assert read(folder) is None


def test_a_file_made_without_the_key_is_passed_over(tmp_path, folder):
    """Whoever got a file in there, by an archive or while the folder was open to him, cannot have it run."""
    foreign = tmp_path / "foreign"
    write(foreign, b"evil")
    write(folder)
    (foreign / NAME).replace(folder / NAME)
    assert read(folder) is None


def test_a_file_cannot_stand_in_for_another(folder):
    write(folder)
    (folder / NAME).rename(folder / "4567.xla")
    assert ExecutableFiles(str(folder)).read("4567.xla") is None


def test_a_key_that_others_could_read_is_made_anew(folder):
    write(folder)
    (folder / "key").chmod(0o644)
    assert read(folder) is None
    assert (folder / "key").stat().st_mode & 0o777 == 0o600
    write(folder)
    assert read(folder) == b"code"


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EIO])
def test_a_key_is_made_where_there_are_no_hard_links(folder, monkeypatch, code):
    def refuse(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    write(folder)
    monkeypatch.undo()
    kept = code != errno.EIO  # which is no lack of links
    assert names(folder) == ([NAME, "key"] if kept else [])
    assert read(folder) == (b"code" if kept else None)


def test_half_a_key_is_made_anew(folder):
    (folder / "key").write_bytes(b"half")
    (folder / "key").chmod(0o600)
    write(folder)
    assert read(folder) == b"code"


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_folder_that_others_may_write_is_refused(folder, mode):
    folder.chmod(mode)
    with pytest.raises(ConfigError, match="mode 77") as error:
        ExecutableFiles(str(folder))
    assert error.value.param == "compile_cache_dir"


def test_another_users_folder_is_refused(folder, monkeypatch):
    write(folder)
    monkeypatch.setattr(os, "geteuid", lambda: ANOTHER_UID)
    monkeypatch.setattr(executable_files, "ROOT", ANOTHER_UID + 1)
    with pytest.raises(ConfigError, match=f"uid {folder.stat().st_uid} "):
        ExecutableFiles(str(folder))


def test_another_users_link_is_not_followed(folder, tmp_path, monkeypatch):
    """He could lead to a folder of this user's into which he gets files, as uploads are."""
    (tmp_path / "link").symlink_to(folder)
    assert ExecutableFiles(str(tmp_path / "link")).can_keep()
    monkeypatch.setattr(os, "geteuid", lambda: ANOTHER_UID)
    monkeypatch.setattr(executable_files, "ROOT", ANOTHER_UID + 1)
    with pytest.raises(ConfigError, match="link of uid"):
        ExecutableFiles(str(tmp_path / "link"))


def test_links_are_followed_as_everywhere(folder, tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "up").symlink_to("../executables")
    write(inside / "up")
    assert read(inside / ".." / "executables") == b"code"
    (tmp_path / "round").symlink_to("round")
    assert not ExecutableFiles(str(tmp_path / "round")).can_keep()


def test_each_descriptor_of_a_walk_is_closed_once(folder, tmp_path, monkeypatch):
    (tmp_path / "away").symlink_to(tmp_path)
    opened, closed, plain = [], [], (os.open, os.close)

    def open_first(path, *flags, **more):
        if path == "/" and opened:
            raise OSError(errno.EMFILE, "too many files")
        opened.append(plain[0](path, *flags, **more))
        return opened[-1]

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", open_first)
        patch.setattr(os, "close", lambda at: (closed.append(at), plain[1](at)))
        with pytest.raises(OSError, match="too many files"):
            executable_files._walk(tmp_path / "away", os.geteuid())
    assert len(closed) == len(opened)


@pytest.fixture
def shipped(folder, home, monkeypatch) -> Path:
    """A folder of root's with a file, of which this process's user is another."""
    write(folder)
    monkeypatch.setattr(executable_files, "ROOT", os.geteuid())
    monkeypatch.setattr(os, "geteuid", lambda: ANOTHER_UID)
    return folder


def test_what_root_has_shipped_is_read_by_others(shipped, caplog):
    files = ExecutableFiles(str(shipped))
    assert files.read(NAME) == b"code"
    assert not caplog.records


def test_what_was_not_shipped_is_kept_in_ones_own_folder(shipped, home, monkeypatch):
    before = names(shipped)
    # Another user's home cannot be made by this process: what is made in it is this process's own.
    monkeypatch.setattr(os, "geteuid", os.getuid)
    monkeypatch.setattr(executable_files, "_open_folder", of_root(executable_files._open_folder, shipped))
    ExecutableFiles(str(shipped)).write("4567.xla", b"more")
    assert names(shipped) == before
    own = home / ".cache" / "jaxengine" / "executables"
    assert names(own) == ["4567.xla", "key"]
    files = ExecutableFiles(str(shipped))
    assert (files.read(NAME), files.read("4567.xla")) == (b"code", b"more")


def of_root(open_folder, shipped):
    """`_open_folder` by which the shipped folder has no key that this user could read."""

    def open_(path):
        folder = open_folder(path)
        return folder._replace(key=None) if path == shipped else folder

    return open_


def test_a_shipped_folder_must_be_out_of_others_reach_altogether(shipped, tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="above it"):
        ExecutableFiles(str(shipped))
    tmp_path.chmod(0o1777)  # as /tmp is: others cannot put another folder in its place
    assert ExecutableFiles(str(shipped)).read(NAME) == b"code"


def test_a_shipped_file_must_be_roots_and_whole(shipped, caplog):
    (shipped / NAME).chmod(0o666)
    assert ExecutableFiles(str(shipped)).read(NAME) is None and "is ignored" in caplog.text
    (shipped / NAME).chmod(0o644)
    (shipped / NAME).write_bytes((shipped / NAME).read_bytes()[:-1])
    assert ExecutableFiles(str(shipped)).read(NAME) is None and "damaged" in caplog.text


@needs_root
def test_a_real_other_user_reads_what_root_shipped_and_nothing_else():
    """In a process of that user's, on a path that he can reach."""
    base = Path("/tmp") / f"jaxengine-test-{os.getpid()}"
    shipped, foreign = base / "shipped", base / "foreign"
    for made in (base, shipped, foreign):
        made.mkdir(mode=0o755)
    try:
        write(shipped)
        write(foreign, b"evil")
        for path in (foreign, *foreign.iterdir()):
            os.chown(path, 4321, -1)
        code = (
            "import os, sys\n"
            "from jaxengine.config.engine_config import ConfigError\n"
            "from jaxengine.runner.executables.executable_files import ExecutableFiles\n"
            "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
            f"print(ExecutableFiles(sys.argv[1]).read({NAME!r}))\n"
            "try: ExecutableFiles(sys.argv[2])\n"
            "except ConfigError as error: print(error.param)\n"
        )
        root = str(Path(jaxengine.__file__).parents[1])
        command = [sys.executable, "-c", code, str(shipped), str(foreign)]
        done = subprocess.run(command, env={"HOME": "/nonexistent"}, cwd=root, capture_output=True, text=True)
        assert done.stdout.splitlines() == ["b'code'", "compile_cache_dir"], done.stderr
    finally:
        subprocess.run(["rm", "-rf", str(base)], check=True)


def test_a_full_disk_leaves_no_temporary_file_and_is_said_once(folder, caplog):
    files = ExecutableFiles(str(folder))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        for name in ("a.xla", "b.xla"):
            files.write(name, b"x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names(folder) == ["key"]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "JAXENGINE_CACHE_DIR" in caplog.text


def test_a_new_folder_is_private(tmp_path):
    ExecutableFiles(str(tmp_path / "a" / "b"))
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "a", tmp_path / "a" / "b")] == [0o700, 0o700]


def test_old_files_go(tmp_path):
    old, young = tmp_path / "old.xla", tmp_path / "young.xla"
    for file in (old, young):
        file.write_bytes(b"")
    os.utime(old, (0, time.time() - 40 * 24 * 3600))
    ExecutableFiles(str(tmp_path))
    assert not old.exists() and young.exists()


def test_leftovers_of_killed_processes_go(folder):
    old, young = folder / "tmp-1", folder / "tmp-2"
    for file in (old, young):
        file.write_bytes(b"half")
    os.utime(old, (0, time.time() - 2 * 24 * 3600))
    ExecutableFiles(str(folder))
    assert not old.exists() and young.exists()


def test_a_file_in_use_is_not_old(folder):
    write(folder)
    os.utime(folder / NAME, (0, time.time() - 29 * 24 * 3600))
    assert read(folder) == b"code"
    assert time.time() - (folder / NAME).stat().st_mtime < 3600


def test_the_folder_follows_option_then_environment_then_home(home, tmp_path, monkeypatch):
    def kept(directory=None):
        ExecutableFiles(directory).write(NAME, b"code")
        return {str(path.parent.relative_to(tmp_path)) for path in tmp_path.rglob(NAME)}

    found = kept()
    assert found == {"home/.cache/jaxengine/executables"}
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the XDG specification has ignored
    assert kept() == found
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert kept() - found == {"xdg/jaxengine/executables"}
    monkeypatch.setenv("JAXENGINE_CACHE_DIR", str(tmp_path / "environment"))
    assert kept() - found == {"xdg/jaxengine/executables", "environment"}
    assert "option" in kept(str(tmp_path / "option"))
    monkeypatch.setenv("JAXENGINE_CACHE_DIR", "")
    assert not ExecutableFiles(None).can_keep() and not ExecutableFiles("").can_keep()


def test_a_bucket_is_a_folder(caplog, monkeypatch):
    """Of fsspec's memory; tests/jaxengine/checkpoint/test_s3.py has one of S3."""
    store, url = fsspec.filesystem("memory"), "memory://steps/folder"
    write(url)
    ExecutableFiles(url).write("other", b"")
    assert read(url) == b"code" and ExecutableFiles(f"{url}/").read("other") == b""
    assert ExecutableFiles(url).names("0") == [NAME] and ExecutableFiles("memory://nothing/there").names("") == []
    assert ExecutableFiles(url).read("missing") is None and not caplog.records
    path = f"/steps/folder/{NAME}"
    store.pipe_file(path, store.cat_file(path)[:-1] + b"x")
    assert read(url) is None and "is damaged and is made again" in caplog.text
    calls = []

    def failing(self, path, *_, **__):
        calls.append(path)
        raise errors[len(calls) - 1]

    # A store that may not be listed refuses what is missing; one that is gone is asked once.
    errors = [*[PermissionError("hunter2")] * 2, ConnectionError(errno.ECONNREFUSED, "hunter2")]
    monkeypatch.setattr(MemoryFileSystem, "cat_file", failing)
    files = ExecutableFiles(url)
    assert [files.read(NAME) for _ in range(5)] == [None] * 5 and len(calls) == 3 and files.names("") == []
    assert caplog.text.count("cannot be read: PermissionError") == caplog.text.count("cannot be read: Conn") == 1
    calls.clear()
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", failing)
    for _ in range(3):
        files.write(NAME, b"code")
    assert len(calls) == 1 and not files.can_keep()
    assert "the next start compiles again: memory://steps/folder: PermissionError" in caplog.text
    assert "hunter2" not in caplog.text
    store.rm("/steps", recursive=True)


def test_a_file_url_is_the_folder(folder):
    write(f"file://{folder}")
    assert read(folder) == b"code"
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="mode 777"):
        ExecutableFiles(f"file://{folder}")
    for url in ("file://", "file://steps"):  # the first would be the working directory
        with pytest.raises(ConfigError, match="allowed: file:// with the absolute path of a folder"):
            ExecutableFiles(url)
    for url in ("https://host/steps", "az://bucket/steps"):
        with pytest.raises(ConfigError, match=r"compile_cache_dir is .*; allowed: s3://, gs://, memory://, or a fo"):
            ExecutableFiles(url)


@pytest.mark.parametrize("obstacle", ["a file", "read-only", "no home"])
def test_where_nothing_can_be_kept_one_warning_says_so(home, monkeypatch, caplog, obstacle):
    if obstacle == "a file":
        home.write_text("")
    elif obstacle == "read-only":
        monkeypatch.setattr(os, "mkdir", refuse(OSError(30, "Read-only file system", str(home))))
    else:
        monkeypatch.setattr(Path, "home", refuse(RuntimeError(f"Could not determine home directory. {home}")))
    for _ in range(2):
        files = ExecutableFiles(None)
        files.write(NAME, b"code")
        assert files.read(NAME) is None
    assert len(caplog.records) == 1 and "JAXENGINE_CACHE_DIR" in caplog.text


def refuse(error):
    def raise_(*_, **__):
        raise error

    return raise_


def test_a_home_open_to_others_costs_the_cache_and_not_the_start(home, caplog):
    folder = home / ".cache" / "jaxengine" / "executables"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    ExecutableFiles(None).write(NAME, b"code")
    assert names(folder) == [] and "mode 777" in caplog.text


def test_descriptors_are_closed_with_their_owner(folder, monkeypatch):
    def count():
        return len(os.listdir("/proc/self/fd"))

    files = ExecutableFiles(str(folder))
    before = count()
    for _ in range(10):
        files = ExecutableFiles(str(folder))
    assert count() == before
    del files
    before = count()
    with monkeypatch.context() as patched:
        patched.setattr(executable_files.os, "fstat", refuse(OSError("no status")))
        files = ExecutableFiles(str(folder))
    assert not files.can_keep() and count() == before
