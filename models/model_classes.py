"""The class of each architecture: one row for each. A family is imported when its class is first looked up: a start
imports its own model's family and none of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from jaxengine.models.causal_lm import CausalLM

if TYPE_CHECKING:
    from jaxengine.models.layers.encoder import Encoder

_Model = TypeVar("_Model")


class ClassTable(MutableMapping[str, type[_Model]]):
    """Classes by name, imported at the first look-up of each; iterating over values imports them one by one, in order.

    modules: class name -> module in jaxengine.models.families, or "module:class" where the class has another name.
    further: returns classes of further names; called once, when a name is not in `modules`, or all are asked for. A row
    that is set replaces the class of its name. Raises KeyError for an unknown name, and the errors of importing a
    family.
    """

    def __init__(self, modules: Mapping[str, str], further: Callable[[], Mapping[str, type[_Model]]] = dict):
        self._rows: dict[str, Any] = dict(modules)  # a class once it has been looked up
        self._further = further

    def __getitem__(self, name: str) -> type[_Model]:
        if name not in self:
            raise KeyError(name)
        if isinstance(row := self._rows[name], str):
            module, _, attribute = row.partition(":")
            row = self._rows[name] = getattr(import_module(f"jaxengine.models.families.{module}"), attribute or name)
        return row

    def __setitem__(self, name: str, model: type[_Model]) -> None:
        self._rows[name] = model

    def __delitem__(self, name: str) -> None:
        del self._rows[name]

    def __contains__(self, name: object) -> bool:
        return name in self._rows or name in self._all()

    def __iter__(self) -> Iterator[str]:
        listed = dict.fromkeys(self._rows)
        yield from listed
        yield from [name for name in self._all() if name not in listed]

    def __len__(self) -> int:
        return len(self._all())

    def _all(self) -> dict[str, Any]:
        """Return all rows. The first call adds those of `further`, which do not replace rows of the same name."""
        for name, model in self._further().items():
            self._rows.setdefault(name, model)
        self._further = dict  # after that: another thread may look up a name in the meantime
        return self._rows


def _declared() -> dict[str, type[CausalLM]]:
    """Return the classes of the families that are rows of the tables jaxengine.models.families.declared_*, by the
    name that a config.json has in "architectures".
    """
    from jaxengine.models.families.declared import declared_class
    from jaxengine.models.families.declared_alibi import ALIBI_ROWS
    from jaxengine.models.families.declared_dense import DENSE_ROWS
    from jaxengine.models.families.declared_experts import EXPERT_ROWS
    from jaxengine.models.families.declared_hub import HUB_ROWS
    from jaxengine.models.families.declared_kinds import KIND_ROWS
    from jaxengine.models.families.declared_loops import LOOP_ROWS
    from jaxengine.models.families.declared_mixtures import MIXTURE_ROWS
    from jaxengine.models.families.declared_rows import ROWS_BY_NAME
    from jaxengine.models.families.declared_states import STATE_ROWS

    tables = (ROWS_BY_NAME, DENSE_ROWS, EXPERT_ROWS, KIND_ROWS, MIXTURE_ROWS, HUB_ROWS, STATE_ROWS, ALIBI_ROWS)
    tables = (*tables, LOOP_ROWS)
    return {name: declared_class(name, row) for rows in tables for name, row in rows.items()}


# Keys are the class names that config.json lists under "architectures".
_MODULES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "MiMoForCausalLM": "mimo",
    "Qwen3ForCausalLM": "qwen3",
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Phi3ForCausalLM": "phi3",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "DeciLMForCausalLM": "decilm",
    "GraniteForCausalLM": "granite",
    "SeedOssForCausalLM": "seed_oss",
    "InternLM3ForCausalLM": "internlm3",
    "SolarForCausalLM": "solar",
    "MiniCPMForCausalLM": "minicpm",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Rnj1ForCausalLM": "rnj1",
    "Gemma3nForCausalLM": "gemma3n",
    "Gemma3nForConditionalGeneration": "gemma3n",
    "Gemma4ForCausalLM": "gemma4",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Gemma4UnifiedForCausalLM": "gemma4_unified",
    "Gemma4UnifiedForConditionalGeneration": "gemma4_unified",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "SmolLM3ForCausalLM": "smollm3",
    "CohereForCausalLM": "cohere",
    "Cohere2ForCausalLM": "cohere2",
    "Exaone4ForCausalLM": "exaone4",
    "Exaone4_5_ForConditionalGeneration": "exaone4",
    "Starcoder2ForCausalLM": "starcoder2",
    "WhisperForConditionalGeneration": "whisper",
    "CohereAsrForConditionalGeneration": "cohere_asr",
    "MoonshineForConditionalGeneration": "moonshine",
    "Qwen2AudioForConditionalGeneration": "qwen2_audio",
    "VoxtralForConditionalGeneration": "qwen2_audio",
    "Qwen3ASRForConditionalGeneration": "qwen3_asr",
    "AudioFlamingo3ForConditionalGeneration": "audioflamingo3",
    "MusicFlamingoForConditionalGeneration": "audioflamingo3",
    "MossTranscribeDiarizeForConditionalGeneration": "moss_transcribe",
    "FunAsrNanoForConditionalGeneration": "fun_asr_nano",
    "VibeVoiceAsrForConditionalGeneration": "vibevoice_asr",
    "GlmAsrForConditionalGeneration": "glmasr",
    "GraniteSpeechForConditionalGeneration": "granite_speech",
    "GraniteSpeechPlusForConditionalGeneration": "granite_speech",
    "Qwen2_5OmniThinkerForConditionalGeneration": "qwen_omni",
    "Qwen3OmniMoeThinkerForConditionalGeneration": "qwen_omni",
    "NemotronForCausalLM": "nemotron",
    "ApertusForCausalLM": "apertus",
    "GptOssForCausalLM": "gpt_oss",
    "Glm4MoeForCausalLM": "glm4_moe",
    "Dots1ForCausalLM": "dots1",
    "OlmoeForCausalLM": "olmoe",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "MuseGlimmerForConditionalGeneration": "muse_glimmer",
    "MuseSparkForConditionalGeneration": "muse_spark",
    "InklingForCausalLM": "inkling",
    "ZayaForCausalLM": "zaya",
    "InklingForConditionalGeneration": "inkling",
    "MiniMaxM3VLForCausalLM": "minimax_m3",
    "MiniMaxM3SparseForConditionalGeneration": "minimax_m3",
    "Ernie4_5_MoeForCausalLM": "ernie4_5_moe",
    "HunYuanMoEV1ForCausalLM": "hunyuan_moe",
    "Llama4ForCausalLM": "llama4",
    "Llama4ForConditionalGeneration": "llama4",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "DiffLlamaForCausalLM": "diffllama",
    "DoryForCausalLM": "dory",
    "JetMoeForCausalLM": "jetmoe",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "AXK2ForCausalLM": "axk2",
    "Dots3NoteForCausalLM": "dots3_note",
    "DeepseekV4ForCausalLM": "deepseek_v4",
    "DeepseekV41ForCausalLM": "deepseek_v41",
    "LongcatFlashForCausalLM": "longcat_flash",
    "GlmMoeDsaForCausalLM": "glm_moe_dsa",
    "HYV4ForCausalLM": "hy_v4",
    "Glm5NextForConditionalGeneration": "glm5_next",
    "MiniCPM3ForCausalLM": "minicpm3",
    "GlmForCausalLM": "glm",
    "Glm4ForCausalLM": "glm4",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "HunYuanDenseV1ForCausalLM": "hunyuan_dense",
    "Ministral3ForCausalLM": "ministral3",
    "Mistral3ForConditionalGeneration": "ministral3",
    "MistralLarge4ForConditionalGeneration": "mistral_large4",
    "Qwen3NextForCausalLM": "qwen3_next",
    "LaraMiniForCausalLM": "lara_mini",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2",
    "GraniteMoeHybridForCausalLM": "granite_moe_hybrid",
    "FalconH1ForCausalLM": "falcon_h1",
    "Zamba2ForCausalLM": "zamba2",
    "ZambaForCausalLM": "zamba",
    "NemotronHForCausalLM": "nemotron_h",
    "NemotronH_Omni_Reasoning_V3": "nemotron_h_omni",
    "NemotronH_Nano_VL_V2": "nemotron_h_omni",
    "Llama_Nemotron_Nano_VL": "llama_nemotron_vl",
    "KimiLinearForCausalLM": "kimi_linear",
    "AliceAIForCausalLM": "alice_ai",
    "BailingHybridForCausalLM": "bailing_hybrid",
    "BailingMoeV3ForCausalLM": "bailing_hybrid",
    "BailingMoeV2_5ForCausalLM": "bailing_moe_linear",
    "OlmoHybridForCausalLM": "olmo_hybrid",
    "GraniteMoeForCausalLM": "granite_moe",
    "GraniteMoeSharedForCausalLM": "granite_moe",
    "GraniteMoeSWAForCausalLM": "granite_moe",
    "PhiMoEForCausalLM": "phimoe",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
    "Qwen4ExpForCausalLM": "qwen4_exp",
    "Qwen4ExpForConditionalGeneration": "qwen4_exp",
    "LlavaForConditionalGeneration": "llava",
    "Qwen2VLForConditionalGeneration": "qwen2_vl",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_vl",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Cosmos3OmniForConditionalGeneration": "cosmos3",
    "Cosmos3EdgeForConditionalGeneration": "cosmos3_edge",
    "OpenCUAForConditionalGeneration": "opencua",
    "KeyeForConditionalGeneration": "keye",
    "KeyeVL1_5ForConditionalGeneration": "keye",
    "VipLlavaForConditionalGeneration": "llava",
    "DeepseekVLForConditionalGeneration": "deepseek_vl",
    "JanusForConditionalGeneration": "deepseek_vl",
    "DeepseekVLV2ForCausalLM": "deepseek_vl2",
    "VideoLlama3ForConditionalGeneration": "video_llama3",
    "LlavaNextForConditionalGeneration": "llava",
    "LlavaNextVideoForConditionalGeneration": "llava",
    "Granite4VisionForConditionalGeneration": "granite4_vision",
    "LlavaOnevisionForConditionalGeneration": "llava",
    "RForConditionalGeneration": "normed_onevision",
    "BeeForConditionalGeneration": "normed_onevision",
    "PaliGemmaForConditionalGeneration": "paligemma",
    "Ovis2ForConditionalGeneration": "ovis2",
    "Ovis": "ovis2",
    "Ovis2_5": "ovis2_5",
    "AyaVisionForConditionalGeneration": "cohere_vision",
    "Cohere2VisionForConditionalGeneration": "cohere_vision",
    "InternVLForConditionalGeneration": "internvl",
    "H2OVLChatModel": "h2ovl",
    "NVLM_D": "nvlm_d",
    "Eagle2_5_VLForConditionalGeneration": "eagle2_5",
    "MllamaForCausalLM": "mllama",
    "MllamaForConditionalGeneration": "mllama",
    "GLM4VForCausalLM": "glm4v_9b",
    "PerceptionLMForConditionalGeneration": "perception_lm",
    "MolmoForCausalLM": "molmo",
    "Molmo2ForConditionalGeneration": "molmo2",
    "AriaTextForCausalLM": "aria",
    "AriaForConditionalGeneration": "aria",
    "Idefics2ForConditionalGeneration": "idefics2",
    "Idefics3ForConditionalGeneration": "idefics3",
    "SmolVLMForConditionalGeneration": "idefics3",
    "GraniteDoclingForConditionalGeneration": "granite_docling",
    "Blip2ForConditionalGeneration": "blip2",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl",
    "Glm4vForConditionalGeneration": "glm4v",
    "Glm4vMoeForConditionalGeneration": "glm4v",
    "Phi3VForCausalLM": "phi3_v",
    "Phi4MultimodalForCausalLM": "phi4_multimodal",
    "Phi4ForCausalLMV": "phi4_reasoning_vision",
    "KimiVLForConditionalGeneration": "kimi_vl",
    "KimiK25ForConditionalGeneration": "kimi_k25",
    "KimiK3ForConditionalGeneration": "kimi_k3",
    "LightOnOcrForConditionalGeneration": "lighton_ocr",
    "PaddleOCRVLForConditionalGeneration": "paddleocr_vl",
    "GlmOcrForConditionalGeneration": "glm_ocr",
    "HyperCLOVAXVisionV2ForConditionalGeneration": "hyperclovax_vision",
    "DotsOCRForCausalLM": "dots_ocr",
    "LLaVAOneVision1_5_ForConditionalGeneration": "llava_onevision1_5",
    "GotOcr2ForConditionalGeneration": "got_ocr2",
    "QianfanOCRForConditionalGeneration": "qianfan_ocr",
    "HunYuanVLForConditionalGeneration": "hunyuan_vl",
    "HYV4VLForConditionalGeneration": "hy_v4_vl",
    "Ernie4_5_VLMoeForConditionalGeneration": "ernie4_5_vl",
    "Lfm2VlForConditionalGeneration": "lfm2_vl",
    "Lfm3VlForConditionalGeneration": "lfm3_vl",
    "DeepseekOcr2ForConditionalGeneration": "deepseek_ocr2",
    "DeepseekOCRForCausalLM": "deepseek_ocr",
    "MiniCPMV": "minicpmv2_6",
    "MiniCPMV4_6ForConditionalGeneration": "minicpmv",
    "MiniCPMV4_7ForConditionalGeneration": "minicpmv",
    "MiniCPMOcrForConditionalGeneration": "minicpmv",
}
MODELS: ClassTable[CausalLM] = ClassTable(_MODULES, _declared)
# The classes of architectures that only pool.
_ENCODER_MODULES = {
    "BertModel": "bert",
    "RobertaModel": "roberta",
    "XLMRobertaModel": "roberta",
    "XLMRobertaFlashModel": "jina_embeddings_v3",
    "DistilBertModel": "bert",
    "ModernBertModel": "modernbert",
    "ModernVBertModel": "modernvbert",
    "NomicBertModel": "nomic_bert",
    "GteModel": "gte",
    "NewModel": "gte:GteModel",
    "JinaBertModel": "jina_bert",
    "JinaEmbeddingsV3Model": "jina_embeddings_v3",
    "MPNetModel": "mpnet",
    "ElectraModel": "electra",
    "DebertaV2Model": "deberta_v2",
    "DebertaModel": "deberta_v2",
    "AlbertModel": "albert",
    "Lfm2BidirectionalModel": "lfm2",
    "T5EncoderModel": "t5",
    "UMT5EncoderModel": "t5",
    "EuroBertModel": "eurobert",
    "EmbeddingGemma2Model": "embedding_gemma2",
    "OpenAIPrivacyFilterModel": "openai_privacy_filter",
    "EsmModel": "esm",
    "ErnieModel": "bert",
    "MegatronBertModel": "bert",
    "RemBertModel": "electra",
    "RoFormerModel": "roformer",
    "RobertaPreLayerNormModel": "roberta",
    "XLMRobertaXLModel": "roberta",
    "CLIPModel": "clip",
    "SiglipModel": "clip",
}
ENCODERS: ClassTable[Encoder] = ClassTable(_ENCODER_MODULES)
