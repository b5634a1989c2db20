"""The option rl_exact: each token is computed in one fixed form (see jaxengine.models.layers.exact)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jaxengine.config.base.errors import ConfigError
from jaxengine.config.features.speculation import NAME as DRAFTS

if TYPE_CHECKING:
    from jaxengine.models.config.model_config import ModelConfig

NAME = "rl_exact"
# Keys that attention on CPUs adds up at a time: whole pages (XlaAttention.block_kv of jaxengine.pallas_kernels.tuning).
BLOCK_KEYS = 128


def settle_exact(options: Mapping[str, Any], model: ModelConfig, platform: str) -> dict[str, Any]:
    """Return {"compilation_config": step sizes for rl_exact}, with one size for decodes and one for other steps unless
    more were given; {} without rl_exact.

    options: options of the engine, with all defaults filled in. platform: name of the kernels' platform.

    Raises ConfigError for an engine whose results would differ in bits from the trainer's: not on a CPU, split over
    devices, with adapters, drafts by a model or head, captures or steering; for a model that pools, has a tower,
    selects or compresses keys or is quantised; for another KV dtype than the model's, and for a page size that does not
    divide 128.
    """
    if not options[NAME]:
        return {}
    if platform != "cpu":
        raise ConfigError(NAME, True, f"False on {platform}: bits are the same on CPUs alone")
    counts = ("tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size", "nnodes")
    for name, is_so in (
        *((name, options[name] > 1) for name in counts),
        *((name, bool(options[name])) for name in ("enable_lora", "capture_layers", "capture", "steer")),
        (DRAFTS, options[DRAFTS] is not None and options[DRAFTS].has_model),
    ):
        if is_so:
            problem = f"{NAME} is given with {name}, whose results are rounded otherwise"
            more = ", or let ngram or grammar draft" if name == DRAFTS else ""
            raise ConfigError.because(name, problem, f"leave one of them out{more}")
    for why, is_so in (
        ("pools and generates nothing", model.pooler is not None),
        (
            "selects keys by scores, which have no fixed form",
            any(each.index is not None or each.blocks is not None for each in model.attention),
        ),
        ("attends to compressed keys", any(each.compressed is not None for each in model.attention)),
        ("sees, and a trainer's forward pass takes no images", model.tower is not None),
        ("stores its weights in fewer bits, which have no gradient", model.quantization is not None),
    ):
        if is_so:
            raise ConfigError(NAME, True, f"False: {model.architecture} {why}")
    if (kv := options["kv_cache_dtype"]) != options["dtype"]:
        allowed = f"auto with {NAME}: keys and values are kept in the model's dtype, {options['dtype']}"
        raise ConfigError("kv_cache_dtype", kv, allowed)
    if BLOCK_KEYS % (size := options["block_size"]):
        raise ConfigError("block_size", size, f"a divisor of {BLOCK_KEYS} with {NAME}")
    sizes = options["compilation_config"]
    chosen = {name: getattr(sizes, name) or () for name in ("cudagraph_capture_sizes", "prefill_sizes")}
    return {"compilation_config": replace(sizes, **chosen)}
