"""`jaxengine tune`: what it refuses, what it tells and writes; a chip's compiler or the chip is not asked."""

from __future__ import annotations

import pytest

from jaxengine.check import tuning
from jaxengine.commands import cli, tune

FOUND = {"best": 7.9, "usual": 9.0, "tried": 5}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--target", "h200"], "target is 'h200'; allowed: v5e"),
        (["--target", "sm_90", "--shapes", "4096"], "shapes is '4096'; allowed: INPUTSxOUTPUTS"),
        (["--target", "sm_90", "--shapes", "100x4096"], "shapes is '100x4096'; allowed"),
        (["--target", "sm_90", "--shapes", "\N{SUPERSCRIPT TWO}x4096"], "x4096'; allowed"),
    ],
)
def test_wrong_values_are_one_line(words, told, capsys):
    assert cli.main(["tune", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


def test_what_is_found_is_told_and_written(monkeypatch, tmp_path, capsys):
    asked = []

    def found(target, problems):
        asked.extend((target.name, *problem) for problem in problems)
        for problem in problems:
            yield {"problem": list(problem), "sizes": {"rows": 64} if problem[0] == 64 else {}, **FOUND}

    monkeypatch.setattr(tuning, "tune", found)
    monkeypatch.setattr(tune, "require_compiler", lambda target: None)
    path = tmp_path / "table.py"
    words = ["--target", "sm_90", "--shapes", "256x384", "--rows", "8", "64", "--codes", "int4", "int8"]
    assert cli.main(["tune", *words, "--write", str(path)]) == 0
    assert asked == [
        ("sm_90", rows, 256, 384, 128, codes, zeros)
        for codes, zeros in (("uint8", True), ("int8", False))
        for rows in (8, 64)
    ]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert "sm_90  2/4  [64, 256] x [256, 384] uint8" in lines[1]
    assert "{'rows': 64}, 7.9 us; the usual sizes take 9.0 us" in lines[1]
    text = path.read_text()
    assert '        (8, 256, 384, 128, "int8", {}),\n' in text
    assert '        (64, 256, 384, 128, "uint8", {"rows": 64}),\n' in text
    compile(text, str(path), "exec")


def small(target, problems):
    for problem in problems:
        yield {"problem": list(problem), "sizes": {"rows": 64}, **FOUND}


def tuned(chip, path) -> int:
    return cli.main(["tune", "--target", chip, "--shapes", "256x384", "--rows", "8", "16", "--write", str(path)])


def test_a_file_keeps_what_it_had_and_what_was_found_before_the_end(monkeypatch, tmp_path, capsys):
    def interrupted(target, problems):
        yield from small(target, problems[:1])
        raise KeyboardInterrupt

    monkeypatch.setattr(tune, "require_compiler", lambda target: None)
    path, entry = tmp_path / "table.py", '(8, 256, 384, 128, "uint8", {"rows": 64}),'
    for count, (chip, found, status) in enumerate([("v5e", interrupted, 130), ("tpu7x", small, 0)], 1):
        monkeypatch.setattr(tuning, "tune", found)
        assert tuned(chip, path) == status
        assert path.read_text().count(entry) == count
    assert [file.name for file in tmp_path.iterdir()] == ["table.py"]


def test_what_cannot_be_written_is_known_before_anything_is_tried(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tune, "require_compiler", lambda target: None)
    monkeypatch.setattr(tuning, "tune", lambda *_: pytest.fail("was tried"))
    notes = tmp_path / "notes"
    notes.write_text("mine")
    assert tuned("v5e", notes) == tuned("v5e", tmp_path) == tuned("v5e", tmp_path / "no" / "file") == 2
    first, *others = capsys.readouterr().err.splitlines()
    assert "allowed: a new file, or one that jaxengine tune wrote" in first and notes.read_text() == "mine"
    assert len(others) == 2 and all("cannot be written (" in line for line in others)
