"""Loader of declared parameters into sharded arrays: each process reads only its devices' parts.

A block of a weight is assembled on the host in the checkpoint's orientation and sent to its devices in the weight's own
dtype. It is transposed to [in, out] in that one copy, which a CPU keeps. In addition to the parts themselves, host
memory holds about one weight at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, SingleDeviceSharding

from jaxengine.models.build import build_abstract
from jaxengine.models.causal_lm import CausalLM
from jaxengine.models.config.tower import TowerConfig
from jaxengine.models.params.declare import DeclaredParam, declared_params
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.source import WHOLE, CheckpointNames, WeightSource
from jaxengine.models.params.stored_names import StoredNames, fault_in
from jaxengine.models.quantization.base.rules import Quantization
from jaxengine.models.weights.assembly import Assembly
from jaxengine.models.weights.huge_pages import HugePages
from jaxengine.models.weights.views.adapted import AdaptedSource
from jaxengine.models.weights.views.expert_rows import ExpertRowsSource
from jaxengine.models.weights.views.further_experts import FurtherExpertsSource
from jaxengine.models.weights.views.joined_rows import AlternatingRowsSource, JoinedRowsSource
from jaxengine.models.weights.views.kv_scales import KV_SCALES
from jaxengine.models.weights.views.merged import MergedSource
from jaxengine.models.weights.views.parts import (
    Block,
    column_axis,
    local_blocks,
    num_parts,
    put,
    sharding_of,
    source_row,
    tensor_name,
)
from jaxengine.models.weights.views.quantized import QuantizedSource, plain_shapes
from jaxengine.models.weights.views.renamed import RenamedSource, SharedBlocksSource
from jaxengine.models.weights.views.stacked import StackedSource, of_shapes

# Tensors that some checkpoints store and no model reads: tables of rope and counts of positions, which follow from the
# configuration, and scales of queries and of attention's weights, which are for attention in 8 bits.
IGNORABLE_SUFFIXES = (
    *(f".rotary_emb.{name}" for name in ("inv_freq", "original_inv_freq", "cos_cached", "sin_cached")),
    ".rotary_pos_emb.inv_freq",
    *(f".embeddings.{name}" for name in ("position_ids", "token_type_ids")),
    *(f".self_attn.{name}" for name in ("q_scale", "attn.q_scale", "q_proj.q_scale", "q_proj.output_scale")),
    *(f".self_attn.{name}" for name in ("prob_scale", "attn.prob_scale", "prob_output_scale")),
)
ROPE_FACTORS, ROPE_LONG, ROPE_SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_NOT_ROTATED = 1e30  # factor with which llama.cpp marks a pair of rope that is not rotated

Progress = Callable[[int, int, str], None]


def load_params(
    model_abstract: CausalLM,
    source: WeightSource,
    *,
    mesh: Mesh | None = None,
    progress: Progress | None = None,
    partial: bool = False,
    loaded: Mapping[tuple[Any, ...], jax.Array] = MappingProxyType({}),
    chunk_bytes: int | None = None,
) -> nnx.State:
    """Return the state of `model_abstract` with the weights of `source`.

    Args:
      model_abstract: from jaxengine.models.registry.build_model.
      source: an open checkpoint; it stays open.
      mesh: weights are split over it by their logical axes; None leaves them on the default device.
      progress: called after each weight with (bytes done, bytes in total, name of the weight); bytes as loaded, of the
        weight on all devices.
      partial: whether the source may lack tensors. Weights none of whose tensors exist are left out of the state.
      loaded: weights by path that are loaded already. Only names and shapes of their tensors are checked.
      chunk_bytes: bytes of tensors that are in host memory at a time, in addition to weights; None for a device's part
        of one.

    Each weight has its own dtype. Floating-point weights are converted from the checkpoint's dtype, and int32 weights
    from int64; others must be stored in theirs. Raises ModelFileError if a tensor is missing, has another shape than
    the model, is not used by the model, or has numbers of the wrong kind; its `others` are all further tensors with
    faults of names and shapes. Raises ValueError for a mesh that does not split a weight evenly, and for a model that
    reads some rows of a tensor twice or not at all.
    """
    params = list(declared_params(model_abstract))
    for param in params:
        num_parts(param, mesh)
    source, tied_copy = check_source(model_abstract, source, partial)
    loader = _Loader(source, mesh, tied_copy, _memory(mesh), chunk_bytes)
    if partial:
        present = set(source.names())
        params = [param for param in params if not present.isdisjoint(_tensors_of(param))]
    total = sum(param.num_bytes for param in params)
    done, found = 0, []
    for param in params:
        array = loaded[param.path] if param.path in loaded else loader.load(param)
        found.append((param.path, param.variable.replace(array)))
        done += param.num_bytes
        if progress is not None:
            progress(done, total, param.name)
    return nnx.from_flat_state(found)


def check_source(model_abstract: CausalLM, source: WeightSource, partial: bool = False) -> tuple[WeightSource, bool]:
    """Check a checkpoint's names and shapes, without reading a large weight. Returns a view of it with the tensors that
    the model declares, and whether a tied head is stored, too.

    partial: whether the checkpoint may lack weights. Raises ModelFileError, whose `others` are all further faults of
    names and shapes, and ValueError for a model that reads some rows of a tensor twice or not at all.
    """
    whole = _whole(model_abstract)
    held = _of_model(whole, source)
    source = QuantizedSource(held, declared_params(whole), whole.build.scheme, partial=partial)
    return source, _check_names(whole, source, partial)


def check_headers(model_abstract: CausalLM, source: WeightSource, *, kinds: bool) -> None:
    """Check a checkpoint's headers: names, shapes and, with `kinds`, the dtypes of tensors that are used as stored. No
    weight is read.

    kinds: False for a source that converts what it stores. Raises ModelFileError in the cases of `load_params`; its
    `others` are all further faults of names and shapes, or of dtypes. Raises ValueError for a model that reads some
    rows of a tensor twice or not at all.
    """
    check_source(model_abstract, source)
    if not kinds:
        return
    stored, faults = RenamedSource(source, model_abstract.checkpoint_names), {}
    present = set(stored.names())
    for param in declared_params(_whole(model_abstract)):
        for name in sorted(present & _tensors_of(param)):
            if fault := _kind_fault(param.dtype, stored.read(name, slice(0, 0)).dtype):
                faults.setdefault(name, fault)
    if faults:
        (name, text), *others = StoredNames(stored).faults(faults.items())
        raise ModelFileError(source.path, text, name, others=others)


def load_group(
    model_abstract: CausalLM, params: Sequence[DeclaredParam], source: WeightSource, mesh: Mesh | None
) -> dict[tuple[Any, ...], jax.Array]:
    """Return the weights `params` of a model by path, loaded from `source`.

    source: has all tensors of these weights; its other tensors are ignored. mesh: None for the default device. Raises
    ModelFileError for a tensor of a wrong shape or dtype. Whether the entire checkpoint fits the model (`check_source`)
    is not checked here.
    """
    held = QuantizedSource(_of_model(model_abstract, source, params), params, model_abstract.build.scheme)
    for param in params:
        for tensor, expert in product(param.decl.sources, range(param.decl.num_experts or 1)):
            _check_shape(held, tensor_name(tensor, expert), param.source_shape(tensor))
    loader = _Loader(held, mesh, False, _memory(mesh))
    return {param.path: loader.load(param) for param in params}


def begin_assembly(param: DeclaredParam, mesh: Mesh | None, chunk_bytes: int) -> Assembly:
    """Return an Assembly of a weight, to which tensors can be added in any order. chunk_bytes: the most bytes of a copy
    in host memory. mesh: None for the default device. Raises ValueError for a mesh that does not split the weight
    evenly.
    """
    return Assembly(param, mesh, _memory(mesh), chunk_bytes)


def add_tensors(
    model: CausalLM, params: Sequence[DeclaredParam], param: DeclaredParam, assembly: Assembly, source: WeightSource
) -> None:
    """Copy those tensors of the weight `param` that `source` has into its `assembly`. A tensor of the source may
    represent several of the model's, all of which belong to the weights `params`.

    Raises ModelFileError for a tensor of a wrong shape or dtype.
    """
    held = _of_model(model, source, params)
    names = {*held.names()}
    for tensor, expert in product(param.decl.sources, range(param.decl.num_experts or 1)):
        if (name := tensor_name(tensor, expert)) in names:
            _check_shape(held, name, param.source_shape(tensor))
    assembly.add(_Loader(held, None, False, None).read_rows, names)


def _check_shape(source: WeightSource, name: str, expected: tuple[int, ...]) -> None:
    """Raise ModelFileError unless the tensor `name` has the expected shape."""
    if (shape := tuple(source.shape(name))) != expected:
        raise fault_in(source, name, f"shape must be {expected}, got {shape}")


def _of_model(model: CausalLM, source: WeightSource, params: Iterable[DeclaredParam] | None = None) -> WeightSource:
    """Return a view of a checkpoint under the model's names, with a tensor for each expert.

    params: the weights that the tensors belong to; None for all of the model. Raises ModelFileError for two tensors
    with one name, constants of another value, and joined rows, stacks of experts or adapters that do not fit.
    """
    if isinstance(source, MergedSource):
        return source.added_to(_of_model(model, source.checkpoint, params))
    encoder, names = model.config.encoder, model.checkpoint_names
    source = RenamedSource(source if encoder is None else AdaptedSource(source, encoder.adaptation), names)
    if names.alternating:
        source = AlternatingRowsSource(source, names.alternating)
    if names.joined or names.divided:
        params = declared_params(model) if params is None else params
        source = JoinedRowsSource(source, names, plain_shapes(params, model.build.scheme))
    if model.config.shared_blocks is not None:
        source = SharedBlocksSource(source, model.config.shared_blocks)
    if (experts := model.config.experts) is None:
        return source
    if names.further_experts:
        source = FurtherExpertsSource(source, names.further_experts, experts.num_experts)
    if names.expert_rows is not None:
        return ExpertRowsSource(source, names.expert_rows, experts.num_experts)
    stacked = of_shapes(names.stacked_experts, source, model.config.hidden_size)
    scheme = model.build.scheme if isinstance(model.build.scheme, Quantization) else None
    counts = {"num_routed": experts.num_routed, "num_sinks": experts.num_sinks}
    return StackedSource(source, stacked, experts.num_experts, **counts, scheme=scheme)


def _memory(mesh: Mesh | None) -> HugePages | None:
    """Return a new allocator for weights of CPUs; None for devices with memory of their own."""
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    return HugePages() if device.platform == "cpu" else None


@dataclass(frozen=True)
class _Loader:
    """Loader of one checkpoint onto one mesh.

    Attributes:
      source: the checkpoint, under the model's names.
      mesh: the mesh of the weights; None for the default device.
      tied_copy: whether the head is stored, too, and must equal the embedding.
      memory: memory for weights of CPUs; None for devices with memory of their own.
      chunk_bytes: bytes of tensors in host memory at a time; None for a device's part of one.
    """

    source: WeightSource
    mesh: Mesh | None
    tied_copy: bool
    memory: HugePages | None
    chunk_bytes: int | None = None

    def load(self, param: DeclaredParam) -> jax.Array:
        """Return a weight on its devices, after its transfers are complete. Raises ModelFileError if a tensor cannot be
        read or does not fit.
        """
        if self.chunk_bytes is not None:
            assembly = Assembly(param, self.mesh, self.memory, self.chunk_bytes)
            assembly.add(self.read_rows)
            return assembly.finish()
        sharding, arrays = sharding_of(param, self.mesh), []
        for block in local_blocks(param, self.mesh):
            host = self._read_block(param, block)
            if param.decl.transposed:
                host = host.swapaxes(-1, -2)
            for device, columns in block.devices:
                target = None if device is None else SingleDeviceSharding(device)
                arrays.append(put(self._placed(_columns(param, host, columns)), param.decl, target))
            # Transfers are asynchronous: waiting here keeps at most one block's host copy alive.
            jax.block_until_ready(arrays)
            del host
        if sharding is None:
            return arrays[0]
        return jax.make_array_from_single_device_arrays(param.shape, sharding, arrays, dtype=param.dtype)

    def _placed(self, array: np.ndarray) -> np.ndarray:
        """Return a copy of an array in the memory where a CPU's weight stays; the array itself for other devices."""
        return array if self.memory is None else self.memory.copy(array)

    def _read_block(self, param: DeclaredParam, block: Block) -> np.ndarray:
        """Return a block in the checkpoint's orientation and the weight's dtype: [experts, rows, columns], or fewer
        axes.

        Rows of padding and matrices of no expert are zeros. Raises ModelFileError if a tensor cannot be read or does
        not fit.
        """
        decl, only = param.decl, param.decl.sources[0]
        parts = num_parts(param, self.mesh)[decl.joined_axis]
        if len(decl.sources) == 1 and only.num_contributed == only.rows and decl.num_experts is None:
            rows = source_row(only, np.arange(block.part * only.rows // parts, (block.part + 1) * only.rows // parts))
            return self.read_rows(only.name, rows, block.columns, param.dtype).astype(param.dtype, copy=False)
        num_rows = sum(source.num_contributed for source in decl.sources) // parts
        joined = np.zeros((*_lengths((block.experts,)), num_rows, *_lengths(block.columns)), param.dtype)
        for expert, out in zip(block.numbers(decl), joined, strict=False):
            start = 0
            for source in decl.sources:
                share = source.num_contributed // parts
                contributed = np.arange(block.part * share, (block.part + 1) * share)
                rows = source_row(source, contributed[contributed < source.rows * source.repeat])
                if len(rows):
                    name = tensor_name(source, expert)
                    out[start : start + len(rows)] = self.read_rows(name, rows, block.columns, param.dtype)
                start += share
        return joined if decl.num_experts is not None else joined[0]

    def read_rows(self, name: str, rows: np.ndarray, columns: tuple[slice, ...], dtype: Any) -> np.ndarray:
        """Return rows of a tensor by number, in its own dtype, which must be convertible to `dtype`.

        rows: numbers of neighbouring rows, possibly out of order and repeated. columns: a slice of the tensor's second
        axis, () if it has none. Raises ModelFileError for another dtype or shape, for integers that do not fit 32 bits,
        and for a tied head that differs from the embedding.
        """
        first, last = int(rows.min()), int(rows.max()) + 1
        index = (slice(first, last), *columns)
        array, expected = self.source.read(name, *index), _lengths(index)
        if array.shape != expected:
            raise fault_in(self.source, name, f"was announced with shape {expected}, but has {array.shape}")
        if fault := _kind_fault(dtype, array.dtype):
            raise fault_in(self.source, name, fault)
        if array.dtype == np.int64 and not np.array_equal(array, array.astype(np.int32)):
            raise fault_in(self.source, name, "a weight must hold integers of 32 bits, some have more")
        if self.tied_copy and name == EMBEDDING and not np.array_equal(array, self.source.read(HEAD, *index)):
            raise fault_in(self.source, HEAD, f"the head differs from {EMBEDDING}, but tie_word_embeddings is true")
        return array if (np.diff(rows) == 1).all() else array[rows - first]


def _kind_fault(dtype: Any, stored: Any) -> str:
    """Return why numbers of dtype `stored` cannot be those of a weight of `dtype`, "" if they can: floating-point
    numbers of any dtype for a floating-point weight, i64 for i32, otherwise the weight's own dtype.
    """
    floating = jnp.issubdtype(dtype, jnp.floating)
    if stored == dtype or (floating and jnp.issubdtype(stored, jnp.floating)):
        return ""
    if stored == np.int64 and dtype == jnp.int32:
        return ""
    return f"a weight must hold {'floating-point numbers' if floating else str(jnp.dtype(dtype))}, got {stored}"


def _lengths(spans: tuple[slice, ...]) -> tuple[int, ...]:
    """Return the number of elements of each slice; slices must have a start and a stop."""
    return tuple(span.stop - span.start for span in spans)


def _columns(param: DeclaredParam, host: np.ndarray, columns: slice) -> np.ndarray:
    """Return the slice `columns` of a block, which already has the weight's orientation, along its column axis; the
    whole block if it has none.
    """
    axis = column_axis(param.decl)
    return host if axis is None else host[tuple(columns if each == axis else WHOLE for each in range(host.ndim))]


def _whole(model: CausalLM) -> CausalLM:
    """Return the full abstract model to which the stage `model` belongs; `model` itself if it has all layers."""
    if len(model.stage.layers) == model.config.num_layers:
        return model
    return build_abstract(type(model), model.config, replace(model.build, stage=None))


def _check_names(model: CausalLM, source: WeightSource, partial: bool = False) -> bool:
    """Check that every tensor which the full model needs is present with its shape, and that every present tensor is
    needed or one of those that checkpoints have for other uses (`is_unread`), has no elements, is a bias of zeros of a
    quantised module, a head that equals the embedding or is not used for pooling, or has rope factors of the model's.

    partial: weights none of whose tensors are present are not needed. Returns whether a tied checkpoint stores the
    embedding a second time as the output head. Raises ModelFileError with all faults, and ValueError in the cases of
    `_needed_tensors`.
    """
    present, tied_copy, rope_factors, faults = set(source.names()), False, [], []
    known = _needed_tensors(model)
    needed = known if not partial else {name: known[name] for name in _begun(model, present)}
    for name, expected in needed.items():
        if name not in present:
            faults.append((name, "a tensor that the model needs is missing"))
        elif tuple(source.shape(name)) != expected:
            faults.append((name, f"shape must be {expected}, got {tuple(source.shape(name))}"))
    for name in sorted(present - known.keys()):
        if name in (ROPE_FACTORS, ROPE_LONG, ROPE_SHORT):
            rope_factors.append(name)
        elif name == HEAD and model.config.pooler is not None:
            continue  # a generative checkpoint that pools
        elif name == HEAD and EMBEDDING in known:
            if EMBEDDING not in present:
                faults.append((HEAD, f"tie_word_embeddings is true, and {EMBEDDING} is not there to compare"))
            elif source.shape(HEAD) != source.shape(EMBEDDING):
                faults.append((HEAD, f"has another shape than {EMBEDDING}, but tie_word_embeddings is true"))
            tied_copy = True
        elif 0 in source.shape(name):
            continue  # transformers writes the MLP of zero shared experts with an empty axis
        elif not is_unread(model, name) and not _is_zero_bias(source, name):
            faults.append((name, "the model has no use for this tensor"))
    if faults:
        (name, text), *others = StoredNames(source).faults(faults)
        raise ModelFileError(source.path, text, name, others=others)
    if rope_factors:
        _check_rope_factors(source, model, rope_factors)
    return tied_copy


def unread_towers(names: CheckpointNames, towers: Sequence[TowerConfig]) -> tuple[str, ...]:
    """Return beginnings of the names of the towers' tensors that are not read: tensors that the served towers leave
    unused, `names.sound_tower` if no served one hears, and `names.tower` if none is served that has these names: one of
    images or, without `names.sound_tower`, of sounds. towers: of the model as it is served.
    """
    unread = [beginning for tower in towers for beginning in tower.unused]
    if not any(tower.hears for tower in towers):
        unread += names.sound_tower
    if all(tower.hears and names.sound_tower for tower in towers):
        unread += names.tower
    return tuple(unread)


def is_unread(model: CausalLM, name: str) -> bool:
    """Return whether checkpoints of the model may have a tensor of this name that is ignored.

    These are tensors of a tower that is not served, of heads, those of ModelConfig.unread, of the layer that predicts
    further tokens, of experts without weights, for which transformers writes some, scales of cached keys and values,
    and IGNORABLE_SUFFIXES.
    """
    config, names = model.config, model.checkpoint_names
    others = *unread_towers(names, config.towers), *names.heads, *(old for old, _ in names.next_layer.placed(0))
    experts, zeros = config.experts, 0 if config.experts is None else config.experts.num_zero_experts
    if experts is not None and any(f".experts.{experts.num_experts + number}." in name for number in range(zeros)):
        return True
    return name.startswith((*others, *config.unread)) or name.endswith((*IGNORABLE_SUFFIXES, *KV_SCALES))


def _tensors_of(param: DeclaredParam) -> set[str]:
    """Return the names of the tensors that a weight is made of."""
    decl = param.decl
    return {tensor_name(tensor, expert) for tensor in decl.sources for expert in range(decl.num_experts or 1)}


def _begun(model: CausalLM, present: set[str]) -> list[str]:
    """Return the names, sorted, of all tensors of those weights for which at least one tensor is present."""
    tensors = [_tensors_of(param) for param in declared_params(model)]
    return sorted(set().union(*(each for each in tensors if not each.isdisjoint(present))))


def _is_zero_bias(source: WeightSource, name: str) -> bool:
    """Return whether the tensor `name` is a bias of zeros, as AutoGPTQ writes them for modules without a bias. Reads
    it. False for modules that are not quantised.
    """
    module, _, kind = name.rpartition(".")
    if kind != "bias" or not isinstance(source, QuantizedSource) or module not in source.modules:
        return False
    out, _ = source.modules[module][1].shape
    return tuple(source.shape(name)) == (out,) and not np.any(source.read(name))


def _needed_tensors(model: CausalLM) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that the model needs, by name.

    Several sources may read one tensor. Raises ValueError unless they expect the same shape and each of its rows is
    read exactly once.
    """
    shapes: dict[str, set[tuple[int, ...]]] = {}
    spans: dict[str, list[tuple[int, int]]] = {}
    for param in declared_params(model):
        for tensor in param.decl.sources:
            for expert in range(param.decl.num_experts or 1):
                name = tensor_name(tensor, expert)
                shapes.setdefault(name, set()).add(param.source_shape(tensor))
                spans.setdefault(name, []).extend(tensor.spans)
    for name, (shape, *others) in shapes.items():
        ends = [0, *(end for _, end in sorted(spans[name]))]
        firsts = [*(first for first, _ in sorted(spans[name])), shape[0]]
        if others or ends != firsts:
            read = ", ".join(f"[{first}, {end})" for first, end in sorted(spans[name]))
            raise ValueError(f"{name}: {shape[0]} rows must be read once each, by equal shapes; the model reads {read}")
    return {name: shape for name, (shape, *_) in shapes.items()}


def _check_rope_factors(source: WeightSource, model: CausalLM, names: list[str]) -> None:
    """Raise ModelFileError unless the model has a scaled rope and the scaling of each equals one of the tensors `names`
    of `source`, in which GGUF files store it, but for ones that follow. If there is a proportional rope, only that is
    compared: 1 for pairs that are rotated and 1e30 for the others.
    """
    stored = [source.read(name).ravel().astype(np.float32).tolist() for name in names]
    ropes = {each.rope for each in model.config.attention if each.rope is not None}
    kinds = [(rope, rope.scaling) for rope in ropes if rope.scaling is not None]
    partial = [rope for rope, scaling in kinds if scaling.rope_type == "proportional"]
    factors = [np.where(rope.frequencies() > 0, 1.0, _NOT_ROTATED) for rope in partial]
    lists = [np.asarray(own, np.float32).tolist() for own in factors or [scaling.factors for _, scaling in kinds]]
    fits = (any(each == own + [1.0] * (len(each) - len(own)) for each in stored) for own in lists)
    if not lists or not all(fits):
        raise ModelFileError(source.path, "the tensor scales rope, but the model's rope_scaling differs", names[0])
