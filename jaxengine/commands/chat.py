"""`jaxengine chat`: an interactive conversation that prints answers as they are generated.

The entire conversation is sent each time; the prefix cache makes that cheap.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxengine.commands.remote import Piece, RemoteModel
from jaxengine.logs import only_warnings
from jaxengine.media.fetch import scheme_of
from jaxengine.requests.outputs import RequestOutput
from jaxengine.requests.sampling_params import RequestOutputKind, SamplingParams
from jaxengine.scheduler.errors import RequestError

if TYPE_CHECKING:
    from jaxengine.api.llm import LLM

Message = Mapping[str, Any]
# Streams the answer to a conversation.
Answer = Callable[[Sequence[Message]], Iterator[Piece]]

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
        """Begins without a message.

        system: text of the system message; None for none. images: files and addresses of pictures for the first
        message.
        """
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
    remote: RemoteModel | None = None,
    quick: str | None = None,
) -> int:
    """Reads messages until /exit or the end of input and answers each; returns the exit status.

    images: files and addresses of pictures to send with the first message.
    sampling_options: fields of SamplingParams; others have the model's defaults, and an answer may fill the context.
    remote: answers in place of a model that is loaded here; None loads one by `engine_options`.
    quick: the one message to answer, with status 1 if it is refused; None to read messages.
    """
    answer = _local(engine_options, sampling_options) if remote is None else remote.chat
    conversation = Conversation(system, images)
    if quick is not None:
        return 0 if _take_turn(answer, conversation, quick) else 1
    use_readline("/help lists the commands, /exit leaves.")
    while (read := _read_message()) is not None:
        text, may_command = read
        command = re.fullmatch(r"/([a-z]+)(?:\s+(.*))?", text, re.DOTALL) if may_command else None
        if command is None:
            if text:
                _take_turn(answer, conversation, text)
        elif command[1] in ("exit", "quit"):
            break
        else:
            _obey(conversation, command[1], command[2])
    return 0


def _local(engine_options: Mapping[str, Any], sampling_options: Mapping[str, Any]) -> Answer:
    """Loads a model; returns the function that answers a conversation with it."""
    from jaxengine.api.llm import LLM

    llm = LLM(**engine_options)
    only_warnings()
    changes = {"max_tokens": None, **sampling_options, "output_kind": RequestOutputKind.DELTA}
    params = llm.get_default_sampling_params().clone_with(**changes)

    def answer(messages: Sequence[Message]) -> Iterator[Piece]:
        inputs = llm.core.inputs
        return local_pieces(llm, inputs.chat_prompt(*inputs.media_reader.read(messages)), params)

    return answer


def local_pieces(llm: LLM, prompt: Any, params: SamplingParams) -> Iterator[Piece]:
    """Runs one request and yields the new parts of its output. Leaving the iteration early aborts the request.

    prompt: as of `LLM.generate`. params: with output_kind DELTA.

    Raises:
      RequestError: the prompt is longer than max_model_len, or has a picture that cannot be used.
    """
    core = llm.core
    prepared = core.inputs.prepare(prompt, params)
    core.add(prepared)
    finished = False
    try:
        while not finished:
            for output in core.step():
                assert isinstance(output, RequestOutput)  # a generating request has no other outputs
                finished = output.finished
                yield Piece(output.outputs[0].text, len(output.outputs[0].token_ids))
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


def _take_turn(answer: Answer, conversation: Conversation, text: str) -> bool:
    """Prints the answer to a message and its timing, and adds both to the conversation; False, without them, where it
    was refused.

    Ctrl-C ends the answer, not the chat. ConfigError for a lost server comes out.
    """
    conversation.say(text)
    pieces, times, num_tokens, start = [], [], 0, time.monotonic()
    try:
        for piece in answer(conversation.messages()):
            print(piece.text, end="", flush=True)
            num_tokens += piece.num_tokens
            if piece.is_answer:
                pieces.append(piece.text)
            if piece.text or piece.is_answer:
                times.append(time.monotonic())
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    except RequestError as error:
        print(f"{error}; /reset begins a new conversation", file=sys.stderr)
        conversation.turns.pop()
        return False
    print(flush=True)
    conversation.turns.append({"role": "assistant", "content": "".join(pieces)})
    if times:
        print(f"[{speed(num_tokens, times[0] - start, times[-1] - times[0])}]", file=sys.stderr)
    return True


def _picture(image: str) -> Message:
    """Content part for a picture. Anything that is not an address is a local file."""
    return {"type": "image", "image": image if scheme_of(image) else Path(image).expanduser()}


def speed(num_tokens: int, first_seconds: float, later_seconds: float) -> str:
    """Formats the time to the first token and the rate of the rest."""
    rate = f", then {(num_tokens - 1) / later_seconds:.1f} tokens/s" if num_tokens > 1 and later_seconds > 0 else ""
    return f"{num_tokens} tokens, the first after {first_seconds:.2f} s{rate}"


def _read_message() -> tuple[str, bool] | None:
    """Reads a message, stripped, and whether it may be a command; None at the end of input or for Ctrl-C."""
    line = read_line("> ")
    if line is None:
        return None
    if line.startswith(_FENCE):
        lines = [line.removeprefix(_FENCE)]
        while not lines[-1].endswith(_FENCE):
            if (line := read_line("... ")) is None:
                return None
            lines.append(line)
        return "\n".join(lines).removesuffix(_FENCE).strip(), False
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        if (line := read_line("... ")) is None:
            break
        lines.append(line)
    return "\n".join(lines).strip(), True


def use_readline(greeting: str) -> None:
    """Prepares a terminal for input by lines, and says `greeting` on one."""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  arrow keys, and the lines before
        print(greeting)


def read_line(prompt: str) -> str | None:
    """Reads a line without the space at its end; None at the end of input or for Ctrl-C."""
    try:
        return input(prompt if sys.stdin.isatty() else "").rstrip()
    except (EOFError, KeyboardInterrupt):
        return None
