"""Names and files of a pooling model's weights, which differ from those of the same layers with an output head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from jaxengine.models.causal_lm import CausalLM
from jaxengine.models.config.pooler import DENSE, Pooler
from jaxengine.models.params.declare import declared_params
from jaxengine.models.params.files import inside
from jaxengine.models.params.source import WeightSource
from jaxengine.models.weights.formats.safetensors import SINGLE_FILE, SafetensorsCheckpoint
from jaxengine.models.weights.load import is_unread
from jaxengine.models.weights.views.joined import JoinedSource
from jaxengine.models.weights.views.renamed import with_prefix

_MODEL = "model."


def with_own_files(folder: Path, weights: WeightSource, pooler: Pooler, *, partial: bool = False) -> WeightSource:
    """Return a folder's weights under the model's names, with those of Dense modules, which are files of their own.

    partial: files that are not there are left out. Raises ModelFileError.
    """
    weights, found = with_prefix(weights), {}
    for index, each in enumerate(pooler.dense):
        file = inside(folder, f"{each.folder}/{SINGLE_FILE}")
        if not partial or file.exists():
            found[f"{DENSE}.{index}."] = SafetensorsCheckpoint(file)
    return JoinedSource(weights, found) if found else weights


def naming(stages: Sequence[CausalLM]) -> Callable[[str], str]:
    """Return a function from a tensor's name in a checkpoint of a pooling model, which may lack the common prefix, to
    its name with the prefix.

    stages: of the model. Unlike `with_prefix` it needs no other tensor's name.
    """
    first = stages[0]
    names = first.checkpoint_names
    sources = (source.name for stage in stages for param in declared_params(stage) for source in param.decl.sources)
    heads = {f"{name.partition('.')[0]}." for name in sources}
    kept = (_MODEL, "lm_head.", *heads)

    def named(name: str) -> str:
        own = names.renamed(name)
        as_it_is = own.startswith(kept) or names.is_unused(name) or is_unread(first, own)
        return name if as_it_is else _MODEL + name

    return named
