"""config.json of a Hugging Face checkpoint to the fields of a ModelConfig.

Owns what all families spell alike. Only data is read: `auto_map` and every other pointer to code is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from models.config.attention import LayerAttention
from models.config.fields import ConfigFields, ModelConfigError
from models.config.rope import Rope, RopeScaling
from models.weights.errors import ModelFileError
from models.weights.files import read_object

CONFIG_FILE = "config.json"


def read_config_json(folder: Path | str) -> dict[str, Any]:
    """The parsed config.json of a checkpoint folder. Raises ModelFileError when it is absent or not a JSON object."""
    raw = read_object(folder, CONFIG_FILE)
    if raw is None:
        raise ModelFileError(Path(folder) / CONFIG_FILE, "cannot be read: there is no such file")
    return raw


def hf_architecture(fields: ConfigFields) -> str:
    names = fields.value("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise fields.fail("architectures", "a list of one class name")
    return names[0]


class Activation(NamedTuple):
    """The field that names a model's activation, and the values that mean the one its family has."""

    field: str
    values: tuple[str, ...]


SILU = Activation("hidden_act", ("silu", "swish"))


def hf_fields(
    fields: ConfigFields,
    *,
    windows: int | None | Sequence[int | None] = None,
    head_dim: int | None = None,
    activation: Activation = SILU,
    partial_rotary: bool = False,
    tied: bool = False,
    **attention: Any,
) -> dict[str, Any]:
    """What families spell alike in a config.json: keyword arguments of ModelConfig, but for its architecture.

    Args:
      windows: of each layer, or one for all.
      head_dim: where the file does not say; None for hidden_size / num_attention_heads.
      partial_rotary: whether the family may rotate a part of each head only.
      tied: whether the head is the embedding where the file does not say.
      attention: further fields of every layer's LayerAttention.
    """
    if fields.has("quantization_config"):
        raise ModelConfigError("quantization_config is not supported: load the unquantized checkpoint")
    if fields.text(activation.field, activation.values[0]) not in activation.values:
        raise fields.fail(activation.field, repr(activation.values[0]))
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    if head_dim is None and not fields.has("head_dim") and hidden_size % num_heads:
        raise ModelConfigError(
            f"hidden_size must be a multiple of num_attention_heads when head_dim is absent, "
            f"got {hidden_size} and {num_heads}"
        )
    own_head_dim: int = fields.integer("head_dim", head_dim or hidden_size // num_heads)
    max_positions = fields.integer("max_position_embeddings")
    num_layers = fields.integer("num_hidden_layers")
    layer = partial(
        LayerAttention,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=own_head_dim,
        rope=_read_hf_rope(fields, own_head_dim, max_positions, partial_rotary),
        **attention,
    )
    bos = fields.token_ids("bos_token_id")
    return {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("intermediate_size"),
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
        "max_position_embeddings": max_positions,
        "attention": tuple(
            layer(window=window) for window in (windows if isinstance(windows, Sequence) else [windows] * num_layers)
        ),
        "tie_word_embeddings": fields.boolean("tie_word_embeddings", tied),
        "bos_token_id": bos[0] if bos else None,
        "eos_token_ids": fields.token_ids("eos_token_id"),
    }


def windows_by_kind(fields: ConfigFields, window: int | None) -> tuple[int | None, ...]:
    """Windows of the layers as `layer_types` lists them: `window` for sliding ones, none for the others."""
    by_kind = {"full_attention": None, "sliding_attention": window}
    kinds, num_layers = fields.value("layer_types"), fields.integer("num_hidden_layers")
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(str(kind) not in by_kind for kind in kinds):
        raise fields.fail("layer_types", f"a list of {num_layers} of {', '.join(by_kind)}")
    return tuple(by_kind[str(kind)] for kind in kinds)


def _read_hf_rope(fields: ConfigFields, head_dim: int, max_positions: int, partial_rotary: bool) -> Rope:
    """transformers 4 writes `rope_theta` and `rope_scaling`; transformers 5 one mapping, `rope_parameters`."""
    rope = fields.mapping("rope_parameters") or fields.mapping("rope_scaling") or {}
    nested = ConfigFields(rope)
    theta = nested.number("rope_theta", None) or fields.number("rope_theta", 10000.0)
    rotated = 1.0
    for place in (fields, nested):
        rotated = place.number("partial_rotary_factor", rotated)
        if rotated > 1.0 or (rotated != 1.0 and not partial_rotary):
            raise place.fail("partial_rotary_factor", "a number > 0 and <= 1" if partial_rotary else "1.0")
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ModelConfigError("rope_parameters must be one mapping for all layers, got one per layer type")
    return Rope(int(head_dim * rotated), theta, RopeScaling.from_hf(rope, max_positions))
