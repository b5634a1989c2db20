"""`jaxengine chat`: an interactive conversation that prints answers as they are generated.

The entire conversation is sent each time; the prefix cache makes that cheap.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxengine.logs import only_warnings
from jaxengine.media.fetch import scheme_of
from jaxengine.requests.outputs import CompletionOutput, RequestOutput
from jaxengine.requests.sampling_params import RequestOutputKind, SamplingParams
from jaxengine.scheduler.errors import RequestError

if TYPE_CHECKING:
    from jaxengine.api.llm import LLM

Message = Mapping[str, Any]

HELP = '''\
/system TEXT  the system message from now on; without TEXT none
/reset        begins a new conversation
/image FILE   sends a picture, a file or an address, with the next message
/help         shows this
/exit         leaves, as the end of input does
Enclose a message of several lines in """, or end each line but the last with \\.
Ctrl-C ends an answer.'''
_FENCE = '"""'


class Conversation:
    """Messages so far, the system message before them, and pictures to send with the next message."""

    def __init__(self, system: str | None, images: Sequence[str] = ()):
        """images: files and addresses."""
        self.system = system
        self.turns: list[Message] = []
        self.images = [*images]

    def messages(self) -> list[Message]:
        """Messages in the form that chat templates take."""
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    def say(self, text: str) -> None:
        """Adds a message of the user, with the pending pictures."""
        pictures = [_picture(image) for image in self.images]
        self.images.clear()
        self.turns.append(
            {"role": "user", "content": [*pictures, {"type": "text", "text": text}] if pictures else text}
        )


def chat(
    engine_options: Mapping[str, Any],
    sampling_options: Mapping[str, Any],
    system: str | None = None,
    images: Sequence[str] = (),
) -> int:
    """Reads messages until /exit or the end of input and answers each; returns the exit status.

    images: files and addresses of pictures to send with the first message.
    sampling_options: fields of SamplingParams; others have the model's defaults, and an answer may fill the context.
    """
    SamplingParams(**sampling_options)  # reports a wrong value before the model is loaded
    from jaxengine.api.llm import LLM

    llm = LLM(**engine_options)
    only_warnings()
    changes = {"max_tokens": None, **sampling_options, "output_kind": RequestOutputKind.DELTA}
    params = llm.get_default_sampling_params().clone_with(**changes)
    conversation = Conversation(system, images)
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  arrow keys, and the lines before
        print("/help lists the commands, /exit leaves.")
    while (read := _read_message()) is not None:
        text, may_command = read
        command = re.fullmatch(r"/([a-z]+)(?:\s+(.*))?", text, re.DOTALL) if may_command else None
        if command is None:
            if text:
                _take_turn(llm, conversation, text, params)
        elif command[1] in ("exit", "quit"):
            break
        else:
            _obey(conversation, command[1], command[2])
    return 0


def stream(llm: LLM, messages: Sequence[Message], params: SamplingParams) -> Iterator[CompletionOutput]:
    """Yields the new parts of the answer. Leaving the iteration early aborts the request.

    Raises:
      RequestError: the conversation is longer than max_model_len, or has a picture that cannot be used.
    """
    core = llm.core
    prepared = core.inputs.prepare(core.inputs.chat_prompt(*core.inputs.media_reader.read(messages)), params)
    core.add(prepared)
    finished = False
    try:
        while not finished:
            for output in core.step():
                assert isinstance(output, RequestOutput)  # a generating request has no other outputs
                finished = output.finished
                yield output.outputs[0]
    finally:
        if not finished:
            core.abort(prepared.request_id)


def _obey(conversation: Conversation, command: str, text: str | None) -> None:
    if command == "image" and text:
        conversation.images.append(text)
        print("It will be sent with the next message.")
    elif command == "reset":
        conversation.turns.clear()
        conversation.images.clear()
        print("New conversation.")
    elif command == "system":
        conversation.system = text
        print("The system message is set." if text else "There is no system message.")
    elif command == "help":
        print(HELP)
    else:
        print(f"there is no command /{command}; /help lists the commands", file=sys.stderr)


def _take_turn(llm: LLM, conversation: Conversation, text: str, params: SamplingParams) -> None:
    """Prints the answer to a message and its timing. Ctrl-C ends the answer, not the chat."""
    conversation.say(text)
    pieces, times, num_tokens, start = [], [], 0, time.monotonic()
    try:
        for piece in stream(llm, conversation.messages(), params):
            print(piece.text, end="", flush=True)
            pieces.append(piece.text)
            times.append(time.monotonic())
            num_tokens += len(piece.token_ids)
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    except RequestError as error:
        print(f"{error}; /reset begins a new conversation", file=sys.stderr)
        conversation.turns.pop()
        return
    print(flush=True)
    conversation.turns.append({"role": "assistant", "content": "".join(pieces)})
    if times:
        print(f"[{speed(num_tokens, times[0] - start, times[-1] - times[0])}]", file=sys.stderr)


def _picture(image: str) -> Message:
    """Content part for a picture. Anything that is not an address is a local file."""
    return {"type": "image", "image": image if scheme_of(image) else Path(image).expanduser()}


def speed(num_tokens: int, first_seconds: float, later_seconds: float) -> str:
    """Formats the time to the first token and the rate of the rest."""
    rate = f", then {(num_tokens - 1) / later_seconds:.1f} tokens/s" if num_tokens > 1 and later_seconds > 0 else ""
    return f"{num_tokens} tokens, the first after {first_seconds:.2f} s{rate}"


def _read_message() -> tuple[str, bool] | None:
    """Reads a message, stripped, and whether it may be a command; None at the end of input or for Ctrl-C."""
    line = _read_line("> ")
    if line is None:
        return None
    if line.startswith(_FENCE):
        lines = [line.removeprefix(_FENCE)]
        while not lines[-1].endswith(_FENCE):
            if (line := _read_line("... ")) is None:
                return None
            lines.append(line)
        return "\n".join(lines).removesuffix(_FENCE).strip(), False
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        if (line := _read_line("... ")) is None:
            break
        lines.append(line)
    return "\n".join(lines).strip(), True


def _read_line(prompt: str) -> str | None:
    try:
        return input(prompt if sys.stdin.isatty() else "").rstrip()
    except (EOFError, KeyboardInterrupt):
        return None
