"""profiler_config: where jax.profiler writes when it is started while the engine runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from jaxengine.config.base.errors import ConfigError
from jaxengine.config.base.files import named_path
from jaxengine.config.base.values import plain

_OPTION = "profiler_config"
# vLLM's name of the folder, for its torch profiler.
_FOLDER_OF_VLLM = "torch_profiler_dir"


@dataclass(frozen=True)
class ProfilerConfig:
    """How an engine is profiled.

    Attributes:
      profiler_dir: folder for profiles, each in one of its own; made if it is not there.
      profiler: "jax", jax.profiler, whose profiles XProf, TensorBoard and ui.perfetto.dev show.
    """

    profiler_dir: str
    profiler: str = "jax"

    def __post_init__(self):
        """Check the fields, and make profiler_dir absolute. Raises ConfigError, which names the field."""
        if self.profiler != "jax":
            raise ConfigError(f"{_OPTION}.profiler", self.profiler, "jax (others do not see XLA's programs)")
        if not isinstance(self.profiler_dir, (str, os.PathLike)) or not str(self.profiler_dir):
            raise ConfigError(f"{_OPTION}.profiler_dir", self.profiler_dir, "the name of a folder")
        # Absolute: the engine's process may have another current folder.
        path = named_path(f"{_OPTION}.profiler_dir", self.profiler_dir).absolute()
        object.__setattr__(self, "profiler_dir", str(path))

    @classmethod
    def read(cls, value: Any) -> ProfilerConfig | None:
        """Return the config for a dict of its fields or of vLLM's; None (no profiling) for None and for a dict that
        sets nothing. A config is returned unchanged.

        vLLM's torch_profiler_dir is read as profiler_dir; other fields of vLLM that are None, False or 0 are ignored.
        Raises ConfigError for anything but a dict, for other fields with a value, for a dict without a folder, and for
        two different folders.
        """
        value = plain(value)
        if value is None or isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(_OPTION, value, 'a dict such as {"profiler_dir": "profiles"}, or None')
        given = {name: each for name, each in value.items() if each is not None}
        if _FOLDER_OF_VLLM in given:
            folder = given.pop(_FOLDER_OF_VLLM)
            if given.setdefault("profiler_dir", folder) != folder:
                raise ConfigError(f"{_OPTION}.{_FOLDER_OF_VLLM}", folder, "absent beside profiler_dir")
        known = [field.name for field in fields(cls)]
        for name, each in given.items():
            if name not in known and each not in (False, 0):
                problem = f"{_OPTION} has no {name!r} here"
                raise ConfigError.because(f"{_OPTION}.{name}", problem, f"it has {', '.join(known)}")
        given = {name: given[name] for name in known if name in given}
        if not given:
            return None
        if "profiler_dir" not in given:
            raise ConfigError.because(_OPTION, f"{_OPTION} names no folder", "give profiler_dir")
        return cls(**given)
