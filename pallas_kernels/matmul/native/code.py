"""LLVM IR of products of few rows with a stored matrix [in, out], and of the XLA FFI handlers that run them.

A handler cuts the columns into blocks, which the threads of XLA's pool take one after another, its own thread included.
A block is computed panel by panel: some rows of the matrix, in tiles of TILE columns, whose sums stay in registers and
are then scaled and added to the result. So a panel's rows are read side by side, each from its begin to its end.

The order of additions to an element follows from the matrix's shape alone: a row has the same bits whatever rows are
beside it, and however many threads there are. Vectors are of LANES numbers on every processor; LLVM cuts them to the
width of its registers, which changes no bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import llvmlite.ir as ir

LANES = 16
TILE = 4 * LANES  # columns; each tile has four accumulators a row
_MOST_PANEL = 32  # rows of the stored matrix whose sums are added up before they are scaled
_SUM_LANES = 8  # inputs of a panel are a multiple, if there are zeros
_PREFETCH = 256  # bytes ahead within a row of the matrix
_ROWS = (4, 2, 1)  # rows of x that are multiplied at once
# Bytes of a matrix up to which one thread is as fast as several, and tiles of a thread from which on it takes two
# blocks, because threads begin at different times.
_ONE_THREAD, _MANY_TILES = 48 << 10, 64
_PATIENCE = 2000  # looks at what other threads have done, before the core is offered to them
# Kind -> (inputs in an element of the matrix, its bytes).
KINDS = {"pairs": (2, 1), "int8": (1, 1), "bfloat16": (1, 2)}

_I8, _I16, _I32, _I64, _F32 = (*map(ir.IntType, (8, 16, 32, 64)), ir.FloatType())
_PTR, _NOTHING = _I8.as_pointer(), ir.VoidType()
_INTS, _FLOATS = ir.VectorType(_I32, LANES), ir.VectorType(_F32, LANES)

# Fields of a job, each eight bytes: counters, then what handlers fill in.
_COUNTERS = "next", "done", "owners"
FIELDS = (*_COUNTERS, "blocks", "width", "x", "matrix", "scales", "zeros", "y", "sums")
FIELDS += ("rows", "inputs", "outputs", "panels", "panel", "each", "bf16_scales", "bf16_zeros")
_POINTERS = {"x", "matrix", "scales", "zeros", "y", "sums"}
_JOB_BYTES = 8 * len(FIELDS)

# Offsets in the structures of XLA's FFI, api version 0 (xla/ffi/api/c_api.h); library.py checks what may change.
_FRAME = {"extension": 8, "api": 16, "context": 24, "stage": 32, "num_arguments": 56, "arguments": 72, "results": 112}
_BUFFER = {"dtype": 16, "data": 24, "dims": 40}
_METADATA = {
    "metadata": 24,
    "version_size": 8,
    "version_extension": 16,
    "major": 24,
    "minor": 28,
    "traits": 32,
    "id": 40,
}
_EXECUTE, _BFLOAT16 = 3, 16
_VERSION_BYTES, _SCHEDULE_BYTES, _THREADS_BYTES, _DESTROY_BYTES = 24, 40, 32, 24


class _Builder(ir.IRBuilder):
    """IRBuilder with loops, and loads and stores at offsets in bytes."""

    def at(self, pointer: Any, offset: Any) -> Any:
        """Return a pointer `offset` bytes, an int or i64, after another."""
        return self.gep(pointer, [_I64(offset) if isinstance(offset, int) else offset])

    def read(self, pointer: Any, offset: Any, kind: Any, align: int = 1) -> Any:
        """Load a value of an LLVM type."""
        return self.load(self.bitcast(self.at(pointer, offset), kind.as_pointer()), align=align)

    def write(self, value: Any, pointer: Any, offset: Any, align: int = 1) -> None:
        """Store a value."""
        self.store(value, self.bitcast(self.at(pointer, offset), value.type.as_pointer()), align=align)

    def total(self, *terms: tuple[Any, ...]) -> Any:
        """Return the i64 sum of products of ints and i64 values."""
        found = None
        for factors in terms:
            product = None
            for factor in factors:
                factor = _I64(factor) if isinstance(factor, int) else factor
                product = factor if product is None else self.mul(product, factor)
            found = product if found is None else self.add(found, product)
        return found

    def all_lanes(self, value: Any) -> Any:
        """Return a vector with a number in all LANES."""
        nothing = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
        one = self.insert_element(nothing, value, _I32(0))
        return self.shuffle_vector(one, nothing, ir.Constant(_INTS, [0] * LANES))

    @contextmanager
    def loop(
        self, begin: Any, end: Any, step: int | Any, carried: Sequence[Any] = ()
    ) -> Iterator[tuple[Any, list[Any]]]:
        """Context manager of a loop's body: yields the index, i64, and the carried values, in a list in which the body
        puts the next ones. The list has the last ones after the loop.
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
        following = self.add(phis[0], _I64(step))
        for phi, each in zip(phis, (following, *values), strict=True):
            phi.add_incoming(each, self.block)
        self.branch(head)
        self.position_at_end(after)
        values[:] = phis[1:]


