"""The class of each architecture: one row for each. Importing this module imports all families."""

from __future__ import annotations

from jaxengine.models.causal_lm import CausalLM
from jaxengine.models.families.albert import AlbertModel
from jaxengine.models.families.apertus import ApertusForCausalLM
from jaxengine.models.families.axk2 import AXK2ForCausalLM
from jaxengine.models.families.bailing_hybrid import BailingHybridForCausalLM
from jaxengine.models.families.bert import BertModel
from jaxengine.models.families.cohere import CohereForCausalLM
from jaxengine.models.families.cohere2 import Cohere2ForCausalLM
from jaxengine.models.families.cohere_vision import (
    AyaVisionForConditionalGeneration,
    Cohere2VisionForConditionalGeneration,
)
from jaxengine.models.families.deberta_v2 import DebertaV2Model
from jaxengine.models.families.declared import declared_class
from jaxengine.models.families.declared_alibi import ALIBI_ROWS
from jaxengine.models.families.declared_dense import DENSE_ROWS
from jaxengine.models.families.declared_experts import EXPERT_ROWS
from jaxengine.models.families.declared_hub import HUB_ROWS
from jaxengine.models.families.declared_mixtures import MIXTURE_ROWS
from jaxengine.models.families.declared_rows import ROWS_BY_NAME
from jaxengine.models.families.declared_states import STATE_ROWS
from jaxengine.models.families.deepseek_ocr2 import DeepseekOcr2ForConditionalGeneration
from jaxengine.models.families.deepseek_v2 import DeepseekV2ForCausalLM
from jaxengine.models.families.deepseek_v3 import DeepseekV3ForCausalLM
from jaxengine.models.families.deepseek_v4 import DeepseekV4ForCausalLM
from jaxengine.models.families.deepseek_v32 import DeepseekV32ForCausalLM
from jaxengine.models.families.distilbert import DistilBertModel
from jaxengine.models.families.dots1 import Dots1ForCausalLM
from jaxengine.models.families.dots_ocr import DotsOCRForCausalLM
from jaxengine.models.families.electra import ElectraModel
from jaxengine.models.families.ernie4_5 import Ernie4_5ForCausalLM
from jaxengine.models.families.ernie4_5_moe import Ernie4_5_MoeForCausalLM
from jaxengine.models.families.ernie4_5_vl import Ernie4_5_VLMoeForConditionalGeneration
from jaxengine.models.families.exaone4 import Exaone4_5_ForConditionalGeneration, Exaone4ForCausalLM
from jaxengine.models.families.falcon_h1 import FalconH1ForCausalLM
from jaxengine.models.families.gemma import GemmaForCausalLM
from jaxengine.models.families.gemma2 import Gemma2ForCausalLM
from jaxengine.models.families.gemma3 import Gemma3ForCausalLM, Gemma3ForConditionalGeneration
from jaxengine.models.families.gemma3n import Gemma3nForCausalLM, Gemma3nForConditionalGeneration
from jaxengine.models.families.gemma4 import Gemma4ForCausalLM, Gemma4ForConditionalGeneration
from jaxengine.models.families.gemma4_unified import (
    Gemma4UnifiedForCausalLM,
    Gemma4UnifiedForConditionalGeneration,
)
from jaxengine.models.families.glm import GlmForCausalLM
from jaxengine.models.families.glm4 import Glm4ForCausalLM
from jaxengine.models.families.glm4_moe import Glm4MoeForCausalLM
from jaxengine.models.families.glm4_moe_lite import Glm4MoeLiteForCausalLM
from jaxengine.models.families.glm4v import Glm4vForConditionalGeneration, Glm4vMoeForConditionalGeneration
from jaxengine.models.families.glm_moe_dsa import GlmMoeDsaForCausalLM
from jaxengine.models.families.glm_ocr import GlmOcrForConditionalGeneration
from jaxengine.models.families.got_ocr2 import GotOcr2ForConditionalGeneration
from jaxengine.models.families.gpt_oss import GptOssForCausalLM
from jaxengine.models.families.granite import GraniteForCausalLM
from jaxengine.models.families.granite_moe import (
    GraniteMoeForCausalLM,
    GraniteMoeSharedForCausalLM,
    GraniteMoeSWAForCausalLM,
)
from jaxengine.models.families.granite_moe_hybrid import GraniteMoeHybridForCausalLM
from jaxengine.models.families.granite_speech import GraniteSpeechForConditionalGeneration
from jaxengine.models.families.granite_vision import GraniteVisionForConditionalGeneration
from jaxengine.models.families.gte import GteModel
from jaxengine.models.families.hunyuan_dense import HunYuanDenseV1ForCausalLM
from jaxengine.models.families.hunyuan_moe import HunYuanMoEV1ForCausalLM
from jaxengine.models.families.hunyuan_vl import HunYuanVLForConditionalGeneration
from jaxengine.models.families.idefics3 import Idefics3ForConditionalGeneration, SmolVLMForConditionalGeneration
from jaxengine.models.families.internlm3 import InternLM3ForCausalLM
from jaxengine.models.families.internvl import InternVLForConditionalGeneration
from jaxengine.models.families.jina_bert import JinaBertModel
from jaxengine.models.families.jina_embeddings_v3 import JinaEmbeddingsV3Model
from jaxengine.models.families.kimi_k25 import KimiK25ForConditionalGeneration
from jaxengine.models.families.kimi_linear import KimiLinearForCausalLM
from jaxengine.models.families.kimi_vl import KimiVLForConditionalGeneration
from jaxengine.models.families.lara_mini import LaraMiniForCausalLM
from jaxengine.models.families.lfm2 import Lfm2ForCausalLM, Lfm2MoeForCausalLM
from jaxengine.models.families.lfm2_vl import Lfm2VlForConditionalGeneration
from jaxengine.models.families.lighton_ocr import LightOnOcrForConditionalGeneration
from jaxengine.models.families.llama import LlamaForCausalLM
from jaxengine.models.families.llama4 import Llama4ForCausalLM, Llama4ForConditionalGeneration
from jaxengine.models.families.llava import (
    LlavaForConditionalGeneration,
    LlavaNextForConditionalGeneration,
    LlavaOnevisionForConditionalGeneration,
)
from jaxengine.models.families.longcat_flash import LongcatFlashForCausalLM
from jaxengine.models.families.minicpm import MiniCPMForCausalLM
from jaxengine.models.families.minicpm3 import MiniCPM3ForCausalLM
from jaxengine.models.families.minicpmv import (
    MiniCPMOcrForConditionalGeneration,
    MiniCPMV4_6ForConditionalGeneration,
    MiniCPMV4_7ForConditionalGeneration,
)
from jaxengine.models.families.minimax_m2 import MiniMaxM2ForCausalLM
from jaxengine.models.families.ministral3 import (
    Ministral3ForCausalLM,
    Mistral3ForConditionalGeneration,
    Mistral4ForConditionalGeneration,
)
from jaxengine.models.families.mistral import MistralForCausalLM
from jaxengine.models.families.mixtral import MixtralForCausalLM
from jaxengine.models.families.modernbert import ModernBertModel
from jaxengine.models.families.mpnet import MPNetModel
from jaxengine.models.families.nemotron import NemotronForCausalLM
from jaxengine.models.families.nemotron_h import NemotronHForCausalLM
from jaxengine.models.families.nomic_bert import NomicBertModel
from jaxengine.models.families.olmo2 import Olmo2ForCausalLM
from jaxengine.models.families.olmo3 import Olmo3ForCausalLM
from jaxengine.models.families.olmo_hybrid import OlmoHybridForCausalLM
from jaxengine.models.families.olmoe import OlmoeForCausalLM
from jaxengine.models.families.paddleocr_vl import PaddleOCRVLForConditionalGeneration
from jaxengine.models.families.paligemma import (
    PaliGemma2ForConditionalGeneration,
    PaliGemmaForConditionalGeneration,
)
from jaxengine.models.families.phi3 import Phi3ForCausalLM
from jaxengine.models.families.phimoe import PhiMoEForCausalLM
from jaxengine.models.families.qianfan_ocr import QianfanOCRForConditionalGeneration
from jaxengine.models.families.qwen2 import Qwen2ForCausalLM
from jaxengine.models.families.qwen2_audio import (
    Qwen2AudioForConditionalGeneration,
    VoxtralForConditionalGeneration,
)
from jaxengine.models.families.qwen2_moe import Qwen2MoeForCausalLM
from jaxengine.models.families.qwen2_vl import Qwen2_5_VLForConditionalGeneration, Qwen2VLForConditionalGeneration
from jaxengine.models.families.qwen3 import Qwen3ForCausalLM
from jaxengine.models.families.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration
from jaxengine.models.families.qwen3_5_moe import Qwen3_5MoeForCausalLM, Qwen3_5MoeForConditionalGeneration
from jaxengine.models.families.qwen3_asr import Qwen3ASRForConditionalGeneration
from jaxengine.models.families.qwen3_moe import Qwen3MoeForCausalLM
from jaxengine.models.families.qwen3_next import Qwen3NextForCausalLM
from jaxengine.models.families.qwen3_vl import Qwen3VLForConditionalGeneration, Qwen3VLMoeForConditionalGeneration
from jaxengine.models.families.qwen_omni import (
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen3OmniMoeThinkerForConditionalGeneration,
)
from jaxengine.models.families.roberta import RobertaModel, XLMRobertaModel
from jaxengine.models.families.seed_oss import SeedOssForCausalLM
from jaxengine.models.families.smollm3 import SmolLM3ForCausalLM
from jaxengine.models.families.starcoder2 import Starcoder2ForCausalLM
from jaxengine.models.families.t5 import T5EncoderModel, UMT5EncoderModel
from jaxengine.models.families.whisper import WhisperForConditionalGeneration
from jaxengine.models.layers.encoder import Encoder

