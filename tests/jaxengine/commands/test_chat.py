"""The chat loop over an engine that answers with what it was sent."""

from __future__ import annotations

import io
import logging
import re
import sys
from types import SimpleNamespace

import pytest

import jaxengine.api.llm
from jaxengine.commands.chat import chat, local_pieces, speed
from jaxengine.commands.cli import main
from jaxengine.requests.output.outputs import CompletionOutput, RequestOutput
from jaxengine.requests.params.sampling_params import RequestOutputKind, SamplingParams
from jaxengine.scheduler.base.errors import RequestError


class FakeCore:
    """Streams the conversation's own text back, a word a step."""

    def __init__(self):
        self.inputs = self.media_reader = self
        self.prepared, self.aborted, self.params, self.shown = [], [], [], []
        self._words: list[str] = []
        self._rejected: list[tuple[str, RequestError]] = []

    def read(self, messages):
        """The messages with their pictures' names for texts."""
        texts = [
            message["content"]
            if isinstance(message["content"], str)
            else " ".join(str(part.get("text", part.get("image"))) for part in message["content"])
            for message in messages
        ]
        return [{**message, "content": text} for message, text in zip(messages, texts, strict=True)], {}

    def chat_prompt(self, messages, multi_modal_data):
        text = "|".join(f"{message['role'][0]}:{message['content']}" for message in messages)
        self.shown.append(text)
        return {"prompt": text, "prompt_token_ids": list(text)}

    def prepare(self, prompt, params):
        if len(prompt["prompt_token_ids"]) > 40:
            raise RequestError("prompt is too long", param="prompt")
        self.params.append(params)
        self.prepared.append(prompt["prompt"])
        return SimpleNamespace(request_id=str(len(self.prepared)), text=prompt["prompt"])

    def add(self, prepared):
        self._words = ["", *(word + " " for word in prepared.text.split())]

    def step(self):
        if "refused" in self._words[-1]:
            self._rejected = [
                ("another", RequestError("not ours")),
                (str(len(self.prepared)), RequestError("no grammar")),
            ]
            return []
        if self.interrupt:
            self.interrupt = False
            raise KeyboardInterrupt
        text, self._words = self._words[0], self._words[1:]
        finished = not self._words
        completion = CompletionOutput(0, text, [1], finish_reason="stop" if finished else None)
        return [RequestOutput("1", None, [1], [completion], finished)]

    interrupt = False

    def pop_rejected(self):
        rejected, self._rejected = self._rejected, []
        return rejected

    def abort(self, request_id):
        self.aborted.append(request_id)


class FakeLLM:
    def __init__(self, **options):
        self.options = options
        self.core = FakeCore()
        FakeLLM.last = self

    def get_default_sampling_params(self):
        return SamplingParams(temperature=0.5, top_k=7)


