"""Registration of a user's own model families in the table of families."""

from __future__ import annotations

import inspect

from jaxengine.config.engine_config import ConfigError
from jaxengine.models.causal_lm import CausalLM
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.model_classes import ENCODERS, MODELS
from jaxengine.models.registry import model_for_hf


def register_model(architecture: str, model_class: type[CausalLM]) -> None:
    """Register a model class for checkpoints whose config.json names `architecture`, as if it were a built-in family.

    It is registered in this process only, in MODELS. Commands, which start further processes, load it as a plugin
    (EngineConfig.plugins), as does `LLM(plugins=[...])`. Compiled steps of such a model are cached on disk only
    if its source is in a file.

    Args:
      architecture: entry of "architectures" in config.json; must equal the name of the class.
      model_class: a class with everything that jaxengine.models.causal_lm.CausalLM declares, such as a subclass of one
        in jaxengine.models.families. A class of the same name and module, as a notebook registers it again, replaces
        the earlier one.

    Raises:
      ConfigError: the architecture or the class's gguf_architecture is taken by another model, or the class cannot be
        a model.
    """
    if not inspect.isclass(model_class):
        raise ConfigError("model_class", model_class, "a class")
    has = {name for base in model_class.__mro__ for name in vars(base)}
    if lacking := sorted(_asked_for() - has):
        raise ConfigError("model_class", model_class.__name__, f"a CausalLM; it lacks {', '.join(lacking)}")
    if architecture != model_class.__name__:
        raise ConfigError("architecture", architecture, f"the name of its class, {model_class.__name__!r}")
    taken = MODELS.get(architecture) or ENCODERS.get(architecture)
    if taken is not None and not (is_custom(taken) and taken.__module__ == model_class.__module__):
        raise ConfigError("architecture", architecture, f"a name that is free; {taken.__module__} has this one")
    gguf = model_class.gguf_architecture
    for name, other in MODELS.items() if gguf is not None else ():
        if gguf == other.gguf_architecture and name != architecture:
            raise ConfigError("gguf_architecture", gguf, f"None, or a name that is free; {name} reads these files")
    MODELS[architecture] = model_class


def is_custom(model_class: type) -> bool:
    """Whether a class of MODELS was registered by a user."""
    return not model_class.__module__.startswith("jaxengine.models.")


def has_custom_class(config: ModelConfig) -> bool:
    """Whether the model of this config has a class registered by a user. Raises ModelConfigError if no class has its
    architecture.
    """
    return is_custom(model_for_hf(config.architecture))


def _asked_for() -> set[str]:
    """Return the names that a model class must define: public methods and class variables of CausalLM, and __call__."""
    routines = {name for name, value in vars(CausalLM).items() if inspect.isroutine(value)}
    variables = {name for name, kind in CausalLM.__annotations__.items() if "ClassVar" in str(kind)}
    return {name for name in routines | variables if not name.startswith("_")} | {"__call__"}
