"""Weight updates of a running engine: new weights are read, checked and put on the devices next to the old ones, and
then replace them.

Nothing in the engine changes before `NewWeights.put`: if the new weights are faulty, the old ones stay in use.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxengine.checkpoint.gguf_weights import is_gguf, open_gguf_weights
from jaxengine.models.params.declare import declared_params
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.source import WHOLE, WeightSource, WrappedSource
from jaxengine.models.weights.adapters.pools import abstract_leaves
from jaxengine.models.weights.formats.arrays import ArraySource, FiniteSource, Taken, fault_of, on_host
from jaxengine.models.weights.formats.orbax import LAYOUT_FILE, load_checkpoint
from jaxengine.models.weights.formats.safetensors import SafetensorsCheckpoint
from jaxengine.models.weights.load import load_params
from jaxengine.models.weights.moved import is_finite, moved, on_device
from jaxengine.models.weights.pooled import naming, with_own_files
from jaxengine.models.weights.streamed import load_streamed
from jaxengine.models.weights.views.parts import num_parts
from jaxengine.runner.model_runner import ModelRunner
from jaxengine.runner.stage_runner import StageRunner
from jaxengine.runner.weights.kept_maps import then_kept_maps, with_kept_maps
from jaxengine.runner.weights.process_weights import Spread, raise_faults, whole
from jaxengine.runner.weights.sleep import Absent, are_present
from jaxengine.runner.weights.weight_names import (
    GivenNames,
    Renamed,
    Target,
    WeightUpdateError,
    check_chunk_bytes,
    check_mapping,
    pairs_of,
    refuse_chunks,
    refuse_mapping,
    renamed,
    unwrapped,
    with_names,
)
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.sharding.rules import part_bytes

if TYPE_CHECKING:
    from jaxengine.runner.extensions.drafts.updates import HeadTensors

_Read = TypeVar("_Read")


class _Stage(NamedTuple):
    """An abstract model, or pipeline stage of one, its mesh, and its `params`: leaves, which an update replaces."""

    model: Any
    mesh: Any
    params: list[Any]


class NewWeights:
    """New arrays on the devices, ready to replace an engine's weights.

    Attributes:
      seconds: time that it took to read them and to put them on the devices.
      are_of_draft: whether they are a draft model's.
    """

    def __init__(
        self,
        stages: Sequence[_Stage],
        found: Sequence[Mapping[int, jax.Array]],
        seconds: float,
        *,
        are_of_draft: bool = False,
        spread: Spread | None = None,
    ):
        """Store the new arrays; the stages are not changed yet. stages: those that receive the arrays. found: for each
        stage, the new arrays by index among its leaves, with the leaf's sharding and layout. seconds: time that loading
        took. are_of_draft: of a draft model. spread: sends orders to the other processes; None for a single one.
        """
        self._stages, self._found, self.seconds, self.are_of_draft = stages, found, seconds, are_of_draft
        self._spread = spread

    @property
    def num_leaves(self) -> int:
        """Number of new arrays, over all stages."""
        return sum(map(len, self._found))

    @property
    def num_bytes(self) -> int:
        """Size of the new arrays in bytes, summed over all devices of this process."""
        arrays = [each for new in self._found for each in new.values()]
        return sum(part_bytes(each) * len(each.sharding.addressable_devices) for each in arrays)

    def put(self) -> None:
        """Replace the old weights by these arrays in all processes, from the next step on."""
        if self._spread is None:
            self._put_here()
        else:
            self._spread.put(self._put_here)

    def _put_here(self) -> None:
        """Replace the old weights in this process: store the new arrays in the stages' lists of leaves."""
        for stage, new in zip(self._stages, self._found, strict=True):
            for index, array in new.items():
                stage.params[index] = array


class ReadOptions(NamedTuple):
    """Options of `read_weights` with the same names and meanings, except `stop`."""

    mapping: Mapping[str, Renamed] | None = None
    strict: bool = True
    donate: bool = False
    target: Target = "model"
    chunk_bytes: int | None = None


