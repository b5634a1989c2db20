"""ModelConfig: what a model is, in one frozen hashable record, and how to read it from either checkpoint family.

Owns the checks that every family shares. What is particular to one family is read by that family's own file (see
models/registry.py). Only data is read: `auto_map` and every other pointer to code in a config.json is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.config_fields import MAX_LAYERS, ConfigFields, ModelConfigError
from models.rope import RopeScaling, rope_frequencies

__all__ = ["ExpertsConfig", "ModelConfig", "ModelConfigError", "RopeScaling", "read_config_json"]

MAX_CONFIG_BYTES = 16 << 20


@dataclass(frozen=True)
class ExpertsConfig:
    """The mixture-of-experts layers of a model.

    Attributes:
      num_per_token: experts that each token goes to.
      intermediate_size: feed-forward size of one expert.
      norm_weights: a token's weights are scaled to add up to one.
      dense_layers: indices of the layers that have a dense MLP instead, ascending.
    """

    num_experts: int
    num_per_token: int
    intermediate_size: int
    norm_weights: bool = True
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("num_experts", "num_per_token", "intermediate_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ModelConfigError(f"experts: {name} must be an integer >= 1, got {value!r}")
        if self.num_per_token > self.num_experts:
            raise ModelConfigError(
                f"experts: num_per_token must be at most num_experts = {self.num_experts}, got {self.num_per_token}"
            )


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of one decoder-only model.

    `attention_bias` is the bias of q, k and v; `output_bias` that of the projection after attention. `qk_norm` is an
    RMS norm over each head of q and k before rope. `sliding_window` has one entry per layer: the number of keys a token
    sees counting itself, or None for all of them. `experts` is None for a dense model; where it is not,
    `intermediate_size` is that of dense layers. Token ids are None or empty where the checkpoint names none.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    sliding_window: tuple[int | None, ...]
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    experts: ExpertsConfig | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ModelConfigError(f"{name} must be an integer >= 1, got {value!r}")
        for name, bound in (("rms_norm_eps", 0), ("rope_theta", 1)):
            if not bound < getattr(self, name) < float("inf"):
                raise ModelConfigError(f"{name} must be a finite number > {bound}, got {getattr(self, name)!r}")
        if self.num_heads % self.num_kv_heads:
            raise ModelConfigError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ModelConfigError(f"head_dim must be even for rotary embedding, got {self.head_dim}")
        rope_frequencies(self.head_dim, self.rope_theta, self.rope_scaling)  # raises where they do not fit together
        if len(self.sliding_window) != self.num_layers:
            raise ModelConfigError(
                f"sliding_window must hold one entry per layer ({self.num_layers}), got {len(self.sliding_window)}"
            )
        if any(w is not None and (isinstance(w, bool) or w < 1) for w in self.sliding_window):
            raise ModelConfigError(f"sliding_window entries must be None or integers >= 1, got {self.sliding_window}")
        for token_id in (*self.eos_token_ids, *(() if self.bos_token_id is None else (self.bos_token_id,))):
            if not 0 <= token_id < self.vocab_size:
                raise ModelConfigError(f"token ids must lie in [0, vocab_size = {self.vocab_size}), got {token_id}")

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Read the content of a Hugging Face config.json. Raises ModelConfigError."""
        from models.registry import model_for_hf  # the registry imports the models, and they import this module

        fields = ConfigFields(raw)
        model = model_for_hf(_architecture(fields))
        shared: dict[str, Any] = {"architecture": model.__name__, **_read_hf(fields)}
        return cls(**(shared | model.read_hf(fields)))

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, Any],
        *,
        tie_word_embeddings: bool = True,
        rope_factors: tuple[float, ...] = (),
    ) -> ModelConfig:
        """Read GGUF metadata. Raises ModelConfigError.

        Two facts are tensors and not metadata in that format, so the caller passes them: whether the file lacks an
        output head, and the content of its `rope_freqs.weight`, if any.
        """
        from models.config_gguf import read_gguf  # it imports the registry, see from_hf

        return cls(**read_gguf(metadata, tie_word_embeddings, rope_factors))


def read_config_json(folder: Path | str) -> dict[str, Any]:
    """The parsed config.json of a checkpoint folder. Raises ModelConfigError when it is absent or not a JSON object."""
    path = Path(folder) / "config.json"
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ModelConfigError(f"{path} must be at most {MAX_CONFIG_BYTES} bytes, got {path.stat().st_size}")
        raw = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, ModelConfigError):
            raise
        raise ModelConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelConfigError(f"{path} must hold a JSON object, got {type(raw).__name__}")
    return raw


def _architecture(fields: ConfigFields) -> str:
    names = fields.value("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise fields.fail("architectures", "a list of one class name")
    return names[0]


def _read_hf(fields: ConfigFields) -> dict[str, Any]:
    """The part of a config.json that all families here spell alike."""
    if fields.has("quantization_config"):
        raise ModelConfigError("quantization_config is not supported: load the unquantized checkpoint")
    if fields.text("hidden_act", "silu") not in ("silu", "swish"):
        raise fields.fail("hidden_act", "'silu'")
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    if not fields.has("head_dim") and hidden_size % num_heads:
        raise ModelConfigError(
            f"hidden_size must be a multiple of num_attention_heads when head_dim is absent, "
            f"got {hidden_size} and {num_heads}"
        )
    max_positions = fields.integer("max_position_embeddings")
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    rope_theta, rope_scaling = _read_hf_rope(fields, max_positions)
    bos = fields.token_ids("bos_token_id")
    return {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("intermediate_size"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": fields.integer("num_key_value_heads", num_heads),
        "head_dim": fields.integer("head_dim", hidden_size // num_heads),
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": fields.boolean("tie_word_embeddings", False),
        "sliding_window": (None,) * num_layers,
        "bos_token_id": bos[0] if bos else None,
        "eos_token_ids": fields.token_ids("eos_token_id"),
    }


def _read_hf_rope(fields: ConfigFields, max_positions: int) -> tuple[float, RopeScaling | None]:
    """transformers 4 writes `rope_theta` and `rope_scaling`; transformers 5 one mapping, `rope_parameters`."""
    rope = fields.mapping("rope_parameters") or fields.mapping("rope_scaling") or {}
    nested = ConfigFields(rope)
    theta = nested.number("rope_theta", None) or fields.number("rope_theta", 10000.0)
    for place in (fields, nested):
        if place.number("partial_rotary_factor", 1.0) != 1.0:
            raise place.fail("partial_rotary_factor", "1.0")
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ModelConfigError("rope_parameters must be one mapping for all layers, got one per layer type")
    return theta, RopeScaling.from_hf(rope, max_positions)
