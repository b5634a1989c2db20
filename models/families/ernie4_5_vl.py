"""ERNIE 4.5-VL (Baidu 2025, ERNIE 4.5 Technical Report): ERNIE 4.5 with experts of two kinds, of which one is for
tokens of images and videos, with M-RoPE (rotation by positions in time, height and width) and a vision tower.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.experts import ExpertsConfig
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.hf import listed_dense, read_head_dim, read_rope, text_fields
from jaxengine.models.config.rope import Rope
from jaxengine.models.families.ernie4_5_moe import Ernie4_5_MoeForCausalLM, read_least_sum
from jaxengine.models.families.llama import LAYER, LlamaLayer, gated_fields
from jaxengine.models.families.qwen2_vl import without_mrope
from jaxengine.models.forward_batch import ForwardBatch
from jaxengine.models.layers.attention.attention import LayerPages, StepInputs
from jaxengine.models.layers.base.rows import Rows
from jaxengine.models.layers.base.section import ExpertLoad
from jaxengine.models.layers.experts.moe import MixtureOfExperts, PickedExperts, RouterLogits
from jaxengine.models.params.declare import ParamDecl, Source, declare
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.ernie4_5_vl import RESAMPLER, read_ernie4_5_vl
from jaxengine.models.vision.qwen2_vl import VISUAL
from jaxengine.pallas_kernels.kv.pages import KVPages

_CORRECTION = "moe_statics.e_score_correction_bias"
_SECTIONS, _TIME_PAIRS = [22, 22, 20], 20


class ErnieVLExperts(MixtureOfExperts):
    """Mixture of experts of one kind: its correction bias is a row, number `row`, of a table [2, E] for both kinds."""

    def __init__(self, config: ModelConfig, row: int, *, source: str, build: Build):
        self.row = row
        super().__init__(config, source=source, router_dtype=jnp.float32, build=build)

    def make_correction_bias(self, source: str, num_experts: int) -> nnx.Param:
        tensor = Source(f"{LAYER}.mlp.{_CORRECTION}", 1, first=self.row, tensor_rows=2)
        return declare((1, num_experts), jnp.float32, ParamDecl((None, None), (tensor,), init_std=0.02))


class ExpertsOfTwoKinds(nnx.Module):
    """Experts for text, with the shared MLP for all tokens, and further experts for tokens of images."""

    def __init__(self, config: ModelConfig, build: Build):
        experts = config.experts
        assert experts is not None
        further = replace(experts, intermediate_size=experts.image_intermediate_size, shared_intermediate_size=0)
        self.of_text = ErnieVLExperts(config, 0, source=f"{LAYER}.mlp", build=build)
        self.of_images = ErnieVLExperts(replace(config, experts=further), 1, source=f"{LAYER}.mlp.image", build=build)

    def __call__(self, x: jax.Array, rows: Rows) -> jax.Array:
        """Return the output [T, D] for x [T, D] of each token's kind of experts (`rows.is_image`), plus the shared MLP.

        Sets `load` to the ExpertLoad of both kinds together: expert e of each counts as expert e. Where modules record
        router logits or picked experts, it sets `logits` and `picked` to those of each token's kind. What the modules
        of the two kinds have recorded themselves is removed.
        """
        assert rows.is_image is not None
        kinds = self.of_text, self.of_images
        taken = rows.is_token & ~rows.is_image, rows.is_token & rows.is_image
        with jax.named_scope("experts_of_text"):
            y = self.of_text(x, rows._replace(is_token=taken[0]))
        with jax.named_scope("experts_of_images"):
            y = y + self.of_images(x, rows._replace(is_token=taken[1]))
        load = sum(each.load[...] for each in kinds)
        self.load = ExpertLoad(load)
        for name, note in (("logits", RouterLogits), ("picked", PickedExperts)):
            if all(hasattr(each, name) for each in kinds):
                text, images = (getattr(each, name)[...] for each in kinds)
                setattr(self, name, note(jnp.where(rows.is_image[:, None], images, text)))
        for each in kinds:
            for name in ("load", "logits", "picked"):
                if hasattr(each, name):
                    delattr(each, name)
        return y


class ErnieVLLayer(LlamaLayer):
    """Llama's layer, which passes to its MLP which rows are tokens of images."""

    def __call__(self, x: jax.Array, kv: KVPages, pages: LayerPages, step: StepInputs) -> tuple[jax.Array, KVPages]:
        assert step.of_layer is not None
        rows = step.rows._replace(is_image=step.of_layer[:, 0] > 0)
        return super().__call__(x, kv, pages, step._replace(rows=rows))