@pytest.fixture
def talk(monkeypatch, capsys):
    monkeypatch.setattr(jaxengine.api.llm, "LLM", FakeLLM)

    def run(lines, *arguments):
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        status = main(["chat", *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_each_line_is_answered_with_the_conversation_so_far(talk):
    status, out, _ = talk("hi\n\nyou\n")
    assert status == 0
    assert FakeLLM.last.core.prepared == ["u:hi", "u:hi|a:u:hi |u:you"]
    assert out == "u:hi \nu:hi|a:u:hi |u:you \n"


def test_exit_leaves_and_reset_forgets(talk):
    talk("one\n/reset\ntwo\n/exit\nthree\n", "--system", "S")
    assert FakeLLM.last.core.prepared == ["s:S|u:one", "s:S|u:two"]


def test_the_system_message_can_be_changed_and_taken_away(talk):
    talk("one\n/system T\ntwo\n/reset\n/system\nthree\n", "--system", "S")
    assert FakeLLM.last.core.prepared == ["s:S|u:one", "s:T|u:one|a:s:S|u:one |u:two", "u:three"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('"""one\n  two\n"""\n', "one\n  two"),
        ('"""\n/exit\n"""\n', "/exit"),
        ('"""one"""\n', "one"),
        ("one \\\ntwo\n", "one \ntwo"),
        ("one\\\n", "one"),
    ],
    ids=repr,
)
def test_a_message_of_several_lines(talk, lines, message):
    talk(lines)
    assert FakeLLM.last.core.prepared == [f"u:{message}"]


def test_help_says_what_there_is_and_a_slip_is_not_sent(talk):
    _, out, err = talk("/help\n/histroy\n/etc/hosts is what?\n")
    assert all(name in out for name in ("/system", "/reset", "/exit")) and "/histroy" in err
    assert FakeLLM.last.core.prepared == ["u:/etc/hosts is what?"]


def test_a_request_that_a_step_refuses_is_an_error_and_not_a_wait(talk):
    status, out, err = talk("refused\nhi\n")
    core = FakeLLM.last.core
    assert (status, out, core.prepared, core.aborted) == (0, "u:hi \n", ["u:refused", "u:hi"], [])
    assert err.startswith("no grammar; /reset begins a new conversation\n")


def test_each_answer_says_how_fast_it_was(talk):
    _, _, err = talk("a b c\n")
    assert re.search(r"^\[4 tokens, the first after [\d.]+ s, then [\d.]+ tokens/s\]$", err, re.MULTILINE)
    assert speed(11, 0.5, 2.0) == "11 tokens, the first after 0.50 s, then 5.0 tokens/s"
    assert speed(1, 0.5, 0.0) == "1 tokens, the first after 0.50 s"


def test_the_engines_lines_stay_out_of_the_chat(talk, monkeypatch):
    monkeypatch.setattr(logging.getLogger("jaxengine"), "level", logging.INFO)
    talk("hi\n")
    assert not logging.getLogger("jaxengine.engine.metrics").isEnabledFor(logging.INFO)


def test_options_reach_the_engine_and_the_request(talk):
    talk("hi\n", "--max-tokens", "9", "--dtype", "bfloat16")
    assert FakeLLM.last.options == {"dtype": "bfloat16"}
    params = FakeLLM.last.core.params[0]
    assert params.max_tokens == 9 and params.top_k == 7 and params.output_kind is RequestOutputKind.DELTA


def test_an_answer_may_fill_the_context_unless_told_otherwise(talk):
    talk("hi\n")
    assert FakeLLM.last.core.params[0].max_tokens is None


def test_a_conversation_that_is_too_long_is_said_and_the_chat_goes_on(talk):
    status, out, err = talk("x" * 50 + "\nhi\n")
    assert status == 0 and "too long" in err and "/reset" in err
    assert FakeLLM.last.core.prepared == ["u:hi"] and out == "u:hi \n"


def test_a_wrong_sampling_option_is_said_before_the_model_is_loaded(talk):
    FakeLLM.last = None
    status, _, err = talk("hi\n", "--temperature", "9")
    assert status == 2 and "temperature" in err and FakeLLM.last is None


def test_ctrl_c_ends_the_answer_and_frees_the_request(monkeypatch, capsys):
    monkeypatch.setattr(jaxengine.api.llm, "LLM", FakeLLM)
    monkeypatch.setattr(FakeCore, "interrupt", True)
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n"))
    assert chat({}, {}) == 0
    assert FakeLLM.last.core.aborted == ["1"] and "[stopped]" in capsys.readouterr().out


def test_leaving_a_stream_early_aborts_its_request():
    llm = FakeLLM()
    pieces = local_pieces(llm, {"prompt": "a b c", "prompt_token_ids": [1]}, SamplingParams())
    next(pieces)
    pieces.close()
    assert llm.core.aborted == ["1"]


def test_pictures_go_with_the_next_message(talk):
    _, out, _ = talk("one\n/image https://a.org/b\ntwo\nthree\n", "--image", "a.png", "--image", "data:,x")
    assert "It will be sent with the next message." in out
    prompts = FakeLLM.last.core.prepared
    assert prompts[0] == "u:a.png data:,x one"
    assert "|u:https://a.org/b two" in FakeLLM.last.core.shown[1] and FakeLLM.last.core.shown[2].endswith("|u:three")
    assert "/image" in talk("/help\n")[1]
