"""Rotary position embedding of a configuration: frequencies, and their scaling for long contexts.

Frequencies are computed on the host in float64; models/layers/base/rope.py applies them on devices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxengine.models.config.fields import MAX_HEAD_DIM, ConfigFields, ModelConfigError

ROPE_TYPES = ("linear", "llama3", "yarn", "longrope", "factors", "proportional")


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of rope frequencies for contexts longer than `original_max_position_embeddings`.

    linear: every frequency / factor. llama3: low frequencies / factor, high ones kept, a blend between (Llama 3.1).
    yarn: a ramp over dimensions plus an attention factor on cos and sin (Peng et al. 2023, arXiv:2309.00071). longrope:
    `factors` if sequences may be longer than the original context, else `short_factors`, plus an attention factor (Ding
    et al. 2024, arXiv:2402.13753). Rope.up_to chooses once for an engine. factors: one explicit divisor per frequency
    (the `rope_freqs.weight` tensor of GGUF files). proportional: the first pairs, a share `rotated` of all, have
    frequency / factor; the others have frequency 0.

    Attributes:
      rope_type: one of ROPE_TYPES.
      factor: divisor of frequencies, as the type applies it.
      low_freq_factor, high_freq_factor: for llama3: frequencies of at most `low_freq_factor` rotations in the original
        context are divided, those of at least `high_freq_factor` rotations kept.
      beta_fast, beta_slow: for yarn: rotations in the original context at which the ramp begins and ends.
      truncate: for yarn: whether the ends of the ramp are rounded outwards to whole pairs.
      attention_factor: factor of cos and sin, for yarn, longrope and factors.
      factors, short_factors: divisors of each frequency, for longrope and factors.
      rotated: for proportional: share of the pairs that are rotated.

    Raises ModelConfigError for another rope_type and for numbers that its formula cannot use.
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
    short_factors: tuple[float, ...] = ()
    rotated: float = 1.0

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise ModelConfigError(f"rope_type must be one of default, {', '.join(ROPE_TYPES)}, got {self.rope_type!r}")
        if self.rope_type in ("llama3", "yarn", "longrope") and self.original_max_position_embeddings < 1:
            raise ModelConfigError(
                "original_max_position_embeddings must be an integer >= 1 for rope_type "
                f"{self.rope_type!r}, got {self.original_max_position_embeddings!r}"
            )
        if self.rope_type == "llama3" and self.high_freq_factor < self.low_freq_factor:
            raise ModelConfigError(
                f"high_freq_factor must be at least low_freq_factor, got {self.high_freq_factor} "
                f"and {self.low_freq_factor}"
            )
        if not 0 < self.rotated <= 1:
            raise ModelConfigError(f"partial_rotary_factor must be a number > 0 and <= 1, got {self.rotated}")
        if not math.isfinite(self.attention_factor):
            raise ModelConfigError(f"attention_factor must be a finite number, got {self.attention_factor}")
        if not all(math.isfinite(f) and f > 0 for f in (*self.factors, *self.short_factors)):
            raise ModelConfigError(f"rope factors must be finite numbers > 0, got {self.factors + self.short_factors}")
        if self.rope_type == "longrope" and len(self.factors) != len(self.short_factors):
            raise ModelConfigError(
                "long_factor and short_factor must hold equally many numbers, got "
                f"{len(self.factors)} and {len(self.short_factors)}"
            )

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], max_position_embeddings: int) -> RopeScaling | None:
        """Return the scaling in the `rope_scaling` (or `rope_parameters`) mapping of a config.json; None for plain
        rope.

        Also returns None for rope_type dynamic without `alpha`, which is plain rope up to max_position_embeddings.
        max_position_embeddings: length of the model's context, which is the default of the original context of yarn and
        longrope. The other fields that a type needs must be present, except yarn's beta_fast (32), beta_slow (1) and
        truncate (true). Raises ModelConfigError for another type, for dynamic with `alpha`, and for fields that are
        missing or wrong.
        """
        fields = ConfigFields(raw)
        rope_type = fields.text("rope_type", None) or fields.text("type", "default")
        if rope_type == "dynamic" and not fields.has("alpha"):
            # It stretches frequencies beyond max_position_embeddings only, which no engine exceeds.
            fields.number("factor")
            rope_type = "default"
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
        if rope_type in ("longrope", "su"):  # the older name
            return _longrope(fields, max_position_embeddings)
        if rope_type == "dynamic":
            raise fields.fail("alpha", "absent with rope_type dynamic")
        raise ModelConfigError(
            f"rope_type must be one of default, dynamic, linear, llama3, yarn, longrope, got {rope_type!r}"
        )


def _longrope(fields: ConfigFields, max_position_embeddings: int) -> RopeScaling:
    """Return the scaling of rope_type longrope. An absent attention_factor is that of longrope_attention_factor, with
    `factor`, by default the ratio of the present to the original context. Raises ModelConfigError for wrong fields, and
    for separate attention factors of the two sets (short_mscale, long_mscale).
    """
    for name in ("short_mscale", "long_mscale"):
        if fields.has(name):
            raise fields.fail(name, "absent: attention_factor says it for both")
    original = fields.integer("original_max_position_embeddings", max_position_embeddings)
    factor = fields.number("factor", max_position_embeddings / original)
    return RopeScaling(
        "longrope",
        original_max_position_embeddings=original,
        attention_factor=fields.number("attention_factor", None) or longrope_attention_factor(factor, original),
        factors=_factors(fields, "long_factor"),
        short_factors=_factors(fields, "short_factor"),
    )


def longrope_attention_factor(factor: float, original_max_position_embeddings: int) -> float:
    """Return longrope's factor of cos and sin: sqrt(1 + ln(factor) / ln(original context)); 1 if factor <= 1 or the
    original context is below 2.
    """
    if factor <= 1 or original_max_position_embeddings < 2:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(original_max_position_embeddings))


def _factors(fields: ConfigFields, name: str) -> tuple[float, ...]:
    """Return the field `name`, a list of at most MAX_HEAD_DIM numbers, as floats. Raises ModelConfigError for any other
    value.
    """
    values = fields.value(name)
    if not isinstance(values, list) or len(values) > MAX_HEAD_DIM or any(type(f) not in (int, float) for f in values):
        raise fields.fail(name, f"a list of at most {MAX_HEAD_DIM} numbers")
    try:
        return tuple(float(factor) for factor in values)
    except OverflowError:
        raise fields.fail(name, "a list of finite numbers > 0") from None


def _yarn_attention_factor(fields: ConfigFields, factor: float) -> float:
    """Return YaRN's factor of cos and sin: attention_factor if given, else mscale(`mscale`) / mscale(`mscale_all_dim`)
    if both are given, else mscale(1), where mscale(w) = 0.1 w ln(factor) + 1, or 1 for factor <= 1. Raises
    ModelConfigError for wrong fields.
    """
    if fields.has("attention_factor"):
        return fields.number("attention_factor")

    def mscale(weight: float) -> float:
        """Return YaRN's mscale of a weight: 0.1 * weight * ln(factor) + 1, or 1 for factor <= 1."""
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    own, of_all = read_mscale(fields, "mscale"), read_mscale(fields, "mscale_all_dim")
    return mscale(own) / mscale(of_all) if own and of_all else mscale(1.0)


