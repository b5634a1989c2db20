"""Recurrent states of layers, instead of or in addition to keys and values: rows of a fixed size per sequence, as data.

Contains the checks that concern one layer. The computation is code (models/layers).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxengine.models.config.fields import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_INTEGER,
    MAX_INTERMEDIATE,
    ModelConfigError,
    check_size,
)

# Largest window of a convolution in tokens, a few times the longest known one.
MAX_KERNEL = 64
# Tables of n-grams of a layer for each n, and tensors that hold them: as many times as many as known models have.
_MOST_TABLES, _MOST_PARTS = 256, 1 << 14


class StateArray(NamedTuple):
    """Array of a layer's recurrent state for one sequence, or an input of the state for one token.

    Attributes:
      shape: global shape, over all devices that share it.
      dtype: dtype; None for that of activations.
      axes: logical axes (jaxengine.sharding.rules), None for an axis that is not split.
      parts: largest number of parts into which the split axis can be split; further devices have copies. None for no
        limit.
    """

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str | None, ...]
    parts: int | None = None

    def of_device(self, num_shards: Callable[[str], int]) -> tuple[int, ...]:
        """Return the shape of one device's part: each split axis is divided by its number of shards, or by `parts` if
        that is less. num_shards: function from a logical axis to its number of shards.
        """
        return tuple(
            size if axis is None else size // min(num_shards(axis), self.parts or size)
            for size, axis in zip(self.shape, self.axes, strict=True)
        )


class RecurrentState:
    """Base class of what a layer keeps for each sequence instead of keys and values, or in addition to them. Subclasses
    have `arrays`, the StateArrays of a sequence, and all but NGrams `flops`, the operations for a token.
    """

    @property
    def token_inputs(self) -> tuple[StateArray, ...] | None:
        """Inputs of the state for one token, which with the state before it give the state after it. None if
        layers do not record them; a step then has no drafts.
        """
        return None


@dataclass(frozen=True)
class ShortConvolution(RecurrentState):
    """Gated convolution of a layer (Liquid AI 2025, LFM2), whose state is its window. Raises ModelConfigError for sizes
    that are not positive or out of their limits.

    Attributes:
      channels: number of channels, each of which is convolved separately.
      conv_kernel: tokens in the convolution's window, the token itself included.
      bias: whether the convolution and the products before and after it have biases.
    """

    channels: int
    conv_kernel: int
    bias: bool = False

    def __post_init__(self) -> None:
        check_size("short convolution: channels", self.channels, MAX_HIDDEN)
        check_size("short convolution: conv_kernel", self.conv_kernel, MAX_KERNEL)

    @property
    def arrays(self) -> tuple[StateArray, ...]:
        """State arrays: the convolution's window [kernel - 1, channels]."""
        return (StateArray((self.conv_kernel - 1, self.channels), None, (None, "heads")),)

    @property
    def token_inputs(self) -> tuple[StateArray, ...]:
        """The convolution's input."""
        return (StateArray((self.channels,), None, ("heads",)),)

    @property
    def flops(self) -> int:
        """Floating-point operations of the convolution for one token."""
        return 2 * self.channels * self.conv_kernel


