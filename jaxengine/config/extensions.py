"""Chooses the optional capabilities (extensions) of the scheduler that a config needs. Others are not imported."""

from __future__ import annotations

from typing import Any

from jaxengine.scheduler.base.config import ExtensionOptions


def extension_options(config: Any) -> tuple[ExtensionOptions, ...]:
    """Return the options of the scheduler's extensions that a ResolvedConfig alone determines: images or sounds, state
    snapshots, adapters, KV offload, KV events, page ages. Extensions that the config does not use are left out.

    Options of drafts depend on grammars too, so jaxengine.engine.extensions makes them. Imports the modules of the
    chosen extensions.
    """
    options: list[ExtensionOptions] = []
    if config.num_encoder_rows and config.attends_to_sounds:
        from jaxengine.scheduler.extensions.sounds import SoundOptions

        options.append(SoundOptions(config.num_encoder_rows, config.max_encoder_patches))
    elif config.num_encoder_rows and config.attends_to_pictures:
        from jaxengine.scheduler.extensions.crossed_pictures import CrossedPictureOptions

        options.append(CrossedPictureOptions(config.num_encoder_rows, config.max_encoder_patches))
    elif config.num_encoder_rows:
        from jaxengine.scheduler.extensions.pictures import PictureOptions

        sizes = config.num_encoder_rows, config.max_encoder_patches
        towers = {"whole": config.whole_pictures, "max_sound_patches": config.max_sound_patches}
        options.append(PictureOptions(*sizes, mrope=config.uses_mrope, **towers))
    if config.num_state_snapshots:
        from jaxengine.scheduler.extensions.snapshots import SnapshotOptions

        options.append(SnapshotOptions(config.whole_pictures))
    if config.enable_lora:
        from jaxengine.scheduler.extensions.adapters import AdapterOptions

        options.append(AdapterOptions(config.max_loras))
    if config.kv_offloading_bytes:
        from jaxengine.scheduler.extensions.offload import OffloadOptions

        at_once, transfer = config.kv_offloading_folder is not None, config.kv_transfer_config
        threshold = 0 if transfer is None else transfer.store_threshold
        options.append(OffloadOptions(at_once, config.preemption_mode, threshold))
    if config.publishes_kv_events:
        from jaxengine.scheduler.extensions.kv_events import KVEventOptions

        options.append(KVEventOptions())
    if config.kv_cache_metrics:
        from jaxengine.scheduler.extensions.page_ages import PageAgeOptions

        options.append(PageAgeOptions(config.kv_cache_metrics_sample))
    return tuple(options)
