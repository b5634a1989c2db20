"""Messages between the engine's process and the API processes, in MessagePack with arrays as raw bytes.

An API process identifies a request by a handle, a number that it chooses. Arrays are int64, int32 or float32 in the
machine's byte order, which both ends share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import msgspec
import numpy as np

from jaxengine.engine.output import EngineOutput, Found, PromptScores
from jaxengine.scheduler.base.errors import OverloadedError, RequestError, UnknownAdapterError
from jaxengine.scheduler.base.request import FinishReason, Request, RequestStatus
from jaxengine.scheduler.batches.batch import TokenRows, TokenScores
from jaxengine.server.link.media_messages import array_bytes
from jaxengine.server.link.submit_messages import Submit


class Load(msgspec.Struct, array_like=True, frozen=True):
    """Load of the engine.

    Attributes:
      num_running, num_waiting: requests that run and that wait, of all API processes.
      num_waiting_tokens: prompt tokens of the requests that wait.
      retry_after: seconds after which a refused request should be sent again.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    retry_after: float = 1.0


class Hello(msgspec.Struct, array_like=True, tag="hello"):
    """First message of an API process. index: number of the process."""

    index: int


class Finish(msgspec.Struct, array_like=True, tag="finish"):
    """Order to end requests.

    Attributes:
      handles: handles of the requests.
      reason: value of FinishReason: "stop" after a stop string was found, "repetition", or "abort", which the engine
        confirms like any other end.
      num_tokens: for each request that ended because of its output, the number of tokens that its caller received; []
        for "abort".
    """

    handles: list[int]
    reason: str
    num_tokens: list[int] = []


class EndsDelivered(msgspec.Struct, array_like=True, tag="ends_delivered"):
    """Confirmation that callers have received the ends that the engine sent, for these requests with `text_ends`."""

    handles: list[int]


class Call(msgspec.Struct, array_like=True, tag="call"):
    """Request to call a function of `EngineCore.utilities`.

    Attributes:
      number: number that the Reply has too; the Reply of number 0 is ignored.
      name, arguments: the function's name and its arguments.
    """

    number: int
    name: str
    arguments: tuple[Any, ...]


class Welcome(msgspec.Struct, array_like=True, tag="welcome"):
    """Answer to Hello.

    Attributes:
      config: fields of ResolvedConfig.
      source: the opened model, by `open_inputs.packed_source`.
      num_slots: number of requests that run at once, over all replicas.
      load: the engine's load.
      media_cache: kind of the media cache, one of jaxengine.config.inputs.encoder.KINDS.
      num_media_resets: number of resets of the media cache so far; see Update.
    """

    config: dict[str, Any]
    source: Any
    num_slots: int
    load: Load
    media_cache: str
    num_media_resets: int


class Failure(msgspec.Struct, array_like=True):
    """Reason why a Submit or a Call failed.

    Attributes:
      kind: "request", "unknown adapter", "overloaded", "internal", or MISSING_MEDIA: the Submit relies on missing
        pixels, and must be resent with all of them.
      message, param, retry_after: attributes of the error for the caller.
    """

    kind: str
    message: str
    param: str | None = None
    retry_after: float = 1.0


class Reply(msgspec.Struct, array_like=True):
    """Result of a Submit or a Call.

    Attributes:
      number: number of the Submit or Call.
      failure: why it failed; None if it did not.
      result: result of a Call's function.
    """

    number: int
    failure: Failure | None = None
    result: Any = None


class Started(msgspec.Struct, array_like=True):
    """First token of a request.

    Attributes:
      handle: the request's handle.
      num_cached_tokens: number of prompt tokens that were found in the prefix cache.
      queued_time, first_scheduled_time, first_token_time: the fields of Request, in seconds of time.monotonic.
    """

    handle: int
    num_cached_tokens: int
    queued_time: float | None
    first_scheduled_time: float | None
    first_token_time: float | None


class Ended(msgspec.Struct, array_like=True):
    """End of a request.

    Attributes:
      handle: the request's handle.
      reason, stop_reason: how it ended; reason is a FinishReason's value.
      num_preemptions, num_cached_tokens, kv_transfer_params: the fields of Request.
      queued_time, first_scheduled_time, finished_time: the fields of Request, in seconds of time.monotonic.
      output_token_ids: i32; None for a request with an output per step.
    """

    handle: int
    reason: str
    stop_reason: int | str | None
    num_preemptions: int
    num_cached_tokens: int
    queued_time: float | None
    first_scheduled_time: float | None
    finished_time: float | None
    output_token_ids: bytes | None
    kv_transfer_params: dict[str, Any] | None = None


