"""Common parts of the configurations of draft heads: EAGLE-3 (eagle3.py) and DFlash (dflash.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxengine.models.config.fields import MAX_LAYERS, ConfigFields, ModelConfigError
from jaxengine.models.config.model_config import ModelConfig

SPECULATORS = "speculators_model_type"


@dataclass(frozen=True)
class DraftHeadConfig(ModelConfig):
    """ModelConfig of the layers of a head that drafts from hidden states of a target model.

    Attributes:
      draft_vocab_size: number of tokens that the head may draft, at most the vocabulary's.
      target_size: size of a hidden state of the target model.
      streams: hidden states of the target that the head reads, each given by the number of layers before it.
      own_embedding: whether it has its own embeddings; otherwise it uses the target's.
      own_head: whether it has its own LM head; otherwise it uses the target's, and drafts any token.
    """

    draft_vocab_size: int = 0
    target_size: int = 0
    streams: tuple[int, ...] = ()
    own_embedding: bool = False
    own_head: bool = True


def joined_fields(
    fields: ConfigFields, kind: str, defaults: Mapping[str, Any], what: str
) -> tuple[ConfigFields, ConfigFields]:
    """Return (reader of the fields of a file of the library speculators, reader of those of its layer alone). The
    fields of its transformer_layer_config are moved up; fields outside of it take precedence, and `defaults` give way
    to both.

    kind: what speculators_model_type must be. what: name of such a head, for the error. Raises ModelConfigError for
    another kind, and without a transformer_layer_config.
    """
    layer = fields.mapping("transformer_layer_config")
    if fields.text(SPECULATORS, None) != kind or layer is None:
        raise fields.fail(SPECULATORS, f'"{kind}", with a transformer_layer_config, for {what}')
    given = {name: value for name, value in fields.raw.items() if value is not None}
    return ConfigFields({**defaults, **layer, **given}), ConfigFields(layer)


def vocabulary_of(fields: ConfigFields, vocab_size: int) -> int:
    """Return the field draft_vocab_size, by default vocab_size. Raises ModelConfigError if it is larger."""
    size = fields.integer("draft_vocab_size", vocab_size)
    if size > vocab_size:
        raise fields.fail("draft_vocab_size", f"at most vocab_size, {vocab_size}")
    return size


def check_numbers(name: str, listed: Any) -> None:
    """Raise ModelConfigError, which names the field, unless `listed` is a list of at most MAX_LAYERS whole numbers
    >= 0.
    """
    wrong = not isinstance(listed, list) or len(listed) > MAX_LAYERS
    if wrong or any(type(each) is not int or each < 0 for each in listed):
        raise ModelConfigError(f"{name} must be a list of whole numbers >= 0, got {str(listed)[:80]}")
