"""Counts matrix operations and moved bytes of a compiled program from its HLO.

A loop counts as often as its known trip count, or once if that is data; of a conditional the most expensive branch
counts. Work inside our kernels is not HLO and is not counted. Neither is a ragged product of XLA:TPU, whose work
depends on data. What a step needs at least is in jaxengine.check.model.roofline.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from jaxengine.check.compiled.hlo import PASSIVE, Instruction, Module, bytes_of

_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_CONTRACTED = re.compile(r'"?lhs_contracting_dim(?:s|ensions)"?[=:][\[{]"?([\d,"]*)[\]}]')
_LABELS = re.compile(r"dim_labels=\w+_(\w+)->")
_RAGGED = re.compile(r'op_name="[^"]*ragged_dot_general"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_ALIASED = re.compile(r"output_to_operand_aliasing=\{\{\}: \((\d+), ")
_ESTIMATED = re.compile(r'"cost_estimate":\{"bytes_accessed":"(\d+)"')
_NEXT_RUN = "cross_program_prefetch_index="
_GEMM = '"__cublas'
# Instructions that read only as much of their first operand as they return.
_SLICES = frozenset(("slice", "dynamic-slice", "gather"))
_OFFLOADED = frozenset(("async-start", "slice-start", "dynamic-slice-start"))
_UPDATES = frozenset(("scatter", "dynamic-update-slice"))
# Instructions that move no data themselves.
_FREE = PASSIVE | {"constant", "partition-id", "replica-id"}
_NO_LAUNCH = _FREE - {"conditional"}


def operations(module: Module) -> dict[str, int]:
    """Return the operations of a module's matrix products by element type, the wider one of the two operands.

    A multiplication and its addition are two operations. Ragged products are not counted. A loop counts as often as it
    runs, and of a conditional only the branch with the most operations.
    """

    def of_body(body: list[Instruction]) -> Counter[str]:
        """Return the operations of the matrix products in one computation, by element type."""
        by_name, found = {instruction.name: instruction for instruction in body}, Counter()
        for instruction in body:
            if (product := _product(instruction, by_name)) is not None:
                dtype, count = product
                found[dtype] += count
        return found

    return dict(_executed(module, module.entry, of_body, fused=True))


def _product(instruction: Instruction, by_name: Mapping[str, Instruction]) -> tuple[str, int] | None:
    """Return (element type of the wider operand, operations) of an instruction that is a matrix product; None for other
    instructions and ragged products. A multiplication with an addition is two operations.

    by_name: the instructions of its computation.
    """
    is_gemm = instruction.opcode == "custom-call" and _GEMM in instruction.rest
    if instruction.opcode not in ("dot", "convolution") and not is_gemm:
        return None
    operands = [_array(by_name[name].type_text) for name in instruction.operands[:2] if name in by_name]
    if len(operands) < 2 or (instruction.opcode == "convolution" and _RAGGED.search(instruction.rest)):
        return None
    (left, left_shape), (right, right_shape) = operands
    if instruction.opcode == "convolution":
        labels = _LABELS.search(instruction.rest)
        # XLA writes batch dimensions as spatial ones, of which each result uses one element.
        contracted = right_shape[labels[1].index("i")] if labels else 1
    else:
        axes = _CONTRACTED.search(instruction.rest)
        contracted = math.prod(left_shape[int(axis)] for axis in re.findall(r"\d+", axes[1])) if axes else 1
    return max(left, right, key=_width), 2 * instruction.elements * contracted


def _array(type_text: str) -> tuple[str, tuple[int, ...]]:
    """Return (element type, shape) of the first array in the text of a type. Raises AssertionError if it has none."""
    match = _ARRAY.search(type_text)
    assert match is not None, type_text
    return match[1], tuple(int(size) for size in match[2].split(",") if size)


def _width(dtype: str) -> int:
    """Return the bits of an element type, from the digits in its name; 8 if there are none, as in pred."""
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 8


def moved_bytes(module: Module, leave_out: Collection[int], trips: Sequence[int] = ()) -> int:
    """Return the bytes that a program reads from and writes to device memory: operands and results of what it executes.
    What stays on the chip counts nothing, and a fusion only what it reads and writes itself.

    Arrays that are updated in place or of which only slices are read count only as far as they are touched; kernels
    that update in place count their own cost estimate. An array counts once for each instruction that reads it, but a
    kernel's only once however often it is passed, and a prefetch for the next run only if this run does not fetch that
    array. A loop counts as often as it runs, and of a conditional only the branch that moves most. leave_out: element
    counts of arrays (pools) that are never processed as a whole; such arrays count nothing, but slices of them do.
    trips: how often loops run whose trip count is data, the first for all the outermost, the next for those in them;
    once beyond.
    """

    def of_body(body: list[Instruction]) -> Counter[str]:
        """Return the bytes that the instructions of one computation move."""
        by_name = {instruction.name: instruction for instruction in body}
        fetched = {instruction.operands[0] for instruction in body if _fetches(instruction) and instruction.operands}
        return Counter(
            bytes=sum(
                _moved(module, instruction, by_name, leave_out)
                for instruction in body
                # XLA:TPU ends a program by prefetching the first operands of its next run. They are counted once.
                if not (_NEXT_RUN in instruction.rest and instruction.operands[0] in fetched)
            )
        )

    return _executed(module, module.entry, of_body, fused=False, trips=trips)["bytes"]


def launches(module: Module, scope: str = "", trips: Sequence[int] = ()) -> int:
    """Return the number of kernels and copies that one run of a GPU's program launches.

    scope: count only those of one named scope, such as "layer_1"; "" counts all. A loop counts as often as it runs. A
    conditional counts as one in addition to the branch that launches most. trips: as in `moved_bytes`.
    """

    def of_body(body: list[Instruction]) -> Counter[str]:
        """Return how many kernels and copies the instructions of one computation launch."""
        starting = (each for each in body if each.opcode not in _NO_LAUNCH)
        return Counter(launches=sum(not scope or f"/{scope}/" in each.rest for each in starting))

    return _executed(module, module.entry, of_body, fused=False, trips=trips)["launches"]


def _fetches(instruction: Instruction) -> bool:
    """Return whether an instruction starts to prefetch an array that this run uses, not the next one."""
    return instruction.opcode == "copy-start" and _NEXT_RUN not in instruction.rest


def _moved(
    module: Module, instruction: Instruction, by_name: Mapping[str, Instruction], leave_out: Collection[int]
) -> int:
    """Return the bytes that one instruction reads from and writes to device memory; 0 for an instruction that moves no
    data itself.

    It is the sum of operands and result, except for slices (twice the result), updates (twice what is written), starts
    of copies, kernels that update in place (their cost estimate), and fusions that read or write only parts of an
    operand. by_name: the instructions of its computation. leave_out: element counts of arrays that count nothing.
    """
    opcode = instruction.opcode
    if opcode in _FREE or opcode.endswith(("-done", "-update")):
        return 0
    # An array passed to a kernel several times, with a block each, is read once.
    names = dict.fromkeys(instruction.operands) if opcode == "custom-call" else instruction.operands
    operands = [by_name[name] for name in names if name in by_name]
    sizes = [0 if operand.elements in leave_out else sum(bytes_of(operand.type_text)) for operand in operands]
    result = 0 if instruction.elements in leave_out else sum(bytes_of(instruction.type_text))
    if (aliased := _ALIASED.search(instruction.rest)) and (estimated := _ESTIMATED.search(instruction.rest)):
        # A kernel that updates an array in place touches only the bytes that its cost estimate states.
        place = [operand.name for operand in operands].index(instruction.operands[int(aliased[1])])
        result = min(sizes[place] + result, int(estimated[1]))
        sizes[place] = 0
    if opcode.endswith("-start"):  # the results repeat the operands
        if opcode in _OFFLOADED:  # a slice of the operand
            come_out = slice(len(operands), len(operands) + 1)
            read, written = (bytes_of(instruction.type_text, on_chip=on_chip)[come_out] for on_chip in (True, False))
            return sum(read) + sum(written)
        return result
    if opcode in _SLICES:
        return 2 * result
    if opcode in _UPDATES:
        return 2 * sum(sizes[1:])
    if inside := module.inside(instruction):
        parameters = {_number(inner): inner for inner in inside if inner.opcode == "parameter"}
        for index, size in enumerate(sizes):
            if index in parameters:
                touched, written, passed = _touched(module, parameters[index], inside)
                sizes[index] = size if touched is None or passed else min(size, touched)
                if written is not None and operands[index].elements == instruction.elements:
                    result = min(result, written)
    return sum(sizes) + result


def _number(parameter: Instruction) -> int:
    """Return the index of a parameter instruction among its computation's parameters."""
    return int(parameter.rest.partition(")")[0])


