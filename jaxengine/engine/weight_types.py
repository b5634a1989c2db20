"""Types and names of pauses and weight updates, apart from `extensions.weights`, which an engine imports only when
needed.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

# What becomes of the requests that are there: they stay where they are, run to their end, or end at once.
PauseMode = Literal["keep", "wait", "abort"]
# What becomes of keys and values that earlier weights made: running requests go on with them, or are computed again;
# `drop` also gives up the cached prefixes, which nobody finds either way, at once.
KVMode = Literal["keep", "recompute", "drop"]
Version = int | str
# Functions by which an operator's server asks for them, see jaxengine.engine.extensions.weights.
WEIGHT_UTILITIES = (
    "pause_engine",
    "pause_is_there",
    "resume_engine",
    "engine_pause",
    "begin_sleep",
    "check_paused",
    "fall_asleep",
    "wake_engine",
    "weight_checksums",
    "read_weights",
    "weights_are_read",
    "forget_read_weights",
    "hold_engine",
    "switch_weights",
)


class WeightUpdate(NamedTuple):
    """Result of a switch to new weights.

    Attributes:
      version: of the new weights.
      leaves: number of arrays replaced; num_bytes: their size over all devices of this process.
      load_seconds: time to read and place the weights, during which steps went on.
      switch_seconds: time of the switch, between two steps.
    """

    version: Version
    leaves: int
    num_bytes: int
    load_seconds: float
    switch_seconds: float
