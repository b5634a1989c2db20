"""Fields of a config.json, and of a GGUF file, that families with multi-head latent attention share."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from jaxengine.models.config.attention import Latent
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.gguf import GGUFConfig, gguf_fields, gguf_temperature
from jaxengine.models.config.readers.hf import hf_fields, read_rope
from jaxengine.models.config.rope import read_mscale


def hf_latent_fields(
    fields: ConfigFields, *, interleaved: bool = True, roped: bool = True, **options: Any
) -> dict[str, Any]:
    """Return keyword arguments of ModelConfig, without the architecture, from the config.json of a model with
    multi-head latent attention: those of `hf_fields`, with a Latent in each layer, whose sizes are the fields of the
    same names (q_lora_rank may be absent), one KV head, and a softmax scale that includes the square of YaRN's mscale.

    Args:
      interleaved: whether rope rotates pairs of neighbouring elements, as in GPT-J.
      roped: whether keys have a rotated part; otherwise qk_rope_head_dim must be 0, and no layer has rope.
      options: options of hf_fields.

    Raises ModelConfigError for a field that is missing, wrong or not supported, and for a num_key_value_heads that
    differs from num_attention_heads.
    """
    num_heads = fields.integer("num_attention_heads")
    if not roped:
        fields.require(qk_rope_head_dim=0)
    rope_dim = fields.integer("qk_rope_head_dim") if roped else 0
    if fields.integer("num_key_value_heads", num_heads) != num_heads:
        raise fields.fail("num_key_value_heads", f"num_attention_heads = {num_heads}: all heads share a latent")
    latent = Latent(
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim"),
        qk_rope_head_dim=rope_dim,
        v_head_dim=fields.integer("v_head_dim"),
        q_lora_rank=fields.integer("q_lora_rank", None),
    )
    # transformers 5 calls the rotated part `head_dim`, so the field carries no other information.
    head_dim = rope_dim or latent.kv_lora_rank
    fields = ConfigFields({**fields.raw, "head_dim": head_dim, "num_key_value_heads": 1})
    rope = read_rope(fields, rope_dim, interleaved=interleaved) if roped else None
    ropes = [rope] * fields.integer("num_hidden_layers")
    shared = hf_fields(fields, ropes=ropes, **options)
    scale = (latent.qk_nope_head_dim + rope_dim) ** -0.5 * _mscale(fields) ** 2
    layers = (
        replace(layer, head_dim=latent.kv_lora_rank + rope_dim, scale=scale, latent=latent)
        for layer in shared["attention"]
    )
    return shared | {"attention": tuple(layers)}


def _mscale(fields: ConfigFields) -> float:
    """Return YaRN's factor (Peng et al. 2023, arXiv:2309.00071) of entire queries and keys, 0.1 * mscale_all_dim *
    ln(factor) + 1; 1 without `mscale_all_dim` or scaling, and for a factor below 1. Raises ModelConfigError for fields
    of a wrong type, and for scaling without a factor.
    """
    rope = ConfigFields(fields.mapping("rope_parameters") or fields.mapping("rope_scaling") or {})
    weight = read_mscale(rope, "mscale_all_dim")
    if not weight or (rope.text("rope_type", None) or rope.text("type", "default")) == "default":
        return 1.0
    return 0.1 * weight * math.log(max(rope.number("factor"), 1.0)) + 1.0


def gguf_latent_fields(gguf: GGUFConfig, *, interleaved: bool = True, **options: Any) -> dict[str, Any]:
    """Return keyword arguments of ModelConfig, without the architecture, from the GGUF file of a model with multi-head
    latent attention: those of `gguf_fields`, with a Latent in each layer, one KV head, rope of neighbouring elements if
    `interleaved`, and a softmax scale that includes the square of YaRN's mscale.

    Current files give the sizes of attention over latents, with one KV head, and in addition those of a head
    (`..._length_mla`); older files give only the latter. The other sizes are `attention.kv_lora_rank`,
    `attention.q_lora_rank` (which may be absent) and `rope.dimension_count`. options: further options of gguf_fields,
    without interleaved and yarn. Raises ModelConfigError for a field that is missing, wrong or not supported, and for
    heads in which all elements are rotated.
    """
    fields, prefix = gguf.fields, gguf.fields.prefix
    rope_dim = fields.integer("rope.dimension_count", minimum=0)
    sizes = [
        fields.integer(f"attention.{kind}_length_mla", None) or fields.integer(f"attention.{kind}_length")
        for kind in ("key", "value")
    ]
    if sizes[0] <= rope_dim:
        raise fields.fail("attention.key_length", f"more than the rotated part of a head, {rope_dim}")
    latent = Latent(
        kv_lora_rank=fields.integer("attention.kv_lora_rank"),
        qk_nope_head_dim=sizes[0] - rope_dim,
        qk_rope_head_dim=rope_dim,
        v_head_dim=sizes[1],
        q_lora_rank=fields.integer("attention.q_lora_rank", None),
    )
    # Rope, even if no layer has it, must have an even size.
    sizes_of_rope = ("attention.key_length", "attention.value_length", "rope.dimension_count")
    rotated = {f"{prefix}{name}": rope_dim or 2 for name in sizes_of_rope}
    alike = gguf._replace(metadata={**gguf.metadata, **rotated, f"{prefix}attention.head_count_kv": 1})
    # Rope's tables need no factor: `mscale` equals `mscale_all_dim` in all published checkpoints.
    options["temperature"] = gguf_temperature(fields)
    shared = gguf_fields(alike, interleaved=interleaved, yarn={"attention_factor": 1.0}, **options)
    mscale = 1.0
    if fields.text("rope.scaling.type", "none") == "yarn":
        # The file stores a tenth of mscale_all_dim.
        weight = fields.number("rope.scaling.yarn_log_multiplier", 0.0)
        mscale += weight * math.log(max(fields.number("rope.scaling.factor"), 1.0))
    scale = sizes[0] ** -0.5 * mscale**2
    layers = (
        replace(
            layer,
            head_dim=latent.kv_lora_rank + rope_dim,
            scale=scale,
            latent=latent,
            rope=layer.rope if rope_dim else None,
        )
        for layer in shared["attention"]
    )
    return shared | {"attention": tuple(layers)}