@jax.transfer_guard("allow")
def read_weights(
    runner: ModelRunner,
    params: Any,
    *,
    mapping: Mapping[str, Renamed] | None = None,
    strict: bool = True,
    donate: bool = False,
    target: Target = "model",
    chunk_bytes: int | None = None,
    stop: Callable[[], bool] | None = None,
) -> NewWeights:
    """Read new weights for all stages and put them on their devices, next to the old ones. The engine uses its old
    weights until the result's `put` is called.

    Args:
      params: a folder with safetensors or in device layout, or a GGUF file; tensors by Hugging Face name, as a mapping
        or as pairs; or the engine's own tree, an nnx.State or an nnx.Module, which only an engine of one process takes.
      mapping: maps names of tensors in `params` to Hugging Face names. Names that are not in it are used unchanged.
      strict: whether every weight must be given. Otherwise a weight of which no tensor is given stays as it is.
      donate: delete jax arrays of `params` as soon as they have been read, even if later ones are faulty.
      target: "model", or "draft" for the weights of a draft model, an MTP layer or a head.
      chunk_bytes: bytes of a tensor that are copied to host memory at a time; see `LLM.update_weights`.
      stop: called before each tensor of a folder or GGUF file; True ends the update with WeightUpdateError.

    In an engine of several processes each reads its parts, from the folder of this path on its own machine, or from the
    tensors that this process sends. Either all processes have new weights or none has. Matrices quantised at loading
    are quantised again. Raises WeightUpdateError for weights that do not fit, in any process; RequestError for "draft"
    without draft weights, invalid chunk_bytes or mapping; ClusterError; and errors of functions in `mapping`.
    """
    check_chunk_bytes(chunk_bytes)
    check_mapping(mapping)
    options = ReadOptions(mapping, strict, donate, target, chunk_bytes)
    if runner.config.nnodes == 1:
        return read_here(runner, params, options, stop=stop)
    if isinstance(params, nnx.Module | nnx.State):
        raise WeightUpdateError("an engine of several processes has no tree of its own: give tensors by name")
    _stages(runner, target)
    spread, given, shared = Spread(runner), GivenNames(), {"strict": strict, "chunk_bytes": chunk_bytes}
    try:
        if isinstance(params, str | os.PathLike):
            answers = spread.begin(os.path.abspath(os.fsdecode(params)), **shared)
            new = read_here(runner, params, options, stop=stop, spread=spread)
        else:
            spread.begin(None, **shared)()
            new = read_here(runner, params, options, spread=spread, given=given)
            answers = spread.end()
        raise_faults(answers(), given.of)
    except BaseException:
        spread.forget()
        raise
    spread.forget_with(new)
    return new


def read_here(
    runner: ModelRunner,
    params: Any,
    options: ReadOptions,
    *,
    stop: Callable[[], bool] | None = None,
    spread: Spread | None = None,
    given: GivenNames | None = None,
) -> NewWeights:
    """Read this process's parts of new weights, and put them on its devices; the engine does not change. params,
    options, stop: arguments of `read_weights`. spread: sends tensors by name to other processes; None for one process.
    given: gets the names of tensors by name.
    Raises RequestError for a target or chunk_bytes that does not apply; WeightUpdateError for weights that do not fit,
    a mapping or donate that does not apply, no tensor of this model, and a sleeping engine without all weights.
    """
    start = time.monotonic()
    mapping, strict, donate, target, chunk_bytes = options
    if donate and isinstance(params, str | os.PathLike):
        raise WeightUpdateError("donate deletes jax arrays, and a folder has none")
    stages = _stages(runner, target)
    head, given = None if target == "model" else _head(runner, stages[0], strict), given or GivenNames()
    try:
        if isinstance(params, nnx.Module | nnx.State):
            refuse_mapping(mapping)
            found = [_own_tree(stage, len(stages), params, strict, donate, chunk_bytes) for stage in stages]
        elif isinstance(params, str | os.PathLike) and os.path.isfile(os.path.join(params, LAYOUT_FILE)):
            refuse_mapping(mapping)
            refuse_chunks(chunk_bytes)
            found = [_checked(stage, load_checkpoint(Path(params), stage.model, mesh=stage.mesh)) for stage in stages]
        elif isinstance(params, str | os.PathLike):
            refuse_mapping(mapping)
            found = _of_folder(stages, Path(params), strict, chunk_bytes, stop, head)
        elif head is not None:
            tensors = with_names(given.following(unwrapped), renamed(pairs_of(params), mapping or {}, given=given))
            found = _of_head(stages, head, tensors, strict, donate, chunk_bytes)
        else:
            lazily = chunk_bytes is not None
            named = renamed(pairs_of(params), mapping or {}, donate=donate, lazily=lazily, given=given)
            tensors = with_names(given.following(unwrapped), named)
            tensors = tensors if spread is None else spread.sending(tensors, chunk_bytes)
            found = _of_tensors(stages, tensors, given, strict, donate, chunk_bytes)
    except ModelFileError as error:
        raise WeightUpdateError.of(given.of([(error.where or error.path, error.what), *error.others])) from error
    new = NewWeights(stages, found, time.monotonic() - start, are_of_draft=target == "draft", spread=spread)
    for stage, own in zip(stages, found, strict=True):
        if any(
            isinstance(each, Absent) and not each.host and index not in own for index, each in enumerate(stage.params)
        ):
            raise WeightUpdateError(
                "the engine sleeps without a copy of its weights: give all of them, with strict=True"
            )
    if not new.num_leaves:
        raise WeightUpdateError("params has no tensor of this model")
    return new


