"""Fields of families with several hidden states of a token: Gemma 3n, whose layers predict and correct them (Baykal et
al. 2023, arXiv:2301.13310), with other parts of its layers, Solar, whose layers keep and mix them, Zamba 2, whose
layers with a shared block also read the embedding, Dory, which runs some layers several times, as families with one
hidden state do, too, Kimi K3, whose layers read sums of the outputs of earlier blocks of layers, and ZAYA, whose hidden
states have more digits than its dtype.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from jaxengine.models.config.fields import MAX_HIDDEN, MAX_LAYERS, ModelConfigError, check_size

_MOST_STREAMS, _MOST_RANK = 16, 1 << 16
# A module or tensor of a block of Zamba 2: the number of its layer, and its name in the block.
BLOCK = re.compile(r"model\.layers\.(\d+)\.shared_transformer\.(.+)")
# In such a name: the list of a block's low-rank products, and the index in SharedBlocks.layers of the layer of one.
LISTED = re.compile(r"_list\.(\d+)\.")


@dataclass(frozen=True)
class AltUp:
    """Alternating updates of a token's hidden states: each layer computes one of them and predicts the others.

    Attributes:
      num_streams: A, number of hidden states of a token.
      active: index of the hidden state that layers compute.
      scales_active: whether the active hidden state is scaled by learned numbers before it gates the per-layer input.
      laurel_rank: inner size of the low-rank product (LAuReL) whose result is averaged with attention's.
      sparsity: for each layer, the share of the MLP's gates that are to be zero; 0 for none.

    Raises ModelConfigError unless there are 2 to 16 streams, `active` is one of them, laurel_rank is 1 to 65536 and
    shares are at least 0 and below 1.
    """

    num_streams: int
    active: int
    scales_active: bool
    laurel_rank: int
    sparsity: tuple[float, ...]

    def __post_init__(self) -> None:
        check_size("altup_num_inputs", self.num_streams, _MOST_STREAMS, 2)
        check_size("altup_active_idx", self.active, self.num_streams - 1, 0)
        check_size("laurel_rank", self.laurel_rank, _MOST_RANK)
        if any(not 0 <= share < 1 for share in self.sparsity):
            raise ModelConfigError(
                f"activation_sparsity_pattern must hold numbers >= 0 and < 1, got {list(self.sparsity)}"
            )


@dataclass(frozen=True)
class BlockSkips:
    """Hidden states of Solar that are kept before some layers, and mixed into the hidden state before later ones.

    Attributes:
      kept: for each of two kept hidden states, the layers whose input becomes it.
      mixed: for each, the layers into whose input it is mixed.
      share: factor of a kept hidden state in that sum; the input itself has 1 - share.

    Raises ModelConfigError unless `share` is from 0 to 1.
    """

    kept: tuple[tuple[int, ...], tuple[int, ...]]
    mixed: tuple[tuple[int, ...], tuple[int, ...]]
    share: float

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ModelConfigError(f"bskcn_tv must hold numbers from 0 to 1, got {self.share!r}")

    @property
    def num_streams(self) -> int:
        """Number of hidden states of a token: the current one and the kept ones."""
        return 3


@dataclass(frozen=True)
class LoopedLayers:
    """Layers that run several times. Each run counts as a layer of the model, with keys and values of its own; all runs
    of a layer have the weights of one layer of the checkpoint.

    Attributes:
      first: number of layers before the loop, and so the number of the first layer in it.
      count: number of layers in the loop.
      num_loops: how often the loop runs.
      num_after: number of layers after it.
      normed: whether the model's last norm is also the norm of the input of each loop but the first.

    Raises ModelConfigError unless num_loops is from 1 to MAX_LAYERS.
    """

    first: int
    count: int
    num_loops: int
    num_after: int = 0
    normed: bool = False

    def __post_init__(self) -> None:
        check_size("number of loops", self.num_loops, MAX_LAYERS)

    @property
    def num_streams(self) -> int:
        """Number of hidden states of a token: one."""
        return 1

    @property
    def stored(self) -> tuple[int, ...]:
        """The checkpoint's number of each layer of the model: those of the loop `num_loops` times, all others once."""
        before, after = range(self.first), range(self.first + self.count, self.first + self.count + self.num_after)
        return (*before, *(*range(self.first, self.first + self.count),) * self.num_loops, *after)

    def loop(self, layer: int) -> int | None:
        """Return the number of the loop, from 0, that begins with layer number `layer` of the model; None for a layer
        with which none begins.
        """
        loop, inside = divmod(layer - self.first, self.count)
        return loop if 0 <= loop < self.num_loops and inside == 0 else None


@dataclass(frozen=True, kw_only=True)
class DoryLoops(LoopedLayers):
    """Looped layers of Dory. Before each run of the first of them, the output of the layers before the loop is added
    again, so that it is passed on with the hidden state.

    Attributes:
      weight_scale: `initializer_range`: learned factors are stored as multiples of it.
      rate: `ngpt_alpha_init`: the share of a part's output in the hidden state where the stored factor is weight_scale.
    """

    weight_scale: float
    rate: float

    @property
    def num_streams(self) -> int:
        """Number of hidden states of a token: the current one and the loop's input."""
        return 2


