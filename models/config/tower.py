"""TowerConfig: properties of a model's tower, which encodes images or sounds, that an engine needs. Free of arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# A part of a model's weights (jaxengine.models.build.Build.whole_parts), and where a model has its towers.
TOWER = "tower"
TOWERS = (TOWER, "sound_tower")
# Columns of patches are integers: shares of the way between rows are in units of 1 / SHARES.
SHARES = 1 << 24


@dataclass(frozen=True, kw_only=True)
class TowerConfig:
    """Sizes and properties of a tower, which encodes patches of images, or frames of sounds, to embeddings. A subclass,
    next to its tower, has the sizes of a family.

    A tower is a flax.nnx module; `tower(patches, columns)` takes P patches f32[P, F] with C integers for each in
    columns i32[C, P], and returns [P / merge, E] in the model's dtype. Several images share a call: a column
    identifies the image of a patch, or all images have `unit` patches. Padding after the last image is zeros,
    with -1 in the columns.

    Attributes:
      num_features: F, numbers of a patch.
      columns: names of the C columns.
      merge: patches that become one row.
      unit: a call has a multiple of this many patches; itself a multiple of `merge`.
      attends_both_ways: whether the tokens of an image see each other, later ones too. A step then has all of a
        image's tokens that are not computed yet, or none.
      whole_prompt: most tokens of a prompt with images, which all see each other; 0 where only an image's own do.
      in_windows_only: whether they do so in layers with a window alone, while others are causal.
      num_parts: E / D, 1 + the number of decoder layers that add a part of an embedding to hidden states (DeepStack).
      crosses: whether layers attend to what the tower returns, one row for a sound, by cross-attention
        (jaxengine.models.layers.attention.cross_attention); no token of the prompt stands for it.
      hears: whether it encodes sounds, and not images. Patches are frames of their spectrograms.
      frames: spectrogram frames of a patch, for a tower that hears.
      adapts: whether prompts with sounds run with the LoRA adapter that the checkpoint's folder has, if it has one.
    """

    num_features: int
    columns: tuple[str, ...]
    merge: int
    unit: int
    num_parts: int = 1
    attends_both_ways: bool = False
    whole_prompt: int = 0
    in_windows_only: bool = False
    crosses: bool = False
    hears: bool = False
    frames: int = 1
    adapts: bool = False

    @property
    def unused(self) -> tuple[str, ...]:
        """Return the prefixes of the model's names of tower tensors that this model does not use.

        None here; a subclass may have some.
        """
        return ()

    @property
    def aligns(self) -> bool:
        """Whether it is known which heads of the decoder's cross-attention follow a sound as its transcript does; False
        unless a subclass says so.
        """
        return False

    @property
    def window(self) -> int:
        """Return the most patches of a sound that are encoded together, by themselves: a longer one is several items to
        the scheduler (Media.in_windows).
        """
        return self.unit

    def with_generation(self, fields: Any) -> TowerConfig:
        """Return the configuration with what the model's generation_config.json adds, its ConfigFields. Here that is
        nothing: a subclass may read it, and raise ModelConfigError.
        """
        return self

    def make(self, hidden_size: int, build: Any) -> Any:
        """Build the tower, a flax.nnx module, for a model of this hidden size and a jaxengine.models.build.Build.

        Raises NotImplementedError here: each tower's own class overrides it.
        """
        raise NotImplementedError(f"{type(self).__name__} is not a tower of its own")
