"""`jaxengine bench gains`: engines are measured in turns and by their best figures; what is measured is there."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

import jaxengine
from jaxengine.bench import gains
from jaxengine.bench.gains import GAINS, Gain, Sizes, compare
from jaxengine.commands.cli import main
from jaxengine.config.base.errors import ConfigError
from tests.conftest import use_scheduler

SIZES = Sizes(num_prompts=4, input_len=6, output_len=3)


class FakeLLM:
    """Has the figures of its option `figures`, one for each time that it is measured."""

    made: list[FakeLLM] = []

    def __init__(self, figures: str = "1", **options: Any):
        if figures == "refused":
            raise ConfigError("figures", figures, "numbers")
        self.figures, self.options, self.is_open = [float(each) for each in figures.split()], options, True
        self.made.append(self)

    def shutdown(self) -> None:
        self.is_open = False


@pytest.fixture
def measured(monkeypatch) -> list[FakeLLM]:
    """Engines in the order in which they were measured."""
    monkeypatch.setattr(jaxengine, "LLM", FakeLLM, raising=False)
    monkeypatch.setattr(FakeLLM, "made", [])
    return []


def test_engines_are_measured_in_turns_and_the_best_counts(measured):
    def measure(llm: Any, sizes: Sizes) -> float:
        assert sizes == SIZES and llm.is_open
        measured.append(llm)
        return llm.figures.pop(0)

    base, changed = {"figures": "4 2 3"}, {"figures": "8 16 1"}
    row = compare(Gain("a", measure, "x/s", base, changed), {"figures": "0", "seed": 3}, SIZES, 3)
    assert row == {"gain": "a", "without": 4.0, "with": 16.0, "times": 4.0, "unit": "x/s"}
    first, second = FakeLLM.made
    assert measured == [first, second] * 3 and first.options == second.options == {"seed": 3}
    row = compare(Gain("b", measure, "s", base, changed, smaller_is_better=True), {}, SIZES, 3)
    assert (row["without"], row["with"], row["times"]) == (2.0, 1.0, 2.0)
    row = compare(Gain("c", measure, "s", base, changed, smaller_is_better=True, once=True), {}, SIZES, 3)
    assert (row["without"], row["with"], row["times"]) == (4.0, 8.0, 0.5)
    one = compare(Gain("d", measure, "x/s", measure_base=lambda llm, sizes: 2.0), {"figures": "3 5"}, SIZES, 2)
    assert (one["without"], one["with"], one["times"]) == (2.0, 5.0, 2.5) and len(FakeLLM.made) == 7
    assert not any(llm.is_open for llm in FakeLLM.made)


def test_what_an_engine_refuses_is_a_row_that_says_so(measured, monkeypatch, capsys, tmp_path):
    rows = {
        "here": Gain("is here", lambda llm, sizes: 1.0, "x"),
        "not": Gain("is not", lambda llm, sizes: 1.0, "x", {}, {"figures": "refused"}),
    }
    monkeypatch.setattr(gains, "GAINS", rows)
    assert main(["bench", "gains", "model", "--json", str(tmp_path / "gains.json")]) == 0
    said = capsys.readouterr().out
    assert "is not" in said and "not here: figures is 'refused'; allowed: numbers" in said
    found = json.loads((tmp_path / "gains.json").read_text())
    assert [row["gain"] for row in found["gains"]] == ["is here", "is not"]
    assert not any(llm.is_open for llm in FakeLLM.made)


def test_measures_of_a_real_engine(make_llm):
    llm = make_llm(max_num_batched_tokens=96, long_prefill_token_threshold=8)
    use_scheduler(llm)
    hits = llm.core.engine.scheduler
    for measure in (gains.plain_rate, gains.ragged_rate, gains.static_rate, gains.repeating_rate, gains.first_seconds):
        assert measure(llm, SIZES) > 0
    assert not hits.num_prefix_hits
    assert gains.shared_prefix_rate(llm, Sizes(4, 32, 2)) > 0 and hits.num_prefix_hits
    assert gains.longest_gap(llm, SIZES) > 0
    plan = llm.core.runner.plan
    assert gains.kv_tokens(llm, SIZES) == plan.num_pages * plan.page_size == 800
    assert not llm.core.has_unfinished


def test_each_gain_names_options_of_the_engine():
    names = {field for gain in GAINS.values() for field in (*gain.base, *gain.changed)}
    assert names <= set(jaxengine.EngineConfig.__dataclass_fields__)
    assert SimpleNamespace(**GAINS).drafts.changed["speculative_config"]["method"] == "ngram"
