"""Pauses and new weights as LLM and AsyncLLM offer them; names and phases are vLLM's where it has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxengine.api.core import EngineCore
from jaxengine.engine.extensions.weights import Version, Weights
from jaxengine.runner.weight_update import NewWeights, Renamed, checksums, read_weights


def weights_of(core: EngineCore) -> Weights:
    """What pauses an engine and switches its weights. Called by who may step it."""
    core.check()
    return core.engine.extensions.weight_versions()


def read_new(core: EngineCore, params: Any, mapping: Mapping[str, Renamed] | None, strict: bool) -> NewWeights:
    """New weights on the devices, not in use yet; steps may go on meanwhile. Raises WeightUpdateError."""
    return read_weights(core.runner, params, mapping=mapping, strict=strict)


def weight_info(core: EngineCore, checksum: bool) -> dict[str, Any]:
    """The version, and with `checksum` SHA-256 of each weight as it lies on the devices."""
    version: Version = weights_of(core).version
    return {"weight_version": version, **({"checksums": checksums(core.runner)} if checksum else {})}
