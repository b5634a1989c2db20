"""Cohere Transcribe: a decoder with cross-attention to a sound of any length that a Fast Conformer encodes."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.hf import Activation, hf_fields
from jaxengine.models.families.whisper import AttendingLayer, WhisperEmbedding, WhisperForConditionalGeneration
from jaxengine.models.layers.attention.attention import Attention
from jaxengine.models.layers.attention.cross_attention import CrossAttention
from jaxengine.models.layers.base.embedding import vocab_bias
from jaxengine.models.layers.base.mlp import MLP
from jaxengine.models.layers.base.norm import LayerNorm
from jaxengine.models.params.declare import Source
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.sound.cohere_asr import ENCODER, PROJECTION, CohereAsrTowerConfig, read_cohere_asr_tower
from jaxengine.models.sound.fast_conformer import CONVOLUTIONS, SUBSAMPLING

LAYER = "model.layers.{layer}"
_EPS = 1e-5
_DECODER = "transf_decoder"
_POSITIONS, _EMBEDDING_NORM = "model.positions.weight", "model.embedding_norm"
_PROJECTIONS = ("query_net", "key_net", "value_net")
# Modules of a layer of transformers' class, which adapters and trainers name -> those of files.
_MODULES = {
    f"{own}.{part}_proj": f"{stored}_sub_layer.{name}"
    for own, stored in (("self_attn", "first"), ("encoder_attn", "second"))
    for part, name in zip("qkvo", (*_PROJECTIONS, "out_projection"), strict=True)
}
_MODULES |= {"mlp.fc1": "third_sub_layer.dense_in", "mlp.fc2": "third_sub_layer.dense_out"}
_NORMS = ("input_layernorm", "post_attention_layernorm", "final_layernorm")
_MODULES |= {own: f"layer_norm_{number}" for number, own in enumerate(_NORMS, 1)}
_TOWER_MODULES = {
    **{
        f"self_attn.{own}_proj": f"self_attn.linear_{stored}"
        for own, stored in zip("qkvo", ("q", "k", "v", "out"), strict=True)
    },
    "self_attn.relative_k_proj": "self_attn.linear_pos",
    **{f"self_attn.bias_{part}": f"self_attn.pos_bias_{part}" for part in "uv"},
    "conv.norm": "conv.batch_norm",
}
# transformers' defaults of fields that a file lacks.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 16384,
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "intermediate_size": 4096,
    "max_position_embeddings": 1024,
    "bos_token_id": 4,
    "eos_token_id": 3,
}


class CohereAsrEmbedding(WhisperEmbedding):
    """Norm of the sum of token table and positions."""

    position_source: ClassVar[str] = _POSITIONS

    def __init__(self, config: ModelConfig, build: Build):
        super().__init__(config, build)
        self.norm = LayerNorm(config.hidden_size, _EPS, source=_EMBEDDING_NORM, build=build)

    def __call__(self, token_ids: jax.Array, positions: jax.Array) -> jax.Array:
        """Return the embeddings [T, D] of tokens i32[T] at positions i32[T], in the model's dtype: the norm of the sum
        of their rows of the token table and of the table of positions.
        """
        return self.norm(super().__call__(token_ids, positions))


class CohereAsrLayer(AttendingLayer):
    """AttendingLayer with LayerNorms, under the tensor names of Cohere's decoder."""

    def __init__(self, config: ModelConfig, layer: int, build: Build):
        size, tower, attention = config.hidden_size, config.tower, config.attention[layer]
        assert isinstance(tower, CohereAsrTowerConfig)
        self.input_norm, self.cross_norm, self.mlp_norm = (
            LayerNorm(size, _EPS, source=f"{LAYER}.layer_norm_{number}", build=build) for number in (1, 2, 3)
        )
        source = f"{LAYER}.first_sub_layer"
        qkv = [Source(f"{source}.{name}", size) for name in _PROJECTIONS]
        out = Source(f"{source}.out_projection", size)
        self.attention = Attention(attention, size, eps=_EPS, source=source, qkv=qkv, out=out, build=build)
        self.cross = CrossAttention(
            size,
            attention.head_dim,
            tower.num_positions,
            config.num_layers,
            source=f"{LAYER}.second_sub_layer",
            names=(_PROJECTIONS[0], "out_projection"),
            biases=(attention.bias, attention.bias),
            build=build,
        )
        names: dict[str, Any] = {"source": f"{LAYER}.third_sub_layer", "up": "dense_in", "down": "dense_out"}
        self.mlp = MLP(
            size, config.intermediate_size, **names, bias=True, activation=tower.activate_decoder, build=build
        )


