"""DistilBERT (Sanh et al. 2019, arXiv:1910.01108): BERT's encoder without token types, under other names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import jax

from jaxengine.models.config.encoder import EncoderConfig
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.hf import Activation
from jaxengine.models.layers.base.activations import ACTIVATIONS, read_activation
from jaxengine.models.layers.encoder import EncoderNames, NamedEncoder, encoder_fields
from jaxengine.models.params.source import CheckpointNames

# Usual name of a field -> name in DistilBERT's config.json.
_FIELDS = {
    "hidden_size": "dim",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
    "intermediate_size": "hidden_dim",
}
# Epsilon of all norms, for which there is no field.
_EPS = 1e-12
_DEFAULTS = {"dim": 768, "n_heads": 12, "n_layers": 6, "hidden_dim": 3072, "vocab_size": 30522}


class DistilBertModel(NamedEncoder):
    """DistilBERT's encoder, with a dense layer, ReLU and scores of labels if it classifies."""

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
        fields = fields.with_defaults(**_DEFAULTS, max_position_embeddings=512)
        usual = {name: fields.value(own) for name, own in _FIELDS.items()}
        fields = ConfigFields({**fields.raw, **usual, "layer_norm_eps": _EPS})
        encoder = EncoderConfig(
            read_activation(fields, "activation"),
            num_token_types=0,
            num_positions=fields.integer("max_position_embeddings"),
        )
        activation = Activation("activation", tuple(ACTIVATIONS))
        return encoder_fields(fields, encoder, activation=activation, eps="layer_norm_eps")