@jax.transfer_guard("allow")
def read_adapter(params: Any, read: Callable[[WeightSource], _Read]) -> _Read:
    """Call `read` with a source of an adapter's tensors under PEFT's names, and return its result. params: a mapping or
    pairs of names and arrays. Raises WeightUpdateError with all faults, including those of a ModelFileError that `read`
    raises, and other errors of `read`.
    """
    tensors, faults = _collected(renamed(pairs_of(params), {}))
    try:
        new = read(ArraySource(tensors))
    except ModelFileError as error:
        found = [(error.where or error.path, error.what), *error.others]
        raise WeightUpdateError.of([*faults.items(), *(each for each in found if each[0] not in faults)]) from error
    if faults:
        raise WeightUpdateError.of([*faults.items()])
    return new


@jax.transfer_guard("allow")
def checksums(runner: ModelRunner) -> dict[str, str]:
    """Return the SHA-256, in hex, of each weight by name, computed over the bytes of the whole C-contiguous array,
    without adapters. Parts in other processes are fetched, one weight at a time. Raises RequestError while the weights
    are not on the devices, ClusterError if a process is lost.
    """
    if not are_present(runner):
        raise RequestError("the engine sleeps: its weights are not on the devices", param="checksum")
    return {
        name: checksum
        for number, stage in enumerate(runner.stages)
        for name, checksum in stage_checksums(stage, partial(whole, runner, number)).items()
    }


def stage_checksums(stage: StageRunner, fetch: Callable[[int], np.ndarray] | None = None) -> dict[str, str]:
    """Return the SHA-256, in hex, of each weight of one stage by name, without adapters, and without matrices of no
    expert. Layer numbers count over all stages. fetch: returns a whole host array by its index in stage.params; None if
    all of the stage is on this process's devices.
    """
    model, found = stage.programs.model, {}
    layers = model.stage.layers
    params = {param.name: param for param in declared_params(model)}
    for index, (name, _) in enumerate(abstract_leaves(model, stage.programs.mesh)):
        if (param := params.get(name)) is not None:
            array = on_host(stage.params[index]) if fetch is None else fetch(index)
            array = array[tuple(map(slice, param.own_shape))]
            name = re.sub(r"^layers\.(\d+)\.", lambda match: f"layers.{layers[int(match[1])]}.", name)
            found[name] = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
    return found


def _stages(runner: ModelRunner, target: Target) -> list[_Stage]:
    """Return the model's stages; for "draft", its draft model or head. Raises RequestError without draft weights."""
    if target == "model":
        return [_Stage(stage.programs.model, stage.programs.mesh, stage.params) for stage in runner.stages]
    chosen = runner.config.speculative_config
    if chosen is None or not chosen.has_model:
        what = "no drafts" if chosen is None else f"the method {chosen.method!r}"
        text = f"target is 'draft', and the engine has {what}; it needs a draft model, an MTP layer or a head"
        raise RequestError(text, param="target", value=target)
    drafter: Any = runner.stages[-1].extensions["drafts"]
    return [_Stage(drafter.programs.model, drafter.programs.target.mesh, drafter.params)]


class _StoppableSource(WrappedSource):
    """Wrapped source that raises WeightUpdateError once its `stop` function returns True."""

    def __init__(self, source: WeightSource, stop: Callable[[], bool]):
        super().__init__(source)
        self._stop = stop

    def read(self, name: str, rows: slice = WHOLE, columns: slice = WHOLE) -> np.ndarray:
        """Read from the wrapped source. Raises WeightUpdateError, without reading, once `stop` returns True."""
        if self._stop():
            raise WeightUpdateError("the update was stopped before all weights were read")
        return self._source.read(name, rows, columns)


