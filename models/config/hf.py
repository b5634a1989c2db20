"""config.json of a Hugging Face checkpoint to the fields of a ModelConfig.

Owns what all families spell alike. Only data is read: `auto_map` and every other pointer to code is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.config.fields import MAX_LAYERS, ConfigFields, ModelConfigError
from models.config.rope import RopeScaling

MAX_CONFIG_BYTES = 16 << 20


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


def hf_architecture(fields: ConfigFields) -> str:
    names = fields.value("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise fields.fail("architectures", "a list of one class name")
    return names[0]


def read_hf_fields(fields: ConfigFields) -> dict[str, Any]:
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