class Ernie4_5_VLMoeForConditionalGeneration(Ernie4_5_MoeForCausalLM):
    """ERNIE 4.5 with experts for text and for images, M-RoPE and a vision tower."""

    biases_logits: ClassVar[bool] = False
    # Names in published files, which transformers 5 writes, too, with "model." before those of the tower.
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(
            *((f"{old}.", f"{VISUAL}.") for old in ("model.vision_model", "vision_model", "model.vision_tower")),
            (f"model.{RESAMPLER}.", f"{RESAMPLER}."),
            ("model.language_model.", "model."),  # transformers 5 in memory, and so in adapters
        ),
        suffixes=((".mlp.gate.weight_1", ".mlp.image.gate.weight"),),
        parts=(  # of transformers' modules, and so in adapters
            (".mlp.text_moe.experts", ".mlp.experts"),
            (".mlp.text_moe.gate", ".mlp.gate"),
            (".mlp.vision_moe.", ".mlp.image."),
            *((f"_linear.{new}", f"_linear.{old}") for new, old in (("fc1", 0), ("fc2", 2), ("ln", 3))),
        ),
        transposed=(".mlp.gate.weight", ".mlp.gate.weight_1"),  # but not in memory
        joined={f".mlp.{_CORRECTION}": tuple(f".mlp.{kind}gate.{_CORRECTION}" for kind in ("", "image."))},
        further_experts="image.experts",
        tower=(f"{VISUAL}.", f"{RESAMPLER}."),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        # In the published file the text's fields are not nested.
        text = text_fields(fields) if fields.has("text_config") else fields
        text = without_mrope(text.with_defaults(rope_theta=500000.0, rms_norm_eps=1e-5))
        text.require(moe_use_aux_free=True)
        bias, count = text.boolean("use_bias", False), text.integer("num_hidden_layers")
        rope = _read_rope(text, read_head_dim(text))
        shared = gated_fields(text, ropes=[rope] * count, tied=True, bias=bias, output_bias=bias)
        tower = read_ernie4_5_vl(fields, text)
        tokens = tuple(sorted({token for _, token in tower.tokens}))
        return shared | {
            "experts": replace(_read_experts(text, count), image_tokens=tokens),
            "mlp_bias": bias,
            "layer_input_size": 1,  # whether a token is one of an image
            "tower": tower,
        }

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        return ErnieVLLayer(self.config, self.make_attention(layer, build), self.make_mlp(layer, build), build)

    def make_experts(self, build: Build) -> nnx.Module:
        return ExpertsOfTwoKinds(self.config, build)

    def make_layer_inputs(self, batch: ForwardBatch, x: jax.Array, rows: Rows) -> jax.Array:
        """Return 1 for tokens of images and 0 for others, [T, L, 1] in the dtype of x [T, D], by their ids."""
        assert self.config.experts is not None
        is_image = jnp.isin(batch.token_ids, jnp.asarray(self.config.experts.image_tokens, jnp.int32))
        return jnp.broadcast_to(is_image.astype(x.dtype)[:, None, None], (len(is_image), self.config.num_layers, 1))


