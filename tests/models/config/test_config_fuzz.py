"""Damaged configurations: read or refused with an error of one line, in little memory and time."""

from __future__ import annotations

import json
import random
import tracemalloc

import pytest

from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.registry import read_folder, read_gguf
from tests.models.damage import damaged_bytes, damaged_value

MAX_PEAK_BYTES = 8 << 20


@pytest.fixture
def traced():
    tracemalloc.start()
    yield
    tracemalloc.stop()


def limited(case, use, refusal) -> bool:
    """Whether `use` did not refuse; its error and memory are checked."""
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    try:
        use()
        used = True
    except refusal as error:
        used = False
        assert refusal is not ModelFileError or (len(str(error)) < 2000 and str(error).isprintable()), case
    assert tracemalloc.get_traced_memory()[1] - before < MAX_PEAK_BYTES, case
    return used


def test_damaged_config_json(tmp_path, checkpoints, thorough, traced):
    configs = [json.loads(path.read_text()) for path in sorted(checkpoints.glob("*/config.json"))]
    path, count, used = tmp_path / "config.json", 30_000 if thorough else 200, 0
    for number in range(count):
        rng = random.Random(f"config/{number}")
        config = rng.choice(configs)
        if rng.random() < 0.9:
            path.write_text(json.dumps(damaged_value(config, rng)))
        else:
            path.write_bytes(damaged_bytes(json.dumps(config).encode(), rng))
        used += limited(number, lambda: read_folder(tmp_path), ModelFileError)
    assert count // 10 < used < count * 9 // 10


def test_damaged_gguf_metadata(thorough, traced):
    metadata = {
        "general.architecture": "llama",
        "llama.embedding_length": 64,
        "llama.block_count": 2,
        "llama.attention.head_count": 4,
        "llama.context_length": 128,
        "llama.feed_forward_length": 96,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 1e4,
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 2.0,
        "llama.vocab_size": 128,
        "tokenizer.ggml.eos_token_id": 2,
    }
    count, used = 20_000 if thorough else 200, 0
    for number in range(count):
        damaged = damaged_value(metadata, random.Random(f"metadata/{number}"))
        used += limited(number, lambda: read_gguf(damaged), ModelConfigError)  # noqa: B023
    assert count // 50 < used < count
