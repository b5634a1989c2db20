"""Tables of inputs that one test walks through: `@each_row` in the place of `@pytest.mark.parametrize`.

A table of pure functions is one test. It runs every row and reports every row that fails, in one assertion; as a case
each, hundreds of rows fill the report and are collected by every worker. What needs a fixture of its own, a skip or
seconds of time stays a case.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

MAX_SHOWN = 20


def each_row(names: str | Iterable[str], table: Iterable[Any], ids: Iterable[str] | None = None) -> Callable:
    """Call the test for each row of `table` and raise one AssertionError that lists the rows that failed.

    names, table: as for pytest.mark.parametrize; a dict stands for its keys. A row may be a pytest.param without marks.
    ids: labels of the rows; by default their values.

    Fixtures are shared by all rows.
    """
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    table = list(table)
    labels = [None] * len(table) if ids is None else list(ids)
    labelled = [_labelled(names, row, label) for row, label in zip(table, labels, strict=True)]
    assert labelled, "a table without rows tests nothing"

    def decorate(test: Callable) -> Callable:
        signature = inspect.signature(test)
        unknown = set(names) - set(signature.parameters)
        assert not unknown, f"{test.__name__} has no parameter {', '.join(sorted(unknown))}"

        def report(failed: list[str]) -> None:
            shown = [*failed[:MAX_SHOWN], f"and {len(failed) - MAX_SHOWN} more"] if len(failed) > MAX_SHOWN else failed
            if failed:
                raise AssertionError(f"{len(failed)} of {len(labelled)} rows failed:\n" + "\n".join(shown))

        if inspect.iscoroutinefunction(test):

            @functools.wraps(test)
            async def walk(*args: Any, **fixtures: Any) -> None:
                failed = []
                for label, values in labelled:
                    try:
                        await test(*args, **fixtures, **values)
                    except (Exception, pytest.fail.Exception) as error:
                        failed.append(_line(label, error))
                report(failed)

        else:

            @functools.wraps(test)
            def walk(*args: Any, **fixtures: Any) -> None:
                failed = []
                for label, values in labelled:
                    try:
                        test(*args, **fixtures, **values)
                    except (Exception, pytest.fail.Exception) as error:
                        failed.append(_line(label, error))
                report(failed)

        kept = [each for name, each in signature.parameters.items() if name not in names]
        walk.__signature__ = signature.replace(parameters=kept)  # the fixtures that pytest looks for
        return walk

    return decorate


def _labelled(names: list[str], row: Any, label: str | None) -> tuple[str, dict[str, Any]]:
    """(label, value by name) of one row."""
    if hasattr(row, "values") and hasattr(row, "marks"):  # a pytest.param
        assert not row.marks, "a row with a mark must be a case of its own"
        label, row = row.id or label, row.values[0] if len(row.values) == 1 else row.values
    values = (row,) if len(names) == 1 else tuple(row)
    assert len(values) == len(names), f"a row of {len(names)} values has {len(values)}: {values!r}"
    if label is None:
        label = ", ".join(map(_short, values))
    return label, dict(zip(names, values, strict=True))


def _short(value: Any) -> str:
    text = getattr(value, "__name__", None) or repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _line(label: str, error: BaseException) -> str:
    where, trace = "", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if "/tests/" in file and file != __file__:
            where = f" (line {trace.tb_lineno})"
        trace = trace.tb_next
    return f"[{label}]{where} {type(error).__name__}: {error}"
