"""What is kept of known prefixes, where a model's layers have more of a sequence than pages."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from jaxengine.config.errors import ConfigError

if TYPE_CHECKING:
    from jaxengine.config.engine_config import EngineConfig
    from models.config.model_config import ModelConfig

logger = logging.getLogger(__name__)


def settle_snapshots(config: EngineConfig, model: ModelConfig, max_num_seqs: int) -> dict[str, Any]:
    """What enable_prefix_caching and num_state_snapshots come to. Raises ConfigError where they cannot be honoured."""
    caching, asked = config.enable_prefix_caching, config.num_state_snapshots
    if len(model.attending) == len(model.attention):
        if asked:
            raise ConfigError("num_state_snapshots", asked, f"0 or None: {model.architecture} keeps no states")
        return {"enable_prefix_caching": caching, "num_state_snapshots": 0}
    if asked and not (caching and config.enable_chunked_prefill):
        allowed = "0 or None, without enable_prefix_caching and enable_chunked_prefill"
        raise ConfigError("num_state_snapshots", asked, allowed)
    if asked is None:
        asked = max(4, max_num_seqs // 4) if caching and config.enable_chunked_prefill else 0
    if caching and not asked:
        logger.info("no states of prefixes are kept: enable_prefix_caching is off for %s", model.architecture)
    return {"enable_prefix_caching": caching and asked > 0, "num_state_snapshots": asked}
