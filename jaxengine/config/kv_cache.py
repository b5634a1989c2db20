"""How keys and values are stored: the names of kv_cache_dtype and where the scales of codes come from."""

from __future__ import annotations

from typing import Any

from jaxengine.config.errors import ConfigError

# vLLM's names, and the dtypes' own.
_CODES = {
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "int8": "int8",
    "float8_e4m3fn": "float8_e4m3fn",
    "float8_e5m2": "float8_e5m2",
}
# vLLM's names too: a scale for each token and kv head, and the platforms whose attention reads those.
_PER_TOKEN = ("int8_per_token_head", "fp8_per_token_head")
_READ_ON = ("cpu", "gpu_xla")
KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", *_CODES, *_PER_TOKEN)
AUTO, CALIBRATE, UNIT = "auto", "calibrate", "unit"


def kv_dtype(name: str, quantization: Any, dtype: str, platform: str) -> str:
    """What models.cache.KVSpec calls the dtype of the pool.

    quantization: the checkpoint's, None for none. dtype: the model's. platform: the kernels that are to read the pool.
    Raises ConfigError for codes that they do not read.
    """
    if name in _PER_TOKEN and platform not in _READ_ON:
        codes = ", ".join(each for each in KV_CACHE_DTYPES if each not in _PER_TOKEN)
        allowed = f"{codes} on {platform}, whose attention kernels read no scales of single tokens"
        raise ConfigError("kv_cache_dtype", name, allowed)
    if name == "auto":
        return getattr(quantization, "kv_dtype", None) or dtype
    return _CODES.get(name, name)


def is_coded(kv_cache_dtype: str) -> bool:
    """Whether pages hold codes of scales that are known beforehand: those of each layer and kv head."""
    return kv_cache_dtype in _CODES


def check_scales(kv_cache_dtype: str, scales: str) -> None:
    """Raises ConfigError for scales of keys and values that are not codes, or have their own."""
    if scales != AUTO and not is_coded(kv_cache_dtype):
        own = "takes them from each token" if kv_cache_dtype in _PER_TOKEN else "has no scales"
        allowed = f"{AUTO!r} where kv_cache_dtype is {kv_cache_dtype!r}, which {own}"
        raise ConfigError("kv_cache_scales", scales, allowed)
