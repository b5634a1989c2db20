"""The option enable_prompt_embeds: whether prompts may be embeddings, and the room that these need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxengine.config.base.errors import ConfigError
from jaxengine.models.config.model_config import ModelConfig

_NAME = "enable_prompt_embeds"


def settle_prompt_embeds(chosen: Mapping[str, Any], model: ModelConfig) -> dict[str, Any]:
    """Return {"num_encoder_rows": rows of the embedding cache} for an engine whose prompts may be embeddings; {} for
    other engines.

    chosen: the other fields of ResolvedConfig, by name. Raises ConfigError for a model that has a tower, pools or whose
    layers read token ids, and with drafts, several nodes, record_steps or rl_exact.
    """
    if not chosen[_NAME]:
        return {}
    reads_ids = model.layer_input_size > 0 or model.ngrams is not None
    reads_ids |= any(each.ngrams is not None for each in model.attention)
    reads_ids |= model.experts is not None and bool(model.experts.hashed_layers)
    for wrong, why in (
        (model.tower is not None, f"{model.architecture} takes images or sounds; serve it with language_model_only"),
        (model.pooler is not None, "pooling models are not supported"),
        (reads_ids, f"layers of {model.architecture} read token ids, which embeddings do not have"),
        (chosen["speculative_config"] is not None, "drafts are made of token ids, which embeddings do not have"),
        (chosen["nnodes"] > 1, "several nodes are not supported"),
        (chosen["record_steps"] is not None, "record_steps does not record embeddings"),
        (chosen["rl_exact"], "rl_exact is not supported"),
    ):
        if wrong:
            raise ConfigError.because(_NAME, f"{_NAME} is True, but {why}", "leave it False")
    # Embeddings of a step, and of the pages that steps leave unfinished.
    return {"num_encoder_rows": 2 * (chosen["max_num_batched_tokens"] + chosen["block_size"])}