def _touched(module: Module, parameter: Instruction, body: list[Instruction]) -> tuple[int | None, int | None, bool]:
    """Return how a fusion uses one of its parameters: (bytes read, None for all; bytes written if updated in place,
    else None; whether the fusion returns it).

    Only slices and in-place updates touch a part; any other use reads all. body: instructions of the fusion.
    """
    names, total, written = {parameter.name}, 0, None
    for inner in body:
        if not names & set(inner.operands) or inner.name in names:
            continue
        if inner.opcode in ("bitcast", "get-tuple-element"):
            names.add(inner.name)
        elif inner.opcode in _SLICES and inner.operands[0] in names:
            total += sum(bytes_of(inner.type_text))
        elif inner.opcode in _UPDATES and inner.operands[0] in names and not names & set(inner.operands[1:]):
            by_name = {each.name: each for each in body}
            size = sum(sum(bytes_of(by_name[name].type_text)) for name in inner.operands[1:] if name in by_name)
            total, written = total + (size if _combines(module, inner) else 0), (written or 0) + size
        elif inside := module.inside(inner):
            for index in (index for index, name in enumerate(inner.operands) if name in names):
                own = next((each for each in inside if each.opcode == "parameter" and _number(each) == index), None)
                touched, updated, passed = (None, None, False) if own is None else _touched(module, own, inside)
                if touched is None or updated is not None:
                    return None, None, False
                total += touched
                if passed:
                    names.add(inner.name)
        else:
            return None, None, False
    return total, written, any(inner.root and inner.name in names for inner in body)


