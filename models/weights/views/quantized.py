"""View of a checkpoint with quantised matrices as the codes, scales and zeros that a model declares.

Each module's tensors are interpreted by its scheme (jaxengine.models.quantization.base.stored); here their names are
replaced by those that jaxengine.models.quantization.base.quantized declares, and everything that can be checked is,
before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import product
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxengine.models.params.declare import DeclaredParam
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.source import WHOLE, WeightSource, WrappedSource
from jaxengine.models.quantization.base.online import Rounded
from jaxengine.models.quantization.base.quantized import (
    CODES,
    INPUT_SCALE,
    ORDER,
    PAIRS,
    SCALES,
    VALUES,
    ZEROS,
    Quantized,
)
from jaxengine.models.quantization.base.stored import Stored, StoredModule, dequantized, spread
from jaxengine.models.weights.views.parts import tensor_name

_PLAIN = "weight"
_MATRIX = (VALUES, CODES, PAIRS)
_KINDS = (*_MATRIX, SCALES, ZEROS, ORDER, INPUT_SCALE)


def plain_name(declared: str, scheme: Callable[[str], Any]) -> str | None:
    """Return the name of the plain tensor that the model's tensor `declared` is read from: MODULE.weight for one of a
    matrix that is rounded at load, its own for one that is not quantised. None if a storage format determines the
    tensors. scheme: that of the model's Build.
    """
    module, _, kind = declared.rpartition(".")
    if kind not in _KINDS:
        return declared
    return f"{module}.weight" if isinstance(getattr(scheme(module), "stored", None), Rounded) else None


def plain_shapes(params: Iterable[DeclaredParam], scheme: Callable[[str], Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes by name of the plain tensors of weights, and those of others that a storage format determines
    as the model declares them. scheme: that of the model's Build.
    """
    found: dict[str, tuple[int, ...]] = {}
    for param in params:
        for declared in param.decl.sources:
            kind, shape = declared.name.rpartition(".")[2], tuple(param.source_shape(declared))
            name = plain_name(declared.name, scheme) or declared.name
            if name == declared.name:
                found[name] = shape
            elif kind in _MATRIX:
                found[name] = shape[0], shape[1] * (2 if kind == PAIRS else 1)
    return found


