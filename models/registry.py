"""Registry of models: one row per architecture, and the abstract construction of any of them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flax import nnx

from jaxengine.models.architectures import (
    BIDIRECTIONAL,
    POOLING_CLASSES,
    POOLING_SUFFIXES,
    POOLINGS,
    left_out,
    usual_name,
)
from jaxengine.models.build import Build, build_abstract
from jaxengine.models.causal_lm import CausalLM
from jaxengine.models.config.attention import LayerAttention
from jaxengine.models.config.fields import ConfigFields, ModelConfigError
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.pooler import LAST, Pooler
from jaxengine.models.config.readers.eagle3 import Eagle3Config, head_fields, read_head
from jaxengine.models.config.readers.gguf import GGUFConfig, RopeFactors, gguf_family
from jaxengine.models.config.readers.hf import CONFIG_FILE, hf_architecture, read_config_json, with_one_rope
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
from jaxengine.models.families.gte import GteModel
from jaxengine.models.families.hunyuan_dense import HunYuanDenseV1ForCausalLM
from jaxengine.models.families.hunyuan_moe import HunYuanMoEV1ForCausalLM
from jaxengine.models.families.idefics3 import Idefics3ForConditionalGeneration, SmolVLMForConditionalGeneration
from jaxengine.models.families.internlm3 import InternLM3ForCausalLM
from jaxengine.models.families.internvl import InternVLForConditionalGeneration
from jaxengine.models.families.jina_bert import JinaBertModel
from jaxengine.models.families.jina_embeddings_v3 import JinaEmbeddingsV3Model
from jaxengine.models.families.kimi_k25 import KimiK25ForConditionalGeneration
from jaxengine.models.families.kimi_linear import KimiLinearForCausalLM
from jaxengine.models.families.kimi_vl import KimiVLForConditionalGeneration
from jaxengine.models.families.lfm2 import Lfm2ForCausalLM, Lfm2MoeForCausalLM
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
from jaxengine.models.layers.eagle3 import Eagle3
from jaxengine.models.layers.encoder import Encoder
from jaxengine.models.layers.next_token import next_token_class, with_next_layer
from jaxengine.models.params.declare import declared_params
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.quantization.registry import PLAIN, read_quantization
from jaxengine.sharding.layout import MeshLayout

_SUFFIX = re.compile(r"(For[A-Z]\w*|LMHeadModel|Model)$")
_NO_FACTORS = RopeFactors()
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
    "MiniCPMV4_6ForConditionalGeneration": MiniCPMV4_6ForConditionalGeneration,
    "MiniCPMV4_7ForConditionalGeneration": MiniCPMV4_7ForConditionalGeneration,
    "MiniCPMOcrForConditionalGeneration": MiniCPMOcrForConditionalGeneration,
    **{name: declared_class(name, row) for rows in _ROWS for name, row in rows.items()},
}
# The same of models that only pool.
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


QUANTIZATION = "quantization_config"


def family_of(architecture: str) -> tuple[str, str | None]:
    """Map an architecture to (class name in MODELS or ENCODERS with its layers, its pooling task; None if it
    generates).

    An unknown name is returned unchanged, with None.
    """
    if architecture in POOLING_CLASSES:
        return POOLING_CLASSES[architecture]
    architecture = usual_name(architecture)
    for suffix, task in POOLING_SUFFIXES.items():
        stem = architecture.removesuffix(suffix)
        if architecture.endswith(suffix) and architecture not in MODELS:
            for name in (f"{stem}ForCausalLM", f"{stem}LMHeadModel", f"{stem}Model"):
                if name in MODELS or name in ENCODERS:
                    return name, task
    return architecture, None


def usual_pooling(architecture: str, fields: ConfigFields) -> str:
    """Return the type of pooling if the checkpoint names none: an encoder's own choice, that of `pooling` for
    BIDIRECTIONAL classes, else LAST. Raises ModelConfigError.
    """
    if architecture in BIDIRECTIONAL:
        if (kind := fields.text("pooling", "mean")) not in POOLINGS:
            raise fields.fail("pooling", ", ".join(POOLINGS))
        return POOLINGS[kind]
    encoder = ENCODERS.get(family_of(architecture)[0])
    return LAST if encoder is None else encoder.usual_pooling(fields)


def model_for_hf(architecture: str) -> type[CausalLM]:
    """Find the class that has an architecture's layers. Raises ModelConfigError for one that is not registered; the
    text names the nearest.
    """
    family, _ = family_of(architecture)
    known = {**MODELS, **ENCODERS}
    if family not in known:
        raise ModelConfigError(_unsupported(architecture, known))
    return known[family]


def model_for_gguf(architecture: str) -> type[CausalLM]:
    """Find the class that reads files of this general.architecture. Raises ModelConfigError for one that no class
    reads; the text names the nearest.
    """
    by_name = {model.gguf_architecture: model for model in MODELS.values() if model.gguf_architecture is not None}
    if architecture not in by_name:
        raise ModelConfigError(_unsupported(architecture, by_name))
    return by_name[architecture]


def _unsupported(architecture: str, known: Iterable[str]) -> str:
    """Return the error for an architecture that is none of those known; it names the nearest one, if any is similar."""
    shown = repr(architecture if len(architecture) <= 100 else architecture[:97] + "...")
    known = list(known)
    # The common suffix is no evidence of similarity, so names are compared without it.
    stems = {_SUFFIX.sub("", name).lower(): name for name in known}
    near = difflib.get_close_matches(_SUFFIX.sub("", architecture[:100]).lower(), stems, 1, 0.7)
    nearest = f", the nearest is {stems[near[0]]}" if near else ""
    return (
        f"the architecture {shown} is not supported{nearest}; docs/models.md lists the {len(known)} that are, and "
        "jaxengine.register_model adds one of your own, --plugin for commands (CONTRIBUTING.md, A model family)"
    )


def read_hf(raw: Mapping[str, Any], pooler: Pooler | None = None) -> ModelConfig:
    """Read the ModelConfig of a Hugging Face config.json. Raises ModelConfigError, also for an architecture that is not
    registered.

    pooler: what a pooling model does with hidden states; None for a model that generates. With one, the layers of a
    model whose tokens see their whole prompt are not causal; without, that is an error.
    """
    fields = ConfigFields(with_one_rope(ConfigFields(raw).raw))
    model = model_for_hf(hf_architecture(fields))
    stored = fields.value(QUANTIZATION, None)
    stored = fields.value("compression_config", None) if stored is None else stored  # as compressed-tensors once had it
    if stored is None and (text := fields.mapping("text_config")) is not None:
        stored = text.get(QUANTIZATION)
    names = model.checkpoint_names
    prefixes = names.prefixes if pooler is None else (*names.prefixes, *_without_prefix(names.prefixes))
    if isinstance(stored, Mapping) and fields.has("expert_dtype"):  # as DeepSeek-V4 has it
        stored = {"expert_dtype": fields.text("expert_dtype"), **stored}
    quantization = read_quantization(stored, prefixes, names.suffixes, names.stacked_experts is not None)
    if quantization is not None and names.plain:
        quantization = replace(quantization, listed=(*quantization.listed, *names.plain))
    shape = model.read_hf(fields.with_defaults(**left_out(hf_architecture(fields))))
    if pooler is not None and sees_all(fields):
        shape["attention"] = _seeing_all(fields, shape["attention"])
    config = ModelConfig(architecture=model.__name__, pooler=pooler, quantization=quantization, **shape)
    if pooler is None and not config.is_causal:
        raise fields.fail("use_bidirectional_attention", "false or absent for a model that generates")
    return config


def sees_all(fields: ConfigFields) -> bool:
    """Whether the tokens of a pooling model with a decoder's layers see their whole prompt: by their class, or by
    `is_causal`. Raises ModelConfigError.
    """
    return hf_architecture(fields) in BIDIRECTIONAL or not fields.boolean("is_causal", True)


def _seeing_all(fields: ConfigFields, attention: Sequence[LayerAttention]) -> tuple[LayerAttention, ...]:
    """Return the layers' attention with all tokens visible. Raises ModelConfigError for layers with windows, chunks,
    states or ALiBi.
    """
    if any(each.window is not None or each.chunk is not None or each.state is not None for each in attention):
        raise fields.fail("is_causal", "true or absent for a model with windows, chunks or recurrent states")
    if any(each.slopes is not None for each in attention):
        raise fields.fail("is_causal", "true or absent for a decoder with ALiBi")
    return tuple(replace(each, causal=False) for each in attention)


def _without_prefix(prefixes: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the prefix replacements for a pooling model's checkpoint names that lack the common prefix, see
    jaxengine.models.weights.views.renamed.with_prefix.
    """
    common = "model."
    return [("", common), *((old.removeprefix(common), new) for old, new in prefixes if old.startswith(common))]


