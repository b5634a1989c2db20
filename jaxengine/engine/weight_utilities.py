"""Names of the functions by which an operator pauses an engine and replaces its weights.

Apart from `extensions.weights`, which an engine imports when the first of them is called.
"""

from __future__ import annotations

WEIGHT_UTILITIES = (
    "pause_engine",
    "pause_is_there",
    "resume_engine",
    "engine_pause",
    "check_sleep",
    "fall_asleep",
    "wake_engine",
    "weight_checksums",
    "read_weights",
    "weights_are_read",
    "forget_read_weights",
    "switch_weights",
)
