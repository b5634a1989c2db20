"""Parses compiled HLO text, and finds instructions that move an entire weight or pool through memory.

The caller names the arrays that must not be copied by their element counts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

# Instructions that only move data; a fusion of only these counts too.
_MOVERS = frozenset(
    (
        "copy",
        "copy-start",
        "transpose",
        "convert",
        "reshape",
        "concatenate",
        "pad",
        "slice",
        "dynamic-slice",
        "slice-start",
        "dynamic-slice-start",
        "bitcast-convert",
        "reverse",
    )
)
# Instructions through which an array passes without being moved.
PASSIVE = frozenset(
    (
        "parameter",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "while",
        "conditional",
        "call",
        "optimization-barrier",
        "async-done",
        "copy-done",
        "after-all",
        "domain",
        "opt-barrier",
    )
)
# Offloaded instructions, whose type lists operands and results: ((operands), results, ...).
_OFFLOADED = frozenset(("async-start", "async-update"))
# Instructions that write into their first operand; where the compiler may not reuse it, it adds a copy before them.
_IN_PLACE = frozenset(("scatter", "dynamic-update-slice"))
_TRIVIAL = frozenset(("parameter", "constant", "bitcast", "tuple", "get-tuple-element", "broadcast", "iota"))

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-<>]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-<>]+) = (.*?) ([\w\-]+)\((.*)$")
_MEMORY = re.compile(r":?S\(\d+\)(SC\([^)]*\))?")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")
_FUSED = re.compile(r"calls=%?([\w.\-<>]+)")
_CALLED = re.compile(
    r"(?:body|calls|to_apply|true_computation|false_computation)=(%?[\w.\-<>]+)"
    r"|(?:branch|called)_computations=\{([^}]*)\}"
)
_NAME = re.compile(r"[\w.\-<>]+")
_INDEX = re.compile(r"index=(\d+)")
_KERNEL = re.compile(r'custom_call_target="(?:tpu_custom_call|mosaic_gpu\w*|__gpu\$xla\.gpu\.triton)"')
_ATTENDS = re.compile(r'op_name="(?:[^"]*?/(layer_\d+)/)?[^"]*paged_attention_')
_OPERAND = re.compile(r"%([\w.\-<>]+)")


@dataclass(frozen=True)
class Instruction:
    """One line of HLO.

    Attributes:
      name: unique in its module.
      opcode: HLO's name of the operation, such as fusion.
      type_text: HLO type of the result.
      elements: elements of the result; for a tuple, those of its first array.
      fast: whether the result is in on-chip memory (TPU: VMEM), so that it is a prefetch and not a copy in HBM.
      root: whether its result is that of its computation.
      rest: operands and attributes as text.
    """

    name: str
    opcode: str
    type_text: str
    elements: int
    fast: bool
    root: bool
    rest: str

    @property
    def operands(self) -> list[str]:
        """Names of its operands, in order."""
        return _OPERAND.findall(self.rest.partition("), ")[0])

    @property
    def called(self) -> list[str]:
        """Names of the computations that it runs, such as the branches of a conditional or the body of a loop; usually
        [].
        """
        return [name for found in _CALLED.findall(self.rest) for name in _NAME.findall("".join(found))]


@dataclass
class Module:
    """A parsed HLO module.

    Attributes:
      entry: name of the computation that is run.
      computations: instructions of each computation, in order, by its name.
      fused: names of the computations that are bodies of fusions.
      offloaded: names of the computations that other cores (SparseCore) run.
    """

    entry: str = ""
    computations: dict[str, list[Instruction]] = field(default_factory=dict)
    fused: set[str] = field(default_factory=set)
    offloaded: set[str] = field(default_factory=set)

    def fused_in(self, instruction: Instruction) -> str:
        """Return the name of a fusion's computation; "" for other instructions."""
        called = _FUSED.search(instruction.rest) if instruction.opcode == "fusion" else None
        return called[1] if called else ""

    def inside(self, instruction: Instruction) -> list[Instruction]:
        """Return the instructions of a fusion's computation; [] for other instructions."""
        return self.computations.get(self.fused_in(instruction), [])

    def outside_fusions(self) -> Iterator[tuple[list[Instruction], Instruction]]:
        """Yield (instructions of its computation, instruction) for each instruction outside of fusions and not run by
        another core.
        """
        for name, body in self.computations.items():
            if name not in self.fused and name not in self.offloaded:
                for instruction in body:
                    yield body, instruction


def parse(text: str) -> Module:
    """Parse the text of a module, from `Compiled.as_text()` or XLA's dumps, and return the module.

    Lines of another form are skipped.
    """
    module, body, name = Module(), [], ""
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            name = match[1]
            body = module.computations[name] = []
            if line.startswith("ENTRY"):
                module.entry = name
        elif line.startswith('}, execution_thread="sparsecore"'):
            module.offloaded.add(name)
        elif match := _INSTRUCTION.match(line):
            root, result, type_text, opcode, rest = match.groups()
            elements, fast = _first_array(type_text)
            body.append(Instruction(result, opcode, type_text, elements, fast, bool(root), rest))
            if opcode == "fusion" and (called := _FUSED.search(rest)):
                module.fused.add(called[1])
    return module


