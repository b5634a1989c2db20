"""DeBERTa-v3 and v2 (He et al. 2020, arXiv:2006.03654; 2021, arXiv:2111.09543): BERT's encoder with disentangled
attention, whose logits add products with keys and queries of distances.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.attention import LayerAttention
from jaxengine.models.config.encoder import EncoderConfig, read_activation
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.pooler import Classifier
from jaxengine.models.families.bert import NAMES
from jaxengine.models.layers.attention import Attention, LayerPages, StepInputs
from jaxengine.models.layers.classify import DenseLabelScores
from jaxengine.models.layers.encoder import FUNCTIONS, HIDDEN_ACT, EncoderNames, PostNormEncoder, encoder_fields
from jaxengine.models.layers.norm import LayerNorm
from jaxengine.models.params.declare import ParamDecl, Source, declare
from jaxengine.models.params.source import CheckpointNames
from jaxengine.pallas_kernels.attention.whole_prompts import (
    has_whole_prompts,
    whole_prompt_attention,
    whole_prompt_schedule,
)
from jaxengine.pallas_kernels.kv.pages import KVPages

# The kernel with distances: plain XLA, which any device runs.
_KERNEL = "cpu"
_PARTS = 3  # products that a logit is the sum of


def log_buckets(num_buckets: int, farthest: int, reach: int) -> np.ndarray:
    """Return the bucket i32[2 * reach + 1] of each position of a query less that of its key, -reach to reach, from 0 to
    2 * num_buckets - 1: one for each near distance and, further away, one for ever wider ranges.
    """
    distance, half = np.arange(-reach, reach + 1), num_buckets // 2
    far = np.maximum(np.abs(distance), half).astype(np.float32) / np.float32(half)
    widest = np.log(np.float32((farthest - 1) / half))
    ranges = np.ceil(np.log(far) / widest * np.float32(half - 1)) + half
    own = np.where(np.abs(distance) <= half, distance, ranges * np.sign(distance)).astype(np.int64)
    return np.clip(own + num_buckets, 0, 2 * num_buckets - 1).astype(np.int32)


class DistanceEmbeddings(nnx.Module):
    """Embeddings of ranges of distances, [2 * num_buckets, D], under a layer norm. All layers have the same."""

    def __init__(self, num_buckets: int, size: int, eps: float, *, source: str, build: Build):
        rows = Source(f"{source}.rel_embeddings", 2 * num_buckets).tensor("weight")
        self.table = declare((2 * num_buckets, size), build.dtype, ParamDecl((None, None), (rows,)))
        self.norm = LayerNorm(size, eps, source=f"{source}.LayerNorm", build=build)

    def __call__(self, first: int, end: int) -> jax.Array:
        """Return the embeddings of these ranges, [end - first, D]."""
        return self.norm(self.table[...][first:end])


class DisentangledAttention(Attention):
    """Attention of whole prompts whose keys and queries of distances are projected as those of tokens are.

    distances: all layers have the same ones. buckets, farthest: arguments of log_buckets. longest: tokens of a prompt.
    """

    def __init__(
        self,
        attention: LayerAttention,
        hidden_size: int,
        *,
        distances: DistanceEmbeddings,
        buckets: int,
        farthest: int,
        longest: int,
        build: Build,
        **names: Any,
    ):
        # An adapter would change the projections of distances, which all requests of a step share.
        super().__init__(attention, hidden_size, build=replace(build, lora=None), **names)
        self.distances, self.buckets, self.farthest, self.longest = distances, buckets, farthest, longest

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
        with jax.named_scope("distances"):
            relative = self._projected(len(q))
        with jax.named_scope("whole_prompt_attention"):
            options: dict[str, Any] = {"spec": self.spec, "platform": _KERNEL, "relative": relative}
            return whole_prompt_attention(q, *own, schedule, **options), kv

    def _projected(self, num_tokens: int) -> tuple[jax.Array, jax.Array]:
        """Project keys and queries of the distances in a step, [2 R + 1, N, H] each, by key less query."""
        ranges = log_buckets(self.buckets, self.farthest, min(num_tokens, self.longest) - 1)[::-1]
        first, end = int(ranges.min()), int(ranges.max()) + 1
        x = self.distances(first, end)
        assert self.qkv.bias is not None
        # These rows are the same on every device, so that none are gathered.
        joined = self.qkv.partial(x, None) + self.qkv.bias[...].astype(jnp.float32)
        queries, keys, *_ = self._heads(joined.astype(x.dtype))
        return keys[ranges - first], queries[ranges - first]


class DebertaV2Model(PostNormEncoder):
    """BERT's layers with DisentangledAttention."""

    names: ClassVar[EncoderNames] = NAMES._replace(
        qkv=("attention.self.query_proj", "attention.self.key_proj", "attention.self.value_proj")
    )
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(("model.deberta.", "model."),),
        unused=("model.mask_predictions.", "model.lm_predictions."),
        unused_ends=(".embeddings.position_ids",),
        heads=("model.pooler.", "model.cls.", "model.classifier.", "model.embeddings.position_embeddings."),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = fields.with_defaults(layer_norm_eps=1e-7, max_position_embeddings=512, legacy=True)
        fields.require(share_att_key=True, norm_rel_ebd="layer_norm", conv_kernel_size=0, legacy=True)
        fields.require(embedding_size=fields.integer("hidden_size"), pooler_hidden_size=fields.integer("hidden_size"))
        for name, needed in (("relative_attention", True), ("share_att_key", True), ("norm_rel_ebd", "layer_norm")):
            if fields.value(name, None) != needed:
                raise fields.fail(name, repr(needed))
        kinds = fields.value("pos_att_type")
        kinds = kinds.split("|") if isinstance(kinds, str) else kinds
        if not isinstance(kinds, list) or sorted(map(str, kinds)) != ["c2p", "p2c"]:
            raise fields.fail("pos_att_type", "c2p and p2c")
        longest, farthest = fields.integer("max_position_embeddings"), fields.value("max_relative_positions", -1)
        if farthest == -1:
            farthest = longest
        buckets = fields.integer("position_buckets", minimum=4)
        if type(farthest) is not int or not buckets // 2 < farthest - 1 <= 1 << 16 or buckets > 1 << 12:
            raise fields.fail("position_buckets", "from 4 to 4096, half of it below max_relative_positions - 1")
        encoder = EncoderConfig(
            read_activation(fields),
            num_token_types=fields.integer("type_vocab_size", 0, minimum=0),
            num_positions=longest if fields.boolean("position_biased_input", True) else 0,
            head_activation=read_activation(fields, "pooler_hidden_act"),
            distances=(buckets, farthest),
        )
        shared = encoder_fields(fields, encoder, activation=HIDDEN_ACT, eps="layer_norm_eps")
        layers = (replace(each, scale=(_PARTS * each.head_dim) ** -0.5) for each in shared["attention"])
        return shared | {"attention": tuple(layers), "max_position_embeddings": longest}

    def make_attention(self, layer: int, build: Build, **names: Any) -> nnx.Module:
        config = self.config
        assert config.encoder is not None and config.encoder.distances is not None
        buckets, farthest = config.encoder.distances
        if layer == self.stage.layers.start:
            source, eps = "model.encoder", config.rms_norm_eps
            self._distances = DistanceEmbeddings(buckets, config.hidden_size, eps, source=source, build=build)
        names |= {"distances": self._distances, "buckets": buckets, "farthest": farthest, "build": build}
        names["longest"] = config.max_position_embeddings
        return DisentangledAttention(config.attention[layer], config.hidden_size, **names)

    def make_labels(self, classifier: Classifier, build: Build) -> DenseLabelScores:
        assert self.config.encoder is not None
        activation = FUNCTIONS[self.config.encoder.head_activation]
        sources = self.names.dense, self.names.labels
        return DenseLabelScores(self.config.hidden_size, classifier, sources, activation=activation, build=build)
