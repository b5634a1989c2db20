"""Options of the image encoder: how devices share its work, how much of it a step does, and its caches."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxengine.config.base.errors import ConfigError
from jaxengine.config.inputs.multimodal import AUDIO, IMAGE, VIDEO

if TYPE_CHECKING:
    from jaxengine.config.base.platforms import Platform
    from jaxengine.models.config.model_config import ModelConfig
    from jaxengine.models.config.tower import TowerConfig

# Caches of preprocessed images; names as in vLLM's guide to optimisation.
OFF, PROCESSOR, KEY_REPLICATED, SHARED_MEMORY = KINDS = ("off", "processor", "key-replicated", "shared memory")
# By kind of cache, what the API process (or the process that reads prompts) keeps, and what the engine keeps.
_CONTENTS = {
    OFF: ("nothing", "nothing"),
    PROCESSOR: ("keys and values", "nothing"),
    KEY_REPLICATED: ("keys", "keys and values"),
    SHARED_MEMORY: ("keys, and values in shared memory", "nothing"),
}
CACHE_TYPES = ("lru", "shm")
TP_MODES = ("weights", "data")
_MAX = 2**20
# The most windows of sounds that a step encodes by default.
_MAX_WINDOWS = 8


@dataclass(frozen=True, kw_only=True)
class EncoderOptions:
    """The fields of EngineConfig about the vision tower, which encodes images.

    Attributes:
      mm_encoder_tp_mode: "weights": tensor-parallel devices split the tower's weights; "data": each device has all
        weights and encodes different images, with one exchange at the end.
      disable_chunked_mm_input: schedule all tokens of an image in one step; always the case for models that attend to
        images in both directions.
      max_num_batched_encoder_tokens: the most image embeddings that one step computes, rounded up to the smallest call
        of the tower; no image may have more. None for those of the largest image that the model and max_model_len
        allow.
      encoder_cache_size: number of image embeddings kept on the devices, also for later requests with the same image.
        None for those of two images of the largest size, at least max_num_batched_tokens.
      mm_processor_cache_gb: GiB of preprocessed images and videos to keep; 0 for none. With several API processes, each
        keeps this much.
      mm_processor_cache_type: where a server with one API process keeps them: "lru" in the engine's process, with their
        keys also in the API process; "shm" in memory that both share (Linux). Pixels are sent at most once.
      mm_shm_cache_max_object_size_mb: MiB of the largest item in shared memory; a larger one is sent each time.
    """

    mm_encoder_tp_mode: str = "weights"
    disable_chunked_mm_input: bool = False
    max_num_batched_encoder_tokens: int | None = None
    encoder_cache_size: int | None = None
    mm_processor_cache_gb: float = 4
    mm_processor_cache_type: str = "lru"
    mm_shm_cache_max_object_size_mb: int = 128

    @property
    def mm_processor_cache_bytes(self) -> int:
        """Limit of the cache of preprocessed media, in bytes."""
        return int(self.mm_processor_cache_gb * 2**30)

    def mm_cache_kind(self, num_api_processes: int) -> str:
        """Return the kind of cache of preprocessed media to use, one of KINDS: OFF without a size, PROCESSOR unless
        there is one API process, else by mm_processor_cache_type.

        num_api_processes: processes besides the engine's; 0 if there is only one process.
        """
        if not self.mm_processor_cache_bytes:
            return OFF
        if num_api_processes != 1:
            return PROCESSOR
        return SHARED_MEMORY if self.mm_processor_cache_type == "shm" else KEY_REPLICATED

    def mm_cache_placement(self, num_api_processes: int) -> dict[str, Any]:
        """Return the kind of cache ("kind"), what an API process ("api_process") and the engine's process ("engine")
        keep in it, and the limit of all its copies in bytes ("max_bytes").

        num_api_processes: processes besides the engine's.
        """
        kind = self.mm_cache_kind(num_api_processes)
        api, engine = _CONTENTS[kind]
        count = max(1, num_api_processes) if kind == PROCESSOR else 1
        size = count * self.mm_processor_cache_bytes
        return {"kind": kind, "api_process": api, "engine": engine, "max_bytes": size}


def check_encoder(options: EncoderOptions) -> None:
    """Raise ConfigError, which names the option, for a mode or cache type that does not exist, numbers out of range,
    and "shm" on a system without memfd_create.
    """
    if options.mm_encoder_tp_mode not in TP_MODES:
        raise ConfigError("mm_encoder_tp_mode", options.mm_encoder_tp_mode, ", ".join(TP_MODES))
    for name in ("max_num_batched_encoder_tokens", "encoder_cache_size"):
        value = getattr(options, name)
        if value is not None and not 1 <= value <= _MAX:
            raise ConfigError(name, value, f"1 to {_MAX}")
    if not 0 <= options.mm_processor_cache_gb <= _MAX:
        raise ConfigError("mm_processor_cache_gb", options.mm_processor_cache_gb, f"0 to {_MAX}")
    if options.mm_processor_cache_type not in CACHE_TYPES:
        raise ConfigError("mm_processor_cache_type", options.mm_processor_cache_type, ", ".join(CACHE_TYPES))
    if options.mm_processor_cache_type == "shm" and not hasattr(os, "memfd_create"):
        raise ConfigError("mm_processor_cache_type", "shm", "lru: this system has no memfd_create")
    if not 1 <= options.mm_shm_cache_max_object_size_mb <= _MAX:
        given = options.mm_shm_cache_max_object_size_mb
        raise ConfigError("mm_shm_cache_max_object_size_mb", given, f"1 to {_MAX}")


def settle_encoder(
    chosen: Mapping[str, Any], model: ModelConfig, platform: Platform, sizes: Mapping[str, tuple[int, int]]
) -> dict[str, Any]:
    """Return the fields num_encoder_rows, max_encoder_patches, max_sound_patches, whole_pictures and uses_mrope of
    ResolvedConfig, by name; {} without a tower. For a tower that layers cross-attend to, returns those of
    `settle_sounds` or `settle_crossed_pictures`.

    Raises ConfigError if there are several nodes or, for a causal model, no chunked prefill, if steps are too small for
    an item that may not be split, if a limit is below one item, and, on a TPU, if the tower's items attend in both
    directions.

    Args:
      chosen: the other fields of ResolvedConfig, by name.
      model: the model's configuration.
      platform: platform of the kernels.
      sizes: by modality, (embeddings, patches) of the largest item that requests may contain; at least one entry,
        unused without a tower.
    """
    tower = model.tower
    if tower is None:
        return {}
    if tower.crosses:
        from jaxengine.config.inputs.sounds import settle_crossed_pictures, settle_sounds

        return (settle_crossed_pictures if tower.by_place else settle_sounds)(chosen, model, platform)
    encoded = [_most_encoded(chosen, each, sizes) for each in model.towers]
    most_rows = max(rows for rows, _ in encoded)
    whole = tower.attends_both_ways or chosen["disable_chunked_mm_input"]
    modalities = [f"{AUDIO}=0" if each.hears else f"{IMAGE}=0,{VIDEO}=0" for each in model.towers]
    blind = f"let it read text only: limit_mm_per_prompt {','.join(modalities)}"
    # Decodes are scheduled first, and must leave room for an image that may not be split.
    tokens = chosen["long_prefill_token_threshold"] or chosen["max_num_batched_tokens"]
    least = chosen["max_num_seqs"] + most_rows if whole else 2
    for name, wrong, advice in (
        ("nnodes", chosen["nnodes"] > 1, "leave it 1"),
        ("enable_chunked_prefill", model.is_causal and not chosen["enable_chunked_prefill"], "leave it True"),
        ("max_num_batched_tokens", chosen["max_num_batched_tokens"] < least, f"give at least {least}"),
        ("long_prefill_token_threshold", whole and tokens < most_rows, f"give at least {most_rows}, or 0"),
    ):
        if wrong:
            kind = "sounds" if tower.hears else "pictures"
            problem = f"{name} is {chosen[name]}, which this model does not support with {kind}"
            raise ConfigError.because(name, problem, f"{advice}, or {blind}")
    if tower.attends_both_ways and platform.name == "tpu":
        problem = f"{model.architecture} attends to images in both directions, which the TPU kernels do not"
        raise ConfigError.because("limit_mm_per_prompt", problem, blind)
    rows = chosen["encoder_cache_size"] or max(2 * most_rows, chosen["max_num_batched_tokens"])
    most = [-(-patches // each.unit) * each.unit for each, (_, patches) in zip(model.towers, encoded, strict=True)]
    limits = {"num_encoder_rows": rows, "max_encoder_patches": most[0], "max_sound_patches": sum(most[1:])}
    return {**limits, "whole_pictures": whole, "uses_mrope": model.sees_places}


def _most_encoded(
    chosen: Mapping[str, Any], tower: TowerConfig, sizes: Mapping[str, tuple[int, int]]
) -> tuple[int, int]:
    """Return the most (embeddings, patches) that a step encodes with a tower.

    A tower of sounds encodes whole windows: as many as max_num_batched_encoder_tokens holds or, without it, as
    max_num_batched_tokens does, at most _MAX_WINDOWS, but at least one. It returns one window's embeddings with the
    patches of all. A tower of images encodes one largest item that the context has room for, or items of
    max_num_batched_encoder_tokens embeddings, which limits the embeddings of one too. Raises ConfigError for a limit
    below one window of a sound, and for an image tower if `sizes` has neither images nor videos. chosen: fields of
    ResolvedConfig, by name. sizes: by modality, (embeddings, patches) of the largest item.
    """
    asked, room = chosen["max_num_batched_encoder_tokens"], chosen["max_model_len"] - 1
    if tower.hears:
        window = min(sizes[AUDIO][0], room)
        for name in ("max_num_batched_encoder_tokens", "encoder_cache_size"):
            if chosen[name] is not None and chosen[name] < window:
                raise ConfigError(name, chosen[name], f"at least {window}, the embeddings of one window of a sound")
        most = chosen["max_num_batched_tokens"] if asked is None else asked
        count = max(1, min(most // window, _MAX_WINDOWS if asked is None else most))
        return window, count * tower.window
    seen = [size for modality, size in sizes.items() if modality != AUDIO]
    if not seen:
        problem = f"limit_mm_per_prompt is {IMAGE}=0, but images are all that this model's tower takes"
        raise ConfigError.because("limit_mm_per_prompt", problem, f"add {VIDEO}=0, to serve it without its tower")
    most_rows = max(min(rows, room) for rows, _ in seen)
    most_patches = max(min(patches, room * tower.merge) for _, patches in seen)
    return (most_rows, most_patches) if asked is None else (min(most_rows, asked), asked * tower.merge)
