"""GTE (Zhang et al. 2024, arXiv:2407.19669): BERT with rope and gated MLPs. Checkpoints with their own code call it
`New`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.hf import read_head_dim, read_rope
from jaxengine.models.config.rope import Rope, RopeScaling
from jaxengine.models.layers.base.mlp import GatedMLP
from jaxengine.models.layers.encoder import EncoderNames, NamedEncoder, rotated_fields
from jaxengine.models.params.declare import Source, parts_of
from jaxengine.models.params.source import CheckpointNames

LAYER = "model.encoder.layer.{layer}"


class GteModel(NamedEncoder):
    """Post-norm encoder with rope and gated MLPs, with a dense layer, tanh and scores of labels if it classifies."""

    masked_gelu: ClassVar[bool] = True
    names: ClassVar[EncoderNames] = EncoderNames(
        layer=LAYER,
        qkv=("attention.qkv_proj",),
        out="attention.o_proj",
        attention_norm="attn_ln",
        up="mlp.up_gate_proj",
        down="mlp.down_proj",
        mlp_norm="mlp_ln",
        dense="model.pooler.dense",
        labels="model.classifier",
        masked=("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder.bias"),
    )
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(("model.new.", "model."), ("model.gte.", "model.")),
        suffixes=(
            ("lm_head.norm.weight", "lm_head.layer_norm.weight"),
            ("lm_head.norm.bias", "lm_head.layer_norm.bias"),
        ),
        heads=("model.pooler.", "model.lm_head.", "lm_head.", "model.classifier."),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        theta = 160_000.0 if fields.text("model_type", "gte") == "gte" else 10_000.0
        fields.require(
            position_embedding_type="rope", layer_norm_type="layer_norm", pack_qkv=True, logn_attention_scale=False
        )
        fields = fields.with_defaults(
            vocab_size=250048,
            hidden_size=768,
            num_hidden_layers=12,
            num_attention_heads=12,
            intermediate_size=3072,
            max_position_embeddings=8192,
            layer_norm_eps=1e-12,
            rope_theta=theta,
        )
        return rotated_fields(fields, types=1, rope=_read_rope(fields, read_head_dim(fields)))

    def make_mlp(self, build: Build) -> nnx.Module:
        size, ffn = self.config.hidden_size, self.config.intermediate_size
        up, gate = parts_of(f"{LAYER}.{self.names.up}", ffn, ffn)
        down = Source(f"{LAYER}.{self.names.down}", size)
        options: dict[str, Any] = {"down_bias": True, "activation": self.activation, "build": build}
        return GatedMLP(size, ffn, source=LAYER, gate_up=(gate, up), down=down, **options)


def _read_rope(fields: ConfigFields, head_dim: int) -> Rope:
    """Return the rope of a config.json, whose scaling may also be of type `ntk`: frequency i of d / 2 is divided by
    factor ** (2 * (i + 1) / d) (Su 2023, kexue.fm/archives/9706). head_dim: d. Raises ModelConfigError for wrong
    fields, and if `mixed_b` is set.
    """
    scaling = ConfigFields(fields.mapping("rope_scaling") or {}, "")
    if scaling.text("type", None) != "ntk":
        return read_rope(fields, head_dim)
    scaling.require(mixed_b=None)
    factor = scaling.number("factor")
    plain = read_rope(ConfigFields({**fields.raw, "rope_scaling": None}), head_dim)
    factors = tuple(factor ** (2 * (index + 1) / head_dim) for index in range(head_dim // 2))
    return replace(plain, scaling=RopeScaling("factors", factors=factors))
