"""View of checkpoints that store a matrix of all experts of a layer in one tensor as one with tensors per expert.

    NAME.experts.gate_up_proj        [E, D, 2F]          experts.{e}.gate_proj.weight, up_proj.weight [F, D]
    NAME.experts.gate_up_proj_bias   [E, 2F]             experts.{e}.gate_proj.bias, up_proj.bias [F]
    NAME.experts.down_proj           [E, F, D]           experts.{e}.down_proj.weight [D, F]
    NAME.experts.down_proj_bias      [E, D]              experts.{e}.down_proj.bias [D]

or gate and up separately, in stacks `gate_proj` and `up_proj` [E, D, F]; or matrices [2F, D] and [D, F], as linear
layers have them; or an expert's modules under other names, such as w1, w3 and w2; or, in MXFP4 (OCP Microscaling
Formats 1.0), `gate_up_proj_blocks` [E, 2F, D / 32, 16] and `gate_up_proj_scales` [E, 2F, D / 32], and the same for
`down_proj`. In e4m3, as in transformers ("fp8"), matrices have scales in the same orientation, and possibly one for
inputs:

    NAME.experts.gate_up_proj_scale_inv         [E, D / columns, 2F / rows] of blocks, or [E, 1, 1]
    NAME.experts.gate_up_proj_activation_scale  [E]

which are read as experts.{e}.gate_proj.weight_scale_inv [F / rows, D / columns] and .activation_scale [1].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxengine.models.params.source import WHOLE, StackedExperts, WeightSource, WrappedSource, stored_names
from jaxengine.models.params.stored_names import fault_in

GATE_UP, DOWN, BLOCKS, SCALES, BIAS = "gate_up_proj", "down_proj", "_blocks", "_scales", "_bias"
UP = "up_proj"  # of experts without a gate
ALTERNATING = "alternating_gate_up_proj"  # whose rows of gate and up alternate, whatever StackedExperts says
# Beginnings of the last part of a stack's name, and which of StackedExperts.modules it has.
_STEMS = {GATE_UP: slice(2), ALTERNATING: slice(2), DOWN: slice(2, 3), "gate_proj": slice(1), "up_proj": slice(1, 2)}
SCALE_INV, INPUT_SCALE = "_scale_inv", "_activation_scale"
# Suffixes of supported stacks: number of axes, and name of an expert's tensor.
_KINDS = {
    "": (3, "weight"),
    BIAS: (2, "bias"),
    BLOCKS: (4, "weight"),
    SCALE_INV: (3, "weight_scale_inv"),
    INPUT_SCALE: (1, "activation_scale"),
}
# Values of four-bit codes: a sign, two bits of exponent, one of mantissa.
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# Values of a byte's two codes, the low half first: [256, 2].
_PAIRS = np.stack([np.tile(FP4, 16), np.repeat(FP4, 16)], axis=1)


class _Part(NamedTuple):
    """One expert's tensor: rows `first`, `first + step`, ... of its part of the stack.

    stack: name of the stack, without the suffix BLOCKS. kind: an end of a stack's name, one of _KINDS, or SCALES.
    shape: [out, in] or [out].
    """

    stack: str
    kind: str
    expert: int
    first: int
    step: int
    shape: tuple[int, ...]


def split_stack(name: str) -> tuple[str, str, str] | None:
    """Return (the experts' name "LAYER.experts", the beginning of the last part, one of _STEMS, and its rest, one of
    _KINDS, SCALES or unknown) of a stack's name; None for the name of another tensor.
    """
    prefix, _, end = name.rpartition(".")
    if not prefix.endswith(".experts") or (stem := next((each for each in _STEMS if end.startswith(each)), "")) == "":
        return None
    return prefix, stem, end.removeprefix(stem)


def modules_in(stem: str, stacked: StackedExperts) -> tuple[str, ...]:
    """Return the names of an expert's modules whose matrices a stack has, given its beginning, one of _STEMS."""
    return stacked.modules[_STEMS[stem]]


def of_shapes(stacked: StackedExperts, source: WeightSource, hidden_size: int) -> StackedExperts:
    """Return `stacked` with its orientation `out_first` determined by shapes, if it is None: True if the outputs of
    `down_proj`, hidden_size, are the second axis. Without such a tensor it is False.
    """
    if stacked.out_first is not None:
        return stacked
    shapes = (tuple(source.shape(name)) for name in source.names() if name.endswith(f".experts.{DOWN}"))
    return stacked._replace(out_first=next((shape[1:2] == (hidden_size,) for shape in shapes), False))


