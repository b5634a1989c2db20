"""Tables, percentiles and the ratio rows of `bench peers`."""

from __future__ import annotations

import json

import pytest

from jaxengine.bench.peers import compare, message_of
from jaxengine.results import percentile, record, table, write_json


def test_table_aligns_words_left_and_numbers_right():
    assert table([{"name": "a", "n": 1}, {"name": "long", "n": 12.25}]).splitlines() == [
        "name     n",
        "----  ----",
        "a        1",
        "long  12.2",
    ]
    assert table([{"n": None}]).splitlines()[-1].strip() == "-"
    assert table([]) == ""


def test_record_aligns_names():
    assert record({"a": 1, "long": None}) == "a     1\nlong  -"


@pytest.mark.parametrize(("share", "expected"), [(0.5, 2), (0.51, 3), (0.9, 4), (1.0, 4), (0.0, 1), (0.25, 1)])
def test_percentile_is_nearest_rank(share, expected):
    assert percentile([4, 1, 3, 2], share) == expected


def test_write_json_adds_the_machine(tmp_path):
    write_json(None, {"a": 1})
    write_json(str(tmp_path / "out.json"), {"a": 1})
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["a"] == 1 and found["machine"]["cores"] >= 1


def row(workload, engine, weights, rate, decode=None):
    return {
        "workload": workload,
        "engine": engine,
        "weights": weights,
        "output_tok_s": rate,
        "decode_tok_s": decode,
    }


def test_ratios_compare_the_best_of_each_and_w1_in_the_same_form_too():
    figures = [
        row("W1", "jaxengine", "float32", 50.0, 60.0),
        row("W1", "jaxengine", "bfloat16", 80.0, 100.0),
        row("W1", "llama.cpp", "float32", 40.0, 50.0),
        row("W1", "llama.cpp", "q4_1", 100.0, 120.0),
        row("W1", "jaxengine", "q4_1", 70.0, 90.0),
        row("W3", "jaxengine", "float32", 300.0),
        row("W3-no-sharing", "jaxengine", "float32", 50.0),
    ]
    found = {(ratio["workload"], ratio["weights"], ratio["figure"]): ratio["ratio"] for ratio in compare(figures)}
    assert found == {
        ("W1", "best of each", "output_tok_s"): 0.8,
        ("W1", "float32", "output_tok_s"): 1.25,
        ("W1", "float32", "decode_tok_s"): 1.2,
        ("W1", "q4_1", "output_tok_s"): 0.7,
        ("W1", "q4_1", "decode_tok_s"): 0.75,
        ("W3", "float32", "output_tok_s"): 6.0,
    }


def test_a_prefill_is_one_request_for_one_token():
    prefill, shared = message_of("W3-prefix"), message_of("W3")
    assert prefill["prompts"] == (shared["prompts"][0][:1024],) and prefill["max_tokens"] == 1
    assert prefill["prefix"] == 0 and prefill["share_prefix"]  # which no peer leaves out
    assert shared["prefix"] == 1024 and len(shared["prompts"]) == 16 and not message_of("W3-no-sharing")["share_prefix"]


def test_without_our_own_figure_there_is_no_ratio():
    assert compare([row("W2", "llama.cpp", "float32", 40.0)]) == []
