"""How many requests the benchmark of endurance sends."""

from __future__ import annotations

from types import SimpleNamespace

import jaxengine
from benchmarks.engine import endurance


def test_as_many_requests_are_sent_as_rows_count(monkeypatch, capsys):
    sent = []
    llm = SimpleNamespace(generate=lambda prompts, *_, **__: sent.extend(prompts))
    monkeypatch.setattr(jaxengine, "LLM", lambda *_, **__: llm)
    endurance.offline("model", 250)
    assert len(sent) == 250 and capsys.readouterr().out.splitlines()[-1].startswith("[250,")
