"""Stored: storage format of a quantised matrix in a checkpoint, and its conversion to codes, scales and zeros.

Whatever a file's own layout, a format returns codes [out, in], scales [out, n] and, for some, zeros [out, n], with
a weight of codes * scales - zeros: n scales along the inputs, each for in / n neighbours, the last perhaps for fewer.
Independent of layers, meshes and file formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import ml_dtypes
import numpy as np

from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.source import WHOLE, WeightSource
from jaxengine.models.params.stored_names import fault_in
from jaxengine.pallas_kernels.matmul.rounding import E4M3, E8M0, FLOAT32, UE8M0

Shape = tuple[int, ...]
_E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)  # exponents plus 127
_SCALES = {FLOAT32: "", UE8M0: ", powers of two", E8M0: ", powers of two", E4M3: " with scales of e4m3"}


@dataclass(frozen=True)
class Activation:
    """Rounding of the rows that a matrix is multiplied with.

    Attributes:
      dtype: "int8", "float8_e4m3fn" or "float4_e2m1fn".
      group: number of inputs that share a scale, computed from their largest value; None for the entire row.
      static: whether the checkpoint has one scale for all rows. With scales of E4M3 it is their global divisor, as it
        is for weights.
      bound: limit of the largest value from which a scale is computed; None for none.
      scales: rounding of computed scales (jaxengine.pallas_kernels.matmul.rounding.SCALES).
    """

    dtype: str
    group: int | None = None
    static: bool = False
    bound: float | None = None
    scales: str = FLOAT32

    @property
    def microscaled(self) -> bool:
        """Whether rows are multiplied with their scales applied (see `microscaled_rows`): if groups have at most 32
        inputs and scales are not plain float32.
        """
        return self.group is not None and self.group <= 32 and self.scales != FLOAT32

    def __str__(self) -> str:
        how = "static" if self.group is None and self.static else "dynamic"
        how += "" if self.group is None else f", groups of {self.group}"
        return f"{self.dtype} ({how}{_SCALES[self.scales]})"


class StoredModule(NamedTuple):
    """One module of an open checkpoint whose matrix is quantised.

    Attributes:
      source: the checkpoint.
      name: the module's name in it.
      shape: (out, in) of the matrix.
      present: names of all tensors of the checkpoint.
      chunk: number of rows after which the layout of a joined matrix's rows repeats; None for other matrices.
    """

    source: WeightSource
    name: str
    shape: tuple[int, int]
    present: frozenset[str] | set[str]
    chunk: int | None = None

    def tensor(self, kind: str) -> str:
        """Return the checkpoint's name of the module's tensor `kind`."""
        return f"{self.name}.{kind}"

    def has(self, kind: str) -> bool:
        """Return whether the checkpoint has the module's tensor `kind`."""
        return self.tensor(kind) in self.present

    def first_of(self, *kinds: str) -> str:
        """Return the first of these kinds whose tensor the checkpoint has; the first kind if it has none of them."""
        return next((kind for kind in kinds if self.has(kind)), kinds[0])

    def read(self, kind: str, dtype: str | None = None, rows: slice = WHOLE, columns: slice = WHOLE) -> np.ndarray:
        """Return a part of the module's tensor `kind`, which must have `dtype`. If that is None it must have
        floating-point numbers, which are converted to f32.

        Raises ModelFileError for another dtype, or if reading fails.
        """
        array = self.source.read(self.tensor(kind), rows, columns)
        if dtype is not None:
            if str(array.dtype) != dtype:
                raise self.fail(kind, f"must hold {dtype}, got {array.dtype}")
            return array
        if not np.issubdtype(array.dtype, np.floating) and array.dtype not in (ml_dtypes.bfloat16, _E8M0):
            raise self.fail(kind, f"must hold floating-point numbers, got {array.dtype}")
        return array.astype(np.float32)

    def fail(self, kind: str, text: str) -> ModelFileError:
        """Return, for the caller to raise, the error that the module's tensor `kind`, by the checkpoint's own name, has
        the fault described by `text`.
        """
        return fault_in(self.source, self.tensor(kind), text)


