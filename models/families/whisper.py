"""Whisper (Radford et al. 2022, arXiv:2212.04356): a decoder with cross-attention to a sound that its tower encodes."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.hf import Activation, hf_fields
from jaxengine.models.forward_batch import ForwardBatch
from jaxengine.models.layers.attention.attention import Attention, LayerPages, StepInputs
from jaxengine.models.layers.attention.cross_attention import CrossAttention
from jaxengine.models.layers.base.embedding import Embedding
from jaxengine.models.layers.base.mlp import MLP
from jaxengine.models.layers.base.norm import LayerNorm, NormClass
from jaxengine.models.layers.decoder import Decoder
from jaxengine.models.params.declare import ParamDecl, Source, declare
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.sound.whisper import ENCODER, WhisperTowerConfig, read_whisper_tower
from jaxengine.pallas_kernels.kv.pages import KVPages

LAYER = "model.layers.{layer}"
_EPS = 1e-5
# transformers' sizes of a model whose config.json has none.
_TINY = {"vocab_size": 51865, "d_model": 384} | {
    f"{part}_{name}": size
    for part in ("encoder", "decoder")
    for name, size in (("layers", 4), ("attention_heads", 6), ("ffn_dim", 1536))
}


class HeadsBias(nnx.Module):
    """Learned bias [N * H] that is added to projected heads [T, N, H]. source: the checkpoint's tensor."""

    def __init__(self, num_heads: int, head_dim: int, *, source: str, build: Build):
        size = num_heads * head_dim
        decl = ParamDecl(("heads",), (Source(source, size, group=head_dim),), init_std=0.02)
        self.bias = declare((size,), build.dtype, decl)

    def __call__(self, x: jax.Array) -> jax.Array:
        return (x.astype(jnp.float32) + self.bias[...].astype(jnp.float32).reshape(x.shape[1:])).astype(x.dtype)


class WhisperAttention(Attention):
    """Self attention whose queries, values and output have a bias and whose keys have none."""

    def __init__(self, config: ModelConfig, layer: int, build: Build):
        attention, source = config.attention[layer], f"{LAYER}.self_attn"
        sizes = attention.num_heads, attention.head_dim
        q_bias, v_bias = (HeadsBias(*sizes, source=f"{source}.{name}_proj.bias", build=build) for name in "qv")
        options: dict[str, Any] = {"eps": _EPS, "source": source, "build": build, "qk_norms": (q_bias, None)}
        out = Source(f"{source}.out_proj", config.hidden_size)
        super().__init__(attention, config.hidden_size, out=out, **options)
        self.v_bias = v_bias

    def values(self, v: jax.Array) -> jax.Array:
        """Return the values to cache, [T, K, H]: projected values v plus their bias."""
        return self.v_bias(v)