@dataclass(frozen=True)
class NGrams(RecurrentState):
    """Embeddings of n-grams of token ids, which a layer adds to all hidden states of a token (Qwen4-Exp). For each
    n from 2 to `longest` there are `num_heads` tables. A table's size is a prime: those of all layers together are the
    primes from `least` on, in order. Raises ModelConfigError for sizes out of their limits, and for a `size` that is no
    multiple of the number of tables.

    Attributes:
      number: how many layers before this one have such embeddings.
      longest: largest n.
      num_heads: tables for each n.
      size: elements of a token's embeddings of all tables together.
      least: smallest size of a table.
      divisor: the tables of a layer together are padded to a multiple of it.
      parts: number of tensors that hold the tables of a layer.
      seed: seed of the factors that hash token ids.
      end: token id that no n-gram reaches beyond, and that stands for the tokens before a sequence.
      vocab_size: number of token ids.
      channels: elements of all hidden states of a token.
      kernel: taps of the convolution after the embeddings, each `longest` tokens from the next.
    """

    number: int
    longest: int
    num_heads: int
    size: int
    least: int
    divisor: int
    parts: int
    seed: int
    end: int
    vocab_size: int
    channels: int
    kernel: int

    def __post_init__(self) -> None:
        check_size("ngram_size", self.longest, MAX_KERNEL, 2)
        check_size("heads_per_ngram", self.num_heads, _MOST_TABLES)
        check_size("ple_embed_dim", self.size, MAX_HIDDEN)
        check_size("ngram_vocab_size_base", self.least, MAX_INTEGER)
        check_size("make_ngram_vocab_size_divisible_by", self.divisor, MAX_INTEGER)
        check_size("split_ngram_parts", self.parts, _MOST_PARTS)
        check_size("ple_conv_kernel_size", self.kernel, MAX_KERNEL, 2)
        check_size("(ple_conv_kernel_size - 1) * ngram_size", self.window, MAX_KERNEL)
        # Primes are at most twice as large as these; rows are numbered by int32.
        check_size("ngram_vocab_size_base * number of tables", self.least * self.num_tables, MAX_INTEGER // 2)
        if self.size % self.num_tables:
            text = f"a multiple of the {self.num_tables} tables of n-grams"
            raise ModelConfigError(f"ple_embed_dim must be {text}, got {self.size}")

    @property
    def num_tables(self) -> int:
        """Number of tables of a layer."""
        return (self.longest - 1) * self.num_heads

    @property
    def window(self) -> int:
        """Number of tokens before a token that its convolution reaches."""
        return (self.kernel - 1) * self.longest

    @property
    def arrays(self) -> tuple[StateArray, ...]:
        """State arrays: the convolution's window [window, channels] in the model's dtype, and the last token ids
        int32[longest - 1, 1].
        """
        none = None, None
        return StateArray((self.window, self.channels), None, none), StateArray((self.longest - 1, 1), "int32", none)


@dataclass(frozen=True)
class GatedDelta(RecurrentState):
    """Gated delta net of a layer (Yang et al. 2024, arXiv:2412.06464): its state is one matrix per head, and the window
    of a convolution. Raises ModelConfigError for sizes out of their limits, a num_v_heads that is no multiple of
    num_k_heads, and a lower_bound that is not finite and below 0.

    Attributes:
      num_k_heads: heads of queries and keys.
      num_v_heads: heads of values, a multiple of num_k_heads.
      k_head_dim, v_head_dim: elements of a key, and of a value.
      conv_kernel: tokens that the convolution over queries, keys and values sees, the token itself included.
      by_element: whether each element of a key has its own decay (Kimi Team 2025, arXiv:2510.26692); otherwise there is
        one decay per head.
      rank: size of the low-rank intermediate from which decays and gates are projected; None if they are projected
        directly from the hidden state.
      whole_gates: whether gates are projected directly from the hidden state although `rank` is set.
      lower_bound: lower bound of the logarithm of a token's decay, approached by a sigmoid; None for no bound.
      activation: name of the function after the convolution.
      gate: name of the function of the output's gates; None for a sigmoid with `by_element`, otherwise a SiLU.
      ngrams: embeddings of n-grams that the layer adds before the delta net, with arrays of their own; None for none.
      beta_scale: factor of the sigmoid that gives a token's step towards its value.
    """

    num_k_heads: int
    num_v_heads: int
    k_head_dim: int
    v_head_dim: int
    conv_kernel: int
    by_element: bool = False
    rank: int | None = None
    whole_gates: bool = False
    lower_bound: float | None = None
    beta_scale: float = 1.0
    activation: str = "silu"
    gate: str | None = None
    ngrams: NGrams | None = None

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
        if self.rank is not None:
            check_size("gated delta net: rank", self.rank, MAX_HIDDEN)
        if self.lower_bound is not None and not -float("inf") < self.lower_bound < 0:
            raise ModelConfigError(f"gated delta net: lower_bound must be a finite number < 0, got {self.lower_bound}")

    @property
    def key_size(self) -> int:
        """Number of elements of all keys of a token."""
        return self.num_k_heads * self.k_head_dim

    @property
    def value_size(self) -> int:
        """Number of elements of all values of a token."""
        return self.num_v_heads * self.v_head_dim

    @property
    def arrays(self) -> tuple[StateArray, ...]:
        """State arrays: the convolution's window [kernel - 1, channels] in the model's dtype, the matrices
        float32[num_v_heads, k_head_dim, v_head_dim], and those of `ngrams`.
        """
        channels = 2 * self.key_size + self.value_size
        return (
            StateArray((self.conv_kernel - 1, channels), None, (None, "heads")),
            StateArray((self.num_v_heads, self.k_head_dim, self.v_head_dim), "float32", ("heads", None, None)),
            *(() if self.ngrams is None else self.ngrams.arrays),
        )

    @property
    def token_inputs(self) -> tuple[StateArray, ...] | None:
        """The convolution's input, and projections of beta and of decays; None with `ngrams`."""
        decays = self.num_v_heads * (self.k_head_dim if self.by_element else 1)
        sizes = 2 * self.key_size + self.value_size, self.num_v_heads, decays
        return None if self.ngrams else tuple(StateArray((size,), None, ("heads",)) for size in sizes)

    @property
    def flops(self) -> int:
        """Floating-point operations of the recurrence (read, update, read) for one token."""
        return 6 * self.num_v_heads * self.k_head_dim * self.v_head_dim


@dataclass(frozen=True)
class LinearState(RecurrentState):
    """Linear attention of a layer with constant decays (Qin et al. 2024, arXiv:2401.04658), whose state is one matrix
    per head. Raises ModelConfigError for sizes out of their limits, and groups that do not divide the heads.

    Attributes:
      num_heads: heads.
      head_dim: elements of a query, of a key and of a value.
      num_groups: groups of heads whose outputs are normed together, a divisor of num_heads; 1 for all heads at once.
      qk_norm: whether queries and keys are normed; only in Ling 2.5's form, whose queries and keys have rope.
      activation: name of the function that queries, keys and values pass, "linear" for none.
    """

    num_heads: int
    head_dim: int
    num_groups: int = 1
    qk_norm: bool = False
    activation: str = "silu"

    def __post_init__(self) -> None:
        check_size("linear attention: num_heads", self.num_heads, MAX_HEADS)
        check_size("linear attention: head_dim", self.head_dim, MAX_HEAD_DIM)
        check_size("linear attention: num_groups", self.num_groups, self.num_heads)
        if self.num_heads % self.num_groups:
            text = f"linear attention: num_groups must divide num_heads = {self.num_heads}, got {self.num_groups}"
            raise ModelConfigError(text)

    @property
    def inner_size(self) -> int:
        """Number of elements of all values of a token."""
        return self.num_heads * self.head_dim

    @property
    def arrays(self) -> tuple[StateArray, ...]:
        """State arrays: the matrices float32[num_heads, head_dim, head_dim]."""
        return (StateArray((self.num_heads, self.head_dim, self.head_dim), "float32", ("heads", None, None)),)

    @property
    def token_inputs(self) -> tuple[StateArray, ...]:
        """Keys and values as they are stored."""
        return (StateArray((self.num_heads, self.head_dim), "float32", ("heads", None)),) * 2

    @property
    def flops(self) -> int:
        """Floating-point operations of the recurrence (update, read) for one token."""
        return 5 * self.num_heads * self.head_dim**2


@dataclass(frozen=True)
class StateSpace(RecurrentState):
    """Mamba-2 of a layer (Dao & Gu 2024, arXiv:2405.21060), whose state is one matrix per head, and the windows of a
    convolution. Raises ModelConfigError for sizes out of their limits, and unless num_groups divides num_heads.

    Attributes:
      num_heads: heads of inputs.
      head_dim: elements of a head.
      num_groups: groups of heads that share B (writes to their states) and C (reads from them).
      state_size: elements of a state for each element of an input.
      conv_kernel: tokens that the convolution over inputs, B and C sees, the token itself included.
      conv_bias, bias, output_bias: biases of the convolution, and of the projections before and after it.
      norm: RMS norm over each group of the output, "after" or "before" it is gated, or None for no norm.
      activation: name of the function after the convolution.
      dt_limits: bounds of a token's time step.
      multipliers: factors of the projected gate, inputs, B, C, and time steps.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    conv_kernel: int
    conv_bias: bool = True
    bias: bool = False
    output_bias: bool = False
    norm: str | None = "after"
    activation: str = "silu"
    dt_limits: tuple[float, float] = (0.0, float("inf"))
    multipliers: tuple[float, ...] = (1.0,) * 5

    def __post_init__(self) -> None:
        for name, most in (
            ("num_heads", MAX_HEADS),
            ("head_dim", MAX_HEAD_DIM),
            ("num_groups", MAX_HEADS),
            ("state_size", MAX_HEAD_DIM),
        ):
            check_size(f"state space: {name}", getattr(self, name), most)
        check_size("state space: conv_kernel", self.conv_kernel, MAX_KERNEL)
        check_size("state space: num_heads * head_dim", self.inner_size, MAX_INTERMEDIATE)
        if self.num_heads % self.num_groups:
            raise ModelConfigError(
                f"state space: num_heads must be a multiple of num_groups, got {self.num_heads} and {self.num_groups}"
            )

    @property
    def inner_size(self) -> int:
        """Number of elements of all inputs of a token."""
        return self.num_heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Number of elements of B, and of C, in all groups together."""
        return self.num_groups * self.state_size

    @property
    def arrays(self) -> tuple[StateArray, ...]:
        """State arrays: the convolution's windows [kernel - 1, ...] of inputs and of all groups' B and C, in the
        model's dtype, and the matrices float32[num_heads, head_dim, state_size].
        """
        before = self.conv_kernel - 1
        return (
            StateArray((before, self.inner_size), None, (None, "heads")),
            StateArray((before, 2 * self.group_size), None, (None, "heads"), self.num_groups),
            StateArray((self.num_heads, self.head_dim, self.state_size), "float32", ("heads", None, None)),
        )

    @property
    def token_inputs(self) -> tuple[StateArray, ...]:
        """Inputs of the convolutions, of inputs and of B and C, and the projection of time steps."""
        return (
            StateArray((self.inner_size,), None, ("heads",)),
            StateArray((2 * self.group_size,), None, ("heads",), self.num_groups),
            StateArray((self.num_heads,), None, ("heads",)),
        )

    @property
    def flops(self) -> int:
        """Floating-point operations of the recurrence (update, read) for one token."""
        return 5 * self.num_heads * self.head_dim * self.state_size


@dataclass(frozen=True)
class SelectiveScan(RecurrentState):
    """Mamba of a layer (Gu & Dao 2023, arXiv:2312.00752), whose state is a vector per channel, and the window of a
    convolution. Raises ModelConfigError for sizes out of their limits, and heads that do not divide the channels.

    Attributes:
      channels: channels of the input, each with its own state.
      state_size: elements of a channel's state.
      time_rank: elements from which the time steps of all channels are projected.
      conv_kernel: tokens that the convolution over inputs sees, the token itself included.
      conv_bias, bias: biases of the convolution, and of the projections before and after it.
      norms: kind of the RMS norms of the inputs of time steps, B and C: "weighted", "plain" (without weights), or None
        for no norms.
      eps: epsilon of these norms.
      activation: name of the function after the convolution.
      num_heads: groups of channels, each with B, C and inputs of time steps of its own, projected from its channels;
        None if they are projected from all channels, for all.
    """

    channels: int
    state_size: int
    time_rank: int
    conv_kernel: int
    conv_bias: bool = True
    bias: bool = False
    norms: str | None = None
    eps: float = 1e-6
    activation: str = "silu"
    num_heads: int | None = None

    def __post_init__(self) -> None:
        check_size("selective scan: channels", self.channels, MAX_INTERMEDIATE)
        if self.num_heads is not None and (self.num_heads > MAX_HEADS or self.channels % self.num_heads):
            text = f"at most {MAX_HEADS} and a divisor of channels, {self.channels}, got {self.num_heads}"
            raise ModelConfigError(f"selective scan: num_heads must be {text}")
        check_size("selective scan: state_size", self.state_size, MAX_HEAD_DIM)
        check_size("selective scan: time_rank", self.time_rank, MAX_HIDDEN)
        check_size("selective scan: conv_kernel", self.conv_kernel, MAX_KERNEL)

    @property
    def arrays(self) -> tuple[StateArray, ...]:
        """State arrays: the convolution's window [kernel - 1, channels] in the model's dtype, and the vectors
        float32[channels, state_size].
        """
        return (
            StateArray((self.conv_kernel - 1, self.channels), None, (None, "heads")),
            StateArray((self.channels, self.state_size), "float32", ("heads", None)),
        )

    @property
    def token_inputs(self) -> tuple[StateArray, ...]:
        """The convolution's input, time steps without their bias, and B."""
        u, dtype = StateArray((self.channels,), None, ("heads",)), None if self.num_heads is None else "float32"
        b = StateArray((self.state_size,), dtype, (None,))
        if self.num_heads is not None:
            b = StateArray((self.num_heads, self.state_size), dtype, ("heads", None))
        return u, u._replace(dtype=dtype), b

    @property
    def flops(self) -> int:
        """Floating-point operations of the recurrence (decay, update, read) for one token."""
        return 7 * self.channels * self.state_size


@dataclass(frozen=True)
class GatedRecurrence(RecurrentState):
    """Gated linear recurrence of a layer (De et al. 2024, arXiv:2402.19427), whose state is a number per channel, and
    the window of a convolution. Raises ModelConfigError for sizes out of limits, and unless num_heads divides channels.

    Attributes:
      channels: channels of the input, each with its own state.
      num_heads: groups of channels, a divisor of `channels`; gates of a channel depend on its group.
      conv_kernel: tokens that the convolution over inputs sees, the token itself included.
      activation: name of the function of the gates of outputs.
    """

    channels: int
    num_heads: int
    conv_kernel: int
    activation: str = "gelu_pytorch_tanh"

    def __post_init__(self) -> None:
        check_size("recurrence: lru_width", self.channels, MAX_INTERMEDIATE)
        check_size("recurrence: num_attention_heads", self.num_heads, MAX_HEADS)
        check_size("recurrence: conv1d_width", self.conv_kernel, MAX_KERNEL)
        if self.channels % self.num_heads:
            text = f"lru_width must be a multiple of num_attention_heads, {self.num_heads}, got {self.channels}"
            raise ModelConfigError(text)

    @property
    def arrays(self) -> tuple[StateArray, ...]:
        """State arrays: the convolution's window [kernel - 1, channels] in the model's dtype, and the states
        float32[channels, 1].
        """
        return (
            StateArray((self.conv_kernel - 1, self.channels), None, (None, "heads")),
            StateArray((self.channels, 1), "float32", ("heads", None)),
        )

    @property
    def token_inputs(self) -> tuple[StateArray, ...]:
        """The convolution's input."""
        return (StateArray((self.channels,), None, ("heads",)),)

    @property
    def flops(self) -> int:
        """Floating-point operations of the gates and the recurrence for one token."""
        return 4 * self.channels * self.channels // self.num_heads + 7 * self.channels
