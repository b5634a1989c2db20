"""Conversion of an adapter's matrices to a slot of each pool, and creation of empty pools."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxengine.models.config.altup import SharedBlocks
from jaxengine.models.config.lora import LoraSpec
from jaxengine.models.lora import DeclaredPool, PoolArray, declared_pools
from jaxengine.models.params.declare import declared_params
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.weights.views.parts import format_of, source_row, tensor_name
from jaxengine.models.weights.views.stacked import DOWN, GATE_UP, UP
from jaxengine.sharding.rules import named_sharding

# Module name to A [r, in] and B [out, r], scaled, in a checkpoint's orientation.
Matrices = Mapping[str, tuple[np.ndarray, np.ndarray]]

_OF_MODULES = (".weight", ".bias")  # ends of the names of a module's tensors
POOLS = "adapters of"  # prefix of the names of pools


@dataclass(frozen=True)
class ExpertTargets:
    """Matrices of a layer's experts, which an adapter may have one by one or for all experts together.

    Attributes:
      num_experts: number of experts of the layer.
      num_routed: the same with those that have no weights, which transformers' first stack of LongCat has all the same.
      joined: for GATE_UP, or UP of experts without a gate, and for DOWN (transformers' names of the stacks), the
        modules in each, with "{expert}" in their names.
      interleaved: whether rows of gate and up alternate in the stack.
    """

    num_experts: int
    num_routed: int
    joined: Mapping[str, tuple[str, ...]]
    interleaved: bool

    def rows_of_parts(self, parts: int, rows: int) -> list[slice]:
        """Return, for each of a stack's `parts` modules, the slice of its rows in one expert's matrix of `rows` rows:
        consecutive parts or, if `interleaved`, every `parts`-th row.
        """
        own = rows // parts
        if self.interleaved:
            return [slice(part, None, parts) for part in range(parts)]
        return [slice(part * own, (part + 1) * own) for part in range(parts)]


@dataclass(frozen=True)
class AdapterTargets:
    """Modules of a model that an adapter may change.

    Attributes:
      shapes: (inputs, outputs) of each checkpoint module that takes adapters; each matrix of an expert is a module.
      experts: targets of each layer with experts, by the prefix of their names: "...mlp.experts".
      others: modules of the model that take no adapters.
      names: mapping from the checkpoint's names to the model's.
      parts: for each module that only transformers has, the module whose matrix the checkpoint joins from it and
        others, and the slice of its rows.
      wholes: for each module that only transformers has, the modules whose matrices it joins, in the order of its rows.
      blocks: blocks that layers share, whose lists of low-rank products an adapter's file names; None without any.
      tensors: tensors of the model, other than the weights and biases of modules, that take no adapters under their own
        names; PEFT may change them as parameters of modules. Among them are the matrices of all experts of a layer.
      unused: modules by whose matrices no layer multiplies, though transformers has them or had them in older releases:
        keys and values of layers that take those of another layer.
    """

    shapes: Mapping[str, tuple[int, int]]
    experts: Mapping[str, ExpertTargets]
    others: frozenset[str]
    names: CheckpointNames
    parts: Mapping[str, tuple[str, slice]] = field(default_factory=dict)
    wholes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    blocks: SharedBlocks | None = None
    unused: frozenset[str] = frozenset()
    tensors: frozenset[str] = frozenset()

    def is_unused(self, stored: str) -> bool:
        """Return whether no layer multiplies by the matrix of a module, given its name in an adapter's file: one of
        `unused`, or a low-rank product that a layer's block lists for another layer. An adapter of it changes nothing.
        """
        if self.blocks is not None and self.blocks.own_name(stored) is None:
            return True
        return self.module(stored) in self.unused

    def is_beside(self, module: str) -> bool:
        """Return whether a module, by its name in the model or in an adapter's file, is in a tower of the family or in
        a part of its checkpoints that is not read.
        """
        named = f"{module}.weight"
        return named.startswith((*self.names.tower, *self.names.sound_tower)) or self.names.is_unused(named)

    def sides(self, module: str) -> tuple[int, int]:
        """Return (inputs, outputs) of a module of `shapes`, `parts` or `wholes`. Raises KeyError for another one."""
        if module in self.wholes:
            sizes = [self.shapes[part] for part in self.wholes[module]]
            return sizes[0][0], sum(out for _, out in sizes)
        if module not in self.parts:
            return self.shapes[module]
        joined, rows = self.parts[module]
        return self.shapes[joined][0], rows.stop - rows.start

    def module(self, stored: str) -> str:
        """Return the model's name of a module, or of a layer's experts, given its name in an adapter's file, which may
        lack the common beginning of names, as those of a model without its head do.

        A name that the model does not have is returned with the renaming of the checkpoint's names.
        """
        stored = stored if self.blocks is None else self.blocks.own_name(stored) or stored
        names = [self.names.renamed(f"{stored}.weight").removesuffix(".weight"), self.names.renamed(stored)]
        whole = self.names.base + stored
        names += [self.names.renamed(f"{whole}.weight").removesuffix(".weight"), self.names.renamed(whole)]
        for known in (self.shapes, self.experts, self.wholes, self.others, self.unused, self.tensors):
            if (found := next((name for name in names if name in known), None)) is not None:
                return found
        return names[1]

    def is_expert(self, module: str) -> bool:
        """Return whether `module` is a matrix of a single expert."""
        return module.rsplit(".", 2)[0] in self.experts

    def stored_names(self, module: str) -> list[str]:
        """Return the names that an adapter's file may have for a module of the model, its own name first, then with the
        family's parts, suffixes and prefixes changed back.
        """
        parts = self.names.parts_of(module)
        names = [module, *(f"{module}.weight".replace(own, part)[: -len(".weight")] for part, own in parts)]
        ends = [(old.removesuffix(".weight"), new.removesuffix(".weight")) for old, new in self.names.suffixes]
        names += [module.removesuffix(new) + old for old, new in ends if module.endswith(new)]
        return [*names, *(old + n[len(new) :] for n in names for old, new in self.names.prefixes if n.startswith(new))]


def targets_of(models: Iterable[Any]) -> AdapterTargets:
    """Return the targets of one model, given its stages, abstract or real: modules with pools, and as `others` the
    modules of all other weights, including lm_head unless the model pools.
    """
    shapes: dict[str, tuple[int, int]] = {}
    experts: dict[str, ExpertTargets] = {}
    tensors, singles = set[str](), set[str]()
    parts: dict[str, tuple[str, slice]] = {}
    names, blocks, unused = CheckpointNames(), None, frozenset[str]()
    for model in models:
        names, blocks = model.checkpoint_names, model.config.shared_blocks
        taking = [number for number, layer in enumerate(model.config.attention) if layer.kv_source is not None]
        unused = frozenset(f"model.layers.{each}.self_attn.{part}_proj" for each in taking for part in "kv")
        for pool in declared_pools(model):
            if pool.decl.num_experts is not None:
                shapes |= _of_experts(pool, model, experts)
            elif pool.decl.part is None:
                for source in pool.decl.sources:
                    shapes[source.name] = pool.shape[1], source.tensor_rows or source.rows
                parts |= _divided(pool, names)
        for param in declared_params(model):
            own = {source.name for source in param.decl.sources}
            tensors |= {name.rpartition(".")[0] for name in own}
            stacks = {name.removesuffix(".weight").replace("{expert}.", "") for name in own if "{expert}." in name}
            singles |= stacks | {name for name in own if not name.endswith(_OF_MODULES)}
        if model.config.pooler is None:
            tensors.add("lm_head")  # transformers has one even where its weight is the token table
    others = frozenset(name for name in tensors - shapes.keys() if "{expert}" not in name)
    single = frozenset(f"{layer}.{part}" for layer, own in experts.items() for part in own.joined) | singles
    return AdapterTargets(shapes, experts, others, names, parts, _wholes(shapes, names), blocks, unused, single)


def _wholes(shapes: Mapping[str, Any], names: CheckpointNames) -> dict[str, tuple[str, ...]]:
    """Return AdapterTargets.wholes: those of CheckpointNames.joined whose parts are all in `shapes`."""
    found, ends = {}, [part for parts in names.joined.values() for part in parts[:1]]
    for module in shapes:
        for end in (end for end in ends if f"{module}.weight".endswith(end)):
            stem = f"{module}.weight".removesuffix(end)
            for whole, parts in names.joined.items():
                own = tuple(f"{stem}{part}".removesuffix(".weight") for part in parts)
                if parts[0] == end and all(part in shapes for part in own):
                    found[f"{stem}{whole}".removesuffix(".weight")] = own
    return found


def _divided(pool: DeclaredPool, names: CheckpointNames) -> dict[str, tuple[str, slice]]:
    """Return AdapterTargets.parts of an `a` pool: the rows of its sources under transformers' names, whose order is
    that of the rows; the product may have the sources in another (Molmo 2's gate comes after up).
    """
    ends = ((own, parts) for own, parts in names.divided.items() if pool.decl.modules[0].endswith(own))
    return {
        source.name.removesuffix(own) + part: (source.name, slice(source.first, source.first + source.rows))
        for own, parts in ends
        for source, part in zip(sorted(pool.decl.sources, key=lambda rows: rows.first), parts, strict=True)
    }


def _of_experts(pool: DeclaredPool, model: Any, found: dict[str, ExpertTargets]) -> dict[str, tuple[int, int]]:
    """Return (inputs, outputs) of the modules of an `a` pool of experts by name, for each expert; {} for a `b` pool.
    Adds the ExpertTargets of its layer to `found`.
    """
    count, sources = pool.decl.num_experts, pool.decl.sources
    if pool.decl.part is not None or count is None:
        return {}
    prefix = sources[0].name.partition(".{expert}.")[0]
    before = found[prefix].joined if prefix in found else {}
    part = DOWN if pool.decl.axes[-1] != "embed" else UP if len(sources) == 1 else GATE_UP
    joined = {**before, part: pool.decl.modules}
    num_routed = count + model.config.experts.num_zero_experts
    found[prefix] = ExpertTargets(count, num_routed, joined, model.checkpoint_names.stacked_experts.interleaved)
    sizes = {source: (pool.shape[-1], source.tensor_rows or source.rows) for source in sources}
    return {tensor_name(source, expert): size for source, size in sizes.items() for expert in range(count)}


def with_pools(model: Any, params: nnx.State, mesh: Mesh | None) -> nnx.State:
    """Return the model's state with the loaded weights and, if the model has adapter pools, zeros for them.

    params: result of load_params, with all weights. mesh: where pools are placed; None for the default device. Raises
    KeyError for a weight that `params` lacks.
    """
    loaded = dict(nnx.to_flat_state(params))
    state = []
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        if isinstance(variable, PoolArray):
            like, axes = variable.get_value(), variable.get_metadata()["decl"].axes
            sharding = None if mesh is None else named_sharding(mesh, axes)
            state.append((path, variable.replace(jax.device_put(np.zeros(like.shape, like.dtype), sharding))))
        else:
            state.append((path, loaded[path]))
    return nnx.from_flat_state(state)


def abstract_leaves(model: Any, mesh: Mesh) -> list[tuple[str, jax.ShapeDtypeStruct]]:
    """Return (name, shape with dtype, sharding and layout) of each leaf of an abstract model's state on the mesh:
    weights and adapter pools, in the order of the leaves.
    """
    pools, params, leaves = {pool.index: pool for pool in declared_pools(model)}, declared_params(model), []
    for index in range(len(nnx.to_flat_state(nnx.state(model)))):
        if (pool := pools.get(index)) is not None:
            name = f"{POOLS} {', '.join(pool.decl.modules)}"
            leaf = jax.ShapeDtypeStruct(pool.shape, pool.dtype, sharding=named_sharding(mesh, pool.decl.axes))
        else:
            param = next(params)
            stored = format_of(param.decl, named_sharding(mesh, param.decl.axes))
            name, leaf = param.name, jax.ShapeDtypeStruct(param.shape, param.dtype, sharding=stored)
        leaves.append((name, leaf))
    return leaves


def slot_shape(pool: DeclaredPool, spec: LoraSpec) -> tuple[int, ...]:
    """Return the shape of one adapter's part of a pool: [modules * rank, in] for `a` and [rank, out] for `b`, with rank
    spec.max_lora_rank. For experts it is the pool's shape with 1 as its second dimension, that of slots.
    """
    if pool.decl.num_experts is not None:
        return pool.shape[0], 1, *pool.shape[2:]
    if pool.decl.part is None:
        return len(pool.decl.modules) * spec.max_lora_rank, pool.shape[1]
    return spec.max_lora_rank, pool.shape[1]


def slot_values(pool: DeclaredPool, spec: LoraSpec, matrices: Matrices) -> np.ndarray:
    """Return the values of one adapter's part of a pool, in `slot_shape` and the pool's dtype.

    matrices: A [r, in] and B [out, r] by module, r at most spec.max_lora_rank. Unused ranks, and modules that the
    adapter does not change, are zeros.
    """
    values, rank = np.zeros(slot_shape(pool, spec), pool.dtype), spec.max_lora_rank
    if pool.decl.num_experts is not None:
        return _values_of_experts(pool, rank, matrices, values)
    if pool.decl.part is None:
        for index, module in enumerate(pool.decl.modules):
            if module in matrices:
                a = matrices[module][0]
                values[index * rank : index * rank + len(a)] = a
        return values
    source = pool.decl.sources[pool.decl.part]
    if source.name in matrices:
        b = matrices[source.name][1]
        rows = source_row(source, np.arange(source.rows * source.repeat))
        values[: b.shape[1], : len(rows)] = b[rows].T
    return values


def _values_of_experts(pool: DeclaredPool, rank: int, matrices: Matrices, values: np.ndarray) -> np.ndarray:
    """Write the matrices of the experts that the adapter changes to `values`, zeros of `slot_shape`, and return it.
    rank: the pool's LoRA rank.
    """
    sources = pool.decl.sources if pool.decl.part is None else (pool.decl.sources[pool.decl.part],)
    for expert, own in enumerate(values[:, 0]):
        for source in sources:
            if (pair := matrices.get(tensor_name(source, expert))) is None:
                continue
            a, b = pair
            if pool.decl.part is None:
                first = pool.decl.modules.index(source.name) * rank
                own[first : first + len(a)] = a
            else:
                own[: b.shape[1]] = b[source_row(source, np.arange(source.rows * source.repeat))].T
    return values
