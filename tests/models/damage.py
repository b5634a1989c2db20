"""Wounds for files that a model is made of: JSON whose values change their kind, size or place, and bytes that flip."""

from __future__ import annotations

import copy
import random
from typing import Any

# What no sane file says: other kinds, numbers that no type holds, text that is none, levels without end.
STRANGE: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2**31, 2**63, 2**64, 10**400, -(10**400), 0.5, -0.0, 1e308, 5e-324),
    *(float("inf"), float("nan"), "", "x", "\ud800", "\0", "x" * 5000, "../../etc/passwd", "/dev/zero", [], {}, [[]]),
    *([None], {"": {}}, {"\udfff": "\ud800"}, list(range(3000)), ["x"] * 3000),
)


def deep(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = {"a": [value]}
    return value


def damaged_value(value: Any, rng: random.Random) -> Any:
    """A copy with one to three wounds, anywhere in it."""
    root = [copy.deepcopy(value)]
    for _ in range(rng.randint(1, 3)):
        holder: Any = root
        key: Any = 0
        while isinstance(holder[key], (dict, list)) and holder[key] and rng.random() < 0.9:
            holder = holder[key]
            key = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
        match rng.randrange(5):
            case 0 | 1:
                holder[key] = copy.deepcopy(rng.choice(STRANGE))
            case 2:
                holder[key] = deep(rng.choice((1, 30, 200)))
            case 3 if isinstance(holder[key], int):
                holder[key] = holder[key] * rng.choice((-1, 0, 2, 3, 2**20, 2**40)) + rng.choice((0, 1))
            case 3 if isinstance(holder, dict):
                holder[rng.choice(list(holder))] = holder[key]
            case _ if isinstance(holder, dict):
                del holder[key]
                if not holder:
                    break
            case _:
                holder[key] = rng.choice(holder)
    return root[0]


def damaged_bytes(raw: bytes, rng: random.Random) -> bytes:
    """A copy with one to six wounds, or cut short, or gone."""
    data = bytearray(raw)
    match rng.randrange(6):
        case 0:
            return bytes(data[: rng.randrange(len(data) + 1)])
        case 1:
            return rng.choice((b"", b"[" * 20_000, b'{"a":' * 20_000, b"\xff", b"\xef\xbb\xbf{}", b"9" * 5000))
    for _ in range(rng.randint(1, 6)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)
