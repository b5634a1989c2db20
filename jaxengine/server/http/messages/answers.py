"""Types of the responses of /v1/messages, for /openapi.json."""

from __future__ import annotations

from typing import Any, Literal

from jaxengine.server.http.answer.answers import ABSENT, Answer, MessagesError


class MessagesUsage(Answer):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class TextBlock(Answer):
    type: Literal["text"]
    text: str


class ThinkingBlock(Answer):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(Answer):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageEnd(Answer):
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn"] | None
    stop_sequence: str | None


class Message(MessageEnd):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Block]
    usage: MessagesUsage
    kv_transfer_params: dict[str, Any] = ABSENT


class MessageStart(Answer):
    type: Literal["message_start"]
    message: Message


class ContentBlockStart(Answer):
    type: Literal["content_block_start"]
    index: int
    content_block: Block


class TextPiece(Answer):
    type: Literal["text_delta"]
    text: str


class ThinkingPiece(Answer):
    type: Literal["thinking_delta"]
    thinking: str


class InputPiece(Answer):
    type: Literal["input_json_delta"]
    partial_json: str


class ContentBlockDelta(Answer):
    type: Literal["content_block_delta"]
    index: int
    delta: TextPiece | ThinkingPiece | InputPiece


class ContentBlockStop(Answer):
    type: Literal["content_block_stop"]
    index: int


class MessageDelta(Answer):
    type: Literal["message_delta"]
    delta: MessageEnd
    usage: MessagesUsage


class MessageStop(Answer):
    type: Literal["message_stop"]


MessageEvent = (
    MessageStart | ContentBlockStart | ContentBlockDelta | ContentBlockStop | MessageDelta | MessageStop | MessagesError
)


class MessageTokens(Answer):
    input_tokens: int
