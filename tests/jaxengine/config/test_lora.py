"""Options of adapters: what is allowed, and that none is accepted and forgotten."""

from __future__ import annotations

import pytest

from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.models.config.lora import LoraSpec


def test_room_for_adapters():
    config = EngineConfig(enable_lora=True, max_loras=4, max_lora_rank=64)
    assert config.lora_spec == LoraSpec(4, 64) and config.num_cpu_loras == 4
    assert EngineConfig(enable_lora=True, max_cpu_loras=9).num_cpu_loras == 9
    assert EngineConfig().lora_spec is None


@pytest.mark.parametrize(
    "options, says",
    [
        ({"enable_lora": True, "max_lora_rank": 7}, "max_lora_rank is 7; allowed: 8, 16, 32, 64, 128, 256"),
        ({"enable_lora": True, "max_loras": 0}, "max_loras is 0; allowed: 1 to"),
        ({"enable_lora": True, "max_loras": 4, "max_cpu_loras": 3}, "max_cpu_loras is 3; allowed: max_loras, 4, to"),
        ({"max_loras": 2}, "max_loras is 2, but there are no adapters; set enable_lora"),
        ({"enable_lora": True, "nnodes": 2}, "adapters over several processes are not supported"),
        ({"enable_lora": "yes"}, "enable_lora is 'yes'"),
        ({"lora_extra_vocab_size": 256}, "there is no option lora_extra_vocab_size; vLLM has removed it"),
        ({"fully_sharded_loras": True}, "fully_sharded_loras is True, which is not supported yet"),
        ({"lora_modules": ["a=b"]}, "it belongs to another command: jaxengine serve --lora-modules"),
    ],
)
def test_what_is_not_allowed_is_named(options, says):
    with pytest.raises(ConfigError, match=says.replace("(", r"\(")):
        EngineConfig.from_options(**options)