class Refused(msgspec.Struct, array_like=True):
    """Failure of a request that was found after its Submit was read; the request gets no tokens and no Ended. handle:
    of the request.
    """

    handle: int
    failure: Failure


class Scores(msgspec.Struct, array_like=True):
    """TokenScores of n tokens as bytes, in the machine's byte order.

    Attributes:
      num_top, num_given: for each token, number of likeliest tokens, and of tokens given by id.
      logprobs: f32[n]. ranks: i32[n].
      top_ids: i32[n, num_top]. top_logprobs: f32[n, num_top].
      given_logprobs: f32[n, num_given].
    """

    num_top: int
    num_given: int
    logprobs: bytes
    ranks: bytes
    top_ids: bytes
    top_logprobs: bytes
    given_logprobs: bytes


class Vectors(msgspec.Struct, array_like=True):
    """Vectors f32[n, size] of pooling requests, as bytes."""

    size: int
    values: bytes


class PromptPart(msgspec.Struct, array_like=True):
    """PromptScores of one request. handle: the request's handle. first: index of the prompt token to which the first
    score belongs.
    """

    handle: int
    first: int
    scores: Scores


class FoundPart(msgspec.Struct, array_like=True):
    """Rows that a capability returned for one request.

    Attributes:
      handle: the request's handle.
      name: field of CompletionOutput that receives the rows.
      columns: (field, or "" for rows without fields; dtype; shape; bytes) of each column.
    """

    handle: int
    name: str
    columns: list[tuple[str, str, list[int], bytes]]


class Update(msgspec.Struct, array_like=True, tag="update"):
    """Results of a step for one API process.

    Attributes:
      number: counts the updates of this connection from 1, so that a lost one is detected.
      received: number of the last Submit that was read.
      load: the engine's load.
      handles, token_ids: i32[n], a token of each of these requests.
      tokens_scored: i32[m], indices into `handles` of the tokens with scores. scores: of these tokens; None for none.
      prompts, started, ended: prompts' logprobs, first tokens, and ends of requests.
      unservable: requests that failed after their Submit was read. refused, replies: answers to Submits and to Calls.
      vectors: of pooling requests, in the order of handles.
      num_media_resets: number of resets of the engine's media cache; when it grows, an API process resets its cache
        too.
      found: rows that capabilities returned for requests.
    """

    number: int
    received: int
    load: Load
    handles: bytes = b""
    token_ids: bytes = b""
    tokens_scored: bytes = b""
    scores: Scores | None = None
    prompts: list[PromptPart] = []
    started: list[Started] = []
    ended: list[Ended] = []
    unservable: list[Refused] = []
    refused: list[Reply] = []
    replies: list[Reply] = []
    vectors: Vectors | None = None
    num_media_resets: int = 0
    found: list[FoundPart] = []


MISSING_MEDIA = "missing media"
_NO_LOAD = Load()

ToEngine = Hello | Submit | Finish | EndsDelivered | Call
FromEngine = Welcome | Update

encode = msgspec.msgpack.Encoder().encode
decode_to_engine: Callable[[Any], ToEngine] = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine: Callable[[Any], FromEngine] = msgspec.msgpack.Decoder(FromEngine).decode


def owner_of(request: Request) -> tuple[int, int]:
    """Return (number of the API process's connection, handle of the request there), which a request's tag encodes."""
    return divmod(request.tag, 1 << 32)


def error_of(failure: Failure) -> Exception:
    """Return the exception for the caller of a failed Submit or Call, by the failure's kind: an OverloadedError for
    "overloaded", an UnknownAdapterError for "unknown adapter", a RequestError for "request", else a RuntimeError.
    """
    if failure.kind == "overloaded":
        return OverloadedError(failure.message, retry_after=failure.retry_after)
    if kind := {"request": RequestError, "unknown adapter": UnknownAdapterError}.get(failure.kind):
        return kind(failure.message, param=failure.param)
    return RuntimeError(failure.message)


