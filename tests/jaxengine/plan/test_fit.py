"""`fit` chooses what is left open so that the model fits, and what it chooses starts."""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace

import pytest

from jaxengine.config.base.lengths import AUTO_LENGTH
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.plan import fit
from jaxengine.plan.chips import CHIPS
from jaxengine.runner.start.open import open_resolved
from tests.conftest import TINY_CHECKPOINT
from tests.tables import each_row

GIB = 1 << 30


def devices(kind, count, gib):
    """Stand-ins for TPU devices, which report their memory."""
    stats = {"bytes_limit": int(gib * GIB), "bytes_in_use": 0}
    return [SimpleNamespace(platform="tpu", device_kind=kind, memory_stats=lambda: stats)] * count


def fitted(count, gib, model=TINY_CHECKPOINT, kind="TPU v5 lite", **options):
    config = EngineConfig(model=str(model), skip_tokenizer_init=True, fit=True, **options)
    return fit.fitted(config, devices(kind, count, gib))


def size_of(config):
    return config.tensor_parallel_size, config.pipeline_parallel_size, config.data_parallel_size


def test_a_large_model_is_split_over_all_chips():
    """8B takes 16 GB in bfloat16: no chip of 12 GiB holds it."""
    config = fitted(2, 12, "llama-3.1-8b", max_num_seqs=8, max_num_batched_tokens=512)
    assert size_of(config) in [(2, 1, 1), (1, 2, 1)]
    assert (config.fit, config.max_model_len, config.max_num_seqs) == (False, AUTO_LENGTH, 8)


def test_what_is_given_stays():
    config = fitted(4, 1, tensor_parallel_size=2, max_model_len=50, max_num_seqs=16)
    assert (config.tensor_parallel_size, config.max_model_len, config.max_num_seqs) == (2, 50, 16)
    assert config.data_parallel_size * config.pipeline_parallel_size == 2


def test_steps_shrink_before_the_context_does(caplog):
    """Programs and workspace of full steps do not fit."""
    with caplog.at_level(logging.INFO, logger="jaxengine"):
        config = fitted(1, 0.1)
    assert 1 < config.max_num_seqs < 256 and 64 < config.max_num_batched_tokens < 2048
    assert config.max_model_len == AUTO_LENGTH and f"max_num_seqs {config.max_num_seqs}" in caplog.text
    assert fitted(1, 0.1, max_num_batched_tokens=config.max_num_batched_tokens).max_num_seqs == config.max_num_seqs


def test_nothing_fits():
    with pytest.raises(ConfigError, match="no KV page fits"):
        fitted(1, 0.003)


@each_row(
    "kind, name",
    [
        ("TPU v5 lite", "v5e"),
        ("TPU v5e", "v5e"),
        ("TPU v6 lite", "v6e"),
        ("TPU v5p", "v5p"),
        ("TPU v5", "v5p"),
        ("TPU7x", "tpu7x"),
        ("TPU v9", None),
    ],
)
def test_chips_by_what_jax_calls_them(kind, name):
    chips = fit.chips_of(devices(kind, 4, 7))
    wanted = 0.0 if name is None else CHIPS[name].bandwidth
    assert (chips.count, chips.chip.memory, chips.chip.bandwidth) == (4, 7 * GIB, wanted)


@pytest.mark.thorough("test_against_start.py starts engines as planned")
def test_an_engine_starts_as_chosen(make_llm):
    """Eight pages hold less than the model's context."""
    llm = make_llm(fit=True, num_gpu_blocks_override=8, max_model_len=None)
    config = llm.core.config
    assert (config.fit, config.max_model_len) == (False, 8 * config.block_size)
    (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], use_tqdm=False)
    assert output.outputs[0].token_ids


def test_where_nothing_is_chosen(tiny_options):
    for options in ({"fit": True, "nnodes": 2}, {"fit": "perhaps"}):
        with pytest.raises(ConfigError, match="fit"):
            EngineConfig(**tiny_options, **options)
    config = EngineConfig(**tiny_options, fit=True)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ConfigError, match="fit is True; allowed: False"):
        open_resolved(config)
    assert len(os.listdir("/proc/self/fd")) == len(before)
    with pytest.raises(ConfigError, match="with a mesh"):
        fit.fitted(config, mesh=object())
