"""kv_events_config: where an engine publishes which pages of prefixes it has."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from jaxengine.config.base.errors import ConfigError, json_object
from jaxengine.config.kv.kv_transfer import is_number

_OPTION = "kv_events_config"
NULL, ZMQ = PUBLISHERS = ("null", "zmq")
_TCP = re.compile(r"tcp://([A-Za-z0-9.*_-]+|\[[0-9A-Fa-f:]+\]):([0-9]{1,5})")
_IPC = re.compile(r"ipc://[^\0]{1,100}")


@dataclass(frozen=True, kw_only=True)
class KVEventsConfig:
    """Settings by which the events of an engine's pages are published. Fields are vLLM's.

    Attributes:
      enable_kv_cache_events: whether events are published.
      publisher: one of PUBLISHERS; None for "zmq".
      endpoint: ZeroMQ address that subscribers connect to: one with a "*" or of ipc is bound, any other connected to.
        Replicas after the first use the following ports.
      replay_endpoint: address at which earlier batches can be requested; None if they cannot.
      buffer_steps: number of batches kept for such requests.
      hwm: messages that wait for a slow subscriber at most; later ones are dropped, and leave a gap in the numbers.
      topic: topic of the messages.
    """

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    topic: str = ""

    @property
    def publishes(self) -> bool:
        """Whether events are published: enable_kv_cache_events is set, and the publisher is not NULL."""
        return self.enable_kv_cache_events and self.publisher != NULL

    @staticmethod
    def read(value: Any) -> KVEventsConfig | None:
        """Return the config for a dict of its fields or its JSON text; None for None. A config is returned unchanged.

        Raises ConfigError, which names the field, for other values, unknown fields and values that are not allowed.
        """
        if value is None or isinstance(value, KVEventsConfig):
            return value
        value = json_object(_OPTION, value)
        known = [each.name for each in fields(KVEventsConfig)]
        given = {name: one for name, one in value.items() if one is not None}
        for name, one in given.items():
            if name not in known:
                problem = f"{_OPTION} has {name}, which is not supported"
                raise ConfigError.because(_OPTION, problem, f"leave it out; supported: {', '.join(known)}")
            is_allowed, allowed = _FIELDS[name]
            if not is_allowed(one):
                raise ConfigError(f"{_OPTION}.{name}", one, allowed)
        return KVEventsConfig(**given)


def address_of_replica(address: str, rank: int) -> str:
    """Return the address of replica `rank`: for tcp:// the port plus `rank`, for ipc:// the file with "_dp" and `rank`
    appended, unchanged for replica 0.
    """
    if address.startswith("tcp:"):
        head, _, port = address.rpartition(":")
        return f"{head}:{int(port) + rank}"
    return f"{address}_dp{rank}" if rank else address


def _is_address(value: Any) -> bool:
    """Return whether a value is a tcp:// address with a port from 1 to 65535, or an ipc:// one."""
    if not isinstance(value, str):
        return False
    tcp = _TCP.fullmatch(value)
    return 1 <= int(tcp[2]) <= 65535 if tcp else bool(_IPC.fullmatch(value))


_ADDRESS = "an address such as tcp://*:5557, tcp://host:5557 or ipc:///tmp/events"
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "enable_kv_cache_events": (lambda value: type(value) is bool, "True or False"),
    "publisher": (lambda value: value in PUBLISHERS, ", ".join(PUBLISHERS)),
    "endpoint": (_is_address, _ADDRESS),
    "replay_endpoint": (_is_address, _ADDRESS),
    "buffer_steps": (is_number(1, 10**7, (int,)), "an integer from 1 to 10000000"),
    "hwm": (is_number(1, 10**7, (int,)), "an integer from 1 to 10000000"),
    "topic": (lambda value: isinstance(value, str) and len(value) <= 1024, "at most 1024 characters"),
}


@dataclass(frozen=True, kw_only=True)
class KVEventOptions:
    """The fields of EngineConfig about what happens to pages of prefixes.

    Attributes:
      kv_events_config: vLLM's option, a dict or JSON: enable_kv_cache_events publishes which pages of prefixes the
        engine has, over ZeroMQ at endpoint, with replay_endpoint, buffer_steps, hwm and topic. See docs/serving.md.
      kv_cache_metrics: count how long pages of prefixes stay, wait and are found (vllm:kv_block_...). See
        docs/serving.md.
      kv_cache_metrics_sample: share of the pages that these metrics observe, more than 0.
    """

    kv_events_config: KVEventsConfig | None = None
    kv_cache_metrics: bool = False
    kv_cache_metrics_sample: float = 0.01

    @property
    def publishes_kv_events(self) -> bool:
        """Whether the engine publishes which pages it has."""
        return self.kv_events_config is not None and self.kv_events_config.publishes


def settle_kv_events(options: Mapping[str, Any], model: Any) -> None:
    """Raise ConfigError if events are published or pages observed (kv_cache_metrics) without enable_prefix_caching, or
    if kv_cache_metrics_sample is given without kv_cache_metrics.

    options: options of the engine, resolved, by name. model: unused; all checks of a resolved config have this
    parameter.
    """
    config = options[_OPTION]
    if options["kv_cache_metrics"] and not options["enable_prefix_caching"]:
        problem = "kv_cache_metrics is given, but enable_prefix_caching is off"
        raise ConfigError.because("kv_cache_metrics", problem, "leave out one of them")
    sample = options["kv_cache_metrics_sample"]
    if sample != KVEventOptions.kv_cache_metrics_sample and not options["kv_cache_metrics"]:
        problem = f"kv_cache_metrics_sample is {sample}, but kv_cache_metrics is off"
        raise ConfigError.because("kv_cache_metrics_sample", problem, "give kv_cache_metrics too")
    if config is not None and config.publishes and not options["enable_prefix_caching"]:
        problem = f"{_OPTION} is given, but enable_prefix_caching is off, which names pages"
        raise ConfigError.because(_OPTION, problem, "leave one out")