def read_folder(folder: Path, raw: Mapping[str, Any] | None = None, pooler: Pooler | None = None) -> ModelConfig:
    """Read the ModelConfig of a Hugging Face folder. Raises ModelFileError, which names the file and the field.

    raw: content to use instead of the folder's config.json; None to read the file. pooler: as in `read_hf`.
    """
    raw = read_config_json(folder) if raw is None else raw
    try:
        return read_hf(raw, pooler)
    except ModelConfigError as error:
        raise ModelFileError(folder / CONFIG_FILE, str(error)) from error


def read_gguf(
    metadata: Mapping[str, Any],
    *,
    tie_word_embeddings: bool = True,
    rope_factors: RopeFactors = _NO_FACTORS,
    pooler: Pooler | None = None,
) -> ModelConfig:
    """Read the ModelConfig of GGUF metadata. Raises ModelConfigError, also for an architecture that is not registered.

    Two facts are tensors and not metadata in that format, so the caller passes them: whether the file lacks an output
    head (tie_word_embeddings), and the content of the tensors that scale rope, if any. pooler: as in `read_hf`.
    """
    model = model_for_gguf(gguf_family(metadata))
    gguf = GGUFConfig(metadata, tie_word_embeddings, rope_factors)
    return ModelConfig(architecture=model.__name__, pooler=pooler, **model.read_gguf(gguf))


