"""Which scheme a weight gets, and that a model's build says all that a stored executable must be told apart by."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.config.lora import LoraSpec
from jaxengine.models.params.declare import declared_params
from jaxengine.models.quantization.base.plain import Plain
from jaxengine.models.quantization.registry import PLAIN, SCHEMES
from jaxengine.models.registry import build_model
from jaxengine.sharding.layout import MeshLayout
from jaxengine.sharding.stages import Stage
from tests.models.tiny import TINY


@dataclass(frozen=True)
class Marked(Plain):
    """Plain weights that are told apart by their axes."""

    def declare(self, shape, sources, axes, **options):
        return super().declare(shape, sources, (None,) * len(axes), **options)


@dataclass(frozen=True)
class Only:
    """Marked for modules whose name ends so, plain for all others."""

    ending: str

    def __call__(self, module):
        return Marked() if module.endswith(self.ending) else Plain()


def marked(build: Build) -> list[str]:
    params = declared_params(build_model(TINY, build))
    return [param.name for param in params if len(param.shape) > 1 and set(param.decl.axes) == {None}]


def test_a_scheme_is_chosen_by_the_checkpoints_name_of_a_module():
    build = Build("float32", scheme=Only("model.layers.1.self_attn.o_proj"))
    assert marked(build) == ["layers.1.attention.out.weight.values"]
    assert marked(Build("float32", scheme=Only("lm_head"))) == ["lm_head.weight.values"]
    assert marked(Build("float32")) == []
    # In a stage, layers are known by their numbers in the whole model.
    assert marked(replace(build, stage=Stage(1, 3))) == ["layers.0.attention.out.weight.values"]


def test_modules_of_one_product_share_a_scheme():
    with pytest.raises(
        ModelConfigError, match="one product must be stored in one way, got .*0.mlp.gate_proj as it is, .*0.mlp.up_proj"
    ):
        build_model(TINY, Build("float32", scheme=Only("up_proj")))


def test_a_build_is_told_by_its_text():
    """It is part of a stored executable's key, so nothing in it may be shown by where it lies in memory."""
    builds = [
        Build("float32"),
        Build("bfloat16"),
        Build("float32", MeshLayout(model=2)),
        Build("float32", stage=Stage(0, 1)),
        Build("float32", scheme=Only("lm_head")),
    ]
    assert len(set(builds)) == len({repr(build) for build in builds}) == len(builds)
    assert not any(" at 0x" in repr(build) for build in builds)
    assert PLAIN("anything") is SCHEMES["plain"]


def test_pages_are_the_same_with_any_number_of_replicas():
    lora = LoraSpec(2, 8)
    many = Build("float32", MeshLayout(data=2, attn=2, model=2, expert_parallel=True), lora=lora)
    assert many.of_pages == Build("float32", MeshLayout(model=2)).of_pages
    for other in (Build("float32"), Build("bfloat16", MeshLayout(model=2))):
        assert other.of_pages != many.of_pages
