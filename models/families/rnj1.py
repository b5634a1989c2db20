"""Rnj-1.5 (Essential AI 2026): Gemma 3 with chunks in place of windows, in which tokens also see the chunk before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.hf import FULL, SLIDING, read_each_layer
from jaxengine.models.families.gemma3 import DEFAULTS, Gemma3ForCausalLM
from jaxengine.models.families.llama4 import CHUNKED


class Rnj1ForCausalLM(Gemma3ForCausalLM):
    """Gemma 3 whose CHUNKED layers attend in chunks of half of `sliding_window`, and to the chunk before a token's."""

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields.require(use_bidirectional_attention=False)
        kinds = read_each_layer(fields, "layer_types", (CHUNKED, FULL))
        if kinds is None:
            raise fields.fail("layer_types", f"a list of {CHUNKED} and {FULL}, one for each layer")
        window = fields.integer("sliding_window", DEFAULTS["sliding_window"], minimum=2)
        named = {"layer_types": [SLIDING if kind == CHUNKED else FULL for kind in kinds]}
        shared = super().read_hf(ConfigFields({**fields.raw, **named, **_ropes(fields)}))
        chunked = {"window": None, "chunk": window // 2, "lookback": 1}
        attention = tuple(each if each.window is None else replace(each, **chunked) for each in shared["attention"])
        return shared | {"attention": attention}


def _ropes(fields: ConfigFields) -> dict[str, Any]:
    """Return `rope_parameters` with those of CHUNKED layers under Gemma's name of their kind; those that are no mapping
    by kind are of all layers. {} without the field. Raises ModelConfigError for one that is no mapping.
    """
    own = fields.mapping("rope_parameters")
    if own is None:
        return {}
    by_kind = {kind: own.get(kind) for kind in (CHUNKED, FULL)} if CHUNKED in own or FULL in own else {}
    return {"rope_parameters": {SLIDING: by_kind.get(CHUNKED) or own, FULL: by_kind.get(FULL) or own}}
