"""Prefix caching of models whose layers keep recurrent states in addition to pages."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxengine.config.base.errors import ConfigError

if TYPE_CHECKING:
    from jaxengine.models.config.model_config import ModelConfig

logger = logging.getLogger(__name__)

_OPTIONS = ("enable_prefix_caching", "num_state_snapshots", "enable_chunked_prefill")


def settle_snapshots(options: Mapping[str, Any], model: ModelConfig, max_num_seqs: int) -> dict[str, Any]:
    """Return {"enable_prefix_caching", "num_state_snapshots"} with defaults filled in.

    The default number of snapshots is a quarter of max_num_seqs, at least 4, for a model with recurrent states, prefix
    caching and chunked prefill; otherwise 0. Prefix caching is off for models that are not causal, and, with a log
    line, for models with recurrent states and no snapshots.

    options: fields of EngineConfig by name. max_num_seqs: its resolved value. Raises ConfigError for a number of
    snapshots above 0 on a model without recurrent states, or without prefix caching and chunked prefill.
    """
    caching, asked, chunked = (options[name] for name in _OPTIONS)
    caching = caching and model.is_causal  # the keys of a prefix depend on what follows it
    if not model.keeps_states:
        if asked:
            raise ConfigError("num_state_snapshots", asked, f"0 or None: {model.architecture} keeps no states")
        return {"enable_prefix_caching": caching, "num_state_snapshots": 0}
    if asked and not (caching and chunked):
        allowed = "0 or None, without enable_prefix_caching and enable_chunked_prefill"
        raise ConfigError("num_state_snapshots", asked, allowed)
    if asked is None:
        asked = max(4, max_num_seqs // 4) if caching and chunked else 0
    if caching and not asked:
        logger.info("no states of prefixes are kept: enable_prefix_caching is off for %s", model.architecture)
    return {"enable_prefix_caching": caching and asked > 0, "num_state_snapshots": asked}
