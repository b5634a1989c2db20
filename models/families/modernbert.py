"""ModernBERT (Warner et al. 2024, arXiv:2412.13663): an encoder with rope, gated MLPs and norms before a layer's parts.
In two of three layers tokens attend to a window around them, in the third to all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import jax
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.encoder import EncoderConfig
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.pooler import CLS, MEAN, Classifier, TokenHead
from jaxengine.models.config.readers.gguf import GGUFConfig, gguf_layers
from jaxengine.models.config.readers.hf import (
    FULL,
    SLIDING,
    Activation,
    hf_fields,
    layer_kinds,
    read_head_dim,
    ropes_by_kind,
    windows_by_kind,
)
from jaxengine.models.families.llama import LAYER, LlamaLayer
from jaxengine.models.layers.attention.attention import Attention
from jaxengine.models.layers.attention.masked import MaskedScores
from jaxengine.models.layers.base.activations import ACTIVATIONS, read_activation
from jaxengine.models.layers.base.embedding import Embedding
from jaxengine.models.layers.base.mlp import GatedMLP
from jaxengine.models.layers.base.norm import Identity, LayerNorm, NormClass, UnbiasedLayerNorm
from jaxengine.models.layers.classify import DenseLabelScores
from jaxengine.models.layers.encoder import Encoder, gguf_encoder_fields
from jaxengine.models.params.declare import Source, parts_of
from jaxengine.models.params.source import CheckpointNames

_DEFAULTS = {
    "vocab_size": 50368,
    "hidden_size": 768,
    "intermediate_size": 1152,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "max_position_embeddings": 8192,
    "norm_eps": 1e-5,
    "local_attention": 128,
    "global_rope_theta": 160_000.0,
    "local_rope_theta": 10_000.0,
}


class NormedEmbedding(nnx.Module):
    """Token embedding followed by a norm."""

    def __init__(self, config: ModelConfig, *, norm: nnx.Module, build: Build):
        source = "model.embeddings.tok_embeddings"
        self.tokens, self.norm = Embedding(config.vocab_size, config.hidden_size, source=source, build=build), norm

    def __call__(self, token_ids: jax.Array, positions: jax.Array) -> jax.Array:
        """Return the normed embeddings [T, D] of tokens i32[T]. positions: not used."""
        return self.norm(self.tokens(token_ids))


class TokenLabelScores(nnx.Module):
    """Scores of labels for each token, computed by the module that scores a prompt's: [T, D] -> f32[T, N]."""

    def __init__(self, labels: DenseLabelScores):
        self.labels = labels

    def __call__(self, hidden: jax.Array) -> jax.Array:
        return self.labels(hidden, None)


