"""Model families that a user brings along. Knows the table of families, nothing of engines or requests."""

from __future__ import annotations

import inspect

from jaxengine.config.engine_config import ConfigError
from models.causal_lm import CausalLM
from models.config.model_config import ModelConfig
from models.registry import MODELS


def register_model(architecture: str, model_class: type[CausalLM]) -> None:
    """Lets checkpoints be opened whose config.json names `architecture`, as if the family were one of ours.

    Only in this process: `jaxengine serve` and `jaxengine worker` are processes of their own and do not know it. Steps
    of such a model are compiled at each start and not kept on disk, for nothing here knows what its source imports.

    Args:
      architecture: what config.json has under "architectures"; the class must have this name.
      model_class: with everything that models.causal_lm.CausalLM asks for, as a subclass of one of models.families has
        it. Registered again under its name, as a notebook does, it replaces the one before.

    Raises:
      ConfigError: a name that is taken, or a class that cannot be a model.
    """
    if not inspect.isclass(model_class):
        raise ConfigError("model_class", model_class, "a class")
    has = {name for base in model_class.__mro__ for name in vars(base)}
    if lacking := sorted(_asked_for() - has):
        raise ConfigError("model_class", model_class.__name__, f"a CausalLM; it lacks {', '.join(lacking)}")
    if architecture != model_class.__name__:
        raise ConfigError("architecture", architecture, f"the name of its class, {model_class.__name__!r}")
    taken = MODELS.get(architecture)
    if taken is not None and not (is_custom(taken) and taken.__module__ == model_class.__module__):
        raise ConfigError("architecture", architecture, f"a name that is free; {taken.__module__} has this one")
    gguf = model_class.gguf_architecture
    for name, other in MODELS.items():
        if gguf is not None and gguf == other.gguf_architecture and name != architecture:
            raise ConfigError("gguf_architecture", gguf, f"None, or a name that is free; {name} reads these files")
    MODELS[architecture] = model_class


def is_custom(model_class: type) -> bool:
    """Whether a class of MODELS was registered, and is not one of ours."""
    return model_class.__module__.partition(".")[0] != "models"


def has_custom_class(config: ModelConfig) -> bool:
    """Whether a model of this config is of a registered class."""
    return is_custom(MODELS[config.architecture])


def _asked_for() -> set[str]:
    """What a class must bring: methods and class variables of CausalLM. The rest its instances have."""
    routines = {name for name, value in vars(CausalLM).items() if inspect.isroutine(value)}
    variables = {name for name, kind in CausalLM.__annotations__.items() if "ClassVar" in str(kind)}
    return {name for name in routines | variables if not name.startswith("_")} | {"__call__"}