class StackedSource(WrappedSource):
    """WeightSource of a checkpoint whose experts are stacked as one with tensors per expert; a checkpoint without such
    tensors is unchanged.

    scheme: storage of modules, for a model that stays quantised: MXFP4 is then returned undecoded, as
    experts.{e}.down_proj.blocks [D, F / 2] and .scales [D, F / 32] instead of .weight, and the same for gate_proj and
    up_proj; None to decode it. num_routed: number of experts with those that have no weights, for which transformers
    writes some; None if there are none. num_sinks: number of shared experts in stacks of their own. Raises
    ModelFileError for stacks of other shapes than these experts have and of other kinds, and for an expert's tensor
    that the checkpoint has twice, alone and in a stack or in two stacks.
    """

    def __init__(
        self,
        source: WeightSource,
        stacked: StackedExperts,
        num_experts: int,
        *,
        num_routed: int | None = None,
        num_sinks: int = 0,
        scheme: Callable[[str], Any] | None = None,
    ):
        super().__init__(source)
        self._scheme = scheme
        self._stacked, self._counts = stacked, (num_experts, num_routed or num_experts, num_sinks)
        self._parts: dict[str, _Part | None] = {}
        self._last: tuple[tuple, np.ndarray] | None = None
        for name in source.names():
            if (parts := split_stack(name)) is None:
                self._put(name, None, name)
            elif not name.endswith(SCALES):
                self._add(name, *parts)

    def names(self) -> Iterable[str]:
        return self._parts.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        part = self._parts[name]
        return self._source.shape(name) if part is None else part.shape

    def held_in(self, name: str) -> tuple[str, ...]:
        if (part := self._parts.get(name)) is None:
            return (name,)
        return (f"{part.stack}{part.kind}",) if part.kind in (BLOCKS, SCALES) else (part.stack,)

    def read(self, name: str, rows: slice = WHOLE, columns: slice = WHOLE) -> np.ndarray:
        part = self._parts[name]
        if part is None:
            return self._source.read(name, rows, columns)
        first, last, _ = rows.indices(part.shape[0])
        start = part.first + first * part.step
        own = slice(start, start + max(0, (last - first - 1) * part.step + 1))
        if part.kind == BIAS:
            return self._source.read(part.stack, slice(part.expert, part.expert + 1), own)[0, :: part.step]
        if part.kind == INPUT_SCALE:
            return self._source.read(part.stack, slice(part.expert, part.expert + 1))
        if self._scheme is not None and part.kind in (BLOCKS, SCALES):
            held = self._source.read(part.stack + part.kind, slice(part.expert, part.expert + 1), own)[0, :: part.step]
            return held.reshape(len(held), part.shape[1])[:, columns]
        if part.kind == BLOCKS:
            # Rows of both gate and up where they alternate, so that one read serves both.
            span = slice(own.start - own.start % part.step, own.stop - 1 + part.step - (own.stop - 1) % part.step)
            matrix = self._read_blocks(part, span)
            return matrix[own.start - span.start : own.stop - span.start : part.step, columns]
        if self._stacked.out_first:
            expert = slice(part.expert, part.expert + 1)
            return self._source.read(part.stack, expert, own)[0, :: part.step, columns]
        return self._read_matrix(part, columns)[:, own.start : own.stop : part.step].T

    def _add(self, name: str, prefix: str, stem: str, kind: str) -> None:
        """Add the experts' tensors of one stack. Raises ModelFileError for another kind, shape or number of experts,
        for scales that do not fit, and if gate and up cannot be told apart.

        prefix, stem, kind: the parts of its name, from split_stack.
        """
        if kind not in _KINDS:
            known = ", ".join(f"{stem}{each}" for each in (*_KINDS, SCALES))
            text = f"is not a tensor of stacked experts that can be read; allowed: {known}"
            raise fault_in(self._source, name, text)
        rank, called = _KINDS[kind]
        shape = tuple(self._source.shape(name))
        if len(shape) != rank or shape[0] not in self._counts:
            what = "scales" if kind in (SCALE_INV, INPUT_SCALE) else "matrices or biases"
            text = f"must be a stack of the {what} of {self._counts[0]} experts, got shape {shape}"
            raise fault_in(self._source, name, text)
        if kind == BLOCKS:
            self._check_scales(name.removesuffix(BLOCKS) + SCALES, shape)
        out, *inner = self._matrix(shape) if kind in ("", SCALE_INV) else shape[1:] or (1,)
        if kind == BLOCKS:
            inner = [32 * shape[2]]
        modules = modules_in(stem, self._stacked)
        # A single scale for all rows serves gate and up.
        share = out == 1 and kind in (SCALE_INV, INPUT_SCALE)
        if out % len(modules) and not share:
            raise fault_in(self._source, name, f"gate and up must be equally many rows, got {out} between them")
        interleaved = (self._stacked.interleaved or stem == ALTERNATING) and len(modules) == 2
        if kind == SCALE_INV and len(modules) == 2 and not share:
            self._check_border(name, f"{prefix}.0.{modules[0]}", out)
        rows = 1 if share else out // len(modules)
        for expert in range(shape[0]):
            for number, module in enumerate(modules):
                first, step = (0, 1) if share else (number, 2) if interleaved else (number * rows, 1)
                part = _Part(name.removesuffix(BLOCKS), kind, expert, first, step, (rows, *inner))
                tensor = f"{prefix}.{expert}.{module}"
                if kind == BLOCKS and self._scheme is not None:
                    self._put(f"{tensor}.blocks", part._replace(shape=(rows, inner[0] // 2)), name)
                    self._put(f"{tensor}.scales", part._replace(kind=SCALES, shape=(rows, inner[0] // 32)), name)
                else:
                    self._put(f"{tensor}.{called}", part, name)

    def _put(self, tensor: str, part: _Part | None, stored: str) -> None:
        """Store where `tensor` is read: a part of a stack, or None for itself. stored: the checkpoint's name, for the
        ModelFileError that is raised if another one of its tensors stands for `tensor` too.
        """
        if tensor in self._parts:
            text = f"stands for {tensor}, as does {stored_names(self, tensor)[0]}"
            raise fault_in(self._source, stored, text)
        self._parts[tensor] = part

    def _matrix(self, stack: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape [out, in] of one expert, given the shape [E, ...] of a stack of matrices or of scales of
        their blocks.
        """
        return stack[1:] if self._stacked.out_first else stack[:0:-1]

    def _check_border(self, name: str, module: str, num_blocks: int) -> None:
        """Raise ModelFileError for blocks that may contain rows of both gate and up: either the whole stack may be
        divided into blocks, or gate and up separately.

        name: the stack of scales. module: a module of an expert, whose storage format has the size of blocks.
        num_blocks: number of blocks along the rows.
        """
        stack = name.removesuffix(SCALE_INV)
        stored = getattr(None if self._scheme is None else self._scheme(module), "stored", None)
        if (block := getattr(stored, "block", None)) is None or stack not in set(self._source.names()):
            return  # refused for what is missing, or for its shape
        rows = self._matrix(tuple(self._source.shape(stack)))[0]
        if (
            self._stacked.interleaved
            or ALTERNATING in name
            or (rows // 2 % block[0] and num_blocks == -(-rows // block[0]))
        ):
            text = f"blocks of {block[0]} of the {rows} rows of gate and up have rows of both, which is not read"
            raise fault_in(self._source, name, text)

    def _check_scales(self, name: str, blocks: tuple[int, ...]) -> None:
        """Raise ModelFileError unless the scales `name` exist and fit the blocks of this shape: [E, rows, n] and [E,
        rows, n, 16].
        """
        scales = tuple(self._source.shape(name)) if name in set(self._source.names()) else None
        if blocks[3] != 16 or scales != blocks[:3]:
            text = f"MXFP4 must have blocks [E, rows, n, 16] and scales [E, rows, n], got {blocks} and {scales}"
            raise fault_in(self._source, name, text)

    def _read_matrix(self, part: _Part, columns: slice) -> np.ndarray:
        """Return columns `columns` of an expert's [out, in] in the stack's orientation, [columns, all rows of the
        stack]. The last result is cached.
        """
        first, last, _ = columns.indices(part.shape[1])
        key = part.stack, part.expert, first, last
        if self._last is None or self._last[0] != key:
            expert = slice(part.expert, part.expert + 1)
            self._last = key, self._source.read(part.stack, expert, slice(first, last))[0]
        return self._last[1]

    def _read_blocks(self, part: _Part, rows: slice) -> np.ndarray:
        """Return rows of an expert's MXFP4 matrix decoded, bfloat16 [rows, in]. The last result is cached. Raises
        ModelFileError for tensors of another dtype.
        """
        key = part.stack, part.expert, rows.start, rows.stop
        if self._last is None or self._last[0] != key:
            expert = slice(part.expert, part.expert + 1)
            blocks = self._source.read(part.stack + BLOCKS, expert, rows)[0]
            scales = self._source.read(part.stack + SCALES, expert, rows)[0]
            if blocks.dtype != np.uint8 or scales.dtype != np.uint8:
                text = f"MXFP4 must be stored as U8, got {blocks.dtype} and {scales.dtype}"
                raise fault_in(self._source, part.stack + BLOCKS, text)
            self._last = key, mxfp4_values(blocks, scales)
        return self._last[1]


def mxfp4_values(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return decoded MXFP4 numbers as bfloat16[..., 32 n], which represents them exactly. blocks: u8[..., n, 16], two
    codes in a byte, 32 numbers in a block. scales: u8[..., n], exponents of the blocks' factors plus 127.
    """
    values = _PAIRS[blocks].reshape(*scales.shape, 32)
    scaled = np.ldexp(values, scales[..., None].astype(np.int32) - 127)
    return scaled.reshape(*scales.shape[:-1], 32 * scales.shape[-1]).astype(ml_dtypes.bfloat16)
