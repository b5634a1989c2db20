"""LoRA adapters of a server: those that it starts with, and those that are loaded at run time."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxengine.api.adapters import load_adapter
from jaxengine.api.engine_client import EngineClient
from jaxengine.config.base.errors import ConfigError
from jaxengine.scheduler.base.adapter_names import alike
from jaxengine.scheduler.base.errors import RequestError, UnknownAdapterError, show_value
from jaxengine.server.base.names import names_of
from jaxengine.server.base.options import ServerConfig

if TYPE_CHECKING:
    # API processes use this module too, without jax.
    from jaxengine.api.core import EngineCore


def read_modules(modules: tuple[str, ...]) -> list[tuple[str, str]]:
    """Parse the option lora_modules, texts of the form "name=path" or JSON with name and path, to (name, path) pairs in
    the same order.

    base_model_name in the JSON has no effect. Raises ConfigError for other texts, and for two names that differ only in
    case or white space (adapter_names.alike). Does not check that the paths exist.
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
    """Load the adapters of the option lora_modules into an engine, in order. Blocks while it reads their files.

    Raises ConfigError for a text that `read_modules` refuses, before anything is loaded, for a name of the model and
    for an adapter that the engine refuses; ModelFileError for a folder that contains no adapter. The adapters before
    the faulty one stay loaded.
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
    """Raise RequestError if an adapter's name is one of `names`, the model's names, or looks like one of them."""
    if (own := alike(name, names)) is not None:
        how = "is" if own == name else f"looks like {show_value(own)}, which is"
        raise RequestError(f"lora_name {show_value(name)} {how} the model's own", param="lora_name", value=name)


async def load_from_root(
    engine: EngineClient, config: ServerConfig, names: tuple[str, ...], name: str, path: str, *, in_place: bool = False
) -> None:
    """Load an adapter from a folder in lora_root, and return when it is loaded. A cancelled call leaves the load
    running to its end.

    names: the model's names, which no adapter may have. path: relative to lora_root, or absolute. in_place: whether
    `name` may be that of a loaded adapter, which is then replaced; its running requests continue with the old matrices.
    Raises RequestError if there is no lora_root, for a name that is taken, a path outside lora_root and an unusable
    adapter, UnknownAdapterError for a path at which nothing is, and EngineDeadError; nothing is loaded in these cases.
    """
    refuse_models_name(name, names)
    if config.lora_root is None:
        raise RequestError("no adapter can be loaded: the server was started without lora_root", param="lora_path")
    try:
        root = Path(config.lora_root).expanduser().resolve()
        folder = (root / path).resolve()
    except (OSError, RuntimeError, ValueError):
        why = "has links in a circle, or cannot be the name of a file"
        text = f"lora_path {show_value(path)} {why}; allowed: folders in lora_root"
        raise RequestError(text, param="lora_path", value=path) from None
    if not folder.is_relative_to(root):
        text = f"lora_path {show_value(path)} leads out of lora_root; allowed: folders in it"
        raise RequestError(text, param="lora_path", value=path)
    if not os.path.exists(folder):  # no error for a name that is too long
        text = f"lora_path {show_value(path)} does not exist; allowed: folders in lora_root"
        raise UnknownAdapterError(text, param="lora_path", value=path)
    # The caller may leave, but a load that the engine has begun must be completed.
    await asyncio.shield(load_adapter(engine.utility, name, str(folder), in_place=in_place))


async def loaded_adapters(engine: EngineClient) -> list[dict[str, Any]]:
    """Return name, path, number and rank of each adapter that requests may name; [] if LoRA is disabled. Raises
    EngineDeadError if the engine cannot answer.
    """
    return await engine.utility("adapters") if engine.inputs.config.enable_lora else []


async def has_adapter(engine: EngineClient, name: str) -> bool:
    """Return whether requests may name an adapter: True if it is loaded already, or is found in lora_dirs or at
    lora_hub_owners and is loaded by this call.

    engine: an OwnedEngine. Raises RequestError for an adapter that is found and cannot be loaded, and EngineDeadError.
    """
    if any(each["name"] == name for each in await loaded_adapters(engine)):
        return True
    return bool(await engine.utility("find_adapter", name))


async def unload(engine: EngineClient, name: str) -> None:
    """Unload an adapter; further requests cannot name it. Raises UnknownAdapterError for an unknown name, and
    EngineDeadError.
    """
    await engine.utility("unload_adapter", name)
