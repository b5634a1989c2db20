"""DeepSeek-V3.2 (DeepSeek-AI 2025): DeepSeek-V3 whose tokens attend to the keys that an indexer selects."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.attention import KeyIndex
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.gguf import GGUFConfig
from jaxengine.models.families.deepseek_v3 import DEFAULTS
from jaxengine.models.families.glm4_moe_lite import Glm4MoeLiteForCausalLM
from jaxengine.models.families.llama import LAYER
from jaxengine.models.layers.attention.sparse_mla import SparseLatentAttention


class DeepseekV32ForCausalLM(Glm4MoeLiteForCausalLM):
    """DeepSeek-V3 with an indexer in each layer; by default the first three layers are dense."""

    gguf_architecture: ClassVar[str | None] = "deepseek32"
    # Whether rope pairs neighbouring elements; defaults of the indexer's number of heads, and of whether its rope does.
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
        index = KeyIndex(
            num_heads=fields.integer("index_n_heads", cls.index_heads),
            head_dim=fields.integer("index_head_dim", 128),
            top_k=fields.integer("index_topk", 2048),
            interleaved=fields.boolean("indexer_rope_interleave", cls.index_interleaved),
        )
        shared, selects = cls._with_indexers(shared, index, fields)
        if not selects:  # the MTP layer would have no selection to use
            shared |= {"num_nextn_predict_layers": 0, "num_unread_layers": shared["num_nextn_predict_layers"]}
        return shared

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        fields, shared, name = gguf.fields, super().read_gguf(gguf), "attention.indexer."
        index = KeyIndex(
            num_heads=fields.integer(f"{name}head_count"),
            head_dim=fields.integer(f"{name}key_length"),
            top_k=fields.integer(f"{name}top_k"),
            interleaved=cls.index_interleaved,
        )
        count = len(shared["attention"])
        named = {"num_hidden_layers": count, "indexer_types": cls.gguf_indexers(fields, count)}
        return cls._with_indexers(shared, index, ConfigFields(named))[0]

    @classmethod
    def gguf_indexers(cls, fields: ConfigFields, count: int) -> list[str] | None:
        """Return `indexer_types` of a file of `count` layers, which may be None. Overrides raise ModelConfigError for
        wrong fields.
        """
        return None

    @classmethod
    def _with_indexers(
        cls, shared: dict[str, Any], index: KeyIndex, fields: ConfigFields
    ) -> tuple[dict[str, Any], bool]:
        """Return arguments of ModelConfig, `shared`, with this indexer in each layer, and whether the last layer has
        its own selection of keys. Raises ModelConfigError for wrong fields.
        """
        sources = cls.read_sources(fields)
        layers = zip(shared["attention"], sources, strict=True)
        attention = tuple(replace(each, index=replace(index, source=source)) for each, source in layers)
        return shared | {"attention": attention}, sources[-1] is None

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
