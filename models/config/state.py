"""What a layer keeps of a sequence in place of keys and values: rows of a fixed size, as data.

Owns the checks that concern one layer. What is computed with them is code (models/layers).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from models.config.fields import MAX_HEAD_DIM, MAX_HEADS, MAX_HIDDEN, ModelConfigError, check_size

# Tokens that a convolution may look back on: a few times what the longest ones do.
MAX_KERNEL = 64


class StateArray(NamedTuple):
    """An array that a layer keeps of one sequence.

    Attributes:
      shape: whole, over all devices that share it.
      dtype: None for that of activations.
      axes: logical axes, sharding.rules' words.
    """

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str | None, ...]


@dataclass(frozen=True)
class ShortConvolution:
    """A gated convolution (Liquid AI 2025, LFM2), of which a sequence leaves the window.

    Attributes:
      channels: that are convolved, each by itself.
      conv_kernel: tokens that the convolution sees, the token itself included.
    """

    channels: int
    conv_kernel: int

    def __post_init__(self) -> None:
        check_size("short convolution: channels", self.channels, MAX_HIDDEN)
        check_size("short convolution: conv_kernel", self.conv_kernel, MAX_KERNEL, 2)

    @property
    def arrays(self) -> tuple[StateArray, ...]:
        """The window [kernel - 1, channels]."""
        return (StateArray((self.conv_kernel - 1, self.channels), None, (None, "heads")),)

    @property
    def flops(self) -> int:
        """Of one token."""
        return 2 * self.channels * self.conv_kernel


@dataclass(frozen=True)
class GatedDelta:
    """A gated delta net (Yang et al. 2024, arXiv:2412.06464): one matrix a head, and the window of a convolution.

    Attributes:
      num_k_heads, num_v_heads: of queries and keys, and of values, of which each of the former serves equally many.
      k_head_dim, v_head_dim: elements of a key, and of a value.
      conv_kernel: tokens that the convolution over queries, keys and values sees, the token itself included.
    """

    num_k_heads: int
    num_v_heads: int
    k_head_dim: int
    v_head_dim: int
    conv_kernel: int

    def __post_init__(self) -> None:
        for name, most in (
            ("num_k_heads", MAX_HEADS),
            ("num_v_heads", MAX_HEADS),
            ("k_head_dim", MAX_HEAD_DIM),
            ("v_head_dim", MAX_HEAD_DIM),
            ("conv_kernel", MAX_KERNEL),
        ):
            check_size(f"gated delta net: {name}", getattr(self, name), most)
        if self.num_v_heads % self.num_k_heads:
            raise ModelConfigError(
                f"gated delta net: num_v_heads must be a multiple of num_k_heads, got {self.num_v_heads} and "
                f"{self.num_k_heads}"
            )
        if self.conv_kernel < 2:
            raise ModelConfigError(f"gated delta net: conv_kernel must be at least 2, got {self.conv_kernel}")

    @property
    def key_size(self) -> int:
        """Of all keys of a token."""
        return self.num_k_heads * self.k_head_dim

    @property
    def value_size(self) -> int:
        """Of all values of a token."""
        return self.num_v_heads * self.v_head_dim

    @property
    def arrays(self) -> tuple[StateArray, ...]:
        """The convolution's window [kernel - 1, channels], and the matrices [N, k_head_dim, v_head_dim]."""
        channels = 2 * self.key_size + self.value_size
        return (
            StateArray((self.conv_kernel - 1, channels), None, (None, "heads")),
            StateArray((self.num_v_heads, self.k_head_dim, self.v_head_dim), "float32", ("heads", None, None)),
        )

    @property
    def flops(self) -> int:
        """Of the recurrence of one token: read, change, read."""
        return 6 * self.num_v_heads * self.k_head_dim * self.v_head_dim


# What a layer may have in place of attention.
LayerState = GatedDelta | ShortConvolution
