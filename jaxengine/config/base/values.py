"""Normalises values of options: paths, numpy's numbers, dtype objects, sizes such as "4G".

`plain`, `whole_number` and `dtype_name` return the stored form, or the value unchanged, for the option's check to
refuse.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

# As in vLLM, lower case letters are powers of 1,000 and capitals powers of 1,024; "B" and "iB" may follow.
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)(?:([kmgtKMGT])(i?B)?)?", re.ASCII)
_DTYPE_NAMES = {"half": "float16", "float": "float32"}


def read_size(text: str) -> int:
    """Return the integer that a text denotes: "4096", "4k" (4,000), "4K" (4,096), "1.5g", "4GiB" (2**32), "4GB" (4 *
    10**9).

    White space around the text is allowed. Units of 1,000 (k, KB and so on) may have a fraction, as in "1.5GB", which
    is rounded down. Raises ValueError for other texts, including fractions of units of 1,024 or without a unit.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(
            f"{text!r} is not a whole number, optionally followed by k, m, g, t (of 1000) or K, M, G, T (of 1024)"
        )
    digits, letter, ending = found.groups()
    if letter and ending:
        letter = letter.upper() if ending == "iB" else letter.lower()
    unit = _UNITS[letter] if letter else 1
    if "." in digits and (not letter or letter.isupper()):
        raise ValueError(f"{text!r} is not a whole number; fractions need k, m, g or t")
    whole, _, fraction = digits.partition(".")
    number = int(whole) * unit + int(fraction or 0) * unit // 10 ** len(fraction)
    return number


def plain(value: Any) -> Any:
    """Return numpy scalars, except structured and complex ones, as Python's, and path objects as text; other values
    unchanged.
    """
    if isinstance(value, np.generic) and not isinstance(value, (np.void, np.complexfloating)):
        return value.item()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value


def whole_number(value: Any) -> Any:
    """Return integer-like values (numpy's, jax's) as int; others, including bool and float, are returned unchanged."""
    if isinstance(value, (int, float, str)):
        return value
    try:
        return operator.index(value)
    except (TypeError, ValueError):
        return value


def dtype_name(value: Any) -> Any:
    """Return the name of a dtype given as "half" (float16), "float" (float32), or an object of jax, numpy or torch;
    other values are unchanged.
    """
    if not isinstance(value, str):
        try:
            text = str(value)
            if text.startswith("torch."):
                value = text.removeprefix("torch.")
            elif value is not None:
                value = np.dtype(value).name
        except (TypeError, ValueError):  # ValueError: a dict of dicts
            return value
    return _DTYPE_NAMES.get(value, value) if isinstance(value, str) else value


_KINDS: dict[str, tuple[Any, str]] = {
    "int": (int, "a whole number"),
    "bool": (bool, "True or False"),
    "float": ((int, float), "a number"),
    "str": (str, "text"),
    "str | list": ((str, list, tuple), "text, or a list of texts"),
    "str | dict": ((str, Mapping), "text, or a dict"),
    "list": ((list, tuple), "a list"),
    **dict.fromkeys(("dict", "Mapping"), (Mapping, "a dict")),
}


def kind_missed(value: Any, annotation: str | tuple[Any, ...]) -> str | None:
    """Return a description of what a value should be, such as "a whole number or None"; None if the value matches.

    annotation: the field's type, as text, or the values that it may have. Only the types in _KINDS, with or without
    None and parameters, are checked; values of other annotations always match. A bool is not an int or a float; an int
    is a float.
    """
    if isinstance(annotation, tuple):
        taken = isinstance(value, (str, int)) and not isinstance(value, bool) and value in annotation
        return None if taken else ", ".join(map(str, annotation))
    if value is None and "None" in annotation:
        return None
    kind = annotation.removesuffix(" | None").partition("[")[0]
    types, said = _KINDS.get(kind, (object, ""))
    wrong = isinstance(value, bool) and kind in ("int", "float")
    if isinstance(value, (list, tuple)) and kind == "str | list":
        wrong = not all(isinstance(each, str) for each in value)
    if isinstance(value, types) and not wrong:
        return None
    return said + (" or None" if "None" in annotation else "")
