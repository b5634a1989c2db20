"""rl_exact: each token is computed in one fixed form (jaxengine.models.layers.exact)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxengine.config.errors import ConfigError

if TYPE_CHECKING:
    from jaxengine.models.config.model_config import ModelConfig

NAME = "rl_exact"
# Keys that attention on CPUs adds up at a time: whole pages (XlaAttention.block_kv of jaxengine.pallas_kernels.tuning).
BLOCK_KEYS = 128


def check_exact(options: Mapping[str, Any], model: ModelConfig, platform: str) -> None:
    """Raise ConfigError for an engine with rl_exact whose results would not have the bits of the trainer's.

    options: of the engine, with all defaults filled in. platform: of its kernels.
    """
    if not options[NAME]:
        return
    if platform != "cpu":
        raise ConfigError(NAME, True, f"False on {platform}: bits are the same on CPUs alone")
    sizes = ("tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size", "nnodes")
    for name, is_so in (
        *((name, options[name] > 1) for name in sizes),
        *((name, bool(options[name])) for name in ("enable_lora", "speculative_config", "capture_layers")),
    ):
        if is_so:
            problem = f"{NAME} is given with {name}, whose results are rounded otherwise"
            raise ConfigError.because(name, problem, "leave one of them out")
    for why, is_so in (
        ("pools and generates nothing", model.pooler is not None),
        ("sees, and a trainer's forward pass takes no pictures", model.tower is not None),
        ("stores its weights in fewer bits, which have no gradient", model.quantization is not None),
    ):
        if is_so:
            raise ConfigError(NAME, True, f"False: {model.architecture} {why}")
    if (kv := options["kv_cache_dtype"]) != options["dtype"]:
        allowed = f"auto with {NAME}: keys and values are kept in the model's dtype, {options['dtype']}"
        raise ConfigError("kv_cache_dtype", kv, allowed)
    if BLOCK_KEYS % (size := options["block_size"]):
        raise ConfigError("block_size", size, f"a divisor of {BLOCK_KEYS} with {NAME}")