def _of_folder(
    stages: Sequence[_Stage],
    folder: Path,
    strict: bool,
    chunk_bytes: int | None,
    stop: Callable[[], bool] | None,
    head: HeadTensors | None,
) -> list[dict[int, jax.Array]]:
    """Read a folder with safetensors, and any pooling modules, or a GGUF file; return each stage's new arrays by leaf
    index, on the devices: without strict, of the weights that the folder has. head: selects a draft head's tensors, or
    None. Raises ModelFileError for files that do not fit, WeightUpdateError if stopped or numbers are not finite.
    """
    states, first, in_gguf = [], stages[0].model, is_gguf(folder)
    checkpoint = open_gguf_weights(folder, first.config) if in_gguf else SafetensorsCheckpoint(folder)
    source: WeightSource = with_kept_maps(checkpoint, stages) if strict else checkpoint
    try:
        if head is not None:
            source = head.view(checkpoint)
        if first.config.pooler is not None and not in_gguf:
            source = with_own_files(folder, checkpoint, first.checkpoint_names, first.config.pooler, partial=not strict)
        tensors: WeightSource = FiniteSource(source) if stop is None else _StoppableSource(FiniteSource(source), stop)
        for model, mesh, _ in stages:
            states.append(load_params(model, tensors, mesh=mesh, partial=not strict, chunk_bytes=chunk_bytes))
    finally:
        source.close()
    return _of_finite(stages, states)


def _head(runner: ModelRunner, stage: _Stage, strict: bool) -> HeadTensors | None:
    """Return the selection of tensors for an MTP layer or a head, whose abstract model is in `stage`; None for a
    draft model. strict: whether all of its weights must be given.
    """
    from jaxengine.config.features.speculation import DRAFT_MODEL
    from jaxengine.runner.extensions.drafts.updates import HeadTensors

    chosen, first = runner.config.speculative_config, runner.stages[0]
    if chosen is None or chosen.method == DRAFT_MODEL:
        return None
    return HeadTensors(chosen.method, stage.model, first.programs.model, first.params, partial=not strict)


def _of_head(
    stages: Sequence[_Stage],
    head: HeadTensors,
    tensors: Iterable[tuple[str, Any]],
    strict: bool,
    donate: bool,
    chunk_bytes: int | None,
) -> list[dict[int, jax.Array]]:
    """Return a list with one dict: a draft head's new arrays by leaf index. Other tensors are ignored. donate: delete
    jax arrays once all are read. Raises WeightUpdateError or ModelFileError for tensors that are unfit or not finite.
    """
    given, faults = _collected((name, array) for name, array in tensors if head.wanted(name))
    if faults:
        raise WeightUpdateError.of([*faults.items()])
    source = FiniteSource(head.view(ArraySource(given)))
    model, mesh, _ = stages[0]
    state = load_params(model, source, mesh=mesh, partial=not strict, chunk_bytes=chunk_bytes)
    if donate:
        for array in given.values():
            if isinstance(array, jax.Array) and not array.is_deleted():
                array.delete()
    return _of_finite(stages, [state])


