"""Loader of tensors that arrive one after the other and are not all in memory at once.

A weight is loaded as soon as its last tensor has arrived; then its tensors are released. Weights that share a tensor
are loaded together, and so are all experts of a layer, which may arrive in one tensor or in many. Tensors that must be
compared with others, or to which others may belong, wait for the end: storage formats of their own, such as AWQ, and an
embedding that is also the head.

With chunk_bytes a tensor is copied to its position in the weight when it arrives. Only tensors that are rounded, or
have a storage format of their own, then wait.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxengine.models.causal_lm import CausalLM
from jaxengine.models.params.declare import DeclaredParam, declared_params
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.weights.assembly import Assembly, is_plain
from jaxengine.models.weights.formats.arrays import PATH, ArraySource, FiniteSource, Taken, fault_of
from jaxengine.models.weights.load import (
    EMBEDDING,
    HEAD,
    add_tensors,
    begin_assembly,
    check_source,
    is_unread,
    load_group,
    load_params,
)
from jaxengine.models.weights.views.parts import tensor_name
from jaxengine.models.weights.views.quantized import plain_name
from jaxengine.models.weights.views.renamed import is_of_block
from jaxengine.models.weights.views.stacked import BIAS, modules_in, split_stack

_EXPERTS = ".experts"

Stage = tuple[CausalLM, Mesh | None]


def load_streamed(
    stages: Sequence[Stage],
    tensors: Iterable[tuple[str, Any]],
    *,
    partial: bool = False,
    donate: bool = False,
    chunk_bytes: int | None = None,
) -> list[nnx.State]:
    """Load the weights of all stages of a model from tensors in any order; return each stage's state.

    Args:
      stages: abstract models, each with the mesh that its weights are split over.
      tensors: name and array (numpy or jax, of any sharding) of each tensor of a Hugging Face checkpoint.
      partial: whether tensors may be missing; weights none of whose tensors come are left out of the states.
      donate: whether jax arrays are deleted as soon as they have been loaded, also if a later one is at fault.
      chunk_bytes: bytes of copies of a tensor that are in host memory at a time. None holds tensors until their weight
        is complete.

    Raises ModelFileError and ValueError in the cases of `load_params`, and ModelFileError for a tensor that comes
    twice, is not an array or has numbers that are not finite. Its `others` are all further tensors whose names or
    shapes are at fault, and no more than one of the last kind.
    """
    stream = _Stream(stages, partial, donate, chunk_bytes)
    for name, array in tensors:
        stream.add(name, array)
        del array  # otherwise it would stay in memory while the next one is created
    return stream.finish()


@dataclass(eq=False)
class _Group:
    """Weights that are loaded together.

    Attributes:
      params: (index of its stage, weight) of each weight.
      missing: tensors that have not come yet, under the model's names and with one for each expert.
      held: arrays that have come and are not loaded yet, by the checkpoint's names.
      begun: weights to which tensors are added as they come, by stage and path.
    """

    params: list[tuple[int, DeclaredParam]] = field(default_factory=list)
    missing: set[str] = field(default_factory=set)
    held: dict[str, Any] = field(default_factory=dict)
    begun: dict[tuple[int, tuple[Any, ...]], Assembly] = field(default_factory=dict)


class _Stream:
    """State of loading tensors that come one after the other.

    Attributes:
      faults: descriptions of faults, by the tensor's name.
    """

    def __init__(self, stages: Sequence[Stage], partial: bool, donate: bool, chunk_bytes: int | None):
        self._stages, self._partial, self._donate, self._chunk_bytes = stages, partial, donate, chunk_bytes
        self._names = stages[0][0].checkpoint_names
        self._groups = _groups(stages, wait=chunk_bytes is None)
        # Digests of an embedding that is also the head, and of a head that is stored in addition, for comparison.
        self._digests: dict[str, bytes] = {}
        self._given: dict[str, Any] = {}
        self._loaded: list[dict[tuple[Any, ...], jax.Array]] = [{} for _ in stages]
        self.faults: dict[str, str] = {}

    def add(self, name: str, array: Any) -> None:
        """Take a tensor, and load the weights that it completes. Errors, also of a name that comes twice and of an
        object that is not an array, are recorded for `finish`.
        """
        if name in self._given:
            self.faults[name] = "is given twice"
        elif (fault := fault_of(array)) is not None:
            self.faults[name], self._given[name] = fault, Taken(tuple(getattr(array, "shape", ())))
        else:
            self._given[name] = array
            self._sort(name, array)

    def finish(self) -> list[nnx.State]:
        """Check all names and shapes, load what is left, and return each stage's state.

        Raises ModelFileError with all recorded faults and those of the check.
        """
        source = FiniteSource(ArraySource(self._given))
        try:
            if self.faults:
                check_source(self._stages[0][0], source, self._partial)
            else:
                return self._rest(source)
        except ModelFileError as error:
            found = {(error.where or error.path): error.what, **dict(error.others)}
            self.faults = found | self.faults
        (name, text), *others = self.faults.items()
        raise ModelFileError(PATH, text, name, others=others)

    def _rest(self, source: FiniteSource) -> list[nnx.State]:
        """Load what is left, release all tensors, and return each stage's state. Raises ModelFileError in the cases of
        `load_params`, and for a tied head that differs from the embedding.
        """
        if len({*self._digests.values()}) > 1:
            raise ModelFileError(PATH, f"the head differs from {EMBEDDING}, but tie_word_embeddings is true", HEAD)
        chunk_bytes = self._chunk_bytes
        states = [
            load_params(model, source, mesh=mesh, partial=self._partial, loaded=loaded, chunk_bytes=chunk_bytes)
            for (model, mesh), loaded in zip(self._stages, self._loaded, strict=True)
        ]
        source.close()
        self._let_go(self._given)
        return states

    def _sort(self, stored: str, array: Any) -> None:
        """Add a tensor, named as in the checkpoint, to its group, and load the weights that can be loaded. A tensor
        that no weight needs is released; of a tied head a digest is stored. Faults are recorded, not raised.
        """
        name = self._names.renamed(stored)
        tensors = _stands_for(name, self._groups, self._names)
        of_tied = self._chunk_bytes is not None and name in (EMBEDDING, HEAD) and HEAD not in self._groups
        if of_tied and self._stages[0][0].config.pooler is None:
            self._digests[name] = _digest(ArraySource({stored: array}), stored, self._chunk_bytes)
        if not tensors:  # of no weight, or of one that waits for the end
            if self._names.is_unused(stored) or is_unread(self._stages[0][0], name) or of_tied:
                self._given[stored] = Taken(tuple(array.shape))
                self._let_go({stored: array})
            return
        group = self._groups[next(iter(tensors))]
        if not tensors <= group.missing:
            self.faults[stored] = f"stands for {min(tensors - group.missing)}, which has come already"
        group.missing -= tensors
        group.held[stored] = array
        in_pieces = self._chunk_bytes is not None and _is_addable(group, self._names)
        if in_pieces or not group.missing:
            self._load(group, self._add if in_pieces else self._place)

    def _load(self, group: _Group, place: Callable[[_Group], None]) -> None:
        """Load the tensors that a group holds by calling `place`, unless a fault is already recorded, and release them:
        only their shapes remain (Taken), and donated arrays are deleted. A ModelFileError of `place` is recorded as
        faults.
        """
        if not self.faults:
            try:
                place(group)
            except ModelFileError as error:
                self.faults |= {(error.where or error.path): error.what, **dict(error.others)}
        self._given |= {name: Taken(tuple(array.shape)) for name, array in group.held.items()}
        held, group.held = group.held, {}
        self._let_go(held)

    def _add(self, group: _Group) -> None:
        """Add the tensors that a group holds to the assemblies of its weights, and store the weights that are then
        complete. Raises ModelFileError for a tensor of a wrong shape or dtype.
        """
        assert self._chunk_bytes is not None
        names = map(self._names.renamed, group.held)
        come = set().union(*(_stands_for(name, self._groups, self._names) for name in names))
        source = FiniteSource(ArraySource(group.held))
        for index, param in group.params:
            model, mesh = self._stages[index]
            tensors, key = _tensors_of(param, model), (index, param.path)
            if tensors.isdisjoint(come):
                continue
            if key not in group.begun:
                group.begun[key] = begin_assembly(param, mesh, self._chunk_bytes)
            add_tensors(model, [each for _, each in group.params], param, group.begun[key], source)
            if tensors.isdisjoint(group.missing):
                self._loaded[index][param.path] = group.begun.pop(key).finish()

    def _place(self, group: _Group) -> None:
        """Load and store a group's weights, and wait for their arrays, so that their tensors can be released. Raises
        ModelFileError for a tensor of a wrong shape or dtype.
        """
        for index, (model, mesh) in enumerate(self._stages):
            own = [param for stage, param in group.params if stage == index]
            if own:
                new = load_group(model, own, FiniteSource(ArraySource(group.held)), mesh)
                self._loaded[index] |= jax.block_until_ready(new)

    def _let_go(self, arrays: dict[str, Any]) -> None:
        """Delete the jax arrays among `arrays` if they are donated; otherwise do nothing."""
        if self._donate:
            for array in arrays.values():
                if isinstance(array, jax.Array) and not array.is_deleted():
                    array.delete()


def _groups(stages: Sequence[Stage], *, wait: bool) -> dict[str, _Group]:
    """Return the group of each tensor that can be loaded before all others have come. Weights that share a tensor, or
    experts of a layer that one tensor may have, are in one group.

    Keys are tensors' names, and "LAYER.experts" if one tensor may have all experts of a layer. wait: whether an
    embedding that is also the head is left out, because a separate head tensor may come. Blocks that several layers
    share are left out, too.
    """
    groups: dict[str, _Group] = {}
    params = [(index, param) for index, (model, _) in enumerate(stages) for param in declared_params(model)]
    needed = [_tensors_of(param, stages[index][0]) for index, param in params]
    is_tied = not any(HEAD in tensors for tensors in needed)
    waiting = set().union(*(tensors for tensors in needed if wait and is_tied and EMBEDDING in tensors))
    if stages[0][0].config.shared_blocks is not None:
        waiting |= {name for tensors in needed for name in tensors if is_of_block(name)}
    for place, tensors in zip(params, needed, strict=True):
        if not tensors or tensors & waiting:
            continue
        keys = tensors | {_layer_of(name) for name in tensors if _layer_of(name)}
        joined = {id(groups[key]): groups[key] for key in keys if key in groups}
        group = _Group([place], set(tensors))
        for other in joined.values():
            group.params += other.params
            group.missing |= other.missing
        more = {key for key, other in groups.items() if id(other) in joined} if joined else set()
        for key in keys | more:
            groups[key] = group
    return groups


def _is_addable(group: _Group, names: CheckpointNames) -> bool:
    """Return whether tensors can be added to a group's weights one by one: none is rounded or has a format of its own,
    and the orientation of a tensor of all experts does not depend on another tensor.
    """
    known = names.stacked_experts.out_first is not None
    return all(
        is_plain(source) and (known or param.decl.num_experts is None)
        for _, param in group.params
        for source in param.decl.sources
    )


def _digest(source: ArraySource, name: str, chunk_bytes: int | None) -> bytes:
    """Return the SHA-256 of a matrix's shape and of its numbers as float32, with -0 as 0. Rows of at most chunk_bytes,
    which must be given, are read at a time.
    """
    shape, digest = source.shape(name), hashlib.sha256()
    digest.update(repr(shape).encode())
    assert chunk_bytes is not None
    step = max(1, chunk_bytes // (12 * max(1, math.prod(shape[1:]))))
    for first in range(0, shape[0] if shape else 0, step):
        digest.update((source.read(name, slice(first, first + step)).astype(np.float32) + 0.0).data)  # -0 is 0
    return digest.digest()


def _tensors_of(param: DeclaredParam, model: CausalLM) -> set[str]:
    """Return the names of the tensors that a weight is read from; an empty set if a storage format determines them. For
    matrices that are rounded at load they are the plain tensors.
    """
    found = set[str]()
    for source in param.decl.sources:
        if (name := plain_name(source.name, model.build.scheme)) is None:
            return set()
        plain = source._replace(name=name)
        found |= {tensor_name(plain, expert) for expert in range(param.decl.num_experts or 1)}
    return found


def _layer_of(name: str) -> str:
    """Return the name of all experts of a layer, "LAYER.experts", for a tensor of one of them; "" for other tensors."""
    layer, found, _ = name.rpartition(f"{_EXPERTS}.")
    return f"{layer}{_EXPERTS}" if found else ""


def _stands_for(name: str, groups: dict[str, _Group], names: CheckpointNames) -> set[str]:
    """Return the tensors of a group that the tensor `name` represents: itself, those whose rows it joins, or those of
    all experts that it contains; an empty set if no group has it.
    """
    if name in groups:
        return {name} if not name.endswith(_EXPERTS) else set()
    if parts := [part for part in names.parts_of_rows(name) if part in groups]:
        return {*parts}
    layer, stem, kind = split_stack(name) or ("", "", "")
    if layer not in groups or kind not in ("", BIAS):
        return set()
    ends = tuple(f".{module}.{'bias' if kind else 'weight'}" for module in modules_in(stem, names.stacked_experts))
    return {key for key, group in groups.items() if _layer_of(key) == layer and key.endswith(ends)}
