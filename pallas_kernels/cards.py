"""CUDA cards: which Pallas kernels a compute capability has, and the card that a trace is for. jax is imported only
when the latter is requested.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.metadata import version
from typing import NamedTuple

# Mosaic GPU kernels are written with the instructions of compute capability 9.0 (wgmma), which 10.0 does not have.
# Attention and products with quantised and with grouped matrices also have a form for 10.0 and 10.3 (tcgen05).
_MOSAIC_CAPABILITIES = ("9.0",)
_TCGEN05_CAPABILITIES = ("10.0", "10.3")
_TRITON_CAPABILITIES = ("8.0", "8.6", "8.9", "12.0", "12.1")
# CUDA's names of the cards of a compute capability: A100, A800, A30; A2, A10G, A16, A40, RTX A6000, RTX 30; L4, L40S,
# RTX 6000 Ada, RTX 40; H20, H100, H200, H800, GH200; B100, B200, GB200; B300, GB300; RTX PRO 6000, RTX 50; GB10.
_CARDS = {
    "8.0": re.compile(r"NVIDIA A(100|800|30)\b"),
    "8.6": re.compile(r"NVIDIA (A(2|10[GM]?|16|40)\b|RTX A\d+|GeForce RTX 30\d\d)"),
    "8.9": re.compile(r"NVIDIA (L(2|4|20|40S?)\b|RTX \d+ Ada|GeForce RTX 40\d\d)"),
    "9.0": re.compile(r"NVIDIA G?H\d+\b"),
    "10.0": re.compile(r"NVIDIA G?B[12]00\b"),
    "10.3": re.compile(r"NVIDIA G?B300\b"),
    "12.0": re.compile(r"NVIDIA (RTX PRO \d+\b|GeForce RTX 50\d\d)"),
    "12.1": re.compile(r"NVIDIA GB10\b"),
}
_PLAIN: ContextVar[bool] = ContextVar("plain_cards", default=False)


@contextmanager
def plain_cards() -> Iterator[None]:
    """Return a context manager in which every CUDA card counts as one without Pallas kernels, so that programs traced
    in it are plain XLA.
    """
    token = _PLAIN.set(True)
    try:
        yield
    finally:
        _PLAIN.reset(token)


def has_mosaic(capability: str) -> bool:
    """Return whether the Mosaic GPU kernels for wgmma run on a card of this compute capability: "9.0" only; False
    within `plain_cards`.
    """
    return capability in _MOSAIC_CAPABILITIES and not _PLAIN.get()


def has_tcgen05(capability: str) -> bool:
    """Return whether the Mosaic GPU kernels for tcgen05 run on a card of this compute capability: "10.0" or "10.3";
    False within `plain_cards`.
    """
    return capability in _TCGEN05_CAPABILITIES and not _PLAIN.get()


def has_triton(capability: str) -> bool:
    """Return whether the Triton kernels run on a card of this compute capability with the installed jax: "8.0" to
    "8.9", "12.0" or "12.1", and `lowers_triton`; False within `plain_cards`.
    """
    return capability in _TRITON_CAPABILITIES and lowers_triton() and not _PLAIN.get()


@cache
def lowers_triton() -> bool:
    """Return whether the installed jax lowers Pallas-Triton kernels for every card: not 0.11.0 and 0.11.1, which refuse
    cards whose names they do not know.
    """
    return not version("jax").startswith(("0.11.0", "0.11.1"))


def no_triton() -> str:
    """Return the reason why the installed jax runs no Triton kernels, as a phrase. Call it only where it runs none."""
    return f"jax {version('jax')} lowers Triton kernels for few cards, 0.11.2 and later for all"


def plain_operations(capability: str) -> str:
    """Return the operations that a CUDA card of this compute capability runs as plain XLA: "attention and quantised
    products" if it has no kernels, else "".
    """
    has_any = has_mosaic(capability) or has_tcgen05(capability) or has_triton(capability)
    return "" if has_any else "attention and quantised products"


def why_no_kernels(capability: str) -> str:
    """Return the reason why a card of this compute capability has no attention kernels, as a phrase: `no_triton` if it
    would have Triton kernels with another jax, else its capability. Call it only for a card that has none.
    """
    if capability in _TRITON_CAPABILITIES and not lowers_triton():
        return no_triton()
    return f"compute capability {capability}"


class Card(NamedTuple):
    """CUDA card that a trace is for.

    Attributes:
      hopper: compute capability 9.0, for which the Mosaic GPU kernels are written; False within `plain_cards`.
      num_sms: streaming multiprocessors.
      blackwell: compute capability 10.0 or 10.3, for which there are kernels with tcgen05; False within `plain_cards`.
      triton: compute capability 8.0 to 8.9 or 12, for which there are Triton kernels; False within `plain_cards`.
    """

    hopper: bool
    num_sms: int
    blackwell: bool = False
    triton: bool = False

    @property
    def multiplies(self) -> bool:
        """Whether the card has Mosaic GPU kernels for products with matrices: one of Hopper or Blackwell."""
        return self.hopper or self.blackwell


def card_of_trace() -> Card | None:
    """Return the CUDA card that the current trace is for: that of the ambient abstract mesh, if there is one, else the
    first device of this process. None if it is not a CUDA card.

    A mesh gives only a card's name, from which the compute capability follows.
    """
    import jax

    if (chip := getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)) is not None:
        named = chip.device_kind.startswith("NVIDIA")
        capability = next((each for each, names in _CARDS.items() if names.match(chip.device_kind)), "")
        return _card(capability, chip.num_cores) if named else None
    device = jax.devices()[0]
    if device.platform not in ("gpu", "cuda"):
        return None
    return _card(device.compute_capability, device.core_count)


def _card(capability: str, num_sms: int) -> Card:
    """Return the card of a compute capability, such as "9.0", with num_sms multiprocessors."""
    return Card(has_mosaic(capability), num_sms, has_tcgen05(capability), has_triton(capability))
