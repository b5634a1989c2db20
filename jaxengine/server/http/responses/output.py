"""Writing of a response as it is generated: its output items, and the stream events for them.

An answer is a sequence of items: reasoning, a message, calls of functions and custom tools.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxengine.parsers.scan.events import ArgumentsDelta, ContentDelta, Event, ParsedCall, ReasoningDelta, ToolCallStart
from jaxengine.parsers.tools.forced import text_arguments
from jaxengine.server.http.responses.text_input import TextInput
from jaxengine.server.http.responses.tools import Origin

Said = dict[str, Any]
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}


class ResponseWriter:
    """Writer of one response during its generation.

    Args:
      response: its fields except status, output and usage.
      origins: for each function that the model may call, the tool of the request from which it was made.
      encrypted: add encrypted_content to reasoning items, from which `input.read_input` restores their text.

    Attributes:
      response: its current state.
      parts: all parser events of the answer so far.
    """

    def __init__(self, response: dict[str, Any], origins: Mapping[str, Origin], encrypted: bool = False):
        self._origins = origins
        self._encrypted = encrypted
        self._input = TextInput()
        self.response = {**response, "status": "in_progress", "output": [], "usage": None}
        self.parts: list[Event] = []
        self._number = -1
        self._item: dict[str, Any] | None = None
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    def open(self) -> list[Said]:
        """Return the first events of a stream: response.created and response.in_progress."""
        return [self._say(f"response.{kind}", response=dict(self.response)) for kind in ("created", "in_progress")]

    def add(self, events: Sequence[Event], logprobs: Sequence[dict[str, Any]] | None) -> list[Said]:
        """Add parser events to the response; return the stream events for them.

        logprobs: log-probabilities of the tokens from which the events come, in the form that `token_logprobs` returns,
        or None. They are attached to the first text of the message among the events. If there is none, they are added
        to the message that is open after the events, or dropped if no message is.
        """
        self.parts += events
        said: list[Said] = []
        left = list(logprobs or ())
        for event in events:
            match event:
                case ContentDelta(text):
                    said += self._turn_to("message")
                    said.append(self._say_delta("response.output_text.delta", text, logprobs=left))
                    self._logprobs += left
                    left = []
                case ReasoningDelta(text):
                    said += self._turn_to("reasoning")
                    said.append(self._say_delta("response.reasoning_text.delta", text))
                case ToolCallStart():
                    said += self._close("completed")
                    said += self._open_call(event)
                case ArgumentsDelta(_, text):
                    said += self._say_arguments(text)
        if self._item is not None and self._item["type"] == "message":
            self._logprobs += left
        return said

    def close(
        self, status: str, usage: dict[str, Any], error: dict[str, Any] | None = None, reason: str | None = None
    ) -> list[Said]:
        """End the response and return its last events.

        status: "completed", "incomplete" (because of `reason`), "failed" (because of `error`) or "cancelled", whose
        last event is response.failed. usage: its token counts. An answer without items gets an empty message if it is
        completed, and one that is completed gets the time.
        """
        if self._item is None and not self.response["output"] and status == "completed":
            said = self._turn_to("message")  # an empty answer still has a message
        else:
            said = []
        said += self._close("completed" if status == "completed" else "incomplete")
        self.response |= {"status": status, "usage": usage, "error": error}
        if status == "completed":
            self.response["completed_at"] = int(time.time())
        if reason is not None:
            self.response["incomplete_details"] = {"reason": reason}
        # OpenAI's API has no event for a cancelled response.
        last = "failed" if status == "cancelled" else status
        return [*said, self._say(f"response.{last}", response=dict(self.response))]

    def _turn_to(self, kind: str) -> list[Said]:
        """Open an item of this kind, "message" or "reasoning", after ending another open item, and return the events.
        If the open item is of this kind already, return [].
        """
        if self._item is not None and self._item["type"] == kind:
            return []
        said = self._close("completed")
        if kind == "message":
            said += self._open(kind, role="assistant", content=[])
        else:
            said += self._open(kind, summary=[], content=[])
        return [*said, self._say_at("response.content_part.added", content_index=0, part=self._part(""))]

    def _open_call(self, start: ToolCallStart) -> list[Said]:
        """Open the item for the start of a call, of a custom tool or a function according to `origins`; return its
        events.
        """
        origin = self._origins.get(start.name, Origin(False, start.name))
        if origin.is_custom:
            self._input = TextInput()
            return self._open("custom_tool_call", call_id=start.id, **origin.item, input="")
        return self._open("function_call", call_id=start.id, **origin.item, arguments="")

    def _say_arguments(self, text: str) -> list[Said]:
        """Append text to the arguments of the open function call, or feed it to the input of the open custom tool call;
        return the events.
        """
        assert self._item is not None
        if self._item["type"] == "custom_tool_call":
            return self._say_input(self._input.feed(text))
        self._texts.append(text)
        return [self._say_at("response.function_call_arguments.delta", delta=text)]

    def _say_input(self, text: str) -> list[Said]:
        """Append text to the input of the open custom tool call; return its event, or [] for an empty text."""
        self._texts.append(text)
        return [self._say_at("response.custom_tool_call_input.delta", delta=text)] if text else []

    def _open(self, kind: str, **fields: Any) -> list[Said]:
        """Open an item of this kind with these fields and an id from which `response_of` returns the response's; return
        its event.
        """
        item_id = f"{_PREFIXES[kind]}_{self.response['id']}_{self._index}"
        self._item = {"id": item_id, "type": kind, "status": "in_progress", **fields}
        self._texts, self._logprobs = [], []
        return [self._say("response.output_item.added", output_index=self._index, item=dict(self._item))]

    def _close(self, status: str) -> list[Said]:
        """End the open item with this status and append it to the response's output; return its events, or [] if no
        item is open. Reasoning gets encrypted_content if that is requested.
        """
        if self._item is None:
            return []
        is_custom = self._item["type"] == "custom_tool_call"
        said = self._say_input(self._input.finish()) if is_custom else []
        text = "".join(self._texts)
        if is_custom:
            self._item["input"] = text
            said.append(self._say_at("response.custom_tool_call_input.done", input=text))
        elif self._item["type"] == "function_call":
            self._item["arguments"] = text
            said.append(self._say_at("response.function_call_arguments.done", arguments=text, name=self._item["name"]))
        else:
            part = self._part(text)
            self._item["content"] = [part]
            if self._encrypted and self._item["type"] == "reasoning":
                self._item["encrypted_content"] = base64.b64encode(text.encode()).decode()
            if self._item["type"] == "message":
                done = {"logprobs": self._logprobs}
                said.append(self._say_at("response.output_text.done", content_index=0, text=text, **done))
            else:
                said.append(self._say_at("response.reasoning_text.done", content_index=0, text=text))
            said.append(self._say_at("response.content_part.done", content_index=0, part=part))
        self._item["status"] = status
        said.append(self._say("response.output_item.done", output_index=self._index, item=self._item))
        self.response["output"] = [*self.response["output"], self._item]
        self._item = None
        return said

    def _part(self, text: str) -> dict[str, Any]:
        """Return the content part, with this text, of the open item, a message or reasoning."""
        assert self._item is not None
        if self._item["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self._logprobs)}

    def _say_delta(self, kind: str, text: str, **fields: Any) -> Said:
        """Append text to the open message or reasoning item; return its event, of type `kind`."""
        self._texts.append(text)
        return self._say_at(kind, content_index=0, delta=text, **fields)

    def _say_at(self, kind: str, **fields: Any) -> Said:
        """Return an event about the open item: a dict with the type `kind`, the item's id and index, and `fields`."""
        assert self._item is not None
        return self._say(kind, item_id=self._item["id"], output_index=self._index, **fields)

    def _say(self, kind: str, **fields: Any) -> Said:
        """Return the next event of the stream: a dict with the type `kind`, the next sequence_number, and `fields`."""
        self._number += 1
        return {"type": kind, "sequence_number": self._number, **fields}

    @property
    def _index(self) -> int:
        """Index in the output of the open item, or of the next one."""
        return len(self.response["output"])


def response_of(item_id: str) -> str:
    """Return the id of the response that has the output item with this id; any text for another id."""
    return item_id.partition("_")[2].rpartition("_")[0]


def called(call: ParsedCall, origins: Mapping[str, Origin]) -> dict[str, str]:
    """Return the name, as the model knows it, and the arguments of a call for a chat message.

    The text of a custom tool (according to `origins`) is encoded again, because the model may have written another JSON
    form.
    """
    arguments = call.arguments
    if call.name in origins and origins[call.name].is_custom:
        reader = TextInput()
        arguments = text_arguments(reader.feed(arguments) + reader.finish())
    return {"name": call.name, "arguments": arguments}
