"""Processor of a model with a tower of images and another one of sounds, which puts their processors together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxengine.media.base.processor import Expanded, MediaProcessor, Processed
from jaxengine.media.processors.sounds import SoundProcessor
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.scheduler.base.media import AUDIO


class PairedProcessor:
    """MediaProcessor that passes sounds to one processor and all other items to another.

    Options (mm_processor_kwargs) are those of images: sounds have none.

    Attributes:
      seeing, hearing: the processors of all other items, and of sounds.
      modalities: kinds of items that are taken, those of `seeing` first.
      settings: text of everything that affects the results of `process`.
    """

    def __init__(self, seeing: MediaProcessor, hearing: SoundProcessor):
        """Store the processors: `seeing` of images and videos, `hearing` of sounds."""
        self.seeing, self.hearing = seeing, hearing
        self.modalities = (*seeing.modalities, *hearing.modalities)
        self.settings = f"{seeing.settings} {hearing.settings}"

    @classmethod
    def of_towers(
        cls,
        seeing: Callable[..., MediaProcessor],
        hearing: Callable[..., SoundProcessor],
        folder: Path | str,
        config_json: Mapping[str, Any],
        model_config: ModelConfig,
        tokenizer: Any,
    ) -> MediaProcessor:
        """Return the processor of a checkpoint for the towers that it is served with: a pair if there are both.

        seeing, hearing: makers of the processors, called with the other arguments and a configuration that has the
        tower alone. The others, and the errors, are those of jaxengine.media.registry.processor_for.
        """
        towers = {tower.hears: replace(model_config, tower=tower, sound_tower=None) for tower in model_config.towers}
        makers = {False: seeing, True: hearing}
        found: list[Any] = [
            make(folder, config_json, towers[hears], tokenizer) for hears, make in makers.items() if hears in towers
        ]
        return cls(*found) if len(found) > 1 else found[0]

    def of(self, modality: str) -> MediaProcessor:
        """Return the processor of a modality: `hearing` for "audio", else `seeing`."""
        return self.hearing if modality == AUDIO else self.seeing

    def placeholder(self, modality: str) -> str:
        return self.of(modality).placeholder(modality)

    def process(self, modality: str, value: Any, options: Mapping[str, Any], most: int | None = None) -> Processed:
        """Preprocess an item by its modality's processor. For sounds the options are only checked, as options of
        images.

        most: limit of patches, if any. Raises the RequestErrors of that processor.
        """
        if modality == AUDIO:
            self.seeing.with_options(options)
            options = {}
        return self.of(modality).process(modality, value, options, most)

    def grid_of(self, num_rows: int, grid: tuple[int, int, int] | None) -> tuple[int, int, int]:
        return self.seeing.grid_of(num_rows, grid)

    def largest(self, modality: str, size: tuple[int, int] | None = None, num_frames: int | None = None) -> Processed:
        return self.of(modality).largest(modality, size, num_frames)

    def with_options(self, options: Mapping[str, Any]) -> PairedProcessor:
        return type(self)(self.seeing.with_options(options), self.hearing)

    def expand(self, token_ids: Sequence[int], items: Mapping[str, Sequence[Processed]]) -> Expanded:
        """Return the prompt with its images expanded first, and then its sounds. Only for models without M-RoPE.

        items: by modality, in order. Raises RequestError for another number of items than placeholders.
        """
        seen = self.seeing.expand(token_ids, items)
        heard = self.hearing.expand(seen.token_ids, items)
        # Each token stays one token, except placeholders of sounds, which become several.
        counts = np.ones(len(seen.token_ids), np.int64)
        counts[self.hearing.found(seen.token_ids)] = [self.hearing.length(item) for item in items.get(AUDIO, ())]
        moved = np.cumsum(counts) - counts
        positions = [moved[own].astype(np.int32) for own in seen.positions] + heard.positions
        order = [*seen.order, *heard.order]
        by_place = sorted(range(len(order)), key=lambda number: int(positions[number][0]))
        return Expanded(heard.token_ids, [positions[each] for each in by_place], [order[each] for each in by_place])
