"""DeepSeek-V3.2 (DeepSeek-AI 2025): DeepSeek-V3 whose tokens attend to the keys that an indexer selects."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.attention import KeyIndex
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.gguf import GGUFConfig, gguf_flags
from jaxengine.models.families.deepseek_v3 import DEFAULTS
from jaxengine.models.families.glm4_moe_lite import Glm4MoeLiteForCausalLM
from jaxengine.models.families.llama import LAYER
from jaxengine.models.layers.attention.sparse_mla import SparseLatentAttention


class DeepseekV32ForCausalLM(Glm4MoeLiteForCausalLM):
    """DeepSeek-V3 with an indexer in each layer; by default the first three layers are dense.

    interleaved: whether rope pairs neighbouring elements. index_heads, index_interleaved: defaults of the indexer's
    number of heads, and of whether its rope does.
    """

    gguf_architecture: ClassVar[str | None] = "deepseek32"
    interleaved: ClassVar[bool] = True
    index_heads: ClassVar[int] = 64
    index_interleaved: ClassVar[bool] = False

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        kinds = fields.value("layer_types", None)
        if kinds is not None and kinds != ["indexed_attention"] * fields.integer("num_hidden_layers"):
            raise fields.fail("layer_types", "a list of indexed_attention for each layer, or absent")
        fields.require(rope_interleave=cls.interleaved)
        own = {name: value for name, value in fields.raw.items() if name != "layer_types"}
        own |= {"n_routed_experts": fields.value("num_experts", own.get("n_routed_experts"))}  # an older name
        own = ConfigFields(own)
        shared = super().read_hf(own.with_defaults(**DEFAULTS, rms_norm_eps=1e-6, rope_interleave=cls.interleaved))
        return cls._with_indexers(shared, fields)

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        shared = super().read_gguf(gguf)
        named = {"index_n_heads": "head_count", "index_head_dim": "key_length", "index_topk": "top_k"}
        own: dict[str, Any] = {name: gguf.fields.integer(f"attention.indexer.{part}") for name, part in named.items()}
        # GLM-5.2's first files, of a million positions, do not list which layers have an indexer; those of others do.
        count, long = len(shared["attention"]), shared["max_position_embeddings"] >= 1 << 20
        usual = [not long or layer < 2 or layer % 4 == 2 for layer in range(count)]
        listed = gguf_flags(gguf.fields, "attention.indexer.types", usual)
        kinds = ["full" if has_own else "shared" for has_own in listed]
        return cls._with_indexers(shared, ConfigFields({**own, "num_hidden_layers": count, "indexer_types": kinds}))

    @classmethod
    def _with_indexers(cls, shared: dict[str, Any], fields: ConfigFields) -> dict[str, Any]:
        """Return arguments of ModelConfig, `shared`, with the indexers of `fields` (`index_n_heads`, `index_heads` by
        default, `index_head_dim`, 128, `index_topk` keys, 2048, and `indexer_rope_interleave`, index_interleaved), and
        without MTP layers if the last one uses another's selection of keys. Raises ModelConfigError for wrong fields.
        """
        index = KeyIndex(
            num_heads=fields.integer("index_n_heads", cls.index_heads),
            head_dim=fields.integer("index_head_dim", 128),
            top_k=fields.integer("index_topk", 2048),
            interleaved=fields.boolean("indexer_rope_interleave", cls.index_interleaved),
        )
        sources = cls.read_sources(fields)
        layers = zip(shared["attention"], sources, strict=True)
        attention = tuple(replace(each, index=replace(index, source=source)) for each, source in layers)
        shared = shared | {"attention": attention}
        if sources[-1] is None:
            return shared
        # The MTP layer would have no selection to use.
        return shared | {"num_nextn_predict_layers": 0, "num_unread_layers": shared.get("num_nextn_predict_layers", 0)}

    @classmethod
    def read_sources(cls, fields: ConfigFields) -> list[int | None]:
        """Return, for each layer, the number of the layer whose selection of keys it uses; None for its own selection,
        as in all layers here. Raises ModelConfigError for a wrong number of layers; overrides also for their own
        fields.
        """
        return [None] * fields.integer("num_hidden_layers")

    def notes_selection(self, layer: int) -> bool:
        """Return whether the layer after number `layer` uses its selection of keys."""
        config = self.config
        after = config.attention[layer + 1].index if layer + 1 < config.num_layers else None
        return after is not None and after.source is not None

    def make_attention(self, layer: int, build: Build) -> nnx.Module:
        sizes, notes = (self.config.attention[layer], self.config.hidden_size), self.notes_selection(layer)
        return SparseLatentAttention(*sizes, source=f"{LAYER}.self_attn", build=build, notes=notes)
