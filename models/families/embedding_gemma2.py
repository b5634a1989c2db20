"""EmbeddingGemma 2 (Google 2026), text part: Gemma 4's layers, whose tokens see their whole prompt, or in layers with
windows a window on both sides. Per-layer inputs are a projection of the embeddings, without a table of tokens.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.pooler import MEAN
from jaxengine.models.config.readers.hf import (
    FULL,
    LAYER_CONFIG,
    SLIDING,
    layer_kinds,
    text_fields,
    windows_by_kind,
)
from jaxengine.models.families.gemma2 import gelu_fields
from jaxengine.models.families.gemma4 import Gemma4ForCausalLM, Gemma4Layer, with_own_heads
from jaxengine.models.families.llama import LAYER
from jaxengine.models.forward_batch import ForwardBatch
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.norm import RMSNorm
from jaxengine.models.layers.base.rows import Rows
from jaxengine.models.layers.base.scale import scaled
from jaxengine.models.params.declare import Source
from jaxengine.models.params.source import CheckpointNames

# transformers' defaults for fields that a file lacks.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 262144,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 262144,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 512,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "default", "rope_theta": 1_000_000.0},
}
_TOWERS = ("vision_tower.", "embed_vision.", "audio_tower.", "embed_audio.")


class ProjectedInputs(nnx.Module):
    """Per-layer inputs of tokens, in addition to the hidden state: norm(project(x) / sqrt(D))."""

    def __init__(self, config: ModelConfig, build: Build):
        size, self.own, self.num_layers = config.hidden_size, config.layer_input_size, config.num_layers
        project = Source("model.ple.per_layer_model_projection", self.own * self.num_layers)
        self.project = Linear(size, (project,), axes=("embed", "latent"), build=build, of_tokens=True)
        norm = "model.ple.per_layer_projection_norm"
        self.norm = RMSNorm(self.own, config.rms_norm_eps, source=norm, build=build)

    def __call__(self, x: jax.Array, rows: Rows) -> jax.Array:
        """Return the inputs [T, L, P] of all L layers of the model for the first layer's input x [T, D]:
        norm(project(x) / sqrt(D)). rows: as for Linear.
        """
        shape = x.shape[0], self.num_layers, self.own
        return self.norm(scaled(self.project(x, rows), x.shape[1] ** -0.5).reshape(shape))


class EmbeddingGemma2Model(Gemma4ForCausalLM):
    """Gemma 4's layers without a causal mask and with projected inputs. The final projection of its hidden states is
    the first Dense module of its pooler (jaxengine.checkpoint.token_tasks).
    """

    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(("language_model.", "model."),),
        unused=_TOWERS,
    )

    def __init__(self, config: ModelConfig, build: Build):
        # Gemma 4's own inputs of layers have a table.
        super(Gemma4ForCausalLM, self).__init__(config, build)
        if self.stage.is_first:
            self.layer_inputs = ProjectedInputs(config, self.build)

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = text_fields(fields) if fields.has("text_config") else fields
        fields = fields.with_defaults(**DEFAULTS)
        fields.require(rope_scaling=None)  # its ropes have no older spelling
        kinds = layer_kinds(fields, fields.integer("sliding_window_pattern"))
        kinds = (*kinds[:-1], FULL)  # as transformers does, whatever the file says
        bias = fields.boolean("attention_bias", False)
        shared = gelu_fields(
            ConfigFields({**fields.raw, LAYER_CONFIG: None}),  # see with_own_heads
            windows=windows_by_kind(kinds, fields.integer("sliding_window") + 1),  # a token's own key included
            ropes=[None] * len(kinds),
            tied=True,
            scale=1.0,
            bias=bias,
            output_bias=bias,
            causal=False,
        )
        full_heads = fields.integer("num_global_key_value_heads")
        layers = with_own_heads(fields, kinds, shared["attention"], full_heads=full_heads, ropes=_ROPES)
        size = fields.integer("hidden_size_per_layer_input")
        return shared | {"attention": tuple(layers), "layer_input_size": size}

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        return Gemma4Layer(self.config, layer, build, f"{LAYER}.ple_block")

    @classmethod
    def usual_pooling(cls, fields: ConfigFields) -> str:
        return MEAN

    def make_layer_inputs(self, batch: ForwardBatch, x: jax.Array, rows: Rows) -> jax.Array:
        return self.layer_inputs(x, rows)
