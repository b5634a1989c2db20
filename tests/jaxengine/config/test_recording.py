"""record_steps: engines whose steps cannot be recorded are refused by name."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import pytest

from jaxengine import ConfigError
from jaxengine.config.base.platforms import PLATFORMS
from jaxengine.config.engine_config import EngineConfig, ResolvedConfig
from jaxengine.config.execution.recording import replayed_options
from jaxengine.models.cache import KVSpec, Paged
from jaxengine.models.registry import read_folder
from jaxengine.runner.extensions.recording import PAGE_ROWS, RecordingExtension
from tests.conftest import TINY_CHECKPOINT
from tests.tables import each_row

MODELS = TINY_CHECKPOINT.parent
CPU = PLATFORMS["cpu"]


@each_row(
    "name, options, match",
    [
        ("llama", {"record_steps": ""}, "record_steps is ''; allowed: the name of a folder"),
        ("llama", {"record_trace": ""}, "record_trace is ''; allowed: the name of a new file"),
        ("llama", {"record_trace": "/nowhere/t"}, "record_trace is .*; allowed: a new file in a folder that can be"),
        ("llama", {"record_steps": __file__}, "record_steps is .*; allowed: a folder that can be written"),
        ("llama", {"record_steps": "s", "record_steps_limit": 0}, "record_steps_limit is 0; allowed: 1 to"),
        ("llama", {"record_steps": "s", "record_steps_bytes": "x"}, "record_steps_bytes cannot be read"),
        ("llama", {"record_steps": "s", "record_steps_detail": "all"}, "allowed: tokens, layers"),
        ("llama", {"record_steps_limit": 3}, "record_steps_limit is 3, but nothing is recorded; give record_steps"),
        (
            "llama",
            {"record_steps_detail": "layers"},
            "record_steps_detail is 'layers', but nothing is recorded; give record_steps",
        ),
        ("llama", {"record_steps": "s", "steer": ["residual:*"]}, "record_steps is given, but steer is given"),
        ("llama", {"record_steps": "s", "enable_trace_replay": True}, "but enable_trace_replay is given"),
        ("llama", {"record_steps": "s", "enable_lora": True}, "record_steps is given, but enable_lora is given"),
        (
            "llama",
            {"record_steps": "s", "speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "record_steps is given, but speculative_config is given",
        ),
        ("llama", {"record_steps": "s", "pipeline_parallel_size": 2}, "but pipeline_parallel_size is more than 1"),
        ("llama", {"record_steps": "s", "nnodes": 2, "tensor_parallel_size": 2}, "but nnodes is more than 1"),
    ],
)
def test_what_is_refused(name, options, match):
    with pytest.raises(ConfigError, match=match):
        EngineConfig.from_options(**options).resolved(read_folder(MODELS / name), CPU)


def test_options_of_a_record_make_the_same_config():
    given = {"record_steps": "s", "record_steps_bytes": "2G", "max_num_seqs": 4, "seed": 3}
    given |= {"compilation_config": {"cudagraph_capture_sizes": [2]}, "capture_layers": [0, -1]}
    config = EngineConfig.from_options(**given).resolved(read_folder(TINY_CHECKPOINT), CPU)
    assert config.record_steps_bytes == 2 << 30
    options = json.loads(json.dumps(replayed_options(config)))
    again = ResolvedConfig(**options, gpu_memory_utilization=1.0)
    assert json.loads(json.dumps(replayed_options(again))) == options and [*again.buckets(CPU)] == [
        *config.buckets(CPU)
    ]


def test_a_record_has_no_secrets_and_no_code():
    given = {"hf_token": "secret", "cluster_key_file": "key", "plugins": "os", "download_dir": "/home/me"}
    config = EngineConfig.from_options(record_steps="s", **given).resolved(read_folder(TINY_CHECKPOINT), CPU)
    said = json.dumps(replayed_options(config))
    assert not [value for value in given.values() if value in said]


def test_options_that_decide_no_step_are_not_recorded():
    given = {
        "allowed_local_media_path": "/home/me",
        "default_seq_tokens": 99,
        "gpu_memory_utilization": 0.5,
        "max_media_bytes": 1 << 20,
        "sleep_idle_seconds": 9.0,
        "steering_vectors": {"calm": "/home/me/calm.gguf"},
    }
    config = EngineConfig().resolved(read_folder(TINY_CHECKPOINT), CPU)
    for name, value in given.items():
        assert replayed_options(dataclasses.replace(config, **{name: value})) == replayed_options(config), name


def test_copies_of_pages_count_as_they_lie_on_the_devices():
    """A row of a TPU's pool is filled up to whole lane tiles."""
    spec = KVSpec(1, 8, 2, 16, 16, "float32")
    model = SimpleNamespace(config=SimpleNamespace(num_layers=2, hidden_size=64))
    config = SimpleNamespace(record_steps_detail="tokens", max_in_flight=2)
    groups = (Paged((0, 1), None, (spec, spec)),)

    def held(platform: str) -> int:
        shape: Any = SimpleNamespace(model=model, config=config, groups=groups, platform=PLATFORMS[platform])
        return RecordingExtension(shape).memory()["recorded steps"]

    assert held("cpu") == PAGE_ROWS * 8 * 2 * 32 * 4 and held("tpu") == PAGE_ROWS * 8 * 128 * 4
