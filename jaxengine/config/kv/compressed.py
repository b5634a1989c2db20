"""Engine options of models with a key for each block of tokens: kept (DeepSeek-V4), or pooled anew (GLM-5.3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxengine.config.base.errors import ConfigError

if TYPE_CHECKING:
    from jaxengine.models.config.model_config import ModelConfig

_DTYPES = ("float32", "bfloat16", "float16")


def check_compressed(options: Mapping[str, Any], model: ModelConfig, platform: str) -> dict[str, Any]:
    """Return {} always; raise ConfigError for pages that the model's compressed or pooled keys cannot have: an 8-bit KV
    dtype; for compressed keys also a page size that is neither a multiple nor a divisor of a block of tokens, or, on a
    TPU, pages of several sizes.

    options: options of the engine, with all defaults filled in. platform: name of the kernels' platform.
    """
    keys = [layer.compressed for layer in model.attention if layer.compressed is not None]
    rates, size = sorted({each.rate for each in keys if each.rate is not None}), options["block_size"]
    pools = any(layer.index is not None and layer.index.pool is not None for layer in model.attention)
    blocks = any(layer.blocks is not None for layer in model.attention)
    if (rates or pools or blocks) and (dtype := options["kv_cache_dtype"]) not in _DTYPES:
        own = "compressed keys" if rates else "gates of pooled keys" if pools else "keys of blocks"
        allowed = f"auto, float32 or bfloat16 for {model.architecture}, whose {own} are kept in no codes"
        raise ConfigError("kv_cache_dtype", dtype, allowed)
    if not rates:
        return {}
    if unfit := [rate for rate in rates if size % rate and rate % size]:
        allowed = f"a multiple or a divisor of the {unfit[0]} tokens of which {model.architecture} keeps one key"
        raise ConfigError("block_size", size, allowed)
    if platform == "tpu" and len({tuple(each.page_sizes(size).items()) for each in keys if each.rate}) > 1:
        problem = f"{model.architecture} keeps pages of several sizes, which the layout of TPUs cannot mix"
        raise ConfigError.because("model", problem, "serve it on a CPU or a GPU")
    return {}
