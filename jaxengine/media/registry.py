"""Table of processors, one row for each multimodal architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxengine.media.base.processor import MediaProcessor
from jaxengine.media.processors.cohere_vision import AyaVisionProcessor, Cohere2VisionProcessor
from jaxengine.media.processors.deepseek_ocr2 import DeepseekOcr2Processor
from jaxengine.media.processors.dots_ocr import DotsOcrProcessor
from jaxengine.media.processors.ernie4_5_vl import ErnieVLProcessor
from jaxengine.media.processors.gemma3 import Gemma3Processor
from jaxengine.media.processors.gemma4_sounds import gemma4
from jaxengine.media.processors.glm4v import Glm4vProcessor, GlmOcrProcessor
from jaxengine.media.processors.got_ocr2 import GotOcr2Processor
from jaxengine.media.processors.granite_speech import GraniteSpeechProcessor
from jaxengine.media.processors.hunyuan_vl import HunYuanVLProcessor
from jaxengine.media.processors.idefics3 import Idefics3Processor
from jaxengine.media.processors.internvl import internvl
from jaxengine.media.processors.kimi_k25 import KimiK25Processor
from jaxengine.media.processors.kimi_vl import KimiVLProcessor
from jaxengine.media.processors.lfm2_vl import Lfm2VlProcessor
from jaxengine.media.processors.lighton_ocr import LightOnOcrProcessor
from jaxengine.media.processors.llama4 import Llama4Processor
from jaxengine.media.processors.llava import LlavaProcessor
from jaxengine.media.processors.llava_next import LlavaNextProcessor
from jaxengine.media.processors.llava_onevision import LlavaOnevisionProcessor
from jaxengine.media.processors.minicpmv import MiniCPMVProcessor
from jaxengine.media.processors.paddleocr_vl import PaddleOcrVLProcessor
from jaxengine.media.processors.paligemma import PaliGemmaProcessor
from jaxengine.media.processors.pixtral import PixtralProcessor
from jaxengine.media.processors.qianfan_ocr import QianfanOCRProcessor
from jaxengine.media.processors.qwen2_vl import Qwen2_5VLProcessor, Qwen2VLProcessor
from jaxengine.media.processors.qwen3_vl import Qwen3VLProcessor
from jaxengine.media.processors.qwen_omni import qwen2_5_omni, qwen3_omni
from jaxengine.media.processors.smolvlm import SmolVLMProcessor
from jaxengine.media.processors.sounds import Qwen2AudioProcessor, Qwen3ASRProcessor, VoxtralProcessor
from jaxengine.media.processors.whisper import WhisperProcessor
from jaxengine.models.config.model_config import ModelConfig


def llava_or_pixtral(
    folder: Path, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any
) -> MediaProcessor:
    """Return the processor of a LLaVA checkpoint: a PixtralProcessor if its vision tower is Pixtral's, which takes
    images of any aspect ratio, else a LlavaProcessor.

    folder: of the checkpoint. config_json: content of its config.json. tokenizer: None without one. Raises
    ModelFileError and ModelConfigError for missing or invalid files and settings.
    """
    kind = LlavaProcessor if model_config.tower is None or not model_config.tower.columns else PixtralProcessor
    return kind(folder, config_json, model_config, tokenizer)


# Keys are the class names of jaxengine.models.model_classes.MODELS.
PROCESSORS: dict[str, Callable[[Path, Mapping[str, Any], ModelConfig, Any], MediaProcessor]] = {
    "LlavaForConditionalGeneration": llava_or_pixtral,
    "LlavaNextForConditionalGeneration": LlavaNextProcessor,
    "LlavaOnevisionForConditionalGeneration": LlavaOnevisionProcessor,
    "PaliGemmaForConditionalGeneration": PaliGemmaProcessor,
    "PaliGemma2ForConditionalGeneration": PaliGemmaProcessor,
    "AyaVisionForConditionalGeneration": AyaVisionProcessor,
    "Cohere2VisionForConditionalGeneration": Cohere2VisionProcessor,
    "InternVLForConditionalGeneration": internvl,
    "Gemma3ForConditionalGeneration": Gemma3Processor,
    "Gemma4ForConditionalGeneration": gemma4,
    "Idefics3ForConditionalGeneration": Idefics3Processor,
    "Llama4ForConditionalGeneration": Llama4Processor,
    "SmolVLMForConditionalGeneration": SmolVLMProcessor,
    "Glm4vForConditionalGeneration": Glm4vProcessor,
    "Glm4vMoeForConditionalGeneration": Glm4vProcessor,
    "KimiVLForConditionalGeneration": KimiVLProcessor,
    "KimiK25ForConditionalGeneration": KimiK25Processor,
    "LightOnOcrForConditionalGeneration": LightOnOcrProcessor,
    "PaddleOCRVLForConditionalGeneration": PaddleOcrVLProcessor,
    "GlmOcrForConditionalGeneration": GlmOcrProcessor,
    "DotsOCRForCausalLM": DotsOcrProcessor,
    "GotOcr2ForConditionalGeneration": GotOcr2Processor,
    "QianfanOCRForConditionalGeneration": QianfanOCRProcessor,
    "Lfm2VlForConditionalGeneration": Lfm2VlProcessor,
    "DeepseekOcr2ForConditionalGeneration": DeepseekOcr2Processor,
    "GraniteVisionForConditionalGeneration": LlavaNextProcessor,
    "HunYuanVLForConditionalGeneration": HunYuanVLProcessor,
    "Ernie4_5_VLMoeForConditionalGeneration": ErnieVLProcessor,
    "MiniCPMV4_6ForConditionalGeneration": MiniCPMVProcessor,
    "MiniCPMV4_7ForConditionalGeneration": MiniCPMVProcessor,
    "MiniCPMOcrForConditionalGeneration": MiniCPMVProcessor,
    "Mistral3ForConditionalGeneration": PixtralProcessor,
    "Mistral4ForConditionalGeneration": PixtralProcessor,
    "Qwen2VLForConditionalGeneration": Qwen2VLProcessor,
    "Qwen2_5_VLForConditionalGeneration": Qwen2_5VLProcessor,
    "Qwen3VLForConditionalGeneration": Qwen3VLProcessor,
    "Qwen3VLMoeForConditionalGeneration": Qwen3VLProcessor,
    "Qwen3_5ForConditionalGeneration": Qwen3VLProcessor,
    "Qwen3_5MoeForConditionalGeneration": Qwen3VLProcessor,
    "Qwen2_5OmniThinkerForConditionalGeneration": qwen2_5_omni,
    "Qwen3OmniMoeThinkerForConditionalGeneration": qwen3_omni,
    "WhisperForConditionalGeneration": WhisperProcessor,
    "Qwen2AudioForConditionalGeneration": Qwen2AudioProcessor,
    "VoxtralForConditionalGeneration": VoxtralProcessor,
    "Qwen3ASRForConditionalGeneration": Qwen3ASRProcessor,
    "GraniteSpeechForConditionalGeneration": GraniteSpeechProcessor,
}


def processor_for(
    folder: Path, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any
) -> MediaProcessor | None:
    """Return the processor of a checkpoint; None if the model has no tower or it is not used.

    Args:
      folder: of the checkpoint, with its processors' settings.
      config_json: content of its config.json.
      model_config: of the model, with its towers.
      tokenizer: the model's jaxengine.tokens.tokenizer.Tokenizer; None without one, in which case prompts are token
        ids.

    Raises ModelFileError for invalid settings, ModelConfigError for an invalid configuration.
    """
    if model_config.tower is None:
        return None
    return PROCESSORS[model_config.architecture](folder, config_json, model_config, tokenizer)
