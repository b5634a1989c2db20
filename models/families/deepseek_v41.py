"""DeepSeek-V4.1 (DeepSeek-AI 2026), served as text: DeepSeek-V4's window of keys, experts and hyper-connections, keys
of blocks that layers share, and a memory of n-grams in some layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.cache import StateRows
from jaxengine.models.config.attention import LayerAttention
from jaxengine.models.config.compressed import BlockIndex, Candidates, NgramMemory, SharedKeys
from jaxengine.models.config.fields import ConfigFields, check_size
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.hf import hf_fields, text_fields
from jaxengine.models.families.deepseek_v4 import (
    DeepseekV4ForCausalLM,
    DeepseekV4Layer,
    read_connections,
    read_experts,
    read_ropes,
)
from jaxengine.models.families.llama import LAYER
from jaxengine.models.forward_batch import ForwardBatch
from jaxengine.models.layers.attention.attention import StepInputs
from jaxengine.models.layers.attention.blocks.shared_keys import SharedKeysAttention
from jaxengine.models.layers.states.ngram_memory import NgramLookup
from jaxengine.models.layers.streams.hyper_connections import (
    DelayedConnection,
    StreamsByShares,
    with_shares,
    without_shares,
)
from jaxengine.models.params.source import CheckpointNames, StackedExperts

# transformers' defaults for fields that a file lacks.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 129280,
    "hidden_size": 5120,
    "moe_intermediate_size": 2304,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "q_lora_rank": 1280,
    "qk_rope_head_dim": 64,
    "n_routed_experts": 384,
    "max_position_embeddings": 1 << 20,
    "rms_norm_eps": 1e-20,
    "eos_token_id": 1,
}
_RATIOS, _KEYS, _INDEXES = "compress_ratios", "kv_source_layer_ids", "index_source_layer_ids"
_CANDIDATES, _NGRAMS, _ROWS = "candidate_source_layer_id", "engram_layer_ids", "engram_num_embeddings"
# Fields under the names of transformers -> those of published files.
_ALIASES = {"num_local_experts": "n_routed_experts", "intermediate_size": "moe_intermediate_size"}
_ALIASES |= {"engram_pad_id": "engram_pad_token_id"}
# The released schedule of ratios, and of the layers that compute keys and that select, for 40 layers.
_RELEASED = [0, 0, *[2] * 18, *[1] * 20], [2, 8, 14, 20], [2, 8, 14, 20, 24, 28, 32, 36]


class DeepseekV41Layer(DeepseekV4Layer):
    """DeepseekV4Layer with DelayedConnections and, where `memory` is not None, a memory of n-grams before them."""

    def __init__(self, config: ModelConfig, attention: nnx.Module, mlp: nnx.Module, build: Build, memory: Any):
        super().__init__(config, attention, mlp, build, connection=DelayedConnection)
        self.memory, self.num_streams = memory, config.num_streams

    def __call__(self, x: jax.Array, kv: Any, pages: Any, step: StepInputs) -> tuple[jax.Array, Any]:
        """Return the hidden states and shares after the layer, [T, A * D + 3 * A] for x [T, A * D + 3 * A], and the
        pool and states after this step. A layer with a memory of n-grams first adds what that has for the tokens, and
        its last states are ids of tokens.
        """
        if self.memory is None:
            return super().__call__(x, kv, pages, step)
        paged = not isinstance(pages, StateRows)
        states, rows = (kv[1], pages[1]) if paged else (kv, pages)
        streams, shares = without_shares(x, self.num_streams)
        with jax.named_scope("ngrams"):
            streams, ids = self.memory(streams, states[-1], rows, step)
        result: tuple[jax.Array, Any] = super().__call__(with_shares(streams, shares), kv, pages, step)
        x, written = result
        return x, (written[0], (*written[1], ids)) if paged else (*written, ids)


class DeepseekV41ForCausalLM(DeepseekV4ForCausalLM):
    """Decoder of DeepseekV41Layers, which pass on A hidden states of each token and the shares of the next part's
    input, [T, A * D + 3 * A]. The vision tower is not read.
    """

    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(
            ("layers.", "model.layers."),
            ("embed.", "model.embed_tokens."),
            ("model.embed.", "model.embed_tokens."),
            ("head.", "lm_head."),
            ("norm.", "model.norm."),
        ),
        suffixes=((".scale", ".weight_scale_inv"),),
        unused=("vision.", "aligner.", "image_"),
        unused_ends=(".gate.bias_vl",),
        plain=("compressor.wkv", "compressor.wgate", "indexer.wk"),
        stacked_experts=StackedExperts(modules=("w1", "w3", "w2")),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = text_fields(fields) if fields.has("text_config") else fields
        aliases = {new: fields.value(old) for old, new in _ALIASES.items() if fields.has(old) and not fields.has(new)}
        fields = ConfigFields({**fields.raw, **aliases}).with_defaults(**DEFAULTS)
        fields.require(num_key_value_heads=1, norm_topk_prob=True, n_shared_experts=1, attention_bias=False)
        fields.require(topk_method="noaux_tc", gate_temp=1.0, mlp_bias=False)
        schedule = _Schedule(fields)
        ropes = read_ropes(fields, fields.integer("head_dim"))
        raw = {**fields.raw, "intermediate_size": fields.integer("moe_intermediate_size")}
        each_rope = [ropes[ratio > 0] for ratio in schedule.ratios]
        shared = hf_fields(ConfigFields(raw), ropes=each_rope, sinks=True)
        ngrams = _read_ngrams(fields, len(schedule.ratios))
        layers = enumerate(shared["attention"])
        return shared | {
            "attention": tuple(schedule.layer(number, each, ngrams) for number, each in layers),
            "experts": read_experts(fields),
            "hyper_connections": replace(read_connections(fields), delayed=True),
            "ngrams": ngrams,
        }

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        config = self.config
        own, size, eps = config.attention[layer], config.hidden_size, config.rms_norm_eps
        attention = SharedKeysAttention(own, size, eps=eps, source=f"{LAYER}.attn", build=build)
        memory = None
        if config.ngrams is not None and layer in config.ngrams.layers:
            memory = NgramLookup(config, layer, source=f"{LAYER}.engram", build=build)
        return DeepseekV41Layer(config, attention, self.make_experts(layer, build), build, memory)

    def make_norm(self, build: Build) -> nnx.Module:
        norm = self.norm_class(self.config.hidden_size, self.config.rms_norm_eps, source="model.norm", build=build)
        return StreamsByShares(self.config, norm)

    def first_input(self, x: jax.Array, batch: ForwardBatch) -> jax.Array:
        """Return a step's embeddings x [T, D] as hidden states and shares [T, A * D + 3 * A]: all A hidden states of a
        token are equal, and the first part's input is the first of them.
        """
        count = self.config.num_streams
        shares = jnp.broadcast_to(jnp.arange(count) == 0, (x.shape[0], count)).astype(jnp.float32)
        return with_shares(jnp.tile(x, (1, count)), shares)


class _Schedule:
    """Schedule of what each layer's attention computes itself and which earlier layers' results it uses, from a
    configuration's fields. Raises ModelConfigError for wrong fields, and for schedules that are not supported.
    """

    def __init__(self, fields: ConfigFields):
        self.fields, count = fields, fields.integer("num_hidden_layers")
        self.ratios = self._read_ratios(count)
        released = self.ratios == _RELEASED[0]
        firsts = [n for n, ratio in enumerate(self.ratios) if ratio and (n == 0 or self.ratios[n - 1] != ratio)]
        self.owners = _numbers(fields, _KEYS, count, _RELEASED[1] if released else firsts)
        of_release = self.owners == _RELEASED[1] and count > _RELEASED[2][-1]
        self.selectors = _numbers(fields, _INDEXES, count, _RELEASED[2] if of_release else self.owners)
        for name, numbers in ((_KEYS, self.owners), (_INDEXES, self.selectors)):
            if any(not self.ratios[number] for number in numbers):
                raise fields.fail(name, f"numbers of layers whose {_RATIOS} are above 0, {self.ratios}")
        if not {*self.owners} <= {*self.selectors}:
            raise fields.fail(_INDEXES, f"a list with all of {_KEYS}, {self.owners}")
        for number, ratio in enumerate(self.ratios):
            owner = _latest(self.owners, number)
            if ratio and (owner is None or self.ratios[owner] != ratio):
                raise fields.fail(_KEYS, f"a layer of the same {_RATIOS} at or before layer {number}")
        self.source = self._read_source()

    def _read_ratios(self, count: int) -> list[int]:
        """Return the number of tokens of a block in each of `count` layers, 0 for a layer without blocks. Entries of
        the field after the last layer's are left out unread. If the field is absent or null, it is the released
        schedule for as many layers as that has, else 0 for the first two layers, 2 for half of the others, rounded up,
        and 1 for the rest. Raises ModelConfigError for a value that is no list, has fewer than `count` entries, or an
        entry, before that, that is not an integer of 0 or more.
        """
        given = self.fields.value(_RATIOS, None)
        if given is None:
            first = min(2, count)
            middle = (count - first + 1) // 2
            plain = [0] * first + [2] * middle + [1] * (count - first - middle)
            return _RELEASED[0] if count == len(_RELEASED[0]) else plain
        if not isinstance(given, list) or len(given) < count or any(type(e) is not int or e < 0 for e in given[:count]):
            raise self.fields.fail(_RATIOS, f"a list of {count} whole numbers, 0 or more")
        return given[:count]

    def _read_source(self) -> int | None:
        """Return the number of the layer that chooses candidates, by default the last owner of keys; None for a number
        below 0, and without owners. Raises ModelConfigError for a layer that does not select, and if the layers that
        select from it on differ in tokens of a block.
        """
        default = self.owners[-1] if self.owners else -1
        source = self.fields.value(_CANDIDATES, default)
        if type(source) is not int:
            raise self.fields.fail(_CANDIDATES, "a whole number")
        if source < 0:
            return None
        if source not in self.selectors:
            raise self.fields.fail(_CANDIDATES, f"one of {_INDEXES}, {self.selectors}, or a number below 0")
        later = {self.ratios[number] for number in self.selectors if number >= source}
        if len(later) > 1:
            raise self.fields.fail(_CANDIDATES, f"a layer after which those that select have the same {_RATIOS}")
        return source

    def layer(self, number: int, attention: LayerAttention, ngrams: NgramMemory | None) -> LayerAttention:
        """Return `attention` with what the layer number `number` computes and uses: SharedKeys as its state, and the
        layers whose keys and selection it reads. Sizes are the fields `sliding_window` (default: 128), `q_lora_rank`,
        `o_groups` (8), `o_lora_rank` (1024), `index_n_heads` (32), `index_head_dim` (128), `index_topk` (512),
        `candidate_topk_blocks` (2048) and `candidate_block_size` (8). ngrams: the model's memory of n-grams, None for
        none. Raises ModelConfigError for wrong fields.
        """
        fields, ratio = self.fields, self.ratios[number]
        owned, selects = number in self.owners, number in self.selectors
        candidates, source = None, None if selects else _latest(self.selectors, number)
        if selects and self.source is not None and number >= self.source:
            candidates = Candidates(
                count=fields.integer("candidate_topk_blocks", 2048),
                size=fields.integer("candidate_block_size", 8),
                chosen=number > self.source,
            )
            source = self.source if candidates.chosen else None
        index = BlockIndex(
            num_heads=fields.integer("index_n_heads", 32),
            head_dim=fields.integer("index_head_dim", 128),
            top_k=fields.integer("index_topk", 512),
        )
        keys = SharedKeys(
            head_dim=attention.head_dim,
            window=fields.integer("sliding_window", 128),
            q_rank=fields.integer("q_lora_rank"),
            out_groups=fields.integer("o_groups", 8),
            out_rank=fields.integer("o_lora_rank", 1024),
            rate=ratio or None,
            index=index if ratio else None,
            owned=owned,
            selects=selects,
            candidates=candidates,
            lookback=ngrams.longest - 1 if ngrams is not None and number in ngrams.layers else 0,
        )
        return replace(
            attention,
            state=keys,
            beside_state=ratio > 0,
            kv_source=_latest(self.owners, number) if ratio and not owned else None,
            selected_by=source if ratio else None,
        )


def _latest(numbers: list[int], layer: int) -> int | None:
    """Return the last of `numbers` that is at most `layer`; None if there is none."""
    return max((number for number in numbers if number <= layer), default=None)


def _numbers(fields: ConfigFields, name: str, count: int, default: list[int]) -> list[int]:
    """Return the field `name`, a list of numbers of the first `count` layers, ascending and each once; `default` if it
    is absent or null. Raises ModelConfigError for another value.
    """
    given = fields.value(name, None)
    if given is None:
        return default
    if not isinstance(given, list) or any(type(each) is not int or not 0 <= each < count for each in given):
        raise fields.fail(name, f"a list of numbers of the {count} layers, from 0")
    return sorted({*given})


def _read_ngrams(fields: ConfigFields, count: int) -> NgramMemory | None:
    """Return the memory of n-grams of a model of `count` layers, in the layers `engram_layer_ids` with
    `engram_num_embeddings` rows each and the sizes in further `engram_` fields (by default n-grams of up to 4 tokens, 8
    heads of 256 elements, 16,000,000 rows at least, 99,092 ids and 2 for padding); None for a model without such
    layers. Raises ModelConfigError for wrong fields.
    """
    layers = _numbers(fields, _NGRAMS, count, [])
    if not layers:
        return None
    rows = fields.value(_ROWS, None)
    if not isinstance(rows, list) or len(rows) != len(layers) or fields.value(_NGRAMS) != layers:
        raise fields.fail(_ROWS, f"a number for each of {_NGRAMS}, which ascend")
    pad_id = fields.integer("engram_pad_token_id", 2, minimum=0)
    check_size("engram_pad_token_id", pad_id, fields.integer("vocab_size") - 1, 0)
    return NgramMemory(
        layers=tuple(layers),
        num_rows=tuple(rows),
        longest=fields.integer("engram_max_ngram_size", 4),
        num_heads=fields.integer("engram_n_heads", 8),
        head_dim=fields.integer("engram_head_dim", 256),
        least_rows=fields.integer("engram_vocab_size", 16_000_000),
        pad_id=pad_id,
        vocab_size=fields.integer("engram_compressed_vocab_size", 99_092),
    )
