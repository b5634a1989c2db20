"""Broken records: each ends a replay with status 2 and one line that names what is wrong."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jaxengine.commands.cli import main
from jaxengine.records.folder import ENGINE_FILE
from jaxengine.records.step_file import FORMAT, RecordError, write_step
from jaxengine.replay.backends import choose_backend
from jaxengine.replay.record import read_engine, read_recorded
from tests.tables import each_row

ABOUT = {
    "format": FORMAT,
    "versions": {"jax": "1"},
    "platform": "cpu",
    "device": "cpu",
    "options": {"tensor_parallel_size": 1, "data_parallel_size": 1, "dtype": "float32"},
    "model": {"architecture": "A", "layers": 2, "hidden_size": 8, "vocab_size": 9, "digest": "ab"},
    "weights": [{"version": 0, "checksums": {"w": "cd"}}],
}
OPTIONS, MODEL = ABOUT["options"], ABOUT["model"]


@each_row(
    "changes, match",
    [
        ({"options": {}}, "options.tensor_parallel_size is None; allowed: 1 to 1024"),
        ({"options": {**OPTIONS, "data_parallel_size": "2"}}, "options.data_parallel_size is '2'; allowed: 1 to 1024"),
        ({"options": {**OPTIONS, "tensor_parallel_size": 0}}, "options.tensor_parallel_size is 0; allowed: 1 to 1024"),
        ({"options": {**OPTIONS, "dtype": "int3"}}, "options.dtype is 'int3'; allowed: float32, bfloat16"),
        ({"options": {**OPTIONS, "dtype": []}}, "options.dtype is []; allowed: a text"),
        ({"options": []}, "options is not of type dict"),
        ({"platform": [], "versions": 3}, "versions is not of type dict, platform is not of type str"),
        ({"model": None}, "model is not of type dict"),
        ({"model": {**MODEL, "digest": 1}}, "model.digest is 1; allowed: a text"),
        ({"model": {**MODEL, "layers": True}}, "model.layers is True; allowed: 1 to"),
        ({"weights": {}}, "weights is not of type list"),
        ({"weights": [3]}, "weights[0] is 3; allowed: an object with the object checksums"),
    ],
)
def test_a_broken_engine_file_is_one_line_and_status_2(changes, match, tmp_path, capsys):
    (tmp_path / ENGINE_FILE).write_text(json.dumps({**ABOUT, **changes}))
    assert main(["replay", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert match in said and said.count("\n") == 1


def test_a_whole_engine_file_is_read(tmp_path):
    (tmp_path / ENGINE_FILE).write_text(json.dumps(ABOUT))
    assert read_engine(tmp_path) == ABOUT


def test_a_step_that_does_not_say_what_it_ran_is_refused(tmp_path):
    whole = {"step": 0, "weights": 0, "bucket": [4, 4, 1, []]}
    for about in (
        *({name: value for name, value in whole.items() if name != left} for left in whole),
        {**whole, "bucket": [4, 4]},
        {**whole, "weights": "0"},
        {**whole, "weights": -1},
    ):
        write_step(tmp_path / "step-00000000.safetensors", about, {"message": np.zeros(1, np.int32)})
        with pytest.raises(RecordError, match="step last of .* does not say what it ran"):
            read_recorded(tmp_path, None)
    write_step(tmp_path / "step-00000000.safetensors", whole, {"message": np.zeros(1, np.int32)})
    assert read_recorded(tmp_path, 0).about == whole


def test_an_unknown_backend_is_refused_with_those_allowed():
    for name in ("gpu", "", "Interpret"):
        with pytest.raises(RecordError, match="backend is .*; allowed: native, cpu, interpret, xla"):
            choose_backend(name, "tpu")
