"""Requests and answers of the routes that end in /derender, in vLLM's format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from pydantic import Field, SkipValidation

from jaxengine.requests.output.outputs import Logprob, PositionLogprobs
from jaxengine.requests.params.param_limits import MAX_STOP_CHARS
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.server.http.answer.answers import Answer, FinishReason
from jaxengine.server.http.chat.answers import ChatCompletionChunk
from jaxengine.server.http.completions.answers import CompletionChunk
from jaxengine.server.http.request.fields import JsonObject, TokenIds
from jaxengine.server.http.request.protocol import ClosedModel, RequestModel

T = TypeVar("T")
# A list whose first wrong entry is the only fault that is reported.
Listed = Annotated[list[T], Field(fail_fast=True)]


class GivenLogprob(RequestModel):
    """A token id with its log-probability."""

    token_id: int = Field(ge=0)
    logprob: float
    rank: int | None = None


class GivenPosition(GivenLogprob):
    """The sampled token, and the tokens listed at its position."""

    top_logprobs: Listed[GivenLogprob] = []

    def position(self) -> PositionLogprobs:
        """Return the log-probabilities by token id, the sampled token first, without texts."""
        found: PositionLogprobs = {}
        for each in (self, *self.top_logprobs):
            found.setdefault(each.token_id, Logprob(each.logprob, each.rank))
        return found


class GivenLogprobs(RequestModel):
    """Log-probabilities of each output token of a choice."""

    content: Listed[GivenPosition] | None = None


class GivenPiece(RequestModel):
    """New part of a choice of a stream of /inference/v1/generate. Other fields of it are not read."""

    index: int = Field(ge=0)
    token_ids: TokenIds | None = None
    logprobs: GivenLogprobs | None = None
    finish_reason: FinishReason | None = None
    # As long as a stop string may be: the search for one prepares as many steps as it has characters.
    stop_reason: int | Annotated[str, Field(max_length=MAX_STOP_CHARS)] | None = None

    def positions(self, param: str) -> list[PositionLogprobs] | None:
        """Return the log-probabilities of each token; None if there are none. Raises RequestError, which names `param`,
        unless there is one for each token.
        """
        if self.logprobs is None or self.logprobs.content is None:
            return None
        listed, ids = self.logprobs.content, self.token_ids or []
        if [each.token_id for each in listed] != ids:
            problem = f"{param} has logprobs of other tokens than its token_ids; allowed: one for each, in their order"
            raise RequestError(problem, param=param)
        return [each.position() for each in listed]


class GivenChoice(GivenPiece):
    """A complete choice of /inference/v1/generate."""

    finish_reason: FinishReason | None = "stop"


class GivenUsage(RequestModel):
    """Token counts of an answer."""

    prompt_tokens: int = Field(default=0, ge=0)
    completion_tokens: int | None = Field(default=0, ge=0)


class _Generated(RequestModel):
    """Fields of every answer of /inference/v1/generate. Those that are not here are not read."""

    refused = {"output_mode": ("tokens",)}

    request_id: str = Field(min_length=1, max_length=256)
    prompt_token_ids: TokenIds | None = None
    usage: GivenUsage | None = None
    metrics: JsonObject | None = None


class GivenAnswer(_Generated):
    """A complete answer of /inference/v1/generate."""

    choices: Listed[GivenChoice]
    prompt_logprobs: Listed[JsonObject | None] | None = None
    kv_transfer_params: JsonObject | None = None


class GivenChunk(_Generated):
    """An event of a stream of /inference/v1/generate."""

    choices: Listed[GivenPiece]


class StreamState(ClosedModel):
    """State of a stream, which the client sends with the next event: all tokens of the output so far."""

    output_token_ids: TokenIds = []


class DerenderChat(ClosedModel):
    """An answer to turn into a chat completion, or with `stream` an event to turn into a chunk.

    Attributes:
      generate_response, generate_chunk: the answer, or the event.
      stream_state: what the call for the event before returned; None for the first event of an output.
      prompt_tokens: number of prompt tokens for `usage`; default: as many as are known, else 0.
      prompt_token_ids: the prompt's token ids; default: those of the answer, else the conversation is rendered.
      chat_request: the request as /v1/chat/completions takes it. It is needed with parsers. Its messages are only read
        if no prompt_token_ids are known.
    """

    stream: bool = False
    model: str | None = None
    generate_response: GivenAnswer | None = None
    generate_chunk: GivenChunk | None = None
    stream_state: StreamState | None = None
    prompt_tokens: int | None = Field(default=None, ge=0)
    prompt_token_ids: TokenIds | None = None
    chat_request: JsonObject | None = None


class DerenderCompletion(ClosedModel):
    """Answers, one for each prompt, to turn into a completion, or with `stream` an event to turn into a chunk.

    Attributes:
      generate_responses, generate_chunk: the answers, or the event.
      stream_state: what the call for the event before returned; None for the first event of an output.
      prompt_tokens: number of prompt tokens of each answer, or of the event's.
      prompt_token_ids: the prompt's token ids of each answer, or the event's; default: those of the answer.
      completion_request: the request as /v1/completions takes it; its prompt is not read.
    """

    stream: bool = False
    model: str | None = None
    generate_responses: Listed[GivenAnswer] | None = None
    generate_chunk: GivenChunk | None = None
    stream_state: StreamState | None = None
    prompt_tokens: TokenIds | int | None = None
    prompt_token_ids: Annotated[list[int] | list[list[int] | None] | None, SkipValidation] = None  # _recording does
    completion_request: JsonObject | None = None


class NextState(Answer):
    output_token_ids: list[int]


class DerenderedChatChunk(Answer):
    chunk: ChatCompletionChunk
    stream_state: NextState


class DerenderedCompletionChunk(Answer):
    chunk: CompletionChunk
    stream_state: NextState


def require(body: DerenderChat | DerenderCompletion, whole: str) -> None:
    """Raise RequestError unless a request has the field `whole`, the one with complete answers, or with `stream`
    generate_chunk in its place; also for stream_state without `stream`.
    """
    needed, other = ("generate_chunk", whole) if body.stream else (whole, "generate_chunk")
    if getattr(body, needed) is None:
        raise RequestError(f"{needed} is missing; it is needed with stream={str(body.stream).lower()}", param=needed)
    for name in (other, *(() if body.stream else ("stream_state",))):
        if getattr(body, name) is not None:
            raise RequestError(f"{name} is not allowed with stream={str(body.stream).lower()}", param=name)


def one_each(name: str, values: Any, number: int) -> Sequence[Any]:
    """Return a list of `number` values, all None for None. Raises RequestError, which names the field `name`, for
    anything but a list of as many.
    """
    if values is None:
        return [None] * number
    if not isinstance(values, list) or len(values) != number:
        problem = f"{name} must be a list with one entry for each of the {number} generate_responses"
        raise RequestError(problem, param=name)
    return values