def arrays_of(type_text: str) -> list[int]:
    """Return the element counts of the arrays in an HLO type: 1 for a scalar, [] if it has no array."""
    return [_elements(match[2]) for match in _SHAPE.finditer(type_text)]


def bytes_of(type_text: str, *, on_chip: bool = False) -> list[int]:
    """Return the bytes of device memory of each array in an HLO type, rounded down, in order; [] if it has no array.

    Arrays in on-chip memory count 0 unless `on_chip`. Raises TypeError for an element type without a width in its name.
    """
    return [
        _elements(match[2]) * _element_bits(match[1]) // 8 if on_chip or "S(" not in (match[3] or "") else 0
        for match in _SHAPE.finditer(type_text)
    ]


def _element_bits(dtype: str) -> int:
    """Return the bits of an HLO element type such as bf16, f8e4m3fn or pred; 0 for token and opaque.

    Raises TypeError for another type without a width in its name.
    """
    if dtype in ("pred", "token", "opaque"):
        return 8 if dtype == "pred" else 0
    return int(re.search(r"\d+", dtype)[0])  # pyright: ignore[reportOptionalSubscript] - all others have their width


def _first_array(type_text: str) -> tuple[int, bool]:
    """Return (elements, whether it is in on-chip memory) of the first array in an HLO type; (0, False) without an
    array.
    """
    match = _SHAPE.search(type_text)
    return (0, False) if match is None else (_elements(match[2]), "S(1)" in (match[3] or ""))


def _elements(sizes: str) -> int:
    """Return the number of elements of an array whose shape is written like "8,128"; 1 for ""."""
    return math.prod(int(size) for size in sizes.split(",") if size)


@dataclass(frozen=True)
class MustNotCopy:
    """Arrays that a program must not copy as a whole.

    Attributes:
      pools: element count -> name, of arrays that only in-place updates may produce.
      weights: element count -> name, of arrays that are only read. An activation may have the same count, so an
        instruction counts only if its operand is a parameter of its computation.
      states: HLO type such as "s32[256,128]" -> name, of arrays that are updated row by row; counted like weights.
    """

    pools: Mapping[int, str] = field(default_factory=dict)
    weights: Mapping[int, str] = field(default_factory=dict)
    states: Mapping[str, str] = field(default_factory=dict)


def copies(module: Module, must_not_copy: MustNotCopy) -> list[str]:
    """Return a text "NAME: OPCODE INSTRUCTION TYPE", cut after 160 characters of OPCODE and what follows, for each
    instruction that moves an entire protected array through memory, in the order of the module.

    Arrays are recognised by their size or shape. Any instruction with a result of a pool's size counts unless it
    updates in place; one with a weight's or a state's result counts only if it just moves data that comes from a
    parameter. Not counted are instructions inside fusions and on other cores, prefetches into on-chip memory, and
    writes of unchanged prefetched arrays back to device memory.
    """
    found, given = [], _given(module)
    for body, instruction in module.outside_fusions():
        if instruction.fast or instruction.opcode in PASSIVE or instruction.opcode in _IN_PLACE:
            continue
        if instruction.opcode in _OFFLOADED and not _changes_layout(instruction):
            continue
        name = must_not_copy.pools.get(instruction.elements)
        if name is not None:
            if not _keeps_place(module, instruction):
                found.append(f"{name}: {_brief(instruction)}")
            continue
        name = must_not_copy.weights.get(instruction.elements) or must_not_copy.states.get(
            instruction.type_text.lstrip("(").partition("{")[0]
        )
        if name is None or not _only_moves(module, instruction) or _is_put_back(body, instruction):
            continue
        if _from_parameter(body, instruction, given):
            found.append(f"{name}: {_brief(instruction)}")
    return found


def _brief(instruction: Instruction) -> str:
    """Return opcode, name and type of an instruction, cut to 160 characters."""
    return f"{instruction.opcode} {instruction.name} {instruction.type_text}"[:160]


def _is_put_back(body: Iterable[Instruction], instruction: Instruction) -> bool:
    """Return whether an instruction copies an array from on-chip memory back to device memory in the same layout.

    `moved_bytes` counts these bytes. body: instructions of its computation.
    """
    if instruction.opcode != "copy-start" or not any(each.fast for each in body if each.name in instruction.operands):
        return False
    far, near = (_MEMORY.sub("", shape[0]) for shape in list(_SHAPE.finditer(instruction.type_text))[:2])
    return far == near


