"""Rotary position embedding as a configuration says it: frequencies, and how checkpoints stretch them.

Frequencies are worked out on the host in float64. Knows nothing of arrays on devices: see models/layers/rope.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from models.config.fields import MAX_HEAD_DIM, ConfigFields, ModelConfigError

ROPE_TYPES = ("linear", "llama3", "yarn", "factors")


@dataclass(frozen=True)
class RopeScaling:
    """How rope frequencies are stretched for contexts longer than `original_max_position_embeddings`.

    linear: every frequency / factor. llama3: long waves / factor, short ones kept, a linear blend between (Llama 3.1).
    yarn: a ramp over dimensions plus an attention factor on cos and sin (Peng et al. 2023, arXiv:2309.00071).
    factors: one explicit divisor per frequency (the `rope_freqs.weight` tensor of GGUF files).
    """

    rope_type: str
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise ModelConfigError(f"rope_type must be one of default, {', '.join(ROPE_TYPES)}, got {self.rope_type!r}")
        if self.rope_type in ("llama3", "yarn") and self.original_max_position_embeddings < 1:
            raise ModelConfigError(
                "original_max_position_embeddings must be an integer >= 1 for rope_type "
                f"{self.rope_type!r}, got {self.original_max_position_embeddings!r}"
            )
        if self.rope_type == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ModelConfigError(
                f"high_freq_factor must be larger than low_freq_factor, got {self.high_freq_factor} "
                f"and {self.low_freq_factor}"
            )
        if not math.isfinite(self.attention_factor):
            raise ModelConfigError(f"attention_factor must be a finite number, got {self.attention_factor}")
        if self.rope_type == "factors" and not all(math.isfinite(f) and f > 0 for f in self.factors):
            raise ModelConfigError(f"rope factors must be finite numbers > 0, got {self.factors!r}")

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], max_position_embeddings: int) -> RopeScaling | None:
        """Read the `rope_scaling` (or `rope_parameters`) mapping of a config.json; None for plain rope."""
        fields = ConfigFields(raw)
        rope_type = fields.text("rope_type", None) or fields.text("type", "default")
        if rope_type == "default":
            return None
        if rope_type == "linear":
            return cls("linear", fields.number("factor"))
        if rope_type == "llama3":
            return cls(
                "llama3",
                fields.number("factor"),
                fields.integer("original_max_position_embeddings"),
                low_freq_factor=fields.number("low_freq_factor"),
                high_freq_factor=fields.number("high_freq_factor"),
            )
        if rope_type == "yarn":
            factor = fields.number("factor")
            return cls(
                "yarn",
                factor,
                fields.integer("original_max_position_embeddings", max_position_embeddings),
                beta_fast=fields.number("beta_fast", 32.0),
                beta_slow=fields.number("beta_slow", 1.0),
                attention_factor=_yarn_attention_factor(fields, factor),
                truncate=fields.boolean("truncate", True),
            )
        raise ModelConfigError(f"rope_type must be one of default, linear, llama3, yarn, got {rope_type!r}")


def _yarn_attention_factor(fields: ConfigFields, factor: float) -> float:
    if fields.has("attention_factor"):
        return fields.number("attention_factor")

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if fields.has("mscale") and fields.has("mscale_all_dim"):
        return mscale(fields.number("mscale")) / mscale(fields.number("mscale_all_dim"))
    return mscale(1.0)


@dataclass(frozen=True)
class Rope:
    """The rotation of a layer's queries and keys: the first `rotary_dim` elements of each head, which is even.

    interleaved: element 2i is rotated with element 2i + 1, as in GPT-J, and not i with i + rotary_dim / 2.
    """

    rotary_dim: int
    theta: float = 10000.0
    scaling: RopeScaling | None = None
    interleaved: bool = False

    def __post_init__(self) -> None:
        if not 1 < self.theta < float("inf"):
            raise ModelConfigError(f"rope_theta must be a finite number > 1, got {self.theta!r}")
        if self.rotary_dim % 2 or not 2 <= self.rotary_dim <= MAX_HEAD_DIM:
            raise ModelConfigError(
                f"rotary_dim, head_dim or a part of it, must be even, >= 2 and <= {MAX_HEAD_DIM}, got {self.rotary_dim}"
            )
        try:
            with np.errstate(all="ignore"):
                usable = np.isfinite(self.frequencies()).all()
        except ModelConfigError:
            raise
        except (ArithmeticError, ValueError):  # the logarithm of 0, ...
            usable = False
        if not usable:
            raise ModelConfigError(f"rope must give finite frequencies, got theta {self.theta} with {self.scaling}")

    def frequencies(self) -> np.ndarray:
        """Radians per position of each rotated pair, float64[rotary_dim / 2]."""
        return rope_frequencies(self.rotary_dim, self.theta, self.scaling)


def rope_frequencies(rotary_dim: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """Radians per position of each rotated pair, float64[rotary_dim / 2]."""
    freqs = theta ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    if scaling is None:
        return freqs
    if scaling.rope_type == "linear":
        return freqs / scaling.factor
    if scaling.rope_type == "llama3":
        return _llama3(freqs, scaling)
    if scaling.rope_type == "yarn":
        return _yarn(freqs, rotary_dim, theta, scaling)
    if len(scaling.factors) != len(freqs):
        raise ModelConfigError(
            f"rope factors must hold rotary_dim / 2 = {len(freqs)} values, got {len(scaling.factors)}"
        )
    return freqs / np.asarray(scaling.factors)


def _llama3(freqs: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    turns = scaling.original_max_position_embeddings * freqs / (2 * np.pi)  # full turns over the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return freqs * (kept + (1 - kept) / scaling.factor)


def _yarn(freqs: np.ndarray, rotary_dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    def dimension_with(turns: float) -> float:
        context = scaling.original_max_position_embeddings
        return rotary_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_with(scaling.beta_fast), dimension_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    width = high - low if high != low else 0.001
    stretched = np.clip((np.arange(rotary_dim // 2) - low) / width, 0.0, 1.0)
    return freqs * (1 - stretched) + freqs / scaling.factor * stretched
