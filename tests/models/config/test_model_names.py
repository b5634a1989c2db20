"""Models of the hub by name: what is published of them is read, and gives a model of the published size."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.hf import hf_architecture
from jaxengine.models.params.declare import declared_params
from jaxengine.models.registry import model_for_hf, read_hf
from scripts.model_names import read_names
from tests.tables import each_row

ROWS = {row.names[0]: row for row in read_names()}
# One of each way of counting: dense and tied, experts, a state, a vision tower, a declared family.
FEW = (
    "openai-community/gpt2",
    "tiiuae/falcon-7b",
    "Qwen/Qwen3-0.6B",
    "allenai/OLMoE-1B-7B-0924",
    "google/gemma-3-4b-pt",
)


def test_names_are_many_and_each_is_there_once():
    names = [name for row in read_names() for name in row.names]
    assert len(names) == len(set(names)) >= 150


@each_row("name", sorted(ROWS))
def test_a_published_configuration_is_read(name):
    config = ROWS[name].config
    model = read_hf(config)
    assert model.architecture.partition("[")[0] == model_for_hf(hf_architecture(ConfigFields(config))).__name__


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in FEW else pytest.mark.thorough("a further name")) for name in sorted(ROWS)],
)
def test_a_model_has_as_many_parameters_as_published(name):
    row = ROWS[name]
    config = replace(read_hf(row.config), quantization=None)
    model = nnx.eval_shape(lambda: model_for_hf(config.architecture)(config, Build("bfloat16")))
    count = sum(math.prod(param.shape) for param in declared_params(model)) / 1e9
    assert count == pytest.approx(row.parameters, rel=3e-3)
