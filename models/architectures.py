"""Class names in config.json under which no family is registered: classes of pooling models, and other names of the
same layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jaxengine.models.config.pooler import CLASSIFY, CLS, EMBED, LAST, MEAN, TOKEN_CLASSIFY, TOKEN_EMBED, TokenHead

# Suffixes of class names of pooling models -> their tasks. Their layers are those of *ForCausalLM, or of an encoder.
POOLING_SUFFIXES = {
    "ForSequenceClassification": CLASSIFY,
    "ForTokenClassification": TOKEN_CLASSIFY,
    "Model": EMBED,
    "ForMaskedLM": EMBED,
    "ForPreTraining": EMBED,
}
# jinaai/jina-colbert-v2, whose file has HF_ColBERT.
COLBERT_JINA = "ColBERTJinaRobertaModel"
# Qwen3's forced aligner: Qwen3-ASR that gives times to the tokens of a transcript.
ALIGNER = "Qwen3ASRForcedAlignerForTokenClassification"
# Those of a Llama behind Eagle 2.5's tower, whose tokens attend to the whole prompt.
_NEMOTRON_VL = "LlamaNemotronVLModel", "LlamaNemotronVLForSequenceClassification"
# Nemotron ColEmbed VL: Qwen3-VL whose tokens attend to the whole prompt, and whose states before the last norm count.
COLEMBED = "Qwen3VLNemotronEmbedModel"
# A reranker that reads a query with all of its documents.
RANKING = "JinaForRanking"
# Classes of pooling models whose names are not a family's name with a suffix -> (registered class, task).
POOLING_CLASSES = {
    "Gemma3TextModel": ("Gemma3ForCausalLM", EMBED),
    "HF_ColBERT": ("BertModel", TOKEN_EMBED),
    "ColBERTModel": ("BertModel", TOKEN_EMBED),
    "ColBERTModernBertModel": ("ModernBertModel", TOKEN_EMBED),
    COLBERT_JINA: ("JinaEmbeddingsV3Model", TOKEN_EMBED),
    "ColBERTLfm2Model": ("Lfm2ForCausalLM", TOKEN_EMBED),
    "ColModernVBertForRetrieval": ("ModernVBertModel", TOKEN_EMBED),
    "ColPaliForRetrieval": ("PaliGemmaForConditionalGeneration", TOKEN_EMBED),
    "ColQwen2ForRetrieval": ("Qwen2VLForConditionalGeneration", TOKEN_EMBED),
    "ColQwen2_5ForRetrieval": ("Qwen2_5_VLForConditionalGeneration", TOKEN_EMBED),
    "ColQwen3": ("Qwen3VLForConditionalGeneration", TOKEN_EMBED),
    COLEMBED: ("Qwen3VLForConditionalGeneration", TOKEN_EMBED),
    "OpsColQwen3Model": ("Qwen3VLForConditionalGeneration", TOKEN_EMBED),
    "ColQwen3_5": ("Qwen3_5ForConditionalGeneration", TOKEN_EMBED),
    "LlamaBidirectionalModel": ("LlamaForCausalLM", EMBED),
    "LlamaBidirectionalForSequenceClassification": ("LlamaForCausalLM", CLASSIFY),
    **{
        name: ("Eagle2_5_VLForConditionalGeneration", task)
        for name, task in zip(_NEMOTRON_VL, (EMBED, CLASSIFY), strict=True)
    },
    RANKING: ("Qwen3ForCausalLM", TOKEN_EMBED),
    "JinaEmbeddingsV5Model": ("Qwen3ForCausalLM", EMBED),
    "JinaEmbeddingsV5EncoderModel": ("LlamaForCausalLM", EMBED),  # the one above with is_decoder false
    "VoyageQwen3BidirectionalEmbedModel": ("Qwen3ForCausalLM", EMBED),
    "DeepseekV3BidirectionalModel": ("DeepseekV3ForCausalLM", EMBED),
    "BgeM3EmbeddingModel": ("XLMRobertaModel", EMBED),
    "BertSpladeSparseEmbeddingModel": ("BertModel", EMBED),
    "InternLM2ForRewardModel": ("InternLM2ForCausalLM", TOKEN_CLASSIFY),
    "Qwen2ForProcessRewardModel": ("Qwen2ForCausalLM", TOKEN_CLASSIFY),
    "Qwen2ForRewardModel": ("Qwen2ForCausalLM", TOKEN_CLASSIFY),
    ALIGNER: ("Qwen3ASRForConditionalGeneration", TOKEN_CLASSIFY),
    "Qwen3ASRForTokenClassification": ("Qwen3ASRForConditionalGeneration", TOKEN_CLASSIFY),  # in transformers
}
# Classes of models that score or embed tokens by a head of their own -> the head. Its width is 0 where the file says
# it; of reward models the class does, whatever `num_labels` of their files.
TOKEN_HEADS = {
    "InternLM2ForRewardModel": TokenHead(TOKEN_CLASSIFY, 1, "v_head", bias=False),
    "Qwen2ForProcessRewardModel": TokenHead(TOKEN_CLASSIFY, 2, "score.2", inner="score.0"),
    "Qwen2ForRewardModel": TokenHead(TOKEN_CLASSIFY, 1, "score.2", inner="score.0"),
    RANKING: TokenHead(TOKEN_EMBED, 0, "projector.2", inner="projector.0", bias=False),
    ALIGNER: TokenHead(TOKEN_CLASSIFY, 0, "lm_head", bias=False),
    "Qwen3ASRForTokenClassification": TokenHead(TOKEN_CLASSIFY, 0, "score", bias=False),
}
# Classes of classifiers -> transformers' labels for a file that has none.
_PRIVATE = ("account_number", "private_address", "private_date", "private_email", "private_person", "private_phone")
LABELS = {
    "OpenAIPrivacyFilterForTokenClassification": (
        "O",
        *(f"{part}-{label}" for label in (*_PRIVATE, "private_url", "secret") for part in "BIES"),
    )
}
# Beginning of a class name -> transformers' defaults for fields that a file lacks, where they differ from those of the
# family's class.
_T5 = {"vocab_size": 250112, "d_ff": 1024, "num_layers": 8, "num_heads": 6, "feed_forward_proj": "gated-gelu"}
_LEFT_OUT: dict[str, dict[str, Any]] = {
    "Apertus1p5Text": {"vocab_size": 266752},
    "Camembert": {"vocab_size": 30522},
    "Data2VecText": {"vocab_size": 30522},
    "JinaEmbeddingsV5Encoder": {"rms_norm_eps": 1e-5},
    "MT5": _T5,
    "UMT5": _T5,
    "XLMRoberta": {"vocab_size": 30522},
}
# Classes with a decoder's layers whose tokens attend to the whole prompt, whatever their files say.
_OF_LLAMAS = tuple(name for name, (family, _) in POOLING_CLASSES.items() if family == "LlamaForCausalLM")
BIDIRECTIONAL = (*_OF_LLAMAS, *_NEMOTRON_VL, COLEMBED, "ColPaliForRetrieval", "VoyageQwen3BidirectionalEmbedModel")
# Values of the field `pooling` of classes that read it, by class or family; the first is the default.
_OF_LLAMA = {"mean": MEAN, "avg": MEAN, "cls": CLS, "last": LAST}
POOLINGS = dict.fromkeys((*_OF_LLAMAS, *_NEMOTRON_VL), _OF_LLAMA)
POOLINGS["JinaEmbeddingsV5EncoderModel"] = {"last": LAST}
POOLINGS["CohereCompassForCausalLM"] = {"eos": LAST, "bos": CLS, "mean": MEAN}
# Other class names -> registered class: names in a family's original code, and names of whole models of which only a
# part is read.
_OTHER_NAMES = {
    "MPTForCausalLM": "MptForCausalLM",
    "MiniMaxM1ForCausalLM": "MiniMaxForCausalLM",
    "MiniMaxM3SparseForCausalLM": "MiniMaxM3VLForCausalLM",
    # As published; transformers has one class, of another name.
    "NemotronH_Nano_Omni_Reasoning_V3": "NemotronH_Omni_Reasoning_V3",
    "NemotronH_Super_Omni_Reasoning_V3": "NemotronH_Omni_Reasoning_V3",
    "MiniMaxText01ForCausalLM": "MiniMaxForCausalLM",
    "NemotronHPuzzleForCausalLM": "NemotronHForCausalLM",
    "AquilaForCausalLM": "LlamaForCausalLM",
    "AquilaModel": "LlamaForCausalLM",  # of models that generate, too
    "Cosmos3ForConditionalGeneration": "Cosmos3OmniForConditionalGeneration",
    "BaiChuanForCausalLM": "BaichuanForCausalLM",
    "Dots3NoteForConditionalGeneration": "Dots3NoteForCausalLM",
    "Ernie4_5_VL_MoeForConditionalGeneration": "Ernie4_5_VLMoeForConditionalGeneration",
    "Glm5NextForCausalLM": "Glm5NextForConditionalGeneration",
    "Glm46VForConditionalGeneration": "Glm4vForConditionalGeneration",
    "HCXVisionV2ForCausalLM": "HyperCLOVAXVisionV2ForConditionalGeneration",
    "Kimi_K25ForConditionalGeneration": "KimiK25ForConditionalGeneration",
    "LLaMAForCausalLM": "LlamaForCausalLM",
    "LightOnOCRForConditionalGeneration": "LightOnOcrForConditionalGeneration",
    "ChatGLMForConditionalGeneration": "ChatGLMModel",
    "InternS1ForConditionalGeneration": "InternVLForConditionalGeneration",
    "InternS2PreviewForConditionalGeneration": "Qwen3_5MoeForConditionalGeneration",
    "InternVLChatModel": "InternVLForConditionalGeneration",
    "ExaoneMoEForCausalLM": "ExaoneMoeForCausalLM",  # as K-EXAONE's own file has it
    "TeleChatForCausalLM": "TeleChat2ForCausalLM",
    "TelechatForCausalLM": "TeleChat2ForCausalLM",
    "TeleChat3ForCausalLM": "LlamaForCausalLM",
    "DeepseekOCR2ForCausalLM": "DeepseekOcr2ForConditionalGeneration",
    "MT5EncoderModel": "T5EncoderModel",
    "Ovis2_6ForCausalLM": "Ovis2_5",
    "Ovis2_6_MoeForCausalLM": "Ovis2_5",
    "Phi4MMForCausalLM": "Phi4MultimodalForCausalLM",
    "SkyworkR1VChatModel": "InternVLForConditionalGeneration",
    "PanguEmbeddedForCausalLM": "InternLMForCausalLM",
    "XverseForCausalLM": "LlamaForCausalLM",
    "MiniCPMO": "MiniCPMV",
    "MuseGlimmerForCausalLM": "MuseGlimmerForConditionalGeneration",
    "MistralLarge3ForCausalLM": "Mistral4ForCausalLM",
    "Qwen2_5OmniModel": "Qwen2_5OmniThinkerForConditionalGeneration",
    "Qwen2_5OmniForConditionalGeneration": "Qwen2_5OmniThinkerForConditionalGeneration",
    "Qwen3OmniMoeForConditionalGeneration": "Qwen3OmniMoeThinkerForConditionalGeneration",
}
# Beginning of a class name -> beginning of the registered name of a class with the same layers and fields.
_STEMS = {
    "Apertus1p5Text": "Apertus",
    "Camembert": "Roberta",
    "CohereCompassText": "CohereCompass",
    "Data2VecText": "Roberta",
    "EmbeddingGemma2Text": "EmbeddingGemma2",
    "Gemma3Text": "Gemma3",
    "Gemma3nText": "Gemma3n",
    "Gemma4Text": "Gemma4",
    "Gemma4UnifiedText": "Gemma4Unified",
    "GteNew": "New",
    "Llama4Text": "Llama4",
    "Phimoe": "PhiMoE",
    "Qwen3_5MoeText": "Qwen3_5Moe",
    "Qwen3_5Text": "Qwen3_5",
    "Qwen4ExpText": "Qwen4Exp",
}


def usual_name(architecture: str) -> str:
    """Return the class name under which an architecture's family is registered. A name in _OTHER_NAMES is replaced as a
    whole; of other names a beginning in _STEMS that For, Model or Encoder follows, and the rest is kept. Others are
    returned unchanged.
    """
    if architecture in _OTHER_NAMES:
        return _OTHER_NAMES[architecture]
    stem = _stem(architecture, _STEMS)
    return architecture if stem is None else _STEMS[stem] + architecture.removeprefix(stem)


def left_out(architecture: str) -> dict[str, Any]:
    """Return transformers' defaults, by field name, for fields that a file of this architecture lacks.

    Only those that differ from the defaults of the family's class are returned; {} if none differ. The dict is shared
    and must not be changed.
    """
    stem = _stem(architecture, _LEFT_OUT)
    return {} if stem is None else _LEFT_OUT[stem]


def _stem(architecture: str, stems: Iterable[str]) -> str | None:
    """Return the first of `stems` that begins an architecture's name and is followed by For, Model or Encoder; None if
    there is none.
    """
    ends = ("For", "Model", "Encoder")
    return next((stem for stem in stems if architecture.startswith(tuple(stem + end for end in ends))), None)
