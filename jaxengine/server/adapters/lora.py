"""LoRA adapters of a server: those it starts with, and the folder from which others may be loaded at run time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxengine.api.adapters import load_adapter
from jaxengine.api.core import EngineCore
from jaxengine.api.engine_client import EngineClient
from jaxengine.config.base.errors import ConfigError
from jaxengine.scheduler.base.adapter_names import alike
from jaxengine.scheduler.base.errors import RequestError, show_value
from jaxengine.server.base.names import names_of
from jaxengine.server.base.options import ServerConfig


def read_modules(modules: tuple[str, ...]) -> list[tuple[str, str]]:
    """Parse lora_modules, each "name=path" or JSON with name and path, to (name, path) pairs in their order.

    base_model_name in the JSON has no effect. Raises ConfigError for other texts, and for two names that look alike
    (adapter_names.alike), such as by case. Paths are not looked at.
    """
    found: list[tuple[str, str]] = []
    for text in modules:
        name, equals, path = text.partition("=")
        if text.lstrip().startswith("{"):
            try:
                value: Any = json.loads(text)
            except (ValueError, RecursionError):
                value = None
            if not isinstance(value, dict) or not value.keys() <= {"name", "path", "base_model_name"}:
                raise ConfigError("lora_modules", text[:200], "name=path, or JSON with name, path and base_model_name")
            name, path, equals = value.get("name"), value.get("path"), "="
        if not (equals and isinstance(name, str) and name and isinstance(path, str) and path):
            raise ConfigError("lora_modules", text[:200], "name=path, or JSON with name, path and base_model_name")
        if alike(name, dict(found)) is not None:
            raise ConfigError("lora_modules", text[:200], "each name once, whatever its case and white space")
        found.append((name, path))
    return found


def load_adapters(core: EngineCore, config: ServerConfig) -> None:
    """Load the adapters of the option lora_modules into an engine.

    Raises ConfigError for an adapter that the engine refuses, ModelFileError for a folder that holds no adapter.
    """
    names = names_of(core.config.model, config)
    for name, path in read_modules(config.lora_modules):
        try:
            refuse_models_name(name, names)
            store = core.engine.extensions.adapter_store()
            store.add(name, path, store.free_number(), store.read(path))
        except RequestError as error:
            raise ConfigError.because("lora_modules", str(error), "see docs/lora.md") from None


def refuse_models_name(name: str, names: Iterable[str]) -> None:
    """Raise RequestError for an adapter's name that is, or looks like, one of `names`, the model's."""
    if (own := alike(name, names)) is not None:
        how = "is" if own == name else f"looks like {show_value(own)}, which is"
        raise RequestError(f"lora_name {show_value(name)} {how} the model's own", param="lora_name", value=name)


async def load_from_root(
    engine: EngineClient, config: ServerConfig, names: tuple[str, ...], name: str, path: str, *, in_place: bool = False
) -> None:
    """Load an adapter from a folder in lora_root, and return when it is loaded. Cancelling the call does not stop it.

    names: the model's, which the adapter may not have. path: relative to lora_root, or absolute. in_place: the name may
    be that of an adapter, whose running requests continue with its own matrices. Raises RequestError for a name that is
    taken, a path out of lora_root and an unusable adapter, and EngineDeadError; then nothing has changed.
    """
    refuse_models_name(name, names)
    if config.lora_root is None:
        raise RequestError("no adapter can be loaded: the server was started without lora_root", param="lora_path")
    try:
        root = Path(config.lora_root).expanduser().resolve()
        folder = (root / path).resolve()
    except (OSError, RuntimeError, ValueError):  # no file can have such a name, or links lead in a circle
        folder = None
    if folder is None or not folder.is_relative_to(root):
        text = f"lora_path {show_value(path)} leads out of lora_root; allowed: folders in it"
        raise RequestError(text, param="lora_path", value=path)
    # The caller may leave, but a load that the engine has begun must be completed.
    await asyncio.shield(load_adapter(engine.utility, name, str(folder), in_place=in_place))


async def loaded_adapters(engine: EngineClient) -> list[dict[str, Any]]:
    """Return name, path, number and rank of each adapter that requests may name; [] if LoRA is disabled. Raises
    EngineDeadError.
    """
    return await engine.utility("adapters") if engine.inputs.config.enable_lora else []


async def has_adapter(engine: EngineClient, name: str) -> bool:
    """Whether requests may name an adapter: it is loaded, or found and loaded now (lora_dirs, lora_hub_owners).

    engine: an OwnedEngine. Raises RequestError for one that is found and cannot be loaded, and EngineDeadError.
    """
    if any(each["name"] == name for each in await loaded_adapters(engine)):
        return True
    return bool(await engine.utility("find_adapter", name))


async def unload(engine: EngineClient, name: str) -> None:
    """Unload an adapter; further requests cannot name it. Raises RequestError for an unknown name, EngineDeadError."""
    await engine.utility("unload_adapter", name)
