"""XLA FFI handlers in LLVM IR that share a job among the threads of XLA's pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import llvmlite.ir as ir  # pyright: ignore[reportMissingImports]

from jaxengine.pallas_kernels.native.builder import (
    FLOATS,
    I32,
    I64,
    NOTHING,
    NULL,
    PTR,
    Builder,
    Job,
    count,
    counter,
    least,
)

_PATIENCE = 2000  # checks of the other threads' progress before the core is yielded

# Offsets in the structures of XLA's FFI, api version 0 (xla/ffi/api/c_api.h); library.py checks what may change.
FRAME = {"extension": 8, "api": 16, "context": 24, "stage": 32, "num_arguments": 56, "arguments": 72, "results": 112}
BUFFER = {"dtype": 16, "data": 24, "dims": 40}
_METADATA = {"kind": 8, "metadata": 24, "version_size": 8, "version_extension": 16, "major": 24, "minor": 28}
_METADATA |= {"traits": 32, "id": 40}
_EXECUTE, _METADATA_KIND = 3, 1
_VERSION_BYTES, _SCHEDULE_BYTES, _THREADS_BYTES, _DESTROY_BYTES = 24, 40, 32, 24


class Handlers:
    """Module of LLVM IR, `module`, and methods that build functions and handlers in it.

    A subclass reads the operands of a call (`operands`), cuts the work into blocks (`cut`), and gives `make_handler` a
    function that computes blocks until none is left.
    """

    def __init__(self, name: str, triple: str, abi: Mapping[str, int]):
        """Create a module with the functions that handlers share.

        triple: of the target. abi: version of XLA's FFI ("major", "minor"), and offsets of functions in its table, by
        the names of c_api.h.
        """
        self.module = ir.Module(name)
        self.module.triple = triple
        self._abi = abi
        self._pause = self.declare("llvm.x86.sse2.pause", NOTHING, [])
        self._yield = self.declare("sched_yield", I32, [])
        self._malloc, self._free = self.declare("malloc", PTR, [I64]), self.declare("free", NOTHING, [PTR])
        self._fma = self.declare("llvm.fma.v16f32", FLOATS, [FLOATS] * 3)
        self._prefetch = self.declare("llvm.prefetch.p0", NOTHING, [PTR, I32, I32, I32])
        self._drop = self._make_drop()

    def declare(self, name: str, result: Any, arguments: Sequence[Any]) -> Any:
        """Declare a function of the module, with LLVM types of its result and arguments, and return it. Raises
        llvmlite's DuplicatedNameError for a name that is taken.
        """
        return ir.Function(self.module, ir.FunctionType(result, arguments), name)

    def begin(self, name: str, result: Any, arguments: Sequence[Any], *, inside: bool = True) -> tuple[Any, Builder]:
        """Declare a function (see `declare`) with an entry block, and return it with a builder in that block. inside:
        whether only this module calls it, so that its linkage is internal.
        """
        function = self.declare(name, result, arguments)
        function.attributes.add("nounwind")
        function.linkage = "internal" if inside else "external"
        return function, Builder(function.append_basic_block("entry"))

    def fetch(self, b: Builder, pointer: Any, offset: Any) -> None:
        """Emit a prefetch, into the second cache, of the bytes at `offset`, an int or i64, from a pointer, which may
        lie after the end of the memory.
        """
        b.call(self._prefetch, [b.at(pointer, offset), I32(0), I32(2), I32(1)])

    def operands(self, b: Builder, handler: str, frame: Any) -> dict[str, Any]:
        """Emit reads, from an XLA_FFI_CallFrame, of a call's operands. Return the values of a job's fields by name, and
        as "is_small", an i1, whether one thread is as fast as several.
        """
        raise NotImplementedError

    def cut(self, b: Builder, values: Mapping[str, Any], threads: Any) -> dict[str, Any]:
        """Emit the computation of further fields of a job for a number of threads, i64; return them by name. "blocks"
        is among them.
        """
        raise NotImplementedError

    def prepare(self, b: Builder, values: dict[str, Any]) -> None:
        """Emit work that is done before blocks are. values: fields of the job by name."""

    def more_bytes(self, b: Builder, values: Mapping[str, Any]) -> Any:
        """Emit the computation of the bytes that a job needs after its fields, and return them, i64."""
        return I64(0)

    def _make_drop(self) -> Any:
        """Build drop(job), which subtracts one from a job's counter "owners", and frees the job's memory if it was the
        last one. Return the LLVM function.
        """
        function, b = self.begin("drop", NOTHING, [PTR])
        (job,) = function.args
        with b.if_then(b.icmp_signed("==", count(b, job, "owners", -1), I64(1))):
            b.call(self._free, [job])
        b.ret_void()
        return function

    def make_work(self, name: str, block: Any) -> Any:
        """Build NAME(job), and return the LLVM function. It takes blocks (counter "next") until none is left, computes
        each by `block`, a function (job, index), and counts it in "done".
        """
        function, b = self.begin(name, NOTHING, [PTR], inside=False)
        (job,) = function.args
        head, body, after = (b.append_basic_block(each) for each in ("take", "block", "end"))
        b.branch(head)
        b.position_at_end(head)
        index = count(b, job, "next", 1)
        b.cbranch(b.icmp_signed("<", index, b.load(counter(b, job, "blocks"))), body, after)
        b.position_at_end(body)
        b.call(block, [job, index])
        count(b, job, "done", 1)
        b.branch(head)
        b.position_at_end(after)
        b.ret_void()
        return function

    def make_handler(self, name: str, layout: Job, work: Any) -> None:
        """Build the handler NAME(XLA_FFI_CallFrame*) of FFI calls, which always returns null, as there are no errors.

        If XLA asks for its version, it fills in the metadata; in a stage other than EXECUTE it does nothing. Otherwise
        it allocates a job of `layout`, schedules helpers in XLA's thread pool, calls `work`, a function of `make_work`,
        itself, and waits until all blocks are done.
        """
        task, b = self.begin(f"{name}_task", NOTHING, [PTR])
        b.call(work, task.args)
        b.call(self._drop, task.args)
        b.ret_void()

        function, b = self.begin(name, PTR, [PTR], inside=False)
        (frame,) = function.args
        extension = b.read(frame, FRAME["extension"], PTR)
        with b.if_then(b.icmp_unsigned("!=", extension, NULL)):
            kind = b.read(extension, _METADATA["kind"], I32)
            with b.if_then(b.icmp_signed("==", kind, I32(_METADATA_KIND))):  # XLA asks for the version
                self._fill_metadata(b, b.read(extension, _METADATA["metadata"], PTR))
                b.ret(NULL)
        with b.if_then(b.icmp_signed("!=", b.read(frame, FRAME["stage"], I32), I32(_EXECUTE))):
            b.ret(NULL)
        api, context = b.read(frame, FRAME["api"], PTR), b.read(frame, FRAME["context"], PTR)
        values = self.operands(b, name, frame)
        threads = self._num_threads(b, api, context, values.pop("is_small"))
        values |= self.cut(b, values, threads)
        helpers = b.sub(least(b, threads, values["blocks"]), I64(1))
        helpers = b.select(b.icmp_signed("<", helpers, I64(0)), I64(0), helpers)
        values |= {"next": I64(0), "done": I64(0), "owners": b.add(helpers, I64(1))}
        job = b.call(self._malloc, [b.add(I64(layout.num_bytes), self.more_bytes(b, values))])
        values["after"] = b.at(job, layout.num_bytes)
        self.prepare(b, values)
        for field in layout.fields:
            layout.set(b, job, field, values[field])
        arguments = self._record(b, [_SCHEDULE_BYTES, 0, context, task, job])
        with b.loop(I64(0), helpers, 1):
            error = self._call_api(b, api, "XLA_FFI_ThreadPool_Schedule", arguments)
            with b.if_then(b.icmp_unsigned("!=", error, NULL)):
                self._destroy(b, api, error)
                b.call(self._drop, [job])
        b.call(work, [job])
        self._wait(b, job, values["blocks"])
        b.call(self._drop, [job])
        b.ret(NULL)

    def _fill_metadata(self, b: Builder, metadata: Any) -> None:
        """Emit code that writes the version of the FFI that a handler was built for to XLA's `metadata` structure."""
        wide = {"version_size": _VERSION_BYTES, "version_extension": 0, "id": 0}
        narrow = {"major": self._abi["major"], "minor": self._abi["minor"], "traits": 0}
        for name, value in wide.items():
            b.write(I64(value), metadata, _METADATA[name], 8)
        for name, value in narrow.items():
            b.write(I32(value), metadata, _METADATA[name], 4)

    def _num_threads(self, b: Builder, api: Any, context: Any, is_small: Any) -> Any:
        """Emit code that determines how many threads take part, and return the number, i64: 1 if is_small, an i1, or if
        XLA reports an error, else the size of XLA's pool, at least 1. api, context: XLA's FFI table and execution
        context, from the call's frame.
        """
        found = b.alloca(I64)
        b.store(I64(1), found)
        with b.if_then(b.not_(is_small)):
            arguments = self._record(b, [_THREADS_BYTES, 0, context, found])
            error = self._call_api(b, api, "XLA_FFI_ThreadPool_NumThreads", arguments)
            with b.if_then(b.icmp_unsigned("!=", error, NULL)):
                self._destroy(b, api, error)
                b.store(I64(1), found)
        threads = b.load(found)
        return b.select(b.icmp_signed("<", threads, I64(1)), I64(1), threads)

    def _wait(self, b: Builder, job: Any, blocks: Any) -> None:
        """Emit code that waits until the job's `blocks` blocks are done, including those of other threads. It spins,
        and yields the core on every look after the first _PATIENCE.
        """
        before, head, again, after = b.block, *(b.append_basic_block(name) for name in ("wait", "again", "done"))
        b.branch(head)
        b.position_at_end(head)
        looks = b.phi(I64)
        looks.add_incoming(I64(0), before)
        done = b.load_atomic(counter(b, job, "done"), "acquire", 8)
        b.cbranch(b.icmp_signed("<", done, blocks), again, after)
        b.position_at_end(again)
        b.call(self._pause, [])
        with b.if_then(b.icmp_signed(">", looks, I64(_PATIENCE))):
            b.call(self._yield, [])
        looks.add_incoming(b.add(looks, I64(1)), b.block)
        b.branch(head)
        b.position_at_end(after)

    def _record(self, b: Builder, values: Sequence[Any]) -> Any:
        """Emit a structure of these values, ints or LLVM values of eight bytes each, in the stack frame of the
        function; return a pointer to it.
        """
        with b.goto_entry_block():
            record = b.bitcast(b.alloca(ir.ArrayType(I64, len(values))), PTR)
        for index, value in enumerate(values):
            b.write(I64(value) if isinstance(value, int) else value, record, 8 * index, 8)
        return record

    def _call_api(self, b: Builder, api: Any, name: str, arguments: Any) -> Any:
        """Emit a call of the function `name` of XLA's FFI, from the table `api`, with a pointer to its arguments;
        return its error, null if the call succeeded. Raises KeyError for a name whose offset is not known.
        """
        function = b.read(api, self._abi[name], ir.FunctionType(PTR, [PTR]).as_pointer(), 8)
        return b.call(function, [arguments])

    def _destroy(self, b: Builder, api: Any, error: Any) -> None:
        """Emit a call that frees an error of XLA's FFI, by a function of the table `api`."""
        self._call_api(b, api, "XLA_FFI_Error_Destroy", self._record(b, [_DESTROY_BYTES, 0, error]))
