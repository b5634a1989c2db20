"""Templates in processes of their own: one that never ends or takes all memory costs its own conversation, no other."""

from __future__ import annotations

import gc
import threading
import time

import pytest

from jaxengine.scheduler.base.errors import OverloadedError
from jaxengine.tokens import template_renderer
from jaxengine.tokens.template_renderer import BadTemplate, ConversationRefused, TemplateFailure, TemplateRenderer

# 10^10 rounds without an output, in ranges that the sandbox allows.
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
HUNGRY = "{{ ('x' * 600000000) | length }}"
DEADLINE = 0.5  # seconds


@pytest.fixture(scope="module")
def renderer():
    return TemplateRenderer()


def test_text_goes_there_and_back_as_it_is(renderer):
    variables = {"text": "\ud800 \u4e00 \U0001f600 \0", "number": 10**30, "real": 0.1, "none": None, "list": [{}]}
    assert renderer.render("{{ text }}|{{ number }}|{{ real }}|{{ none }}|{{ list }}", variables) == (
        "\ud800 \u4e00 \U0001f600 \0|1000000000000000000000000000000|0.1|None|[{}]"
    )
    assert len(renderer.render("{{ text * 1000 }}", {"text": "\u00e9" * 1000})) == 1_000_000
    with pytest.raises(BadTemplate, match="TemplateSyntaxError"):
        renderer.render("{% if %}", {})
    with pytest.raises(ConversationRefused, match=r"\\ud800"):
        renderer.render("{{ raise_exception(text) }}", variables)


@pytest.mark.timeout(60)
def test_a_template_without_an_end_is_ended(renderer, monkeypatch):
    monkeypatch.setattr(template_renderer, "RENDER_SECONDS", DEADLINE)
    with pytest.raises(TemplateFailure, match="takes more than 0.5 s") as failure:
        renderer.render(ENDLESS, {})
    assert type(failure.value) is TemplateFailure  # no other way to write the messages is tried
    monkeypatch.undo()
    assert renderer.render("{{ 1 + 1 }}", {}) == "2"


def test_a_template_that_takes_all_memory_gets_none(renderer):
    with pytest.raises(ConversationRefused, match="more than 512 MiB"):
        renderer.render(HUNGRY, {})
    assert renderer.render("{{ 1 + 1 }}", {}) == "2"


def test_a_process_that_has_ended_is_replaced(renderer):
    assert renderer.render("{{ 1 }}", {}) == "1"
    for each in renderer._idle.queue:
        if each._process is not None:
            each._process.process.kill()
            each._process.process.wait(60)
    assert renderer.render("{{ 2 }}", {}) == "2"


def test_one_that_takes_long_leaves_room_for_others_and_no_crowd_waits(monkeypatch):
    renderer, failures = TemplateRenderer(), []
    monkeypatch.setattr(template_renderer, "WAIT_SECONDS", 0.1)
    monkeypatch.setattr(template_renderer, "RENDER_SECONDS", 30.0)

    def take_long():
        with pytest.raises(TemplateFailure) as failure:
            renderer.render(ENDLESS, {})
        failures.append(str(failure.value))

    threads = [threading.Thread(target=take_long) for _ in range(template_renderer.NUM_PROCESSES)]
    held = []
    for thread in threads:
        assert renderer.render("{{ 3 }}", {}) == "3"
        held += [each for each in renderer._idle.queue if each._process is not None]
        thread.start()
        while renderer._idle.qsize() > template_renderer.NUM_PROCESSES - 1 - threads.index(thread):
            time.sleep(0.01)
    with pytest.raises(OverloadedError, match="2 chat templates have been rendered for more than 0.1 s"):
        renderer.render("{{ 4 }}", {})
    for each in held:
        each._process.process.kill()
    monkeypatch.setattr(template_renderer, "RENDER_SECONDS", DEADLINE)  # for the processes that replace them
    for thread in threads:
        thread.join(60)
    assert failures == ["it takes more than 0.5 s"] * 2
    assert renderer.render("{{ 5 }}", {}) == "5"


def test_processes_end_with_what_they_belong_to():
    renderer = TemplateRenderer()
    renderer.render("", {})
    (process,) = [each._process.process for each in renderer._idle.queue if each._process is not None]
    del renderer
    gc.collect()
    assert process.wait(60) is not None
