"""Modes of the matrices of families, and engines that are started in them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jaxengine import LLM, ConfigError

EQUAL, NOTHING = "equal", "did not happen"
# Where the engine refuses chunks that are smaller.
UNCUT, SEES_ALL = "never: its pictures are seen whole", "never: its tokens see later ones"
FIRST = "compared with by the others"  # where nothing else is known
# What makes requests give way depends on how much of them windows and states give back: pages of so many requests.
POOLS = (1.5, 2, 1, 1.25, 3, 1.1, 1.4, 1.7, 2.5, 4)
SCHEDULED: dict[str, dict[str, Any]] = {
    "chunks of 5": {"long_prefill_token_threshold": 5},
    "chunks of 16": {"long_prefill_token_threshold": 16},
}
MODES: dict[str, dict[str, Any]] = {
    "chunks of 512": {"chunk": 512},
    "tp 2": {"tensor_parallel_size": 2},
    "pp 2": {"pipeline_parallel_size": 2},
    "dp 2": {"data_parallel_size": 2},
    "ep 2": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
}
ROUNDED = {"int8": {"quantization": "int8"}, "e4m3": {"quantization": "fp8"}}

# Why a model cannot be split, by the option that asks for it, as the engine says it.
NOT_SPLIT = {
    "tensor_parallel_size": r"allowed: \d.* for this model \(.* cannot be split evenly over |pools sparsely$",
    "pipeline_parallel_size": r"at most \d+ layers$|^the first \d+ layers add parts "
    r"|^layer \d+ attends to keys (and values|as selected by the indexer) of layer "
    r"|which attends to (sounds|images), does not support|pools sparsely$",
    "enable_expert_parallel": r"allowed: False: [\w\[\]]+ has no experts$",
}


class Found(NamedTuple):
    """Results of a checkpoint.

    Attributes:
      architecture: its class.
      error: the largest difference to what is recorded, of the largest value; None if there is nothing to compare.
      modes: by mode, "equal", "not split" and why, "refused" and why, or what differs.
    """

    architecture: str
    error: float | None
    modes: dict[str, str]


def is_not_split(error: ValueError, changes: dict[str, Any]) -> bool:
    """Whether an engine says with it that the model cannot be split as a mode's options ask."""
    param = error.param if isinstance(error, ConfigError) else ""
    return param in changes and re.search(NOT_SPLIT.get(param, "$^"), str(error)) is not None


def started(chosen: dict[str, Any]) -> LLM:
    """An engine; on two devices with a whole tower on each, if only the rest of the model can be split."""
    try:
        return LLM(**chosen)
    except ConfigError as error:
        if error.param != "tensor_parallel_size" or not re.search(r"\((sound_)?tower\.", str(error)):
            raise
        split = error
    try:
        return LLM(**chosen, mm_encoder_tp_mode="data")
    except ConfigError as error:
        raise split if error.param == "mm_encoder_tp_mode" else error from None


def in_modes(options_of: Callable[[int], dict[str, Any]], only: list[str]) -> Iterator[tuple[str, LLM | str]]:
    """Yield each mode of MODES and ROUNDED, or of `only`, with an engine in it, or with why there is none.

    options_of: returns what else an engine needs, with steps of at least so many tokens.
    """
    for mode, changes in (MODES | ROUNDED).items():
        if only and mode not in only:
            continue
        own = dict(changes)
        chunk = own.pop("chunk", 32)
        try:
            yield mode, started(own | options_of(chunk))
        except ValueError as error:  # a ConfigError is one, and any refusal is a row
            yield mode, f"{'not split' if is_not_split(error, changes) else 'refused'}: {error}"[:200]


def ended(llm: LLM, verdict: str) -> str:
    """Return the verdict on an engine that has served, which ends here."""
    compilations = llm.core.engine.runner.compiles.count
    llm.shutdown()
    return f"{compilations} compilations while serving" if compilations else verdict


def is_as_it_should_be(found: str) -> bool:
    """Whether a row needs no one's attention."""
    return found in (EQUAL, f"not cached, {EQUAL}", UNCUT, SEES_ALL) or found.startswith("not split")
