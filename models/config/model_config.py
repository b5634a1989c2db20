"""ModelConfig: what a model is, in one frozen hashable record.

Owns the checks that every family shares. What is particular to one family is read by that family's own file (see
models/registry.py). Only data is read: `auto_map` and every other pointer to code in a config.json is ignored.
"""

from __future__ import annotations

from dataclasses import dataclass

from models.config.experts import ExpertsConfig
from models.config.fields import ModelConfigError
from models.config.rope import RopeScaling, rope_frequencies


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of one decoder-only model.

    `attention_bias` is the bias of q, k and v; `output_bias` that of the projection after attention. `qk_norm` is an
    RMS norm over each head of q and k before rope. `sliding_window` has one entry per layer: the number of keys a token
    sees counting itself, or None for all of them. `experts` is None for a dense model; where it is not,
    `intermediate_size` is that of dense layers. Token ids are None or empty where the checkpoint names none.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    sliding_window: tuple[int | None, ...]
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    experts: ExpertsConfig | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ModelConfigError(f"{name} must be an integer >= 1, got {value!r}")
        for name, bound in (("rms_norm_eps", 0), ("rope_theta", 1)):
            if not bound < getattr(self, name) < float("inf"):
                raise ModelConfigError(f"{name} must be a finite number > {bound}, got {getattr(self, name)!r}")
        if self.num_heads % self.num_kv_heads:
            raise ModelConfigError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ModelConfigError(f"head_dim must be even for rotary embedding, got {self.head_dim}")
        rope_frequencies(self.head_dim, self.rope_theta, self.rope_scaling)  # raises where they do not fit together
        if len(self.sliding_window) != self.num_layers:
            raise ModelConfigError(
                f"sliding_window must hold one entry per layer ({self.num_layers}), got {len(self.sliding_window)}"
            )
        if any(w is not None and (isinstance(w, bool) or w < 1) for w in self.sliding_window):
            raise ModelConfigError(f"sliding_window entries must be None or integers >= 1, got {self.sliding_window}")
        for token_id in (*self.eos_token_ids, *(() if self.bos_token_id is None else (self.bos_token_id,))):
            if not 0 <= token_id < self.vocab_size:
                raise ModelConfigError(f"token ids must lie in [0, vocab_size = {self.vocab_size}), got {token_id}")
