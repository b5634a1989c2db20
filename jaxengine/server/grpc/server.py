"""The gRPC server: its services, listening port, health reporting and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from jaxengine.api.engine_client import EngineClient
from jaxengine.config.engine_config import ConfigError
from jaxengine.server.adapters.owned_ids import owned
from jaxengine.server.base.certificates import file_times, open_file, read_context
from jaxengine.server.base.descriptors import max_connections
from jaxengine.server.base.keys import Keys
from jaxengine.server.base.names import served_names
from jaxengine.server.base.options import MIB, ServerConfig, is_loopback
from jaxengine.server.grpc import admin_pb2, inference_pb2
from jaxengine.server.grpc.admin import AdminService
from jaxengine.server.grpc.auth import KeyInterceptor
from jaxengine.server.grpc.health import MAX_WATCHES, Health, health_handlers
from jaxengine.server.grpc.inference import InferenceService
from jaxengine.server.grpc.service import OpenCalls, handlers

INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["Inference"]
ADMIN = admin_pb2.DESCRIPTOR.services_by_name["Admin"]
MAX_SEND_BYTES = 64 * MIB
# Calls in addition to those that the engine runs and queues: tokenising, admin calls, calls that will be refused.
SPARE_CALLS = 256
# Calls in addition to all those and to health watchers: refused calls and health checks.
OPEN_TO_ALL = 256
# Age at which a connection is closed to new calls; its open calls then have the same time again.
_CONNECTION_AGE_MS = 3_600_000
_MAX_UNREAD_CALLS = 10_000
_IDLE_MS, _HANDSHAKE_MS = 300_000, 10_000


class GrpcServer:
    """Running gRPC server.

    Attributes:
      port: port on which it listens.
    """

    def __init__(self, server: grpc.aio.Server, port: int, engine: EngineClient, calls: OpenCalls, health: Health):
        self.port = port
        self._server = server
        self._calls = calls
        self._health = health
        self._watch = asyncio.create_task(health.follow(engine))

    async def stop(self, grace: float) -> None:
        """Report NOT_SERVING, refuse new calls as UNAVAILABLE, and end the calls that are still open after `grace`
        seconds. Return when all have ended and the port is closed.
        """
        self._watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._watch
        await self._health.enter_graceful_shutdown()
        # Health watchers get the new status; their streams are not waited for.
        await self._calls.drain(grace)
        await self._server.stop(None)


async def start_grpc(engine: EngineClient, config: ServerConfig) -> GrpcServer:
    """Start to serve `engine` on config.grpc_port, on the running event loop, and return once the server is listening.
    The Admin service is served if enable_admin, reflection if enable_reflection (None: if the host is a loopback
    address).

    Raises ConfigError, naming the option, for a port in use and for unusable keys or certificates.
    """
    engine = owned(engine, config)
    names = served_names(engine, config)
    max_calls = _max_calls(engine, config)
    calls = OpenCalls(log=not config.disable_access_log, most=max_calls, read_timeout=config.read_timeout)
    keys = Keys(config.api_keys(), config.admin_keys())
    server = grpc.aio.server(
        interceptors=[KeyInterceptor(keys)],
        options=_options(config),
        maximum_concurrent_rpcs=max_calls + MAX_WATCHES + OPEN_TO_ALL,
    )
    services = [INFERENCE.full_name]
    server.add_generic_rpc_handlers((handlers(InferenceService(engine, config, names, keys), INFERENCE, calls),))
    if config.enable_admin:
        services.append(ADMIN.full_name)
        server.add_generic_rpc_handlers((handlers(AdminService(engine, config, names, calls), ADMIN, calls),))
    reported = Health(tuple(services))
    server.add_generic_rpc_handlers((health_handlers(reported, config.read_timeout),))
    if config.enable_reflection if config.enable_reflection is not None else is_loopback(config.host):
        reflection.enable_server_reflection((*services, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    port = _listen(server, config)
    await server.start()
    return GrpcServer(server, port, engine, calls, reported)


def _max_calls(engine: EngineClient, config: ServerConfig) -> int:
    """Return how many calls may be open: max_num_seqs summed over all replicas, plus max_num_queued_reqs (None: four
    times that sum), plus SPARE_CALLS.
    """
    engine_config = engine.inputs.config
    max_num_seqs = engine_config.max_num_seqs * engine_config.data_parallel_size
    queued = 4 * max_num_seqs if config.max_num_queued_reqs is None else config.max_num_queued_reqs
    return max_num_seqs + queued + SPARE_CALLS


def _options(config: ServerConfig) -> list[tuple[str, int]]:
    """Return gRPC's channel options: limits of message and header sizes and of connections from `config`, no
    compression, SO_REUSEPORT, keepalive pings, and times after which connections end.
    """
    return [
        ("grpc.max_receive_message_length", config.max_request_bytes),
        ("grpc.max_send_message_length", MAX_SEND_BYTES + config.max_captured_bytes),
        ("grpc.max_metadata_size", config.max_header_bytes),
        ("grpc.absolute_max_metadata_size", config.max_header_bytes),
        # Only uncompressed messages (bit 0): the size limit applies before decompression.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        # Calls that wait to be read. grpc drops those beyond as CANCELLED; the others are refused with a reason.
        ("grpc.server.max_pending_requests", _MAX_UNREAD_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", _MAX_UNREAD_CALLS),
        # The processes of one server share its port, which their supervisor has checked to be free.
        ("grpc.so_reuseport", 1),
        # Clients may ping during a long silent answer, without GOAWAY too_many_pings.
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # Pings detect clients that have disappeared.
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.max_connection_age_ms", _CONNECTION_AGE_MS),
        ("grpc.max_connection_age_grace_ms", _CONNECTION_AGE_MS),
        ("grpc.max_connection_idle_ms", _IDLE_MS),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        ("grpc.max_allowed_incoming_connections", max_connections(config)),
    ]


def _listen(server: grpc.aio.Server, config: ServerConfig) -> int:
    """Open grpc_port, with TLS if there is a certificate, and return the port number, which the system has chosen if
    the option is 0.

    Raises ConfigError if the option is None, the port cannot be opened or certificate files cannot be used.
    """
    if config.grpc_port is None:
        raise ConfigError("grpc_port", None, "0 to 65535")
    address = f"[{config.host}]:{config.grpc_port}" if ":" in config.host else f"{config.host}:{config.grpc_port}"
    credentials = None if config.ssl_certfile is None else Certificates(config).credentials()
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError:
        problem = f"grpc_port {address} cannot be opened"
        advice = "give a --grpc-port that is free, and a certificate that fits its key"
        raise ConfigError.because("grpc_port", problem, advice) from None


class Certificates:
    """Files of a server's certificate, read again when they change, so that renewal needs no restart.

    The constructor and `credentials` raise ConfigError for a file that cannot be read.
    """

    def __init__(self, config: ServerConfig):
        assert config.ssl_certfile is not None and config.ssl_keyfile is not None
        self._config = config
        self._changed = file_times(config)

    def credentials(self) -> grpc.ServerCredentials:
        """Return credentials for a port, which check for changed files at each handshake. With ssl_ca_certs, clients
        must present a certificate. Raises ConfigError for a file that cannot be read.
        """
        return grpc.dynamic_ssl_server_credentials(self._read(), self._renewed, self._config.ssl_ca_certs is not None)

    def _renewed(self) -> Any:
        """Return a new ServerCertificateConfiguration for a handshake if the files have changed, else None, which keeps
        the current one. Files that cannot be used count as unchanged.
        """
        try:
            times = file_times(self._config)
            if times == self._changed:
                return None
            read_context(self._config)
            configuration = self._read()
        except ConfigError:  # the files are being replaced
            return None
        self._changed = times
        return configuration

    def _read(self) -> grpc.ServerCertificateConfiguration:
        """Return the current content of the files. Raises ConfigError for one that cannot be read."""
        key, certificate = (open_file(self._config, name, Path.read_bytes) for name in ("ssl_keyfile", "ssl_certfile"))
        known = None
        if self._config.ssl_ca_certs is not None:
            known = open_file(self._config, "ssl_ca_certs", Path.read_bytes)
        return grpc.ssl_server_certificate_configuration([(key, certificate)], known)
