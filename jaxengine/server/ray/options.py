"""Options of engines under Ray Serve, in addition to those of the engine and of the server."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxengine.config.base.values import kind_missed
from jaxengine.config.engine_config import ConfigError
from jaxengine.server.base.options import ServerConfig

# Server options without a meaning under Ray Serve, and who does what they are for.
_PROXIES, _CONTROLLER = "whose proxies have the clients' connections", "whose controller watches the replicas"
_REFUSED = {
    **dict.fromkeys(("host", "port", "uds", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs"), _PROXIES),
    **dict.fromkeys(("max_connections", "stream_write_timeout"), _PROXIES),
    **dict.fromkeys(("grpc_port", "metrics_port", "enable_reflection"), "which serves HTTP on one port"),
    **dict.fromkeys(("engine_hang_timeout", "api_hang_timeout", "api_memory_limit_bytes"), _CONTROLLER),
    **dict.fromkeys(("disable_access_log", "enable_log_requests", "max_log_len", "log_format"), "whose proxies log"),
    "api_server_count": "where num_ingresses says it",
    "max_num_queued_tokens": "whose queues count requests alone",
}
# Field -> least and most value.
_BOUNDS: dict[str, tuple[float, float]] = {
    "target_ongoing_requests": (1, 2**31),
    "num_ingresses": (1, 1024),
    "num_attempts": (1, 1024),
    "num_cpus": (0, 2**20),
    "num_gpus": (0, 2**20),
    "routing_imbalance": (0, 2**31),
    "routing_period": (0.1, 3600),
    "upscale_delay": (0, 2**31),
    "downscale_delay": (0, 2**31),
}
_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
# Bytes of published digests; fewer hold none, and Ray's controller passes all of them on to every ingress.
_DIGEST_BYTES = (64, 1 << 24)


@dataclasses.dataclass(frozen=True)
class RayConfig:
    """Options of engines under Ray Serve. Raises ConfigError for a value of another type, or outside of _BOUNDS,
    _DIGEST_BYTES (0 is allowed) or _STRATEGIES.

    Attributes:
      min_replicas: least number of engines, 1 to max_replicas.
      max_replicas: largest number of engines.
      target_ongoing_requests: requests per replica, running and waiting, that Ray aims at; None: max_num_seqs, or 32
        if that is not given.
      upscale_delay: seconds for which there must be too many requests before Ray adds a replica.
      downscale_delay: seconds for which there must be too few before Ray removes one.
      num_ingresses: processes that choose the replica of each request and pass it on.
      num_cpus: CPUs that Ray reserves on each host of a replica.
      num_gpus: GPUs that Ray reserves on each host of a replica.
      resources: other resources that Ray reserves there, such as {"TPU": 4}; None for no others.
      placement_strategy: Ray's strategy for placing the hosts of an engine with nnodes > 1.
      num_attempts: replicas on which a request without output is tried.
      routing_imbalance: number of requests that a replica with a prompt's whole prefix may have in addition to those
        of another replica; a replica with the conversation may have twice as many. None: a quarter of
        target_ongoing_requests.
      routing_digest_bytes: bytes of prefix digests that a replica publishes; 0: requests are routed without them.
      routing_period: seconds between two publications.
    """

    min_replicas: int = 1
    max_replicas: int = 1
    target_ongoing_requests: int | None = None
    upscale_delay: float = 30.0
    downscale_delay: float = 600.0
    num_ingresses: int = 1
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    resources: Mapping[str, float] | None = None
    placement_strategy: str = "STRICT_SPREAD"
    num_attempts: int = 5
    routing_imbalance: float | None = None
    routing_digest_bytes: int = 1 << 16
    routing_period: float = 1.0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if wanted := kind_missed(getattr(self, field.name), str(field.type)):
                raise ConfigError(field.name, getattr(self, field.name), wanted)
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise ConfigError("min_replicas", self.min_replicas, f"1 to max_replicas, {self.max_replicas}")
        for name, (least, most) in _BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ConfigError(name, value, f"{least} to {most}")
        least, most = _DIGEST_BYTES
        if self.routing_digest_bytes and not least <= self.routing_digest_bytes <= most:
            raise ConfigError("routing_digest_bytes", self.routing_digest_bytes, f"0 or {least} to {most}")
        for name, count in (self.resources or {}).items():
            if not (isinstance(name, str) and type(count) in (int, float) and 0 <= count < math.inf):
                raise ConfigError("resources", {name: count}, "numbers of 0 and more, by the resource's name")
        if self.placement_strategy not in _STRATEGIES:
            raise ConfigError("placement_strategy", self.placement_strategy, ", ".join(_STRATEGIES))


def refuse_without_meaning(given: Mapping[str, Any], max_replicas: int) -> None:
    """Raise ConfigError if an option in `given` has no meaning under Ray Serve (_REFUSED) and is not its default, or if
    enable_admin is set with max_replicas > 1. given: the server options that the user has set, by name.
    """
    server = ServerConfig()
    for name, why in _REFUSED.items():
        if given.get(name, getattr(server, name)) != getattr(server, name):
            raise ConfigError(name, given[name], f"{getattr(server, name)} under Ray Serve, {why}")
    if given.get("enable_admin") and max_replicas > 1:
        allowed = f"False with max_replicas {max_replicas}: each order would reach one replica of them"
        raise ConfigError("enable_admin", True, allowed)
