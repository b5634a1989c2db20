"""Fields of Kimi K3: what its layers have beyond those of Kimi Linear."""

from __future__ import annotations

from dataclasses import dataclass

from jaxengine.models.config.fields import MAX_LAYERS, ModelConfigError, check_size


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
    """

    num_layers: int
    layers_per_block: int | None = None
    output_gate: bool = False
    situ: tuple[float, float | None] | None = None
    latent_norm: bool = False

    def __post_init__(self) -> None:
        if self.layers_per_block is not None:
            check_size("attn_res_block_size", self.layers_per_block, MAX_LAYERS)
        for name, bound in zip(("activation_situ_beta", "activation_situ_linear_beta"), self.situ or (), strict=False):
            if bound is not None and not 0 < bound < float("inf"):
                raise ModelConfigError(f"{name} must be a finite number > 0, got {bound!r}")

    @property
    def num_streams(self) -> int:
        """Number of hidden states of a token: the sum of outputs of the current block, then the embedding and the sum
        of each block that another one follows.
        """
        return 1 if self.layers_per_block is None else 1 + -(-self.num_layers // self.layers_per_block)

    def num_finished(self, layer: int) -> int:
        """Return how many of these hidden states layer number `layer` reads besides the first; 0 without blocks. The
        layer number `num_layers` stands for the model's output.
        """
        return 0 if self.layers_per_block is None else -(-layer // self.layers_per_block)

    def begins(self, layer: int) -> bool:
        """Return whether layer number `layer` is the first of a block."""
        return self.layers_per_block is not None and layer % self.layers_per_block == 0
