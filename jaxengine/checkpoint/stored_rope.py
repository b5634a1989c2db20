"""Takes the frequencies of rope from the weights, where a family's checkpoints store them.

ESM-2 was trained with frequencies that were rounded to float16, which its checkpoints keep; those of the configuration
give other embeddings.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.rope import RopeScaling
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.source import WeightSource
from jaxengine.models.registry import model_for_hf


def with_stored_frequencies(model: ModelConfig, weights: WeightSource | Path | None) -> ModelConfig:
    """Return the config with the frequencies, in radians per position, of the first tensor of `weights` whose name ends
    with CheckpointNames.frequencies, in the ropes of all layers.

    It is unchanged for families that name no such tensor, for checkpoints without one, for a model without rope, and
    for dummy weights (None) or a folder in device layout. Raises ModelFileError unless the tensor has a positive
    frequency for each pair of elements.
    """
    end = model_for_hf(model.architecture).checkpoint_names.frequencies
    if not end or weights is None or isinstance(weights, Path):
        return model
    name = min((name for name in weights.names() if name.endswith(end)), default=None)
    if name is None or all(each.rope is None for each in model.attention):
        return model
    stored = weights.read(name).astype(np.float64)
    layers = []
    for each in model.attention:
        assert each.rope is not None
        usual = replace(each.rope, scaling=None).frequencies()
        if stored.shape != usual.shape or not np.all(stored > 0) or not np.all(np.isfinite(stored)):
            raise ModelFileError(weights.path, f"must hold {len(usual)} positive frequencies", name)
        scaling = RopeScaling("factors", factors=tuple((usual / stored).tolist()))
        layers.append(replace(each, rope=replace(each.rope, scaling=scaling)))
    return replace(model, attention=tuple(layers))