class QuantizedSource(WrappedSource):
    """WeightSource for the checkpoint of a model, or of a part of it, some of whose modules are quantised.

    Attributes:
      modules: by name, the scheme and StoredModule of each quantised module.

    Raises ModelFileError for a tensor that is missing, has another shape or numbers of another kind than its format
    requires, and for scales that are not finite.
    """

    def __init__(
        self,
        source: WeightSource,
        params: Iterable[DeclaredParam],
        scheme: Callable[[str], Any],
        *,
        partial: bool = False,
    ):
        """Check the checkpoint; raise ModelFileError for its first fault.

        params: the weights whose tensors it has; for a full checkpoint, those of all stages. scheme: that of the
        model's Build. partial: whether weights none of whose tensors exist are left out.
        """
        super().__init__(source)
        params = list(params)
        self._present = frozenset(source.names())
        self._begun = frozenset(part for name in self._present for part in _prefixes(name)) if partial else None
        self._names = dict.fromkeys(source.names())
        self.modules: dict[str, tuple[Quantized, StoredModule]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for param in params:
            self._add(param, scheme)
        for param in params:
            self._check_alike(param)

    def names(self) -> Iterable[str]:
        return self._names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name] if name in self._shapes else self._source.shape(name)

    def held_in(self, name: str) -> tuple[str, ...]:
        if name not in self._shapes:
            return (name,)
        scheme, module = self.modules[name.rpartition(".")[0]]
        kinds = {**scheme.stored.tensors(module), **scheme.stored.optional(module)}
        return tuple(module.tensor(kind) for kind in kinds if module.has(kind)) or (name,)

    def read(self, name: str, rows: slice = WHOLE, columns: slice = WHOLE) -> np.ndarray:
        if name not in self._shapes:
            return self._source.read(name, rows, columns)
        module_name, _, kind = name.rpartition(".")
        scheme, module = self.modules[module_name]
        if kind == CODES:
            codes = scheme.stored.codes(module, rows, columns)
            return codes if scheme.stored.dtype == "int4" else codes.astype(jnp.dtype(scheme.stored.dtype), copy=False)
        if kind == PAIRS:
            first, last, _ = columns.indices(self._shapes[name][1])
            codes = scheme.stored.codes(module, rows, slice(2 * first, 2 * last)).view(np.uint8)
            return (codes[:, 0::2] & 15) | codes[:, 1::2] << 4
        if kind in (ORDER, INPUT_SCALE):
            return self._of_inputs(name)[rows]
        if kind in (VALUES, _PLAIN):
            return self._dequantized(scheme, module, rows, columns)
        scales, zeros = scheme.stored.scales(module, rows)
        held = scales if kind == SCALES else zeros
        assert held is not None
        return spread(held, scheme.stored.group, module.shape[1], self._shapes[name][1])[:, columns]

    def _add(self, param: DeclaredParam, scheme_of: Callable[[str], Any]) -> None:
        """Replace a weight's tensors in `names` by those that the model declares, if it is quantised, and add its
        modules to `modules`. A matrix that the model declares as plain, such as a router, is dequantised if the
        checkpoint has it quantised.

        Does nothing if the checkpoint may lack weights and has no module of this one. Raises ModelFileError for tensors
        that do not fit the format, and for scales that are not finite.
        """
        if self._begun is not None and self._begun.isdisjoint(_modules_of(param)):
            return
        for declared in param.decl.sources:
            module_of, _, kind = declared.name.rpartition(".")
            scheme = scheme_of(module_of)
            shape = param.source_shape(declared)
            is_plain = kind not in _KINDS
            if is_plain and not (kind == _PLAIN and len(shape) == 2 and isinstance(scheme, Quantized)):
                continue
            assert isinstance(scheme, Quantized)
            for expert in range(param.decl.num_experts or 1):
                name = tensor_name(declared, expert)
                module_name = name.rpartition(".")[0]
                if (is_plain or kind in _MATRIX) and module_name not in self.modules:
                    size = shape[1] * (2 if kind == PAIRS else 1)
                    module = StoredModule(self._source, module_name, (shape[0], size), self._present, declared.stride)
                    if is_plain and not _is_quantized(scheme.stored, module):
                        continue
                    self.modules[module_name] = scheme, module
                    self._exchange(scheme, module)
                self._names[name] = None
                self._shapes[name] = tuple(shape)

    def _exchange(self, scheme: Quantized, module: StoredModule) -> None:
        """Check a module's tensors and remove their names from `names`. Raises ModelFileError for a tensor that is
        missing, of another shape or kind, or not allowed by the format, and for scales or zeros that are not finite.
        """
        stored = scheme.stored
        for kind, shapes in {**stored.optional(module), **stored.tensors(module)}.items():
            if not module.has(kind):
                if kind in stored.tensors(module):
                    text = f"a tensor of {stored.format} is missing"
                    raise module.fail(kind, text)
                continue
            shape = tuple(self._source.shape(module.tensor(kind)))
            if shape not in shapes:
                allowed = " or ".join(map(str, shapes))
                raise module.fail(kind, f"shape must be {allowed} for {stored.format}, got {shape}")
            self._names.pop(module.tensor(kind), None)
        stored.check(module)
        if "weight" in stored.tensors(module) and len(stored.tensors(module)) == 1:
            return  # rounded as it is read: there are no scales yet
        with np.errstate(over="ignore", invalid="ignore"):  # the error below reports it
            read = stored.scales(module, slice(0, module.shape[0]))
        for held, what in zip(read, ("scales", "zeros"), strict=True):
            if held is not None and (bad := int(np.sum(~np.isfinite(held)))):
                raise ModelFileError(self.path, f"{bad} of {held.size} {what} are not finite numbers", module.name)

    def _check_alike(self, param: DeclaredParam) -> None:
        """Raise ModelFileError unless the modules of one product agree on the values that are read from the first
        module only: the order of inputs, and their static scale, which must also be a normal number above 0.
        """
        kinds = {declared.name.rpartition(".")[2] for declared in param.decl.sources}
        if not kinds <= {CODES, PAIRS}:
            return
        for expert in range(param.decl.num_experts or 1):
            names = [tensor_name(declared, expert).rpartition(".")[0] for declared in param.decl.sources]
            for kind in (ORDER, INPUT_SCALE):
                if f"{names[0]}.{kind}" not in self._shapes:
                    continue
                first = self._of_inputs(f"{names[0]}.{kind}")
                # Devices take subnormal numbers for 0, and divide by it.
                if kind == INPUT_SCALE and not (np.isfinite(first) & (first >= np.finfo(np.float32).tiny)).all():
                    text = f"the scale of inputs must be finite and > 0, no subnormal number, got {first}"
                    raise ModelFileError(self.path, text, names[0])
                for name in names[1:]:
                    if not np.array_equal(first, self._of_inputs(f"{name}.{kind}")):
                        what = "order of inputs (g_idx)" if kind == ORDER else "static scale of inputs"
                        text = f"is one product with {names[0]} and must have the same {what}"
                        raise ModelFileError(self.path, text, name)

    def _of_inputs(self, name: str) -> np.ndarray:
        """Return the order of a module's inputs, i32[in], or their static scale, f32[1]. name: MODULE.ORDER or
        MODULE.INPUT_SCALE. Raises ModelFileError for a tensor of another dtype.
        """
        module_name, _, kind = name.rpartition(".")
        scheme, module = self.modules[module_name]
        if kind == ORDER:
            return scheme.stored.order(module)
        return scheme.stored.input_scale(module)

    def _dequantized(self, scheme: Quantized, module: StoredModule, rows: slice, columns: slice) -> np.ndarray:
        """Return the weights f32 [rows, columns] of a module, with inputs in the model's order. Raises ModelFileError
        for tensors of another dtype.
        """
        stored = scheme.stored
        values = dequantized(stored.codes(module, rows, WHOLE), *stored.scales(module, rows), stored.group)
        if stored.reordered:
            values[:, stored.order(module)] = values.copy()
        return values[:, columns]


def _is_quantized(stored: Stored, module: StoredModule) -> bool:
    """Return whether the checkpoint has all tensors of the format `stored` for a module; False for a format of a
    `weight` alone, and for one that rounds a plain matrix at load.
    """
    if isinstance(stored, Rounded):
        return False
    kinds = stored.tensors(module).keys()
    return kinds != {_PLAIN} and all(map(module.has, kinds))


def _modules_of(param: DeclaredParam) -> Iterator[str]:
    """Yield the names of the modules whose tensors a weight is made of, for all experts."""
    for declared, expert in product(param.decl.sources, range(param.decl.num_experts or 1)):
        yield tensor_name(declared, expert).rpartition(".")[0]


def _prefixes(name: str) -> Iterator[str]:
    """Yield the names of the modules that contain a tensor, the innermost first: "a.b" and "a" for "a.b.weight"."""
    while name := name.rpartition(".")[0]:
        yield name
