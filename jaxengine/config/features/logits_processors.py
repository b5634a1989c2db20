"""Option logits_processors: a user's own classes, or their names, MODULE:CLASS.

A config contains only names, which can be sent to every process of an engine. A class that was given as such is looked
up by its name in this process; another process imports the module.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxengine.config.base.errors import ConfigError
from jaxengine.config.base.user_code import UnknownCodeError, code_digest
from jaxengine.scheduler.base.errors import show_value
from jaxengine.scheduler.base.logits_processor import LogitsProcessor, check_processors

logger = logging.getLogger(__name__)

# Classes that were given as such, by their names.
_GIVEN: dict[str, type[LogitsProcessor]] = {}

OPTION = "logits_processors"
# vLLM's classes whose parameters, ngram_size and others, requests to every engine may have.
NO_REPEAT = tuple(
    f"vllm.model_executor.models.{name}:NGramPerReqLogitsProcessor" for name in ("deepseek_ocr", "unlimited_ocr")
)
NGramPerReqLogitsProcessor = NO_REPEAT[0]


def read_processors(value: Any) -> Any:
    """Return the option's value (a class, a name or a sequence of these) as a tuple of names, without NO_REPEAT.

    Records the classes under their names and imports the classes of names. Raises ConfigError for a value that is
    neither a LogitsProcessor class nor its name, for a name that cannot be imported, and for classes that cannot be
    used together.
    """
    if isinstance(value, (str, type)):
        value = [value]
    if not isinstance(value, Sequence):
        raise ConfigError(OPTION, value, "a list of classes, or of their names, module:Class")
    names = tuple(_name_of(each) for each in value if not (isinstance(each, str) and each in NO_REPEAT))
    if problem := check_processors(processor_classes(names)):
        raise ConfigError.because(OPTION, problem, "see docs/sampling_params.md")
    return names


def processor_classes(names: Sequence[str]) -> list[type[LogitsProcessor]]:
    """Return the classes of these names. Imports the modules of classes that were not given to `read_processors` as
    classes.

    Raises ConfigError for a class that cannot be imported.
    """
    return [_GIVEN[name] if name in _GIVEN else _imported(name) for name in names]


def source_file(processor: type) -> Path | None:
    """Return the file that contains all of the code of a processor's class; None for a class made in a function or
    without a file.
    """
    if "<locals>" in processor.__qualname__:
        return None
    try:
        file = inspect.getsourcefile(processor)
    except (OSError, TypeError):
        return None
    return Path(file) if file is not None and Path(file).is_file() else None


def processors_digest(names: Sequence[str]) -> str | None:
    """Return a digest of the current code of the processors with these names; None, with a logged warning, if it cannot
    be computed.

    Raises ConfigError for a class that cannot be imported.
    """
    try:
        return code_digest(processor_classes(names))
    except UnknownCodeError as error:
        logger.warning("compiled steps are not kept: of the %s, %s", OPTION, error)
        return None


def _name_of(each: Any) -> str:
    """Return the name, module:Class, of a LogitsProcessor's class and record the class under it in `_GIVEN`; a text is
    returned unchanged.

    Raises ConfigError for other values.
    """
    if isinstance(each, str):
        return each
    if not isinstance(each, type) or not issubclass(each, LogitsProcessor):
        raise ConfigError(OPTION, each, "subclasses of jaxengine.LogitsProcessor, or their names, module:Class")
    name = f"{each.__module__}:{each.__qualname__}"
    _GIVEN[name] = each
    return name


def _imported(name: str) -> type[LogitsProcessor]:
    """Import the class `name`, module:Class, and return it.

    Raises ConfigError if it cannot be found or is not a LogitsProcessor. Other errors that the module's code raises
    propagate.
    """
    module, _, qualname = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in qualname.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        problem = f"{OPTION} has {show_value(name)}, which cannot be imported: {error}"
        raise ConfigError.because(OPTION, problem, "give module:Class of a module on sys.path (PYTHONPATH)") from error
    if not isinstance(found, type) or not issubclass(found, LogitsProcessor):
        raise ConfigError(OPTION, name, "names of subclasses of jaxengine.LogitsProcessor")
    return found
