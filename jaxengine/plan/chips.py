"""Chips to plan for: those that `jaxengine check` compiles for, by the names of their makers, and some others.

Imports no jax. Memory of a card is what CUDA programs report, which differs by up to 1 % between drivers.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxengine.check.targets import GIB, TARGETS
from jaxengine.config.engine_config import ConfigError

MOST = 1024


@dataclass(frozen=True)
class Chip:
    """One device.

    Attributes:
      name: as --chips takes it, such as "v6e".
      platform: as jax names it: "cpu", "tpu" or "cuda".
      compute_capability: that of a CUDA card, such as "9.0"; "" for other devices.
      memory: bytes of one device; 0 for a CPU, whose memory is that of this machine.
      bandwidth, flops: bytes and dense bfloat16 operations a second; 0 where they are not known.
      target: the name by which `jaxengine check` compiles for it; "" without one.
    """

    name: str
    platform: str
    compute_capability: str
    memory: int
    bandwidth: float
    flops: float
    target: str = ""


@dataclass(frozen=True)
class Chips:
    """Devices of one kind: the kind, and how many there are."""

    chip: Chip
    count: int

    def __str__(self) -> str:
        """Return NAME:COUNT."""
        return f"{self.chip.name}:{self.count}"


def _of_target(name: str, target: str) -> Chip:
    """Return a Chip with the name `name` and the figures of `target`, a name in TARGETS."""
    found = TARGETS[target]
    capability = "" if found.gpu is None else ".".join(map(str, found.gpu.capability))
    figures = found.hbm_bytes, found.hbm_bandwidth, found.flops
    return Chip(name, found.backend, capability, *figures, target=target)


_TARGETS = {"v5e": "v5e", "v6e": "v6e", "v5p": "v5p", "tpu7x": "tpu7x", "cpu": "cpu"}
_TARGETS |= {"a100": "sm_80", "a10g": "sm_86", "l4": "sm_89", "h100": "sm_90", "h200": "h200"}
_TARGETS |= {"b200": "sm_100", "b300": "sm_103", "rtxpro6000": "sm_120"}
# bfloat16 of a T4 is computed as float32.
CHIPS = {
    **{name: _of_target(name, target) for name, target in _TARGETS.items()},
    **{
        name: Chip(name, "cuda", capability, int(gib * GIB), bandwidth, flops)
        for name, capability, gib, bandwidth, flops in (
            ("a100-40", "8.0", 39.38, 1555e9, 312e12),
            ("l40s", "8.9", 44.39, 864e9, 362e12),
            ("t4", "7.5", 14.56, 320e9, 8.1e12),
            ("rtx4090", "8.9", 23.51, 1008e9, 165e12),
            ("rtx5090", "12.0", 31.36, 1792e9, 209e12),
        )
    },
}


def read_chips(text: str) -> Chips:
    """Return the chips that a text names: `NAME` or `NAME:COUNT`, where COUNT is 1 if it is absent and NAME is one of
    CHIPS or a target of `jaxengine check`, in upper or lower case.

    Raises ConfigError for another name, and for a count that is not a whole number from 1 to MOST.
    """
    name, _, count = text.strip().lower().partition(":")
    by_target = {chip.target: chip for chip in CHIPS.values() if chip.target}
    chip = CHIPS.get(name) or by_target.get(name)
    if chip is None:
        raise ConfigError("chips", text, f"NAME or NAME:COUNT with one of {', '.join(CHIPS)}")
    if count and (not count.isascii() or not count.isdigit() or not 1 <= int(count) <= MOST):
        raise ConfigError("chips", text, f"{chip.name}:COUNT with a whole number from 1 to {MOST}")
    return Chips(chip, int(count or 1))
