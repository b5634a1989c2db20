"""Writing of a message as it is generated: content blocks, and their events in Anthropic's format.

Blocks are consecutive: thinking, text, tool_use.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from jaxengine.parsers.scan.events import ArgumentsDelta, ContentDelta, Event, ReasoningDelta, ToolCallStart
from jaxengine.tokens.cut_json import read_cut_json

Said = dict[str, Any]


class MessageWriter:
    """Writer of one message, block by block.

    Attributes:
      content: the completed blocks.
      is_cut: whether the arguments of the last completed call are incomplete JSON.
    """

    def __init__(self) -> None:
        self.content: list[dict[str, Any]] = []
        self.is_cut = False
        self._block: dict[str, Any] | None = None
        self._texts: list[str] = []

    def add(self, events: Sequence[Event]) -> list[Said]:
        """Add the parser's new events to the message; return Anthropic's events for them. The last block stays open for
        more content of the same kind, until `close`.
        """
        said: list[Said] = []
        for part in events:
            match part:
                case ContentDelta(text):
                    said += self._turn_to("text", text="")
                    said.append(self._delta("text_delta", "text", text))
                case ReasoningDelta(text):
                    # The signature is empty; clients send the field back.
                    said += self._turn_to("thinking", thinking="", signature="")
                    said.append(self._delta("thinking_delta", "thinking", text))
                case ToolCallStart():
                    said += self._close()
                    said += self._turn_to("tool_use", id=part.id, name=part.name, input={})
                case ArgumentsDelta(_, text):
                    said.append(self._delta("input_json_delta", "partial_json", text))
        return said

    def close(self) -> list[Said]:
        """End the open block and return the last events. A message without blocks gets an empty text block."""
        said = self._close()
        if not self.content:
            said = [*self._turn_to("text", text=""), *self._close()]
        return said

    @property
    def calls(self) -> bool:
        """Whether a completed block is a tool call."""
        return any(block["type"] == "tool_use" for block in self.content)

    def _turn_to(self, kind: str, **fields: Any) -> list[Said]:
        """Open a block of this kind with these fields, after ending another open block, and return the events. If the
        open block is of this kind already, return [].
        """
        if self._block is not None and self._block["type"] == kind:
            return []
        said = self._close()
        self._block, self._texts = {"type": kind, **fields}, []
        return [*said, self._say("content_block_start", content_block=self._block)]

    def _close(self) -> list[Said]:
        """End the open block and append it to `content`; return the event, or [] if no block is open. For a tool call,
        also set `is_cut` to whether its arguments are incomplete JSON.
        """
        if self._block is None:
            return []
        said, text = self._say("content_block_stop"), "".join(self._texts)
        kind = self._block["type"]
        whole = {"input": _input(text)} if kind == "tool_use" else {kind: text}
        self.is_cut = not _is_json(text) if kind == "tool_use" else self.is_cut
        self.content.append({**self._block, **whole})
        self._block = None
        return [said]

    def _delta(self, kind: str, key: str, text: str) -> Said:
        """Append a text to the open block; return the event. kind: type of the delta. key: name of its field for the
        text.
        """
        self._texts.append(text)
        return self._say("content_block_delta", delta={"type": kind, key: text})

    def _say(self, kind: str, **fields: Any) -> Said:
        """Return an event about the open block: a dict with the type `kind`, the block's index, and `fields`."""
        return {"type": kind, "index": len(self.content), **fields}


def _input(arguments: str) -> dict[str, Any]:
    """Return the parsed arguments of a call. Truncated JSON is parsed as far as it goes; {} for invalid JSON and if the
    result is not an object.
    """
    try:
        value = read_cut_json(arguments)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _is_json(text: str) -> bool:
    """Whether a text is valid, complete JSON."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
