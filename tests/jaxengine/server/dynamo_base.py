"""What jaxengine.server.dynamo uses of ai-dynamo 1.6.1, for tests where that is not installed: names, parameters and
fields, without behaviour.
"""

from __future__ import annotations

import enum
import inspect
from abc import ABC, abstractmethod
from dataclasses import make_dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

NAME, PARTS = "dynamo.common.backend", ("dynamo", "dynamo.common", "dynamo.common.constants")
# Fields of a record, in order, with the values of those that may be left out.
RECORDS: dict[str, dict[str, Any]] = {
    "WorkerConfig": {
        "namespace": ...,
        "component": "backend",
        "endpoint": "generate",
        "model_name": "",
        "served_model_name": None,
        "endpoint_types": "chat,completions",
        "discovery_backend": "etcd",
        "request_plane": "tcp",
        "event_plane": None,
        "use_kv_events": False,
        "tool_call_parser": None,
        "reasoning_parser": None,
        "disaggregation_mode": None,
    },
    "EngineConfig": {"model": ..., "served_model_name": None, "llm": None},
    "LlmRegistration": {
        "context_length": None,
        "kv_cache_block_size": None,
        "total_kv_blocks": None,
        "max_num_seqs": None,
        "max_num_batched_tokens": None,
        "data_parallel_size": None,
    },
    "ZmqSource": {"endpoint": ..., "topic": "", "dp_rank": 0},
}
METHODS = {
    "from_args": ["argv"],
    "start": ["self", "worker_id"],
    "generate": ["self", "request", "context"],
    "cleanup": ["self"],
    "abort": ["self", "context"],
    "kv_event_sources": ["self"],
}
ABSTRACT = {"from_args", "start", "generate", "cleanup"}


class DisaggregationMode(enum.Enum):
    AGGREGATED, PREFILL, DECODE = "agg", "prefill", "decode"


def is_installed() -> bool:
    return find_spec("dynamo") is not None


def as_modules() -> dict[str, Any]:
    """The modules by name, to be put into sys.modules."""

    class LLMEngine(ABC):
        @classmethod
        @abstractmethod
        async def from_args(cls, argv=None): ...

        @abstractmethod
        async def start(self, worker_id): ...

        @abstractmethod
        async def generate(self, request, context): ...

        @abstractmethod
        async def cleanup(self): ...

    modules: dict[str, Any] = {name: ModuleType(name) for name in (*PARTS, NAME, f"{NAME}.publisher")}
    modules["dynamo.common.constants"].DisaggregationMode = DisaggregationMode
    for name, own in RECORDS.items():
        listed = [(each, Any) if value is ... else (each, Any, value) for each, value in own.items()]
        where = modules[f"{NAME}.publisher" if name == "ZmqSource" else NAME]
        setattr(where, name, make_dataclass(name, listed))
    modules[NAME].LLMEngine = LLMEngine
    return modules


def differences() -> list[str]:
    """Names and parameters in which the installed package differs from what is recorded here."""
    real, publisher = import_module(NAME), import_module(f"{NAME}.publisher")
    found = [] if set(real.LLMEngine.__abstractmethods__) == ABSTRACT else ["abstract methods"]
    for name, parameters in METHODS.items():
        if [
            each for each in inspect.signature(getattr(real.LLMEngine, name)).parameters if each != "cls"
        ] != parameters:
            found.append(name)
    for name, fields in RECORDS.items():
        own = inspect.signature(getattr(publisher if name == "ZmqSource" else real, name)).parameters
        found += [f"{name}.{each}" for each in fields if each not in own]
    modes = import_module("dynamo.common.constants").DisaggregationMode
    return found + [each.name for each in DisaggregationMode if modes[each.name].value != each.value]