def _collected(tensors: Iterable[tuple[str, Any]]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return tensors by name, the first of each name, and faults by name: for names given twice, and for items that are
    not arrays, which are replaced by empty tensors.
    """
    given, faults = dict[str, Any](), dict[str, str]()
    for name, array in tensors:
        if name in given:
            faults[name] = "is given twice"
            continue
        fault = fault_of(array)
        given[name] = array if fault is None else Taken(())
        if fault is not None:
            faults[name] = fault
    return given, faults


def _of_tensors(
    stages: Sequence[_Stage],
    tensors: Iterable[tuple[str, Any]],
    given: GivenNames,
    strict: bool,
    donate: bool,
    chunk_bytes: int | None,
) -> list[dict[int, jax.Array]]:
    """Read tensors onto the devices one by one, and return each stage's new arrays by leaf index. Arguments: see
    `read_here`. Raises ModelFileError or WeightUpdateError for tensors that do not fit or are not finite.
    """
    models, tensors = [each[:2] for each in stages], then_kept_maps(tensors, stages) if strict else tensors
    if stages[0].model.config.pooler is not None:
        tensors = with_names(given.following(naming([model for model, _ in models])), tensors)
    states = load_streamed(models, tensors, partial=not strict, donate=donate, chunk_bytes=chunk_bytes)
    return _of_finite(stages, states)


def _of_finite(stages: Sequence[_Stage], states: Sequence[nnx.State]) -> list[dict[int, jax.Array]]:
    """Return each stage's new arrays by leaf index. Only float16 arrays are checked, which can have overflowed in the
    conversion of finite tensors. Raises WeightUpdateError for numbers that are not finite.
    """
    return [_checked(stage, state, overflowing=(jnp.float16,)) for stage, state in zip(stages, states, strict=True)]


def _checked(stage: _Stage, state: nnx.State, overflowing: Sequence[Any] = ()) -> dict[int, jax.Array]:
    """Return a stage's new arrays by leaf index, in the layout that the compiled programs take; waits for them.

    state: the new weights, all or some. overflowing: dtypes whose arrays are checked for numbers that are not finite;
    () for all. Raises WeightUpdateError for such numbers. Shapes, dtypes and layouts are asserted to equal the old
    ones.
    """
    loaded = {path: variable.get_value() for path, variable in nnx.to_flat_state(state)}
    new = {}
    for index, (path, _) in enumerate(nnx.to_flat_state(nnx.state(stage.model))):
        if path in loaded:
            new[index] = array = loaded[path]
            old = stage.params[index]
            if (not overflowing or array.dtype in overflowing) and not is_finite(array):
                raise WeightUpdateError.of([_not_finite(stage.model, path, array.dtype)])
            assert (array.shape, array.dtype, array.format) == (old.shape, old.dtype, old.format), path
    jax.block_until_ready(list(new.values()))
    return new


def _not_finite(model: Any, path: tuple[Any, ...], dtype: Any) -> tuple[str, str]:
    """Return the fault of a weight whose numbers are not finite in `dtype`, under the name of its first tensor, with
    the others that it joins.
    """
    tensors = [each.name for param in declared_params(model) if param.path == path for each in param.decl.sources]
    first, *others = tensors or [_text(path)]
    more = f", or {', '.join(others)} has" if others else ""
    return first, f"has numbers that are not finite in {dtype}{more}"


def _own_tree(
    stage: _Stage, num_stages: int, tree: Any, strict: bool, donate: bool, chunk_bytes: int | None
) -> dict[int, jax.Array]:
    """Return a stage's new arrays by leaf index, from an nnx.State or nnx.Module with the engine's own structure, with
    or without matrices of no expert. An array that already has the engine's sharding and layout is not copied. strict:
    whether all weights must be given. donate: delete arrays that were copied. Raises WeightUpdateError with all faulty
    arrays, for several stages (num_stages), and for a weight that joins tensors and is split along the joined axis.
    """
    state = nnx.state(tree, nnx.Param) if isinstance(tree, nnx.Module) else tree
    given = {path: variable.get_value() for path, variable in nnx.to_flat_state(state)}
    if num_stages > 1:
        raise WeightUpdateError("an engine with pipeline stages has no tree of its own: give tensors by name")
    params = {param.path: param for param in declared_params(stage.model)}
    new, faults = {}, [(_text(path), "is not a weight of this engine") for path in given if path not in params]
    for index, (path, _) in enumerate(nnx.to_flat_state(nnx.state(stage.model))):
        if (param := params.get(path)) is None:
            continue
        name, old = param.name, stage.params[index]
        if path not in given:
            if strict:
                faults.append((name, "is missing"))
        elif (fault := fault_of(array := given[path])) is not None:
            faults.append((name, fault))
        elif array.shape not in (old.shape, param.own_shape) or array.dtype != old.dtype:
            faults.append((name, f"must be {old.dtype}{[*param.own_shape]}, got {array.dtype}{[*array.shape]}"))
        elif len(param.decl.sources) > 1 and num_parts(param, stage.mesh)[param.decl.joined_axis] > 1:
            raise WeightUpdateError(
                f"{name} joins {len(param.decl.sources)} tensors in an order that depends on the devices: "
                "give tensors by name"
            )
        elif not is_finite(array := on_device(array), chunk_bytes):
            faults.append((name, "has numbers that are not finite"))
        else:
            new[index] = array
    if faults:
        raise WeightUpdateError.of(faults)
    for index, array in new.items():
        if (array.shape, array.format) != ((old := stage.params[index]).shape, old.format):
            new[index] = jax.block_until_ready(moved(array, old, chunk_bytes))
            if donate:
                array.delete()
    return new


def _text(path: tuple[Any, ...]) -> str:
    """Return the dotted name of a leaf, given by its path in the tree."""
    return ".".join(map(str, path))
