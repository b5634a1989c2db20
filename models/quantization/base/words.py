"""Matrices in packed int32, a few bits per weight: the layouts of AWQ, GPTQ and compressed-tensors.

In AWQ (gemm) and GPTQ, packed int32 and scales are transposed, [in, out].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jaxengine.models.quantization.base.stored import InOrder, Shape, StoredModule, num_groups, unpacked

# Zero points of 4 less one as GPTQModel before version 7 wrote them: it unpacked the words in the wrong order.
_HALF_OF_THREE_BITS = np.array([0, 0xB6DB6DB7, 0x49249249], np.uint32)
# A word of AWQ's holds columns 0, 2, 4, 6, 1, 3, 5, 7 of eight, the lowest bits first; index in the word of column c:
_AWQ_ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7])


@dataclass(frozen=True)
class PackedInt32(InOrder):
    """Common base of the packed layouts. Half the range is subtracted from codes, so that they are signed."""

    format: str
    bits: int
    group: int | None
    has_zeros: bool
    activation: None = None

    @property
    def dtype(self) -> str:
        return "int8" if self.bits == 8 else "int4"

    @property
    def half(self) -> int:
        """Half the range of codes, which is subtracted from the stored ones."""
        return 1 << self.bits - 1

    @property
    def unit(self) -> tuple[int, int]:
        """(numbers, words): the smallest number of codes that fill packed int32 exactly, and the number of these
        int32.
        """
        return (32 // self.bits, 1) if 32 % self.bits == 0 else (32, self.bits)

    def num_words(self, size: int) -> int:
        """Return the number of packed int32 that `size` codes take."""
        numbers, words = self.unit
        return num_groups(size, numbers) * words

    def signed(self, values: np.ndarray) -> np.ndarray:
        """Return u8 values as signed codes i8, with half the range subtracted."""
        return (values.astype(np.int16) - self.half).astype(np.int8)

    def zeros_of(self, points: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """Return the zeros that are subtracted from codes * scales, given the unsigned zero points as stored: (points -
        half) * scales.
        """
        return (points.astype(np.float32) - self.half) * scales

    def word_span(self, part: slice, size: int) -> tuple[slice, slice]:
        """Return the slice of packed int32 numbers that hold the slice `part` of `size` values, and the slice of `part`
        among the values of these int32.
        """
        first, last, _ = part.indices(size)
        numbers, words = self.unit
        start = first // numbers
        own = slice(first - start * numbers, last - start * numbers)
        return slice(start * words, self.num_words(last)), own


@dataclass(frozen=True)
class AwqGemm(PackedInt32):
    """Storage format of AWQ: qweight [in, out / 8], qzeros [n, out / 8], scales [n, out]."""

    def tensors(self, module: StoredModule) -> Mapping[str, tuple[Shape, ...]]:
        (out, size), count = module.shape, num_groups(module.shape[1], self.group)
        words = self.num_words(out)
        needed: dict[str, tuple[Shape, ...]] = {"qweight": ((size, words),), "scales": ((count, out),)}
        return needed | ({"qzeros": ((count, words),)} if self.has_zeros else {})

    def optional(self, module: StoredModule) -> Mapping[str, tuple[Shape, ...]]:
        shape = num_groups(module.shape[1], self.group), self.num_words(module.shape[0])
        return {} if self.has_zeros else {"qzeros": (shape,)}

    def check(self, module: StoredModule) -> None:
        """Raise ModelFileError unless qweight is int32 and, without zero points in the configuration, stored ones are
        all half the range of codes.
        """
        module.read("qweight", "int32", slice(0, 1))
        if self.has_zeros or not module.has("qzeros"):
            return
        if np.any(self._columns(module, "qzeros", slice(None), slice(None)) != self.half):
            raise module.fail("qzeros", f"zero points must all be {self.half}, for the configuration has none")

    def codes(self, module: StoredModule, rows: slice, columns: slice) -> np.ndarray:
        return self.signed(self._columns(module, "qweight", rows, columns)).T

    def scales(self, module: StoredModule, rows: slice) -> tuple[np.ndarray, np.ndarray | None]:
        scales = module.read("scales", None, slice(None), rows)
        if not self.has_zeros:
            return scales.T, None
        return scales.T, self.zeros_of(self._columns(module, "qzeros", rows, slice(None)), scales).T

    def _columns(self, module: StoredModule, kind: str, outputs: slice, lines: slice) -> np.ndarray:
        """Return the columns `outputs` of the packed tensor `kind`, unpacked: u8 [lines, outputs]. Raises
        ModelFileError if it is not int32.
        """
        words, part = self.word_span(outputs, module.shape[0])
        values = unpacked(module.read(kind, "int32", lines, words), self.bits)
        values = values.reshape(len(values), -1, len(_AWQ_ORDER))[:, :, _AWQ_ORDER]
        return values.reshape(len(values), -1)[:, part]


@dataclass(frozen=True)
class Gptq(PackedInt32):
    """Storage format of GPTQ: qweight [in * bits / 32, out], qzeros [n, out * bits / 32], scales [n, out], g_idx [in].

    Attributes:
      one_less: whether stored zero points are one less than the actual ones, as in the first version of the format:
        the subtraction was done on packed words, so that a point of 0 borrows from the next one.
      reordered: whether g_idx gives the group of each input ("act-order"); otherwise neighbours form groups.
    """

    one_less: bool = True
    reordered: bool = False

    def tensors(self, module: StoredModule) -> Mapping[str, tuple[Shape, ...]]:
        (out, size), count = module.shape, num_groups(module.shape[1], self.group)
        needed: dict[str, tuple[Shape, ...]] = {
            "qweight": ((self.num_words(size), out),),
            "qzeros": ((count, self.num_words(out)),),
            "scales": ((count, out),),
        }
        return needed | ({"g_idx": ((size,),)} if self.reordered else {})

    def optional(self, module: StoredModule) -> Mapping[str, tuple[Shape, ...]]:
        return {} if self.reordered else {"g_idx": ((module.shape[1],),)}

    def check(self, module: StoredModule) -> None:
        """Raise ModelFileError unless qweight is int32, stored zero points are all half the range of codes if the
        configuration has none, and g_idx, if present, names groups of `group` inputs each, in order unless `reordered`.
        """
        module.read("qweight", "int32", slice(0, 1))
        if not self.has_zeros and not self._has_half_points(module):
            raise module.fail("qzeros", f"zero points must all be {self.half}, for the configuration says sym")
        if not module.has("g_idx"):
            return
        group = module.shape[1] if self.group is None else self.group
        numbers = module.read("g_idx", "int32")
        numbers = np.sort(numbers) if self.reordered else numbers
        if not np.array_equal(numbers, np.arange(module.shape[1]) // group):
            text = f"must name groups of {group} inputs each" + ("" if self.reordered else ", in order: no desc_act")
            raise module.fail("g_idx", text)

    def codes(self, module: StoredModule, rows: slice, columns: slice) -> np.ndarray:
        size = module.shape[1]
        words, part = (slice(None), slice(0, size)) if self.reordered else self.word_span(columns, size)
        values = unpacked(np.ascontiguousarray(module.read("qweight", "int32", words, rows).T), self.bits)[:, part]
        return self.signed(values[:, self.order(module)][:, columns] if self.reordered else values)

    def scales(self, module: StoredModule, rows: slice) -> tuple[np.ndarray, np.ndarray | None]:
        scales = module.read("scales", None, slice(None), rows)
        return scales.T, self.zeros_of(self._points(module, rows), scales).T if self.has_zeros else None

    def order(self, module: StoredModule) -> np.ndarray:
        return np.argsort(module.read("g_idx", "int32"), kind="stable").astype(np.int32)

    def _points(self, module: StoredModule, outputs: slice) -> np.ndarray:
        """Return the zero points u8 [n, outputs] of a slice of the outputs, unsigned and without the format's "one
        less".

        Raises ModelFileError if they are not int32.
        """
        span, part = self.word_span(outputs, module.shape[0])
        words = module.read("qzeros", "int32", slice(None), span)
        if self.one_less and self.bits != 3:
            words = (words.view(np.uint32) + np.uint32(0xFFFFFFFF // (2**self.bits - 1))).view(np.int32)
        points = unpacked(words, self.bits)[:, part]
        return (points + np.uint8(1)) & np.uint8(7) if self.one_less and self.bits == 3 else points

    def _has_half_points(self, module: StoredModule) -> bool:
        """Return whether all zero points are half the range of codes; points of three bits in the form that GPTQModel
        before version 7 wrote count as such, too.

        Raises ModelFileError if they are not int32.
        """
        if np.all(self._points(module, slice(None)) == self.half):
            return True
        if self.bits != 3 or not self.one_less:
            return False
        words = module.read("qzeros", "int32").view(np.uint32)
        return bool(np.all(words.reshape(-1, 3) == _HALF_OF_THREE_BITS))


@dataclass(frozen=True)
class Packed(PackedInt32):
    """Storage format of compressed-tensors: weight_packed [out, in * bits / 32], weight_scale [out, n], weight_shape
    [2], and weight_zero_point [out * bits / 32, n], packed along the outputs.

    reordered: whether weight_g_idx [in] gives the group of each input; otherwise neighbours form groups.
    """

    reordered: bool = False

    def tensors(self, module: StoredModule) -> Mapping[str, tuple[Shape, ...]]:
        (out, size), count = module.shape, num_groups(module.shape[1], self.group)
        needed: dict[str, tuple[Shape, ...]] = {
            "weight_packed": ((out, self.num_words(size)),),
            "weight_scale": ((out, count),),
            "weight_shape": ((2,),),
        }
        if self.has_zeros:
            needed["weight_zero_point"] = ((self.num_words(out), count),)
        return needed | ({"weight_g_idx": ((size,),)} if self.reordered else {})

    def check(self, module: StoredModule) -> None:
        """Raise ModelFileError unless weight_packed is int32, weight_shape is the matrix's shape and, if `reordered`,
        weight_g_idx names groups of `group` inputs each.
        """
        module.read("weight_packed", "int32", slice(0, 1))
        stored = tuple(module.source.read(module.tensor("weight_shape")).tolist())
        if stored != module.shape:
            raise module.fail("weight_shape", f"must be {module.shape}, got {stored}")
        if self.reordered:
            group = module.shape[1] if self.group is None else self.group
            numbers = np.sort(module.read("weight_g_idx", "int32"))
            if not np.array_equal(numbers, np.arange(module.shape[1]) // group):
                raise module.fail("weight_g_idx", f"must name groups of {group} inputs each")

    def codes(self, module: StoredModule, rows: slice, columns: slice) -> np.ndarray:
        size = module.shape[1]
        words, part = (slice(None), slice(0, size)) if self.reordered else self.word_span(columns, size)
        values = unpacked(module.read("weight_packed", "int32", rows, words), self.bits)[:, part]
        return self.signed(values[:, self.order(module)][:, columns] if self.reordered else values)

    def scales(self, module: StoredModule, rows: slice) -> tuple[np.ndarray, np.ndarray | None]:
        scales = module.read("weight_scale", None, rows)
        if not self.has_zeros:
            return scales, None
        words, part = self.word_span(rows, module.shape[0])
        packed = np.ascontiguousarray(module.read("weight_zero_point", "int32", words).T)
        return scales, self.zeros_of(unpacked(packed, self.bits)[:, part].T, scales)

    def order(self, module: StoredModule) -> np.ndarray:
        return np.argsort(module.read("weight_g_idx", "int32"), kind="stable").astype(np.int32)
