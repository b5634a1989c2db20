"""Runner of the batch API: it answers the batches of a store, line by line while the engine has slots to spare.

Results are kept one by one, as `run-batch` does, so a batch goes on after the process was killed.
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

# Requests of one batch, as of OpenAI's.
MAX_LINES = 50_000
# Batches that run at a time, each of another owner, and requests of one of them.
_MOST_BATCHES, _MOST_REQUESTS = 4, 256
# Of every so many slots one is left to others, at least one where there are two.
_SPARE = 4
# Seconds between two looks at the engine's load, between two looks at the store, before a batch that could not go on is
# tried again, before a request that was refused is, and between two removals of what is old.
_LOAD_SECONDS, _LOOK_SECONDS, _PAUSE_SECONDS, _REFUSED_SECONDS, _SWEEP_SECONDS = 0.1, 1.0, 15.0, 1.0, 600.0
# Statuses of requests that may be answered later: too many wait, or the engine is being started again.
_LATER = (429, 503)


class SpareSlots:
    """Slots of the engine that requests of batches may take: three quarters, rounded up, but not all if there are two
    or more, and none while other requests wait. An asynchronous context manager for one slot.
    """

    def __init__(self, engine: EngineClient):
        self._engine = engine
        self._turn = asyncio.Lock()
        self._num_own = self._num_spare = 0
        self._looked = 0.0

    async def __aenter__(self) -> None:
        """Take a slot as soon as there is one, in the order of the calls. Asks the engine for its load if the last
        answer is older than 0.1 s or left no slot. Raises EngineDeadError.
        """
        async with self._turn:
            while self._num_spare <= 0 or time.monotonic() - self._looked > _LOAD_SECONDS:
                load = await self._engine.utility("load")
                self._looked = time.monotonic()
                num_slots, num_taken = load["num_slots"], load["num_running"] + load["num_waiting"]
                spare = max(num_slots // _SPARE, 1) if num_slots > 1 else 0
                # Its own that are still being prepared are not known to the engine.
                self._num_spare = num_slots - spare - max(num_taken, self._num_own)
                if self._num_spare <= 0:
                    await asyncio.sleep(_LOAD_SECONDS)
            self._num_spare -= 1
            self._num_own += 1

    async def __aexit__(self, *_: Any) -> None:
        """Give the slot back, also after an error, which is raised on."""
        self._num_spare += 1
        self._num_own -= 1


class BatchService:
    """Runner of all batches of a server, in one of its processes; another one takes over if that ends.

    Args:
      app: the HTTP application. engine: the one that it serves. config: has enable_batch_api.

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
        """Run batches until cancelled. While another process runs them, look every second whether it has ended; after
        an OSError, which is logged, go on 15 s later.
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
            await asyncio.sleep(_LOOK_SECONDS)

    async def _serve(self) -> None:
        """Start the store's batches, at most one of each owner and four at a time, and remove what is old every ten
        minutes, until cancelled; then cancel them and wait for their ends. Raises OSError.
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
        """Run a batch to its end. After an OSError or EngineDeadError, which is logged, it is not tried again for 15 s;
        any other exception is logged and ends it as failed. Raises OSError if that cannot be stored.
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
        """Answer a batch and store its end; do nothing if it is gone. A file that cannot be read as requests ends it as
        failed. Raises OSError, EngineDeadError, and ConfigError for results of another file's batch.
        """
        record = await asyncio.to_thread(self._store.batch, owner, batch_id)
        if record is None:
            return
        source = str(self._store.content(owner, record["input_file_id"]))
        try:
            lines, digest = await asyncio.to_thread(read_lines, source, record["endpoint"], MAX_LINES)
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
        """Answer the lines that have no result, until there are none, the batch is cancelled or its time is over.

        Returns the status with which the batch ends: "completed", "cancelled" (also if its record is gone) or
        "expired". Each second it stores the counts. Requests in progress are cancelled at the end. Raises the errors of
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
        """Return a request's HTTP status and answer, once the engine has a slot to spare. One with status 429 or 503 is
        sent again after a second, as often as needed. holder: digest of its key. Raises EngineDeadError.
        """
        while True:
            async with self._slots:
                status, answer = await call(self._app, line, {"holder": holder, "priority": self._priority})
            if status not in _LATER:
                return status, answer
            await asyncio.sleep(_REFUSED_SECONDS)

    def _finish(self, owner: str, batch_id: str, lines: list[BatchLine], results: Results, status: str) -> None:
        """Store the output and error files of a batch that has ended, with its last state. The error file has the
        failed requests, and, if the status is "expired", those without a result. status: as `_answer` returns it.
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
        """End a batch as failed, without results. problem: the entry of its `errors`."""
        errors = {"object": "list", "data": [problem]}
        end = {"status": "failed", "failed_at": int(time.time()), "errors": errors}
        self._store.finish(owner, batch_id, (), (), end)


def _count(record: Record, *, results: Results) -> None:
    """Set the counts of completed and of failed requests in a batch's record from its results so far."""
    failed = results.num_failed
    record["request_counts"].update(completed=len(results.known) - failed, failed=failed)
