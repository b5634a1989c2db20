"""Record of what jaxengine.rl.tunix uses of google-tunix 0.1.7, for tests where it is not installed.

`python -m tests.jaxengine.rl.tunix_base`, where it is, checks that the record is right.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import sys
from abc import ABC, abstractmethod
from types import ModuleType
from typing import Any

NAME = "tunix.rl.rollout.base_rollout"


@dataclasses.dataclass
class RolloutOutput:
    text: list[str]
    logits: Any
    tokens: list[Any]
    left_padded_prompt_tokens: Any
    logprobs: list[Any] | None


@dataclasses.dataclass
class RolloutConfig:
    """Fields that are not of another engine."""

    max_tokens_to_generate: int = 64
    temperature: float = 0.9
    top_p: float | None = 1.0
    top_k: int | None = None
    seed: Any = None
    max_prompt_length: int = 64
    kv_cache_size: int = 1024
    data_type: Any = None
    eos_tokens: list[int] | None = None
    rollout_mapping_config: Any = None
    tensor_parallel_size: int = -1
    data_parallel_size: int = -1
    expert_parallel_size: int = 1
    return_logprobs: bool = False


class BaseRollout(ABC):
    @abstractmethod
    def __init__(self, **kwargs): ...

    @abstractmethod
    def generate(self, prompts, rollout_config, **kwargs): ...

    @abstractmethod
    def get_per_token_logps(self, prompt_tokens, completion_tokens): ...

    @abstractmethod
    def update_params(self, params, filter_types=None): ...

    @abstractmethod
    def pad_id(self): ...

    @abstractmethod
    def eos_id(self): ...

    @abstractmethod
    def model(self): ...


def is_installed() -> bool:
    return importlib.util.find_spec("tunix") is not None


def as_modules() -> dict[str, ModuleType]:
    """The record as the modules that an import of it finds."""
    found = {}
    for length in range(1, 5):
        name = ".".join(NAME.split(".")[:length])
        found[name] = ModuleType(name)
        found[name].__path__ = []
    for each in (RolloutOutput, RolloutConfig, BaseRollout):
        setattr(found[NAME], each.__name__, each)
    return found


def differences() -> list[str]:
    """List what the installed Tunix has otherwise than the record."""
    real, found = importlib.import_module(NAME), []
    for own in (RolloutOutput, RolloutConfig):
        theirs = {field.name: field for field in dataclasses.fields(getattr(real, own.__name__))}
        for field in dataclasses.fields(own):
            other = theirs.pop(field.name, None)
            if other is None or other.default != field.default:
                found.append(f"{own.__name__}.{field.name}")
        found += [f"{own.__name__}.{name}" for name in theirs if not name.startswith("rollout_")]
    if real.BaseRollout.__abstractmethods__ != BaseRollout.__abstractmethods__:
        found.append(f"BaseRollout: {sorted(real.BaseRollout.__abstractmethods__)}")
    for name in BaseRollout.__abstractmethods__:
        own, theirs = (
            list(inspect.signature(getattr(each, name)).parameters) for each in (BaseRollout, real.BaseRollout)
        )
        if own != theirs:
            found.append(f"BaseRollout.{name}{theirs}")
    return found


if __name__ == "__main__":
    sys.exit("\n".join(differences()) or None)
