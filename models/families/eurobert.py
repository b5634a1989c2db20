"""EuroBERT (Boizard et al. 2025, arXiv:2503.05500): Llama's layers, whose tokens see their whole prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.encoder import EncoderConfig
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.pooler import CLS, MEAN, Classifier, TokenHead
from jaxengine.models.config.readers.gguf import GGUFConfig, gguf_fields
from jaxengine.models.config.readers.hf import hf_architecture, hf_fields
from jaxengine.models.families.llama import LAYER, LlamaForCausalLM
from jaxengine.models.layers.base.activations import ACTIVATIONS, read_activation
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.mlp import GatedMLP, gelu
from jaxengine.models.layers.classify import DenseLabelScores, LinearLabelScores
from jaxengine.models.layers.encoder import HIDDEN_ACT
from jaxengine.models.layers.token_results import TokenHeads
from jaxengine.models.params.declare import Source
from jaxengine.models.params.source import CheckpointNames

_DENSE, _LABELS = "dense", "classifier"
_LATE = "late"
# Values of `classifier_pooling` -> types of pooling; the first is the default.
_POOLINGS = {_LATE: MEAN, "mean": MEAN, "bos": CLS}


class DenseStates(nnx.Module):
    """Hidden states gelu(dense(norm(x))), [T, D] -> [T, D], in x's dtype."""

    def __init__(self, norm: nnx.Module, size: int, build: Build):
        self.norm = norm
        self.dense = Linear(size, (Source(_DENSE, size),), axes=("embed", "labels"), bias=True, build=build)

    def __call__(self, x: jax.Array) -> jax.Array:
        return gelu(self.dense(self.norm(x), out_dtype=jnp.float32)).astype(x.dtype)


class EuroBertModel(LlamaForCausalLM):
    """Llama's layers without a causal mask. If it classifies, it has a dense layer, GELU and scores of labels, the
    former two before the pooling if `classifier_pooling` is late.
    """

    gguf_architecture: ClassVar[str | None] = "eurobert"
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(heads=("lm_head.", "dense.", "classifier."))

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = fields.with_defaults(rms_norm_eps=1e-5, hidden_act="silu")
        bias = fields.boolean("attention_bias", False)
        late = fields.text("classifier_pooling", _LATE) == _LATE
        encoder = EncoderConfig(read_activation(fields), num_token_types=0, num_positions=0, dense_first=late)
        shared = hf_fields(fields, bias=bias, output_bias=bias, causal=False, activation=HIDDEN_ACT)
        return shared | {"mlp_bias": fields.boolean("mlp_bias", False), "encoder": encoder}

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        encoder = EncoderConfig("silu", num_token_types=0, num_positions=0, dense_first=True)
        return gguf_fields(gguf, causal=False) | {"encoder": encoder, "tie_word_embeddings": False}

    @classmethod
    def usual_pooling(cls, fields: ConfigFields) -> str:
        """Return the type that `classifier_pooling` names for a model that classifies sequences, MEAN for others.
        Raises ModelConfigError for another name, and unless `architectures` is a list of one class name.
        """
        if not hf_architecture(fields).endswith("ForSequenceClassification"):
            return MEAN
        if (kind := fields.text("classifier_pooling", _LATE)) not in _POOLINGS:
            raise fields.fail("classifier_pooling", ", ".join(_POOLINGS))
        return _POOLINGS[kind]

    def make_mlp(self, layer: int, build: Build) -> nnx.Module:
        config = self.config
        assert config.encoder is not None
        sizes, activation = (config.hidden_size, config.intermediate_size), ACTIVATIONS[config.encoder.activation]
        return GatedMLP(*sizes, source=f"{LAYER}.mlp", bias=config.mlp_bias, activation=activation, build=build)

    def make_norm(self, build: Build) -> nnx.Module:
        norm, pooler = super().make_norm(build), self.config.pooler
        if pooler is None or pooler.classifier is None or not self._dense_first:
            return norm
        return DenseStates(norm, self.config.hidden_size, build)

    def make_labels(self, classifier: Classifier, build: Build) -> nnx.Module:
        size = self.config.hidden_size
        if self._dense_first:
            return LinearLabelScores(size, classifier, _LABELS, build=build)
        return DenseLabelScores(size, classifier, (_DENSE, _LABELS), activation=gelu, build=build)

    def make_token_heads(self, heads: Sequence[TokenHead], build: Build) -> nnx.Module:
        return TokenHeads(self.config.hidden_size, heads, _LABELS, build)

    @property
    def _dense_first(self) -> bool:
        """Flag: whether the dense layer of a classifier comes before the pooling."""
        assert self.config.encoder is not None
        return self.config.encoder.dense_first