class WhisperEmbedding(nnx.Module):
    """Token table and learned positions. The token table also computes the logits."""

    position_source: ClassVar[str] = "model.decoder.embed_positions.weight"

    def __init__(self, config: ModelConfig, build: Build):
        size, count = config.hidden_size, config.max_position_embeddings
        self.tokens = Embedding(config.vocab_size, size, source="model.embed_tokens", build=build)
        rows = Source(self.position_source, count)
        self.positions = declare((count, size), build.dtype, ParamDecl((None, None), (rows,), init_std=0.02))
        self.dtype = build.dtype

    def __call__(self, token_ids: jax.Array, positions: jax.Array) -> jax.Array:
        """Return the embeddings [T, D] of tokens i32[T], in the model's dtype: their rows of the token table plus the
        learned rows of their positions i32[T].
        """
        x = self.tokens(token_ids).astype(jnp.float32)
        return (x + self.positions[...][positions].astype(jnp.float32)).astype(self.dtype)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Return logits f32[R, V] of hidden states [R, D]. With a split vocabulary, each device computes those of its
        part.
        """
        return self.tokens.logits(hidden)


class AttendingLayer(nnx.Module):
    """Layer that computes x + attention(norm(x)), then x + cross(norm(x)), then x + mlp(norm(x)), of families whose
    tokens attend to a sound. A family's constructor makes the parts.

    Attributes:
      input_norm, cross_norm, mlp_norm: norms before the three parts.
      attention: of tokens to earlier ones. mlp: as named.
      cross: CrossAttention to the sound. The section of sounds replaces it by one that also has the step's sounds
        (jaxengine.models.layers.attention.cross_attention).
    """

    input_norm: nnx.Module
    cross_norm: nnx.Module
    mlp_norm: nnx.Module
    attention: Attention
    cross: Any
    mlp: nnx.Module

    def __call__(self, x: jax.Array, kv: KVPages, pages: LayerPages, step: StepInputs) -> tuple[jax.Array, KVPages]:
        with jax.named_scope("attention"):
            attended, kv = self.attention(self.input_norm(x), kv, pages, step)
            x = x + attended
        with jax.named_scope("cross_attention"):
            x = x + self.cross(self.cross_norm(x), step.rows)
        with jax.named_scope("mlp"):
            return x + self.mlp(self.mlp_norm(x), step.rows), kv


class WhisperLayer(AttendingLayer):
    """AttendingLayer with LayerNorms, attention of WhisperAttention and an MLP without a gate."""

    def __init__(self, config: ModelConfig, layer: int, build: Build):
        size, tower = config.hidden_size, config.tower
        assert isinstance(tower, WhisperTowerConfig)
        norms = ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm")
        self.input_norm, self.cross_norm, self.mlp_norm = (
            LayerNorm(size, _EPS, source=f"{LAYER}.{name}", build=build) for name in norms
        )
        self.attention = WhisperAttention(config, layer, build)
        sizes = config.attention[layer].head_dim, tower.num_positions, config.num_layers
        self.cross = CrossAttention(size, *sizes, source=f"{LAYER}.encoder_attn", build=build)
        names = {"up": "fc1", "down": "fc2", "bias": True}
        self.mlp = MLP(
            size, config.intermediate_size, source=LAYER, activation=tower.sizes.activate, build=build, **names
        )


class WhisperForConditionalGeneration(Decoder):
    """Whisper: a decoder that writes a transcript or translation, whose tokens attend to the whole encoded sound."""

    norm_class: ClassVar[NormClass] = LayerNorm
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(
            ("model.decoder.layers.", "model.layers."),
            ("model.decoder.embed_tokens.", "model.embed_tokens."),
            ("model.decoder.layer_norm.", "model.norm."),
            ("proj_out.", "lm_head."),  # the token table, unless the checkpoint has a head of its own
        ),
        tower=(f"{ENCODER}.",),
        flattened=(".conv1.weight", ".conv2.weight"),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = fields.with_defaults(**_TINY)
        tower, layers = read_whisper_tower(fields), fields.integer("decoder_layers")
        own = {
            "hidden_size": fields.integer("d_model"),
            "num_hidden_layers": layers,
            "num_attention_heads": fields.integer("decoder_attention_heads"),
            "num_key_value_heads": fields.integer("decoder_attention_heads"),
            "intermediate_size": fields.integer("decoder_ffn_dim"),
            "max_position_embeddings": fields.integer("max_target_positions", 448),
            "layer_norm_eps": _EPS,
        }
        shared = hf_fields(
            ConfigFields({**fields.raw, **own}),
            ropes=[None] * layers,
            activation=Activation("activation_function", (tower.sizes.activation,)),
            tied=True,
            eps="layer_norm_eps",
            output_bias=True,
        )
        return shared | {"tower": tower}

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        return WhisperLayer(self.config, layer, build)

    def make_embedding(self, build: Build) -> WhisperEmbedding:
        return WhisperEmbedding(self.config, build)

    def embed_batch(self, batch: ForwardBatch) -> jax.Array:
        return self.embed(batch.token_ids, batch.positions)
