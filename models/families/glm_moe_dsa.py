"""GLM-5 and GLM-5.2: DeepSeek-V3.2 in which layers may use the keys that an earlier layer's indexer has selected
(arXiv:2603.12201).
"""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.families.deepseek_v32 import DeepseekV32ForCausalLM

_KINDS = {"F": "full", "S": "shared"}


class GlmMoeDsaForCausalLM(DeepseekV32ForCausalLM):
    """DeepSeek-V3.2 with an indexer in all or in some layers."""

    gguf_architecture: ClassVar[str | None] = "glm-dsa"
    index_heads: ClassVar[int] = 32
    index_interleaved: ClassVar[bool] = True

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        return super().read_hf(fields.with_defaults(rms_norm_eps=1e-5, q_lora_rank=2048, n_group=1, topk_group=1))

    @classmethod
    def read_sources(cls, fields: ConfigFields) -> list[int | None]:
        """Return, for each layer, the number of the last earlier layer with an indexer, whose selection of keys it
        uses; None for a layer with its own indexer.

        Layers with an indexer are read from `indexer_types`, `index_topk_pattern`, or `index_topk_freq` and
        `index_skip_topk_offset`, whichever is present first. Raises ModelConfigError for wrong fields, and if the first
        layer has no indexer.
        """
        num_layers = fields.integer("num_hidden_layers")
        name = "indexer_types" if fields.value("indexer_types", None) is not None else "index_topk_pattern"
        kinds = fields.value(name, None)
        if isinstance(kinds, str) and name == "index_topk_pattern":
            kinds = [_KINDS.get(letter, letter) for letter in kinds]
        if kinds is None:
            every = max(fields.integer("index_topk_freq", 1, minimum=0), 1)
            offset = fields.integer("index_skip_topk_offset", 2, minimum=0)
            own = [max(layer - offset + 1, 0) % every == 0 for layer in range(num_layers)]
        elif isinstance(kinds, list) and len(kinds) == num_layers and {*map(str, kinds)} <= {*_KINDS.values()}:
            own = [kind == "full" for kind in kinds]
        else:
            raise fields.fail(name, f"a list of {num_layers} of full, shared")
        if not own[0]:
            reason = "the first layer, which has none before it to take a selection from"
            if kinds is None:
                raise fields.fail("index_skip_topk_offset", f"at least 1 unless index_topk_freq is 1, for {reason}")
            raise fields.fail(name, f"full for {reason}")
        last = [max(before for before in range(layer + 1) if own[before]) for layer in range(num_layers)]
        return [None if own[layer] else last[layer] for layer in range(num_layers)]
