"""Maps of tokens, which follow from a checkpoint's tokenizer, when new weights come without them: published checkpoints
and trainers have none, and the engine keeps its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxengine.models.config.compressed import is_token_map
from jaxengine.models.params.declare import declared_params
from jaxengine.models.params.source import WeightSource
from jaxengine.models.weights.adapters.pools import abstract_leaves
from jaxengine.models.weights.formats.arrays import on_host
from jaxengine.models.weights.views.extended import ExtendedSource
from jaxengine.runner.weights.sleep import Absent


def with_kept_maps(source: WeightSource, stages: Sequence[tuple[Any, Any, list[Any]]]) -> WeightSource:
    """Return a view of a checkpoint with the token maps that the engine has, or `source` itself if it has a map, or the
    engine none. stages: (abstract model, mesh, leaves) each.
    """
    if any(is_token_map(name) for name in source.names()):
        return source
    maps = _maps(stages)
    return ExtendedSource(source, maps) if maps else source


def then_kept_maps(
    tensors: Iterable[tuple[str, Any]], stages: Sequence[tuple[Any, Any, list[Any]]]
) -> Iterator[tuple[str, Any]]:
    """Iterate over tensors by name, and then, if none of them is a map, over the maps that the engine has. stages: as
    of `with_kept_maps`.
    """
    given = False
    for name, array in tensors:
        given = given or is_token_map(name)
        yield name, array
        del array  # otherwise it would stay in memory while the next one is created
    if not given:
        yield from _maps(stages).items()


def _maps(stages: Sequence[tuple[Any, Any, list[Any]]]) -> dict[str, np.ndarray]:
    """Return copies of the maps, i32[vocab_size] each, by the name of their tensor: those on the devices and, if the
    engine sleeps, in host memory.
    """
    found = {}
    for model, mesh, leaves in stages:
        tensors = {
            param.name: param.decl.sources[0].name for param in declared_params(model) if is_token_map(param.name)
        }
        if not tensors:
            continue
        for (name, _), leaf in zip(abstract_leaves(model, mesh), leaves, strict=True):
            held = leaf.whole() if isinstance(leaf, Absent) else leaf
            if name in tensors and held is not None:
                found[tensors[name]] = on_host(held)
    return found
