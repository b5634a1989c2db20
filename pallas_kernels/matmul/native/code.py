"""LLVM IR of products of few rows with a stored matrix, and of the XLA FFI handlers that run them.

A handler cuts the outputs into blocks, which the threads of XLA's pool, and the calling thread, take one after another.
A block of a matrix [in, out] is computed panel by panel. A panel is a few lines of the matrix, whose sums stay in the
first cache and are then scaled and added to the result. Its lines are read eight at a time, while the eight below them
are prefetched. A block of a table [out, in] is computed a few tokens at a time, while the tokens after them are
prefetched.

The order of additions to an element follows from the matrix's shape alone: a row has the same bits whatever other rows
are multiplied with it, and for any number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import llvmlite.ir as ir  # pyright: ignore[reportMissingImports]

from jaxengine.pallas_kernels.matmul.native.sums import JOB, KINDS, ROWS, TILE, Sums
from jaxengine.pallas_kernels.native.builder import F32, I32, I64, NOTHING, NULL, PTR, Builder, ceiling, least
from jaxengine.pallas_kernels.native.handlers import BUFFER, FRAME
from jaxengine.pallas_kernels.native.words import longest_panel, read_operands

# Rows of a matrix whose sums are added up before they are scaled; of unscaled ones with a handler for many rows there
# are PANELS.
_MOST_PANEL = 32
_SUM_LANES = 8  # inputs of a panel are a multiple, if there are zeros
# Bytes of a matrix up to which one thread is as fast as several; and number of tiles per thread from which on a thread
# takes two blocks, because threads begin at different times.
_ONE_THREAD, _MANY_TILES = 48 << 10, 64
_BFLOAT16 = 16  # of XLA_FFI_DataType

# Handler -> (kind of matrix, whether it is a table, which has a row for each output).
HANDLERS = {kind: (kind, False) for kind in KINDS}
HANDLERS |= {f"{kind}_table": (kind, True) for kind in ("pairs", "int8", "bfloat16")}


class Products(Sums):
    """Module of LLVM IR with one handler for each of HANDLERS, named as it.

    For each there is also a function NAME_rows(job), which computes a product without starting threads, from a job with
    the fields of JOB.
    """

    def __init__(self, triple: str, abi: Mapping[str, int], *, table_lookup: bool, has_dots: bool):
        """Build the module. triple, abi, table_lookup, has_dots: see Sums."""
        super().__init__(triple, abi, table_lookup=table_lookup, has_dots=has_dots)
        self._add_up = self.declare("llvm.vector.reduce.fadd.v8f32", F32, [F32, ir.VectorType(F32, _SUM_LANES)])
        for name, (kind, is_table) in HANDLERS.items():
            block = self._make_block(name, self.table if is_table else self.columns, kind)
            self.make_handler(name, JOB, self.make_work(f"{name}_rows", block))

    def _make_block(self, name: str, sums: Callable[[str, int], Any], kind: str) -> Any:
        """Build NAME_block(job, block), which multiplies all rows by a block of outputs, and return the LLVM function.

        sums(kind, rows): returns the function of Sums that multiplies `rows` rows at once.
        """
        all_rows = (1,) if name == "bfloat16_table" else ROWS  # several are faster by other forms
        columns = {rows: sums(kind, rows) for rows in all_rows}
        function, b = self.begin(f"{name}_block", NOTHING, [PTR, I64])
        job, block = function.args
        rows, width, outputs = (JOB.get(b, job, each) for each in ("rows", "width", "outputs"))
        begin = b.mul(block, width)
        end = least(b, b.add(begin, width), outputs)
        done = I64(0)
        for each in all_rows:
            stop = b.total((done,), (b.sdiv(b.sub(rows, done), I64(each)), each))
            with b.loop(done, stop, each) as (row, _):
                b.call(columns[each], [job, row, begin, end])
            done = stop
        b.ret_void()
        return function

    def operands(self, b: Builder, handler: str, frame: Any) -> dict[str, Any]:
        """Emit reads, from an XLA_FFI_CallFrame, of the operands x, matrix and, if there are any, scales and zeros, and
        of the result y. Return the values of a job's fields by name, including how the inputs are cut into panels, and
        "is_small", for a matrix of at most _ONE_THREAD bytes.

        handler: a key of HANDLERS.
        """
        kind, is_table = HANDLERS[handler]
        found, lines = read_operands(b, frame, is_table=is_table)
        num_arguments, buffers = b.read(frame, FRAME["num_arguments"], I64), b.read(frame, FRAME["arguments"], PTR)
        num_scales = b.alloca(I64)
        b.store(I64(1), num_scales)
        for index, name in ((2, "scales"), (3, "zeros")):
            data, is_bf16 = b.alloca(PTR), b.alloca(I64)
            b.store(NULL, data)
            b.store(I64(0), is_bf16)
            with b.if_then(b.icmp_signed(">", num_arguments, I64(index))):
                own = b.read(buffers, 8 * index, PTR)
                b.store(b.read(own, BUFFER["data"], PTR), data)
                of_two = b.icmp_signed("==", b.read(own, BUFFER["dtype"], I32), I32(_BFLOAT16))
                b.store(b.zext(of_two, I64), is_bf16)
                b.store(b.read(b.read(own, BUFFER["dims"], PTR), 0, I64), num_scales)
            found |= {name: b.load(data), f"bf16_{name}": b.load(is_bf16)}
        num_bytes = b.total((lines, found["outputs"], KINDS[kind][1]))
        found["is_small"] = b.icmp_signed("<=", num_bytes, I64(_ONE_THREAD))
        group = b.sdiv(lines, b.load(num_scales))
        if is_table:
            return found | {"panel": group, "panels": b.sdiv(lines, group), "each": I64(1)}
        if kind in ("float32", "dots"):
            panel = longest_panel(b, lines)
            return found | {"panel": panel, "panels": b.sdiv(lines, panel), "each": I64(1)}
        # The longest panels that divide a group.
        with b.loop(I64(1), I64(_MOST_PANEL + 1), 1, [I64(1)]) as (size, longest):
            fits = b.icmp_signed("==", b.srem(group, size), I64(0))
            longest[0] = b.select(fits, size, longest[0])
        panel = longest[0]
        return found | {"panel": panel, "panels": b.sdiv(lines, panel), "each": b.sdiv(group, panel)}

    def cut(self, b: Builder, values: Mapping[str, Any], threads: Any) -> dict[str, Any]:
        tiles = b.sdiv(values["outputs"], I64(TILE))
        each = ceiling(b, tiles, threads)
        many = b.icmp_signed(">=", each, I64(_MANY_TILES))
        each = b.select(many, ceiling(b, each, I64(2)), each)
        return {"width": b.mul(each, I64(TILE)), "blocks": ceiling(b, tiles, each)}

    def more_bytes(self, b: Builder, values: Mapping[str, Any]) -> Any:
        return b.total((values["rows"], values["panels"], 4))

    def prepare(self, b: Builder, values: dict[str, Any]) -> None:
        """Emit code that writes the sum of each row's inputs in each panel to the job's `sums`, if the job has zeros,
        which are multiplied by these sums. values: fields of the job by name.
        """
        values["sums"] = values["after"]
        with b.if_then(b.icmp_unsigned("!=", values["zeros"], NULL)):
            eight = ir.VectorType(F32, _SUM_LANES)
            size = b.sdiv(values["inputs"], values["panels"])
            with b.loop(I64(0), b.mul(values["rows"], values["panels"]), 1) as (panel, _):
                with b.loop(I64(0), size, _SUM_LANES, [ir.Constant(eight, [0.0] * _SUM_LANES)]) as (first, sums):
                    sums[0] = b.fadd(sums[0], b.read(values["x"], b.total((panel, size, 4), (first, 4)), eight))
                total = b.call(self._add_up, [ir.Constant(F32, -0.0), sums[0]])
                b.write(total, values["sums"], b.total((panel, 4)))


def build(triple: str, abi: Mapping[str, int], features: Mapping[str, bool]) -> ir.Module:
    """Return the module of LLVM IR with the handlers. triple, abi: see Handlers. features: of the processor, by LLVM's
    names; avx512f and avx512bf16 are used.
    """
    has = {"table_lookup": bool(features.get("avx512f")), "has_dots": bool(features.get("avx512bf16"))}
    return Products(triple, abi, **has).module
