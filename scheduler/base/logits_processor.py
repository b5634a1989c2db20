"""LogitsProcessor: a user's own sampling parameters, and the traced function that applies them.

A class declares columns, one for each parameter, and how logits change. Columns are checked and numbered here, without
jax; jaxengine.runner.extensions.logits_processors keeps them on the devices and runs the functions.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, ClassVar, NamedTuple

from jaxengine.scheduler.base.errors import RequestError, show_value
from jaxengine.scheduler.base.token_params import MAX_PROCESSORS

_NAME = re.compile("[a-z][a-z0-9_]*")
_INT32 = -(2**31), 2**31 - 1
_FLOAT = (-1e20, 1e20)


@dataclass(frozen=True)
class Column:
    """One parameter of a request.

    Attributes:
      default: value of requests without it; its type, float, int or bool, is the parameter's: f32, i32 or bool. Not
        checked itself.
      doc: what it does, for documentation.
      low, high: limits, both allowed; None for -1e20 and 1e20 of a float, and for those of int32 of an int. A bool
        has none.
      values: the only values allowed, of those within the limits; None for all of them.
    """

    default: float | int | bool
    doc: str = ""
    low: float | None = None
    high: float | None = None
    values: tuple[float | int | bool, ...] | None = None

    @property
    def dtype(self) -> str:
        """Dtype of the parameter: "float32", "int32" or "bool"."""
        return {bool: "bool", int: "int32", float: "float32"}[type(self.default)]

    @property
    def allowed(self) -> str:
        """Allowed values in words, for a message: "one of 1, 2", "True or False", "an int from 0 to 8" or "a number
        from 0 to 1".
        """
        if self.values is not None:
            return "one of " + ", ".join(map(repr, self.values))
        if isinstance(self.default, bool):
            return "True or False"
        low, high = self._limits
        return f"an int from {low} to {high}" if isinstance(self.default, int) else f"a number from {low:g} to {high:g}"

    def read(self, name: str, value: Any) -> float | int | bool:
        """Return a value in the parameter's type after checking it.

        name: name of the parameter, for messages. A bool is no number, and a float no integer. Raises RequestError with
        the value and what is allowed.
        """
        if not self._allows(value):
            raise RequestError(f"{name} must be {self.allowed}, got {show_value(value)}", param=name, value=value)
        return type(self.default)(value)

    def _allows(self, value: Any) -> bool:
        """Return whether a value is of the parameter's kind (bool, integer, or real number), within its limits, and
        among its `values` if there are any. False for NaN.
        """
        kind = type(self.default)
        if isinstance(value, bool) or kind is bool:
            right = isinstance(value, bool) and kind is bool
        else:
            # NaN is in no range.
            right = isinstance(value, Integral if kind is int else Real)
            right = right and self._limits[0] <= value <= self._limits[1]  # pyright: ignore[reportOperatorIssue]
        return right and (self.values is None or value in self.values)

    def word(self, value: float | int | bool) -> int:
        """Return the 32 bits of a value as an int32: those of a float32 if the default is a float, else those of an
        int32. Raises OverflowError or struct.error for a value that does not fit.
        """
        return struct.unpack("<i", struct.pack("<f" if isinstance(self.default, float) else "<i", value))[0]

    @property
    def _limits(self) -> tuple[float, float]:
        """Smallest and largest allowed value: `low` and `high`, or, where these are None, the limits of int32 or -1e20
        and 1e20.
        """
        least, most = _INT32 if isinstance(self.default, int) else _FLOAT
        return least if self.low is None else self.low, most if self.high is None else self.high


class VocabColumns(NamedTuple):
    """Facts about the C tokens whose logits a device has: the whole vocabulary or its part.

    Attributes:
      token_ids: i32[C], consecutive.
      output_counts: i32[S, C], times that each token is in the output of a row, drafts before the position included;
        None for a processor without `uses_counts`.
      in_prompt: bool[S, C], whether each token is in the row's prompt; None without `uses_counts`.
    """

    token_ids: Any
    output_counts: Any = None
    in_prompt: Any = None


class LogitsProcessor:
    """Parameters of requests and how they change logits. A subclass is registered with
    `LLM(..., logits_processors=[...])`, and compiled into the engine's samplers when it starts.

    Attributes:
      columns: the parameters by name. A request that gives one in `SamplingParams(extra_args={name: value})` uses the
        processor; its other columns then have their defaults.
      uses_counts: whether `process` needs the token counts of the requests that use it.
    """

    columns: ClassVar[Mapping[str, Column]]
    uses_counts: ClassVar[bool] = False

    @staticmethod
    def process(logits: Any, columns: Any, vocab: VocabColumns) -> Any:
        """Return changed logits of rows, f32 [S, C]. JAX traces the function, which must be pure. Subclasses must
        define it; here it raises NotImplementedError.

        Runs after masks and logit_bias, before penalties and temperature. Rows whose requests do not use the processor
        keep their logits, and forbidden tokens (-inf) stay forbidden, whatever it returns.

        Args:
          logits: f32 [S, C]. With a vocabulary that n devices split, C is V / n.
          columns: each row's value of every column, [S, 1] in the parameter's dtype, by name.
          vocab: the tokens of the C columns of logits; with `uses_counts` also how often each is in a row's output, and
            whether in its prompt.
        """
        raise NotImplementedError


def check_processors(processors: Sequence[type[LogitsProcessor]]) -> str | None:
    """Return one sentence on the first fault of an engine's processors, or None if there is none.

    Faults: more than MAX_PROCESSORS processors, `columns` that is no dict or empty, no `process`, a column name that is
    not lower case letters, digits and _ (a letter first) or is used twice, also by two processors, an entry that is no
    Column, or a default that is not a finite number or a bool. Limits and `values` are not checked.
    """
    if len(processors) > MAX_PROCESSORS:
        return f"{len(processors)} processors; at most {MAX_PROCESSORS} are allowed"
    seen: dict[str, str] = {}
    for each in processors:
        columns = getattr(each, "columns", None)
        if not isinstance(columns, Mapping) or not columns:
            return f"{each.__name__}.columns is {show_value(columns)}; it must be a dict from name to Column"
        if each.process is LogitsProcessor.process:
            return f"{each.__name__} has no function process"
        for name, column in columns.items():
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                return f"{each.__name__} has the column {show_value(name)}; names are lower case letters, digits and _"
            if name in seen:
                return f"{seen[name]} and {each.__name__} both have the column {name!r}"
            seen[name] = each.__name__
            if not isinstance(column, Column) or type(column.default) not in (bool, int, float):
                return f"{each.__name__}.columns[{name!r}] is {show_value(column)}; it must be a Column of a number"
            if isinstance(column.default, float) and not math.isfinite(column.default):
                return f"{each.__name__}.columns[{name!r}] has the default {column.default}, which is not finite"
    return None


def read_extra_args(
    given: Mapping[str, Any] | None, processors: Sequence[type[LogitsProcessor]], others: Sequence[str] = ()
) -> dict[int, tuple[float | int | bool, ...]]:
    """Check a request's extra_args (`given`, which may be None) for an engine with these processors. others: names that
    are read elsewhere, for messages.

    Returns a dict with, for the index of each processor that the request uses, the values of all its columns. A request
    uses a processor if it gives any of its columns; the others then have their defaults. Raises RequestError for a name
    that no processor has, and for a value that is not allowed.
    """
    found: dict[int, tuple[float | int | bool, ...]] = {}
    known = [name for each in processors for name in each.columns]
    for name in given or ():
        if name not in known:
            allowed = ", ".join((*others, *known)) + ("" if known else "; the engine has no logits_processors")
            raise RequestError(f"extra_args has {show_value(name)}; allowed: {allowed}", param="extra_args", value=name)
    for number, each in enumerate(processors):
        if given and not given.keys().isdisjoint(each.columns):
            found[number] = tuple(
                column.read(f"extra_args.{name}", given[name]) if name in given else column.default
                for name, column in each.columns.items()
            )
    return found
