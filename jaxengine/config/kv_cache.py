"""How keys and values are stored: the names of kv_cache_dtype and where the scales of codes come from."""

from __future__ import annotations

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
KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", *_CODES)
AUTO, CALIBRATE, UNIT = "auto", "calibrate", "unit"


def kv_dtype(name: str, dtype: str) -> str:
    """The dtype of the pool; dtype: the model's."""
    return dtype if name == "auto" else _CODES.get(name, name)


def is_coded(kv_cache_dtype: str) -> bool:
    """Whether pages hold codes, which are multiplied with scales."""
    return kv_cache_dtype in _CODES


def check_scales(kv_cache_dtype: str, scales: str) -> None:
    """Raises ConfigError for scales of keys and values that are not codes."""
    if scales != AUTO and not is_coded(kv_cache_dtype):
        allowed = f"{AUTO!r} where kv_cache_dtype is {kv_cache_dtype!r}, which has no scales"
        raise ConfigError("kv_cache_scales", scales, allowed)
