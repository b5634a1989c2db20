"""Llama 3.2 Vision (Grattafiori et al. 2024, arXiv:2407.21783): Llama with further layers, whose tokens attend to the
images before them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.hf import text_fields
from jaxengine.models.families.llama import LAYER, LlamaForCausalLM
from jaxengine.models.layers.attention.attention import LayerPages, StepInputs
from jaxengine.models.layers.attention.cross_pictures import NOTHING, PICTURES, PictureAttention, WithPictures
from jaxengine.models.layers.base.activations import ACTIVATIONS
from jaxengine.models.layers.base.mlp import GatedMLP
from jaxengine.models.layers.base.norm import RMSNorm
from jaxengine.models.params.declare import ParamDecl, Source, declare
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.mllama import CROSS, PROJECTOR, TOWER, MllamaTowerConfig, read_mllama_tower
from jaxengine.pallas_kernels.kv.pages import KVPages

# transformers' defaults of fields that a file lacks.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
_LAYERS = [3, 8, 13, 18, 23, 28, 33, 38]
# Tokens beyond the vocabulary: they have embeddings, the first stands for an image, and none is ever chosen.
FURTHER_TOKENS = 8


class CrossLayer(nnx.Module):
    """Layer that computes x + gate(cross(norm(x))), then x + gate(mlp(norm(x))). Without images in a token's sequence
    it returns x; before the first of them it leaves out the MLP.
    """

    def __init__(self, config: ModelConfig, layer: int, build: Build):
        size, eps, tower = config.hidden_size, config.rms_norm_eps, config.tower
        assert isinstance(tower, MllamaTowerConfig)
        attention = config.attention[layer]
        self.input_norm, self.mlp_norm = (
            RMSNorm(size, eps, source=f"{LAYER}.{name}", build=build)
            for name in ("input_layernorm", "post_attention_layernorm")
        )
        sizes = len(tower.layers), 2, tower.max_tiles * tower.tile_positions
        # The section of images replaces it by one that also has the step's images
        # (jaxengine.models.layers.attention.cross_pictures).
        self.cross: Any = PictureAttention(
            size, attention.num_heads, attention.head_dim, sizes, eps=eps, source=f"{LAYER}.{CROSS}", build=build
        )
        activation = ACTIVATIONS[config.activation]
        self.mlp = GatedMLP(size, config.intermediate_size, source=f"{LAYER}.mlp", activation=activation, build=build)
        self.cross_gate, self.mlp_gate = (
            declare((1,), build.dtype, ParamDecl((None,), (Source(f"{LAYER}.{name}", 1),), init_std=0.02))
            for name in ("cross_attn_attn_gate", "cross_attn_mlp_gate")
        )

    def __call__(self, x: jax.Array, kv: KVPages, pages: LayerPages, step: StepInputs) -> tuple[jax.Array, KVPages]:
        cross = self.cross
        if not isinstance(cross, WithPictures):  # a step without images
            return x, kv
        return lax.cond(cross.is_needed[...], lambda x: self._with_pictures(cross, x, step), lambda x: x, x), kv

    def _with_pictures(self, cross: WithPictures, x: jax.Array, step: StepInputs) -> jax.Array:
        """Return x [T, D] plus gated cross-attention, then plus the gated MLP of that, in a step in which some token
        has images in its sequence. Attention adds nothing to tokens of a sequence without images, the MLP also nothing
        before its first image.
        """
        with jax.named_scope("cross_attention"):
            more, sees = cross(self.input_norm(x), step.rows)
            x = self._added(x, more, self.cross_gate, sees > NOTHING)
        with jax.named_scope("mlp"):
            return self._added(x, self.mlp(self.mlp_norm(x), step.rows), self.mlp_gate, sees == PICTURES)

    @staticmethod
    def _added(x: jax.Array, more: jax.Array, gate: nnx.Param, where: jax.Array) -> jax.Array:
        """Return x [T, D], plus `more` times the tanh of the gate at the tokens bool[T]."""
        opened = jnp.tanh(gate[...].astype(jnp.float32)) * more.astype(jnp.float32)
        return (x.astype(jnp.float32) + jnp.where(where[:, None], opened, 0.0)).astype(x.dtype)


class SkippedLayer(nnx.Module):
    """Layer that returns x: one that attends to images in a model that takes none."""

    def __call__(self, x: jax.Array, kv: KVPages, pages: LayerPages, step: StepInputs) -> tuple[jax.Array, KVPages]:
        return x, kv


class MllamaForConditionalGeneration(LlamaForCausalLM):
    """Llama 3.2 Vision."""

    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(
            ("language_model.model.", "model."),
            ("language_model.lm_head.", "lm_head."),
            ("model.language_model.", "model."),
            *((f"model.{part}.", f"{part}.") for part in (TOWER, PROJECTOR)),
        ),
        tower=(f"{TOWER}.", f"{PROJECTOR}."),
        flattened=(f"{TOWER}.patch_embedding.weight",),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        text = text_fields(fields, optional=True).with_defaults(**_DEFAULTS)
        shared, crosses = cls._read_text(text)
        one = shared["attention"][0]
        heads = {"num_kv_heads": one.num_kv_heads, "head_dim": one.head_dim}
        return shared | {"tower": read_mllama_tower(fields, text, crosses, **heads)}

    @classmethod
    def _read_text(cls, text: ConfigFields) -> tuple[dict[str, Any], tuple[int, ...]]:
        """Return (keyword arguments of ModelConfig without the architecture and the tower, the numbers of the layers
        that attend to images) of the text part of a config.json. These layers do not attend to keys of tokens, and
        vocab_size includes FURTHER_TOKENS that get no logits. Raises ModelConfigError for wrong fields, and unless
        `cross_attention_layers` (default: _LAYERS) lists some, but not all, layers.
        """
        text.require(attention_bias=False, mlp_bias=False, tie_word_embeddings=False)
        shared = super().read_hf(text)
        attention, count = shared["attention"], len(shared["attention"])
        layers = text.value("cross_attention_layers", None)
        layers = _LAYERS if layers is None else layers
        right = isinstance(layers, list) and all(type(each) is int and 0 <= each < count for each in layers)
        if not right or not 0 < len(set(layers)) == len(layers) < count:
            raise text.fail("cross_attention_layers", f"a list of some, but not all, layers from 0 to {count - 1}")
        crosses = tuple(sorted(layers))
        each = (
            replace(each, feed_forward_only=True) if layer in crosses else each for layer, each in enumerate(attention)
        )
        sizes = {"vocab_size": shared["vocab_size"] + FURTHER_TOKENS, "scored_tokens": shared["vocab_size"]}
        return {**shared, **sizes, "attention": tuple(each)}, crosses

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        if layer in self.config.skipped_layers:
            return SkippedLayer()
        if self.config.attention[layer].feed_forward_only:
            return CrossLayer(self.config, layer, build)
        return super().make_layer(layer, build)


class MllamaForCausalLM(MllamaForConditionalGeneration):
    """Text part of Llama 3.2 Vision alone, whose layers that attend to images do nothing."""

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        shared, crosses = cls._read_text(fields.with_defaults(**_DEFAULTS))
        return shared | {"skipped_layers": crosses}