def updates_of(output: EngineOutput, clients: Sequence[int]) -> dict[int, Update]:
    """Return the Update of each API process for a step, by the number of its connection. API processes without results
    have no Update. The sender must fill in number, received and load.

    clients: numbers of the connections of all processes that have requests; with a single one, all tokens are
    attributed to it.
    """
    updates = _token_updates(output.emitted, clients) if output.emitted else {}

    def update_of(request: Request) -> tuple[Update, int]:
        """Return the Update of a request's API process, which is created in `updates` if it is missing, and the
        request's handle.
        """
        client, handle = owner_of(request)
        if client not in updates:
            updates[client] = Update(0, 0, _NO_LOAD)
        return updates[client], handle

    for part in output.prompt_scores:
        update, handle = update_of(part.request)
        update.prompts.append(PromptPart(handle, part.first, _scores(part.scores)))
    for each in output.found:
        update, handle = update_of(each.request)
        update.found.append(FoundPart(handle, each.name, _columns(each.rows)))
    for request in output.first_tokens:
        update, handle = update_of(request)
        times = request.queued_time, request.first_scheduled_time, request.first_token_time
        update.started.append(Started(handle, request.num_cached_tokens, *times))
    for request in output.finished:
        update, handle = update_of(request)
        update.ended.append(_ended(request, handle))
    for request, error in output.refused:
        update, handle = update_of(request)
        update.unservable.append(Refused(handle, Failure("request", str(error), error.param)))
    return updates


def output_of(update: Update, follow: Callable[[int], Request]) -> EngineOutput:
    """Convert an update to an EngineOutput whose requests are the API process's own. `follow` must return the request
    of every handle.

    Also sets the engine's times, counts and ends in these requests. Refused requests and replies in the update are left
    to the caller.
    """
    output = EngineOutput()
    for each in update.started:
        request = follow(each.handle)
        request.num_cached_tokens = each.num_cached_tokens
        request.queued_time, request.first_scheduled_time = each.queued_time, each.first_scheduled_time
        request.first_token_time = each.first_token_time
        output.first_tokens.append(request)
    for each in update.ended:
        output.finished.append(_end(follow(each.handle), each))
    output.prompt_scores = [
        PromptScores(follow(each.handle), each.first, _read(each.scores)) for each in update.prompts
    ]
    output.found = [Found(follow(each.handle), each.name, _rows(each.columns)) for each in update.found]
    if update.handles:
        handles, token_ids = np.frombuffer(update.handles, np.int32), np.frombuffer(update.token_ids, np.int32)
        scores = None if update.scores is None else _read(update.scores)
        tokens = TokenRows(handles, token_ids, np.frombuffer(update.tokens_scored, np.int32), scores)
        if update.vectors is not None:
            values = np.frombuffer(update.vectors.values, np.float32)
            tokens = tokens._replace(vectors=values.reshape(len(handles), update.vectors.size))
        output.emitted.append(tokens)
    return output


def _token_updates(emitted: Sequence[TokenRows], clients: Sequence[int]) -> dict[int, Update]:
    """Return the Updates with the tokens of each API process, by the number of its connection. If there are several
    connections, those without tokens are left out.

    emitted: tokens of each replica, at least one. clients: numbers of the connections of all processes that have
    requests.
    """
    rows = emitted[0] if len(emitted) == 1 else _joined(emitted)
    tags, token_ids, scored, scores, vectors = rows.tags, rows.token_ids, rows.scored, rows.scores, rows.vectors
    if len(clients) == 1:
        return {clients[0]: _token_update(tags, token_ids, scored, scores, vectors)}
    updates, owners = {}, tags >> 32
    for client in clients:
        own = owners == client
        if own.any():
            chosen = own[scored]
            # Index of each scored row among the client's own rows.
            places = np.cumsum(own)[scored[chosen]] - 1
            parts = None if scores is None else TokenScores(*(array[chosen] for array in scores))
            own_vectors = None if vectors is None else vectors[own]
            updates[client] = _token_update(tags[own], token_ids[own], places, parts, own_vectors)
    return updates


def _token_update(
    tags: np.ndarray,
    token_ids: np.ndarray,
    scored: np.ndarray,
    scores: TokenScores | None,
    vectors: np.ndarray | None,
) -> Update:
    """Return an Update with the tokens of one API process; number, received and load are left to the sender.

    tags: i64[n]; the message has their lower 32 bits, the handles. token_ids: i32[n]. scored: indices of the rows with
    scores; not sent if scores is None. vectors: [n, size], sent as f32; None for none.
    """
    update = Update(0, 0, _NO_LOAD, tags.astype(np.int32).tobytes(), token_ids.tobytes())
    if scores is not None:
        update.tokens_scored, update.scores = array_bytes(scored, np.int32), _scores(scores)
    if vectors is not None:
        update.vectors = Vectors(vectors.shape[1], array_bytes(vectors, np.float32))
    return update


