"""BERT (Devlin et al. 2018, arXiv:1810.04805)."""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.encoder import EncoderConfig
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.gguf import GGUFConfig
from jaxengine.models.layers.base.activations import read_activation
from jaxengine.models.layers.encoder import HIDDEN_ACT, EncoderNames, NamedEncoder, encoder_fields, gguf_encoder_fields
from jaxengine.models.params.source import CheckpointNames

# transformers' sizes of a model whose config.json has none.
BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
_MASKED = "model.cls.predictions"
# Names of norms in TensorFlow's checkpoints, which transformers writes for some families.
NORM_SUFFIXES = ((".LayerNorm.gamma", ".LayerNorm.weight"), (".LayerNorm.beta", ".LayerNorm.bias"))
NAMES = EncoderNames(
    layer="model.encoder.layer.{layer}",
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    out="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    up="intermediate.dense",
    down="output.dense",
    mlp_norm="output.LayerNorm",
    dense="model.pooler.dense",
    labels="model.classifier",
    masked=(f"{_MASKED}.transform.dense", f"{_MASKED}.transform.LayerNorm", f"{_MASKED}.bias"),
)


class BertModel(NamedEncoder):
    """BERT's encoder, with a dense layer, tanh and scores of labels if it classifies."""

    gguf_architecture: ClassVar[str | None] = "bert"
    names: ClassVar[EncoderNames] = NAMES
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(("model.bert.", "model."),),
        suffixes=NORM_SUFFIXES,
        heads=("model.pooler.", "model.cls.", "model.classifier.", "model.linear."),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields.require(position_embedding_type="absolute", is_decoder=False)
        fields = fields.with_defaults(**BASE, vocab_size=30522, max_position_embeddings=512, layer_norm_eps=1e-12)
        encoder = EncoderConfig(
            read_activation(fields),
            num_token_types=fields.integer("type_vocab_size", 2),
            num_positions=fields.integer("max_position_embeddings"),
            first_position=cls.first_position(fields),
        )
        return encoder_fields(fields, encoder, activation=HIDDEN_ACT, eps="layer_norm_eps")

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        return gguf_encoder_fields(gguf, activation="gelu", bias=True, positions=True)

    @classmethod
    def first_position(cls, fields: ConfigFields) -> int:
        """Return the row of the position table for a prompt's first token, 0 here. Overrides that read it from `fields`
        may raise ModelConfigError.
        """
        return 0
