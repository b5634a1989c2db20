"""Types and names of pauses and weight updates, in a file of their own because an engine imports `extensions.weights`
only when it needs it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

# Effect of a pause on unfinished requests: they stay as they are, run to their end, or end at once.
PauseMode = Literal["keep", "wait", "abort"]
# Treatment of keys and values that earlier weights computed: running requests keep them (keep), or are computed again
# (recompute, drop). `drop` also frees the cached prefixes at once; in no mode does a request find them any more.
KVMode = Literal["keep", "recompute", "drop"]
Version = int | str
# Utilities of the engine by which a server pauses it and replaces weights, see
# jaxengine.engine.extensions.weights.weights.
WEIGHT_UTILITIES = (
    "pause_engine",
    "pause_is_there",
    "resume_engine",
    "engine_pause",
    "begin_sleep",
    "check_paused",
    "fall_asleep",
    "wake_engine",
    "recompute_running",
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
      version: version of the new weights.
      leaves: number of arrays replaced.
      num_bytes: size of these arrays over all devices of this process.
      load_seconds: time to read the weights and send them to the devices, during which steps went on.
      switch_seconds: time of the switch, between two steps.
    """

    version: Version
    leaves: int
    num_bytes: int
    load_seconds: float
    switch_seconds: float
