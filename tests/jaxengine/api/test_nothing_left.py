"""Requests leave nothing behind: after hundreds of them as many objects live as before.

Objects are counted, not bytes: what the C library keeps depends on its lists, and jaxlib 0.10.2 leaves some 64 bytes
behind in one of six calls whose arguments are numpy arrays. `python -m benchmarks endurance` shows bytes over 100,000
requests.
"""

from __future__ import annotations

import contextlib
import gc
from collections import Counter, namedtuple
from types import SimpleNamespace
from typing import Any

import pytest

from jaxengine import SamplingParams
from jaxengine.api import core
from jaxengine.config.base.errors import ConfigError
from jaxengine.engine.stats.timeline import Timeline

WARM, COUNTED = 160, 200


def count() -> Counter[str]:
    """Objects that refer to others, by type."""
    gc.collect()
    return Counter(type(each).__qualname__ for each in gc.get_objects())


def assert_nothing_grew(before: Counter[str], after: Counter[str]) -> None:
    grown = after - before
    assert not {kind: more for kind, more in grown.items() if more > COUNTED // 20}, grown.most_common(5)


@pytest.fixture
def engine(make_llm, monkeypatch):
    """Its ring of steps is so short that it is full before the counting begins."""
    llm = make_llm()
    monkeypatch.setattr(llm.core.engine, "timeline", Timeline(16, 16))
    return llm


def serve(llm, count, first):
    """Prompts unlike each other, so that cached pages are taken again; parameters of all kinds."""
    for start in range(first, first + count, 20):
        numbers = range(start, start + 20)
        prompts = [
            {"prompt_token_ids": [(n * 31 + place * (n % 89 + 1)) % 120 + 3 for place in range(9)]} for n in numbers
        ]
        params = [
            SamplingParams(
                max_tokens=2,
                n=2 if number % 7 == 0 else 1,
                temperature=0.0 if number % 7 and number % 2 else 1.0,
                top_k=number % 5,
                presence_penalty=0.5 if number % 3 == 0 else 0.0,
                logit_bias={number % 100: 1.0} if number % 11 == 0 else None,
                stop_token_ids=[number % 128] if number % 4 == 0 else None,
                logprobs=1 if number % 5 == 0 else None,
                prompt_logprobs=1 if number % 13 == 0 else None,
                seed=number if number % 2 else None,
            )
            for number in numbers
        ]
        llm.generate(prompts, params, use_tqdm=False)


def test_requests_leave_no_object_behind(engine):
    serve(engine, WARM, 0)
    count()  # Counting makes objects of its own, the first time.
    serve(engine, 20, WARM)
    before = count()
    serve(engine, COUNTED, WARM + 20)
    assert_nothing_grew(before, count())


def test_refused_and_aborted_requests_leave_no_object_behind(engine):
    core = engine.core

    def hurt(count, first):
        for number in range(first, first + count):
            with pytest.raises(ValueError, match="allowed|too long"):
                engine.generate({"prompt_token_ids": [3] * 96}, SamplingParams(max_tokens=1), use_tqdm=False)
            prompt = {"prompt_token_ids": [number % 100 + 3] * 5}
            prepared = core.inputs.prepare(prompt, SamplingParams(max_tokens=20), request_id=f"left-{number}")
            core.add(prepared)
            core.step()
            core.abort(f"left-{number}")
        while core.has_unfinished:
            core.step()

    hurt(60, 0)
    before = count()
    hurt(COUNTED // 2, 60)
    assert_nothing_grew(before, count())


def test_an_engine_that_cannot_be_made_ends_its_cluster(monkeypatch):
    def fail(*_):
        raise ConfigError("kv_events_config", {}, "another address")

    ended = []
    Opened = namedtuple("Opened", "config source")
    source = SimpleNamespace(without_weights=lambda: None, closing_on_error=contextlib.nullcontext)
    monkeypatch.setattr(core, "Cluster", lambda config: SimpleNamespace(shutdown=ended.append))
    monkeypatch.setattr(core, "open_resolved", lambda config, *_: Opened(config, source))
    monkeypatch.setattr(core, "input_processor", lambda *_: None)
    monkeypatch.setattr(core, "load_runner", lambda *_, peers: None)
    monkeypatch.setattr(core, "Engine", fail)
    options: Any = SimpleNamespace(nnodes=2, fit=False, disable_log_stats=True)
    with pytest.raises(ConfigError, match="another address"):
        core.EngineCore(options)
    assert len(ended) == 1 and "another address" in ended[0]
