"""Jina Embeddings v3 (Sturua et al. 2024, arXiv:2409.10173): XLM-RoBERTa with rope in place of learned positions, and
XLM-RoBERTa itself as Jina AI's own code stores it, for example jinaai/jina-reranker-v2-base-multilingual.
"""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.gguf import GGUFConfig
from jaxengine.models.families.roberta import RobertaModel
from jaxengine.models.layers.encoder import EncoderNames, NamedEncoder, gguf_encoder_fields, rotated_fields
from jaxengine.models.params.source import CheckpointNames


class JinaEmbeddingsV3Model(NamedEncoder):
    """Post-norm encoder with rope, with a dense layer, tanh and scores of labels if it classifies."""

    gguf_architecture: ClassVar[str | None] = "jina-bert-v3"
    masked_gelu: ClassVar[bool] = True
    names: ClassVar[EncoderNames] = EncoderNames(
        layer="model.encoder.layers.{layer}",
        qkv=("mixer.Wqkv",),
        out="mixer.out_proj",
        attention_norm="norm1",
        up="mlp.fc1",
        down="mlp.fc2",
        mlp_norm="norm2",
        dense="model.classifier.dense",
        labels="model.classifier.out_proj",
        embedding_norm="model.emb_ln",
        masked=("lm_head.dense", "lm_head.layer_norm", "lm_head.bias"),
    )
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(("model.roberta.", "model."),),
        heads=("model.pooler.", "model.lm_head.", "lm_head.", "model.classifier."),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = fields.with_defaults(
            vocab_size=250002,
            hidden_size=1024,
            num_hidden_layers=24,
            num_attention_heads=16,
            intermediate_size=4096,
            max_position_embeddings=8194,
            layer_norm_eps=1e-5,
            rope_theta=fields.number("rotary_emb_base", 20_000.0),
        )
        shared = rotated_fields(fields, types=1)
        return shared | {"encoder": shared["encoder"]._replace(adaptation=_adaptation(fields))}

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        return gguf_encoder_fields(gguf, activation="gelu", bias=True, rotates=True)


class XLMRobertaFlashModel(RobertaModel):
    """RoBERTa's layers under the names of Jina Embeddings v3."""

    names: ClassVar[EncoderNames] = JinaEmbeddingsV3Model.names


def _adaptation(fields: ConfigFields) -> tuple[int, float] | None:
    """Return EncoderConfig.adaptation: (index of `default_task` in `lora_adaptations`, lora_alpha / lora_rank); None
    without a default task. Raises ModelConfigError for wrong fields, and for a task that the checkpoint lacks.
    """
    if (task := fields.value("default_task", None)) is None:
        return None
    tasks = fields.value("lora_adaptations", None) or []
    if not isinstance(tasks, list) or task not in tasks:
        raise fields.fail("default_task", f"one of {', '.join(map(str, tasks))}" if tasks else "absent")
    return tasks.index(task), fields.number("lora_alpha", 1.0) / fields.integer("lora_rank")
