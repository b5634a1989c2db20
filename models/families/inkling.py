"""Inkling (Thinking Machines 2026), served as text: attention without rope, to whose logits each token adds numbers of
its own by distance, short convolutions of keys, values and the outputs of a layer's parts, and experts that share their
router with shared ones.

Its towers and its layers that predict further tokens are not read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.cache import StateRows
from jaxengine.models.config.attention import LayerAttention, RelativeBias, TemperatureTuning
from jaxengine.models.config.compressed import LayerConvolutions
from jaxengine.models.config.experts import ExpertsConfig
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.hf import listed_dense, read_each_layer, text_fields
from jaxengine.models.families.llama import LAYER, gated_fields
from jaxengine.models.layers.attention.attention import Attention, LayerPages, StepInputs, head_copies
from jaxengine.models.layers.base.activations import ACTIVATIONS
from jaxengine.models.layers.base.embedding import Embedding, vocab_source
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.mlp import GatedMLP
from jaxengine.models.layers.base.norm import RMSNorm
from jaxengine.models.layers.base.rows import Rows
from jaxengine.models.layers.decoder import Decoder
from jaxengine.models.layers.experts.sinks import SinkExperts
from jaxengine.models.layers.states.short_conv import ResidualConv
from jaxengine.models.params.declare import ParamDecl, Source, declare
from jaxengine.models.params.source import CheckpointNames
from jaxengine.pallas_kernels.kv.pages import KVPages

HYBRID, HYBRID_SLIDING = "hybrid", "hybrid_sliding"
_CONV = ".conv1d.weight"
# transformers' defaults for fields that a file lacks.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 201024,
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "num_hidden_layers": 66,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 16,
    "swa_head_dim": 128,
    "sliding_window_size": 512,
    "max_position_embeddings": 131072,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Names that checkpoints have for fields, and that come before transformers' own names of them.
_OTHER_NAMES = {
    "sliding_window_size": "sliding_window",
    "n_routed_experts": "num_local_experts",
    "conv_kernel_size": "sconv_kernel_size",
    "max_position_embeddings": "model_max_length",
    "logits_mup_width_multiplier": "embedding_multiplier",
}
# What published files say, and transformers' class does whatever they say.
_ALWAYS: dict[str, Any] = {
    "shared_expert_sink": True,
    "use_sconv": True,
    "use_embed_norm": True,
    "use_gate_bias": True,
    "norm_after_topk": True,
    "use_global_scale": True,
    "gate_activation": "sigmoid",
    "q_bias": False,
    "o_bias": False,
    "final_logit_softcapping": None,
}

States = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


class InklingAttention(Attention):
    """Attention whose keys and values are convolved before their norms, and to whose logits each head of a token adds a
    product of a learned matrix [d_rel, extent] with numbers that are projected from the token's hidden state: the one
    of the key's distance.
    """

    def __init__(self, config: ModelConfig, layer: int, build: Build):
        own, size, source = config.attention[layer], config.hidden_size, f"{LAYER}.self_attn"
        super().__init__(own, size, eps=config.rms_norm_eps, source=source, build=build)
        relative, state, copies = own.relative, own.state, head_copies(own, build.mesh)
        assert relative is not None
        assert isinstance(state, LayerConvolutions)
        numbers = Source(f"{source}.r_proj", own.num_heads * relative.size, group=relative.size)
        self.relative = Linear(size, (numbers,), axes=("embed", "heads"), build=build)
        table = ParamDecl((None, None), (Source(f"{source}.rel_logits_proj.proj", relative.size),), init_std=0.02)
        self.table = declare((relative.size, relative.extent), build.dtype, table)

        def conv(name: str) -> ResidualConv:
            heads = own.num_kv_heads * own.head_dim
            taps = Source(f"{source}.{name}{_CONV}", heads, repeat=copies, group=own.head_dim)
            return ResidualConv(taps, state.kernel, axis="heads")

        self.k_conv, self.v_conv = conv("k_sconv"), conv("v_sconv")

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        x: jax.Array,
        kv: KVPages,
        pages: LayerPages,
        windows: tuple[jax.Array, jax.Array],
        rows: StateRows,
        step: StepInputs,
    ) -> tuple[jax.Array, KVPages, tuple[jax.Array, jax.Array]]:
        """Attend with convolved keys and values: map x[T, D] to ([T, D], the pool with this step's keys and values
        written, the windows of keys and values after this step's tokens).
        """
        with jax.named_scope("qkv"):
            q, k, v, _ = self._heads(self.qkv(x, step.rows))
        convolved, shape = [], k.shape
        for part, convolve, window in ((k, self.k_conv, windows[0]), (v, self.v_conv, windows[1])):
            part, window = convolve(part.reshape(len(x), -1), window, rows)
            convolved.append((part.reshape(shape), window))
        (k, k_window), (v, v_window) = convolved
        q, k = self.rotate(q, k, step)
        with jax.named_scope("biases"):
            biases = self._biases(x, step).astype(q.dtype)
        o, kv = self.attend(q, (k, v), kv, pages, step._replace(biases=biases))
        with jax.named_scope("o_proj"):
            return self.out(o.reshape(len(x), -1), step.rows), kv, (k_window, v_window)

    def _biases(self, x: jax.Array, step: StepInputs) -> jax.Array:
        """Return what each head of tokens x [T, D] adds to the logits of keys by distance, f32[T, N, extent]: the
        product of numbers projected from x and the table, times the tokens' temperature if there is one.
        """
        numbers = self.relative(x, step.rows).reshape(len(x), self.spec.num_q_heads, -1)
        biases = jnp.einsum("tnr,re->tne", numbers, self.table[...], preferred_element_type=jnp.float32)
        return biases if step.temperature is None else biases * step.temperature[:, None, None]


class ScaledMLP(GatedMLP):
    """Gated MLP whose output is multiplied by a learned number."""

    def __init__(self, config: ModelConfig, *, source: str, build: Build):
        sizes, activation = (config.hidden_size, config.intermediate_size), ACTIVATIONS[config.activation]
        super().__init__(*sizes, source=source, activation=activation, build=build)
        self.scale = declare((1,), build.dtype, ParamDecl((None,), (Source(f"{source}.global_scale", 1),)))

    def __call__(self, x: jax.Array, rows: Rows) -> jax.Array:
        y = super().__call__(x, rows).astype(jnp.float32)
        return (y * self.scale[...].astype(jnp.float32)).astype(x.dtype)


class InklingLayer(nnx.Module):
    """Layer x + c(attention(norm(x))), then x + c(mlp(norm(x))), where c(y) is y plus its causal convolution."""

    def __init__(self, config: ModelConfig, layer: int, mlp: nnx.Module, build: Build):
        size, eps, state = config.hidden_size, config.rms_norm_eps, config.attention[layer].state
        assert isinstance(state, LayerConvolutions)
        self.input_norm = RMSNorm(size, eps, source=f"{LAYER}.input_layernorm", build=build)
        self.attention = InklingAttention(config, layer, build)
        self.mlp_norm = RMSNorm(size, eps, source=f"{LAYER}.post_attention_layernorm", build=build)
        self.mlp = mlp
        self.attention_conv, self.mlp_conv = (
            ResidualConv(Source(f"{LAYER}.{name}{_CONV}", size), state.kernel) for name in ("attn_sconv", "mlp_sconv")
        )

    def __call__(
        self, x: jax.Array, kv: tuple[KVPages, States], pages: tuple[LayerPages, StateRows], step: StepInputs
    ) -> tuple[jax.Array, tuple[KVPages, States]]:
        """Map x[T, D] to ([T, D], the pool and the windows of LayerConvolutions.arrays after this step's tokens). The
        outputs of attention and MLP are convolved before they are added to x.
        """
        (pool, (keys, values, attended, fed)), (own_pages, rows) = kv, pages
        with jax.named_scope("attention"):
            windows = keys, values
            y, pool, (keys, values) = self.attention(self.input_norm(x), pool, own_pages, windows, rows, step)
            y, attended = self.attention_conv(y, attended, rows)
            x = x + y
        with jax.named_scope("mlp"):
            y, fed = self.mlp_conv(self.mlp(self.mlp_norm(x), step.rows), fed, rows)
            return x + y, (pool, (keys, values, attended, fed))


class NormedEmbedding(Embedding):
    """Token table whose rows have an RMS norm."""

    def __init__(self, config: ModelConfig, build: Build):
        source, size = "model.embed_tokens", config.hidden_size
        super().__init__(config.vocab_size, size, source=source, build=build)
        self.norm = RMSNorm(size, config.rms_norm_eps, source=f"{source}.embed_norm", build=build)

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        return self.norm(super().__call__(token_ids))


class InklingForCausalLM(Decoder):
    """Decoder of InklingLayers with normed embeddings. Of the rows of the head, those of the first tokens may count
    alone.
    """

    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        suffixes=tuple(
            (f".shared_experts.{name}", f".shared.experts.{name}") for name in ("gate_proj", "up_proj", "down_proj")
        ),
        squeezed=(_CONV,),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        return _read(fields)

    def __init__(self, config: ModelConfig, build: Build):
        super().__init__(config, build)
        if self.stage.is_last and config.pooler is None:
            rows = vocab_source("lm_head", config.vocab_size, self.mesh)  # also those of no logits
            self.lm_head = Linear(config.hidden_size, (rows,), axes=("embed", "vocab"), build=self.build)

    def make_embedding(self, build: Build) -> Any:
        return NormedEmbedding(self.config, build)

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        config, source = self.config, f"{LAYER}.mlp"
        assert config.experts is not None
        if layer in config.experts.dense_layers:
            mlp: Any = ScaledMLP(config, source=source, build=build)
        else:
            mlp = SinkExperts(config, source=source, build=build)
        return InklingLayer(config, layer, mlp, build)


_TOWERS = ("model.visual.", "model.vision_tower.", "model.audio.", "model.audio_tower.")
_OWN = "model.language_model."


class InklingForConditionalGeneration(InklingForCausalLM):
    """Inkling as published, with names of its own for tensors, of which some have rows of two matrices in turn."""

    checkpoint_names: ClassVar[CheckpointNames] = InklingForCausalLM.checkpoint_names._replace(
        prefixes=(
            ("model.llm.embed_norm.", "model.embed_tokens.embed_norm."),
            ("model.llm.embed.", "model.embed_tokens."),
            ("model.llm.unembed.", "lm_head."),
            ("model.llm.", "model."),
            (_OWN, "model."),
        ),
        suffixes=(
            *InklingForCausalLM.checkpoint_names.suffixes,
            (".shared_experts.shared_w13_weight", ".shared.experts.alternating_gate_up_proj"),
            (".shared_experts.shared_w2_weight", ".shared.experts.down_proj"),
            (".mlp.experts.w13_weight", ".mlp.experts.alternating_gate_up_proj"),
            (".mlp.experts.w2_weight", ".mlp.experts.down_proj"),
            (".mlp.gate.bias", ".mlp.gate.e_score_correction_bias"),
            *((f".{name}_sconv.weight", f".{name}_sconv{_CONV}") for name in ("attn", "mlp")),
            *((f".attn.{name}_sconv.weight", f".self_attn.{name}_sconv{_CONV}") for name in ("k", "v")),
        ),
        parts=(
            *((f".attn.{old}.", f".self_attn.{new}_proj.") for old, new in (("wq_du", "q"), ("wk_dv", "k"))),
            *((f".attn.{old}.", f".self_attn.{new}_proj.") for old, new in (("wv_dv", "v"), ("wr_du", "r"))),
            (".attn.wo_ud.", ".self_attn.o_proj."),
            (".mlp.w2_md.", ".mlp.down_proj."),
            (".attn.", ".self_attn."),
            (".mlp_norm.", ".post_attention_layernorm."),
            (".attn_norm.", ".input_layernorm."),
        ),
        alternating={".mlp.w13_dn.weight": (".mlp.gate_proj.weight", ".mlp.up_proj.weight")},
        unused=_TOWERS,
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        return _read(text_fields(fields, optional=True))


def _read(fields: ConfigFields) -> dict[str, Any]:
    """Return the keyword arguments of ModelConfig, without the architecture, for the fields of the text. Logits are
    divided by `logits_mup_width_multiplier` (default: 24), and only the first `unpadded_vocab_size` tokens get any.
    Raises ModelConfigError for a field that is wrong or not supported.
    """
    renamed = {name: fields.value(other) for name, other in _OTHER_NAMES.items() if fields.has(other)}
    fields = ConfigFields({**fields.raw, **renamed}).with_defaults(**_DEFAULTS)
    fields.require(**_ALWAYS)
    experts, dense_size = _read_experts(fields)
    fields = ConfigFields({**fields.raw, "intermediate_size": dense_size})
    count = fields.integer("num_hidden_layers")
    shared = gated_fields(fields, ropes=[None] * count, qk_norm=True)
    scored = fields.integer("unpadded_vocab_size", None)
    return shared | {
        "attention": _read_layers(fields, shared["attention"]),
        "experts": experts,
        "tie_word_embeddings": False,  # whatever the file says
        "logit_scale": 1 / fields.number("logits_mup_width_multiplier", 24.0),
        "scored_tokens": None if scored is None or scored >= shared["vocab_size"] else scored,
    }


def _read_experts(fields: ConfigFields) -> tuple[ExpertsConfig, int]:
    """Return the experts, and the feed-forward size of dense layers. Where dense_intermediate_size is that,
    intermediate_size is that of an expert, else moe_intermediate_size (default: 3072). By default 6 of 256 experts and
    2 shared ones work for a token, weights are multiplied by 8 (`route_scale`), and without `mlp_layer_types` the first
    `dense_mlp_idx` layers (0) are dense. Raises ModelConfigError for a field that is wrong.
    """
    dense, size = fields.integer("dense_intermediate_size", None), fields.integer("intermediate_size")
    first_sparse = min(fields.integer("dense_mlp_idx", 0, minimum=0), fields.integer("num_hidden_layers"))
    listed = listed_dense(fields)
    experts = ExpertsConfig(
        num_experts=fields.integer("n_routed_experts", 256),
        num_per_token=fields.integer("num_experts_per_tok", 6),
        intermediate_size=fields.integer("moe_intermediate_size", 3072) if dense is None else size,
        dense_layers=tuple(range(first_sparse)) if listed is None else listed,
        scoring_func="sigmoid",
        correction_bias=True,
        routed_scaling_factor=fields.number("route_scale", 8.0),
        num_sinks=fields.integer("n_shared_experts", 2),
    )
    return experts, size if dense is None else dense


def _read_layers(fields: ConfigFields, layers: tuple[LayerAttention, ...]) -> tuple[LayerAttention, ...]:
    """Return the layers with windows, heads, biases and convolutions by their kind: `layer_types` lists them, or else
    `local_layer_ids` those with windows, or else each but every sixth has one. Those with windows, of
    `sliding_window_size`, have the sizes of heads in `swa_` fields, others the temperature of `log_scaling_n_floor`
    (none without it) and `log_scaling_alpha` (default: 0.1; none for 0). Biases have `d_rel` numbers (default: 16) and
    reach as far as the window or `rel_extent` (default: 1024); `conv_kernel_size` is 4 by default. Raises
    ModelConfigError for a field that is wrong.
    """
    window, floor = fields.integer("sliding_window_size"), fields.integer("log_scaling_n_floor", None)
    strength = 0.1 if fields.value("log_scaling_alpha", None) is None else fields.value("log_scaling_alpha")
    tuning = None
    if floor is not None and strength != 0:
        tuning = TemperatureTuning(float(floor), fields.number("log_scaling_alpha", 0.1), offset=1, begins=True)
    local = fields.value("local_layer_ids", None)
    if local is None:
        local = [layer for layer in range(len(layers)) if (layer + 1) % 6]
    elif not isinstance(local, list) or any(type(layer) is not int for layer in local):
        raise fields.fail("local_layer_ids", "a list of indices of layers")
    kinds = read_each_layer(fields, "layer_types", (HYBRID, HYBRID_SLIDING))
    made = []
    for layer, own in enumerate(layers):
        if (layer in local) if kinds is None else (kinds[layer] == HYBRID_SLIDING):
            own = replace(
                own,
                num_heads=fields.integer("swa_num_attention_heads"),
                num_kv_heads=fields.integer("swa_num_key_value_heads"),
                head_dim=fields.integer("swa_head_dim"),
                window=window,
            )
        else:
            own = replace(own, temperature=tuning)
        state = LayerConvolutions(
            num_kv_heads=own.num_kv_heads,
            head_dim=own.head_dim,
            hidden_size=fields.integer("hidden_size"),
            kernel=fields.integer("conv_kernel_size", 4),
        )
        extent = fields.integer("rel_extent", 1024) if own.window is None else own.window
        relative = RelativeBias(fields.integer("d_rel", 16), extent)
        made.append(replace(own, scale=1 / own.head_dim, relative=relative, state=state, beside_state=True))
    return tuple(made)
