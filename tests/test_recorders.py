"""The table of recorders of fixtures: each is a module, texts name those that are there, files are written whole."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from tests.fixtures.record import FOLDER, RECORDERS, load, main, write

ROOT = FOLDER.parents[1]


def test_each_recorder_is_a_module_and_each_module_a_recorder():
    found = {path.stem for path in (FOLDER / "recorders").glob("*.py")} - {"reference"}
    assert found == set(RECORDERS)
    for name in RECORDERS:
        source = (FOLDER / "recorders" / f"{name}.py").read_text()
        assert re.search(r"\bCASES\b", source) and "\ndef record(" in source, name


def test_texts_name_recorders_that_are_there():
    texts = (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "tests").rglob("*.py"))
    found = {name for path in texts for name in re.findall(r"-m tests\.fixtures\.record ([a-z_]+)", path.read_text())}
    assert {"models", "adapters"} <= found <= set(RECORDERS)


def test_contents_are_written_as_they_are_read(tmp_path):
    arrays = {"a": np.arange(3, dtype=np.int32)}
    write({"x/a.npz": arrays, "x/b.json": {"b": 1}, "c.json": "{ }\n"}, tmp_path)
    with np.load(tmp_path / "x" / "a.npz", allow_pickle=False) as found:
        assert found.files == ["a"] and found["a"].dtype == np.int32 and found["a"].tolist() == [0, 1, 2]
    assert json.loads((tmp_path / "x" / "b.json").read_text()) == {"b": 1}
    assert (tmp_path / "c.json").read_text() == "{ }\n"


def test_a_case_that_is_not_there_is_named(capsys):
    assert set(load("blocks").CASES) == {"gguf_blocks", "gguf_grids", "mxfp4", "microscaled_rows"}
    with pytest.raises(SystemExit):
        main(["blocks", "mxfp5"])
    assert (
        "blocks has no case mxfp5; allowed: gguf_blocks, gguf_grids, mxfp4, microscaled_rows" in capsys.readouterr().err
    )