class Code:
    """Module of LLVM IR with a handler for each of KINDS, named as the kind.

    Each also has a function NAME_rows(job) without threads, see `fields`.
    """

    def __init__(self, triple: str, abi: Mapping[str, int], *, table_lookup: bool):
        """Build the module.

        triple: of the target. abi: version of XLA's FFI ("major", "minor"), and offsets of functions in its table, by
        the names of c_api.h. table_lookup: whether the processor has AVX-512F's `vpermps`, which
        widens four bits in one instruction.
        """
        self.module = ir.Module("products")
        self.module.triple = triple
        self._abi, self._table_lookup = abi, table_lookup
        self._fma = self._declare("llvm.fma.v16f32", _FLOATS, [_FLOATS] * 3)
        self._prefetch = self._declare("llvm.prefetch.p0", _NOTHING, [_PTR, _I32, _I32, _I32])
        self._pause = self._declare("llvm.x86.sse2.pause", _NOTHING, [])
        self._yield = self._declare("sched_yield", _I32, [])
        self._malloc, self._free = self._declare("malloc", _PTR, [_I64]), self._declare("free", _NOTHING, [_PTR])
        self._add_up = self._declare("llvm.vector.reduce.fadd.v8f32", _F32, [_F32, ir.VectorType(_F32, _SUM_LANES)])
        if table_lookup:
            self._lookup = self._declare("llvm.x86.avx512.permvar.sf.512", _FLOATS, [_FLOATS, _INTS])
        self._wide = self._make_wide()
        self._add, self._drop = self._make_add(), self._make_drop()
        for kind in KINDS:
            self._make_handler(kind, self._make_work(kind))

    def _declare(self, name: str, result: Any, arguments: Sequence[Any]) -> Any:
        return ir.Function(self.module, ir.FunctionType(result, arguments), name)

    def _begin(self, name: str, result: Any, arguments: Sequence[Any], *, inside: bool = True) -> tuple[Any, _Builder]:
        """Begin a function; return it and its builder. inside: whether only this module calls it."""
        function = self._declare(name, result, arguments)
        function.attributes.add("nounwind")
        function.linkage = "internal" if inside else "external"
        return function, _Builder(function.append_basic_block("entry"))

    def _make_wide(self) -> Any:
        """Build wide(pointer, index, is_bf16): LANES numbers from an index on, of float32 or bfloat16."""
        function, b = self._begin("wide", _FLOATS, [_PTR, _I64, _I64])
        function.attributes.add("alwaysinline")
        pointer, index, is_bf16 = function.args
        with b.if_then(b.icmp_signed("!=", is_bf16, _I64(0))):
            half = b.zext(b.read(pointer, b.total((index, 2)), ir.VectorType(_I16, LANES)), _INTS)
            b.ret(b.bitcast(b.shl(half, ir.Constant(_INTS, [16] * LANES)), _FLOATS))
        b.ret(b.read(pointer, b.total((index, 4)), _FLOATS))
        return function

    def _make_drop(self) -> Any:
        """Build drop(job): give up one owner's part of a job; the last one frees it."""
        function, b = self._begin("drop", _NOTHING, [_PTR])
        (job,) = function.args
        with b.if_then(b.icmp_signed("==", _count(b, job, "owners", -1), _I64(1))):
            b.call(self._free, [job])
        b.ret_void()
        return function

    def _parts(self, b: _Builder, kind: str, matrix: Any, offset: Any) -> list[tuple[int, int, Any]]:
        """Read a tile's columns of one row of the matrix: (input within the row, accumulator, LANES numbers) each.

        offset: i64, bytes of the tile. Columns lie in accumulators as `_columns` has them.
        """
        found = []
        bits = [b.read(matrix, b.total((offset,), (64 * line,)), _INTS) for line in range(KINDS[kind][1])]
        b.call(self._prefetch, [b.at(matrix, b.total((offset,), (_PREFETCH,))), _I32(0), _I32(3), _I32(1)])
        if kind == "bfloat16":
            for line, both in enumerate(bits):
                even = b.shl(both, ir.Constant(_INTS, [16] * LANES))
                odd = b.and_(both, ir.Constant(_INTS, [-65536] * LANES))
                found += [(0, 2 * line + part, b.bitcast(own, _FLOATS)) for part, own in enumerate((even, odd))]
            return found
        width = 8 // KINDS[kind][0]
        for part in range(32 // width):
            each, own = divmod(part, 8 // width)
            found.append((own, each, self._signed(b, bits[0], width * part, width)))
        return found

    def _signed(self, b: _Builder, bits: Any, first: int, width: int) -> Any:
        """Return a signed number of `width` bits, from bit `first` on, of each of LANES integers, as float32."""
        if width == 4 and self._table_lookup:  # which reads the lowest four bits of an index
            table = ir.Constant(_FLOATS, [float(code - 16 * (code > 7)) for code in range(16)])
            return b.call(self._lookup, [table, b.lshr(bits, ir.Constant(_INTS, [first] * LANES))])
        left = b.shl(bits, ir.Constant(_INTS, [32 - width - first] * LANES))
        return b.sitofp(b.ashr(left, ir.Constant(_INTS, [32 - width] * LANES)), _FLOATS)

    def _make_columns(self, kind: str, rows: int) -> Any:
        """Build columns(job, row, begin, end): multiply `rows` rows from `row` on by columns [begin, end)."""
        function, b = self._begin(f"{kind}_columns_{rows}", _NOTHING, [_PTR, _I64, _I64, _I64])
        job, row, begin, end = function.args
        own = {name: _get(b, job, name) for name in ("x", "matrix", "inputs", "outputs", "panels", "panel")}
        inputs, size = KINDS[kind]
        zero = ir.Constant(_FLOATS, [0.0] * LANES)
        with b.loop(_I64(0), own["panels"], 1) as (panel, _), b.loop(begin, end, TILE) as (column, _):
            with b.loop(_I64(0), own["panel"], 1, [zero] * 4 * rows) as (line, sums):
                line = b.total((panel, own["panel"]), (line,))
                offset = b.total((line, own["outputs"], size), (column, size))
                first = b.total((row, own["inputs"], 4), (line, 4 * inputs))
                x = {
                    (each, i): b.all_lanes(
                        b.read(own["x"], b.total((first,), (own["inputs"], 4 * each), (4 * i,)), _F32)
                    )
                    for each in range(rows)
                    for i in range(inputs)
                }
                for i, accumulator, numbers in self._parts(b, kind, own["matrix"], offset):
                    for each in range(rows):
                        place = 4 * each + accumulator
                        sums[place] = b.call(self._fma, [numbers, x[each, i], sums[place]])
            for each in range(rows):
                tile = _columns(b, kind, sums[4 * each :][:4])
                b.call(self._add, [job, b.total((row,), (each,)), panel, column, *tile])
        b.ret_void()
        return function

    def _make_add(self) -> Any:
        """Build add(job, row, panel, column, four vectors): scale a tile's sums and add them to the result."""
        function, b = self._begin("add", _NOTHING, [_PTR, _I64, _I64, _I64, *[_FLOATS] * 4])
        job, row, panel, column, *sums = function.args
        own = {name: _get(b, job, name) for name in ("outputs", "panels", "each", "y", "sums")}
        held = {name: (_get(b, job, name), _get(b, job, f"bf16_{name}")) for name in ("scales", "zeros")}
        null, is_first = ir.Constant(_PTR, None), b.icmp_signed("==", panel, _I64(0))
        places = [b.total((column,), (LANES * part,)) for part in range(4)]
        results = [b.total((row, own["outputs"], 4), (place, 4)) for place in places]
        factors = b.mul(b.sdiv(panel, own["each"]), own["outputs"])
        for new, place, result in zip(sums, places, results, strict=True):
            old = b.read(own["y"], result, _FLOATS)
            old = b.select(is_first, ir.Constant(_FLOATS, [0.0] * LANES), old)
            with b.if_else(b.icmp_unsigned("!=", held["scales"][0], null)) as (then, otherwise):
                with then:
                    scale = b.call(self._wide, [held["scales"][0], b.add(factors, place), held["scales"][1]])
                    b.write(b.call(self._fma, [new, scale, old]), own["y"], result)
                with otherwise:
                    b.write(b.fadd(old, new), own["y"], result)
        with b.if_then(b.icmp_unsigned("!=", held["zeros"][0], null)):
            total = b.read(own["sums"], b.total((row, own["panels"], 4), (panel, 4)), _F32)
            less = b.fsub(ir.Constant(_FLOATS, [-0.0] * LANES), b.all_lanes(total))
            for place, result in zip(places, results, strict=True):
                zeros = b.call(self._wide, [held["zeros"][0], b.add(factors, place), held["zeros"][1]])
                y = b.read(own["y"], result, _FLOATS)
                b.write(b.call(self._fma, [zeros, less, y]), own["y"], result)
        b.ret_void()
        return function

    def _make_work(self, kind: str) -> Any:
        """Build KIND_rows(job): take blocks of columns until none is left, and multiply all rows by each."""
        columns = {rows: self._make_columns(kind, rows) for rows in _ROWS}
        function, b = self._begin(f"{kind}_rows", _NOTHING, [_PTR], inside=False)
        (job,) = function.args
        rows, width, outputs = (_get(b, job, name) for name in ("rows", "width", "outputs"))
        head, body, after = (b.append_basic_block(name) for name in ("take", "block", "end"))
        b.branch(head)
        b.position_at_end(head)
        block = _count(b, job, "next", 1)
        b.cbranch(b.icmp_signed("<", block, _get(b, job, "blocks")), body, after)
        b.position_at_end(body)
        begin = b.mul(block, width)
        end = _least(b, b.add(begin, width), outputs)
        done = _I64(0)
        for each in _ROWS:
            stop = b.total((done,), (b.sdiv(b.sub(rows, done), _I64(each)), each))
            with b.loop(done, stop, each) as (row, _):
                b.call(columns[each], [job, row, begin, end])
            done = stop
        _count(b, job, "done", 1)
        b.branch(head)
        b.position_at_end(after)
        b.ret_void()
        return function

    def _make_handler(self, kind: str, work: Any) -> None:
        """Build the handler of a kind: KIND(XLA_FFI_CallFrame*), null as there are no errors."""
        task, b = self._begin(f"{kind}_task", _NOTHING, [_PTR])
        b.call(work, task.args)
        b.call(self._drop, task.args)
        b.ret_void()

        function, b = self._begin(kind, _PTR, [_PTR], inside=False)
        (frame,) = function.args
        null = ir.Constant(_PTR, None)
        extension = b.read(frame, _FRAME["extension"], _PTR)
        with b.if_then(b.icmp_unsigned("!=", extension, null)):  # XLA asks for the version
            self._fill_metadata(b, b.read(extension, _METADATA["metadata"], _PTR))
            b.ret(null)
        with b.if_then(b.icmp_signed("!=", b.read(frame, _FRAME["stage"], _I32), _I32(_EXECUTE))):
            b.ret(null)
        api, context = b.read(frame, _FRAME["api"], _PTR), b.read(frame, _FRAME["context"], _PTR)
        values = self._operands(b, kind, frame)
        threads = self._num_threads(b, api, context, values, KINDS[kind][1])
        tiles = b.sdiv(values["outputs"], _I64(TILE))
        each = _ceiling(b, tiles, threads)
        many = b.icmp_signed(">=", each, _I64(_MANY_TILES))
        each = b.select(many, _ceiling(b, each, _I64(2)), each)
        values |= {"width": b.mul(each, _I64(TILE)), "blocks": (blocks := _ceiling(b, tiles, each))}
        helpers = b.sub(_least(b, threads, blocks), _I64(1))
        values |= {"next": _I64(0), "done": _I64(0), "owners": b.add(helpers, _I64(1))}
        needed = b.total((values["rows"], values["panels"], 4), (_JOB_BYTES,))
        job = b.call(self._malloc, [needed])
        values["sums"] = b.at(job, _JOB_BYTES)
        for name, value in values.items():
            b.write(value, job, 8 * FIELDS.index(name), 8)
        self._sum_inputs(b, values)
        arguments = self._record(b, [_SCHEDULE_BYTES, 0, context, task, job])
        with b.loop(_I64(0), helpers, 1):
            error = self._call_api(b, api, "XLA_FFI_ThreadPool_Schedule", arguments)
            with b.if_then(b.icmp_unsigned("!=", error, null)):
                self._destroy(b, api, error)
                b.call(self._drop, [job])
        b.call(work, [job])
        self._wait(b, job, blocks)
        b.call(self._drop, [job])
        b.ret(null)

    def _operands(self, b: _Builder, kind: str, frame: Any) -> dict[str, Any]:
        """Read operands x, matrix, and, if there are any, scales and zeros, and the result y: fields of a job."""
        count, buffers = b.read(frame, _FRAME["num_arguments"], _I64), b.read(frame, _FRAME["arguments"], _PTR)
        x, matrix = (b.read(buffers, 8 * index, _PTR) for index in (0, 1))
        y = b.read(b.read(frame, _FRAME["results"], _PTR), 0, _PTR)
        found = {name: b.read(own, _BUFFER["data"], _PTR) for name, own in (("x", x), ("matrix", matrix), ("y", y))}
        x_dims, dims = (b.read(own, _BUFFER["dims"], _PTR) for own in (x, matrix))
        found |= {"rows": b.read(x_dims, 0, _I64), "inputs": b.read(x_dims, 8, _I64)}
        lines, found["outputs"] = b.read(dims, 0, _I64), b.read(dims, 8, _I64)
        num_scales = b.alloca(_I64)
        b.store(_I64(1), num_scales)
        for index, name in ((2, "scales"), (3, "zeros")):
            data, is_bf16 = b.alloca(_PTR), b.alloca(_I64)
            b.store(ir.Constant(_PTR, None), data)
            b.store(_I64(0), is_bf16)
            with b.if_then(b.icmp_signed(">", count, _I64(index))):
                own = b.read(buffers, 8 * index, _PTR)
                b.store(b.read(own, _BUFFER["data"], _PTR), data)
                of_two = b.icmp_signed("==", b.read(own, _BUFFER["dtype"], _I32), _I32(_BFLOAT16))
                b.store(b.zext(of_two, _I64), is_bf16)
                b.store(b.read(b.read(own, _BUFFER["dims"], _PTR), 0, _I64), num_scales)
            found |= {name: b.load(data), f"bf16_{name}": b.load(is_bf16)}
        group = b.sdiv(lines, b.load(num_scales))
        # The longest panels that divide a group.
        with b.loop(_I64(1), _I64(_MOST_PANEL + 1), 1, [_I64(1)]) as (size, longest):
            fits = b.icmp_signed("==", b.srem(group, size), _I64(0))
            longest[0] = b.select(fits, size, longest[0])
        panel = longest[0]
        return found | {"panel": panel, "panels": b.sdiv(lines, panel), "each": b.sdiv(group, panel)}

    def _sum_inputs(self, b: _Builder, values: dict[str, Any]) -> None:
        """Add up the inputs of each row and panel, if there are zeros, which are multiplied by them."""
        with b.if_then(b.icmp_unsigned("!=", values["zeros"], ir.Constant(_PTR, None))):
            eight = ir.VectorType(_F32, _SUM_LANES)
            size = b.sdiv(values["inputs"], values["panels"])
            with b.loop(_I64(0), b.mul(values["rows"], values["panels"]), 1) as (panel, _):
                with b.loop(_I64(0), size, _SUM_LANES, [ir.Constant(eight, [0.0] * _SUM_LANES)]) as (first, sums):
                    sums[0] = b.fadd(sums[0], b.read(values["x"], b.total((panel, size, 4), (first, 4)), eight))
                total = b.call(self._add_up, [ir.Constant(_F32, -0.0), sums[0]])
                b.write(total, values["sums"], b.total((panel, 4)))

    def _fill_metadata(self, b: _Builder, metadata: Any) -> None:
        """Answer XLA's question for the version of the FFI that a handler was made for."""
        wide = {"version_size": _VERSION_BYTES, "version_extension": 0, "id": 0}
        narrow = {"major": self._abi["major"], "minor": self._abi["minor"], "traits": 0}
        for name, value in wide.items():
            b.write(_I64(value), metadata, _METADATA[name], 8)
        for name, value in narrow.items():
            b.write(_I32(value), metadata, _METADATA[name], 4)

    def _num_threads(self, b: _Builder, api: Any, context: Any, values: dict[str, Any], size: int) -> Any:
        """Return the number of threads that take part, i64. size: bytes of an element of the matrix."""
        count = b.alloca(_I64)
        b.store(_I64(1), count)
        lines = b.mul(values["panels"], values["panel"])
        with b.if_then(b.icmp_signed(">", b.total((lines, values["outputs"], size)), _I64(_ONE_THREAD))):
            arguments = self._record(b, [_THREADS_BYTES, 0, context, count])
            error = self._call_api(b, api, "XLA_FFI_ThreadPool_NumThreads", arguments)
            with b.if_then(b.icmp_unsigned("!=", error, ir.Constant(_PTR, None))):
                self._destroy(b, api, error)
                b.store(_I64(1), count)
        found = b.load(count)
        return b.select(b.icmp_signed("<", found, _I64(1)), _I64(1), found)

    def _wait(self, b: _Builder, job: Any, blocks: Any) -> None:
        """Wait until the blocks that other threads took are done."""
        before, head, again, after = b.block, *(b.append_basic_block(name) for name in ("wait", "again", "done"))
        b.branch(head)
        b.position_at_end(head)
        looks = b.phi(_I64)
        looks.add_incoming(_I64(0), before)
        done = b.load_atomic(b.bitcast(b.at(job, 8 * FIELDS.index("done")), _I64.as_pointer()), "acquire", 8)
        b.cbranch(b.icmp_signed("<", done, blocks), again, after)
        b.position_at_end(again)
        b.call(self._pause, [])
        with b.if_then(b.icmp_signed(">", looks, _I64(_PATIENCE))):
            b.call(self._yield, [])
        looks.add_incoming(b.add(looks, _I64(1)), b.block)
        b.branch(head)
        b.position_at_end(after)

    def _record(self, b: _Builder, values: Sequence[Any]) -> Any:
        """Return a pointer to a structure of these values, of eight bytes each, in the function's frame."""
        with b.goto_entry_block():
            record = b.bitcast(b.alloca(ir.ArrayType(_I64, len(values))), _PTR)
        for index, value in enumerate(values):
            b.write(_I64(value) if isinstance(value, int) else value, record, 8 * index, 8)
        return record

    def _call_api(self, b: _Builder, api: Any, name: str, arguments: Any) -> Any:
        """Call a function of XLA's FFI; return its error, null for none."""
        function = b.read(api, self._abi[name], ir.FunctionType(_PTR, [_PTR]).as_pointer(), 8)
        return b.call(function, [arguments])

    def _destroy(self, b: _Builder, api: Any, error: Any) -> None:
        """Free an error of XLA's FFI."""
        self._call_api(b, api, "XLA_FFI_Error_Destroy", self._record(b, [_DESTROY_BYTES, 0, error]))


def _get(b: _Builder, job: Any, name: str) -> Any:
    """Load a job's field."""
    return b.read(job, 8 * FIELDS.index(name), _PTR if name in _POINTERS else _I64, 8)


def _count(b: _Builder, job: Any, name: str, change: int) -> Any:
    """Add to a job's counter, which several threads may do; return what it was, i64."""
    place = b.bitcast(b.at(job, 8 * FIELDS.index(name)), _I64.as_pointer())
    return b.atomic_rmw("add", place, _I64(change), "seq_cst")


def _columns(b: _Builder, kind: str, sums: Sequence[Any]) -> list[Any]:
    """Return four vectors of neighbouring columns of a tile's four accumulators, which have every fourth column; of
    bfloat16 every second one of a half.
    """
    order = [(column % 4, column // 4) for column in range(TILE)]
    if kind == "bfloat16":
        order = [(2 * (column // 32) + column % 2, column % 32 // 2) for column in range(TILE)]
    pairs = [b.shuffle_vector(*sums[first : first + 2], _indices(range(2 * LANES))) for first in (0, 2)]
    places = [LANES * accumulator + lane for accumulator, lane in order]
    return [b.shuffle_vector(*pairs, _indices(places[first : first + LANES])) for first in range(0, TILE, LANES)]


def _indices(numbers: Sequence[int]) -> Any:
    """Return a constant vector of i32."""
    return ir.Constant(ir.VectorType(_I32, len(numbers)), list(numbers))


def _least(b: _Builder, one: Any, other: Any) -> Any:
    """Return the smaller of two i64."""
    return b.select(b.icmp_signed("<", one, other), one, other)


def _ceiling(b: _Builder, number: Any, divisor: Any) -> Any:
    """Return the quotient of positive i64, rounded up."""
    return b.sdiv(b.sub(b.add(number, divisor), _I64(1)), divisor)
