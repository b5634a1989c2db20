"""Names and files of a pooling model's weights, which differ from those of the same layers with an output head."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jaxengine.models.causal_lm import CausalLM
from jaxengine.models.config.pooler import DENSE, PROJECTIONS, Pooler
from jaxengine.models.params.declare import declared_params
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.files import ADAPTER_CONFIG, inside
from jaxengine.models.params.source import INNER, MODEL, WHOLE, CheckpointNames, WeightSource, WrappedSource
from jaxengine.models.weights.adapters.folder import MAX_RANK, read_adapter
from jaxengine.models.weights.adapters.pools import AdapterTargets
from jaxengine.models.weights.formats.safetensors import SINGLE_FILE, SafetensorsCheckpoint
from jaxengine.models.weights.formats.torch_zip import TorchCheckpoint
from jaxengine.models.weights.load import is_unread
from jaxengine.models.weights.views.joined import JoinedSource
from jaxengine.models.weights.views.merged import AddedSource
from jaxengine.models.weights.views.renamed import with_prefix

_LAYERS = f"{MODEL}layers."


def with_own_files(
    folder: Path, weights: WeightSource, names: CheckpointNames, pooler: Pooler, *, partial: bool = False
) -> WeightSource:
    """Return a view of a folder's weights under the names of its family, `names`, together with those of Dense modules
    and of heads for tokens, which are in files of their own. The pooler's adapter is added to the weights if the folder
    has it.

    partial: whether missing files of Dense modules are left out; those of heads always are. Raises ModelFileError for a
    file that is missing, invalid or outside the folder, and for an adapter that does not fit; files opened before it
    are closed, but not `weights`.
    """
    heads = [f"{head.source}." for head in pooler.token_heads if head.source is not None]
    stored, weights, found = weights, with_prefix(weights, names, heads), {}
    if pooler.adapter is not None and (folder / pooler.adapter / ADAPTER_CONFIG).exists():
        weights = _with_adapter(inside(folder, pooler.adapter), weights)
    with contextlib.ExitStack() as on_error:
        for index, each in enumerate(pooler.dense):
            if not each.folder:  # among the model's weights
                if not partial or any(name in stored.names() for name in PROJECTIONS):
                    found[f"{DENSE}.{index}.linear."] = _Linear(stored)
                continue
            file = inside(folder, f"{each.folder}/{SINGLE_FILE}")
            if not partial or file.exists():
                found[f"{DENSE}.{index}."] = own = SafetensorsCheckpoint(file)
                on_error.callback(own.close)
        for head in pooler.token_heads:
            if head.source is not None and (file := _file_of(folder, head.source)) is not None:
                found[f"{head.source}."] = file
                on_error.callback(file.close)
        on_error.pop_all()
    taken = PROJECTIONS if any(not each.folder for each in pooler.dense) else ()  # it has a Dense module's name
    return JoinedSource(weights, found, taken) if found else weights


def _with_adapter(folder: Path, weights: WeightSource) -> WeightSource:
    """Return a view of a checkpoint, whose layers begin with "model.layers.", with the LoRA adapter in `folder` added
    to their matrices. The adapter's names may lack "model.".

    Other matrices than those under "model.layers." cannot have one. Raises ModelFileError for an adapter that is
    invalid, does not fit, or has a rank above MAX_RANK, and for matrices with an adapter that are not floating-point
    numbers.
    """
    stored = {name.removesuffix(".weight"): weights.shape(name) for name in weights.names()}
    shapes = {module: (shape[1], shape[0]) for module, shape in stored.items() if len(shape) == 2}
    shapes = {module: sides for module, sides in shapes.items() if module.startswith(_LAYERS)}
    targets = AdapterTargets(shapes, {}, frozenset(stored.keys() - shapes.keys()), CheckpointNames())
    matrices = read_adapter(folder, targets, MAX_RANK, "float32").matrices
    for name in (f"{module}.weight" for module in matrices):
        if not jnp.issubdtype(weights.read(name, slice(0, 0)).dtype, jnp.floating):
            raise ModelFileError(weights.path, f"is quantised, and the adapter of {folder} is not added to such", name)
    return AddedSource(weights, matrices)


def _file_of(folder: Path, name: str) -> WeightSource | None:
    """Return the opened file of a module's weight and bias, .safetensors or else torch's .pt; None if there is none.
    Raises ModelFileError for an invalid file, and a link out of the folder.
    """
    if (folder / f"{name}.safetensors").exists():
        return SafetensorsCheckpoint(inside(folder, f"{name}.safetensors"))
    return TorchCheckpoint(inside(folder, f"{name}.pt")) if (folder / f"{name}.pt").exists() else None


class _Linear(WrappedSource):
    """WeightSource of the tensor in PROJECTIONS alone, under the name `weight`."""

    def names(self) -> Iterable[str]:
        return ("weight",)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self._stored)

    def held_in(self, name: str) -> tuple[str, ...]:
        return (self._stored,)

    def read(self, name: str, rows: slice = WHOLE, columns: slice = WHOLE) -> np.ndarray:
        return self._source.read(self._stored, rows, columns)

    @property
    def _stored(self) -> str:
        """The checkpoint's name of the projection, one of PROJECTIONS."""
        return next(name for name in PROJECTIONS if name in self._source.names())


def naming(stages: Sequence[CausalLM]) -> Callable[[str], str]:
    """Return a function that maps a tensor's name in a checkpoint of a pooling model, which may lack the common prefix,
    to its name with the prefix and without INNER.

    stages: the stages of the model. Unlike `with_prefix`, the function needs no other tensor's name.
    """
    first = stages[0]
    names = first.checkpoint_names
    sources = (source.name for stage in stages for param in declared_params(stage) for source in param.decl.sources)
    heads = {f"{name.partition('.')[0]}." for name in sources}
    kept = (MODEL, "lm_head.", *heads)

    pooler = first.config.pooler
    projects = pooler is not None and any(not each.folder for each in pooler.dense)

    def named(name: str) -> str:
        """Return `name`, a tensor of the checkpoint, with the common prefix, unless it needs none or is not read; one
        of PROJECTIONS gets the name of a Dense module's.
        """
        if projects and name in PROJECTIONS:
            return f"{DENSE}.0.linear.weight"
        name = name.removeprefix(INNER)
        own = names.renamed(name)
        as_it_is = own.startswith(kept) or names.is_unused(name) or is_unread(first, own)
        return name if as_it_is else names.base + name

    return named
