"""Names of classes in config.json that are not a family's own: of pooling models, and of the same layers elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jaxengine.models.config.pooler import CLASSIFY, CLS, EMBED, LAST, MEAN, TOKEN_CLASSIFY, TOKEN_EMBED

# Suffixes of class names of pooling models, and their tasks. Their layers are those of *ForCausalLM, or of an encoder.
POOLING_SUFFIXES = {
    "ForSequenceClassification": CLASSIFY,
    "ForTokenClassification": TOKEN_CLASSIFY,
    "Model": EMBED,
    "ForMaskedLM": EMBED,
    "ForPreTraining": EMBED,
}
# Classes of pooling models whose names are not those of their families with a suffix.
POOLING_CLASSES = {
    "Gemma3TextModel": ("Gemma3ForCausalLM", EMBED),
    "HF_ColBERT": ("BertModel", TOKEN_EMBED),
    "ColBERTModel": ("BertModel", TOKEN_EMBED),
    "ColBERTModernBertModel": ("ModernBertModel", TOKEN_EMBED),
    "LlamaBidirectionalModel": ("LlamaForCausalLM", EMBED),
    "LlamaBidirectionalForSequenceClassification": ("LlamaForCausalLM", CLASSIFY),
    "EuroBertModel": ("LlamaForCausalLM", EMBED),
    "EuroBertForMaskedLM": ("LlamaForCausalLM", EMBED),
    "BgeM3EmbeddingModel": ("XLMRobertaModel", EMBED),
    "BertSpladeSparseEmbeddingModel": ("BertModel", EMBED),
}
# What transformers takes for fields that a file lacks, where it is not what it takes for the family's: by the
# beginnings of names of classes.
_T5 = {"vocab_size": 250112, "d_ff": 1024, "num_layers": 8, "num_heads": 6, "feed_forward_proj": "gated-gelu"}
_LEFT_OUT: dict[str, dict[str, Any]] = {
    "Camembert": {"vocab_size": 30522},
    "Data2VecText": {"vocab_size": 30522},
    "EuroBert": {"rms_norm_eps": 1e-5},
    "MT5": _T5,
    "UMT5": _T5,
    "XLMRoberta": {"vocab_size": 30522},
}
# Those with a decoder's layers whose tokens see their whole prompt, whatever their files say.
BIDIRECTIONAL = tuple(name for name, (family, _) in POOLING_CLASSES.items() if family == "LlamaForCausalLM")
# Values of the field `pooling` of classes that read it, by class or family; the first is the default.
_OF_LLAMA = {"mean": MEAN, "avg": MEAN, "cls": CLS, "last": LAST}
POOLINGS = dict.fromkeys(BIDIRECTIONAL, _OF_LLAMA)
POOLINGS["CohereCompassForCausalLM"] = {"eos": LAST, "bos": CLS, "mean": MEAN}
# Further names of classes: of a family's first code, and of whole models, of which a part is read.
_OTHER_NAMES = {
    "MPTForCausalLM": "MptForCausalLM",
    "MiniMaxM1ForCausalLM": "MiniMaxForCausalLM",
    "MiniMaxText01ForCausalLM": "MiniMaxForCausalLM",
    "AquilaForCausalLM": "LlamaForCausalLM",
    "AquilaModel": "LlamaForCausalLM",  # of models that generate, too
    "BaiChuanForCausalLM": "BaichuanForCausalLM",
    "Glm46VForConditionalGeneration": "Glm4vForConditionalGeneration",
    "Kimi_K25ForConditionalGeneration": "KimiK25ForConditionalGeneration",
    "LLaMAForCausalLM": "LlamaForCausalLM",
    "LightOnOCRForConditionalGeneration": "LightOnOcrForConditionalGeneration",
    "ChatGLMForConditionalGeneration": "ChatGLMModel",
    "InternVLChatModel": "InternVLForConditionalGeneration",
    "DeepseekOCR2ForCausalLM": "DeepseekOcr2ForConditionalGeneration",
    "MT5EncoderModel": "T5EncoderModel",
    "PanguEmbeddedForCausalLM": "InternLMForCausalLM",
    "XverseForCausalLM": "LlamaForCausalLM",
    "MiMoForCausalLM": "Qwen2ForCausalLM",
    "Qwen2_5OmniModel": "Qwen2_5OmniThinkerForConditionalGeneration",
    "Qwen2_5OmniForConditionalGeneration": "Qwen2_5OmniThinkerForConditionalGeneration",
    "Qwen3OmniMoeForConditionalGeneration": "Qwen3OmniMoeThinkerForConditionalGeneration",
}
# Beginnings of names of classes with the same layers and fields as those of another beginning.
_STEMS = {
    "Camembert": "Roberta",
    "CohereCompassText": "CohereCompass",
    "Data2VecText": "Roberta",
    "Gemma3Text": "Gemma3",
    "GteNew": "New",
    "Phimoe": "PhiMoE",
    "Qwen3_5Text": "Qwen3_5",
}


def usual_name(architecture: str) -> str:
    """Return the name under which an architecture's family is registered, with its own suffix.

    A name without another spelling is returned as it is.
    """
    if architecture in _OTHER_NAMES:
        return _OTHER_NAMES[architecture]
    stem = _stem(architecture, _STEMS)
    return architecture if stem is None else _STEMS[stem] + architecture.removeprefix(stem)


def left_out(architecture: str) -> dict[str, Any]:
    """Return what transformers takes for fields that a file lacks, where it is not what the family's class takes.

    Keys are field names; {} where nothing differs.
    """
    stem = _stem(architecture, _LEFT_OUT)
    return {} if stem is None else _LEFT_OUT[stem]


def _stem(architecture: str, stems: Iterable[str]) -> str | None:
    """Return the first of `stems` with which an architecture's name begins, if For, Model or Encoder follows; None for
    none of these.
    """
    ends = ("For", "Model", "Encoder")
    return next((stem for stem in stems if architecture.startswith(tuple(stem + end for end in ends))), None)