class ModernBertModel(Encoder):
    """Encoder of pre-norm layers with rope, with a dense layer, a norm and scores of labels if it classifies."""

    gguf_architecture: ClassVar[str | None] = "modern-bert"
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        heads=("head.", "classifier.", "decoder.", "model.head.", "model.classifier.", "model.decoder.")
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = fields.with_defaults(**_DEFAULTS)
        fields.require(rope_scaling=None)
        # The field `rope_theta` itself has no meaning in this family.
        fields = ConfigFields({**fields.raw, "rope_theta": fields.value("global_rope_theta")})
        bias, head_dim = fields.boolean("attention_bias", False), read_head_dim(fields)
        kinds, window = _kinds(fields), _window(fields)
        shared = hf_fields(
            fields,
            windows=windows_by_kind(kinds, window),
            ropes=ropes_by_kind(fields, head_dim, kinds, sliding_theta="local_rope_theta"),
            activation=Activation("hidden_activation", tuple(ACTIVATIONS)),
            tied=True,
            eps="norm_eps",
            causal=False,
            bias=bias,
            output_bias=bias,
        )
        encoder = EncoderConfig(
            read_activation(fields, "hidden_activation"),
            num_token_types=0,
            num_positions=0,
            norm_bias=fields.boolean("norm_bias", False),
            logits_bias=fields.boolean("decoder_bias", True),
            head_activation=read_activation(fields, "classifier_activation"),
            head_bias=fields.boolean("classifier_bias", False),
        )
        return shared | {"mlp_bias": fields.boolean("mlp_bias", False), "encoder": encoder}

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        fields = gguf.fields
        activation = read_activation(fields, "hidden_activation")
        # Of a config.json with `norm_eps` alone, llama.cpp's converter writes the epsilon of another kind of norms.
        eps = f"attention.layer_norm_{'' if fields.has('attention.layer_norm_epsilon') else 'rms_'}epsilon"
        shared = gguf_encoder_fields(gguf, activation=activation, bias=False, rotates=True, eps=eps)
        window = fields.integer("attention.sliding_window", 0, minimum=0)
        if window:
            full = replace(shared["attention"][0], window=None)
            local = replace(full, window=window // 2 + 1, rope=replace(full.rope, theta=10_000.0))
            shared["attention"] = gguf_layers(fields, local, full, 3, full_first=True)
        return shared | {"encoder": shared["encoder"]._replace(norm_bias=False, head_bias=False)}

    @classmethod
    def usual_pooling(cls, fields: ConfigFields) -> str:
        """Return CLS or MEAN, as `classifier_pooling` says, by default CLS. Raises ModelConfigError for any other
        value.
        """
        kinds = {"cls": CLS, "mean": MEAN}
        if (kind := fields.text("classifier_pooling", "cls")) not in kinds:
            raise fields.fail("classifier_pooling", ", ".join(kinds))
        return kinds[kind]

    @property
    def encoder(self) -> EncoderConfig:
        """Encoder part of the configuration, which must not be None."""
        assert self.config.encoder is not None
        return self.config.encoder

    @property
    def norm_class(self) -> NormClass:
        """Class of all norms, with or without biases as the configuration says."""
        return LayerNorm if self.encoder.norm_bias else UnbiasedLayerNorm

    def norm_of(self, source: str, build: Build) -> nnx.Module:
        """Return a norm whose weights are those of the checkpoint module `source`."""
        return self.norm_class(self.config.hidden_size, self.config.rms_norm_eps, source=source, build=build)

    def make_embedding(self, build: Build) -> NormedEmbedding:
        return NormedEmbedding(self.config, norm=self.norm_of("model.embeddings.norm", build), build=build)

    def make_norm(self, build: Build) -> nnx.Module:
        return self.norm_of("model.final_norm", build)

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        config, size, ffn = self.config, self.config.hidden_size, self.config.intermediate_size
        attention = config.attention[layer]
        width = attention.num_heads * attention.head_dim
        attend = Attention(
            attention,
            size,
            eps=config.rms_norm_eps,
            source=LAYER,
            qkv=parts_of(f"{LAYER}.attn.Wqkv", width, width, width),
            out=Source(f"{LAYER}.attn.Wo", size),
            build=build,
        )
        mlp = GatedMLP(
            size,
            ffn,
            source=LAYER,
            gate_up=parts_of(f"{LAYER}.mlp.Wi", ffn, ffn),
            down=Source(f"{LAYER}.mlp.Wo", size),
            bias=config.mlp_bias,
            activation=ACTIVATIONS[self.encoder.activation],
            build=build,
        )
        names = "attn_norm", "mlp_norm"
        made = LlamaLayer(config, attend, mlp, build, norm_class=self.norm_class, norm_names=names)
        if layer == 0:
            made.input_norm = Identity()  # its input has been normed
        return made

    def make_labels(self, classifier: Classifier, build: Build) -> DenseLabelScores:
        """Return the module that scores the labels of a prompt, with a dense layer, an activation and a norm before the
        scores.
        """
        return DenseLabelScores(
            self.config.hidden_size,
            classifier,
            ("head.dense", "classifier"),
            activation=ACTIVATIONS[self.encoder.head_activation],
            build=build,
            dense_bias=self.encoder.head_bias,
            norm=partial(self.norm_of, "head.norm"),
        )

    def make_token_heads(self, heads: Sequence[TokenHead], build: Build) -> nnx.Module:
        """Return the module that scores tokens: with a module of its own in the checkpoint if the head names one,
        otherwise with the scores of a prompt's labels, applied to each token.
        """
        if heads[0].source is not None:
            return super().make_token_heads(heads, build)
        return TokenLabelScores(self.make_labels(Classifier(heads[0].width), build))

    def make_masked(self, build: Build) -> MaskedScores:
        """Return the module that computes the scores of the masked language model: a dense layer, an activation, a norm
        and the product with the embedding.
        """
        return MaskedScores(
            self.config,
            ("head.dense", "decoder.bias" if self.encoder.logits_bias else ""),
            size=self.config.hidden_size,
            norm=self.norm_of("head.norm", build),
            activation=ACTIVATIONS[self.encoder.head_activation],
            build=build,
            dense_bias=self.encoder.head_bias,
        )

    @property
    def table(self) -> Embedding:
        """Token embedding without its norm."""
        return self.embed.tokens


def _window(fields: ConfigFields) -> int:
    """Return the number of keys that a token of a SLIDING layer sees on each side, its own included: one more than
    `sliding_window` or, without that field, than half of `local_attention`. Raises ModelConfigError for wrong fields.
    """
    return fields.integer("sliding_window", fields.integer("local_attention") // 2) + 1


def _kinds(fields: ConfigFields) -> tuple[str, ...]:
    """Return FULL or SLIDING for each layer, as `layer_types` lists them. Without the list, layers 0, n, 2n, ... are
    FULL, where n is `global_attn_every_n_layers`, 3 by default. Raises ModelConfigError for wrong fields.
    """
    if fields.has("layer_types"):
        return layer_kinds(fields)
    every = fields.integer("global_attn_every_n_layers", 3)
    return tuple(SLIDING if layer % every else FULL for layer in range(fields.integer("num_hidden_layers")))
