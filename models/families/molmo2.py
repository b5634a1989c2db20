"""Molmo 2 (Clark et al. 2026): layers of Qwen3, or of OLMo 2, with a vision tower. The tokens of all images of a
prompt, or of all frames of a video, attend to each other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.attention import LayerAttention
from jaxengine.models.config.declared import ALL_HEADS, OUTPUT, RMS, DeclaredForm
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.hf import text_fields
from jaxengine.models.families.declared import declared_class
from jaxengine.models.families.declared_row import Row
from jaxengine.models.families.llama import LAYER
from jaxengine.models.layers.base.activations import ACTIVATIONS
from jaxengine.models.layers.base.mlp import GatedMLP
from jaxengine.models.params.declare import parts_of
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.llava import PROJECTOR, TOWER
from jaxengine.models.vision.molmo2 import read_molmo2_tower

# The part of the name of the norms of queries and keys: each head, or all of them at once.
_QK_NORMS = {"qwen3": RMS, "olmo": ALL_HEADS}
# Beginnings of names in published files, and the model's.
TEXT, BACKBONE = "model.transformer.", "model.vision_backbone."
PREFIXES = (
    (f"{TEXT}wte.", "model.embed_tokens."),
    (f"{TEXT}blocks.", "model.layers."),
    (f"{TEXT}ln_f.", "model.norm."),
    (f"{BACKBONE}image_vit.transformer.resblocks.", f"{TOWER}.layers."),
    (f"{BACKBONE}image_vit.", f"{TOWER}."),
    (BACKBONE, f"{PROJECTOR}."),
)
# Names of parts of towers in published files, and in transformers.
TOWER_PARTS = (
    *((f".attention.w{each}", f".self_attn.{each}_proj") for each in "qkvo"),
    (".feed_forward.w1", ".mlp.fc1"),
    (".feed_forward.w2", ".mlp.fc2"),
    (".attention_norm", ".layer_norm1"),
    (".ffn_norm", ".layer_norm2"),
    *((f"image_pooling_2d.w{each}", f"image_pooling_2d.{each}_proj") for each in "qkvo"),
    ("image_projector.w1", "image_projector.gate_proj"),
    ("image_projector.w2", "image_projector.down_proj"),
    ("image_projector.w3", "image_projector.up_proj"),
)


def _form(fields: ConfigFields, form: DeclaredForm) -> DeclaredForm:
    """Return the form with the norms of `qk_norm_type`, and with a layer's norms after its parts if `norm_after` is
    true. Raises ModelConfigError for wrong fields.
    """
    kind = fields.text("qk_norm_type")
    if kind not in _QK_NORMS:
        raise fields.fail("qk_norm_type", " or ".join(_QK_NORMS))
    form = replace(form, qk_norm=_QK_NORMS[kind])
    return replace(form, placement=OUTPUT) if fields.boolean("norm_after") else form


def _layer(fields: ConfigFields, layer: int, attention: LayerAttention) -> LayerAttention:
    """Return the layer's attention, which is `mutual`, and whose rope is not scaled if `rope_scaling_layers` is a list
    without the layer. Raises ModelConfigError for a list of anything but integers.
    """
    listed = fields.value("rope_scaling_layers", None)
    if listed is not None and (not isinstance(listed, list) or any(type(each) is not int for each in listed)):
        raise fields.fail("rope_scaling_layers", "a list of layers, or null")
    rope = attention.rope
    if listed is not None and layer not in listed and rope is not None:
        rope = replace(rope, scaling=None)
    return replace(attention, rope=rope, mutual=True)


ROW = Row(
    about="Text part of Molmo 2.",
    form=DeclaredForm(
        norm=RMS,
        qkv=("self_attn.att_proj",),
        qk_norms=("self_attn.q_norm", "self_attn.k_norm"),
        up=("mlp.ff_proj",),
        joined_up=True,
    ),
    spelled={"qkv_bias": "attention_bias", "layer_norm_eps": "rms_norm_eps"},
    defaults={
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "additional_vocab_size": 128,
        "attention_bias": False,
        "hidden_act": "silu",
        "max_position_embeddings": 36864,
        "norm_after": False,
        "qk_norm_type": "qwen3",
        "rms_norm_eps": 1e-6,
    },
    only={"use_qk_norm": True},
    eps="rms_norm_eps",
    bias="attention_bias",
    output_bias=False,
    mlp_bias=False,
    grouped=True,
    choose=_form,
    each_layer=_layer,
    parts=(
        (".attn_norm", ".input_layernorm"),
        (".ff_norm", ".post_attention_layernorm"),
        (".attn_out", ".o_proj"),
        (".ff_out", ".down_proj"),
    ),
    divided={
        ".self_attn.att_proj": (".self_attn.q_proj", ".self_attn.k_proj", ".self_attn.v_proj"),
        ".mlp.ff_proj": (".mlp.up_proj", ".mlp.gate_proj"),
    },
)
_Molmo2: Any = declared_class("Molmo2TextModel", ROW)


class Molmo2ForConditionalGeneration(_Molmo2):
    """Molmo 2. Embeddings of images have the positions of tokens, and are added to those of their tokens."""

    checkpoint_names: ClassVar[CheckpointNames] = _Molmo2.checkpoint_names._replace(
        prefixes=(
            *PREFIXES,
            # Names that transformers has in memory.
            ("model.language_model.", "model."),
            *((f"model.{part}.", f"{part}.") for part in (TOWER, PROJECTOR)),
            *_Molmo2.checkpoint_names.prefixes,
        ),
        tower=(f"{TOWER}.", f"{PROJECTOR}."),
        tower_parts=TOWER_PARTS,
        # Tokens of images, which are never chosen, are the last. When it saves the table, transformers halves it.
        joined={"embed_tokens.weight": ("embed_tokens.embedding", "embed_tokens.new_embedding")},
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        text = text_fields(fields, optional=True)
        shared: dict[str, Any] = super().read_hf(text)
        further = text.integer("additional_vocab_size", ROW.defaults["additional_vocab_size"], minimum=0)
        scored = shared["vocab_size"]
        sizes = {"vocab_size": scored + further, "scored_tokens": scored}
        tower = read_molmo2_tower(fields, shared["hidden_size"])
        # transformers' class never ties the head, whatever the file has.
        return {**shared, **sizes, "tie_word_embeddings": False, "tower": tower}

    def make_mlp(self, layer: int, build: Build) -> nnx.Module:
        size, ffn = self.config.hidden_size, self.config.intermediate_size
        up, gate = parts_of(f"{LAYER}.mlp.ff_proj", ffn, ffn)
        activation = ACTIVATIONS[self.form.activation]
        return GatedMLP(size, ffn, source=f"{LAYER}.mlp", gate_up=(gate, up), activation=activation, build=build)