@dataclass(frozen=True)
class WideResiduals:
    """Hidden states of ZAYA, which are sums of two numbers of the model's dtype, and what layers pass on beside them.

    router_size: elements of the hidden state of a layer's router, which that of the next layer reads. Raises
    ModelConfigError unless that is from 1 to MAX_HIDDEN.
    """

    router_size: int

    def __post_init__(self) -> None:
        check_size("router_hidden_size", self.router_size, MAX_HIDDEN)

    @property
    def num_streams(self) -> int:
        """Number of arrays that together are a token's hidden state: rounded, and what rounding leaves."""
        return 2

    @property
    def num_beside(self) -> int:
        """Number of elements that layers pass on for a token in addition to its hidden state."""
        return self.router_size


@dataclass(frozen=True)
class SharedBlocks:
    """Transformer blocks of Zamba and Zamba 2, of which several layers have the same one. Layers pass on the embedding
    with the hidden state, because blocks read both.

    Attributes:
      layers: numbers of the layers that have a block, ascending.
      count: number of different blocks, which these layers have in turn.
      rank: inner size of the low-rank products that a layer adds to the projections of its block; 0 for none.
      in_attention: whether queries, keys and values have such products, too, and not only gate and up.
      activation: name of the activation of the blocks' MLPs.
      tied: whether a pipeline stage holds the weights of a block once. Otherwise each layer has its own, as in
        transformers where `tie_word_embeddings` is false.

    Raises ModelConfigError unless `count` is from 1, and `rank` from 0, to 65536.
    """

    layers: tuple[int, ...]
    count: int
    rank: int
    in_attention: bool
    activation: str
    tied: bool

    def __post_init__(self) -> None:
        check_size("num_mem_blocks", self.count, _MOST_RANK)
        check_size("adapter_rank", self.rank, _MOST_RANK, 0)

    @property
    def num_streams(self) -> int:
        """Number of hidden states of a token: the current one and the embedding."""
        return 2

    def sharing(self, layer: int) -> tuple[int, ...]:
        """Return the numbers of the layers that have the same block as layer number `layer`, itself included; () for a
        layer without one.
        """
        if layer not in self.layers:
            return ()
        return self.layers[self.layers.index(layer) % self.count :: self.count]

    def having(self, name: str) -> tuple[int, ...]:
        """Return the numbers of the layers that have the module or tensor `name`, the model's name, together; () for
        one outside of blocks or of an adapter, and if blocks are not tied.
        """
        found = BLOCK.match(name)
        if found is None or not self.tied or "_adapter." in found[2]:
            return ()
        return self.sharing(int(found[1]))

    def own_name(self, name: str) -> str | None:
        """Return the model's name of a module or tensor that is `name` in transformers: without the list of low-rank
        products. None for a product in the list of a layer that another layer multiplies by. Other names are returned
        unchanged.
        """
        found = BLOCK.match(name)
        if found is None or (listed := LISTED.search(found[2])) is None or int(listed[1]) >= len(self.layers):
            return name
        is_own = self.layers[int(listed[1])] == int(found[1])
        return LISTED.sub(".", name) if is_own else None


@dataclass(frozen=True)
class KimiK3Parts:
    """Parts of Kimi K3's layers that Kimi Linear's do not have (Kimi Team 2026).

    Attributes:
      num_layers: number of layers of the model.
      layers_per_block: layers of a block. Each part of a layer then reads a mix of the embedding, of the sums of
        outputs of each earlier block, and of the sum of outputs so far of its own block, instead of the sum of all.
        None for that sum.
      output_gate: whether the outputs of latent attention's heads are multiplied by sigmoid gates.
      situ: bounds of gate and of up in MLPs and experts (layers.base.mlp.Situ), the second None for none; None for
        silu(gate) * up.
      latent_norm: whether the sum of experts is normed before it is projected to the hidden state.
      joined_scores: whether the weights of scores in mixes include those of the norm before them, as in GGUF files.

    Raises ModelConfigError unless layers_per_block is None or from 1 to MAX_LAYERS, and bounds are finite and above 0.
    """

    num_layers: int
    layers_per_block: int | None = None
    output_gate: bool = False
    situ: tuple[float, float | None] | None = None
    latent_norm: bool = False
    joined_scores: bool = False

    def __post_init__(self) -> None:
        if self.layers_per_block is not None:
            check_size("attn_res_block_size", self.layers_per_block, MAX_LAYERS)
        for name, bound in zip(("activation_situ_beta", "activation_situ_linear_beta"), self.situ or (), strict=False):
            if bound is not None and not 0 < bound < float("inf"):
                raise ModelConfigError(f"{name} must be a finite number > 0, got {bound!r}")

    @property
    def num_streams(self) -> int:
        """Number of hidden states of a token: the sum of outputs of the current block, then the embedding and the sum
        of each block that another one follows; 1 without blocks.
        """
        return 1 if self.layers_per_block is None else 1 + -(-self.num_layers // self.layers_per_block)

    def num_finished(self, layer: int) -> int:
        """Return how many hidden states layer number `layer` reads besides the first: layer / layers_per_block, rounded
        up; 0 without blocks. The layer number `num_layers` stands for the model's output.
        """
        return 0 if self.layers_per_block is None else -(-layer // self.layers_per_block)

    def begins(self, layer: int) -> bool:
        """Return whether layer number `layer` is the first of a block; False without blocks."""
        return self.layers_per_block is not None and layer % self.layers_per_block == 0
