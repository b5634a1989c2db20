"""InputSource: what the preparation of requests needs of an opened model. Needs neither jax nor the model's class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from jaxengine.config.engine_config import EngineConfig
from jaxengine.config.features.pooling_model import PoolingModel
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.params.files import ADAPTER_CONFIG
from jaxengine.models.weights.gguf.header import header_of
from jaxengine.tokens.tokenizer import Tokenizer
from jaxengine.tokens.usual_templates.registry import usual_template

# Vectors f32[D] of a control vector by the names of their taps.
ControlVector = Mapping[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class InputSource:
    """Opened model without its weights.

    Attributes:
      path: file or folder.
      config: the model's shape.
      generation_defaults: sampling parameters suggested by the model's authors, or set by the user.
      tokenizer_path: folder of a tokenizer that replaces the model's own; None for the model's own.
      pooling: how a pooling model computes its results; None for a generating model.
      control_vectors: control vectors that the option steering_vectors names, by name.
    """

    path: Path
    config: ModelConfig
    generation_defaults: dict[str, Any]
    tokenizer_path: Path | None = None
    pooling: PoolingModel | None = None
    control_vectors: Mapping[str, ControlVector] = field(default_factory=dict)

    def without_weights(self) -> InputSource:
        """Return an InputSource with these attributes, which keeps no weights of a ModelSource."""
        return InputSource(**{each.name: getattr(self, each.name) for each in fields(InputSource)})

    @property
    def media_adapter(self) -> Path | None:
        """Folder of the LoRA adapter that the checkpoint has for prompts with sounds (Granite Speech) or images
        (Phi-4-multimodal); None if it has none, or was opened without the tower whose prompts it is for.
        """
        named = (self.path / tower.adapter for tower in self.config.towers if tower.adapter is not None)
        return next((folder for folder in named if (folder / ADAPTER_CONFIG).exists()), None)

    def load_tokenizer(self, config: EngineConfig) -> Tokenizer | None:
        """Return the model's tokenizer, or the one that replaces it; None with skip_tokenizer_init. It has the
        chat template that tokenizer_mode names, else its own, else the usual one of the model's family, if any, and
        chat_template_content_format. It lower-cases texts if sentence-transformers' files say so.

        Raises ModelFileError if its files are missing or invalid.
        """
        if config.skip_tokenizer_init:
            return None
        folder = self.tokenizer_path or self.path
        if folder.is_dir() or self.tokenizer_path is not None:
            sentence = None if self.pooling is None else self.pooling.sentence
            lowers = sentence is not None and sentence.do_lower_case
            tokenizer = Tokenizer.from_hf_folder(folder, lowers=lowers, mode=config.tokenizer_mode)
        else:
            tokenizer = Tokenizer.from_gguf(header_of(self.path).metadata, path=str(self.path))
        has_own = tokenizer.chat_template is not None
        if (usual := usual_template(config.tokenizer_mode, self.config.architecture, has_own)) is not None:
            tokenizer.chat_template, tokenizer.dialect = usual.source, usual.dialect
        tokenizer.content_format = config.chat_template_content_format
        return tokenizer
