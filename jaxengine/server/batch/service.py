"""Runner of the batch API: it answers the batches of a store, line by line, while the engine has slots to spare.

Results are stored one by one, as `run-batch` does, so a batch continues after the process was killed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import Any

from starlette.types import ASGIApp

from jaxengine.api.engine_client import EngineClient, EngineDeadError
from jaxengine.config.base.errors import ConfigError
from jaxengine.requests.params.options import MAX_PRIORITY
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.batch.lines import BatchLine, LineError, expired_line, read_lines
from jaxengine.server.batch.results import Results
from jaxengine.server.batch.run import call, run_lines
from jaxengine.server.batch.store import BatchStore, Record

logger = logging.getLogger(__name__)

# Largest number of requests in a batch, as in OpenAI's API.
MAX_LINES = 50_000
# Largest number of batches that run at a time, each of another owner, and of concurrent requests of one batch.
_MOST_BATCHES, _MOST_REQUESTS = 4, 256
# One of every _SPARE slots is left to other requests, and at least one if there are two or more.
_SPARE = 4
# Seconds between two queries of the engine's load, between two reads of the store, before a batch is tried again after
# an error, before a refused request is sent again, and between two removals of expired files and batches.
_LOAD_SECONDS, _LOOK_SECONDS, _PAUSE_SECONDS, _REFUSED_SECONDS, _SWEEP_SECONDS = 0.1, 1.0, 15.0, 1.0, 600.0
# Statuses of requests that may be answered later: too many wait, or the engine is being started again.
_LATER = (429, 503)


class SpareSlots:
    """Slots of the engine that requests of batches may take: at most three quarters, rounded up, but not all if there
    are two or more, and none while the engine's other requests fill this share. An asynchronous context manager for one
    slot.
    """

    def __init__(self, engine: EngineClient):
        self._engine = engine
        self._turn = asyncio.Lock()
        self._num_own = self._num_spare = 0
        self._looked = 0.0

    async def __aenter__(self) -> None:
        """Take a slot as soon as there is one, in the order of the calls. Queries the engine's load if the last answer
        is older than 0.1 s or left no slot. Raises EngineDeadError if the engine cannot answer.
        """
        async with self._turn:
            while self._num_spare <= 0 or time.monotonic() - self._looked > _LOAD_SECONDS:
                load = await self._engine.utility("load")
                self._looked = time.monotonic()
                num_slots, num_taken = load["num_slots"], load["num_running"] + load["num_waiting"]
                spare = max(num_slots // _SPARE, 1) if num_slots > 1 else 0
                # The engine does not know of batch requests that are still being prepared.
                self._num_spare = num_slots - spare - max(num_taken, self._num_own)
                if self._num_spare <= 0:
                    await asyncio.sleep(_LOAD_SECONDS)
            self._num_spare -= 1
            self._num_own += 1

    async def __aexit__(self, *_: Any) -> None:
        """Give the slot back. Errors of the block propagate."""
        self._num_spare += 1
        self._num_own -= 1


class BatchService:
    """Runner of all batches of a server, in one of its processes; another process takes over if this one ends.

    Args:
      app: the HTTP application.
      engine: the engine that the application serves.
      config: server options, with enable_batch_api.

    Raises ConfigError if batch_storage_dir cannot be used.
    """

    def __init__(self, app: ASGIApp, engine: EngineClient, config: ServerConfig):
        self._app, self._engine = app, engine
        self._store = BatchStore.of(config)
        lowest = MAX_PRIORITY if engine.inputs.config.scheduling_policy == "priority" else None
        self._priority = lowest if config.batch_priority is None else config.batch_priority
        self._slots = SpareSlots(engine)
        # Owner -> the work on a batch of theirs; batch -> time before which it is not tried again.
        self._work: dict[str, asyncio.Task[None]] = {}
        self._paused: dict[str, float] = {}

    async def run(self) -> None:
        """Run batches until cancelled. While another process runs them, tries every second to take over. An error is
        logged, and work continues 16 s later.
        """
        while True:
            try:
                with self._store.only_runner():
                    await self._serve()
            except BlockingIOError:
                pass
            except OSError as error:
                logger.error("the batch API's folder cannot be used: %s", error)
                await asyncio.sleep(_PAUSE_SECONDS)
            except Exception:  # a bug, after which nothing else would start this task again
                logger.exception("the batch API has failed")
                await asyncio.sleep(_PAUSE_SECONDS)
            await asyncio.sleep(_LOOK_SECONDS)

    async def _serve(self) -> None:
        """Start the store's batches that are not paused, at most one of each owner and four at a time, and remove
        expired files and batches now and every ten minutes. Runs until cancelled or an error; then cancels the running
        batches and waits for their ends.
        """
        swept = -_SWEEP_SECONDS
        try:
            while True:
                if time.monotonic() - swept > _SWEEP_SECONDS:
                    await asyncio.to_thread(self._store.sweep)
                    swept = time.monotonic()
                for owner, batch_id in await asyncio.to_thread(self._store.live):
                    waits = time.monotonic() < self._paused.get(batch_id, 0.0)
                    if not waits and owner not in self._work and len(self._work) < _MOST_BATCHES:
                        self._work[owner] = asyncio.create_task(self._try(owner, batch_id))
                if self._work:
                    await asyncio.wait(self._work.values(), timeout=_LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                else:
                    await asyncio.sleep(_LOOK_SECONDS)
                self._work = {owner: task for owner, task in self._work.items() if not task.done()}
        finally:
            for task in self._work.values():
                task.cancel()
            await asyncio.gather(*self._work.values(), return_exceptions=True)
            self._work.clear()

    async def _try(self, owner: str, batch_id: str) -> None:
        """Run a batch to its end. After an OSError or EngineDeadError, which is logged, the batch is paused for 15 s.
        Any other exception is logged and ends the batch as failed. Raises OSError if that cannot be stored.
        """
        self._paused.pop(batch_id, None)
        try:
            await self._run(owner, batch_id)
        except (OSError, EngineDeadError) as error:
            logger.warning("%s waits for %g s: %s", batch_id, _PAUSE_SECONDS, error)
            self._paused[batch_id] = time.monotonic() + _PAUSE_SECONDS
        except Exception:  # a bug, which must not stop the other batches
            logger.exception("%s has failed", batch_id)
            problem = {"code": "server_error", "line": None, "message": "internal error of the server", "param": None}
            await asyncio.to_thread(self._fail, owner, batch_id, problem)

    async def _run(self, owner: str, batch_id: str) -> None:
        """Answer a batch and store its final state; do nothing if its record does not exist. An input file that is
        gone, is not made of requests for the batch's endpoint or has none ends it as failed. Otherwise the record gets
        the total count, and the status in_progress if it was validating, before the first request is answered.

        Raises OSError, EngineDeadError, and ConfigError if the partial results are of another input file or in use by
        another process.
        """
        record = await asyncio.to_thread(self._store.batch, owner, batch_id)
        if record is None:
            return
        source = str(self._store.content(owner, record["input_file_id"]))
        try:
            lines, digest = await asyncio.to_thread(read_lines, source, record["endpoint"], MAX_LINES)
            if not lines:
                raise LineError.at(source, None, "it has no requests")
        except ConfigError as error:
            number, said = (error.number, error.problem) if isinstance(error, LineError) else (None, "it is gone")
            problem = {"code": "invalid_request", "line": number, "message": said, "param": "input_file_id"}
            await asyncio.to_thread(self._fail, owner, batch_id, problem)
            return

        def begin(record: Record) -> None:
            """Set a record's total count, and its status to in_progress if it was validating."""
            if record["status"] == "validating":
                record.update(status="in_progress", in_progress_at=int(time.time()))
            record["request_counts"]["total"] = len(lines)

        await asyncio.to_thread(self._store.change, owner, batch_id, begin)
        results = await asyncio.to_thread(Results, self._store.results_path(owner, batch_id), digest, source)
        with results:
            end = await self._answer(owner, batch_id, lines, results)
            await asyncio.to_thread(self._finish, owner, batch_id, lines, results, end)

    async def _answer(self, owner: str, batch_id: str, lines: list[BatchLine], results: Results) -> str:
        """Answer the lines that have no result, until all have one, the batch is cancelled or its time is over. Return
        the status with which the batch ends: "completed", "cancelled" (also if its record no longer exists) or
        "expired".

        Stores the counts of results every second. Requests in progress are cancelled at the end. Raises the errors of
        `run_lines`.
        """
        left = [line for line in lines if line.custom_id not in results.known]
        answer = partial(self._answer_line, bytes.fromhex(owner))
        check = self._engine.check_health
        working = asyncio.create_task(run_lines(answer, left, results, _MOST_REQUESTS, check, lambda *_: None))
        try:
            while True:
                record = await asyncio.to_thread(self._store.change, owner, batch_id, partial(_count, results=results))
                if record is None or record["status"] == "cancelling":
                    return "cancelled"
                if working.done():
                    working.result()
                    return "completed"
                if time.time() >= record["expires_at"]:
                    return "expired"
                await asyncio.wait([working], timeout=_LOOK_SECONDS)
        finally:
            working.cancel()
            await asyncio.wait([working])

    async def _answer_line(self, holder: bytes, line: BatchLine) -> tuple[int, Any]:
        """Return a request's HTTP status and answer. Waits for a spare slot of the engine; a request with status 429 or
        503 is sent again after a second, as often as needed.

        holder: digest of the owner's key. Raises EngineDeadError if the engine cannot answer.
        """
        while True:
            async with self._slots:
                status, answer = await call(self._app, line, {"holder": holder, "priority": self._priority})
            if status not in _LATER:
                return status, answer
            await asyncio.sleep(_REFUSED_SECONDS)

    def _finish(self, owner: str, batch_id: str, lines: list[BatchLine], results: Results, status: str) -> None:
        """Store the output and error files of a batch that has ended, with its final state. The output file has the
        results of requests that succeeded. The error file has those of failed requests and then, if the status is
        "expired", a line for each request without a result. Both files are in the order of `lines`.

        status: "completed", "cancelled" or "expired". Raises OSError for files that cannot be written.
        """

        def finalise(record: Record) -> None:
            """Set a record's counts, and its status to finalizing if the batch is completed."""
            _count(record, results=results)
            if status == "completed":
                record.update(status="finalizing", finalizing_at=int(time.time()))

        self._store.change(owner, batch_id, finalise)
        errors = (
            list[bytes]()
            if status != "expired"
            else [expired_line(line) for line in lines if line.custom_id not in results.known]
        )
        failed = [line for line in lines if line.custom_id in results.known and results.known[line.custom_id].failed]
        output, failures = results.lines(lines, failed=False), results.lines(failed)
        end = {"status": status, f"{status}_at": int(time.time())}
        self._store.finish(owner, batch_id, output, (*failures, *errors), end)

    def _fail(self, owner: str, batch_id: str, problem: Record) -> None:
        """End a batch as failed, without results. problem: the only entry of the record's `errors`."""
        errors = {"object": "list", "data": [problem]}
        end = {"status": "failed", "failed_at": int(time.time()), "errors": errors}
        self._store.finish(owner, batch_id, (), (), end)


def _count(record: Record, *, results: Results) -> None:
    """Set the counts of completed and of failed requests in a batch's record, in place, from its results so far."""
    failed = results.num_failed
    record["request_counts"].update(completed=len(results.known) - failed, failed=failed)
