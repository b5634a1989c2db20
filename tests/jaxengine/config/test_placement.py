"""Options about where an engine's work runs."""

from __future__ import annotations

import pytest

from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.config.execution.placement import cpus_of
from tests.jaxengine.config.test_engine_config import CPU, MODEL


def test_attention_backends_in_all_spellings():
    for options in ({"attention_backend": "xla"}, {"attention_config": {"backend": "XLA"}}):
        assert EngineConfig.from_options(**options).attention_backend == "XLA"
    nothing = {"attention_backend": "XLA", "attention_config": {"backend": None}}
    assert EngineConfig.from_options(**nothing).attention_backend == "XLA"
    both = {"attention_backend": "XLA", "attention_config": {"backend": "PALLAS"}}
    for options, message in (
        ({"attention_backend": "FLASH_ATTN"}, "attention_backend is 'FLASH_ATTN'; allowed: auto, PALLAS, XLA"),
        ({"attention_backend": 3}, "attention_backend is 3"),
        (both, "attention_config.backend is 'PALLAS', attention_backend 'XLA'; give one of them"),
        ({"attention_config": {"backend": "XLA", "flash_attn_version": 3}}, "attention_config is"),
    ):
        with pytest.raises(ConfigError, match=message):
            EngineConfig.from_options(**options)


def test_context_parallel_size_names_what_tensor_parallelism_does():
    assert MODEL.num_kv_heads == 2
    for size in (1, 4):
        config = EngineConfig(tensor_parallel_size=8, decode_context_parallel_size=size)
        assert config.resolved(MODEL, CPU).max_num_seqs * 4 == CPU.max_num_seqs
    for tensor, size, allowed in ((8, 2, "1 or 4"), (2, 2, "1: so many")):
        config = EngineConfig(tensor_parallel_size=tensor, decode_context_parallel_size=size)
        with pytest.raises(ConfigError, match=f"decode_context_parallel_size is {size}; allowed: {allowed}"):
            config.resolved(MODEL, CPU)


def test_nodes_and_cpus_are_read_and_checked():
    config = EngineConfig(numa_bind=True, numa_bind_nodes=[0, "1"], numa_bind_cpus="0-3,8")
    assert (config.numa_bind_nodes, config.numa_bind_cpus) == ((0, 1), ("0-3,8",))
    assert cpus_of("0-3,8") == {0, 1, 2, 3, 8}
    for options in (
        {"numa_bind_nodes": []},
        {"numa_bind_nodes": [-1]},
        {"numa_bind_nodes": [True]},
        {"numa_bind_nodes": ["x"]},
        {"numa_bind_nodes": [1 << 40]},
        {"numa_bind_cpus": []},
        {"numa_bind_cpus": ["3-0"]},
        {"numa_bind_cpus": ["0-999999999"]},
        {"numa_bind_cpus": ["0-9999"]},
        {"numa_bind_cpus": [3]},
        {"numa_bind_cpus": ["0x3"]},
    ):
        (name,) = options
        with pytest.raises(ConfigError, match=f"{name} is"):
            EngineConfig(numa_bind=True, **options)
    with pytest.raises(ConfigError, match="numa_bind_nodes is given without numa_bind; give numa_bind, too"):
        EngineConfig(numa_bind_nodes=[0])
