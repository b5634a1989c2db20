"""ModelConfig: description of a model, in one frozen hashable record.

Contains the checks that every family shares. Fields of one family are read in that family's file (see
models/registry.py). Only data is read: `auto_map` and every other pointer to code in a config.json is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jaxengine.models.config.altup import AltUp, BlockSkips, KimiK3Parts, LoopedLayers, SharedBlocks, WideResiduals
from jaxengine.models.config.attention import LayerAttention, LayerState
from jaxengine.models.config.compressed import HyperConnections, NgramMemory
from jaxengine.models.config.declared import DeclaredForm
from jaxengine.models.config.encoder import EncoderConfig
from jaxengine.models.config.experts import ExpertsConfig
from jaxengine.models.config.fields import (
    MAX_ALL_EXPERTS,
    MAX_HIDDEN,
    MAX_INTERMEDIATE,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB,
    ModelConfigError,
    check_size,
)
from jaxengine.models.config.pooler import Pooler
from jaxengine.models.config.tower import TowerConfig

_MAXIMA = {
    "vocab_size": MAX_VOCAB,
    "hidden_size": MAX_HIDDEN,
    "intermediate_size": MAX_INTERMEDIATE,
    "max_position_embeddings": MAX_POSITIONS,
}


class Multipliers(NamedTuple):
    """Factors of the inputs (`_in`) and outputs (`_out`) of a layer's attention, recurrent state and MLP. `keys` is the
    factor of keys, and `mlp_gate` that of the activated half of a gated MLP.
    """

    attention_in: float
    attention_out: float
    keys: float
    state_in: float
    state_out: float
    mlp_gate: float
    mlp_out: float


class NormedOutputs(NamedTuple):
    """Norms and gates of the outputs of a layer's parts, before they are added to the residual.

    eps: epsilon of these norms. gate_temperature: divisor of the gates' weights; None for layers without gates.
    """

    eps: float
    gate_temperature: float | None = None


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of one model, and its layers.

    `attention` has one entry per layer. `experts` is None for a dense model; otherwise `intermediate_size` is that of
    dense layers. `activation` is the name of that of gated MLPs in families that have any
    (jaxengine.models.families.llama.gated_fields). `logit_soft_cap` is for families that bound their logits.
    `scored_tokens` is the number of tokens, the first ones, that have logits; None for all. `embedding_multiplier` is a
    factor of embeddings, `residual_multiplier` of the outputs of a layer's parts before they are added, `logit_scale`
    of logits; `multipliers` has further factors. `rms_norm_eps` is the epsilon of all norms of any kind, except, with
    `normed_outputs`, of those of the outputs of a layer's parts. `norm_gate_rank` is the inner size of the gates of
    norms in families that have such; 0 for none. `num_nextn_predict_layers` and `num_unread_layers` count layers of the
    checkpoint after the last one: those that predict further tokens, and those that are not read. `skipped_layers` are
    the numbers of layers that do nothing, and whose weights are not read. `pooler` is None for a model that generates.
    Token ids are None or empty if the checkpoint names none. `suppressed_tokens` are tokens that no sampler chooses.
    `quantization` maps names of checkpoint modules to the storage of their matrices
    (jaxengine.models.quantization.base.rules.Quantization); None for plain weights.

    `tower` is the tower of images, or of audio; None for a model without one, or if it is not used. `sound_tower` is
    the tower of audio in a model that has one of images too. `encoder` has the additional fields of encoders; None for
    decoders. `ffn_sizes` has the feed-forward size of each layer's dense MLP if they differ, 0 for a layer without one;
    empty if `intermediate_size` holds for all. `layer_input_size` is the number of elements that each layer gets for
    every token in addition to the hidden state; 0 for none. `layer_input_rows` is the number of tokens in the table of
    these inputs, 0 if it is vocab_size. `altup`, `hyper_connections`, `skips`, `shared_blocks`, `loops`, `kimi_k3` and
    `wide_residuals` are for families with several hidden states per token; None for one. `ngrams` has the tables of
    n-grams of families that look them up; None for others. `declared` is for families that are rows of a table
    (jaxengine.models.families.declared_rows). Raises ModelConfigError for sizes, numbers of layers and of all layers'
    experts, and factors out of their limits, for layers of which none attends or keeps a state or that cannot share a
    pool, for ffn_sizes of another length than `attention`, and for token ids (bos, eos, of labels) outside of the
    vocabulary.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    attention: tuple[LayerAttention, ...]
    tie_word_embeddings: bool = False
    mlp_bias: bool = False
    activation: str = "silu"
    logit_soft_cap: float | None = None
    scored_tokens: int | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_scale: float = 1.0
    multipliers: Multipliers | None = None
    normed_outputs: NormedOutputs | None = None
    norm_gate_rank: int = 0
    experts: ExpertsConfig | None = None
    num_nextn_predict_layers: int = 0
    num_unread_layers: int = 0
    skipped_layers: tuple[int, ...] = ()
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    suppressed_tokens: tuple[int, ...] = ()
    pooler: Pooler | None = None
    quantization: Callable[[str], Any] | None = None
    tower: TowerConfig | None = None
    sound_tower: TowerConfig | None = None
    encoder: EncoderConfig | None = None
    ffn_sizes: tuple[int, ...] = ()
    layer_input_size: int = 0
    layer_input_rows: int = 0
    altup: AltUp | None = None
    hyper_connections: HyperConnections | None = None
    ngrams: NgramMemory | None = None
    skips: BlockSkips | None = None
    shared_blocks: SharedBlocks | None = None
    loops: LoopedLayers | None = None
    kimi_k3: KimiK3Parts | None = None
    wide_residuals: WideResiduals | None = None
    declared: DeclaredForm | None = None

    def __post_init__(self) -> None:
        for name, maximum in _MAXIMA.items():
            check_size(name, getattr(self, name), maximum)
        for name in ("num_nextn_predict_layers", "num_unread_layers"):
            check_size(name, getattr(self, name), MAX_LAYERS, 0)
        all_experts = len(self.attention) * (self.experts.num_experts if self.experts else 1)
        if len(self.attention) > MAX_LAYERS or all_experts > MAX_ALL_EXPERTS:
            raise ModelConfigError(
                f"there must be at most {MAX_LAYERS} layers, with at most {MAX_ALL_EXPERTS} experts between them, got "
                f"{len(self.attention)} and {all_experts}"
            )
        for name in ("rms_norm_eps", "logit_soft_cap", "embedding_multiplier", "residual_multiplier", "logit_scale"):
            value = getattr(self, name)
            if name == "logit_soft_cap" and value is None:
                continue
            if not 0 < value < float("inf"):
                raise ModelConfigError(f"{name} must be a finite number > 0, got {value!r}")
        if not self.attention:
            raise ModelConfigError("attention must hold one entry per layer, at least one, got none")
        self._check_heads()
        check_size("norm_gate_rank", self.norm_gate_rank, MAX_HIDDEN, 0)
        check_size("layer_input_size", self.layer_input_size, MAX_HIDDEN, 0)
        check_size("layer_input_rows", self.layer_input_rows, MAX_VOCAB, 0)
        if self.ffn_sizes and len(self.ffn_sizes) != len(self.attention):
            raise ModelConfigError(
                f"ffn_sizes must hold one entry for each of {len(self.attention)} layers, got {len(self.ffn_sizes)}"
            )
        for size in self.ffn_sizes:
            check_size("ffn_sizes", size, MAX_INTERMEDIATE, 0)
        if not self.attending and not self.keeps_states:
            raise ModelConfigError("attention must hold a layer that attends or keeps a state, got neither")
        classifier = None if self.pooler is None else self.pooler.classifier
        labels = () if classifier is None else classifier.token_ids
        for token_id in (*self.eos_token_ids, *labels, *(() if self.bos_token_id is None else (self.bos_token_id,))):
            if not 0 <= token_id < self.vocab_size:
                raise ModelConfigError(f"token ids must lie in [0, vocab_size = {self.vocab_size}), got {token_id}")

    def _check_heads(self) -> None:
        """Raise ModelConfigError for layers that cannot share a pool, or for an unusable kv_source.

        With a layer that has only a state, or a latent in some but not all, all layers must have equal KV heads and
        head sizes. A kv_source must be an earlier layer with pages and the same heads, sizes and reach.
        """
        heads = sorted({(layer.num_kv_heads, layer.head_dim, layer.v_head_dim) for layer in self.attention})
        with_latent = {layer.latent is not None for layer in self.attention}
        with_state = any(layer.state is not None and not layer.beside_state for layer in self.attention)
        if len(heads) > 1 and (with_state or len(with_latent) > 1):
            raise ModelConfigError(
                "layers must have the same num_kv_heads, head_dim and v_head_dim where any has only a state, or where "
                f"some have a latent, got {heads}"
            )
        for number, layer in enumerate(self.attention):
            if (source := layer.kv_source) is None:
                continue
            other = self.attention[source] if 0 <= source < number else None
            fits = (
                other is not None
                and other.has_pages
                and (
                    (other.num_kv_heads, other.head_dim, other.v_head_dim, other.reach)
                    == (layer.num_kv_heads, layer.head_dim, layer.v_head_dim, layer.reach)
                )
            )
            if not fits:
                raise ModelConfigError(
                    f"kv_source of layer {number} must be a layer before it with pages, the same heads and the same "
                    f"window, got {source}"
                )

    def up_to(self, max_model_len: int) -> ModelConfig:
        """Return the config for an engine whose sequences have at most `max_model_len` tokens, in which each rope is
        chosen for that length (Rope.up_to).
        """
        ropes = (layer.rope and layer.rope.up_to(max_model_len) for layer in self.attention)
        layers = (replace(layer, rope=rope) for layer, rope in zip(self.attention, ropes, strict=True))
        return replace(self, attention=tuple(layers))

    @property
    def num_logits(self) -> int:
        """Number of tokens, the first ones, that have logits; those of the others are -inf."""
        return self.vocab_size if self.scored_tokens is None else self.scored_tokens

    @property
    def unread(self) -> tuple[str, ...]:
        """Beginnings of the names of tensors that a checkpoint may have for layers that do not read them: those after
        the last layer, those that are skipped, and keys and values that a layer takes from another one.
        """
        count = self.num_nextn_predict_layers + self.num_unread_layers
        layers = (*(self.num_layers + number for number in range(count)), *self.skipped_layers)
        shared = (number for number, layer in enumerate(self.attention) if layer.kv_source is not None)
        parts = ("k_proj.", "v_proj.", "k_norm.", "v_norm.")
        return (
            *(f"model.layers.{number}." for number in layers),
            *(f"model.layers.{number}.self_attn.{part}" for number in shared for part in parts),
        )

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.attention)

    def stored_layer(self, layer: int) -> int:
        """Return the checkpoint's number of layer number `layer`: its own, except where layers run several times."""
        return layer if self.loops is None else self.loops.stored[layer]

    @property
    def stream_size(self) -> int:
        """Number of elements that one layer passes to the next for a token: all of its hidden states, and `num_beside`
        of hyper_connections or wide_residuals.
        """
        beside = self.hyper_connections or self.wide_residuals
        return self.hidden_size * self.num_streams + (0 if beside is None else beside.num_beside)

    @property
    def num_streams(self) -> int:
        """Number of hidden states of a token. Experts' output that is added in a later layer counts as one."""
        if self.experts is not None and self.experts.shortcut:
            return 2
        streams = self.altup or self.hyper_connections or self.skips or self.shared_blocks or self.loops or self.kimi_k3
        streams = streams or self.wide_residuals
        return 1 if streams is None else streams.num_streams

    @property
    def attending(self) -> tuple[LayerAttention, ...]:
        """Layers that have attention, in order. The others keep only states, or neither."""
        return tuple(layer for layer in self.attention if layer.attends)

    @property
    def keeps_states(self) -> bool:
        """Whether any layer keeps a recurrent state for each sequence."""
        return bool(self.states)

    @property
    def states(self) -> tuple[LayerState, ...]:
        """Recurrent states of the layers that keep one, in order."""
        return tuple(layer.state for layer in self.attention if layer.state is not None)

    @property
    def is_causal(self) -> bool:
        """Whether no token attends to later ones, so that a prompt may be computed in several steps and its prefix
        cached.
        """
        return all(layer.causal for layer in self.attending)

    @property
    def towers(self) -> tuple[TowerConfig, ...]:
        """Towers of the model that are used, that of images first."""
        return tuple(tower for tower in (self.tower, self.sound_tower) if tower is not None)

    @property
    def sees_places(self) -> bool:
        """Whether the model has a tower and M-RoPE (Rope.sections), rotation by positions in time, height and width."""
        return self.tower is not None and any(layer.rope and layer.rope.sections for layer in self.attention)

    @property
    def num_kv_heads(self) -> int:
        """Number of KV heads; if layers differ, the greatest common divisor of their numbers."""
        return math.gcd(*(layer.num_kv_heads for layer in self.attention))

    @property
    def has_equal_heads(self) -> bool:
        """Whether all layers have the same number of KV heads."""
        return len({layer.num_kv_heads for layer in self.attention}) == 1

    @property
    def has_equal_pages(self) -> bool:
        """Whether a page takes the same number of bytes in every layer."""
        return len({(each.num_kv_heads, *each.cached) for each in self.attention}) == 1