def _keeps_place(module: Module, instruction: Instruction) -> bool:
    """Return whether an instruction with a result of a pool's size updates its operand in place.

    A kernel does if it declares aliasing, a fusion if all its results of that size are in-place updates or parameters;
    no other instruction does.
    """
    if instruction.opcode == "custom-call":
        return "output_to_operand_aliasing" in instruction.rest
    if instruction.opcode != "fusion":
        return False
    body = module.inside(instruction)
    by_name = {inner.name: inner for inner in body}
    return all(_root_opcode(by_name, inner) in _IN_PLACE | {"parameter"} for inner in _results(by_name, body))


def _results(by_name: Mapping[str, Instruction], body: Iterable[Instruction]) -> list[Instruction]:
    """Return the results of a fused computation that are as large as the first one: its root, or members of a root
    tuple.

    Returns [] without a root. body: its instructions. by_name: the same by name.
    """
    root = next((inner for inner in body if inner.root), None)
    if root is None:
        return []
    if root.opcode != "tuple":
        return [root]
    members = [by_name[name] for name in root.operands if name in by_name]
    return [member for member in members if member.elements == root.elements]


def _root_opcode(by_name: Mapping[str, Instruction], instruction: Instruction) -> str:
    """Return an instruction's opcode; for a bitcast or get-tuple-element, that of the instruction that it takes its
    value from.

    by_name: instructions of its computation.
    """
    while instruction.opcode in ("bitcast", "get-tuple-element") and instruction.operands:
        inner = by_name.get(instruction.operands[0])
        if inner is None:
            break
        instruction = inner
    return instruction.opcode


def _changes_layout(instruction: Instruction) -> bool:
    """Return whether an offloaded instruction returns its operand in another layout: same element type and shape, other
    layout.
    """
    shapes = list(_SHAPE.finditer(instruction.type_text))[:2]
    if len(shapes) < 2:
        return False
    before, after = shapes
    return before.group(1, 2) == after.group(1, 2) and before[3] != after[3]


def _only_moves(module: Module, instruction: Instruction) -> bool:
    """Return whether an instruction moves or converts data and computes nothing.

    A fusion does if everything in it moves data or is trivial, and something moves data.
    """
    if instruction.opcode != "fusion":
        return instruction.opcode in _MOVERS | _OFFLOADED
    opcodes = {inner.opcode for inner in module.inside(instruction)}
    return bool(opcodes & _MOVERS) and opcodes <= _MOVERS | _TRIVIAL


_Given = Mapping[str, tuple[bool, list[Instruction], Instruction]]


def _given(module: Module) -> _Given:
    """Return, by parameter of a conditional's branch or a loop's body, (whether it is a loop's, instructions of the
    calling computation, tuple with which the branch or loop starts).
    """
    given = {}
    for body in module.computations.values():
        by_name = {inner.name: inner for inner in body}
        for instruction in (each for each in body if each.opcode in ("conditional", "while")):
            loops = instruction.opcode == "while"
            for branch, operand in zip(instruction.called, instruction.operands[not loops :], strict=False):
                parameter = next(
                    (each for each in module.computations.get(branch, []) if each.opcode == "parameter"), None
                )
                if parameter is not None and operand in by_name and by_name[operand].opcode == "tuple":
                    given[parameter.name] = loops, body, by_name[operand]
    return given


def _from_parameter(body: Iterable[Instruction], instruction: Instruction, given: _Given) -> bool:
    """Return whether an operand of an instruction comes, only through moves, from a parameter of the program or of a
    loop.

    Parameters of a branch, and on-chip parameters of a loop, are traced to the instructions that produce them. body:
    instructions of its computation. given: result of `_given`.
    """
    by_name = {inner.name: inner for inner in body}
    pending, seen = list(instruction.operands), set()
    while pending:
        name = pending.pop()
        source = by_name.get(name)
        if source is None or name in seen:
            continue
        seen.add(name)
        made = given.get(source.operands[0]) if source.opcode == "get-tuple-element" and source.operands else None
        if source.fast and (source.opcode == "parameter" or (source.opcode == "get-tuple-element" and made is None)):
            continue
        if source.opcode == "parameter":
            return True
        if made is not None and (source.fast or not made[0]) and (index := _INDEX.search(source.rest)):
            _, outside, together = made
            element = replace(together, rest=f"%{together.operands[int(index[1])]}), ")
            if _from_parameter(outside, element, given):
                return True
        elif source.opcode in (
            "bitcast",
            "get-tuple-element",
            "optimization-barrier",
            "copy",
            "copy-done",
            "copy-start",
        ):
            pending.extend(source.operands)
    return False


def custom_calls(module: Module) -> Iterator[Instruction]:
    """Yield every custom call of all computations, fused ones included. Our kernels are custom calls."""
    for body in module.computations.values():
        yield from (instruction for instruction in body if instruction.opcode == "custom-call")


def attending_places(module: Module) -> int:
    """Return the number of layers whose attention is one of our kernels; such kernels outside of layers count as one
    more.
    """
    scopes = [_ATTENDS.search(call.rest) for call in custom_calls(module) if _KERNEL.search(call.rest)]
    return len({scope[1] for scope in scopes if scope is not None})
