"""Base of the machine code: LLVM's types, an IRBuilder with loops, and jobs, which threads share."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import llvmlite.ir as ir  # pyright: ignore[reportMissingImports]
import numpy as np

LANES = 16

I8, I16, I32, I64, F32 = (*map(ir.IntType, (8, 16, 32, 64)), ir.FloatType())
PTR, NOTHING = I8.as_pointer(), ir.VoidType()
INTS, FLOATS = ir.VectorType(I32, LANES), ir.VectorType(F32, LANES)
NULL = ir.Constant(PTR, None)

# First fields of every job: the next block, blocks that are done, threads that hold the job, and number of blocks.
COUNTERS = "next", "done", "owners", "blocks"


class Builder(ir.IRBuilder):
    """llvmlite IRBuilder with methods for loops, i64 arithmetic, and loads and stores at offsets in bytes."""

    def at(self, pointer: Any, offset: Any) -> Any:
        """Emit the computation of the address `offset` bytes, an int or i64, after `pointer`; return it."""
        return self.gep(pointer, [I64(offset) if isinstance(offset, int) else offset])

    def read(self, pointer: Any, offset: Any, kind: Any, align: int = 1) -> Any:
        """Emit a load of a value of LLVM type `kind` at `offset` bytes from a pointer; return the value. align:
        alignment of the address, in bytes.
        """
        return self.load(self.bitcast(self.at(pointer, offset), kind.as_pointer()), align=align)

    def write(self, value: Any, pointer: Any, offset: Any, align: int = 1) -> None:
        """Emit a store of a value at `offset` bytes from a pointer. align: alignment of the address, in bytes."""
        self.store(value, self.bitcast(self.at(pointer, offset), value.type.as_pointer()), align=align)

    def total(self, *terms: tuple[Any, ...]) -> Any:
        """Emit the i64 sum of products and return it. Each of `terms` is a tuple of factors, ints or i64 values, of one
        product. Returns None without terms.
        """
        found = None
        for factors in terms:
            product = None
            for factor in factors:
                factor = I64(factor) if isinstance(factor, int) else factor
                product = factor if product is None else self.mul(product, factor)
            found = product if found is None else self.add(found, product)
        return found

    def all_lanes(self, value: Any) -> Any:
        """Emit and return a vector with `value`, an i32 or f32 value, in all LANES."""
        nothing = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
        one = self.insert_element(nothing, value, I32(0))
        return self.shuffle_vector(one, nothing, each_lane(0))

    @contextmanager
    def loop(
        self, begin: Any, end: Any, step: int | Any, carried: Sequence[Any] = ()
    ) -> Iterator[tuple[Any, list[Any]]]:
        """Return a context manager in whose body the builder emits a loop's body. The loop runs an i64 index from
        `begin` while it is below `end`, in steps of `step`.

        It yields the index and a list of carried values, whose initial values are `carried`. The body replaces the
        list's elements by the values for the next iteration. Afterwards the builder is at the end of the loop, and the
        list holds the final values.
        """
        before, head = self.block, self.append_basic_block("loop")
        body, after = self.append_basic_block("body"), self.append_basic_block("after")
        self.branch(head)
        self.position_at_end(head)
        phis = [self.phi(each.type) for each in (begin, *carried)]
        for phi, each in zip(phis, (begin, *carried), strict=True):
            phi.add_incoming(each, before)
        self.cbranch(self.icmp_signed("<", phis[0], end), body, after)
        self.position_at_end(body)
        values = list(phis[1:])
        yield phis[0], values
        following = self.add(phis[0], I64(step))
        for phi, each in zip(phis, (following, *values), strict=True):
            phi.add_incoming(each, self.block)
        self.branch(head)
        self.position_at_end(after)
        values[:] = phis[1:]


def each_lane(number: int | float) -> Any:
    """Return a constant vector with `number` in all LANES, i32 for an int and f32 for a float."""
    return ir.Constant(INTS if isinstance(number, int) else FLOATS, [number] * LANES)


class Job:
    """Layout of a job, whose fields have eight bytes each: those of COUNTERS, then pointers, then i64 numbers.

    Attributes:
      fields: names of all fields, in order.
      num_bytes: bytes of a job.
    """

    def __init__(self, pointers: Sequence[str], numbers: Sequence[str]):
        """Define the fields `pointers` and `numbers`, by name."""
        self.fields = (*COUNTERS, *pointers, *numbers)
        self.num_bytes = 8 * len(self.fields)
        self._pointers = frozenset(pointers)

    def get(self, b: Builder, job: Any, name: str) -> Any:
        """Emit a load of the field `name` of a job; return the value, a pointer or i64. Raises ValueError for another
        name.
        """
        return b.read(job, 8 * self.fields.index(name), PTR if name in self._pointers else I64, 8)

    def set(self, b: Builder, job: Any, name: str, value: Any) -> None:
        """Emit a store of a value to the field `name` of a job. Raises ValueError for another name."""
        b.write(value, job, 8 * self.fields.index(name), 8)

    def run(self, address: int, numbers: Mapping[str, int], arrays: Mapping[str, np.ndarray]) -> None:
        """Call the function at `address` with a job of these fields, of which `arrays` are pointers. Others are 0."""
        values = {**numbers, **{name: array.ctypes.data for name, array in arrays.items()}}
        job = (ctypes.c_int64 * len(self.fields))(*(values.get(name, 0) for name in self.fields))
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)(ctypes.addressof(job))


def counter(b: Builder, job: Any, name: str) -> Any:
    """Emit the computation of a pointer to the counter `name` of any job, and return it."""
    return b.bitcast(b.at(job, 8 * COUNTERS.index(name)), I64.as_pointer())


def count(b: Builder, job: Any, name: str, change: int) -> Any:
    """Emit an atomic addition of the int `change` to the counter `name` of a job, to which several threads may add;
    return the previous value, i64.
    """
    return b.atomic_rmw("add", counter(b, job, name), I64(change), "seq_cst")


def indices(numbers: Sequence[int]) -> Any:
    """Return a constant vector of these numbers, as i32."""
    return ir.Constant(ir.VectorType(I32, len(numbers)), list(numbers))


def least(b: Builder, one: Any, other: Any) -> Any:
    """Emit and return the smaller of two i64 values, compared as signed."""
    return b.select(b.icmp_signed("<", one, other), one, other)


def ceiling(b: Builder, number: Any, divisor: Any) -> Any:
    """Emit and return number / divisor, rounded up. Both are i64; the divisor must be positive and the number not
    negative.
    """
    return b.sdiv(b.sub(b.add(number, divisor), I64(1)), divisor)
