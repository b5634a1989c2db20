"""Engine in another process: an `EngineClient` that exchanges the messages of `messages`.

Requests are preprocessed and text is detokenised in this process; the engine's process handles token ids only. Each
running request has a copy here, and the results of a step go through the same `OutputProcessor` as those of an engine
in this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np

from jaxengine.api.engine_client import EngineDeadError, EngineDrainingError
from jaxengine.api.output_stream import OutputStream
from jaxengine.api.owner import Owner
from jaxengine.engine.output import EngineOutput
from jaxengine.requests.inputs import InputProcessor, Processor, make_processor
from jaxengine.requests.media.cache import MediaCache
from jaxengine.requests.output.output_processor import OutputProcessor
from jaxengine.requests.output.outputs import RequestOutput
from jaxengine.requests.params.options import RequestOptions
from jaxengine.requests.params.prepared import PreparedRequest, Prompt
from jaxengine.requests.params.sampling_params import RequestOutputKind, SamplingParams
from jaxengine.requests.pooling.outputs import PoolingOutput, PoolingRequestOutput
from jaxengine.requests.pooling.params import PoolingParams
from jaxengine.requests.run_in_thread import make_ready
from jaxengine.scheduler.base.errors import OverloadedError, RequestError
from jaxengine.scheduler.base.request import FinishReason, Request, RequestStatus
from jaxengine.scheduler.base.token_params import TokenParams
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.link import messages
from jaxengine.server.link.engine_link import EngineLink
from jaxengine.server.link.messages import Call, EndsDelivered, Finish, FromEngine, Load, Reply, Update, Welcome
from jaxengine.server.link.open_inputs import open_inputs
from jaxengine.server.link.queue_limits import QueueLimits
from jaxengine.server.link.request_log import log_request
from jaxengine.server.link.send_queue import SendQueue

# Placeholder for requests that are no longer tracked here.
_NOBODY = Request("", np.empty(0, np.int32), TokenParams(), 0)
_REJECTIONS_SECONDS = 0.2
# An engine sends something after each step, and every second without steps. It hangs if it is silent for this many
# seconds and for this many times the longest recent step.
_SILENT_SECONDS, _SILENT_STEPS = 10.0, 5
_LISTEN_SECONDS = 0.1


class RemoteEngine:
    """Client of the engine that listens at an address. Create it with `connect`; use it on one event loop."""

    inputs: InputProcessor

    def __init__(self, address: str, config: ServerConfig, index: int):
        """Start to connect and return at once; `inputs` is missing until `connect` sets it.

        address: ZeroMQ address of the engine's socket. index: number of this API process.
        """
        self._owner = Owner(has_devices=False)
        self._config = config
        self._index = index
        self._dead: EngineDeadError | None = EngineDeadError("the engine is being started")
        self._draining = False
        self._welcomed: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()
        self._limits = QueueLimits.of(1, config.max_num_queued_reqs, config.max_num_queued_tokens)
        self._load = Load()
        self._num_updates = self._num_calls = self._num_named = 0
        self._num_rejected = 0
        self._send_queue = SendQueue()
        self._num_media_resets = 0
        self._media_cache: MediaCache | None = None
        self._resends: set[asyncio.Task[None]] = set()
        self._aborted: set[str] = set()  # ids of aborted streams that are still read
        self._replicas: dict[int, Request] = {}
        # Tags of requests that met a stop string -> number of tokens that their callers received.
        self._stopped: dict[FinishReason, dict[int, int]] = {}
        self._streams: dict[str, OutputStream] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._heard, self._longest_silence = time.monotonic(), 0.0
        self._num_readers = 0
        self._nobody_reads = asyncio.Event()
        self._nobody_reads.set()
        self._processor: Processor = OutputProcessor(None)
        self._link = EngineLink(address, index, self._receive, self._lose)

    @classmethod
    async def connect(cls, address: str, config: ServerConfig, index: int = 0) -> RemoteEngine:
        """Return a client once the engine has answered, however long that takes, and its tokenizer has been opened.

        address: ZeroMQ address of the engine's socket. index: number of this API process. Raises the errors of
        `open_inputs`.
        """
        engine = cls(address, config, index)
        welcome = await engine._welcomed
        engine.inputs, engine._send_queue.media = await asyncio.to_thread(open_inputs, welcome, index)
        engine._media_cache = None if engine.inputs.media is None else engine.inputs.media.cache
        engine._processor = make_processor(engine.inputs)
        return engine

    @property
    def errored(self) -> bool:
        """Whether the engine cannot answer at the moment, or this process is a fork of the client's process."""
        return self._dead is not None or not self._owner.is_here

    @property
    def draining(self) -> bool:
        """Whether new requests are refused because the server is shutting down."""
        return self._draining

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        options: RequestOptions | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the outputs of a request, which is sent when the iteration begins; implements EngineClient.stream.

        Without parameters the model's defaults apply, without an id a new one is used, and without a timeout the
        server's request_timeout. Errors are raised by the iteration only: RequestError, OverloadedError,
        EngineDeadError, EngineDrainingError. Closing the iterator early aborts the request.
        """
        return self._outputs(prompt, sampling_params, request_id, options)

    def pool(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        options: RequestOptions | None = None,
    ) -> AsyncIterator[PoolingRequestOutput[PoolingOutput]]:
        """Yield the output of a pooling request; implements EngineClient.pool. Defaults and errors are those of
        `stream`.
        """
        return self._outputs(prompt, pooling_params or PoolingParams(), request_id, options)

    async def _outputs(
        self,
        prompt: Prompt,
        params: SamplingParams | PoolingParams | None,
        request_id: str | None,
        options: RequestOptions | None,
    ) -> AsyncIterator[Any]:
        """Prepare a request, submit it, and yield its outputs; abort it if the caller stops reading. Counts as a
        reader, for whom `drain` waits.

        params: None for the model's defaults. A request without an id is given one, and one without a timeout has the
        server's. Other arguments and errors are those of `stream`.
        """
        self._check()
        params = self.inputs.default_sampling_params() if params is None else params
        if request_id is None:
            self._num_named += 1
            request_id = f"api-{self._index}-{self._num_named}"
        options = options or RequestOptions()
        if options.timeout is None:
            options = replace(options, timeout=self._config.request_timeout)
        if not isinstance(params, PoolingParams):  # pooling may prepend something to the text
            prompt = await make_ready(self.inputs, prompt)
        prepared = self.inputs.prepare(prompt, params, request_id=request_id, options=options)
        if self._config.enable_log_requests:
            log_request(prepared, options, self._config.max_log_len)
        await self._send_queue.media.complete(prepared)
        self._check()
        stream = self._submit(prepared)
        self._num_readers += 1
        self._nobody_reads.clear()
        finished = False
        try:
            while not finished:
                output = await stream.get()
                finished = output.finished
                yield output
        finally:
            self._aborted.discard(request_id)
            if self._streams.get(request_id) is stream:
                self._finish(self._processor.running(request_id))
                self._forget(request_id)
            self._num_readers -= 1
            if not self._num_readers:
                self._nobody_reads.set()

    async def abort(self, request_id: str) -> None:
        """Order the engine to end a request, whose stream then yields a last output with finish_reason "abort".

        Does not wait for that. An unknown id has no effect. Raises EngineDeadError if the engine cannot answer.
        """
        self._check_alive()
        if request_id in self._streams:
            self._aborted.add(request_id)
        self._finish(self._processor.running(request_id))

    async def check_health(self) -> None:
        """Raise EngineDeadError if the engine cannot answer or has been silent for too long, EngineDrainingError if the
        server is shutting down. With enforce_eager, where steps may compile, no silence is too long.
        """
        self._check()
        if self._silent_too_long():
            # Perhaps this process was too busy to receive messages.
            await asyncio.sleep(_LISTEN_SECONDS)
            self._check()
            if self._silent_too_long():
                raise EngineDeadError(f"the engine has not finished a step for {time.monotonic() - self._heard:.0f} s")

    async def utility(self, name: str, *arguments: Any) -> Any:
        """Call a function of `EngineCore.utilities` in the engine's process, and return its result.

        Raises RequestError if the function does, EngineDeadError, and RuntimeError if the function fails otherwise.
        """
        self._check_alive()
        self._num_calls += 1
        future = self._calls[self._num_calls] = asyncio.get_running_loop().create_future()
        self._link.send(Call(self._num_calls, name, arguments))
        return await future

    def text_spans(self) -> list[tuple[float, float, int]]:
        """Return the most recent periods of detokenization in order: (start, end, number of outputs), in seconds of
        time.monotonic.
        """
        return list(self._processor.spans)

    async def drain(self, timeout: float) -> None:
        """Refuse new requests, let the running ones finish, and abort those that run longer than `timeout` seconds.

        Returns when all streams have been read to their ends, but at most a second after the aborts. Errors of the
        engine are not raised. The connection stays open.
        """
        self._draining = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._nobody_reads.wait(), timeout)
        with contextlib.suppress(TimeoutError, EngineDeadError):
            for request_id in list(self._streams):
                await self.abort(request_id)
            await asyncio.wait_for(self._nobody_reads.wait(), 1.0)

    def close(self) -> None:
        """Close the connection; open streams and calls end with EngineDeadError. Does nothing in a fork."""
        if not self._owner.is_here:
            return
        self._end(EngineDeadError("the connection to the engine was closed"))
        self._send_queue.media.close()
        self._link.close()

    def _check_alive(self) -> None:
        """Raise EngineDeadError while the engine cannot answer, and the error of `Owner.check` in a fork."""
        self._owner.check()
        if self._dead is not None:
            raise EngineDeadError(str(self._dead))

    def _check(self) -> None:
        """Raise EngineDrainingError while draining, and the errors of `_check_alive`."""
        if self._draining:
            raise EngineDrainingError("the server is shutting down")
        self._check_alive()

    def _submit(self, prepared: PreparedRequest) -> OutputStream:
        """Send a prepared request and track it from now on; return the stream of its outputs.

        Raises RequestError for an id in use, and for more sequences (n) than may run and wait at all; OverloadedError,
        which is counted for the engine's metrics, beyond the queue's limits at the moment; RuntimeError for pixels that
        were dropped. Nothing is tracked then.
        """
        request_id, requests = prepared.request_id, prepared.requests
        if request_id in self._processor:
            raise RequestError(f"request_id {request_id!r} is in use", param="request_id", value=request_id)
        num_tokens = sum(request.num_prompt_tokens for request in requests)
        try:
            load = self._send_queue.load_with(self._load, self._limits.num_slots)
            self._limits.check(load, len(requests), num_tokens)
        except OverloadedError:
            self._count_rejection()
            raise
        self._processor.add(prepared)
        try:
            message = self._send_queue.message(prepared)
        except Exception:  # a request that cannot be sent must not be tracked
            self._processor.forget(requests[0])
            raise
        self._replicas.update((request.tag, request) for request in requests)
        params = prepared.params
        aggregate = isinstance(params, SamplingParams) and params.output_kind is RequestOutputKind.DELTA
        stream = self._streams[request_id] = OutputStream(aggregate)
        self._link.send_encoded(message)
        return stream

    async def _send_again(self, prepared: PreparedRequest) -> None:
        """Resend a request with all pixels after the engine lacked some; its stream continues.

        An error goes to the stream's reader. Nothing is sent if the stream or the engine has ended meanwhile.
        """
        request_id = prepared.request_id
        stream = self._streams.get(request_id)
        try:
            await self._send_queue.media.complete(prepared, whole=True)
            if stream is not None and self._streams.get(request_id) is stream and self._dead is None:
                self._link.send_encoded(self._send_queue.message(prepared, whole=True))
                if request_id in self._aborted:  # the engine got the abort before it had the request
                    self._finish(prepared.requests)
        except Exception as error:
            self._refuse(request_id, error)

    def _count_rejection(self) -> None:
        """Count a rejection for the engine's metrics. All rejections within 0.2 s are reported in one message."""
        if not self._num_rejected:
            asyncio.get_running_loop().call_later(_REJECTIONS_SECONDS, self._tell_rejections)
        self._num_rejected += 1

    def _tell_rejections(self) -> None:
        """Report the number of rejections to the engine, unless it cannot answer, and reset the number to 0."""
        if self._dead is None:
            self._link.send(Call(0, "count_rejections", (self._num_rejected,)))
        self._num_rejected = 0

    def _finish(self, requests: list[Request]) -> None:
        """Send the engine the order to abort requests; do nothing if there are none or the engine cannot answer. Does
        not wait for the aborts.
        """
        if requests and not self.errored:
            self._link.send(Finish([request.tag for request in requests], "abort"))

    def _silent_too_long(self) -> bool:
        """Whether the engine has sent nothing for more than 10 s and more than five times its longest recent silence;
        always False with enforce_eager.
        """
        # The time of a step that compiles has no bound.
        compiles = self._welcomed.done() and self.inputs.config.enforce_eager
        allowed = math.inf if compiles else max(_SILENT_SECONDS, _SILENT_STEPS * self._longest_silence)
        return time.monotonic() - self._heard > allowed

    def _receive(self, message: FromEngine) -> None:
        """Handle a message of the engine; the link calls this for each one. An Update is passed to `_update`. A
        Welcome, the first message of each connection, sets the engine's limits and load, and makes this client alive.
        Every message updates when the engine was last heard and its longest recent silence.
        """
        now = time.monotonic()
        # Decays within a few hundred messages, as a step that was slow once need not be slow again.
        self._longest_silence = max(now - self._heard, 0.99 * self._longest_silence)
        self._heard = now
        if isinstance(message, Update):
            self._update(message)
            return
        limits = self._config.max_num_queued_reqs, self._config.max_num_queued_tokens
        self._limits = QueueLimits.of(message.num_slots, *limits)
        self._load, self._num_updates, self._dead = message.load, 0, None
        self._num_media_resets = message.num_media_resets
        if not self._welcomed.done():
            self._welcomed.set_result(message)

    def _update(self, update: Update) -> None:
        """Handle the results of a step: pass outputs to their streams and replies to their callers, stop tracking
        requests that have ended, confirm their ends to the engine, and resend requests whose pixels it lacks. Store the
        engine's load, and clear the image cache of this process if the engine's has been reset.

        If an earlier update was lost, reopens the connection instead, which ends all streams.
        """
        self._num_updates += 1
        if update.number != self._num_updates:
            self._link.reopen()
            return
        self._load = update.load
        if update.num_media_resets != self._num_media_resets:
            self._num_media_resets = update.num_media_resets
            if self._media_cache is not None:
                self._media_cache.clear()
        refused = {reply.number: reply.failure for reply in update.refused}
        for pending in self._send_queue.read(update.received):
            failure = refused.get(pending.number)
            if failure is not None and failure.kind == messages.MISSING_MEDIA:
                self._send_queue.media.refused()
                self._resends.add(task := asyncio.create_task(self._send_again(pending.prepared)))
                task.add_done_callback(self._resends.discard)
                continue
            for request in pending.prepared.requests:
                request.media = None  # the engine has them
            if failure is not None:
                self._refuse(pending.prepared.request_id, messages.error_of(failure))
        output = messages.output_of(update, lambda handle: self._replicas.get(handle, _NOBODY))
        for result in self._processor.process(output, time.monotonic(), self._stop):
            stream = self._streams.get(result.request_id)
            if stream is not None:
                stream.put(result)
                if result.finished:
                    del self._streams[result.request_id]
        ended = [request.tag for request in output.finished if request.text_ends and request.tag in self._replicas]
        if ended:
            self._link.send(EndsDelivered(ended))
        for request in output.finished:
            self._drop(request)
        for each in update.unservable:
            if (request := self._replicas.get(each.handle)) is not None:
                self._end_unservable(request, messages.error_of(each.failure))
        for reason, stopped in self._stopped.items():
            self._link.send(Finish(list(stopped), reason.value, list(stopped.values())))
        self._stopped.clear()
        for reply in update.replies:
            self._settle(reply)

    def _stop(self, request: Request, reason: FinishReason, text: str, num_tokens: int) -> None:
        """Mark a request as finished because of its output's content, and add it to the next Finish for the engine,
        which may have ended it already with as many tokens or more.

        reason, text, num_tokens: the arguments with which OutputProcessor.process calls this.
        """
        request.status, request.finish_reason, request.stop_reason = RequestStatus.FINISHED, reason, text
        if request.tag in self._replicas:
            self._stopped.setdefault(reason, {})[request.tag] = num_tokens
            self._drop(request)

    def _drop(self, request: Request) -> None:
        """Forget the copy of a request, if it is tracked: the engine's further results for it are ignored."""
        self._replicas.pop(request.tag, None)

    def _refuse(self, request_id: str, error: Exception) -> None:
        """End the stream of a request with an error, which its reader gets. Does nothing without a stream."""
        stream = self._streams.get(request_id)
        if stream is not None:
            self._forget(request_id)
            stream.put(error)

    def _end_unservable(self, request: Request, error: Exception) -> None:
        """End a request of which one of the n sequences, `request`, was refused: its reader gets the error, and the
        engine is ordered to abort the other sequences.
        """
        self._drop(request)
        request_id, members = self._processor.forget(request)
        others = [each for each in members if each is not request]
        self._finish(others)
        for other in others:
            self._drop(other)
        if request_id is not None and (stream := self._streams.pop(request_id, None)) is not None:
            stream.put(error)

    def _forget(self, request_id: str) -> None:
        """Stop tracking a request: remove its stream, which must exist, and its sequences, which are marked as aborted.
        Neither the stream's reader nor the engine is notified.
        """
        del self._streams[request_id]
        running = self._processor.running(request_id)
        for request in running:
            request.status, request.finish_reason = RequestStatus.FINISHED, FinishReason.ABORT
            self._drop(request)
        self._processor.process(EngineOutput(finished=running), time.monotonic(), self._stop)

    def _settle(self, reply: Reply) -> None:
        """Pass the reply to a Call, a result or an error, to its caller. Does nothing if the caller has left."""
        future = self._calls.pop(reply.number, None)
        if future is None or future.done():
            return
        if reply.failure is None:
            future.set_result(reply.result)
        else:
            future.set_exception(messages.error_of(reply.failure))

    def _lose(self) -> None:
        """End all streams and calls that wait for the lost engine, with EngineDeadError. The link calls this."""
        self._end(EngineDeadError("the engine has failed; it is being started again"))

    def _end(self, error: EngineDeadError) -> None:
        """End all streams and calls that wait for the engine with copies of `error`, drop unread Submits, and let
        further calls fail until the engine sends Welcome again.
        """
        self._dead = error
        streams = list(self._streams.items())
        for request_id, stream in streams:
            self._forget(request_id)
            stream.put(EngineDeadError(str(error)))
        self._send_queue.lost()
        calls, self._calls = self._calls, {}
        for future in calls.values():
            if not future.done():
                future.set_exception(EngineDeadError(str(error)))
