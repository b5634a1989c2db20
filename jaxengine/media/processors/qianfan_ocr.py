"""Processor of Qianfan-OCR: InternVL's for images alone; in prompts a text stands for an image."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxengine.media.processors.internvl import context_id
from jaxengine.media.processors.settings import WHOLE, token_text, token_texts
from jaxengine.media.processors.text_placeholder import TextPlaceholderProcessor
from jaxengine.models.params.files import read_object

_NAME = "image_placeholder_token"


class QianfanOCRProcessor(TextPlaceholderProcessor):
    """Processor of QianfanOCRForConditionalGeneration. It ignores crop_to_patches in the checkpoint's file, as
    transformers' does.
    """

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: Any, tokenizer: Any):
        """Read the checkpoint's settings, and tokenize the placeholder, start and end texts. Raises ModelConfigError or
        ModelFileError for missing or invalid settings.
        """
        super().__init__(folder, config_json, model_config, tokenizer)
        path, whole = Path(folder) / WHOLE, read_object(folder, WHOLE) or {}
        self.place_text(path, _NAME, token_text(path, whole, _NAME, "<image>"))
        texts = token_texts(folder, start_image_token="<img>", end_image_token="</img>")
        self.start, self.end = map(self.ids, texts)

    def placeholder_id(self) -> int:
        """Return image_token_id of config.json, or else the token <IMG_CONTEXT>: transformers' default is <think> in
        Qwen 3's tokenizer. Raises ModelConfigError as `token_id` and `context_id`.
        """
        has_id = self.config_fields.has("image_token_id")
        return self.token_id("image_token_id") if has_id else context_id(self.tokenizer)
