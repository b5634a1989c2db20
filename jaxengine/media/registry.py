"""Table of processors, one row for each multimodal architecture. A processor is imported at its first use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from jaxengine.media.base.processor import MediaProcessor
from jaxengine.models.config.model_config import ModelConfig

# Class name of jaxengine.models.model_classes.MODELS -> "module:name" in jaxengine.media.processors of its processor's
# class, or of a function that chooses one.
PROCESSORS = {
    "LlavaForConditionalGeneration": "pixtral:llava_or_pixtral",
    "VipLlavaForConditionalGeneration": "llava:LlavaProcessor",
    "DeepseekVLForConditionalGeneration": "deepseek_vl:DeepseekVLProcessor",
    "JanusForConditionalGeneration": "deepseek_vl:JanusProcessor",
    "DeepseekVLV2ForCausalLM": "deepseek_vl2:DeepseekVL2Processor",
    "VideoLlama3ForConditionalGeneration": "token_positions:VideoLlama3Processor",
    "CLIPModel": "alone:AloneProcessor",
    "SiglipModel": "alone:AloneProcessor",
    "LlavaNextForConditionalGeneration": "llava_next:LlavaNextProcessor",
    "LlavaNextVideoForConditionalGeneration": "llava_next_video:LlavaNextVideoProcessor",
    "Granite4VisionForConditionalGeneration": "llava_next:LlavaNextProcessor",
    "LlavaOnevisionForConditionalGeneration": "llava_onevision:LlavaOnevisionProcessor",
    "RForConditionalGeneration": "llava_onevision:OnevisionImagesProcessor",
    "BeeForConditionalGeneration": "llava_onevision:OnevisionImagesProcessor",
    "PaliGemmaForConditionalGeneration": "paligemma:PaliGemmaProcessor",
    "Ovis2ForConditionalGeneration": "ovis2:Ovis2Processor",
    "Ovis": "ovis:OvisProcessor",
    "Ovis2_5": "ovis2_5:Ovis2_5Processor",
    "AyaVisionForConditionalGeneration": "cohere_vision:AyaVisionProcessor",
    "Cohere2VisionForConditionalGeneration": "cohere_vision:Cohere2VisionProcessor",
    "InternVLForConditionalGeneration": "internvl:internvl",
    "H2OVLChatModel": "h2ovl:H2OVLProcessor",
    "NVLM_D": "nvlm_d:NvlmDProcessor",
    "Eagle2_5_VLForConditionalGeneration": "eagle2_5:eagle2_5",
    "Gemma3ForConditionalGeneration": "gemma3:Gemma3Processor",
    "Gemma4ForConditionalGeneration": "gemma4_sounds:gemma4",
    "MllamaForConditionalGeneration": "mllama:MllamaProcessor",
    "MolmoForCausalLM": "molmo:MolmoProcessor",
    "Molmo2ForConditionalGeneration": "molmo2:Molmo2Processor",
    "MiniMaxM3SparseForConditionalGeneration": "minimax_m3:MiniMaxM3Processor",
    "MuseGlimmerForConditionalGeneration": "muse_glimmer:MuseGlimmerProcessor",
    "NemotronH_Omni_Reasoning_V3": "nemotron_h_omni_sounds:nemotron_h_omni",
    "NemotronH_Nano_VL_V2": "nemotron_vl:NemotronNanoVLProcessor",
    "Llama_Nemotron_Nano_VL": "nemotron_vl:LlamaNemotronVLProcessor",
    "AriaForConditionalGeneration": "aria:AriaProcessor",
    "Idefics2ForConditionalGeneration": "idefics2:Idefics2Processor",
    "Idefics3ForConditionalGeneration": "idefics3:Idefics3Processor",
    "ModernVBertModel": "idefics3:Idefics3Processor",
    "Llama4ForConditionalGeneration": "llama4:Llama4Processor",
    "SmolVLMForConditionalGeneration": "smolvlm:SmolVLMProcessor",
    "GraniteDoclingForConditionalGeneration": "granite_docling:GraniteDoclingProcessor",
    "Blip2ForConditionalGeneration": "blip2:Blip2Processor",
    "GLM4VForCausalLM": "glm4v_9b:Glm4v9bProcessor",
    "PerceptionLMForConditionalGeneration": "perception_lm:PerceptionLMProcessor",
    "Glm4vForConditionalGeneration": "glm4v:Glm4vProcessor",
    "Glm4vMoeForConditionalGeneration": "glm4v:Glm4vProcessor",
    "KimiVLForConditionalGeneration": "kimi_vl:KimiVLProcessor",
    "KimiK25ForConditionalGeneration": "kimi_k25:KimiK25Processor",
    "KimiK3ForConditionalGeneration": "kimi_k3:KimiK3Processor",
    "LightOnOcrForConditionalGeneration": "pixtral:LightOnOcrProcessor",
    "PaddleOCRVLForConditionalGeneration": "paddleocr_vl:PaddleOcrVLProcessor",
    "GlmOcrForConditionalGeneration": "glm4v:GlmOcrProcessor",
    "Exaone4_5_ForConditionalGeneration": "token_positions:Exaone4_5Processor",
    "HyperCLOVAXVisionV2ForConditionalGeneration": "token_positions:HyperClovaVisionProcessor",
    "Cosmos3EdgeForConditionalGeneration": "cosmos3_edge:Cosmos3EdgeProcessor",
    "OpenCUAForConditionalGeneration": "token_positions:OpenCuaProcessor",
    "KeyeForConditionalGeneration": "keye:KeyeProcessor",
    "KeyeVL1_5ForConditionalGeneration": "keye:KeyeImagesProcessor",
    "DotsOCRForCausalLM": "token_positions:DotsOcrProcessor",
    "LLaVAOneVision1_5_ForConditionalGeneration": "token_positions:LlavaOnevision15Processor",
    "GotOcr2ForConditionalGeneration": "tiles:GotOcr2Processor",
    "QianfanOCRForConditionalGeneration": "qianfan_ocr:QianfanOCRProcessor",
    "HunYuanVLForConditionalGeneration": "hunyuan_vl:HunYuanVLProcessor",
    "HYV4VLForConditionalGeneration": "hunyuan_vl:HYV4VLProcessor",
    "Ernie4_5_VLMoeForConditionalGeneration": "ernie4_5_vl:ErnieVLProcessor",
    "Lfm2VlForConditionalGeneration": "lfm2_vl:Lfm2VlProcessor",
    "Lfm3VlForConditionalGeneration": "lfm3_vl:Lfm3VlProcessor",
    "DeepseekOcr2ForConditionalGeneration": "deepseek_ocr2:DeepseekOcr2Processor",
    "DeepseekOCRForCausalLM": "deepseek_ocr:DeepseekOcrProcessor",
    "MiniCPMV": "minicpmv2_6:ResampledProcessor",
    "MiniCPMV4_6ForConditionalGeneration": "minicpmv:MiniCPMVProcessor",
    "MiniCPMV4_7ForConditionalGeneration": "minicpmv:MiniCPMVProcessor",
    "MiniCPMOcrForConditionalGeneration": "minicpmv:MiniCPMVProcessor",
    "Phi3VForCausalLM": "phi3_v:Phi3VisionProcessor",
    "Phi4MultimodalForCausalLM": "phi4_multimodal:Phi4MultimodalProcessor",
    "Phi4ForCausalLMV": "phi4_reasoning_vision:Phi4ReasoningVisionProcessor",
    "Mistral3ForConditionalGeneration": "pixtral:PixtralProcessor",
    "MistralLarge4ForConditionalGeneration": "pixtral:PixtralProcessor",
    "Qwen2VLForConditionalGeneration": "qwen2_vl:Qwen2VLProcessor",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_vl:Qwen2_5VLProcessor",
    "Qwen3VLForConditionalGeneration": "qwen3_vl:Qwen3VLProcessor",
    "Cosmos3OmniForConditionalGeneration": "qwen3_vl:Qwen3VLProcessor",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl:Qwen3VLProcessor",
    "Qwen3_5ForConditionalGeneration": "qwen3_vl:Qwen3VLProcessor",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_vl:Qwen3VLProcessor",
    "Qwen4ExpForConditionalGeneration": "qwen3_vl:Qwen3VLProcessor",
    "Qwen2_5OmniThinkerForConditionalGeneration": "qwen_omni:qwen2_5_omni",
    "Qwen3OmniMoeThinkerForConditionalGeneration": "qwen_omni:qwen3_omni",
    "WhisperForConditionalGeneration": "whisper:WhisperProcessor",
    "CohereAsrForConditionalGeneration": "cohere_asr:CohereAsrProcessor",
    "MoonshineForConditionalGeneration": "moonshine:MoonshineProcessor",
    "Qwen2AudioForConditionalGeneration": "sounds:Qwen2AudioProcessor",
    "VoxtralForConditionalGeneration": "sounds:VoxtralProcessor",
    "AudioFlamingo3ForConditionalGeneration": "audioflamingo3:AudioFlamingo3Processor",
    "MusicFlamingoForConditionalGeneration": "audioflamingo3:MusicFlamingoProcessor",
    "MossTranscribeDiarizeForConditionalGeneration": "moss_transcribe:MossTranscribeProcessor",
    "FunAsrNanoForConditionalGeneration": "fun_asr_nano:FunAsrNanoProcessor",
    "VibeVoiceAsrForConditionalGeneration": "vibevoice_asr:VibeVoiceAsrProcessor",
    "GlmAsrForConditionalGeneration": "audioflamingo3:GlmAsrProcessor",
    "Qwen3ASRForConditionalGeneration": "sounds:Qwen3ASRProcessor",
    "GraniteSpeechForConditionalGeneration": "granite_speech:GraniteSpeechProcessor",
    "GraniteSpeechPlusForConditionalGeneration": "granite_speech:GraniteSpeechProcessor",
}


def processor_class(architecture: str) -> Callable[[Path, Mapping[str, Any], ModelConfig, Any], MediaProcessor]:
    """Return what makes the processor of an architecture, with the arguments of `processor_for`. A part in brackets at
    the end of its name does not count. Raises KeyError for an architecture without a row.
    """
    module, _, name = PROCESSORS[architecture.partition("[")[0]].partition(":")
    return getattr(import_module(f"jaxengine.media.processors.{module}"), name)


def processor_for(
    folder: Path, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any
) -> MediaProcessor | None:
    """Return the processor of a checkpoint; None if the model has no tower or it is not used.

    folder: of the checkpoint. config_json: content of its config.json. tokenizer: the model's Tokenizer; None if
    prompts are token ids. Raises ModelFileError for invalid settings, ModelConfigError for an invalid configuration.
    """
    if model_config.tower is None:
        return None
    return processor_class(model_config.architecture)(folder, config_json, model_config, tokenizer)
