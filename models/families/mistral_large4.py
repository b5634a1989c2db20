"""Mistral Large 4 (Mistral AI 2026): GLM-5.2's shared selections of keys without a latent of queries, layers without
rope, learned effects of positions, layers that attend to the latents of earlier ones, and Pixtral's vision tower.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.attention import KeyIndex, LayerAttention
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.hf import text_fields
from jaxengine.models.config.readers.latent import hf_latent_fields
from jaxengine.models.families.gemma2 import read_cap
from jaxengine.models.families.glm4_moe import sigmoid_experts
from jaxengine.models.families.glm_moe_dsa import GlmMoeDsaForCausalLM
from jaxengine.models.families.llama import LAYER, gated_fields
from jaxengine.models.families.ministral3 import Mistral3ForConditionalGeneration
from jaxengine.models.families.smollm3 import rotated_layers
from jaxengine.models.layers.attention.attention import LayerPages, StepInputs
from jaxengine.models.layers.attention.sparse_mla import Indexer, SparseLatentAttention
from jaxengine.models.layers.base.norm import LayerNorm
from jaxengine.models.layers.base.rope import rope_table
from jaxengine.models.params.declare import ParamDecl, Source, declare
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.pixtral import read_pixtral
from jaxengine.pallas_kernels.kv.pages import KVPages

# transformers' defaults for fields that a file lacks.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 204800,
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "moe_intermediate_size": 6144,
    "num_hidden_layers": 72,
    "num_attention_heads": 64,
    "max_position_embeddings": 1 << 20,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2048.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "attention_factor": 1.0,
}
# The tower of a file without one.
_SIGHT = {
    "model_type": "pixtral",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 30,
    "num_attention_heads": 16,
    "patch_size": 14,
    "image_size": 1540,
    "hidden_act": "silu",
}
_ONLY: dict[str, Any] = {
    "n_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
    "scoring_func": "softmax",
    "rope_interleave": True,
    "indexer_rope_interleave": True,
}
_EPS = 1e-6


class PositionScale(nnx.Module):
    """Learned factors of the queries of `num_heads` heads, scale * ln(1 + position) + bias, with a scale and a bias for
    each head. axis: logical axis of the heads, None to have all on every device.
    """

    def __init__(self, num_heads: int, *, source: str, axis: str | None):
        self.scale, self.bias = (
            declare(
                (num_heads,), jnp.float32, ParamDecl((axis,), (Source(f"{source}.{name}", num_heads),), init_std=0.3)
            )
            for name in ("scale", "bias")
        )

    def __call__(self, q: jax.Array, step: StepInputs) -> jax.Array:
        """Return queries q [T, N, .] of a step's tokens, times log(1 + position) * scale + bias of each head, in q's
        dtype.
        """
        assert step.positions is not None
        scale, bias = self.scale[...], self.bias[...]
        factors = jnp.log1p(step.positions.astype(jnp.float32))[:, None] * scale + bias
        return (q.astype(jnp.float32) * factors[..., None]).astype(q.dtype)


class ScaledIndexer(Indexer):
    """Indexer whose queries are projected from the hidden state after a layer norm, and multiplied by a
    PositionScale.
    """

    def __init__(self, index: KeyIndex, q_rank: int, hidden_size: int, *, source: str, build: Build):
        super().__init__(index, q_rank, hidden_size, source=source, build=build)
        self.q_norm = LayerNorm(hidden_size, _EPS, source=f"{source}.q_input_norm", build=build)
        self.scale = PositionScale(index.num_heads, source=f"{source}.softmax_scaling", axis=None)

    def __call__(self, x: jax.Array, q_latent: jax.Array, step: StepInputs) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return Indexer's result for normed q_latent, with queries multiplied by `scale`. q_latent: [T, D], the hidden
        state x.
        """
        q, weights, k = super().__call__(x, self.q_norm(q_latent), step)
        return self.scale(q, step), weights, k