class Stored(Protocol):
    """Storage format of the matrices of some modules. Frozen and hashable, with a complete repr."""

    @property
    def format(self) -> str:
        """Name of the format, for display."""
        ...

    @property
    def dtype(self) -> str:
        """Dtype of the codes; "float32" if they are the values themselves, which do not stay quantised."""
        ...

    @property
    def group(self) -> int | None:
        """Number of inputs per scale; None for all inputs."""
        ...

    @property
    def has_zeros(self) -> bool:
        """Whether weights are codes * scales - zeros; otherwise codes * scales."""
        ...

    @property
    def reordered(self) -> bool:
        """Whether inputs are permuted so that neighbours share scales ("act-order")."""
        ...

    @property
    def activation(self) -> Activation | None:
        """Rounding of the rows to be multiplied; None for none."""
        ...

    def tensors(self, module: StoredModule) -> Mapping[str, tuple[Shape, ...]]:
        """Return the tensors that the module must have, by name suffix, with the shapes that each may have."""
        ...

    def optional(self, module: StoredModule) -> Mapping[str, tuple[Shape, ...]]:
        """Return the tensors that the module may have in addition, by name suffix, with the shapes that each may
        have.
        """
        ...

    def check(self, module: StoredModule) -> None:
        """Raise ModelFileError for values that the format does not allow. No complete matrix is read."""
        ...

    def codes(self, module: StoredModule, rows: slice, columns: slice) -> np.ndarray:
        """Return the codes [rows, columns], in newly allocated memory, in `dtype`, or as int8 if that is int4. Raises
        ModelFileError for a tensor of another dtype.
        """
        ...

    def scales(self, module: StoredModule, rows: slice) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the scales f32 [rows, n], and zeros of that shape or None. Raises ModelFileError for a tensor of
        another dtype.
        """
        ...

    def order(self, module: StoredModule) -> np.ndarray:
        """Return the index of the input that each column of codes belongs to, i32[in]. Raises ModelFileError for a
        tensor of another dtype.
        """
        ...

    def input_scale(self, module: StoredModule) -> np.ndarray:
        """Return the static scale of all rows, f32[1], for formats whose `activation` is static. Raises ModelFileError
        for a tensor of another dtype.
        """
        ...


class InOrder:
    """Methods of a Stored whose inputs are not permuted, and which has no tensors or checks besides the required ones.

    `input_scale` reads the usual tensor of a static scale; it is for formats with a static `activation`.
    """

    reordered: Any = False

    def optional(self, module: StoredModule) -> Mapping[str, tuple[Shape, ...]]:
        del module
        return {}

    def check(self, module: StoredModule) -> None:
        del module

    def order(self, module: StoredModule) -> np.ndarray:
        return np.arange(module.shape[1], dtype=np.int32)

    def input_scale(self, module: StoredModule) -> np.ndarray:
        return module.read(input_scale(module)).reshape(1)


def num_groups(size: int, group: int | None) -> int:
    """Return the number of scales along `size` inputs if `group` inputs share one, rounded up; 1 if `group` is None."""
    return 1 if group is None else -(-size // group)


def unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """Return the numbers of `bits` bits that int32 words [..., n] contain, u8[..., n * 32 / bits], from the lowest bits
    on.

    A number of three bits may begin in one word and end in the next; n must then be a multiple of three.
    """
    if 32 % bits == 0:
        shifts = np.arange(0, 32, bits, dtype=np.uint32)
        values = (words.view(np.uint32)[..., None] >> shifts) & np.uint32(2**bits - 1)
    else:
        each = words.view(np.uint32).reshape(*words.shape[:-1], -1, bits).astype(np.uint64)
        first, shifts = np.divmod(np.arange(0, 32 * bits, bits), 32)
        ends = each[..., np.minimum(first + 1, bits - 1)] << np.uint64(32)
        values = ((ends | each[..., first]) >> shifts.astype(np.uint64)) & np.uint64(2**bits - 1)
    return values.astype(np.uint8).reshape(*words.shape[:-1], -1)


def input_scale(module: StoredModule) -> str:
    """Return the kind of the tensor with a static scale of rows: "input_scale", or "activation_scale" if only that is
    present.
    """
    return module.first_of("input_scale", "activation_scale")


SCALAR: tuple[Shape, ...] = ((1,), ())


def spread(groups: np.ndarray, group: int | None, size: int, count: int) -> np.ndarray:
    """Return scales [rows, n], of `group` inputs each (the last of fewer), as [rows, count], `count` scales of equally
    many of the `size` inputs. They are returned unchanged if n is `count`. group: None for all inputs.
    """
    if groups.shape[1] == count:
        return groups
    assert groups.shape[1] == num_groups(size, group)
    first_inputs = np.arange(count) * (size // count)
    return groups[:, first_inputs // (group or size)]


def dequantized(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None, group: int | None) -> np.ndarray:
    """Return weights f32 [rows, in]: codes [rows, in] times their scales, minus their zeros, [rows, n] of `group`
    inputs each. zeros may be None. group: None for all inputs.
    """
    size = codes.shape[1]
    values = codes.astype(np.float32) * spread(scales, group, size, size)
    if zeros is not None:
        values -= spread(zeros, group, size, size)
    return values
