"""API process: HTTP and gRPC on one event loop, as a client of an engine in another process.

The supervisor owns the listening sockets, so that API processes share a port and a restarted one takes it over.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from uvicorn.loops.auto import auto_loop_factory

from jaxengine.api.engine_client import EngineClient, EngineDeadError
from jaxengine.server.adapters.owned_ids import owned
from jaxengine.server.base.certificates import RenewedContext
from jaxengine.server.base.descriptors import max_connections, raise_descriptor_limit
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.batch.service import BatchService
from jaxengine.server.grpc.server import start_grpc
from jaxengine.server.http.app import TrafficState, create_app, create_metrics_app
from jaxengine.server.link.remote_engine import RemoteEngine
from jaxengine.server.observe.prometheus import report
from jaxengine.server.observe.spans import traced
from jaxengine.server.processes.child import Child, alive_seconds
from jaxengine.server.processes.connections import Connections
from jaxengine.server.processes.memory import limit_memory, return_large_blocks
from jaxengine.server.processes.sockets import cut_unread, listen_too
from jaxengine.server.stored.link import RemoteStore

logger = logging.getLogger(__name__)

# Seconds to deliver the last output of every stream to its client.
_LAST_WORDS_SECONDS = 2.0
# Seconds between two reports of this process's requests to the engine's metrics.
_REPORT_SECONDS = 2.0


# Paths that pages, probes and collectors poll every few seconds.
_POLLED = frozenset({"/status.json", "/health", "/live", "/livez", "/ping", "/metrics"})


def is_news(record: logging.LogRecord) -> bool:
    """Whether a line of uvicorn's access log is to be shown: True unless it is a request for a path of _POLLED, such as
    /health, that was answered with 200.
    """
    if not isinstance(record.args, tuple) or len(record.args) != 5:
        return True
    _, _, path, _, status = record.args
    return str(path).partition("?")[0] not in _POLLED or status != 200


class _HttpServer(uvicorn.Server):
    """uvicorn's server without signal handlers, as the supervisor handles signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Context that leaves signal handlers unchanged."""
        yield


async def serve(child: Child) -> None:
    """Connect to the engine, then serve HTTP on the job's socket, and gRPC, metrics and batches if the options say so,
    until the supervisor's order to drain or the end of the HTTP server. Then let requests finish for at most
    shutdown_timeout seconds, and close everything.

    Reports "ready" to the supervisor once it is serving, then regularly "alive". Limits the process's memory. Raises
    ConfigError for an unusable option, ModelFileError, RuntimeError if HTTP does not start.
    """
    config = ServerConfig(**child.job["server"])
    drain = child.stopping()
    raise_descriptor_limit(config)
    engine = await RemoteEngine.connect(child.job["engine_address"], config, child.job["index"])
    # One wrapper for HTTP and gRPC: an operator may abort over one what runs over the other.
    client = owned(traced(engine, config), config)
    store = await RemoteStore.connect(child.job["store_path"]) if config.api_server_count > 1 else None
    app = create_app(client, config, store, child.job["name"])
    http = _HttpServer(http_options(app, config))
    logging.getLogger("uvicorn.access").addFilter(is_news)
    listener = socket.socket(fileno=child.job["listen_fd"])
    cut_unread(listener, config.stream_write_timeout)
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    grpc = None if config.grpc_port is None else await start_grpc(client, config)
    metrics = None if config.metrics_port is None else _serve_metrics(client, config, app.state.traffic)
    while not http.started:
        await asyncio.wait([serving], timeout=0.01)
        if serving.done():
            raise RuntimeError(f"HTTP did not start: {serving.exception()}")
    return_large_blocks()
    limit_memory(config.api_memory_limit_bytes)
    child.tell("ready")
    batches = asyncio.create_task(BatchService(app, client, config).run()) if config.enable_batch_api else None
    beat = asyncio.create_task(_say_alive(child, app.state.traffic, config.api_hang_timeout))
    reports = asyncio.create_task(_report(client, app.state.traffic))
    waiting = asyncio.create_task(drain.wait())
    await asyncio.wait([waiting, serving], return_when=asyncio.FIRST_COMPLETED)
    if batches is not None:  # unfinished batches continue after the next start
        batches.cancel()
        await asyncio.wait([batches])
    await engine.drain(config.shutdown_timeout)
    if grpc is not None:
        await grpc.stop(_LAST_WORDS_SECONDS)
    http.should_exit = True
    await serving
    if metrics is not None:
        metrics[0].should_exit = True
        await metrics[1]
    beat.cancel()
    reports.cancel()
    if store is not None:
        store.close()
    engine.close()


def _serve_metrics(
    client: EngineClient, config: ServerConfig, traffic: TrafficState
) -> tuple[_HttpServer, asyncio.Task[None]]:
    """Start to serve metrics_port, without TLS; return the server and its task. The API processes share the port, which
    the supervisor has reserved.

    Raises ConfigError for a port that cannot be bound.
    """
    assert config.metrics_port is not None
    own = dataclasses.replace(config, ssl_certfile=None, ssl_keyfile=None, ssl_ca_certs=None, disable_access_log=True)
    server = _HttpServer(http_options(create_metrics_app(client, own, traffic), own))
    listener = listen_too("metrics_port", config.host, config.metrics_port)
    return server, asyncio.create_task(server.serve(sockets=[listener]))


async def _say_alive(child: Child, traffic: TrafficState, hang_timeout: float) -> None:
    """Report to the supervisor, every `alive_seconds(hang_timeout)` until cancelled, that the event loop is running:
    "alive", or "served" once a request has been answered with 200.
    """
    seconds = alive_seconds(hang_timeout)
    while True:
        child.tell("served" if traffic.has_served else "alive")
        await asyncio.sleep(seconds)


async def _report(engine: EngineClient, traffic: TrafficState) -> None:
    """Add this process's requests to the engine's metrics every 2 s, if there were any, until cancelled. After an error
    they stay counted for the next report; an error other than EngineDeadError is logged, unless the last report had one
    too.
    """
    has_failed = False
    while True:
        await asyncio.sleep(_REPORT_SECONDS)
        if not traffic.http.has_counts:
            continue
        try:
            await report(engine, traffic)
            has_failed = False
        except EngineDeadError:
            pass
        except Exception:
            if not has_failed:
                logger.exception("requests could not be added to the metrics")
            has_failed = True


def http_options(app: Callable[..., Any], config: ServerConfig) -> uvicorn.Config:
    """Return uvicorn's configuration for the ASGI application `app`: no WebSockets, proxy headers ignored, and the
    limits, access log and TLS files of `config`, which are read again when they change. Raises ConfigError for files
    that cannot be used.
    """
    options = uvicorn.Config(
        app,
        http=Connections(max_connections(config), config.read_timeout),  # pyright: ignore[reportArgumentType]: uvicorn takes any callable
        ws="none",
        h11_max_incomplete_event_size=config.max_header_bytes,
        server_header=False,
        access_log=not config.disable_access_log,
        log_level="info" if not config.disable_access_log else "warning",
        log_config=None,
        proxy_headers=False,
        timeout_graceful_shutdown=int(_LAST_WORDS_SECONDS),
    )
    options.load()
    if config.ssl_certfile is not None:
        options.ssl = RenewedContext(config)
    return options


def main(child: Child) -> None:
    """Run an API process to its end: exit with status 0 after `serve`, or raise the errors of `serve`.

    Unlike other processes it does not end together with a killed supervisor, but a moment later, as it deletes the run
    folder.
    """
    with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
        runner.run(serve(child))
    child.leave(0)
