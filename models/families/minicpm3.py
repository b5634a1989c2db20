"""MiniCPM 3 (OpenBMB 2024): MiniCPM's multipliers with DeepSeek-V2's latent attention, whose rope pairs halves."""

from __future__ import annotations

from typing import Any, ClassVar

from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.gguf import GGUFConfig
from jaxengine.models.config.readers.latent import gguf_latent_fields, hf_latent_fields
from jaxengine.models.families.llama import LAYER, gated_fields
from jaxengine.models.families.minicpm import MiniCPMForCausalLM, multipliers
from jaxengine.models.layers.attention.mla import LatentAttention

_PUBLISHED = {"scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 256.0}


class MiniCPM3ForCausalLM(MiniCPMForCausalLM):
    """MiniCPM with latent attention."""

    gguf_architecture: ClassVar[str | None] = "minicpm3"

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = fields.with_defaults(rms_norm_eps=1e-5)
        if not fields.has("v_head_dim"):
            value = fields.integer("hidden_size") // fields.integer("num_attention_heads")
            fields = ConfigFields({**fields.raw, "v_head_dim": value})
        for name in ("scale_emb", "scale_depth", "dim_model_base"):
            fields.number(name)  # required, since the defaults of its own code and of transformers differ
        bias = fields.boolean("attention_bias", False)
        options: dict[str, Any] = {"interleaved": False, "tied": True, "bias": bias, "output_bias": bias}
        shared = gated_fields(fields, read=hf_latent_fields, **options)
        return shared | multipliers(fields) | {"mlp_bias": fields.boolean("mlp_bias", False)}

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        """Return keyword arguments of ModelConfig. Multipliers are those of the published model, which files do not
        say; values have embedding_length / head_count elements if the file does not say how many. Raises
        ModelConfigError for wrong fields.
        """
        fields, size = gguf.fields, "attention.value_length"
        usual = fields.integer("embedding_length") // fields.integer("attention.head_count")
        own = gguf._replace(metadata={f"{fields.prefix}{size}": usual, **gguf.metadata})
        shared = gguf_latent_fields(own, interleaved=False)
        count, hidden = len(shared["attention"]), shared["hidden_size"]
        return shared | multipliers(ConfigFields({**_PUBLISHED, "num_hidden_layers": count, "hidden_size": hidden}))

    def make_attention(self, layer: int, build: Build) -> nnx.Module:
        config, source = self.config, f"{LAYER}.self_attn"
        return LatentAttention(config.attention[layer], config.hidden_size, source=source, build=build)