def _read_rope(text: ConfigFields, head_dim: int) -> Rope:
    """Return the rope, of neighbouring elements, with M-RoPE's sections.

    `mrope_section` counts the pairs of height, width and time, in this order. If it is absent, `freq_allocation` is the
    number of time's pairs, and height and width share the others equally; without both fields the sections are those of
    ERNIE 4.5. Raises ModelConfigError for wrong fields, if the two contradict each other, and for scaled frequencies.
    """
    given = ConfigFields(text.mapping("rope_parameters") or text.mapping("rope_scaling") or {})
    plain = read_rope(text, head_dim, interleaved=True)
    if plain.scaling is not None:
        raise given.fail("rope_type", '"default"')
    time = text.integer("freq_allocation", _TIME_PAIRS, minimum=0)
    derived = [(head_dim // 2 - time) // 2] * 2 + [time]
    sections = given.value("mrope_section", derived if text.has("freq_allocation") else _SECTIONS)
    if not isinstance(sections, list) or len(sections) != 3 or any(type(each) is not int for each in sections):
        raise given.fail("mrope_section", "a list of three numbers of pairs")
    if text.has("freq_allocation") and sections != derived:
        raise text.fail("freq_allocation", f"{sections[2]}, the last number of mrope_section")
    height, width, time = sections
    return replace(plain, sections=(time, height, width), time_last=True)


def _read_experts(text: ConfigFields, num_layers: int) -> ExpertsConfig:
    """Return the ExpertsConfig: by default 6 (`moe_k`) of 64 (`moe_num_experts`) experts of 1536 or, for images, 512
    elements, and 2 shared ones (`moe_num_shared_experts`), of the size of text's. Fields may have one value for experts
    of both kinds, text and images, or a list of two. Layers without experts are those of `_dense_layers`. Raises
    ModelConfigError for wrong fields, and if the two kinds differ in number or layers.
    """
    sizes = _both(text, "moe_intermediate_size", [1536, 512])
    numbers = _both(text, "moe_num_experts", 64)
    if numbers[0] != numbers[1]:
        raise text.fail("moe_num_experts", "two equal numbers")
    return ExpertsConfig(
        num_experts=numbers[0],
        num_per_token=text.integer("moe_k", 6),
        intermediate_size=sizes[0],
        image_intermediate_size=sizes[1],
        dense_layers=_dense_layers(text, num_layers),
        correction_bias=True,
        min_weight_sum=read_least_sum(text),
        shared_intermediate_size=sizes[0] * text.integer("moe_num_shared_experts", 2, minimum=0),
    )


def _dense_layers(text: ConfigFields, num_layers: int) -> tuple[int, ...]:
    """Return the ascending indices of the layers with a dense MLP: those that `mlp_layer_types` lists as dense.

    Without the list, experts are in each `moe_layer_interval`-th layer (1 by default) from `moe_layer_start_index` (1)
    to `moe_layer_end_index` (-1, the last), both included, counted from 0. Raises ModelConfigError for wrong fields,
    and if the layers for text and images differ.
    """
    if (listed := listed_dense(text)) is not None:
        return listed
    step = text.integer("moe_layer_interval", 1)
    firsts = _both(text, "moe_layer_start_index", 1, minimum=0)
    lasts = _both(text, "moe_layer_end_index", -1, minimum=-1)
    found = [
        tuple(n for n in range(num_layers) if (n + 1) % step or not first <= n <= (num_layers if last == -1 else last))
        for first, last in zip(firsts, lasts, strict=True)
    ]
    if found[0] != found[1]:
        raise text.fail("moe_layer_start_index", "the same layers as for text for images, as moe_layer_end_index")
    return found[0]


def _both(text: ConfigFields, name: str, default: Any, *, minimum: int = 1) -> tuple[int, int]:
    """Return the field `name` as (value for text, value for images): a list of two integers, or one integer for both.
    default: value of an absent field. Raises ModelConfigError for other values, and for integers below `minimum`.
    """
    value = text.value(name, default)
    both = value if isinstance(value, list) else [value, value]
    if len(both) != 2 or any(type(each) is not int or each < minimum for each in both):
        raise text.fail(name, f"an integer >= {minimum}, or two")
    return both[0], both[1]
