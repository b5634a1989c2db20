"""GOT-OCR 2.0 (Wei et al. 2024, arXiv:2409.01704), as transformers stores it: Qwen2 with SAM's encoder as its vision
tower.
"""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.families.llama import LlamaForCausalLM
from jaxengine.models.families.llava import NAMES
from jaxengine.models.families.wrapped import Wrapper
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.sam import FLATTENED, read_got_ocr2


class GotOcr2ForConditionalGeneration(Wrapper, LlamaForCausalLM):
    """Qwen2, or another model with Llama's layers, with a vision tower."""

    text: ClassVar[str] = "qwen2"
    checkpoint_names: ClassVar[CheckpointNames] = NAMES._replace(flattened=FLATTENED)

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = fields.with_defaults(tie_word_embeddings=True)
        return cls.read_text(fields) | {"tower": read_got_ocr2(fields)}
