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
