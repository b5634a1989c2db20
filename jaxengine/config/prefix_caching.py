"""Whether known prefixes are reused, where the user or the model has a say in it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from jaxengine.config.errors import ConfigError

if TYPE_CHECKING:
    from models.config.model_config import ModelConfig

logger = logging.getLogger(__name__)


def settle_prefix_caching(asked: bool | None, model: ModelConfig) -> bool:
    """What enable_prefix_caching comes to. Raises ConfigError where the model cannot do what was asked for."""
    if len(model.attending) == len(model.attention):
        return asked is not False
    if asked:
        allowed = f"False or None: {model.architecture} keeps states, of which no earlier ones are there to go on from"
        raise ConfigError("enable_prefix_caching", True, allowed)
    logger.info("%s keeps states of its sequences: enable_prefix_caching is off", model.architecture)
    return False