def read_mscale(fields: ConfigFields, name: str) -> float:
    """Return `mscale` or `mscale_all_dim` (`name`) of YaRN; 0.0 if it is 0 or absent. Raises ModelConfigError unless it
    is a number >= 0.
    """
    return fields.zero_or_more(name)


@dataclass(frozen=True)
class Rope:
    """Rotation of the first `num_rotated` elements of each head of a layer's queries and keys.

    Attributes:
      rotary_dim: elements of a head that count in frequencies; if they are odd, one more is rotated as in transformers.
      theta: base of the frequencies; pair i rotates by theta ** (-2 i / rotary_dim) radians per position, unscaled.
      scaling: for long contexts; None for none.
      interleaved: whether a pair is elements 2i and 2i + 1, as in GPT-J; otherwise i and i + num_rotated / 2.
      sections: how many of the pairs rotate by a token's M-RoPE position in time, in height and in width (Wang et al.
        2024, arXiv:2409.12191); with four counts, how many rotate by its plain position, then those three (HunyuanOCR);
        empty where all rotate by its position.
      sections_interleaved: whether pairs alternate between time, height and width while there are any of height and
        width, and the rest are of time (Qwen3-VL); otherwise the pairs of a section are adjacent.
      time_last: whether pairs alternate between height and width, equally many, and the rest are of time (ERNIE
        4.5-VL).

    Raises ModelConfigError for sections that are not three or four counts that add up to half of the rotated elements,
    four that are interleaved, other counts of height than of width with `time_last`, a theta that is not finite and
    above 1, a rotary_dim out of its limits, and frequencies that are not finite.
    """

    rotary_dim: int
    theta: float = 10000.0
    scaling: RopeScaling | None = None
    interleaved: bool = False
    sections: tuple[int, ...] = ()
    sections_interleaved: bool = False
    time_last: bool = False

    def __post_init__(self) -> None:
        if self.sections and (
            len(self.sections) not in (3, 4) or sum(self.sections) != self.num_rotated // 2 or min(self.sections) < 0
        ):
            raise ModelConfigError(
                f"mrope_section must be three counts that sum up to rotary_dim / 2 = {self.num_rotated // 2}, got "
                f"{list(self.sections)}"
            )
        if len(self.sections) == 4 and self.sections_interleaved:
            raise ModelConfigError(f"mrope_section must be three counts if they alternate, got {list(self.sections)}")
        if self.time_last and (len(self.sections) != 3 or self.sections[1] != self.sections[2]):
            raise ModelConfigError(
                "mrope_section must be three counts, of height and of width the same, if height and width alternate, "
                f"got {list(self.sections)} of time, height and width"
            )
        if not 1 < self.theta < float("inf"):
            raise ModelConfigError(f"rope_theta must be a finite number > 1, got {self.theta!r}")
        if not 1 <= self.rotary_dim <= MAX_HEAD_DIM:
            text = f"rotary_dim, head_dim or a part of it, must be >= 1 and <= {MAX_HEAD_DIM}, got {self.rotary_dim}"
            raise ModelConfigError(text)
        try:
            with np.errstate(all="ignore"):
                usable = np.isfinite(self.frequencies()).all()
        except ModelConfigError:
            raise
        except (ArithmeticError, ValueError):  # the logarithm of 0, ...
            usable = False
        if not usable:
            raise ModelConfigError(f"rope must give finite frequencies, got theta {self.theta} with {self.scaling}")

    @property
    def num_rotated(self) -> int:
        """Elements of a head that are rotated, an even number: those of its pairs."""
        return self.rotary_dim + self.rotary_dim % 2

    def up_to(self, num_positions: int) -> Rope:
        """Return the rope for an engine whose sequences have at most `num_positions` tokens.

        With longrope it has explicit factors: the long ones if `num_positions` exceeds the original context, otherwise
        the short ones. The set is chosen once for all sequences, as in vLLM: a choice by length would rotate cached
        keys otherwise. Other ropes are returned unchanged.
        """
        scaling = self.scaling
        if scaling is None or scaling.rope_type != "longrope":
            return self
        long = num_positions > scaling.original_max_position_embeddings
        factors = scaling.factors if long else scaling.short_factors
        chosen = RopeScaling("factors", attention_factor=scaling.attention_factor, factors=factors)
        return replace(self, scaling=chosen)

    def section_of_pairs(self) -> np.ndarray:
        """Return the section of each rotated pair, i32[num_rotated / 2], an index into `sections`. Sections follow each
        other; with sections_interleaved they alternate until the shorter ones are used up, and the rest is 0; with
        time_last height and width alternate, then comes time. Valid only for a rope with sections.
        """
        if self.time_last:
            time, height, width = self.sections
            return np.asarray([1, 2] * height + [0] * time, np.int32)[: height + width + time]
        if not self.sections_interleaved:
            return np.repeat(np.arange(len(self.sections), dtype=np.int32), self.sections)
        sections = np.zeros(self.num_rotated // 2, np.int32)
        for section, count in list(enumerate(self.sections))[1:]:
            sections[section : 3 * count : 3] = section
        return sections

    def frequencies(self) -> np.ndarray:
        """Return the radians per position of each rotated pair, float64[num_rotated / 2]. Raises ModelConfigError if
        the number of scaling factors differs from that of pairs.
        """
        return rope_frequencies(self.rotary_dim, self.theta, self.scaling)


def stretched_base(theta: float, alpha: float, head_dim: int) -> float:
    """Return the base of ropes with "alpha": theta * alpha ** (H / (H - 2)), for heads of H = `head_dim` elements.
    Raises ModelConfigError for H <= 2. The result may be beyond float32.
    """
    if head_dim <= 2:
        raise ModelConfigError(f"head_dim must be more than 2 where alpha stretches the base of rope, got {head_dim}")
    return theta * alpha ** (head_dim / (head_dim - 2))


def rope_frequencies(rotary_dim: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """Return the radians per position of each rotated pair, float64[ceil(rotary_dim / 2)], divided as `scaling` says
    (None: not at all). With longrope its long factors are used; with "proportional" the pairs after the share `rotated`
    get 0. Raises ModelConfigError if there is not one factor for each pair.
    """
    freqs = theta ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    if scaling is None:
        return freqs
    if scaling.rope_type == "linear":
        return freqs / scaling.factor
    if scaling.rope_type == "llama3":
        return _llama3(freqs, scaling)
    if scaling.rope_type == "yarn":
        return _yarn(freqs, rotary_dim, theta, scaling)
    if scaling.rope_type == "proportional":
        pairs = np.arange(len(freqs))
        return np.where(pairs < scaling.rotated * rotary_dim // 2, freqs / scaling.factor, 0.0)
    if len(scaling.factors) != len(freqs):
        raise ModelConfigError(
            f"rope factors must hold rotary_dim / 2 = {len(freqs)} values, got {len(scaling.factors)}"
        )
    return freqs / np.asarray(scaling.factors)


def _llama3(freqs: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Return frequencies f64[n] scaled as in Llama 3.1: kept for pairs with at least high_freq_factor rotations in the
    original context, divided by `factor` for those with at most low_freq_factor, and blended linearly between. If both
    are equal, the pairs with exactly so many rotations are kept.
    """
    turns = scaling.original_max_position_embeddings * freqs / (2 * np.pi)  # full turns over the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    # Llama 4 has equal low and high factors: there is no blend between kept and divided frequencies.
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0) if high > low else (turns >= low).astype(np.float64)
    return freqs * (kept + (1 - kept) / scaling.factor)


def _yarn(freqs: np.ndarray, rotary_dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """Return frequencies f64[ceil(rotary_dim / 2)] scaled by YaRN's ramp: kept up to the pair with beta_fast rotations
    in the original context, divided by `factor` from the pair with beta_slow rotations on, and blended linearly
    between. The borders are fractions of pairs, or with `truncate` the whole pairs around them, and lie within the
    head.
    """

    def dimension_with(turns: float) -> float:
        """Return the (fractional) index of the pair that makes `turns` rotations in the original context."""
        context = scaling.original_max_position_embeddings
        return rotary_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_with(scaling.beta_fast), dimension_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    width = high - low if high != low else 0.001
    stretched = np.clip((np.arange(len(freqs)) - low) / width, 0.0, 1.0)
    return freqs * (1 - stretched) + freqs / scaling.factor * stretched
