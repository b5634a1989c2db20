"""Adapters of a server: those it starts with, and where those may lie that are loaded while it runs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from jaxengine.api.adapters import load_adapter
from jaxengine.api.engine_client import EngineClient
from jaxengine.config.errors import ConfigError
from jaxengine.server.options import ServerConfig
from scheduler.errors import RequestError, show_value


def read_modules(modules: tuple[str, ...]) -> list[tuple[str, str]]:
    """(name, path) of each of lora_modules: "name=path", or JSON with name and path. Raises ConfigError."""
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
        if name in dict(found):
            raise ConfigError("lora_modules", text[:200], "each name once")
        found.append((name, path))
    return found


async def load_from_root(
    engine: EngineClient, config: ServerConfig, names: tuple[str, ...], name: str, path: str
) -> None:
    """Loads an adapter of the folder that the operator has set apart. Raises RequestError; nothing has changed then."""
    if name in names:
        raise RequestError(f"lora_name {show_value(name)} is the model's own", param="lora_name", value=name)
    if config.lora_root is None:
        raise RequestError("no adapter can be loaded: the server was started without lora_root", param="lora_path")
    try:
        root = Path(config.lora_root).expanduser().resolve()
        folder = (root / path).resolve()
    except (OSError, RuntimeError, ValueError):  # no file can have such a name, or links lead in a circle
        folder = None
    if folder is None or not folder.is_relative_to(root):
        text = f"lora_path {show_value(path)} leads out of lora_root; allowed are folders in it"
        raise RequestError(text, param="lora_path", value=path)
    # Whoever asked may leave; what the engine has read is then to be taken in all the same.
    await asyncio.shield(load_adapter(engine.utility, name, str(folder)))


async def loaded_adapters(engine: EngineClient) -> list[dict[str, Any]]:
    """Name, path, number and rank of each that requests may name; none without room for any."""
    return await engine.utility("adapters") if engine.inputs.config.enable_lora else []


async def unload(engine: EngineClient, name: str) -> None:
    """Lets no further request name an adapter. Raises RequestError where there is none of that name."""
    await engine.utility("unload_adapter", name)
