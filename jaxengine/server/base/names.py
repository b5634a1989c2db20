"""Valid names of requests and of the model."""

from __future__ import annotations

import re

from jaxengine.api.engine_client import EngineClient
from jaxengine.server.base.options import ServerConfig

# A client's own request id; it goes into headers and logs.
REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")


def served_names(engine: EngineClient, config: ServerConfig) -> tuple[str, ...]:
    """Return the names by which requests may call the engine's model: served_model_name, or the model's own name if
    that is empty. Answers carry the first one.
    """
    return names_of(engine.inputs.config.model, config)


def names_of(model: str | None, config: ServerConfig) -> tuple[str, ...]:
    """Return the names by which requests may call the model of the engine option `model` (None: the default model):
    served_model_name, or the model's own name if that is empty. Answers carry the first one.
    """
    return config.served_model_name or (model or "SmolLM2-135M-Instruct",)
