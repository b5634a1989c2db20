"""Plugins: a user's modules that register model families, and where they are found.

A plugin is code that runs with all of the engine's rights. Only whoever starts the engine can name one, by the option
`plugins` or by an installed package with an entry point of the group jaxengine.models. Every process that opens the
model loads each plugin once.
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

from jaxengine.config.base.errors import ConfigError
from jaxengine.config.execution.plugins import OPTION, is_file_name

logger = logging.getLogger(__name__)

GROUP = "jaxengine.models"
# Names of modules, resolved paths and entry points that this process has loaded or tried to load.
_LOADED: set[str] = set()


def load_plugins(names: Sequence[str]) -> None:
    """Load the installed plugins, then the named ones, each once per process.

    An installed plugin that cannot be loaded is skipped with a warning. Raises ConfigError for a named one that cannot
    be imported.
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
    """Load an installed plugin: import what the entry names, register a class as a model under the entry's name, and
    call a function without arguments.

    A module registers its models itself. Raises whatever that code raises, and ConfigError for a class that cannot be a
    model.
    """
    loaded: Any = entry.load()
    model: Any = loaded  # not narrowed to a class without the protocol's attributes
    if inspect.isclass(loaded):
        from jaxengine.checkpoint.custom_models import register_model  # takes long, and few plugins are classes

        register_model(entry.name, model)
    elif callable(loaded):
        loaded()


def _load_named(name: str) -> None:
    """Load the plugin `name`, a file or a module, and log that; do nothing if this process has loaded or imported it.

    Raises ConfigError if it cannot be imported.
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
    """Whether this file is an imported module or the script that this process runs. path: resolved."""
    # __mp_main__ is another name of the script, or of one that has ended.
    modules = [module for name, module in list(sys.modules.items()) if name != "__mp_main__"]
    files = [getattr(module, "__file__", None) for module in modules]
    return any(Path(file).name == path.name and Path(file).resolve() == path for file in files if file)


def _import_file(path: Path) -> None:
    """Import a file as a module with its stem as name. The name is generated if the stem is no identifier, or the name
    of a module that is imported or could be.

    The module is added to sys.modules, and removed again if its code fails. Raises ImportError for a file that is not
    Python, and what its code raises.
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
    """Return the kind and text of an error, with the file and line where it was raised outside of importlib and this
    module, or of a SyntaxError those that it names.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "importlib" not in frame.filename and frame.filename != __file__]
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    place = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {error}{place}"
