"""`jaxengine chat`: an interactive conversation that prints answers as they are generated."""

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
from jaxengine.media.fetching.fetch import scheme_of
from jaxengine.requests.output.outputs import RequestOutput
from jaxengine.requests.params.sampling_params import RequestOutputKind, SamplingParams
from jaxengine.scheduler.base.errors import RequestError

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
    """Messages so far, the system message, and images to send with the next message."""

    def __init__(self, system: str | None, images: Sequence[str] = ()):
        """Begin without a message.

        system: text of the system message; None for none. images: files and addresses of images for the first message.
        """
        self.system = system
        self.turns: list[Message] = []
        self.images = [*images]

    def messages(self) -> list[Message]:
        """Return the messages in the form that chat templates take, after the system message unless that is None or
        empty.
        """
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    def say(self, text: str) -> None:
        """Add a user message with this text and the waiting images, which are then no longer waiting."""
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
    """Read messages until /exit, /quit, the end of input or Ctrl-C at the prompt, and answer each; return the exit
    status.

    A line with another command executes that command and is not answered, and an empty message is skipped.

    engine_options: fields of EngineConfig. sampling_options: fields of SamplingParams; others have the model's
    defaults, and an answer may fill the context. system: text of the system message. images: files and addresses of
    images to send with the first message. remote: model of a server that answers; None loads a model with
    `engine_options`. quick: the only message to answer, for which the status is 1 if it is refused; None to read
    messages. The status is 0 otherwise.

    Raises ConfigError, ModelConfigError, ModelFileError or RequestError if the model cannot be loaded with these
    options, and ConfigError if the server does not answer or its connection is lost. A message that is refused raises
    nothing.
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
    """Load a model and set the log level to warnings; return a function that streams the model's answer to a
    conversation.

    engine_options: fields of EngineConfig. sampling_options: fields of SamplingParams, which replace the model's
    defaults; without max_tokens an answer may fill the context. Raises ConfigError, ModelConfigError, ModelFileError or
    RequestError; the function raises RequestError for a message that is refused.
    """
    from jaxengine.api.llm import LLM

    llm = LLM(**engine_options)
    only_warnings()
    changes = {"max_tokens": None, **sampling_options, "output_kind": RequestOutputKind.DELTA}
    params = llm.get_default_sampling_params().clone_with(**changes)

    def answer(messages: Sequence[Message]) -> Iterator[Piece]:
        """Load the media of a conversation and return the stream of its answer, which begins when it is iterated.

        Raises RequestError for media or messages that are refused; the iteration raises it too.
        """
        inputs = llm.core.inputs
        return local_pieces(llm, inputs.chat_prompt(*inputs.media_reader.read(messages)), params)

    return answer


def local_pieces(llm: LLM, prompt: Any, params: SamplingParams) -> Iterator[Piece]:
    """Run one request and yield the new part of its output after each step. Leaving the iteration early aborts the
    request.

    prompt: as for `LLM.generate`. params: sampling parameters with output_kind DELTA. Raises RequestError if the prompt
    is longer than max_model_len or has an image that cannot be used, and if a step refuses the request, as for an
    invalid grammar.
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
            for request_id, error in core.pop_rejected():
                if request_id == prepared.request_id:
                    finished = True
                    raise error
    finally:
        if not finished:
            core.abort(prepared.request_id)


def _obey(conversation: Conversation, command: str, text: str | None) -> None:
    """Execute a user's command on `conversation` and print what was done; print an error to stderr for an unknown
    command and for "image" without text.

    command: "image" (send `text` with the next message), "reset" (drop messages and images), "system" (set the system
    message to `text`) or "help". text: what follows the command; None if nothing does.
    """
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
    """Print the answer to a message, and its timing to stderr, add the message and the answer without its reasoning to
    the conversation, and return True.

    If the message is refused, prints the error, adds neither, drops the message's images, and returns False. answer:
    function that streams the answer to a conversation. Ctrl-C ends the answer, of which the part so far is added, not
    the chat. Raises ConfigError if the connection to a server is lost.
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
    """Return the content part of a message for an image. image: an address, or the name of a local file, which may
    begin with ~.
    """
    return {"type": "image", "image": image if scheme_of(image) else Path(image).expanduser()}


def speed(num_tokens: int, first_seconds: float, later_seconds: float) -> str:
    """Return a text with the number of tokens, the time to the first token, and the rate of the others, which is left
    out if there are none or they took no time.

    num_tokens: tokens of the answer. first_seconds: time until the first token. later_seconds: time from the first
    token to the last.
    """
    rate = f", then {(num_tokens - 1) / later_seconds:.1f} tokens/s" if num_tokens > 1 and later_seconds > 0 else ""
    return f"{num_tokens} tokens, the first after {first_seconds:.2f} s{rate}"


def _read_message() -> tuple[str, bool] | None:
    """Read a message; return (its text, stripped; whether it may be a command), None at the end of input or for Ctrl-C.

    A message within three double quotes, or with lines that end in a backslash, has several lines. The former is not a
    command; if input ends within its quotes, None is returned.
    """
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
    """If input comes from a terminal, enable line editing, where readline exists, and print `greeting`; otherwise do
    nothing.
    """
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  arrow keys, and the lines before
        print(greeting)


def read_line(prompt: str) -> str | None:
    """Read a line and return it without trailing white space; None at the end of input or for Ctrl-C.

    prompt: shown if input comes from a terminal.
    """
    try:
        return input(prompt if sys.stdin.isatty() else "").rstrip()
    except (EOFError, KeyboardInterrupt):
        return None
