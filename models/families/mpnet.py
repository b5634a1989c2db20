"""MPNet (Song et al. 2020, arXiv:2004.09297): BERT's encoder with a bias of attention by the distance of two tokens."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.attention import LayerAttention
from jaxengine.models.config.encoder import EncoderConfig, read_activation
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.layers.attention import Attention, LayerPages, StepInputs
from jaxengine.models.layers.encoder import HIDDEN_ACT, EncoderNames, PostNormEncoder, encoder_fields
from jaxengine.models.params.declare import ParamDecl, Source, declare
from jaxengine.models.params.source import CheckpointNames
from jaxengine.pallas_kernels.attention.whole_prompts import (
    has_whole_prompts,
    whole_prompt_attention,
    whole_prompt_schedule,
)
from jaxengine.pallas_kernels.kv.pages import KVPages

# transformers takes no others, whatever config.json says.
_NUM_BUCKETS, _FIRST_POSITION = 32, 2
# Distances from here on have the last bucket.
_FARTHEST = 128
# The kernel with biases: plain XLA, which any device runs.
_KERNEL = "cpu"


def distance_buckets(num_buckets: int) -> np.ndarray:
    """Return the bucket i32[2 * 128 + 1] of each distance of a key from its query, -128 to 128: a half for keys behind,
    one for each near distance and, further away, one for ever wider ranges (Raffel et al. 2020, arXiv:1910.10683).
    """
    distance = np.arange(-_FARTHEST, _FARTHEST + 1)
    half, near = num_buckets // 2, num_buckets // 4
    far = np.maximum(np.abs(distance), 1).astype(np.float32) / np.float32(near)
    ranges = np.log(far) / np.float32(math.log(_FARTHEST / near)) * np.float32(half - near)
    own = np.where(np.abs(distance) < near, np.abs(distance), np.minimum(near + ranges.astype(np.int64), half - 1))
    return (own + half * (distance > 0)).astype(np.int32)


class BiasedAttention(Attention):
    """Attention of whole prompts whose logits have a learned bias by distance; all layers have the same one."""

    def __init__(self, attention: LayerAttention, hidden_size: int, *, biases: nnx.Param, **names: Any):
        super().__init__(attention, hidden_size, **names)
        self.biases = biases

    def attend(
        self,
        q: jax.Array,
        own: tuple[jax.Array, jax.Array] | None,
        kv: KVPages,
        pages: LayerPages,
        step: StepInputs,
    ) -> tuple[jax.Array, KVPages]:
        assert own is not None
        schedule, cu_q_lens, num_seqs = step.schedule, pages.ragged.cu_q_lens, pages.ragged.num_seqs
        if not has_whole_prompts(self.spec, kv.layout):
            schedule = whole_prompt_schedule(cu_q_lens, num_seqs, num_tokens=len(q), platform=_KERNEL)
        biases = self.biases[...][distance_buckets(_NUM_BUCKETS)].T
        with jax.named_scope("whole_prompt_attention"):
            options: dict[str, Any] = {"spec": self.spec, "platform": _KERNEL, "biases": biases}
            return whole_prompt_attention(q, *own, schedule, **options), kv


class MPNetModel(PostNormEncoder):
    """BERT's layers with biases by distance; its position table begins with two rows for no token."""

    names: ClassVar[EncoderNames] = EncoderNames(
        layer="model.encoder.layer.{layer}",
        qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        out="attention.attn.o",
        attention_norm="attention.LayerNorm",
        up="intermediate.dense",
        down="output.dense",
        mlp_norm="output.LayerNorm",
        dense="model.classifier.dense",
        labels="model.classifier.out_proj",
        masked=("lm_head.dense", "lm_head.layer_norm", "lm_head.bias"),
    )
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(("model.mpnet.", "model."),),
        heads=("model.pooler.", "lm_head.", "model.lm_head.", "model.classifier."),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = fields.with_defaults(vocab_size=30527, max_position_embeddings=512, layer_norm_eps=1e-12)
        fields.require(relative_attention_num_buckets=_NUM_BUCKETS)
        if fields.integer("max_position_embeddings") <= _FIRST_POSITION:
            raise fields.fail("max_position_embeddings", f"more than {_FIRST_POSITION}")
        encoder = EncoderConfig(
            read_activation(fields),
            num_token_types=0,
            num_positions=fields.integer("max_position_embeddings"),
            first_position=_FIRST_POSITION,
        )
        return encoder_fields(fields, encoder, activation=HIDDEN_ACT, eps="layer_norm_eps")

    def make_attention(self, layer: int, build: Build, **names: Any) -> nnx.Module:
        attention = self.config.attention[layer]
        if layer == self.stage.layers.start:
            table = Source("model.encoder.relative_attention_bias", _NUM_BUCKETS).tensor("weight")
            shape = _NUM_BUCKETS, attention.num_heads
            self._biases = declare(shape, jnp.float32, ParamDecl((None, "heads"), (table,)))
        return BiasedAttention(attention, self.config.hidden_size, biases=self._biases, build=build, **names)
