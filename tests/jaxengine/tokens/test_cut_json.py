"""JSON that ends anywhere: what was read before stays, and what is no JSON is told apart."""

from __future__ import annotations

import contextlib
import json

import pytest

from jaxengine.tokens.cut_json import read_cut_json

VALUE = {"a": [1, -2.5, 'x\n\\"é\U0001f600'], "b": {"c": None, "d": [], "e": {}}, "f": True, "g": ["[{", 0]}


def part_of(part, whole) -> bool:
    """Whether everything in `part` stands in `whole` at its place; texts and numbers may be shorter."""
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(key in whole and part_of(part[key], whole[key]) for key in part)
    if isinstance(part, list):
        return isinstance(whole, list) and all(part_of(*pair) for pair in zip(part, whole, strict=False))
    if isinstance(part, str):
        return whole.startswith(part)
    return isinstance(part, int | float) == isinstance(whole, int | float)


@pytest.mark.parametrize("ascii_only", [False, True])
def test_every_cut_keeps_what_is_whole(ascii_only):
    text = json.dumps(VALUE, ensure_ascii=ascii_only)
    assert read_cut_json(text) == VALUE
    for end in range(1, len(text)):
        try:
            value = read_cut_json(text[:end])
        except UnicodeEncodeError:  # between the halves of a surrogate pair
            assert ascii_only
            continue
        assert part_of(value, VALUE), text[:end]
    assert read_cut_json('{"a": {"b": 1}, "c": "wor') == {"a": {"b": 1}, "c": "wor"}
    assert read_cut_json('{"a": 1, "b": tr') == {"a": 1}


@pytest.mark.parametrize("text", ["", "oops", '{"a": oops}', "{]", "[1}", '{"a": NaN}', "[1e999]", '"\\ud800"', "}"])
def test_what_is_no_json_is_refused(text):
    with pytest.raises(ValueError):
        read_cut_json(text)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("repeated", ["{", '"', "\\", '"\\', "[1,", '{"a":', '"\\u12'])
def test_hostile_text_takes_linear_time(repeated):
    with contextlib.suppress(ValueError, RecursionError):
        read_cut_json(repeated * (300_000 // len(repeated)))
