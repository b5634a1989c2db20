"""Cosmos 3 Edge (NVIDIA 2026), the part that understands: Llama with a squared ReLU without a gate and interleaved
M-RoPE, and SigLIP 2 over images and videos of any size.
"""

from __future__ import annotations

from typing import Any, ClassVar

from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.hf import text_fields
from jaxengine.models.families.llama import LAYER, LlamaForCausalLM, gated_fields
from jaxengine.models.families.qwen2_vl import with_rope_sections
from jaxengine.models.layers.base.activations import ACTIVATIONS
from jaxengine.models.layers.base.mlp import MLP
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.lfm2_vl import read_cosmos3_edge
from jaxengine.models.vision.llava import PROJECTOR, TOWER

_TEXT, _PROJECTOR = "model.language_model.", "model.projector."


# Names of published files, outside the tower; transformers writes them there, too.
_HEADS = tuple((f".self_attn.to_{part}.", f".self_attn.{part}_proj.") for part in "qkv")


class Cosmos3EdgeForConditionalGeneration(LlamaForCausalLM):
    """Llama with MLPs without a gate, M-RoPE and a vision tower. Published files have the text's tensors without
    beginnings, among those of the part that draws.
    """

    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(
            *((f"{part}.", f"model.{part}.") for part in ("layers", "embed_tokens", "norm")),
            (_TEXT, "model."),
            ("model.visual.", f"{TOWER}."),
            (f"{_PROJECTOR}norm.", f"{PROJECTOR}.layer_norm."),
            *((f"{_PROJECTOR}linear_fc{n}.", f"{PROJECTOR}.linear_{n}.") for n in (1, 2)),
        ),
        parts=(
            *_HEADS,
            (".self_attn.to_out.", ".self_attn.o_proj."),
            (".mlp.fc1.", ".mlp.up_proj."),
            (".mlp.fc2.", ".mlp.down_proj."),
        ),
        tower=(f"{TOWER}.", f"{PROJECTOR}."),
        tower_parts=(*_HEADS, (".mlp.up_proj.", ".mlp.fc1."), (".mlp.down_proj.", ".mlp.fc2.")),
        unused=tuple(
            f"{start}{part}"
            for start in ("", _TEXT)
            for part in ("proj_in.", "proj_out.", "time_embedder.", "action_proj_", "action_modality_embed")
        ),
        unused_parts=("_moe_gen.", ".to_add_out.", ".norm_added_q.", ".norm_added_k.", ".k_norm_und_for_gen.")
        + tuple(f".add_{part}_proj." for part in "qkv"),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        text = text_fields(fields).with_defaults(rms_norm_eps=1e-5, head_dim=128, rope_theta=1e8)
        bias = text.boolean("attention_bias", False)
        shared = gated_fields(text, default="relu2", bias=bias, output_bias=bias)
        shared |= {"mlp_bias": text.boolean("mlp_bias", False)}
        return with_rope_sections(shared, text) | {"tower": read_cosmos3_edge(fields)}

    def make_mlp(self, layer: int, build: Build) -> nnx.Module:
        config, source = self.config, f"{LAYER}.mlp"
        options = {"activation": ACTIVATIONS[config.activation], "bias": config.mlp_bias, "build": build}
        return MLP(config.hidden_size, config.intermediate_size, source=source, **options)
