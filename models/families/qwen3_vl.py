"""Qwen3-VL (Bai et al. 2025, arXiv:2511.21631): Qwen3, dense or with experts, with interleaved M-RoPE and a vision
tower, whose intermediate features its first layers add (DeepStack).
"""

from __future__ import annotations

from typing import Any, ClassVar

from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.hf import text_fields
from jaxengine.models.families.qwen2_vl import QWEN_NAMES, with_sight, without_mrope
from jaxengine.models.families.qwen3 import Qwen3ForCausalLM
from jaxengine.models.families.qwen3_moe import Qwen3MoeForCausalLM
from jaxengine.models.layers.base.norm import Identity
from jaxengine.models.params.source import CheckpointNames, StackedExperts
from jaxengine.models.vision.qwen3_vl import read_qwen3_vl


class Qwen3VLForConditionalGeneration(Qwen3ForCausalLM):
    """Qwen3 with M-RoPE and a vision tower."""

    # Nemotron ColEmbed VL has the last norm and does not use it.
    checkpoint_names: ClassVar[CheckpointNames] = QWEN_NAMES._replace(heads=("model.norm.",))

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        text = without_mrope(text_fields(fields).with_defaults(rope_theta=5e5))
        return with_sight(super().read_hf(text), text, fields, read_qwen3_vl)

    def make_norm(self, build: Build) -> nnx.Module:
        pooler = self.config.pooler
        return super().make_norm(build) if pooler is None or pooler.normed else Identity()


class Qwen3VLMoeForConditionalGeneration(Qwen3MoeForCausalLM):
    """Qwen3-MoE with M-RoPE and a vision tower. The matrices of all experts of a layer are stored in one tensor: [in,
    out] each in published checkpoints, [out, in] in those that transformers 5 writes.
    """

    checkpoint_names: ClassVar[CheckpointNames] = QWEN_NAMES._replace(stacked_experts=StackedExperts(out_first=None))

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        text = text_fields(fields).with_defaults(rope_theta=5e5, norm_topk_prob=True)
        text.require(norm_topk_prob=True)
        text = without_mrope(text)
        return with_sight(super().read_hf(text), text, fields, read_qwen3_vl)
