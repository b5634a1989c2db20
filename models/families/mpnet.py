"""MPNet (Song et al. 2020, arXiv:2004.09297): BERT's encoder with a bias of attention by the distance of two tokens."""

from __future__ import annotations

from typing import Any, ClassVar

from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.encoder import EncoderConfig
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.families.bert import BASE, NORM_SUFFIXES
from jaxengine.models.layers.attention.distance_bias import BiasedAttention, distance_table
from jaxengine.models.layers.base.activations import read_activation
from jaxengine.models.layers.encoder import HIDDEN_ACT, EncoderNames, NamedEncoder, encoder_fields
from jaxengine.models.params.source import CheckpointNames

# transformers always uses these values, whatever config.json says.
_NUM_BUCKETS, _FIRST_POSITION = 32, 2


class MPNetModel(NamedEncoder):
    """BERT's encoder with biases by distance. Its position table begins with two rows that belong to no token."""

    masked_gelu: ClassVar[bool] = True
    names: ClassVar[EncoderNames] = EncoderNames(
        layer="model.encoder.layer.{layer}",
        qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        out="attention.attn.o",
        attention_norm="attention.LayerNorm",
        up="intermediate.dense",
        down="output.dense",
        mlp_norm="output.LayerNorm",
        dense="model.classifier.dense",
        labels="model.classifier.out_proj",
        masked=("lm_head.dense", "lm_head.layer_norm", "lm_head.bias"),
    )
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(("model.mpnet.", "model."),),
        suffixes=NORM_SUFFIXES,
        heads=("model.pooler.", "lm_head.", "model.lm_head.", "model.classifier."),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = fields.with_defaults(**BASE, vocab_size=30527, max_position_embeddings=512, layer_norm_eps=1e-12)
        fields.require(relative_attention_num_buckets=_NUM_BUCKETS)
        if fields.integer("max_position_embeddings") <= _FIRST_POSITION:
            raise fields.fail("max_position_embeddings", f"more than {_FIRST_POSITION}")
        encoder = EncoderConfig(
            read_activation(fields),
            num_token_types=0,
            num_positions=fields.integer("max_position_embeddings"),
            first_position=_FIRST_POSITION,
        )
        return encoder_fields(fields, encoder, activation=HIDDEN_ACT, eps="layer_norm_eps")

    def make_attention(self, layer: int, build: Build, **names: Any) -> nnx.Module:
        attention = self.config.attention[layer]
        if layer == self.stage.layers.start:
            source = "model.encoder.relative_attention_bias"
            self._distances = distance_table(source, _NUM_BUCKETS, attention.num_heads)
        return BiasedAttention(attention, self.config.hidden_size, table=self._distances, build=build, **names)
