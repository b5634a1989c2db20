"""Split of a program of many layers into a chain of smaller programs. Equal ones are compiled, stored and loaded once.

This is for CPUs: each operation of a program loaded by XLA:CPU costs memory, and equal layers are compiled again and
again. The function is traced as usual, its trace is split between layers, and groups of layers that differ only in
their arguments become calls of one program. A value lives until the last part that reads it, and parts may overwrite
the arguments that the whole program may overwrite.

This module works on traces. It only depends on the name that calls of layers have in them.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import serialize_executable
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from jaxengine.models.layers.decoder_step import LAYER

# Models of fewer layers are compiled as one program.
_LEAST_LAYERS = 6
# What a call costs relative to a compiled layer, in steps of fewer than FEW_TOKENS tokens, of which it takes a larger
# share, and in others.
FEW_TOKENS, _COST_OF_FEW, _COST_OF_MANY = 32, 1.0, 1 / 3
# The most layers that steps of few tokens compile, as a multiple of those that others compile: the memory of their
# programs is estimated from that of the others.
_MORE_OF_FEW = 2
_MAGIC = b"parts"


class Call(NamedTuple):
    """One part of a chain: the call of a program on values, which are referred to by index.

    Attributes:
      program: index of the program.
      inputs, outputs: indices of the values that are its arguments and its results.
      last: those inputs that no later part reads.
    """

    program: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    last: tuple[int, ...]


class Chain(NamedTuple):
    """Calls that compute a step. The leaves of the arguments are its first values.

    Attributes:
      constants: indices of constant values, with the values.
      calls: in the order of execution.
      results: indices of the leaves of the result.
      peak_bytes: largest number of bytes of live values and temporaries at any time, without arguments and without
        values that take a donated argument's memory. A program's temporaries are freed a moment after the next program
        has taken its own: both count.
    """

    constants: tuple[tuple[int, np.ndarray], ...]
    calls: tuple[Call, ...]
    results: tuple[int, ...]
    peak_bytes: int


class Analysis(NamedTuple):
    """Memory of a chain in bytes, with those fields of `jax.stages.Compiled.memory_analysis` that callers read. All
    memory except that of arguments counts as temporary.
    """

    temp_size_in_bytes: int
    output_size_in_bytes: int = 0
    alias_size_in_bytes: int = 0
    generated_code_size_in_bytes: int = 0


class InParts:
    """Compiled chain. It is called like a `jax.stages.Compiled`.

    Attributes:
      chain: the chain. programs: its compiled programs, in the chain's order.
    """

    def __init__(self, chain: Chain, programs: Sequence[jax.stages.Compiled], in_tree: Any, out_tree: Any, device: Any):
        """Store a chain with its compiled programs, and copy its constants to the device.

        in_tree, out_tree: tree structures of (arguments, {}) and of the result. device: the device on which the
        programs run.
        """
        self.chain, self.programs = chain, tuple(programs)
        self._in_tree, self._out_tree = in_tree, out_tree
        self._constants = {index: jax.device_put(value, device) for index, value in chain.constants}

    def __call__(self, *arguments: Any) -> Any:
        """Run the chain; donated arguments are deleted. Raises TypeError for arguments of another tree structure."""
        leaves, tree = jax.tree.flatten((arguments, {}))
        if tree != self._in_tree:
            raise TypeError(f"called with {tree}, compiled for {self._in_tree}")
        values = dict(enumerate(leaves)) | self._constants
        for call in self.chain.calls:
            results = self.programs[call.program](*[values[index] for index in call.inputs])
            for index in call.last:
                del values[index]
            values.update(zip(call.outputs, results, strict=True))
        return jax.tree.unflatten(self._out_tree, [values[index] for index in self.chain.results])

    def memory_analysis(self) -> Analysis:
        """Return an Analysis with Chain.peak_bytes."""
        return Analysis(self.chain.peak_bytes)


Executable = jax.stages.Compiled | InParts


def num_blocks(compiled: Executable) -> int:
    """Return the number of blocks of temporaries that a program has at once: two if it is a chain, otherwise one."""
    return 2 if isinstance(compiled, InParts) else 1


class NotStorableError(Exception):
    """Raised for a program that cannot be stored in a file; the message says why."""


def serialize(compiled: Executable) -> bytes:
    """Return a program or a chain of programs as bytes for `load`. Raises NotStorableError if the platform cannot
    serialise it, or if it calls Python.
    """
    if not isinstance(compiled, InParts):
        return _serialize_one(compiled)
    chain = compiled.chain
    payloads = list(map(_serialize_one, compiled.programs))
    blobs = [value.tobytes() for _, value in chain.constants] + payloads
    kinds = [(index, value.dtype.name, value.shape) for index, value in chain.constants]
    header = json.dumps([kinds, chain.calls, chain.results, chain.peak_bytes, list(map(len, blobs))]).encode()
    return b"".join([_MAGIC, len(header).to_bytes(8, "little"), header, *blobs])


def serialized_bytes(compiled: Executable) -> tuple[int, int]:
    """Return (bytes of all programs when serialised, upper estimate of these bytes for the same step of fewer than
    FEW_TOKENS tokens, whose groups of layers are larger). They are equal for a program that is not a chain. A program
    that cannot be serialised counts with the size of its machine code, or 0 if that is unknown.
    """
    if not isinstance(compiled, InParts):
        return (size := _stored_size(compiled)), size
    total = sum(map(_stored_size, compiled.programs))
    return total, _MORE_OF_FEW * total


def _serialize_one(program: jax.stages.Compiled) -> bytes:
    """Return one program as bytes. Raises NotStorableError if the platform cannot serialise it, or if it calls
    Python.
    """
    try:
        return serialize_executable.serialize(program)[0]
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        raise NotStorableError(f"this platform's cannot be: {error}") from error
    except Exception as error:  # Python's serialiser fails on the function that the program calls
        raise NotStorableError("it calls Python (jax.debug.print, jax.debug.callback, io_callback, ...)") from error


def _stored_size(program: jax.stages.Compiled) -> int:
    """Return the size in bytes of a serialised program. If it cannot be serialised, return the size of its machine
    code, or 0 if that is unknown.
    """
    try:
        return len(_serialize_one(program))
    except NotStorableError:
        with contextlib.suppress(Exception):  # a runtime may raise anything, and this is an estimate
            return len(program.runtime_executable().serialize())  # type: ignore[union-attr]
    return 0


def load(payload: bytes, in_tree: Any, out_tree: Any, devices: Sequence[Any]) -> Executable:
    """Load a program or chain that `serialize` has written. This runs code from the payload.

    in_tree, out_tree: tree structures of (arguments, {}) and of the result. devices: the devices on which it runs. If
    jax cannot load the payload, any exception may be raised.
    """
    if not payload.startswith(_MAGIC):
        return serialize_executable.deserialize_and_load(payload, in_tree, out_tree, execution_devices=devices)
    begin = len(_MAGIC) + 8
    end = begin + int.from_bytes(payload[len(_MAGIC) : begin], "little")
    kinds, calls, results, peak_bytes, sizes = json.loads(payload[begin:end])
    ends = [end + sum(sizes[:number]) for number in range(len(sizes) + 1)]
    blobs = [payload[start:stop] for start, stop in zip(ends, ends[1:], strict=False)]
    constants = [
        (index, np.frombuffer(blob, jnp.dtype(name)).reshape(shape))
        for (index, name, shape), blob in zip(kinds, blobs, strict=False)
    ]
    calls = [Call(program, *map(tuple, indices)) for program, *indices in calls]
    chain = Chain(tuple(constants), tuple(calls), tuple(results), peak_bytes)
    counts = {call.program: (len(call.inputs), len(call.outputs)) for call in calls}
    programs = []
    for program, part in enumerate(blobs[len(kinds) :]):
        num_inputs, num_outputs = counts[program]
        trees = jax.tree.structure(((0,) * num_inputs, {})), jax.tree.structure([0] * num_outputs)
        programs.append(serialize_executable.deserialize_and_load(part, *trees, execution_devices=devices))
    return InParts(chain, programs, in_tree, out_tree, devices[0])


def lower_parts(
    traced: Any, arguments: Sequence[Any], donate: tuple[int, ...], device: Any
) -> tuple[list[jax.stages.Lowered], Callable[[Sequence[jax.stages.Compiled]], InParts]] | None:
    """Lower a traced program as a chain of parts. Return the lowered programs of the parts, without duplicates, and the
    function that makes the chain of them once they are compiled, in the same order. If the program has few layers,
    return None without lowering anything.

    traced: `jax.stages.Traced` for `arguments`, which are shapes. donate: indices of arguments that may be overwritten.
    device: the device that it runs on.
    """
    parts = _cut(traced.jaxpr.jaxpr)
    if parts is None:
        return None
    leaves, in_tree = jax.tree.flatten((tuple(arguments), {}))
    owners = [index for index, argument in enumerate(arguments) for _ in jax.tree.leaves(argument)]
    plan, out_tree = _Plan(traced.jaxpr, leaves, [owner in donate for owner in owners]), traced.out_info
    for index in range(len(parts)):
        plan.add(parts, index)

    def chain(programs: Sequence[jax.stages.Compiled]) -> InParts:
        return InParts(plan.chain(programs), programs, in_tree, jax.tree.structure(out_tree), device)

    return plan.lowered, chain


def _cut(jaxpr: Jaxpr) -> list[list[JaxprEqn]] | None:
    """Split a trace into lists of operations: those before the layers, those of each group of layers, and those after
    the layers. Return None for fewer than _LEAST_LAYERS layers.

    All groups except the last have the same size, for which the number of compiled layers plus the cost of the calls is
    smallest; in steps of few tokens among the sizes with at most _MORE_OF_FEW times the compiled layers of other steps.
    """
    eqns = jaxpr.eqns
    layers = [index for index, eqn in enumerate(eqns) if eqn.params.get("name") == LAYER]
    if len(layers) < _LEAST_LAYERS:
        return None
    kinds = [id(eqns[index].params["jaxpr"]) for index in layers]
    size, _ = _groups(kinds, _shape_of(eqns[layers[0]].outvars[0]).shape[0])
    starts, end = layers[::size], layers[-1] + 1
    # Operations between two layers belong to the group of the first.
    groups = [eqns[start:stop] for start, stop in zip(starts, [*starts[1:], end], strict=True)]
    return [eqns[: layers[0]], *groups, eqns[end:]]


def num_compiled_layers(kinds: Sequence[Hashable], num_tokens: int) -> int:
    """Return the number of layers that a forward pass compiles on one CPU device. kinds: a value for each layer, equal
    for layers that differ only in their weights. num_tokens: tokens of the step.
    """
    return len(kinds) if len(kinds) < _LEAST_LAYERS else _groups(kinds, num_tokens)[1]


def _groups(kinds: Sequence[Hashable], num_tokens: int) -> tuple[int, int]:
    """Return (layers of a group, layers that are compiled) of the best chain: the one with the fewest compiled layers
    plus _COST_OF_MANY for each call; below FEW_TOKENS plus _COST_OF_FEW, among chains of at most _MORE_OF_FEW times as
    many. Arguments: see `num_compiled_layers`.
    """
    groups_of = {
        size: [tuple(kinds[i : i + size]) for i in range(0, len(kinds), size)] for size in range(len(kinds), 0, -1)
    }
    num_compiled = {size: sum(map(len, set(groups))) for size, groups in groups_of.items()}

    def best(sizes: Iterable[int], cost_of_call: float) -> int:
        """Return the size with the fewest compiled layers plus cost of calls, of equals the first."""
        return min(sizes, key=lambda size: num_compiled[size] + cost_of_call * len(groups_of[size]))

    size = best(groups_of, _COST_OF_MANY)
    if num_tokens < FEW_TOKENS:
        most = _MORE_OF_FEW * num_compiled[size]
        size = best([each for each in groups_of if num_compiled[each] <= most], _COST_OF_FEW)
    return size, num_compiled[size]


class _Plan:
    """Chain under construction, to which parts are added one by one. A value's index says when it was added.

    Attributes:
      lowered: the lowered programs, without duplicates.
    """

    def __init__(self, closed: ClosedJaxpr, leaves: Sequence[Any], may_overwrite: Sequence[bool]):
        """Begin with the arguments and constants of a trace as the first values. leaves: shapes of the arguments.
        may_overwrite: for each, whether it is donated.
        """
        self._jaxpr = closed.jaxpr
        self._shapes = list(leaves)
        self._index_of: dict[Any, int] = {var: index for index, var in enumerate(self._jaxpr.invars)}
        self._constants: dict[int, np.ndarray] = {}
        for var, value in zip(self._jaxpr.constvars, closed.consts, strict=True):
            self._index_of[var] = self._constant(np.asarray(value))
        self._own = {index for index, may in enumerate(may_overwrite) if may}
        self._results: list[int] = []
        # Donated arguments are large. Values of other signatures are not overwritten, so that equal parts stay equal.
        self._large = {_signature(leaves[index]) for index in self._own}
        self._calls: list[Call] = []
        self._programs: dict[Any, int] = {}
        self.lowered: list[Any] = []

    def add(self, parts: Sequence[Sequence[JaxprEqn]], part_index: int) -> None:
        """Add part number `part_index` as a call, and lower its program unless an equal one has been lowered. Parts
        must be added in order. Literals of all but the first and last parts become arguments. The last one also sets
        the chain's results.

        parts: all parts, as `_cut` returns them.
        """
        eqns, outer = parts[part_index], part_index in (0, len(parts) - 1)
        # Layers may also differ in literals, so their program takes these as arguments.
        eqns = (
            list(eqns) if outer else [eqn.replace(invars=list(map(self._without_literal, eqn.invars))) for eqn in eqns]
        )
        copied = self._copied() if part_index == len(parts) - 1 else {}
        made = {var for eqn in eqns for var in eqn.outvars}
        read = dict.fromkeys(atom for eqn in eqns for atom in eqn.invars if not isinstance(atom, Literal))
        read |= dict.fromkeys(copied.values())
        inputs = [var for var in read if var not in made]
        later = {atom for part in parts[part_index + 1 :] for eqn in part for atom in _vars(eqn.invars)}
        later |= _vars([atom for number, atom in enumerate(self._jaxpr.outvars) if number not in copied])
        outputs = [var for eqn in eqns for var in eqn.outvars if var in later]
        outputs += copied.values()
        indices = [self._index_of[var] for var in inputs]
        kept = self._constants.keys() | {self._index_of[var] for var in later if var in self._index_of}
        last = tuple(index for index in indices if index not in kept)
        donated = self._overwritten(indices, last, outputs)
        key = _key(eqns, inputs, outputs), tuple(_signature(self._shapes[index]) for index in indices), donated
        if key not in self._programs:
            self._programs[key] = len(self.lowered)
            part = self._jaxpr.replace(constvars=[], invars=inputs, outvars=outputs, eqns=eqns)
            function = jax.jit(jaxpr_as_fun(ClosedJaxpr(part, ())), donate_argnums=donated)
            self.lowered.append(function.lower(*[self._shapes[index] for index in indices]))
        new = [self._new(_shape_of(var)) for var in outputs]
        self._own.update(new)
        self._calls.append(Call(self._programs[key], tuple(indices), tuple(new), last))
        num_made = len(outputs) - len(copied)
        self._index_of |= zip(outputs[:num_made], new, strict=False)
        if part_index == len(parts) - 1:
            copies = dict(zip(copied, new[num_made:], strict=True))
            outvars = self._jaxpr.outvars
            self._results = [copies[i] if i in copies else self._index_of[var] for i, var in enumerate(outvars)]

    def _copied(self) -> dict[int, Var]:
        """Return {result number: variable} for the results that the last part must copy: constants, arguments that are
        not donated, and values that are returned twice. They are copied because a caller may donate a result, which
        must not share memory with another value.
        """
        found: dict[int, Var] = {}
        seen: set[Var] = set()
        for number, atom in enumerate(self._jaxpr.outvars):
            var = self._without_literal(atom)
            index = self._index_of.get(var)  # None if the last part computes it
            if var in seen or (index is not None and index not in self._own):
                found[number] = var
            seen.add(var)
        return found

    def _overwritten(self, indices: Sequence[int], last: Sequence[int], outputs: Sequence[Var]) -> tuple[int, ...]:
        """Return the positions of a part's inputs that are donated, so that outputs with the same signature can take
        their memory. An input is donated if the chain may overwrite it, it is large, no later part reads it, and an
        output of its signature is left, as each output takes the memory of one input.

        indices: index of the value of each input. last: indices of the values that no later part reads. outputs: the
        part's output variables.
        """
        free = Counter(_signature(_shape_of(var)) for var in outputs)
        found = []
        for number, index in enumerate(indices):
            signature = _signature(self._shapes[index])
            if index in last and index in self._own and signature in self._large and free[signature]:
                free[signature] -= 1
                found.append(number)
        return tuple(found)

    def chain(self, programs: Sequence[Any]) -> Chain:
        """Return the finished Chain, after all parts have been added.

        programs: the compiled programs, in the order of `lowered`. Their temporary memory counts in the chain's peak.
        """
        alive: dict[int, int] = {}
        peak = before = 0
        for call in self._calls:
            alive |= {index: self._bytes_of(index) for index in call.outputs}
            own = programs[call.program].memory_analysis().temp_size_in_bytes
            peak, before = max(peak, sum(alive.values()) + before + own), own
            for index in call.last:
                alive.pop(index, None)
        return Chain(tuple(self._constants.items()), tuple(self._calls), tuple(self._results), peak)

    def _bytes_of(self, index: int) -> int:
        """Return the bytes that a new value adds to those in use. They are 0 if it has the signature of a donated
        argument, whose memory it takes.
        """
        shape, dtype, _ = signature = _signature(self._shapes[index])
        return 0 if signature in self._large else int(np.prod(shape)) * dtype.itemsize

    def _without_literal(self, atom: Any) -> Any:
        """Return a variable unchanged. For a literal, add its value as a constant and return a new variable for it."""
        if not isinstance(atom, Literal):
            return atom
        var = Var(atom.aval)
        self._index_of[var] = self._constant(np.asarray(atom.val, _shape_of(atom).dtype))
        return var

    def _constant(self, value: np.ndarray) -> int:
        """Return the index of a constant among the values. It is added unless an equal one exists."""
        for index, known in self._constants.items():
            if known.dtype == value.dtype and known.shape == value.shape and known.tobytes() == value.tobytes():
                return index
        index = self._new(jax.ShapeDtypeStruct(value.shape, value.dtype))
        self._constants[index] = value
        return index

    def _new(self, shape: Any) -> int:
        """Append a value of this shape to the values and return its index."""
        self._shapes.append(shape)
        return len(self._shapes) - 1


def _vars(atoms: Sequence[Any]) -> set[Any]:
    """Return the variables among atoms, without literals."""
    return {atom for atom in atoms if not isinstance(atom, Literal)}


def _shape_of(atom: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of a variable or literal of a jaxpr."""
    return jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)


