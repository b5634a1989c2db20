"""TowerConfig: properties of a model's tower, which encodes images or audio, that an engine needs. Contains no
arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Name of a part of a model's weights (jaxengine.models.build.Build.whole_parts), and a model's attributes with towers.
TOWER = "tower"
TOWERS = (TOWER, "sound_tower")
# Columns of patches are integers, so that positions between two rows are in units of 1 / SHARES.
SHARES = 1 << 24
# In a step's index of embeddings: a token without one that attends in both directions.
BOTH_WAYS = -2


@dataclass(frozen=True, kw_only=True)
class TowerConfig:
    """Sizes and properties of a tower, which encodes patches of images, or frames of audio, to embeddings. A subclass,
    next to its tower, has the sizes of a family.

    A tower is a flax.nnx module; `tower(patches, columns)` takes P patches f32[P, F] with C integers for each in
    columns i32[C, P], and returns [P / merge, E] in the model's dtype. Several images share a call: a column
    identifies the image of a patch, or all images have `unit` patches. Padding after the last image is zeros,
    with -1 in the columns.

    Attributes:
      num_features: F, number of values of a patch.
      columns: names of the C columns.
      merge: number of patches that are merged to one row of the result.
      unit: the number of patches in a call is a multiple of this, which is itself a multiple of `merge`.
      attends_both_ways: whether the tokens of an image attend to each other in both directions. A step then has either
        all of an image's tokens that are not computed yet, or none.
      attends_across: whether the tokens of all images of a prompt do, but not to the text between them that follows
        (LayerAttention.mutual). A step then has either all of a prompt's tokens from the first image to the last that
        are not computed yet, or none.
      multiplier: factor of all embeddings that the tower gives.
      adds: whether embeddings are added to those of their tokens, instead of replacing them.
      whole_prompt: largest number of tokens of a prompt with images if all of its tokens attend to each other; 0 if
        only those of an image do.
      in_windows_only: whether attention in both directions is of layers with a window only, and others are causal.
      num_parts: E / D, 1 + the number of decoder layers that add a part of an embedding to hidden states (DeepStack).
      part_layers: for each part after the first, the number of decoder layers before it; () if there is one after each
        of the first layers.
      crosses: whether layers attend to the tower's result by cross-attention
        (jaxengine.models.layers.attention), with one row for an item. Unless `by_place` is set, that is one sound, to
        which all tokens attend, without a placeholder in the prompt.
      by_place: with `crosses`, whether items are images, each with one token in the prompt from which on tokens attend
        to it. What tokens before the first image compute depends on all of them.
      hears: whether it encodes audio instead of images. Patches are then frames of spectrograms.
      frames: spectrogram frames of a patch, for a tower that encodes audio.
      rate: samples a second, for a tower that encodes audio.
      adapter: folder, within the checkpoint's, of the LoRA adapter with which prompts with images or audio run, if it
        is there; None for a family without one.
    """

    num_features: int
    columns: tuple[str, ...]
    merge: int
    unit: int
    num_parts: int = 1
    part_layers: tuple[int, ...] = ()
    attends_both_ways: bool = False
    attends_across: bool = False
    multiplier: float = 1.0
    adds: bool = False
    whole_prompt: int = 0
    in_windows_only: bool = False
    crosses: bool = False
    by_place: bool = False
    hears: bool = False
    frames: int = 1
    rate: int = 16_000
    adapter: str | None = None

    @property
    def crossed_layers(self) -> tuple[int, ...]:
        """Numbers of the decoder's layers that attend to images and do nothing else; () for other towers."""
        return ()

    @property
    def unused(self) -> tuple[str, ...]:
        """Prefixes of the model's names of tower tensors that this model does not use. Empty here; a subclass may have
        some.
        """
        return ()

    @property
    def aligns(self) -> bool:
        """Whether the heads of the decoder's cross-attention that align a transcript with its audio are known. False
        unless a subclass overrides it.
        """
        return False

    @property
    def has_rules(self) -> bool:
        """Whether the processor has rules for the tokens of transcripts, with those that are never chosen
        (jaxengine.scheduler.base.media.TranscriptRules). False unless a subclass overrides it.
        """
        return False

    @property
    def layers_with_parts(self) -> int:
        """Number of decoder layers before the last part; 0 with one part."""
        return max(self.part_layers, default=self.num_parts - 1)

    @property
    def window(self) -> int:
        """Largest number of patches of an audio item that are encoded together. The scheduler treats a longer one as
        several items (Media.in_windows).
        """
        return self.unit

    def with_generation(self, fields: Any) -> TowerConfig:
        """Return the configuration extended by `fields`, the ConfigFields of the model's generation_config.json.
        Returns self here. A subclass that reads them may raise ModelConfigError.
        """
        return self

    def make(self, hidden_size: int, build: Any) -> Any:
        """Return the tower, a flax.nnx module, for a model of this hidden size and a jaxengine.models.build.Build.
        Raises NotImplementedError unless a subclass overrides it.
        """
        raise NotImplementedError(f"{type(self).__name__} is not a tower of its own")