def _joined(emitted: Sequence[TokenRows]) -> TokenRows:
    """Return one TokenRows with the tokens, scores and vectors of all replicas. Indices of scored rows are changed to
    count over all replicas. Scores or vectors are None if no replica has any.
    """
    tags = np.concatenate([each.tags for each in emitted])
    token_ids = np.concatenate([each.token_ids for each in emitted])
    starts = np.cumsum([0, *(len(each.tags) for each in emitted)])[:-1]
    scored = np.concatenate([each.scored + start for each, start in zip(emitted, starts, strict=True)])
    parts = [each.scores for each in emitted if each.scores is not None]
    scores = TokenScores(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True))) if parts else None
    found = [each.vectors for each in emitted if each.vectors is not None]
    return TokenRows(tags, token_ids, scored, scores, vectors=np.concatenate(found) if found else None)


def _ended(request: Request, handle: int) -> Ended:
    """Return the end of a request in the form of a message. The request must have a finish_reason."""
    assert request.finish_reason is not None
    return Ended(
        handle,
        request.finish_reason.value,
        request.stop_reason,
        request.num_preemptions,
        request.num_cached_tokens,
        request.queued_time,
        request.first_scheduled_time,
        request.finished_time,
        None if request.per_step else array_bytes(request.output_token_ids, np.int32),
        request.kv_transfer_params,
    )


def _end(request: Request, ended: Ended) -> Request:
    """Set the end of the API process's request, in place, and return the request: status FINISHED, reasons, counts,
    times, and token ids if the message has them.
    """
    request.status, request.finish_reason = RequestStatus.FINISHED, FinishReason(ended.reason)
    times = ("queued_time", "first_scheduled_time", "finished_time")
    for name in ("stop_reason", "num_preemptions", "num_cached_tokens", "kv_transfer_params", *times):
        setattr(request, name, getattr(ended, name))
    if ended.output_token_ids is not None:
        request.output_token_ids = np.frombuffer(ended.output_token_ids, np.int32)
    return request


def _scores(scores: TokenScores) -> Scores:
    """Return TokenScores in the form of a message."""
    ranks, top_ids = array_bytes(scores.ranks, np.int32), array_bytes(scores.top_ids, np.int32)
    logprobs, top_logprobs = array_bytes(scores.logprobs, np.float32), array_bytes(scores.top_logprobs, np.float32)
    given = array_bytes(scores.given_logprobs, np.float32)
    sizes = scores.top_ids.shape[1], scores.given_logprobs.shape[1]
    return Scores(*sizes, logprobs, ranks, top_ids, top_logprobs, given)


def _read(scores: Scores) -> TokenScores:
    """Return the TokenScores in a message. Their arrays are read-only views of its bytes."""
    num_tokens = len(scores.logprobs) // 4
    shape = num_tokens, scores.num_top
    return TokenScores(
        np.frombuffer(scores.logprobs, np.float32),
        np.frombuffer(scores.ranks, np.int32),
        np.frombuffer(scores.top_ids, np.int32).reshape(shape),
        np.frombuffer(scores.top_logprobs, np.float32).reshape(shape),
        np.frombuffer(scores.given_logprobs, np.float32).reshape(num_tokens, scores.num_given),
    )


def _columns(rows: np.ndarray) -> list[tuple[str, str, list[int], bytes]]:
    """Return rows in the form of FoundPart.columns: a column for each named field, or a single one for rows without
    fields.
    """
    fields = {"": rows} if rows.dtype.names is None else {name: rows[name] for name in rows.dtype.names}
    return [(name, own.dtype.name, [*own.shape], own.tobytes()) for name, own in fields.items()]


def _rows(columns: Sequence[tuple[str, str, list[int], bytes]]) -> np.ndarray:
    """Return the array of rows from the columns that `_columns` has made of it: a read-only view for rows without
    fields, a new structured array for others.
    """
    fields = {}
    for name, dtype, shape, values in columns:
        kind = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
        fields[name] = np.frombuffer(values, kind).reshape(shape)
    if [*fields] == [""]:
        return fields[""]
    rows = np.empty(
        len(next(iter(fields.values()))), [(name, own.dtype, own.shape[1:]) for name, own in fields.items()]
    )
    for name, own in fields.items():
        rows[name] = own
    return rows
