"""profiler_config: vLLM's forms, and what cannot be honoured."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from jaxengine.commands.cli import main
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.config.execution.profiler_config import ProfilerConfig
from tests.tables import each_row


@each_row(
    ("value", "folder"),
    [
        (None, None),
        ({}, None),
        ({"profiler": None, "torch_profiler_dir": None, "ignore_frontend": False}, None),
        ({"profiler_dir": "/a"}, "/a"),
        ({"torch_profiler_dir": "/a", "delay_iterations": 0}, "/a"),
        ({"profiler": "jax", "profiler_dir": Path("b")}, str(Path("b").absolute())),
    ],
)
def test_a_folder_enables_it(value, folder):
    config = EngineConfig(profiler_config=value)
    found = config.profiler_config
    assert found is None if folder is None else found == ProfilerConfig(folder)
    assert EngineConfig(**dataclasses.asdict(config)) == config  # as the engine's process reads it


@each_row(
    ("value", "message"),
    [
        ("profiles", "a dict such as"),
        ({"profiler": "torch", "torch_profiler_dir": "/a"}, "profiler_config.profiler is 'torch'; allowed: jax"),
        ({"profiler": "jax"}, "names no folder"),
        ({"profiler_dir": "/a", "max_iterations": 5}, "profiler_config has no 'max_iterations' here"),
        ({"profiler_dir": "/a", "torch_profiler_dir": "/b"}, "absent beside profiler_dir"),
        ({"profiler_dir": ""}, "the name of a folder"),
        ({"profiler_dir": 3}, "the name of a folder"),
    ],
)
def test_what_cannot_be_honoured_is_refused(value, message):
    with pytest.raises(ConfigError) as error:
        EngineConfig(profiler_config=value)
    assert message in str(error.value)


def test_a_server_with_it_has_a_key_for_operators(capsys):
    assert main(["serve", "--profiler-config", '{"profiler_dir": "/a"}']) == 2
    assert "profiler_config is given without enable_admin" in capsys.readouterr().err