class MistralLarge4Attention(SparseLatentAttention):
    """Sparse latent attention without a latent of queries, with a PositionScale of queries, and in layers with rope
    with frequencies that are multiplied by exp(alpha).

    rope_dim: elements of the rotated part of keys, in the layers that have one. `alpha` f32[rope_dim / 2] is one
    parameter for all layers: the model gives each layer that of its first one.
    """

    indexer_class: ClassVar[type[Indexer]] = ScaledIndexer

    def __init__(
        self, attention: LayerAttention, hidden_size: int, *, source: str, build: Build, rope_dim: int, **options: Any
    ):
        super().__init__(attention, hidden_size, source=source, build=build, **options)
        self.rope = attention.rope
        self.scale = PositionScale(attention.num_heads, source=f"{source}.softmax_scaling", axis="heads")
        of_all = ParamDecl((None,), (Source("model.rotary_emb.alpha", rope_dim // 2),), init_std=0.02)
        self.alpha = declare((rope_dim // 2,), jnp.float32, of_all)

    def __call__(self, x: jax.Array, kv: KVPages, pages: LayerPages, step: StepInputs) -> tuple[jax.Array, KVPages]:
        """Map x[T, D] to ([T, D], the pool with this step's latents and this layer's keys of the indexer written). Its
        rope, if any, is scaled by exp of the layer's weight `alpha`.
        """
        if self.rope is not None:
            assert step.positions is not None
            with jax.named_scope("rope_table"):
                step = step._replace(rope=rope_table(step.positions, self.rope, jnp.exp(self.alpha[...])))
        return super().__call__(x, kv, pages, step)

    def project(
        self, x: jax.Array, step: StepInputs
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array | None, jax.Array]:
        """Return what LatentAttention.project returns, with both parts of the queries multiplied by `scale`."""
        (q, q_rope), keys, q_latent = super().project(x, step)
        return (self.scale(q, step), self.scale(q_rope, step)), keys, q_latent


class MistralLarge4ForConditionalGeneration(GlmMoeDsaForCausalLM):
    """GLM-5.2 with MistralLarge4Attention, experts chosen by softmax scores, and soft-capped logits."""

    checkpoint_names: ClassVar[CheckpointNames] = Mistral3ForConditionalGeneration.checkpoint_names

    def __init__(self, config: ModelConfig, build: Build):
        super().__init__(config, build)
        layers: Any = self.layers
        first, *others = (layer.attention for layer in layers)
        for attention in others:
            attention.alpha = first.alpha

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        text = text_fields(fields, optional=True).with_defaults(**DEFAULTS)
        text.require(**_ONLY, layer_types=["indexed_attention"] * text.integer("num_hidden_layers"))
        # Fields that transformers' class has no use for, or reads under another name.
        own: dict[str, Any] = {"q_lora_rank": None, "norm_topk_prob": True, "scoring_func": None}
        own["n_routed_experts"] = text.value("num_experts", text.value("n_routed_experts"))
        if text.value("rope_parameters", None) is None and not text.mapping("rope_scaling"):
            own["rope_parameters"] = _ROPE
        text = ConfigFields({**text.raw, **own})
        shared, experts = _attention(text, cls.read_sources(text)), sigmoid_experts(text)
        if fields.mapping("vision_config") is None:
            fields = ConfigFields({**fields.raw, "vision_config": _SIGHT})
        return shared | {
            "experts": replace(experts, scoring_func="softmax", correction_bias=False),
            "logit_soft_cap": read_cap(text, "final_logit_softcapping", 30.0),
            "tower": read_pixtral(fields, shared["rms_norm_eps"]),
        }

    def make_attention(self, layer: int, build: Build) -> nnx.Module:
        config = self.config
        sizes = config.attention[layer], config.hidden_size
        options: dict[str, Any] = {"notes": self.notes_selection(layer), "eps": config.rms_norm_eps}
        rope_dim = max(each.rope.rotary_dim for each in config.attention if each.rope is not None)
        source = f"{LAYER}.self_attn"
        return MistralLarge4Attention(*sizes, source=source, build=build, rope_dim=rope_dim, **options)


def _attention(fields: ConfigFields, selections: list[int | None]) -> dict[str, Any]:
    """Return the fields that families share, with the attention of each layer: with a rotated part of keys or, where
    `no_rope_layers` has 0, with as many further elements that are not rotated.

    Indexers have `index_n_heads` (default: 32) heads of `index_head_dim` (128) elements and select `index_topk` (2048)
    keys. selections: the layer whose selection of keys each layer uses. Raises ModelConfigError for wrong fields, and
    unless some layer has rope.
    """
    biases = dict.fromkeys(("bias", "output_bias"), fields.boolean("attention_bias", False))
    rope_dim = fields.integer("qk_rope_head_dim")
    whole = fields.integer("qk_nope_head_dim") + rope_dim
    plain = ConfigFields({**fields.raw, "qk_nope_head_dim": whole, "qk_rope_head_dim": 0})
    shared, unrotated = (
        gated_fields(each, read=hf_latent_fields, roped=each is fields, learned_positions=True, **biases)
        for each in (fields, plain)
    )
    rotated = rotated_layers(fields)
    if not any(rotated):
        raise fields.fail("no_rope_layers", "a list that has a 1 for a layer")
    index = KeyIndex(
        num_heads=fields.integer("index_n_heads", 32),
        head_dim=fields.integer("index_head_dim", 128),
        top_k=fields.integer("index_topk", 2048),
        interleaved=True,
        reads_hidden=True,
    )
    sources = _latent_sources(fields, rotated, selections)
    layers = [
        replace((shared if turns else unrotated)["attention"][layer], index=replace(index, source=selections[layer]))
        for layer, turns in enumerate(rotated)
    ]
    pairs = zip(layers, sources, strict=True)
    return shared | {"attention": tuple(replace(each, kv_source=source) for each, source in pairs)}


def _latent_sources(fields: ConfigFields, rotated: list[bool], selections: list[int | None]) -> list[int | None]:
    """Return, for each layer, the earlier layer whose latents it attends to, read from `kv_source_layers`, which has
    its own number for a layer with latents of its own; None for these.

    rotated: whether each layer has rope. selections: the layer whose selection of keys each layer uses. Raises
    ModelConfigError for a list of another length or with a source that has no latents; for a source other than the last
    layer before with shared latents and as much rope; and for a layer with the latents of another one and an indexer of
    its own.
    """
    count, name = len(rotated), "kv_source_layers"
    listed = fields.value(name, None)
    listed = list(range(count)) if listed is None else listed
    if not isinstance(listed, list) or len(listed) != count:
        raise fields.fail(name, f"a list of {count} numbers of layers")
    for layer, source in enumerate(listed):
        if type(source) is not int or not 0 <= source <= layer or listed[source] != source:
            raise fields.fail(name, f"a list of {count} layers with latents of their own, not after layer {layer}")
        if source == layer:
            continue
        shared = [each for each in range(layer) if rotated[each] == rotated[layer] and each in listed[each + 1 :]]
        if not shared or shared[-1] != source or listed[shared[-1]] != source:
            kind = "with" if rotated[layer] else "without"
            raise fields.fail(name, f"for layer {layer} the last layer before it {kind} rope whose latents are shared")
        if selections[layer] is None:
            raise fields.fail(name, f"{layer} for layer {layer}, which has an indexer of its own")
    return [None if source == layer else source for layer, source in enumerate(listed)]
