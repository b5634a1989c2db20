"""Checkpoints whose quantization_config says "bitsandbytes": each weight is four bits, the index of an entry of a
table.

The tables (NF4's quantiles of a normal distribution, arXiv:2305.14314, and FP4) are not evenly spaced, so that no
kernel here multiplies with the stored codes: matrices are dequantised as they are read. Layout:
bitsandbytes.functional.QuantState.as_dict(packed=True).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxengine.models.config.fields import MAX_FLOAT
from jaxengine.models.quantization.base.rules import LINEAR, Quantization, bad, names_in, one_of
from jaxengine.models.quantization.base.stored import InOrder, Shape, StoredModule, num_groups

METHOD = "bitsandbytes"
_MOST_BYTES = 1 << 12  # most bytes of a module's JSON text


@dataclass(frozen=True)
class TableEntries(InOrder):
    """Storage format of `weight` u8 [out * in / 2, 1], row after row, the first of two numbers in the high bits;
    `quant_map` f32 [16], the table; `absmax`, the factor of `blocksize` consecutive numbers, across rows; and a JSON
    text.

    The codes are the dequantised values themselves. A module with a `weight` [out, in] of floating-point numbers and no
    JSON text is plain, as transformers 5 has experts as parameters.

    Attributes:
      kind: "nf4" or "fp4".
      nested: whether `absmax` is quantised itself: u8 entries of a table [256], multiplied by a `nested_absmax` per
        block of them, plus an offset.
    """

    format: str
    kind: str
    nested: bool
    dtype: str = "float32"
    group: int | None = None
    has_zeros: bool = False
    activation: None = None

    @property
    def _state(self) -> str:
        """Kind of the tensor with the JSON text."""
        return f"weight.quant_state.bitsandbytes__{self.kind}"

    def tensors(self, module: StoredModule) -> Mapping[str, tuple[Shape, ...]]:
        if self._is_plain(module):
            return {"weight": (module.shape,)}
        size = module.shape[0] * module.shape[1]
        needed: dict[str, tuple[Shape, ...]] = {"weight": ((num_groups(size, 2), 1),), "weight.quant_map": ((16,),)}
        needed[self._state] = ()
        if not module.has(self._state):
            return needed
        needed[self._state] = (tuple(module.source.shape(module.tensor(self._state))),)
        state = self._read_state(module)
        needed["weight.absmax"] = ((count := num_groups(size, state["blocksize"]),),)
        if self.nested:
            needed["weight.nested_absmax"] = ((num_groups(count, state["nested_blocksize"]),),)
            needed["weight.nested_quant_map"] = ((256,),)
        return needed

    def check(self, module: StoredModule) -> None:
        """Raise ModelFileError unless `weight` is u8, the JSON text is valid, and tables and factors have finite
        numbers; of a plain module, unless its numbers are floating-point.
        """
        if self._is_plain(module):
            module.read("weight", None, slice(0, 1))
            return
        module.read("weight", "uint8", slice(0, 1))
        for kind in ("weight.quant_map", *(("weight.nested_absmax", "weight.nested_quant_map") if self.nested else ())):
            if not np.isfinite(module.read(kind)).all():
                raise module.fail(kind, "must hold finite numbers")
        if not np.isfinite(self._largest(module, self._read_state(module))).all():
            raise module.fail("weight.absmax", "must hold finite numbers")

    def codes(self, module: StoredModule, rows: slice, columns: slice) -> np.ndarray:
        if self._is_plain(module):
            return module.read("weight", None, rows, columns)
        (out, size), state = module.shape, self._read_state(module)
        first, last, _ = rows.indices(out)
        begin, end = first * size, last * size
        pairs = module.read("weight", "uint8", slice(begin // 2, num_groups(end, 2))).ravel()
        entries = np.stack([pairs >> 4, pairs & 15], axis=-1).ravel()[begin % 2 :][: end - begin]
        largest = self._largest(module, state)[np.arange(begin, end) // state["blocksize"]]
        values = module.read("weight.quant_map")[entries] * largest
        return values.reshape(last - first, size)[:, columns]

    def scales(self, module: StoredModule, rows: slice) -> tuple[np.ndarray, np.ndarray | None]:
        first, last, _ = rows.indices(module.shape[0])
        return np.ones((last - first, 1), np.float32), None

    def _is_plain(self, module: StoredModule) -> bool:
        """Return whether the checkpoint has a `weight` of the matrix's shape and no JSON text for it."""
        return (
            not module.has(self._state)
            and module.has("weight")
            and tuple(module.source.shape(module.tensor("weight"))) == module.shape
        )

    def _largest(self, module: StoredModule, state: Mapping[str, Any]) -> np.ndarray:
        """Return the absmax of all blocks, f32 [blocks], decoded if it is quantised itself.

        state: the module's parsed JSON text. Raises ModelFileError for tensors of another dtype.
        """
        if not self.nested:
            return module.read("weight.absmax")
        entries, scales = module.read("weight.absmax", "uint8"), module.read("weight.nested_absmax")
        scales = np.repeat(scales, state["nested_blocksize"])[: len(entries)]
        return module.read("weight.nested_quant_map")[entries] * scales + np.float32(state["nested_offset"])

    def _read_state(self, module: StoredModule) -> dict[str, Any]:
        """Return the parsed JSON text of a module, with "nested_offset" always present. Raises ModelFileError if a
        field that is used is missing or wrong.
        """
        shape = module.source.shape(module.tensor(self._state))
        if len(shape) != 1 or shape[0] > _MOST_BYTES:
            raise module.fail(self._state, f"must be a text of at most {_MOST_BYTES} bytes, got shape {tuple(shape)}")
        try:
            state = json.loads(module.read(self._state, "uint8").tobytes())
        except (ValueError, RecursionError) as error:
            raise module.fail(self._state, f"must be JSON: {error}") from error
        sizes = ("blocksize", "nested_blocksize") if self.nested else ("blocksize",)
        wanted = {"quant_type": self.kind, "shape": list(module.shape)}
        if not isinstance(state, dict) or any(state.get(field) != value for field, value in wanted.items()):
            raise module.fail(self._state, f"must be an object with {wanted}, got {str(state)[:200]}")
        for field in sizes:
            if type(state.get(field)) is not int or not 1 <= state[field] <= 1 << 20:
                raise module.fail(self._state, f"{field} must be a whole number of 1 to 2^20, got {state.get(field)!r}")
        offset = state.get("nested_offset", 0.0)
        if self.nested and (type(offset) not in (int, float) or not abs(offset) <= MAX_FLOAT):
            raise module.fail(self._state, f"nested_offset must be a finite number, got {offset!r}")
        return {**state, "nested_offset": offset}


def read(settings: Mapping[str, Any]) -> Quantization:
    """Return the Quantization that bitsandbytes settings describe: all matrices but those that llm_int8_skip_modules
    lists are NF4 or FP4 (by default) entries, as bnb_4bit_quant_type says, whose scales are quantised with
    bnb_4bit_use_double_quant (default: false).

    Raises ModelConfigError for eight bits, unless load_in_4bit is true or absent, for a bnb_4bit_quant_storage other
    than uint8, and for other values of the rest.
    """
    if settings.get("load_in_8bit") or settings.get("_load_in_8bit"):
        raise bad("load_in_8bit", True, "false: rows of 8 bits with outliers beside them are not supported")
    names = ("load_in_4bit", "_load_in_4bit")
    one_of(settings, next((name for name in names if name in settings), names[0]), (True,))
    one_of(settings, "bnb_4bit_quant_storage", ("uint8",), "uint8")
    kind = one_of(settings, "bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")  # its own default
    stored = TableEntries(
        f"{METHOD} {kind}", kind, nested=one_of(settings, "bnb_4bit_use_double_quant", (True, False), False)
    )
    return Quantization(METHOD, (((LINEAR,), stored),), listed=names_in(settings, "llm_int8_skip_modules"))
