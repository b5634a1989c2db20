"""Calls of kernels that a program contains, found by tracing it: nothing runs, and no model family is named."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax

from jaxengine.pallas_kernels.kv.pages import KVPages
from jaxengine.pallas_kernels.registry import is_kernel, kernel_kind, observed, without_rows

# Part of the key of jax's trace caches: with another value, a function that was traced before is traced anew.
_ANEW = jax.make_user_context(None)
# Indices of arguments that follow from the others.
_WORK_LISTS = {"ragged_paged_attention": 3, "select_keys": 4, "select_blocks": 3, "lora_product": 4}


class Call(NamedTuple):
    """Recorded call of an implementation, with shapes in place of arrays.

    Attributes:
      op, platform: arguments of `registry.kernel`. kind: the kind of implementation as which it ran.
      arguments, options: those of the implementation; an array is a ShapeDtypeStruct. A pool has one page, as kernels
        do not depend on their number.
    """

    op: str
    platform: str
    kind: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def text(self) -> str:
        """Text that names operation, kind, shapes and options; equal for equal calls in any process.

        Arrays of a work list are represented without their shapes, which follow from the others.
        """
        given = [each for index, each in enumerate(self.arguments) if index != _WORK_LISTS.get(self.op)]
        given += [each for name, each in self.options.items() if name != "schedule"]
        shapes = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(given) if _is_array(leaf))
        return f"{self.op} ({self.kind}): {shapes}; {_described((self.arguments, self.options))}"

    @property
    def short(self) -> str:
        """Operation, kind and shapes as a text for people."""
        return self.text.partition("; ")[0]


class _NotTraceable(Exception):
    """Error of a kernel that fails while it is traced; its arguments are the kernel's row, (op, kind)."""


def recorded_calls(function: Callable, arguments: Sequence[Any], platforms: Collection[str]) -> list[Call]:
    """Trace a function with these arguments, arrays or shapes, and return its calls of kernels on `platforms`, without
    repetitions.

    If an operation is chosen at compilation, all platforms' implementations are traced; calls of other platforms and of
    operations in plain XLA are left out. A kernel that fails while it is traced is among the calls, and the function is
    traced again without it.
    """
    found: dict[str, Call] = {}
    unused: set[tuple[str, str]] = set()

    def observer(op: str, platform: str, implementation: Callable, *operands: Any, **options: Any) -> Any:
        kind = kernel_kind(op, platform)
        if kind is None or platform not in platforms or not is_kernel(op, platform):
            return implementation(*operands, **options)
        call = Call(op, platform, kind, *_abstract((operands, options)))
        found.setdefault(call.text, call)
        try:
            return implementation(*operands, **options)
        except Exception as error:
            raise _NotTraceable(op, kind) from error

    while True:
        try:
            with _ANEW(object()), observed(observer), without_rows(unused):
                jax.eval_shape(function, *arguments)
            return list(found.values())
        except _NotTraceable as error:
            unused.add(error.args)


def _abstract(tree: Any) -> Any:
    """Return the pytree `tree` with ShapeDtypeStructs in place of arrays, and KVPages with pools of one page. Other
    leaves stay as they are.
    """

    def shapes(leaf: Any) -> Any:
        if isinstance(leaf, KVPages):
            data: Any = jax.ShapeDtypeStruct((1, *leaf.data.shape[1:]), leaf.data.dtype)
            scales = [None if x is None else shapes(x) for x in (leaf.k_scale, leaf.v_scale)]
            spec = dataclasses.replace(leaf.spec, num_pages=1)
            return dataclasses.replace(leaf, data=data, k_scale=scales[0], v_scale=scales[1], spec=spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if _is_array(leaf) else leaf

    return jax.tree.map(shapes, tree, is_leaf=lambda leaf: isinstance(leaf, KVPages))


def _is_array(leaf: Any) -> bool:
    """Return whether a leaf has a shape and a dtype, as arrays and ShapeDtypeStructs do."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _described(value: Any) -> str:
    """Return a text of the static parts of a value, the same in any process.

    A ShapeDtypeStruct is "*", a function its name, and another callable object the name of its type. Tuples, lists,
    mappings, dataclasses and partial functions are described item by item, mappings and dataclasses sorted by name.
    Anything else is its repr.
    """
    if isinstance(value, jax.ShapeDtypeStruct):
        return "*"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_described, value))})"
    if isinstance(value, Mapping):
        return f"({', '.join(f'{name}={_described(each)}' for name, each in sorted(value.items()))})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return f"{type(value).__name__}{_described(fields)}"
    if isinstance(value, partial):
        return f"{_described(value.func)}{_described((value.args, value.keywords))}"
    if callable(value):
        return getattr(value, "__qualname__", type(value).__name__)
    return repr(value)
