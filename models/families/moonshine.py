"""Moonshine (Jeffries et al. 2024, arXiv:2410.15608): a decoder with cross-attention to a sound of any length, whose
samples its tower encodes.
"""

from __future__ import annotations

from typing import Any, ClassVar

from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.hf import Activation, hf_fields, read_rope
from jaxengine.models.families.whisper import AttendingLayer
from jaxengine.models.layers.attention.attention import Attention
from jaxengine.models.layers.attention.cross_attention import CrossAttention
from jaxengine.models.layers.base.mlp import GatedMLP
from jaxengine.models.layers.base.norm import NormClass, UnbiasedLayerNorm
from jaxengine.models.layers.decoder import Decoder
from jaxengine.models.params.declare import Source, parts_of
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.sound.moonshine import ENCODER, EPS, MoonshineTowerConfig, read_moonshine_tower

LAYER = "model.layers.{layer}"
# transformers' defaults of fields that a file lacks.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32768,
    "hidden_size": 288,
    "intermediate_size": 1152,
    "encoder_num_hidden_layers": 6,
    "decoder_num_hidden_layers": 6,
    "encoder_num_attention_heads": 8,
    "decoder_num_attention_heads": 8,
    "max_position_embeddings": 512,
    "partial_rotary_factor": 0.9,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class MoonshineLayer(AttendingLayer):
    """AttendingLayer with rope in self-attention, norms without biases and a gated MLP."""

    def __init__(self, config: ModelConfig, layer: int, build: Build):
        size, ffn = config.hidden_size, config.intermediate_size
        tower, attention = config.tower, config.attention[layer]
        assert isinstance(tower, MoonshineTowerConfig)
        norms = ("input_layernorm", "post_attention_layernorm", "final_layernorm")
        self.input_norm, self.cross_norm, self.mlp_norm = (
            UnbiasedLayerNorm(size, EPS, source=f"{LAYER}.{name}", build=build) for name in norms
        )
        self.attention = Attention(attention, size, eps=EPS, source=f"{LAYER}.self_attn", build=build)
        sizes = attention.head_dim, tower.num_positions, config.num_layers
        names: dict[str, Any] = {"source": f"{LAYER}.encoder_attn", "names": ("q_proj", "o_proj")}
        self.cross = CrossAttention(size, *sizes, **names, biases=(attention.bias, False), build=build)
        up, gate = parts_of(f"{LAYER}.mlp.fc1", ffn, ffn)
        self.mlp = GatedMLP(
            size,
            ffn,
            source=f"{LAYER}.mlp",
            gate_up=(gate, up),
            down=Source(f"{LAYER}.mlp.fc2", size),
            bias=True,
            activation=tower.activate_decoder,
            build=build,
        )


class MoonshineForConditionalGeneration(Decoder):
    """Moonshine: a decoder that writes a transcript, whose tokens attend to the whole encoded sound."""

    norm_class: ClassVar[NormClass] = UnbiasedLayerNorm
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(
            ("model.decoder.layers.", "model.layers."),
            ("model.decoder.embed_tokens.", "model.embed_tokens."),
            ("model.decoder.norm.", "model.norm."),
            ("proj_out.", "lm_head."),  # the token table, unless the checkpoint has a head of its own
        ),
        tower=(f"{ENCODER}.",),
        flattened=(".conv1.weight", ".conv2.weight", ".conv3.weight"),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = fields.with_defaults(**_DEFAULTS)
        size, heads = fields.integer("hidden_size"), fields.integer("decoder_num_attention_heads")
        if size % heads:
            raise fields.fail("decoder_num_attention_heads", f"a divisor of hidden_size {size}")
        # transformers makes both parts with the encoder's heads, and gives queries as many heads as keys.
        equal = ("encoder_num_attention_heads", "encoder_num_key_value_heads", "decoder_num_key_value_heads")
        fields.require(head_dim=size // heads, **dict.fromkeys(equal, heads))
        layers = fields.integer("decoder_num_hidden_layers")
        named = {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads}
        rope = read_rope(fields, size // heads, partial_rotary=True, interleaved=True)
        tower = read_moonshine_tower(fields, rope)
        shared = hf_fields(
            ConfigFields({**fields.raw, **named, "layer_norm_eps": EPS}),
            ropes=[rope] * layers,
            activation=Activation("decoder_hidden_act", (tower.decoder_activation,)),
            tied=True,
            eps="layer_norm_eps",
            bias=tower.has_bias,
        )
        return shared | {"tower": tower}

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        return MoonshineLayer(self.config, layer, build)