class CohereAsrForConditionalGeneration(WhisperForConditionalGeneration):
    """Cohere Transcribe: a decoder that writes a transcript, whose tokens attend to the whole encoded sound."""

    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        # Published files leave out "model.", which transformers writes.
        prefixes=(
            *(
                (f"{begin}{_DECODER}.{old}", new)
                for begin in ("", "model.")
                for old, new in (
                    ("_decoder.layers.", "model.layers."),
                    ("_decoder.final_layer_norm.", "model.norm."),
                    ("_embedding.token_embedding.", "model.embed_tokens."),
                    ("_embedding.position_embedding.pos_enc", _POSITIONS),
                    ("_embedding.layer_norm.", f"{_EMBEDDING_NORM}."),
                )
            ),
            # As transformers has them in memory.
            (f"model.{ENCODER}.subsampling.layers.", f"{ENCODER}.{SUBSAMPLING}.conv."),
            (f"model.{ENCODER}.subsampling.linear.", f"{ENCODER}.{SUBSAMPLING}.out."),
            ("model.decoder.embed_tokens.", "model.embed_tokens."),
            ("model.decoder.pos_emb.weight", _POSITIONS),
            ("model.decoder.embedding_layernorm.", f"{_EMBEDDING_NORM}."),
            ("model.decoder.layers.", "model.layers."),
            ("model.decoder.norm.", "model.norm."),
            ("model.decoder.proj.", f"{PROJECTION}."),
            ("proj_out.", "lm_head."),
            *((f"model.{part}.", f"{part}.") for part in (ENCODER, PROJECTION)),
            ("log_softmax.mlp.layer0.", "lm_head."),
        ),
        parts=tuple((f".{own}", f".{stored}") for own, stored in _MODULES.items()),
        tower_parts=tuple((f".{own}", f".{stored}") for own, stored in _TOWER_MODULES.items()),
        unused=("preprocessor.featurizer.", "model.preprocessor.featurizer."),
        unused_ends=(".num_batches_tracked",),
        tower=(f"{ENCODER}.", f"{PROJECTION}."),
        flattened=CONVOLUTIONS,
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = fields.with_defaults(**_DEFAULTS)
        fields.require(tie_word_embeddings=False)
        layers, heads = fields.integer("num_hidden_layers"), fields.integer("num_attention_heads")
        # Keys and values of a sound have as many heads as queries, whose joined size is the hidden size.
        fields.require(num_key_value_heads=heads, head_dim=fields.integer("hidden_size") // heads)
        bias = fields.boolean("attention_bias", True)
        shared = hf_fields(
            fields.with_defaults(layer_norm_eps=_EPS),
            ropes=[None] * layers,
            activation=Activation("hidden_act", (fields.text("hidden_act", "relu"),)),
            eps="layer_norm_eps",
            bias=bias,
            output_bias=bias,
        )
        return shared | {"tower": read_cohere_asr_tower(fields, bias=bias)}

    def __init__(self, config: ModelConfig, build: Build):
        super().__init__(config, build)
        self.head_bias = vocab_bias("lm_head", config.vocab_size, self.build)

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        return CohereAsrLayer(self.config, layer, build)

    def make_embedding(self, build: Build) -> CohereAsrEmbedding:
        return CohereAsrEmbedding(self.config, build)
