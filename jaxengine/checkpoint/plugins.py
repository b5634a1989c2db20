"""Plugins: modules of a user's own that register model families, and where they are found.

A plugin is code that runs with all of the engine's rights. Only who starts the engine names one: the option `plugins`,
or a package that is installed with an entry point of the group jaxengine.models. Every process that opens the model
loads them, each once.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import logging
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from jaxengine.checkpoint.custom_models import register_model
from jaxengine.config.base.errors import ConfigError
from jaxengine.config.execution.plugins import OPTION, is_file_name

logger = logging.getLogger(__name__)

GROUP = "jaxengine.models"
# Names of modules, resolved paths and entry points that this process has loaded.
_LOADED: set[str] = set()


def load_plugins(names: Sequence[str]) -> None:
    """Load the installed plugins and those of these names. Raise ConfigError for a named one that cannot be imported.

    One that is installed and cannot be loaded is left out with a warning: it must not end other models' engines.
    """
    for entry in sorted(entry_points(group=GROUP)):
        key = f"{entry.name} = {entry.value}"
        if key not in _LOADED:
            _LOADED.add(key)
            try:
                _load_entry(entry)
            except (Exception, SystemExit) as error:
                logger.warning("the installed plugin %r of the group %s cannot be loaded: %s", key, GROUP, _why(error))
    for name in names:
        _load_named(name)


def _load_entry(entry: EntryPoint) -> None:
    """Load an installed plugin: import what the entry names; a class is registered as a model under the entry's name, a
    function is called without arguments.

    A module registers its models itself. Raises whatever that code raises, and ConfigError as `register_model`.
    """
    loaded: Any = entry.load()
    model: Any = loaded  # not narrowed to a class without the protocol's attributes
    if inspect.isclass(loaded):
        register_model(entry.name, model)
    elif callable(loaded):
        loaded()


def _load_named(name: str) -> None:
    """Load the plugin `name`, a file or a module, unless this process has loaded or imported it; logs that. Raises
    ConfigError if it cannot be imported.
    """
    path = Path(name).expanduser().resolve() if is_file_name(name) else None
    key = name if path is None else str(path)
    if key in _LOADED or (path is not None and _is_imported(path)):
        return
    if path is not None and not path.is_file():
        raise ConfigError.because(OPTION, f"the plugin {name} is not a file ({path})", "name a .py file or a module")
    try:
        if path is None:
            importlib.import_module(name)
        else:
            _import_file(path)
    except (Exception, SystemExit) as error:
        problem = f"the plugin {name} cannot be imported: {_why(error)}"
        raise ConfigError.because(OPTION, problem, "name a .py file, or a module on sys.path (PYTHONPATH)") from error
    _LOADED.add(key)
    logger.info("loaded the plugin %s", key)


def _is_imported(path: Path) -> bool:
    """Whether a module of this process, the script that it runs among them, is this file. path: resolved."""
    # __mp_main__ is another name of the script, or of one that has ended.
    modules = [module for name, module in list(sys.modules.items()) if name != "__mp_main__"]
    files = [getattr(module, "__file__", None) for module in modules]
    return any(Path(file).name == path.name and Path(file).resolve() == path for file in files if file)


def _import_file(path: Path) -> None:
    """Import a file as the module of its name, or of another one if that is taken. The module stays in sys.modules
    unless its code fails. Raises ImportError for what is not a Python file, and what its code raises.
    """
    name = path.stem
    if name in sys.modules or not name.isidentifier() or importlib.util.find_spec(name) is not None:
        name = f"plugin_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _why(error: BaseException) -> str:
    """Return the kind and the text of an error, with the file and the line where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "importlib" not in frame.filename and frame.filename != __file__]
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    place = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {error}{place}"