_ROWS = (ROWS_BY_NAME, DENSE_ROWS, EXPERT_ROWS, MIXTURE_ROWS, HUB_ROWS, STATE_ROWS, ALIBI_ROWS)
# Keys are the class names that config.json lists under "architectures".
MODELS: dict[str, type[CausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": MistralForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "MixtralForCausalLM": MixtralForCausalLM,
    "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
    "Phi3ForCausalLM": Phi3ForCausalLM,
    "GemmaForCausalLM": GemmaForCausalLM,
    "Gemma2ForCausalLM": Gemma2ForCausalLM,
    "Qwen2MoeForCausalLM": Qwen2MoeForCausalLM,
    "GraniteForCausalLM": GraniteForCausalLM,
    "SeedOssForCausalLM": SeedOssForCausalLM,
    "InternLM3ForCausalLM": InternLM3ForCausalLM,
    "MiniCPMForCausalLM": MiniCPMForCausalLM,
    "Gemma3ForCausalLM": Gemma3ForCausalLM,
    "Gemma3ForConditionalGeneration": Gemma3ForConditionalGeneration,
    "Gemma3nForCausalLM": Gemma3nForCausalLM,
    "Gemma3nForConditionalGeneration": Gemma3nForConditionalGeneration,
    "Gemma4ForCausalLM": Gemma4ForCausalLM,
    "Gemma4ForConditionalGeneration": Gemma4ForConditionalGeneration,
    "Gemma4UnifiedForCausalLM": Gemma4UnifiedForCausalLM,
    "Gemma4UnifiedForConditionalGeneration": Gemma4UnifiedForConditionalGeneration,
    "Olmo2ForCausalLM": Olmo2ForCausalLM,
    "Olmo3ForCausalLM": Olmo3ForCausalLM,
    "SmolLM3ForCausalLM": SmolLM3ForCausalLM,
    "CohereForCausalLM": CohereForCausalLM,
    "Cohere2ForCausalLM": Cohere2ForCausalLM,
    "Exaone4ForCausalLM": Exaone4ForCausalLM,
    "Exaone4_5_ForConditionalGeneration": Exaone4_5_ForConditionalGeneration,
    "Starcoder2ForCausalLM": Starcoder2ForCausalLM,
    "WhisperForConditionalGeneration": WhisperForConditionalGeneration,
    "Qwen2AudioForConditionalGeneration": Qwen2AudioForConditionalGeneration,
    "VoxtralForConditionalGeneration": VoxtralForConditionalGeneration,
    "Qwen3ASRForConditionalGeneration": Qwen3ASRForConditionalGeneration,
    "GraniteSpeechForConditionalGeneration": GraniteSpeechForConditionalGeneration,
    "Qwen2_5OmniThinkerForConditionalGeneration": Qwen2_5OmniThinkerForConditionalGeneration,
    "Qwen3OmniMoeThinkerForConditionalGeneration": Qwen3OmniMoeThinkerForConditionalGeneration,
    "NemotronForCausalLM": NemotronForCausalLM,
    "ApertusForCausalLM": ApertusForCausalLM,
    "GptOssForCausalLM": GptOssForCausalLM,
    "Glm4MoeForCausalLM": Glm4MoeForCausalLM,
    "Dots1ForCausalLM": Dots1ForCausalLM,
    "OlmoeForCausalLM": OlmoeForCausalLM,
    "MiniMaxM2ForCausalLM": MiniMaxM2ForCausalLM,
    "Ernie4_5_MoeForCausalLM": Ernie4_5_MoeForCausalLM,
    "HunYuanMoEV1ForCausalLM": HunYuanMoEV1ForCausalLM,
    "Llama4ForCausalLM": Llama4ForCausalLM,
    "Llama4ForConditionalGeneration": Llama4ForConditionalGeneration,
    "DeepseekV2ForCausalLM": DeepseekV2ForCausalLM,
    "DeepseekV3ForCausalLM": DeepseekV3ForCausalLM,
    "Glm4MoeLiteForCausalLM": Glm4MoeLiteForCausalLM,
    "DeepseekV32ForCausalLM": DeepseekV32ForCausalLM,
    "AXK2ForCausalLM": AXK2ForCausalLM,
    "DeepseekV4ForCausalLM": DeepseekV4ForCausalLM,
    "LongcatFlashForCausalLM": LongcatFlashForCausalLM,
    "GlmMoeDsaForCausalLM": GlmMoeDsaForCausalLM,
    "MiniCPM3ForCausalLM": MiniCPM3ForCausalLM,
    "GlmForCausalLM": GlmForCausalLM,
    "Glm4ForCausalLM": Glm4ForCausalLM,
    "Ernie4_5ForCausalLM": Ernie4_5ForCausalLM,
    "HunYuanDenseV1ForCausalLM": HunYuanDenseV1ForCausalLM,
    "Ministral3ForCausalLM": Ministral3ForCausalLM,
    "Mistral3ForConditionalGeneration": Mistral3ForConditionalGeneration,
    "Mistral4ForConditionalGeneration": Mistral4ForConditionalGeneration,
    "Qwen3NextForCausalLM": Qwen3NextForCausalLM,
    "LaraMiniForCausalLM": LaraMiniForCausalLM,
    "Lfm2ForCausalLM": Lfm2ForCausalLM,
    "Lfm2MoeForCausalLM": Lfm2MoeForCausalLM,
    "GraniteMoeHybridForCausalLM": GraniteMoeHybridForCausalLM,
    "FalconH1ForCausalLM": FalconH1ForCausalLM,
    "NemotronHForCausalLM": NemotronHForCausalLM,
    "KimiLinearForCausalLM": KimiLinearForCausalLM,
    "BailingHybridForCausalLM": BailingHybridForCausalLM,
    "OlmoHybridForCausalLM": OlmoHybridForCausalLM,
    "GraniteMoeForCausalLM": GraniteMoeForCausalLM,
    "GraniteMoeSharedForCausalLM": GraniteMoeSharedForCausalLM,
    "GraniteMoeSWAForCausalLM": GraniteMoeSWAForCausalLM,
    "PhiMoEForCausalLM": PhiMoEForCausalLM,
    "Qwen3_5ForCausalLM": Qwen3_5ForCausalLM,
    "Qwen3_5ForConditionalGeneration": Qwen3_5ForConditionalGeneration,
    "Qwen3_5MoeForCausalLM": Qwen3_5MoeForCausalLM,
    "Qwen3_5MoeForConditionalGeneration": Qwen3_5MoeForConditionalGeneration,
    "LlavaForConditionalGeneration": LlavaForConditionalGeneration,
    "Qwen2VLForConditionalGeneration": Qwen2VLForConditionalGeneration,
    "Qwen2_5_VLForConditionalGeneration": Qwen2_5_VLForConditionalGeneration,
    "Qwen3VLForConditionalGeneration": Qwen3VLForConditionalGeneration,
    "LlavaNextForConditionalGeneration": LlavaNextForConditionalGeneration,
    "LlavaOnevisionForConditionalGeneration": LlavaOnevisionForConditionalGeneration,
    "PaliGemmaForConditionalGeneration": PaliGemmaForConditionalGeneration,
    "PaliGemma2ForConditionalGeneration": PaliGemma2ForConditionalGeneration,
    "AyaVisionForConditionalGeneration": AyaVisionForConditionalGeneration,
    "Cohere2VisionForConditionalGeneration": Cohere2VisionForConditionalGeneration,
    "InternVLForConditionalGeneration": InternVLForConditionalGeneration,
    "Idefics3ForConditionalGeneration": Idefics3ForConditionalGeneration,
    "SmolVLMForConditionalGeneration": SmolVLMForConditionalGeneration,
    "Qwen3VLMoeForConditionalGeneration": Qwen3VLMoeForConditionalGeneration,
    "Glm4vForConditionalGeneration": Glm4vForConditionalGeneration,
    "Glm4vMoeForConditionalGeneration": Glm4vMoeForConditionalGeneration,
    "KimiVLForConditionalGeneration": KimiVLForConditionalGeneration,
    "KimiK25ForConditionalGeneration": KimiK25ForConditionalGeneration,
    "LightOnOcrForConditionalGeneration": LightOnOcrForConditionalGeneration,
    "PaddleOCRVLForConditionalGeneration": PaddleOCRVLForConditionalGeneration,
    "GlmOcrForConditionalGeneration": GlmOcrForConditionalGeneration,
    "DotsOCRForCausalLM": DotsOCRForCausalLM,
    "GotOcr2ForConditionalGeneration": GotOcr2ForConditionalGeneration,
    "QianfanOCRForConditionalGeneration": QianfanOCRForConditionalGeneration,
    "Lfm2VlForConditionalGeneration": Lfm2VlForConditionalGeneration,
    "DeepseekOcr2ForConditionalGeneration": DeepseekOcr2ForConditionalGeneration,
    "GraniteVisionForConditionalGeneration": GraniteVisionForConditionalGeneration,
    "HunYuanVLForConditionalGeneration": HunYuanVLForConditionalGeneration,
    "Ernie4_5_VLMoeForConditionalGeneration": Ernie4_5_VLMoeForConditionalGeneration,
    "MiniCPMV4_6ForConditionalGeneration": MiniCPMV4_6ForConditionalGeneration,
    "MiniCPMV4_7ForConditionalGeneration": MiniCPMV4_7ForConditionalGeneration,
    "MiniCPMOcrForConditionalGeneration": MiniCPMOcrForConditionalGeneration,
    **{name: declared_class(name, row) for rows in _ROWS for name, row in rows.items()},
}
# The classes of architectures that only pool.
ENCODERS: dict[str, type[Encoder]] = {
    "BertModel": BertModel,
    "RobertaModel": RobertaModel,
    "XLMRobertaModel": XLMRobertaModel,
    "DistilBertModel": DistilBertModel,
    "ModernBertModel": ModernBertModel,
    "NomicBertModel": NomicBertModel,
    "GteModel": GteModel,
    "NewModel": GteModel,
    "JinaBertModel": JinaBertModel,
    "JinaEmbeddingsV3Model": JinaEmbeddingsV3Model,
    "MPNetModel": MPNetModel,
    "ElectraModel": ElectraModel,
    "DebertaV2Model": DebertaV2Model,
    "AlbertModel": AlbertModel,
    "T5EncoderModel": T5EncoderModel,
    "UMT5EncoderModel": UMT5EncoderModel,
}
