"""Options of pages that one engine hands over to another: prefill here, decode there."""

from __future__ import annotations

import ipaddress
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxengine.config.base.errors import ConfigError

PRODUCER, CONSUMER, BOTH = ROLES = ("kv_producer", "kv_consumer", "kv_both")
RECOMPUTE, FAIL = POLICIES = ("recompute", "fail")
TCP, JAX, FOLDER = TRANSPORTS = ("tcp", "jax", "folder")
_NAME = "kv_transfer_config"
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_ENGINE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
MAX_PORT = 65535


def is_host(value: Any) -> bool:
    """Return whether a value is a host name or the IP address of one host, IPv6 with or without brackets. False for
    unspecified addresses such as 0.0.0.0.
    """
    if not isinstance(value, str):
        return False
    try:
        literal = value[1:-1] if value[:1] + value[-1:] == "[]" else value
        return not ipaddress.ip_address(literal).is_unspecified
    except ValueError:
        return bool(_HOST.fullmatch(value))


@dataclass(frozen=True, kw_only=True)
class KVHandover:
    """Settings by which an engine sends KV pages to other engines, or receives theirs.

    Fields named kv_* and engine_id are vLLM's.

    Attributes:
      kv_role: one of ROLES.
      kv_load_failure_policy: whether a request whose pages do not arrive is recomputed or fails: one of POLICIES.
      transport: how pages are sent, one of TRANSPORTS.
      kv_ip, kv_port: where a producer listens, also the address that its answers give to consumers; port 0 for any free
        one. With "jax" a consumer listens at kv_ip, too, at any free port, and producers must reach it there. Not used
        with "folder".
      shared_storage_path: folder that all engines share. Only with "folder".
      kv_lease_duration: seconds for which a producer keeps pages for a consumer.
      engine_id: name of this engine.
    """

    kv_role: str
    kv_load_failure_policy: str = RECOMPUTE
    transport: str = TCP
    kv_ip: str = "127.0.0.1"
    kv_port: int = 5600
    shared_storage_path: str | None = None
    kv_lease_duration: float = 30.0
    engine_id: str = field(default_factory=lambda: secrets.token_hex(16))

    @property
    def produces(self) -> bool:
        """Whether the engine sends pages, as it does in every kv_role but CONSUMER."""
        return self.kv_role != CONSUMER


def is_number(low: float, high: float, kinds: tuple[type, ...]) -> Callable[[Any], bool]:
    """Return a predicate: whether a value's type is one of `kinds` and the value is from `low` to `high`, both
    included.
    """
    return lambda value: type(value) in kinds and low <= value <= high


def _one_of(*allowed: str) -> tuple[Callable[[Any], bool], str]:
    """Return a predicate, whether a value is one of `allowed`, and the list of these as text."""
    return lambda value: value in allowed, ", ".join(allowed)


# Field -> whether a value is allowed, and which are.
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "kv_role": _one_of(*ROLES),
    "kv_load_failure_policy": _one_of(*POLICIES),
    "transport": _one_of(*TRANSPORTS),
    "kv_ip": (is_host, "the name or address of this host, as others reach it"),
    "kv_port": (is_number(0, MAX_PORT, (int,)), f"an integer from 0 to {MAX_PORT}"),
    "shared_storage_path": (lambda value: isinstance(value, str) and bool(value), "the name of a folder"),
    "kv_lease_duration": (is_number(0.1, 86400, (int, float)), "0.1 to 86400 seconds"),
    "engine_id": (
        lambda value: isinstance(value, str) and bool(_ENGINE_ID.fullmatch(value)),
        "1 to 128 letters, digits, '.', '_', ':' and '-'",
    ),
}
# vLLM has these at the top, and the others in kv_connector_extra_config.
AT_TOP = ("kv_role", "kv_load_failure_policy", "kv_ip", "kv_port", "engine_id")
IN_EXTRA = ("transport", "shared_storage_path", "kv_lease_duration")


def read_handover(top: Mapping[str, Any], extra: Mapping[str, Any]) -> KVHandover:
    """Return the KVHandover of vLLM's fields.

    top: kv_transfer_config. extra: its kv_connector_extra_config. The caller has checked the names of their keys.
    Raises ConfigError, which names the field, for a value that is not allowed, without kv_role, for transport "folder"
    without shared_storage_path, for shared_storage_path with another transport, and for transport "jax" without kv_ip:
    an engine that listens at the default address cannot get pages from another host.
    """
    given = {name: top[name] for name in AT_TOP if top.get(name) is not None}
    given |= {name: extra[name] for name in IN_EXTRA if extra.get(name) is not None}
    for name, value in ({"kv_role": None} | given).items():
        is_allowed, allowed = _FIELDS[name]
        if not is_allowed(value):
            raise ConfigError(f"{_NAME}.{name}", value, allowed)
    found = KVHandover(**given)
    if (found.transport == FOLDER) != (found.shared_storage_path is not None):
        allowed = "the name of a folder with transport 'folder', and None with another"
        raise ConfigError(f"{_NAME}.shared_storage_path", found.shared_storage_path, allowed)
    if found.transport == JAX and "kv_ip" not in given:
        allowed = f"{_FIELDS['kv_ip'][1]}, with transport 'jax' on each engine; 127.0.0.1 if all are on one host"
        raise ConfigError(f"{_NAME}.kv_ip", None, allowed)
    return found