def _signature(leaf: Any) -> tuple[Any, ...]:
    """Return (shape, dtype, layout) of a value, where the layout is None for the default order. Values with equal
    signatures can be the same argument of one program.
    """
    order = None if leaf.sharding is None else getattr(leaf.format.layout, "major_to_minor", None)
    if order == tuple(range(len(leaf.shape))):
        order = None
    return tuple(leaf.shape), leaf.dtype, order


def _key(eqns: Sequence[JaxprEqn], inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[Any, ...]:
    """Return a key that is equal for parts that do the same computation on arguments of the same shapes.

    inputs, outputs: the part's input and output variables, in order.
    """
    numbers = {var: number for number, var in enumerate(inputs)}

    def number_of(atom: Any) -> Any:
        return repr(atom) if isinstance(atom, Literal) else numbers.setdefault(atom, len(numbers))

    def static(value: Any) -> Any:
        # Equal layers share one trace object.
        return id(value) if isinstance(value, Jaxpr | ClosedJaxpr) else repr(value)

    operations = [
        (
            eqn.primitive,
            tuple((name, static(value)) for name, value in sorted(eqn.params.items())),
            tuple(map(number_of, eqn.invars)),
            tuple(map(number_of, eqn.outvars)),
        )
        for eqn in eqns
    ]
    return tuple(operations), tuple(map(number_of, outputs))
