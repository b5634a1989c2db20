"""`jaxengine chat`: one conversation at a time, each answer printed as it is made.

Knows the chat loop; tokens, templates and text come from the engine. The whole conversation is sent each time: the
prefix cache makes that cheap.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxengine.requests.sampling_params import RequestOutputKind, SamplingParams
from scheduler.errors import RequestError

if TYPE_CHECKING:
    from jaxengine.api.llm import LLM

Message = Mapping[str, Any]


def chat(engine_options: Mapping[str, Any], sampling_options: Mapping[str, Any], system: str | None = None) -> int:
    """Reads lines until /exit or the end of input and answers each; the exit status.

    sampling_options: fields of SamplingParams; the rest are the model's defaults, and an answer may fill the context.
    """
    SamplingParams(**sampling_options)  # a wrong one is said before the model is loaded
    from jaxengine.api.llm import LLM

    llm = LLM(**engine_options)
    changes = {"max_tokens": None, **sampling_options, "output_kind": RequestOutputKind.DELTA}
    params = llm.get_default_sampling_params().clone_with(**changes)
    begin: list[Message] = [{"role": "system", "content": system}] if system else []
    messages = list(begin)
    if sys.stdin.isatty():
        print("/clear begins a new conversation, /exit leaves.")
    while (line := _read_line()) is not None:
        if line == "/clear":
            messages = list(begin)
        elif line:
            messages.append({"role": "user", "content": line})
            answer = _answer(llm, messages, params)
            if answer is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": answer})
    return 0


def stream(llm: LLM, messages: Sequence[Message], params: SamplingParams) -> Iterator[str]:
    """The answer's text, piece by piece. Leaving the iteration early aborts the request.

    Raises:
      RequestError: the conversation is longer than max_model_len.
    """
    core = llm.core
    prepared = core.inputs.prepare(core.inputs.chat_prompt(messages), params)
    core.add(prepared)
    finished = False
    try:
        while not finished:
            for output in core.step():
                finished = output.finished
                yield output.outputs[0].text
    finally:
        if not finished:
            core.abort(prepared.request_id)


def _answer(llm: LLM, messages: Sequence[Message], params: SamplingParams) -> str | None:
    """Prints the answer and returns it; None when there is none to go on from. Ctrl-C ends the answer, not the chat."""
    pieces = []
    try:
        for piece in stream(llm, messages, params):
            print(piece, end="", flush=True)
            pieces.append(piece)
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    except RequestError as error:
        print(f"{error}; /clear begins anew", file=sys.stderr)
        return None
    print(flush=True)
    return "".join(pieces)


def _read_line() -> str | None:
    """The next line without its ends; None for /exit, end of input or Ctrl-C."""
    try:
        line = input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None
    return None if line in ("/exit", "/quit") else line
