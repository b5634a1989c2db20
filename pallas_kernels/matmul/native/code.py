"""LLVM IR of products of few rows with a stored matrix, and of the XLA FFI handlers that run them.

A handler cuts the outputs into blocks, which the threads of XLA's pool, and the calling thread, take one after another.
A block of a matrix [in, out] is computed panel by panel. A panel is a few rows of the matrix, in tiles of TILE columns,
whose sums stay in registers and are then scaled and added to the result; its rows are read in parallel, each from its
beginning to its end. A block of a table [out, in] is computed token by token.

The order of additions to an element follows from the matrix's shape alone: a row has the same bits whatever other rows
are multiplied with it, and for any number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import llvmlite.ir as ir  # pyright: ignore[reportMissingImports]

from jaxengine.pallas_kernels.matmul.native.builder import (
    F32,
    FIELDS,
    I32,
    I64,
    JOB_BYTES,
    KINDS,
    NOTHING,
    NULL,
    PTR,
    ROWS,
    TILE,
    Builder,
    ceiling,
    count,
    get,
    least,
)
from jaxengine.pallas_kernels.matmul.native.sums import Sums

_MOST_PANEL = 32  # rows of a matrix whose sums are added up before they are scaled
_SUM_LANES = 8  # inputs of a panel are a multiple, if there are zeros
# Bytes of a matrix up to which one thread is as fast as several; and number of tiles per thread from which on a thread
# takes two blocks, because threads begin at different times.
_ONE_THREAD, _MANY_TILES = 48 << 10, 64
_PATIENCE = 2000  # checks of the other threads' progress before the core is yielded

# Offsets in the structures of XLA's FFI, api version 0 (xla/ffi/api/c_api.h); library.py checks what may change.
_FRAME = {"extension": 8, "api": 16, "context": 24, "stage": 32, "num_arguments": 56, "arguments": 72, "results": 112}
_BUFFER = {"dtype": 16, "data": 24, "dims": 40}
_METADATA = {"metadata": 24, "version_size": 8, "version_extension": 16, "major": 24, "minor": 28}
_METADATA |= {"traits": 32, "id": 40}
_EXECUTE, _BFLOAT16 = 3, 16
_VERSION_BYTES, _SCHEDULE_BYTES, _THREADS_BYTES, _DESTROY_BYTES = 24, 40, 32, 24

# Handler -> (kind of matrix, whether it is a table, which has a row for each output).
HANDLERS = {kind: (kind, False) for kind in KINDS} | {f"{kind}_table": (kind, True) for kind in KINDS}


class Code(Sums):
    """Module of LLVM IR with one function for each of HANDLERS, named as it.

    For each there is also a function NAME_rows(job), which computes a product without starting threads, from a job with
    FIELDS.
    """

    def __init__(self, triple: str, abi: Mapping[str, int], *, table_lookup: bool):
        """Build the module.

        triple, table_lookup: see Sums. abi: version of XLA's FFI ("major", "minor"), and offsets of functions in its
        table, by the names of c_api.h.
        """
        super().__init__(triple, table_lookup=table_lookup)
        self._abi = abi
        self._pause = self.declare("llvm.x86.sse2.pause", NOTHING, [])
        self._yield = self.declare("sched_yield", I32, [])
        self._malloc, self._free = self.declare("malloc", PTR, [I64]), self.declare("free", NOTHING, [PTR])
        self._add_up = self.declare("llvm.vector.reduce.fadd.v8f32", F32, [F32, ir.VectorType(F32, _SUM_LANES)])
        self._drop = self._make_drop()
        for name, (kind, is_table) in HANDLERS.items():
            self._make_handler(name, self._make_work(name, self.table if is_table else self.columns, kind))

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

    def _make_work(self, name: str, sums: Callable[[str, int], Any], kind: str) -> Any:
        """Build NAME_rows(job), and return the LLVM function. It takes blocks of outputs (counter "next") until none is
        left, multiplies all rows by each, and counts it in "done".

        sums(kind, rows): returns the function of Sums that multiplies `rows` rows at once.
        """
        all_rows = (1,) if name == "bfloat16_table" else ROWS  # XLA is faster with more
        columns = {rows: sums(kind, rows) for rows in all_rows}
        function, b = self.begin(f"{name}_rows", NOTHING, [PTR], inside=False)
        (job,) = function.args
        rows, width, outputs = (get(b, job, each) for each in ("rows", "width", "outputs"))
        head, body, after = (b.append_basic_block(each) for each in ("take", "block", "end"))
        b.branch(head)
        b.position_at_end(head)
        block = count(b, job, "next", 1)
        b.cbranch(b.icmp_signed("<", block, get(b, job, "blocks")), body, after)
        b.position_at_end(body)
        begin = b.mul(block, width)
        end = least(b, b.add(begin, width), outputs)
        done = I64(0)
        for each in all_rows:
            stop = b.total((done,), (b.sdiv(b.sub(rows, done), I64(each)), each))
            with b.loop(done, stop, each) as (row, _):
                b.call(columns[each], [job, row, begin, end])
            done = stop
        count(b, job, "done", 1)
        b.branch(head)
        b.position_at_end(after)
        b.ret_void()
        return function

    def _make_handler(self, name: str, work: Any) -> None:
        """Build the handler NAME(XLA_FFI_CallFrame*) of FFI calls, which always returns null, as there are no errors.

        If XLA asks for its version, it fills in the metadata; in a stage other than EXECUTE it does nothing. Otherwise
        it allocates a job, schedules helpers in XLA's thread pool, calls `work`, the function of `_make_work`, itself,
        and waits until all blocks are done.
        """
        task, b = self.begin(f"{name}_task", NOTHING, [PTR])
        b.call(work, task.args)
        b.call(self._drop, task.args)
        b.ret_void()

        function, b = self.begin(name, PTR, [PTR], inside=False)
        (frame,) = function.args
        null = NULL
        extension = b.read(frame, _FRAME["extension"], PTR)
        with b.if_then(b.icmp_unsigned("!=", extension, null)):  # XLA asks for the version
            self._fill_metadata(b, b.read(extension, _METADATA["metadata"], PTR))
            b.ret(null)
        with b.if_then(b.icmp_signed("!=", b.read(frame, _FRAME["stage"], I32), I32(_EXECUTE))):
            b.ret(null)
        api, context = b.read(frame, _FRAME["api"], PTR), b.read(frame, _FRAME["context"], PTR)
        values = self._operands(b, name, frame)
        threads = self._num_threads(b, api, context, values, KINDS[HANDLERS[name][0]][1])
        tiles = b.sdiv(values["outputs"], I64(TILE))
        each = ceiling(b, tiles, threads)
        many = b.icmp_signed(">=", each, I64(_MANY_TILES))
        each = b.select(many, ceiling(b, each, I64(2)), each)
        values |= {"width": b.mul(each, I64(TILE)), "blocks": (blocks := ceiling(b, tiles, each))}
        helpers = b.sub(least(b, threads, blocks), I64(1))
        values |= {"next": I64(0), "done": I64(0), "owners": b.add(helpers, I64(1))}
        needed = b.total((values["rows"], values["panels"], 4), (JOB_BYTES,))
        job = b.call(self._malloc, [needed])
        values["sums"] = b.at(job, JOB_BYTES)
        for field, value in values.items():
            b.write(value, job, 8 * FIELDS.index(field), 8)
        self._sum_inputs(b, values)
        arguments = self._record(b, [_SCHEDULE_BYTES, 0, context, task, job])
        with b.loop(I64(0), helpers, 1):
            error = self._call_api(b, api, "XLA_FFI_ThreadPool_Schedule", arguments)
            with b.if_then(b.icmp_unsigned("!=", error, null)):
                self._destroy(b, api, error)
                b.call(self._drop, [job])
        b.call(work, [job])
        self._wait(b, job, blocks)
        b.call(self._drop, [job])
        b.ret(null)

    def _operands(self, b: Builder, handler: str, frame: Any) -> dict[str, Any]:
        """Emit reads, from an XLA_FFI_CallFrame, of the operands x, matrix and, if there are any, scales and zeros, and
        of the result y. Return the values of a job's fields by name, including how the inputs are cut into panels.

        handler: a key of HANDLERS.
        """
        num_arguments, buffers = b.read(frame, _FRAME["num_arguments"], I64), b.read(frame, _FRAME["arguments"], PTR)
        x, matrix = (b.read(buffers, 8 * index, PTR) for index in (0, 1))
        y = b.read(b.read(frame, _FRAME["results"], PTR), 0, PTR)
        found = {name: b.read(own, _BUFFER["data"], PTR) for name, own in (("x", x), ("matrix", matrix), ("y", y))}
        x_dims, dims = (b.read(own, _BUFFER["dims"], PTR) for own in (x, matrix))
        found |= {"rows": b.read(x_dims, 0, I64), "inputs": b.read(x_dims, 8, I64)}
        is_table = HANDLERS[handler][1]
        lines, found["outputs"] = b.read(dims, 8 * is_table, I64), b.read(dims, 8 * (not is_table), I64)
        num_scales = b.alloca(I64)
        b.store(I64(1), num_scales)
        for index, name in ((2, "scales"), (3, "zeros")):
            data, is_bf16 = b.alloca(PTR), b.alloca(I64)
            b.store(NULL, data)
            b.store(I64(0), is_bf16)
            with b.if_then(b.icmp_signed(">", num_arguments, I64(index))):
                own = b.read(buffers, 8 * index, PTR)
                b.store(b.read(own, _BUFFER["data"], PTR), data)
                of_two = b.icmp_signed("==", b.read(own, _BUFFER["dtype"], I32), I32(_BFLOAT16))
                b.store(b.zext(of_two, I64), is_bf16)
                b.store(b.read(b.read(own, _BUFFER["dims"], PTR), 0, I64), num_scales)
            found |= {name: b.load(data), f"bf16_{name}": b.load(is_bf16)}
        group = b.sdiv(lines, b.load(num_scales))
        if is_table:
            return found | {"panel": group, "panels": b.sdiv(lines, group), "each": I64(1)}
        # The longest panels that divide a group.
        with b.loop(I64(1), I64(_MOST_PANEL + 1), 1, [I64(1)]) as (size, longest):
            fits = b.icmp_signed("==", b.srem(group, size), I64(0))
            longest[0] = b.select(fits, size, longest[0])
        panel = longest[0]
        return found | {"panel": panel, "panels": b.sdiv(lines, panel), "each": b.sdiv(group, panel)}

    def _sum_inputs(self, b: Builder, values: dict[str, Any]) -> None:
        """Emit code that writes the sum of each row's inputs in each panel to the job's `sums`, if the job has zeros,
        which are multiplied by these sums. values: fields of the job by name.
        """
        with b.if_then(b.icmp_unsigned("!=", values["zeros"], NULL)):
            eight = ir.VectorType(F32, _SUM_LANES)
            size = b.sdiv(values["inputs"], values["panels"])
            with b.loop(I64(0), b.mul(values["rows"], values["panels"]), 1) as (panel, _):
                with b.loop(I64(0), size, _SUM_LANES, [ir.Constant(eight, [0.0] * _SUM_LANES)]) as (first, sums):
                    sums[0] = b.fadd(sums[0], b.read(values["x"], b.total((panel, size, 4), (first, 4)), eight))
                total = b.call(self._add_up, [ir.Constant(F32, -0.0), sums[0]])
                b.write(total, values["sums"], b.total((panel, 4)))

    def _fill_metadata(self, b: Builder, metadata: Any) -> None:
        """Emit code that writes the version of the FFI that a handler was built for to XLA's `metadata` structure."""
        wide = {"version_size": _VERSION_BYTES, "version_extension": 0, "id": 0}
        narrow = {"major": self._abi["major"], "minor": self._abi["minor"], "traits": 0}
        for name, value in wide.items():
            b.write(I64(value), metadata, _METADATA[name], 8)
        for name, value in narrow.items():
            b.write(I32(value), metadata, _METADATA[name], 4)

    def _num_threads(self, b: Builder, api: Any, context: Any, values: dict[str, Any], size: int) -> Any:
        """Emit code that determines how many threads take part, and return the number, i64: 1 for a matrix of at most
        _ONE_THREAD bytes or if XLA reports an error, else the size of XLA's pool, at least 1.

        values: fields of the job. size: bytes of an element of the matrix. api, context: XLA's FFI table and execution
        context, from the call's frame.
        """
        found = b.alloca(I64)
        b.store(I64(1), found)
        lines = b.mul(values["panels"], values["panel"])
        with b.if_then(b.icmp_signed(">", b.total((lines, values["outputs"], size)), I64(_ONE_THREAD))):
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
        done = b.load_atomic(b.bitcast(b.at(job, 8 * FIELDS.index("done")), I64.as_pointer()), "acquire", 8)
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
