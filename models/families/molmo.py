"""Molmo (Deitke et al. 2024, arXiv:2409.17146), of the first version: layers of Qwen2, or of OLMo 2 with norms of all
heads, with a vision tower.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from jaxengine.models.config.declared import ALL_HEADS, OUTPUT, DeclaredForm
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.families.molmo2 import PREFIXES, ROW, TEXT, TOWER_PARTS, Molmo2ForConditionalGeneration
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.molmo import read_molmo_tower

# Tokens of images, which are never chosen, behind those of `embedding_size`. No file says how many.
_FURTHER = 128


def _form(fields: ConfigFields, form: DeclaredForm) -> DeclaredForm:
    """Return the form with norms of queries and keys if `attention_layer_norm` is true, and with a layer's norms after
    its parts if `norm_after` is. Raises ModelConfigError for wrong fields.
    """
    normed = fields.boolean("attention_layer_norm")
    form = replace(form, qk_norm=ALL_HEADS, qk_norms=form.qk_norms if normed else ())
    return replace(form, placement=OUTPUT) if fields.boolean("norm_after") else form


def _sizes(fields: ConfigFields) -> dict[str, Any]:
    """Return `intermediate_size`, half of the file's, and `vocab_size`: `embedding_size`, or the file's own without
    that. Raises ModelConfigError for wrong fields, and for an odd size.
    """
    inner = fields.integer("intermediate_size")
    if inner % 2:
        raise fields.fail("intermediate_size", "even: it counts gate and up")
    return {
        "intermediate_size": inner // 2,
        "vocab_size": fields.integer("embedding_size", None) or fields.integer("vocab_size"),
    }


class MolmoForCausalLM(Molmo2ForConditionalGeneration):
    """Molmo. Embeddings of images are added to those of their tokens, which are causal."""

    row: ClassVar = ROW._replace(
        about="Text part of Molmo.",
        # Those of the published code's class.
        defaults={
            "attention_bias": False,
            "attention_layer_norm": False,
            "hidden_act": "silu",
            "max_position_embeddings": 2048,
            "norm_after": False,
            "rms_norm_eps": 1e-5,
        },
        only={"block_type": "llama", "clip_qkv": None, "layer_norm_type": "rms", "weight_tying": False},
        adapt=_sizes,
        choose=_form,
        each_layer=None,
    )
    checkpoint_names: ClassVar[CheckpointNames] = Molmo2ForConditionalGeneration.checkpoint_names._replace(
        prefixes=((f"{TEXT}ff_out.", "lm_head."), *PREFIXES),
        parts=(
            (".attn_norm", ".input_layernorm"),
            (".ff_norm", ".post_attention_layernorm"),
            (".att_proj", ".self_attn.att_proj"),
            (".q_norm", ".self_attn.q_norm"),
            (".k_norm", ".self_attn.k_norm"),
            (".attn_out", ".self_attn.o_proj"),
            (".ff_proj", ".mlp.ff_proj"),
            (".ff_out", ".mlp.down_proj"),
        ),
        tower_parts=TOWER_PARTS,
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        shared = cls.row.read(fields)
        scored = shared["vocab_size"]
        return {
            **shared,
            "vocab_size": scored + _FURTHER,
            "scored_tokens": scored,
            "tie_word_embeddings": False,
            "tower": read_molmo_tower(fields, shared["intermediate_size"]),
        }
