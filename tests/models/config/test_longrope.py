"""LongRoPE: which factors an engine takes, and what is read of a config.json."""

from __future__ import annotations

import numpy as np
import pytest

from jaxengine.checkpoint.model_source import open_model
from jaxengine.config.engine_config import EngineConfig
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.config.rope import Rope, RopeScaling
from jaxengine.models.registry import read_hf
from tests.fixtures.drawn_weights import FOLDER

# Phi-3-mini-128k-instruct, but for its 48 factors and its number of layers.
PHI3_128K = {
    "architectures": ["Phi3ForCausalLM"],
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "rope_scaling": {"type": "longrope", "short_factor": [1.05] * 48, "long_factor": [1.0] * 8 + [60.0] * 40},
}


def rope(**changes) -> Rope:
    return read_hf({**PHI3_128K, **changes}).attention[0].rope


def scaling(**changes) -> dict:
    return {**PHI3_128K["rope_scaling"], **changes}


def test_a_published_config():
    read = rope().scaling
    assert read is not None and read.original_max_position_embeddings == 4096
    assert read.attention_factor == pytest.approx(1.19023807, abs=1e-8)  # sqrt(1 + ln 32 / ln 4096)
    assert rope(rope_scaling=scaling(type="su")) == rope()
    # transformers 5 writes the same in one mapping.
    nested = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 1.0, **PHI3_128K["rope_scaling"]}
    assert rope(rope_theta=None, rope_scaling=None, rope_parameters=nested) == rope()
    inside = rope(original_max_position_embeddings=None, rope_scaling=scaling(original_max_position_embeddings=4096))
    assert inside == rope()


@pytest.mark.parametrize("max_model_len, factor", [(4096, 1.05), (4097, 60.0), (131072, 60.0)])
def test_an_engine_takes_one_set_of_factors(max_model_len, factor):
    chosen = rope().up_to(max_model_len)
    plain = Rope(96).frequencies()
    np.testing.assert_allclose(chosen.frequencies()[-1], plain[-1] / factor, rtol=1e-12)
    assert chosen.scaling is not None and chosen.scaling.attention_factor == pytest.approx(1.19023807, abs=1e-8)
    assert chosen.up_to(10) == chosen


def test_other_ropes_do_not_depend_on_the_length():
    for each in (Rope(8), Rope(8, scaling=RopeScaling("linear", 2.0))):
        assert each.up_to(1) == each


@pytest.mark.parametrize("max_model_len, last", [(16, 3.5), (17, 32.0), (None, 32.0)])
def test_the_length_is_that_of_the_engine(max_model_len, last):
    config = EngineConfig(model=str(FOLDER / "phi3_longrope"), load_format="dummy", max_model_len=max_model_len)
    scalings = {layer.rope.scaling for layer in open_model(config).config.attention}
    assert [each and each.factors[-1] for each in scalings] == [last]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"short_factor": None}, "short_factor is missing"),
        ({"short_factor": [1.0] * 47}, "must hold equally many numbers, got 48 and 47"),
        ({"short_factor": [1.0] * 47, "long_factor": [1.0] * 47}, "rotary_dim / 2 = 48 values, got 47"),
        ({"long_factor": [1.0] * 5000}, "long_factor must be a list of at most 4096 numbers"),
        ({"long_factor": [True] * 48}, "long_factor must be a list of at most 4096 numbers"),
        ({"long_factor": [10**400] * 48}, "long_factor must be a list of finite numbers"),
        ({"long_factor": [0.0] * 48}, "finite numbers > 0"),
        ({"long_mscale": 1.2}, "long_mscale must be absent"),
        ({"attention_factor": -1.0}, "attention_factor must be a finite number > 0"),
    ],
)
def test_what_cannot_be_used(changes, message):
    with pytest.raises(ModelConfigError, match=message):
        rope(rope_scaling=scaling(**changes))
