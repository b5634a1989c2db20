"""The proposers: a row for each method of speculative_config."""

from __future__ import annotations

from collections.abc import Callable

from jaxengine.config.speculation import NGRAM, SpeculativeConfig
from jaxengine.drafts.ngram import Ngram
from jaxengine.drafts.proposer import Proposer

PROPOSERS: dict[str, Callable[[SpeculativeConfig], Proposer]] = {
    NGRAM: lambda config: Ngram(config.prompt_lookup_max, config.prompt_lookup_min),
}


def proposer_of(config: SpeculativeConfig) -> Proposer:
    """The proposer that a configuration names."""
    return PROPOSERS[config.method](config)
