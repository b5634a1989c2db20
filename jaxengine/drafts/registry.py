"""Registry of the proposers: one entry for each method of speculative_config that uses only a request's own tokens."""

from __future__ import annotations

from collections.abc import Callable

from jaxengine.config.features.speculation import NGRAM, SpeculativeConfig
from jaxengine.drafts.ngram import Ngram
from jaxengine.drafts.proposer import Proposer


def _ngram(config: SpeculativeConfig) -> Ngram:
    """Return the prompt lookup proposer with the configuration's prompt_lookup_max and prompt_lookup_min, which must
    not be None.
    """
    assert config.prompt_lookup_max is not None and config.prompt_lookup_min is not None
    return Ngram(config.prompt_lookup_max, config.prompt_lookup_min)


PROPOSERS: dict[str, Callable[[SpeculativeConfig], Proposer]] = {NGRAM: _ngram}


def proposer_of(config: SpeculativeConfig) -> Proposer | None:
    """Return the proposer that a configuration selects; None if its drafts come from a model or from grammars."""
    make = PROPOSERS.get(config.method)
    return None if make is None else make(config)