def _combines(module: Module, update: Instruction) -> bool:
    """Return whether an update instruction also reads the values that it replaces.

    A scatter does, unless its computation returns its second parameter, the new value. A dynamic-update-slice never
    does.
    """
    if update.opcode != "scatter":
        return False
    roots = [inner for name in update.called for inner in module.computations.get(name, []) if inner.root]
    return not any(root.opcode == "parameter" and _number(root) == 1 for root in roots)


def _executed(
    module: Module,
    name: str,
    of_body: Callable[[list[Instruction]], Counter[str]],
    *,
    fused: bool,
    trips: Sequence[int] = (),
) -> Counter[str]:
    """Return the sum of `of_body` over a computation and all that it calls, weighted by how often each runs.

    name: name of the computation; the sum is empty if the module lacks it. of_body: returns the figures of a
    computation's instructions. fused: include the bodies of fusions and of asynchronous starts. Of a conditional only
    the branch with the largest sum counts, and a loop without a known trip count counts `trips[0]` times, or once.
    """
    body = module.computations.get(name, [])
    total = of_body(body)
    for instruction in body:
        if not fused and (instruction.opcode == "fusion" or instruction.opcode.endswith("-start")):
            continue
        known = _TRIPS.search(instruction.rest) if instruction.opcode == "while" else None
        of_data = instruction.opcode == "while" and known is None
        inner, runs = (trips[1:], (*trips, 1)[0]) if of_data else (trips, int(known[1]) if known else 1)
        counted = [_executed(module, each, of_body, fused=fused, trips=inner) for each in instruction.called]
        if instruction.opcode == "conditional":
            counted = [max(counted, key=Counter.total, default=Counter())]
        for each in counted:
            for key, count in each.items():
                total[key] += count * runs
    return total
