"""BERT (Devlin et al. 2018, arXiv:1810.04805), and encoders that differ from it in a few names and sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import jax

from jaxengine.models.config.encoder import EncoderConfig
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.gguf import GGUFConfig
from jaxengine.models.config.readers.hf import Activation
from jaxengine.models.layers.base.activations import ACTIVATIONS, read_activation
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

# Usual name of a field -> name in DistilBERT's config.json.
_DISTIL_FIELDS = {
    "hidden_size": "dim",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
    "intermediate_size": "hidden_dim",
}
_DISTILLED = {"dim": 768, "n_heads": 12, "n_layers": 6, "hidden_dim": 3072, "vocab_size": 30522}


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


class ErnieModel(BertModel):
    """ERNIE (Sun et al. 2019, arXiv:1904.09223) and ERNIE 2.0 and 3.0: BERT, whose embeddings may have a part by task.
    Every token has the first type of task.
    """

    checkpoint_names: ClassVar[CheckpointNames] = BertModel.checkpoint_names._replace(
        prefixes=(("model.ernie.", "model."),)
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        shape = super().read_hf(fields)
        count = fields.integer("task_type_vocab_size", 3) if fields.boolean("use_task_id", False) else 0
        return shape | {"encoder": shape["encoder"]._replace(num_task_types=count)}


class MegatronBertModel(BertModel):
    """Megatron's BERT (Shoeybi et al. 2019, arXiv:1909.08053): norms before a layer's parts and after the last layer,
    and none after the embeddings.
    """

    names: ClassVar[EncoderNames] = NAMES._replace(
        attention_norm="attention.ln", mlp_norm="ln", embedding_norm=None, last_norm="model.encoder.ln"
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        large = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
        return super().read_hf(fields.with_defaults(**large, vocab_size=29056))


class DistilBertModel(NamedEncoder):
    """DistilBERT (Sanh et al. 2019, arXiv:1910.01108): BERT's encoder without token types, under other names, with a
    dense layer, ReLU and scores of labels if it classifies.
    """

    names: ClassVar[EncoderNames] = EncoderNames(
        layer="model.transformer.layer.{layer}",
        qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        out="attention.out_lin",
        attention_norm="sa_layer_norm",
        up="ffn.lin1",
        down="ffn.lin2",
        mlp_norm="output_layer_norm",
        dense="model.pre_classifier",
        labels="model.classifier",
        masked=("model.vocab_transform", "model.vocab_layer_norm", "model.vocab_projector.bias"),
    )
    label_activation: ClassVar[Callable[[jax.Array], jax.Array]] = staticmethod(jax.nn.relu)
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(("model.distilbert.", "model."),),
        heads=("model.pre_classifier.", "model.classifier.", "model.vocab_"),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = fields.with_defaults(**_DISTILLED, max_position_embeddings=512)
        usual = {name: fields.value(own) for name, own in _DISTIL_FIELDS.items()}
        fields = ConfigFields({**fields.raw, **usual, "layer_norm_eps": 1e-12})
        encoder = EncoderConfig(
            read_activation(fields, "activation"),
            num_token_types=0,
            num_positions=fields.integer("max_position_embeddings"),
        )
        activation = Activation("activation", tuple(ACTIVATIONS))
        return encoder_fields(fields, encoder, activation=activation, eps="layer_norm_eps")
