"""LayerAttention: what kernels, caches and step inputs must know of one layer's attention, as data.

Owns the checks that concern one layer. What a layer does around its attention (norms, activations, multipliers) is code
in its family's file.
"""

from __future__ import annotations

from dataclasses import dataclass

from models.config.fields import MAX_HEAD_DIM, MAX_HEADS, MAX_INTEGER, ModelConfigError, check_size
from models.config.rope import Rope


@dataclass(frozen=True)
class TemperatureTuning:
    """Queries times 1 + attn_scale * ln(1 + floor((position + offset) / floor_scale)): the longer the context, the
    sharper the softmax (Nakanishi 2025, arXiv:2501.19399, as Llama 4 has it).

    offset: 1 where the first position counts as one token, else 0.
    """

    floor_scale: float
    attn_scale: float
    offset: int = 0

    def __post_init__(self) -> None:
        for name in ("floor_scale", "attn_scale"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ModelConfigError(f"{name} must be a finite number > 0, got {getattr(self, name)!r}")


@dataclass(frozen=True)
class LayerAttention:
    """Attention of one layer; layers with equal ones share rope tables, schedules and a trace.

    Attributes:
      num_heads, num_kv_heads: of queries, and of keys and values.
      head_dim: of queries, keys and values.
      rope: how q and k are rotated; None where they are not.
      scale: that products of queries and keys are multiplied with; None for head_dim ** -0.5.
      window: keys a token sees counting itself, None for all of them.
      soft_cap: products become soft_cap * tanh(product / soft_cap) before the softmax, None for no cap.
      qk_norm: an RMS norm over each head of q and k before rope, unless the family hands other norms to Attention.
      bias: of the projections to q, k and v.
      output_bias: of the projection after attention.
      temperature: by which queries are multiplied according to their positions; None for not at all.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope | None
    scale: float | None = None
    window: int | None = None
    soft_cap: float | None = None
    qk_norm: bool = False
    bias: bool = False
    output_bias: bool = False
    temperature: TemperatureTuning | None = None

    def __post_init__(self) -> None:
        check_size("num_heads", self.num_heads, MAX_HEADS)
        check_size("num_kv_heads", self.num_kv_heads, MAX_HEADS)
        check_size("head_dim", self.head_dim, MAX_HEAD_DIM)
        if self.window is not None:
            check_size("window", self.window, MAX_INTEGER)
        for name in ("scale", "soft_cap"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ModelConfigError(f"{name} must be a finite number > 0, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ModelConfigError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}"
            )
        if self.rope is not None and self.rope.rotary_dim > self.head_dim:
            raise ModelConfigError(f"rotary_dim must be at most head_dim = {self.head_dim}, got {self.rope.rotary_dim}")

    @property
    def sm_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale
