"""Parameter declarations: shape, dtype, logical axes and checkpoint names of a weight, declared where it is used.

Sharding, loading, random initialisation and the memory plan are all derived from these declarations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx

from jaxengine.sharding.layout import MeshLayout

# Where the layers of towers are; one whose embeddings are multiplied is the inside of a Scaled.
_TOWER_LAYERS = (("tower", "layers"), ("tower", "inner", "layers"), ("sound_tower", "layers"))


class Source(NamedTuple):
    """A checkpoint tensor, [tensor_rows, ...], or some of its rows, and its contribution to a weight.

    Attributes:
      name: Hugging Face's name of a module if a scheme determines the module's tensors, otherwise of a tensor.
        "{layer}" is replaced by the number of the weight's layer in the model or its tower, "{pair}" and "{half}" by
        that number divided by two and its remainder, "{expert}" by the index of the expert.
      rows: number of rows of the tensor that are used.
      repeat: how many times every `group` rows (those of a head) are contributed in succession.
      padding: number of rows of zeros that are contributed after the tensor's rows.
      first: the first row that is used.
      tensor_rows: number of rows of the tensor if other sources use some of them.
      stride: if there are other rows between runs of rows, the distance between the first rows of successive runs.
      run: number of rows of a run, a multiple of `group` and a divisor of `rows`; None for `group`.
    """

    name: str
    rows: int
    repeat: int = 1
    group: int = 1
    padding: int = 0
    first: int = 0
    tensor_rows: int | None = None
    stride: int | None = None
    run: int | None = None

    @property
    def num_contributed(self) -> int:
        """Number of rows of the weight that come from this tensor, including padding."""
        return self.rows * self.repeat + self.padding

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Ranges (first, end) of the tensor's rows that are used, without end, in the order of use."""
        if self.stride is None:
            return [(self.first, self.first + self.rows)]
        run = self.run or self.group
        firsts = range(self.first, self.first + self.rows // run * self.stride, self.stride)
        return [(first, first + run) for first in firsts]

    def tensor(self, kind: str) -> Source:
        """Return the Source of the same rows of the module's tensor `kind`, such as "weight" or "bias"."""
        return self._replace(name=f"{self.name}.{kind}")


def parts_of(name: str, *rows: int) -> tuple[Source, ...]:
    """Return Sources of consecutive parts of one tensor, with these numbers of rows; for example q, k and v in a
    checkpoint that joins them.
    """
    firsts = [sum(rows[:index]) for index in range(len(rows))]
    return tuple(
        Source(name, count, first=first, tensor_rows=sum(rows)) for count, first in zip(rows, firsts, strict=True)
    )


@dataclass(frozen=True)
class ParamDecl:
    """Description of a weight, in addition to its shape and dtype. It is equal for equal layers, so that they share one
    trace.

    The sources' contributions are joined along their first axis, in order, and then transposed if `transposed`, since a
    linear weight is [out, in] in checkpoints and [in, out] in the model. With `num_experts` the weight has an
    additional first axis, and each of its entries comes from one expert's tensors.

    If the joined axis is split over n devices, each has one n-th of every source's contribution, one after the other (q
    | k | v of its own heads). So the order in the whole weight depends on the mesh, but the order in a part does not.

    Attributes:
      axes: logical axes of the weight (jaxengine.sharding.rules).
      sources: the checkpoint tensors that form it.
      transposed: whether the joined contributions are transposed.
      init_std: standard deviation of dummy weights; None if all elements are `init_value`.
      num_experts: number of experts of a stack; None for a weight without experts. The first axis may be longer, so
        that devices can share it equally: the matrices after those of the experts are not used.
      row_major: whether rows, or the matrices of a stack, must be contiguous in memory because they are read one by
        one. Otherwise a TPU may choose another order that saves padding, and then transpose the entire weight in every
        step.
      transposed_on_gpu: whether columns of the matrix are contiguous on GPUs whose kernels read them so. On other
        devices the order follows `row_major`.
    """

    axes: tuple[str | None, ...]
    sources: tuple[Source, ...]
    transposed: bool = False
    init_std: float | None = None
    init_value: float = 1.0
    num_experts: int | None = None
    row_major: bool = False
    transposed_on_gpu: bool = False

    @property
    def joined_axis(self) -> int:
        """Axis of the weight along which sources are joined: the last if transposed, else the first but that of
        experts.
        """
        return len(self.axes) - 1 if self.transposed else int(self.num_experts is not None)


@dataclass(frozen=True)
class DeclaredParam:
    """One weight of a built model.

    Attributes:
      path: keys that lead to it in the module tree.
      variable: its flax variable.
      decl: its declaration, with the layer's number in names.
      layer: number of its layer in the whole model; None outside of the layers.
    """

    path: tuple[Any, ...]
    variable: nnx.Param
    decl: ParamDecl
    layer: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.variable.get_value().shape

    @property
    def own_shape(self) -> tuple[int, ...]:
        """The shape without matrices of no expert."""
        return self.shape if self.decl.num_experts is None else (self.decl.num_experts, *self.shape[1:])

    @property
    def dtype(self) -> Any:
        return self.variable.get_value().dtype

    @property
    def name(self) -> str:
        """The path, joined by dots."""
        return ".".join(str(part) for part in self.path)

    @property
    def num_bytes(self) -> int:
        """Size of the weight on all devices together, in bytes."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize

    def most_parts(self, axis: int) -> int:
        """Return the largest number of equal parts into which an axis can be split. Other numbers of parts must be
        divisors of it.

        On the axis along which sources are joined, each part has an equal share of every source, in whole groups.
        """
        if axis != self.decl.joined_axis:
            return self.shape[axis]
        return math.gcd(*(source.num_contributed // source.group for source in self.decl.sources))

    def splits_over(self, mesh: MeshLayout) -> bool:
        """Return whether every axis can be split evenly over the devices of the mesh; see `most_parts` for the axis
        along which sources are joined.
        """
        parts = map(mesh.num_shards, self.decl.axes)
        return all(self.most_parts(axis) % count == 0 for axis, count in enumerate(parts))

    def source_shape(self, source: Source) -> tuple[int, ...]:
        """Return the shape of the whole checkpoint tensor of `source`, one of the weight's sources."""
        shape = self.shape if self.decl.num_experts is None else self.shape[1:]
        joined = shape[::-1] if self.decl.transposed else shape
        return (source.tensor_rows or source.rows, *joined[1:])


def declare(shape: tuple[int, ...], dtype: Any, decl: ParamDecl) -> nnx.Param:
    """Return a new parameter of a module, filled with zeros until jaxengine.models.weights loads its values. Raises
    ValueError for sources or axes that do not fit the shape, and for a first axis shorter than `num_experts`.
    """
    rows = sum(source.num_contributed for source in decl.sources)
    if len(decl.axes) != len(shape) or shape[decl.joined_axis] != rows or shape[0] < (decl.num_experts or 0):
        raise ValueError(f"declaration {decl} does not fit a weight of shape {shape}")
    return nnx.Param(jnp.zeros(shape, dtype), decl=decl)


def numbered(name: str, layer: int | None) -> str:
    """Return the name of a Source with "{layer}" replaced by the layer's number, "{pair}" by half of it, rounded down,
    and "{half}" by the remainder of that division. If `layer` is None, return `name` unchanged.
    """
    if layer is None:
        return name
    return name.replace("{layer}", str(layer)).replace("{pair}", str(layer // 2)).replace("{half}", str(layer % 2))


def declared_params(model: Any) -> Iterator[DeclaredParam]:
    """Yield the weights of a model or of a part of one, abstract or real, in module order, with the number that the
    checkpoint stores the layer under, or that of a tower's block, in the names of sources; other names are unchanged. A
    model and its towers must have their layers, in order, in an attribute `layers`
    (jaxengine.models.causal_lm.CausalLM).
    """
    for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        decl: ParamDecl = param.get_metadata()["decl"]
        layer = model.stage.layers[path[1]] if path[0] == "layers" else None
        of_tower = [path[len(place)] for place in _TOWER_LAYERS if path[: len(place)] == place]
        number: Any = of_tower[0] if of_tower else None if layer is None else model.config.stored_layer(layer)
        sources = tuple(source._replace(name=numbered(source.name, number)) for source in decl.sources)
        yield DeclaredParam(path, param, replace(decl, sources=sources), layer)