def build_model(config: ModelConfig, build: Build) -> CausalLM:
    """Build the model of a ModelConfig with ShapeDtypeStructs for weights: nothing is allocated until load_params.

    Raises ValueError for a mesh over which its weights cannot be split, and ModelConfigError, which is one, for a
    config that its family or its quantization cannot build.
    """
    family: Any = model_for_hf(config.architecture)
    if build.exact:
        from jaxengine.models.layers.exact import exact_class

        family = exact_class(family)
    return build_abstract(family, config, _as_stored(config, build))


def build_next_token(config: ModelConfig, build: Build) -> Any:
    """Build a model's next-token layer, which follows its last layer and predicts further tokens
    (jaxengine.models.layers.next_token).

    It is abstract, and the errors are those of `build_model`. config: the model's own.
    """
    family: Any = model_for_hf(config.architecture)
    return build_abstract(next_token_class(family), with_next_layer(config), _as_stored(config, build))


def read_eagle3(folder: Path, model: ModelConfig) -> Eagle3Config:
    """Read the config of the EAGLE-3 head in a Hugging Face folder. Raises ModelFileError, as `read_folder`, also for
    what is no such head.

    model: the one whose hidden states it reads; whether they fit together is not checked here.
    """
    raw = read_config_json(folder)
    try:
        fields = head_fields(with_one_rope(raw))
        return read_head(fields, LlamaForCausalLM.read_hf(fields), model)
    except ModelConfigError as error:
        raise ModelFileError(folder / CONFIG_FILE, str(error)) from error


def build_eagle3(config: Eagle3Config, build: Build) -> Any:
    """Build the EAGLE-3 head (jaxengine.models.layers.eagle3), abstract and with errors as in `build_model`."""
    return build_abstract(Eagle3, config, build)


def _as_stored(config: ModelConfig, build: Build) -> Build:
    """Return the build with the configuration's quantization scheme, unless it has a scheme of its own."""
    asked = config.quantization is not None and build.scheme == PLAIN
    return replace(build, scheme=config.quantization) if asked else build


def tensor_sizes(config: ModelConfig, mesh_for: Callable[[int], MeshLayout], limit: int = 16) -> list[int]:
    """List the tensor-parallel sizes from 1 to `limit` for which `mesh_for(size)` splits the model evenly, ascending.

    Raises ModelConfigError for an unknown architecture, and what `mesh_for` raises.
    """
    model_class = model_for_hf(config.architecture)
    sizes = []
    for size in range(1, limit + 1):
        mesh = mesh_for(size)
        try:
            model = nnx.eval_shape(lambda mesh=mesh: model_class(config, _as_stored(config, Build("bfloat16", mesh))))
        except ValueError:
            continue  # it cannot be built so, mostly because a quantisation group of inputs would be split
        if all(param.splits_over(mesh) for param in declared_params(model)):
            sizes.append(size)
    return sizes
