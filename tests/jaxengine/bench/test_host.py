"""`bench host` measures what it says: all sequences decode, nothing ends unless asked, and the JSON has its field."""

from __future__ import annotations

import json

import pytest

from jaxengine.bench import host
from jaxengine.commands.cli import main
from jaxengine.engine.extensions.offload.offload import Offload
from jaxengine.scheduler.scheduler import Scheduler


@pytest.mark.parametrize("num_seqs", [1, 7])
def test_every_measured_step_decodes_all_sequences(num_seqs, monkeypatch):
    rows = []
    schedule = Scheduler.schedule

    def watched(self, now=0.0):
        step = schedule(self, now)
        rows.append((step.num_rows, sum(batch.num_decode for batch in step.batches)))
        return step

    monkeypatch.setattr(Scheduler, "schedule", watched)
    result = host.measure(num_seqs, 20, rounds=2)
    assert rows[-40:] == [(num_seqs, num_seqs)] * 40
    assert result["us_per_step"] == pytest.approx(result["schedule"] + result["pack"] + result["update"], abs=0.2)


def test_turnover_ends_requests_and_begins_new_ones(monkeypatch):
    admitted = []
    schedule = Scheduler.schedule

    def watched(self, now=0.0):
        step = schedule(self, now)
        admitted.append(sum(len(batch.admitted) for batch in step.batches))
        return step

    monkeypatch.setattr(Scheduler, "schedule", watched)
    host.measure(8, 100, turnover=20, rounds=1)
    # 8 sequences of 20 tokens on average over 100 steps, once without the engine's loop, once with it: about 80 ends.
    assert 40 <= sum(admitted[10:]) <= 160


def test_windows_take_turns_with_one_group(monkeypatch):
    """Rounds of both in turns: what is beyond the one is of the windows, whose groups all give pages back."""
    groups = []
    schedule = Scheduler.schedule

    def watched(self, now=0.0):
        if not self.num_waiting:
            groups.append(self.ranks[0].pages.num_groups)
        return schedule(self, now)

    monkeypatch.setattr(Scheduler, "schedule", watched)
    clock = iter(range(10_000))
    monkeypatch.setattr(host.time, "thread_time", lambda: 1.0 * next(clock) ** 2)
    result = host.measure(4, 80, rounds=1, windows=(None, 32))
    # Eight rounds of 20 steps; this clock says of each that it took two seconds more than the one before.
    assert result["more"] == 2e6 / 20
    turns = groups[groups.index(2, groups.index(1)) :]
    assert turns[turns.index(1) :][:40] == [1] * 20 + [2] * 20


def test_json_holds_one_number_for_one_size(tmp_path, capsys):
    assert main(["bench", "host", "--num-seqs", "4", "--num-steps", "5", "--json", str(tmp_path / "one.json")]) == 0
    found = json.loads((tmp_path / "one.json").read_text())
    assert found["us_per_step"] > 0 and found["results"][0]["num_seqs"] == 4
    assert found["machine"]["python"] and "us_per_step" in capsys.readouterr().out


def test_windows_are_given_on_the_command_line(tmp_path):
    arguments = ["bench", "host", "--num-seqs", "2", "--num-steps", "8", "--windows", "all", "32"]
    assert main([*arguments, "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["windows"] == [None, 32] and isinstance(found["results"][0]["more"], float)


def test_what_a_model_that_sees_adds_is_told(tmp_path):
    arguments = ["bench", "host", "--num-seqs", "2", "--num-steps", "8", "--sees"]
    assert main([*arguments, "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["sees"] is True and isinstance(found["results"][0]["more"], float)
    steps = host._Steps(2, 100, 0, sees=True)
    assert any(layout.has("pictures") for layout in steps.packer.layouts.values())
    assert not steps.packer.pack(steps.scheduler.schedule(0.0)).bucket.sections


def test_decodes_have_drafts_where_asked_for(tmp_path, capsys):
    arguments = ["bench", "host", "--num-seqs", "2", "--num-steps", "8", "--width", "4"]
    assert main([*arguments, "--json", str(tmp_path / "found.json")]) == 0
    assert json.loads((tmp_path / "found.json").read_text())["width"] == 4
    steps = host._Steps(2, 100, 0, width=4)
    assert steps.scheduler.schedule(0.0).width == 4


def test_json_holds_a_number_for_each_of_several_sizes(tmp_path):
    arguments = ["bench", "host", "--num-seqs", "1", "3", "--num-steps", "5", "--json", str(tmp_path / "two.json")]
    assert main(arguments) == 0
    assert sorted(json.loads((tmp_path / "two.json").read_text())["us_per_step"]) == ["1", "3"]


def test_requests_of_one_token_are_refused_for_they_never_decode(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "host", "--turnover", "1"])
    assert "allowed: 2 or more" in capsys.readouterr().err
    with pytest.raises(ValueError, match="turnover 1: 0, or 2 or more"):
        host.measure(1, 1, turnover=1)


def test_a_tier_takes_turns_with_none(monkeypatch):
    polls, poll = [], Offload.poll
    monkeypatch.setattr(Offload, "poll", lambda self: polls.append(self) or poll(self))
    result = host.measure(4, 20, rounds=2, offload=True)
    assert len(polls) >= 40 and len(set(polls)) == 1 and not polls[0].stores.is_busy
    assert result["over_without"] > 0.1
