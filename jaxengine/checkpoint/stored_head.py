"""Decides from the weights what a checkpoint's configuration gets wrong: whether the LM head is tied to the embedding,
which modules are not quantised, and the frequencies of rope.

`tie_word_embeddings` is often a default or a base model's value. The weights decide, as in transformers 5: a head that
differs from the embedding is not tied.

Tools do not always list everything that they left unquantised: experts, which are no linear layers in transformers 5,
or a tower's matrices.

ESM-2's checkpoints keep frequencies rounded to float16, with which it was trained.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.rope import RopeScaling
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.source import ExpertRows, WeightSource
from jaxengine.models.quantization.base.online import Rounded
from jaxengine.models.quantization.base.quantized import Quantized
from jaxengine.models.quantization.base.rules import Quantization
from jaxengine.models.registry import model_for_hf
from jaxengine.models.weights.formats.orbax import read_layout
from jaxengine.models.weights.load import EMBEDDING, HEAD
from jaxengine.models.weights.views.stacked import BIAS, split_stack

logger = logging.getLogger(__name__)

TIED = "tie_word_embeddings"
# Rows of head and embedding that are compared here. The loader compares all rows of those that count as equal.
MAX_ROWS = 256
_FLOATS = ("float32", "float16", "bfloat16")
_EXPERT, _FIRST = re.compile(r"\.experts\.\d+\."), ".experts.0."


def with_stored_head(model: ModelConfig, raw: Mapping[str, Any], weights: WeightSource | Path | None) -> ModelConfig:
    """Return the config with `tie_word_embeddings` as the weights imply.

    It becomes False if there is a head that differs from the embedding, which is logged as a warning, and True without
    a head if the top level of config.json has true. raw: the config.json. weights: a checkpoint, or a folder in device
    layout, whose own list of weights decides. Nothing changes if it is None, for dummy weights, or for a pooling model.
    Raises ModelFileError for files that cannot be read.
    """
    if weights is None or model.pooler is not None:
        return model
    if isinstance(weights, Path):
        has_head = any(name.startswith("lm_head.") for name in read_layout(weights)["weights"])
        return replace(model, tie_word_embeddings=not has_head)
    names = model_for_hf(model.architecture).checkpoint_names
    stored = {names.renamed(name): name for name in weights.names()}
    if not model.tie_word_embeddings:
        # Any tensor of the head counts, since quantised ones have other names.
        has_head = any(name.startswith("lm_head.") for name in stored)
        return model if has_head or raw.get(TIED) is not True else replace(model, tie_word_embeddings=True)
    if HEAD not in stored or EMBEDDING not in stored or _look_equal(weights, stored[HEAD], stored[EMBEDDING]):
        return model
    logger.warning(
        "%s: %s differs from %s, so they are not tied, though %s is true", weights.path, HEAD, EMBEDDING, TIED
    )
    return replace(model, tie_word_embeddings=False)


def with_plain_modules(model: ModelConfig, weights: WeightSource | Path | None) -> ModelConfig:
    """Return the config with a `quantization` whose `unlisted`, modules that are not quantised, are those that it takes
    for quantised but the checkpoint stores as plain numbers: matrices, and stacks of a layer's experts.

    weights: a checkpoint, or a folder in device layout. Nothing changes for such a folder, for dummy weights (None),
    and for a model whose checkpoint is not quantised. Raises ModelFileError for files that cannot be read.
    """
    if weights is None or isinstance(weights, Path) or not isinstance(model.quantization, Quantization):
        return model
    names = model_for_hf(model.architecture).checkpoint_names
    stored = {names.renamed(name): name for name in weights.names()}
    plain = (*_plain_stacks(stored, names.expert_rows), *_plain_matrices(stored, weights, model.quantization))
    return replace(model, quantization=replace(model.quantization, unlisted=plain)) if plain else model


def _plain_stacks(names: Iterable[str], rows: ExpertRows | None) -> list[str]:
    """Return the modules of experts in stacks with no other tensors than weights and biases. names: renamed names of
    all tensors. rows: the family's further names of stacks; None for none.
    """
    rows = rows or ExpertRows((), ())
    ends = tuple(f".experts.mlp.{matrix}" for matrix in (*rows.rows, *rows.turned))
    rests: dict[str, set[str]] = {}
    for name in names:
        parts = (name.rsplit(".", 2)[0], "", "") if name.endswith(ends) else split_stack(name)
        if parts is not None:
            rests.setdefault(parts[0], set()).add(parts[2])
    return [experts for experts, found in rests.items() if found <= {"", BIAS}]


def _plain_matrices(stored: Mapping[str, str], weights: WeightSource, quantization: Quantization) -> list[str]:
    """Return the modules of which the checkpoint has a matrix of floats with 16 bits or more and no scales, and which
    `quantization` takes for quantised. The first expert's stands for those of all experts, which must be alike.

    stored: names of all tensors by their renamed ones. Raises ModelFileError for files that cannot be read.
    """
    kinds: dict[str, set[str]] = {}
    for name in stored:
        module, _, kind = name.rpartition(".")
        kinds.setdefault(module, set()).add(kind)
    plain = {
        module
        for module, own in kinds.items()
        if "weight" in own and own <= {"weight", "bias"} and _holds_floats(weights, stored[f"{module}.weight"])
    }
    others = {_EXPERT.sub(_FIRST, module) for module in kinds.keys() - plain}
    found = []
    for module in sorted({_EXPERT.sub(_FIRST, module) for module in plain} - others):
        scheme = quantization(module)
        if isinstance(scheme, Quantized) and not isinstance(scheme.stored, Rounded):
            found.append(module)
    return found


def _holds_floats(weights: WeightSource, name: str) -> bool:
    """Return whether a tensor is a matrix of floats with 16 bits or more."""
    return len(weights.shape(name)) == 2 and str(weights.read(name, slice(0, 0)).dtype) in _FLOATS


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


def say_head(raw: dict[str, Any], tied: bool) -> dict[str, Any]:
    """Return a copy of a config.json in which `tie_word_embeddings` is `tied`, at the top level and in text_config if
    there is one.
    """
    if isinstance(text := raw.get("text_config"), Mapping):
        return {**raw, TIED: tied, "text_config": {**text, TIED: tied}}
    return {**raw, TIED: tied}


def _look_equal(weights: WeightSource, first: str, second: str) -> bool:
    """Whether up to MAX_ROWS evenly spread rows of two matrices are equal. first, second: names of the matrices.

    Matrices of different shapes, without two axes or without elements count as equal.
    """
    shape = weights.shape(first)
    if shape != weights.shape(second) or len(shape) != 2 or 0 in shape:
        return True
    rows = np.unique(np.linspace(0, shape[0] - 1, MAX_ROWS).astype(int)).tolist()
    spans = [slice(row, row + 1) for row in rows]
    return all(np.array_equal(weights.read(first, span), weights.read(second, span)) for span in spans)
