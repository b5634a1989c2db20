"""Sizes and refusals of an engine whose model attends to sounds or images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxengine.config.base.errors import ConfigError
from jaxengine.config.inputs.multimodal import AUDIO, IMAGE

if TYPE_CHECKING:
    from jaxengine.config.base.platforms import Platform
    from jaxengine.models.config.model_config import ModelConfig

# Most sounds that one step encodes: on a CPU, one sound takes longer than its request's steps.
_TOGETHER = {"cpu": 1}
_USUALLY_TOGETHER = 4
# Images that are kept by default, and at most: slots have columns for as many.
_IMAGES, _MOST_IMAGES = 8, 64
# What a model attends to.
_SOUNDS, _PICTURES = "sounds", "images"


def settle_sounds(chosen: Mapping[str, Any], model: ModelConfig, platform: Platform) -> dict[str, Any]:
    """Return num_encoder_rows, max_encoder_patches and attends_to_sounds of ResolvedConfig, by name.

    num_encoder_rows is the number of sounds kept, max_num_seqs unless encoder_cache_size is given. A step encodes at
    most max_num_batched_encoder_tokens sounds; if that is None, 1 on CPUs and 4 elsewhere, and never more than
    max_num_seqs.

    chosen: the other fields of ResolvedConfig, by name. model: has a tower of sounds. platform: platform of the
    kernels. Raises ConfigError for pipeline stages, nodes, adapters, drafts, logits processors, embeddings, a tower
    split by items, another KV dtype than the model's, and a limit_mm_per_prompt of more than the one sound of a prompt.
    """
    tower = model.tower
    assert tower is not None
    _check(chosen, model, _SOUNDS)
    if (most := _given_count(chosen, AUDIO)) > 1:
        raise ConfigError(f"limit_mm_per_prompt.{AUDIO}", most, "1, as every prompt of this model has one sound")
    asked = chosen["max_num_batched_encoder_tokens"]
    together = _TOGETHER.get(platform.name, _USUALLY_TOGETHER) if asked is None else asked
    together = min(together, chosen["max_num_seqs"])
    rows = chosen["encoder_cache_size"] or chosen["max_num_seqs"]
    return {
        "num_encoder_rows": rows,
        "max_encoder_patches": together * tower.unit,
        "attends_to_sounds": True,
    }


def settle_crossed_pictures(chosen: Mapping[str, Any], model: ModelConfig, platform: Platform) -> dict[str, Any]:
    """Return num_encoder_rows, max_encoder_patches and attends_to_pictures of ResolvedConfig, by name.

    num_encoder_rows is the number of images kept, and the most that a prompt may have: encoder_cache_size, by default
    _IMAGES or the images that limit_mm_per_prompt gives if they are more, and at most _MOST_IMAGES. A step encodes at
    most max_num_batched_encoder_tokens images, by default all that are kept; a prompt that has more is refused.
    platform: not used.

    chosen: the other fields of ResolvedConfig, by name. model: has a tower of images. Raises ConfigError for an
    encoder_cache_size above the limit, for a limit_mm_per_prompt of more images than are kept or a step encodes, and
    for what `settle_sounds` raises it for, except adapters.
    """
    tower = model.tower
    assert tower is not None
    _check(chosen, model, _PICTURES)
    most = _given_count(chosen, IMAGE)
    rows = chosen["encoder_cache_size"] or min(max(_IMAGES, most), _MOST_IMAGES)
    if rows > _MOST_IMAGES:
        raise ConfigError("encoder_cache_size", rows, f"1 to {_MOST_IMAGES} for this model")
    if most > rows:
        allowed = f"0 to {rows}, as many images as are kept (encoder_cache_size, at most {_MOST_IMAGES})"
        raise ConfigError(f"limit_mm_per_prompt.{IMAGE}", most, allowed)
    asked = chosen["max_num_batched_encoder_tokens"]
    together = rows if asked is None else min(asked, rows)
    if most > together:
        allowed = f"0 to {together}, as many images as a step encodes (max_num_batched_encoder_tokens)"
        raise ConfigError(f"limit_mm_per_prompt.{IMAGE}", most, allowed)
    return {"num_encoder_rows": rows, "max_encoder_patches": together * tower.unit, "attends_to_pictures": True}


def _given_count(chosen: Mapping[str, Any], modality: str) -> int:
    """Return the count that limit_mm_per_prompt gives for a modality; 0 for none. chosen: fields of ResolvedConfig, by
    name.
    """
    return (chosen["limit_mm_per_prompt"] or {}).get(modality, {}).get("count", 0)


def _check(chosen: Mapping[str, Any], model: ModelConfig, kind: str) -> None:
    """Raise ConfigError for an option that models with cross-attention do not support. chosen: fields of
    ResolvedConfig, by name. kind: what the model attends to, _SOUNDS, which take no adapters, or _PICTURES.
    """
    for name, wrong, advice in (
        ("pipeline_parallel_size", chosen["pipeline_parallel_size"] > 1, "leave it 1"),
        ("nnodes", chosen["nnodes"] > 1, "leave it 1"),
        ("enable_lora", chosen["enable_lora"] and kind == _SOUNDS, "leave it out"),
        ("speculative_config", chosen["speculative_config"] is not None, "leave it out"),
        ("logits_processors", bool(chosen["logits_processors"]), "leave them out"),
        ("enable_mm_embeds", chosen["enable_mm_embeds"], "leave it out"),
        ("mm_encoder_tp_mode", chosen["mm_encoder_tp_mode"] != "weights", "leave it 'weights'"),
        ("kv_cache_dtype", chosen["kv_cache_dtype"] != chosen["dtype"], "leave it 'auto'"),
    ):
        if wrong:
            problem = (
                f"{name} is {chosen[name]!r}, which {model.architecture}, which attends to {kind}, does not support"
            )
            raise ConfigError.because(name, problem, advice)
