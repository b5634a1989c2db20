"""CLIP (Radford et al. 2021, arXiv:2103.00020) and SigLIP (Zhai et al. 2023, arXiv:2303.15343) as embedders: a
transformer for texts and a tower for images, whose results are compared.

An image is a prompt of one token. No layer changes that token's hidden state, which is the tower's result.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxengine.models.build import Build
from jaxengine.models.cache import Cache
from jaxengine.models.config.encoder import EncoderConfig
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.pooler import LAST
from jaxengine.models.forward_batch import ForwardBatch
from jaxengine.models.layers.base.activations import read_activation
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.rows import Rows
from jaxengine.models.layers.encoder import HIDDEN_ACT, EncoderNames, NamedEncoder, encoder_fields
from jaxengine.models.params.declare import Source
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.clip_embedding import PROJECTION, TOWER, read_clip, read_siglip
from jaxengine.pallas_kernels.kv.pages import KVPages

_TEXT = "text_model."
_EMBEDDINGS = ("token_embedding", "word_embeddings"), ("position_embedding", "position_embeddings")
_PROJECTION = "text_projection"
_NAMES = CheckpointNames(
    prefixes=(
        *((f"{_TEXT}embeddings.{old}.", f"model.embeddings.{new}.") for old, new in _EMBEDDINGS),
        (f"{_TEXT}head.", f"{_PROJECTION}."),
        (_TEXT, "model."),
        ("vision_model.", f"{TOWER}."),
        *((name, name) for name in (f"{PROJECTION}.", f"{_PROJECTION}.", "logit_scale", "logit_bias")),
    ),
    # Of comparisons, which have a factor and a bias in training, and tables of positions' numbers.
    unused=("logit_scale", "logit_bias"),
    unused_ends=(".position_ids",),
    tower=(f"{TOWER}.", f"{PROJECTION}."),
    flattened=(".patch_embedding.weight",),
    raveled=(".head.probe",),
    suffixes=((".in_proj_weight", ".in_proj.weight"), (".in_proj_bias", ".in_proj.bias")),
)
# transformers' defaults of fields of the text part that a file lacks.
_CLIP = {
    "vocab_size": 49408,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "max_position_embeddings": 77,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
_SIGLIP = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 64,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}


class CLIPModel(NamedEncoder):
    """CLIP. Texts have causal attention; the state of the last token, which ends a text, is projected."""

    projection_bias: ClassVar[bool] = False
    checkpoint_names: ClassVar[CheckpointNames] = _NAMES
    names: ClassVar[EncoderNames] = EncoderNames(
        layer="model.encoder.layers.{layer}",
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        out="self_attn.out_proj",
        attention_norm="layer_norm1",
        up="mlp.fc1",
        down="mlp.fc2",
        mlp_norm="layer_norm2",
        dense="",
        labels="",
        embedding_norm=None,
        last_norm="model.final_layer_norm",
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        text = _part(fields, "text_config", _CLIP)
        shape = _text_fields(text)
        size = fields.integer("projection_dim", 512)
        if size != shape["hidden_size"]:
            raise fields.fail("projection_dim", f"{shape['hidden_size']}, the hidden_size of text_config")
        attention = tuple(replace(each, causal=True) for each in shape["attention"])
        return shape | {"attention": attention, "tower": read_clip(_part(fields, "vision_config"))}

    @classmethod
    def usual_pooling(cls, fields: ConfigFields) -> str:
        """Return LAST: the last token of a text ends it."""
        return LAST

    def __init__(self, config: Any, build: Build):
        super().__init__(config, build)
        if self.stage.is_last:
            size = (Source(_PROJECTION, config.hidden_size),)
            axes, bias = ("embed", "labels"), type(self).projection_bias
            self.projection = Linear(config.hidden_size, size, axes=axes, bias=bias, build=build)

    def last_normed(self, x: jax.Array, rows: Rows) -> jax.Array:
        return self.projection(super().last_normed(x, rows))

    def __call__(
        self, batch: ForwardBatch, kv: KVPages | Cache, hidden: jax.Array | None = None
    ) -> tuple[jax.Array, KVPages | Cache]:
        """Return hidden states [T, D] and the pool, as Decoder does, except that a token of an image keeps the state
        with which it enters this stage: in the first one the tower's result.
        """
        x, kv = super().__call__(batch, kv, hidden)
        pictures: Any = batch.sections.get("pictures")
        if pictures is None:
            return x, kv
        return pictures.embed(x) if hidden is None else jnp.where(pictures.index[:, None] >= 0, hidden, x), kv


class SiglipModel(CLIPModel):
    """SigLIP. The tokens of a text attend to each other, and padding, up to the longest text, is a part of it."""

    projection_bias: ClassVar[bool] = True

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        text = _part(fields, "text_config", _SIGLIP)
        shape = _text_fields(text)
        size = shape["hidden_size"]
        if text.integer("projection_size", size) != size:
            raise text.fail("projection_size", f"hidden_size {size}")
        tower = read_siglip(_part(fields, "vision_config"))
        if tower.vit.hidden_size != size:
            raise fields.fail("vision_config", f"one with the hidden_size of text_config, {size}")
        return shape | {"encoder": shape["encoder"]._replace(pads=True), "tower": tower}


def _part(fields: ConfigFields, name: str, defaults: dict[str, Any] | None = None) -> ConfigFields:
    """Return the part `name` of a config.json with `defaults`. The part `name`_dict, which older files have, replaces
    it unless it is empty, as in transformers. Raises ModelConfigError unless both are mappings or absent.
    """
    older = f"{name}_dict"
    return fields.part(older if fields.mapping(older) else name, **(defaults or {}))


def _text_fields(text: ConfigFields) -> dict[str, Any]:
    """Return the keyword arguments of ModelConfig of the part for texts, whose tokens attend to each other. Raises
    ModelConfigError for wrong fields.
    """
    positions = text.integer("max_position_embeddings")
    encoder = EncoderConfig(read_activation(text), num_token_types=0, num_positions=positions)
    return encoder_fields(text, encoder, activation=HIDDEN_ACT, eps="layer_norm_eps")
