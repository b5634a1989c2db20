"""Granite Speech (IBM 2025, arXiv:2505.08699): Granite with audio in the prompt, for which some checkpoints have a LoRA
adapter.
"""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.families.granite import GraniteForCausalLM
from jaxengine.models.families.wrapped import Wrapper
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.sound.granite_speech import CONVOLUTIONS, PROJECTOR, TOWER, read_granite_speech

_PARTS = (f"{TOWER}.", f"{PROJECTOR}.")


class GraniteSpeechForConditionalGeneration(Wrapper, GraniteForCausalLM):
    """Granite with audio of up to five minutes. Prompts with audio run with the LoRA adapter in the checkpoint's
    folder, if there is one.

    joins_layers: whether the tower's configuration may name layers whose hidden states the Q-Former reads beside the
    last ones.
    """

    joins_layers: ClassVar[bool] = False
    text: ClassVar[str] = "granite"
    # Names in published checkpoints, and names of transformers 5 in memory.
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(
            ("language_model.model.", "model."),
            ("language_model.lm_head.", "lm_head."),
            ("model.language_model.", "model."),
            *((f"model.{part}", part) for part in _PARTS),
        ),
        tower=_PARTS,
        flattened=CONVOLUTIONS,
        unused_ends=(".batch_norm.num_batches_tracked",),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        shared = cls.read_text(fields) | {"tie_word_embeddings": fields.boolean("tie_word_embeddings", True)}
        return shared | {"tower": read_granite_speech(fields, joins=cls.joins_layers)}


class GraniteSpeechPlusForConditionalGeneration(GraniteSpeechForConditionalGeneration):
    """Granite Speech whose Q-Former also reads hidden states of earlier layers of the tower."""

    joins_layers: ClassVar[bool] = True
