"""Storage of keys and values: the values of kv_cache_dtype, and where scales come from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxengine.config.base.errors import ConfigError
from jaxengine.models.kernel_rows import PLATFORMS as KERNELS

if TYPE_CHECKING:
    from jaxengine.models.config.model_config import ModelConfig

# vLLM's names, and the dtypes' own.
_CODES = {
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "int8": "int8",
    "float8_e4m3fn": "float8_e4m3fn",
    "float8_e5m2": "float8_e5m2",
}
# vLLM's names for a scale per token and KV head.
_PER_TOKEN = ("int8_per_token_head", "fp8_per_token_head")
KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", *_CODES, *_PER_TOKEN)
AUTO, CALIBRATE, UNIT = "auto", "calibrate", "unit"


def kv_dtype(name: str, quantization: Any, dtype: str, platform: str) -> str:
    """Return the name of the KV pool's dtype, a numpy name or one of int8_per_token_head and fp8_per_token_head.

    name: value of kv_cache_dtype; "auto" is the dtype of the checkpoint's quantization, or else of the model.
    quantization: quantization of the checkpoint; None if it is not quantised. dtype: dtype of the model. platform: name
    of the kernels that read the pool. Raises ConfigError for scales per token on kernels that do not read them.
    """
    if name in _PER_TOKEN and not KERNELS[platform].reads_token_scales:
        codes = ", ".join(each for each in KV_CACHE_DTYPES if each not in _PER_TOKEN)
        allowed = f"{codes} on {platform}, whose attention kernels read no scales of single tokens"
        raise ConfigError("kv_cache_dtype", name, allowed)
    if name == "auto":
        return getattr(quantization, "kv_dtype", None) or dtype
    return _CODES.get(name, name)


def check_pages(name: str, model: ModelConfig, kv_cache_dtype: str, num_bytes: int | None) -> None:
    """Raise ConfigError for options of the KV pool that the model's layers cannot have.

    With scales per token, the layers' pages must have equal sizes; with other 8-bit codes, the layers must have equal
    numbers of KV heads; with either, no layer may select blocks of keys, whose pages join keys and values. Without keys
    and values, both options must be left at their defaults. name: value of kv_cache_dtype. kv_cache_dtype: the pool's
    dtype that `kv_dtype` returned. num_bytes: value of kv_cache_memory_bytes.
    """
    if not model.attending:
        for option, value, allowed in (("kv_cache_dtype", name, AUTO), ("kv_cache_memory_bytes", num_bytes, None)):
            if value != allowed:
                raise ConfigError(option, value, f"{allowed!r}: {model.architecture} keeps no keys and values")
    if name in _PER_TOKEN and not model.has_equal_pages:
        allowed = f"another one for {model.architecture}, whose layers keep pages of different sizes"
        raise ConfigError("kv_cache_dtype", name, allowed)
    if any(each.index is not None and each.index.block is not None for each in model.attention) and (
        name in _PER_TOKEN or kv_cache_dtype in _CODES.values()
    ):
        allowed = f"float32 or bfloat16 for {model.architecture}, whose pages join keys and values"
        raise ConfigError("kv_cache_dtype", name, allowed)
    if kv_cache_dtype in _CODES.values() and not model.has_equal_heads:
        allowed = f"auto, float32 or bfloat16 for {model.architecture}, whose layers differ in their number of KV heads"
        raise ConfigError("kv_cache_dtype", name, allowed)


def is_coded(kv_cache_dtype: str) -> bool:
    """Return whether pages of this value of the option kv_cache_dtype contain 8-bit codes with one fixed scale per
    layer and KV head. False for "auto".
    """
    return kv_cache_dtype in _CODES


def check_scales(kv_cache_dtype: str, scales: str) -> None:
    """Raise ConfigError if kv_cache_scales (`scales`) is not "auto" and kv_cache_dtype has no fixed scales: it is not
    8-bit, or has a scale per token.
    """
    if scales != AUTO and not is_coded(kv_cache_dtype):
        own = "takes them from each token" if kv_cache_dtype in _PER_TOKEN else "has no scales"
        allowed = f"{AUTO!r} where kv_cache_dtype is {kv_cache_dtype!r}, which {own}"
        raise ConfigError("kv_cache_scales", scales, allowed)
