"""What the matrix of families takes for a model that is not split: refusals as the engine makes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from jaxengine.config.base.platforms import PLATFORMS
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.registry import read_folder
from jaxengine.runner.start.devices import build_split, choose_devices
from jaxengine.sharding.layout import MeshLayout
from jaxengine.sharding.stages import Stage
from tests.fixtures.drawn_weights import FOLDER
from tests.fixtures.recorded_prompts import WITH_MEDIA, Recorded, recorded_prompts
from tests.models.families.matrix import MODES, NUM_OTHERS, Workload, is_not_split

MODEL = read_folder(FOLDER / "llama")
ONE_LAYER = replace(MODEL, attention=MODEL.attention[:1])
ODD_HEADS = replace(MODEL, attention=tuple(replace(each, num_heads=3, num_kv_heads=3) for each in MODEL.attention))


def opened(model: ModelConfig, mode: str, stage: Stage | None = None, mesh: MeshLayout | None = None) -> None:
    """What of an engine's start may refuse to split the model."""
    resolved = EngineConfig.from_options(**MODES[mode]).resolved(model, PLATFORMS["cpu"])
    stage = stage or Stage(0, len(model.attention))
    build_split(model, resolved, mesh or resolved.mesh_layout(model), stage)


def too_few_devices() -> None:
    choose_devices(EngineConfig.from_options(**MODES["tp 2"]), ["a device"], None)


def other() -> None:
    raise ConfigError("num_gpu_blocks_override", 3, "at least 4")


def accident() -> None:
    raise ValueError("a weight cannot be split evenly over what nobody asked for")


@pytest.mark.parametrize(
    ("mode", "start", "not_split"),
    [
        ("tp 2", lambda: opened(ODD_HEADS, "tp 2", mesh=MeshLayout(model=2)), True),
        ("ep 2", lambda: opened(MODEL, "ep 2"), True),
        ("pp 2", lambda: opened(ONE_LAYER, "pp 2"), True),
        ("dp 2", lambda: opened(MODEL, "ep 2"), False),
        ("tp 2", too_few_devices, False),
        ("tp 2", other, False),
        ("tp 2", accident, False),
    ],
)
def test_only_a_refusal_of_the_split_says_that_a_model_is_not_split(mode: str, start: Callable, not_split: bool):
    with pytest.raises(ValueError) as refused:
        start()
    assert is_not_split(refused.value, MODES[mode]) == not_split


# Text parts of checkpoints that see, recorded before their pictures were.
TEXT_PARTS = {"gemma3_vision", "llama4_vision", "mistral3_vision", "qwen3_5_moe_vision", "qwen3_5_vision"}


def test_what_sees_is_asked_with_pictures():
    """Every checkpoint with recorded logits and a tower has prompts with pictures, whose answers are known."""
    names = {path.parent.name for path in FOLDER.glob("*_vision/golden.npz")}
    assert names - TEXT_PARTS <= set(WITH_MEDIA)
    for name in "llava_vision", "qwen2_vl_vision", "voxtral_sound", "qwen3_omni":
        recorded = recorded_prompts(name, str)
        assert any(any(each.prompt["multi_modal_data"].values()) for each in recorded.values()), name
        assert all(each.answer and each.token_ids for each in recorded.values()), name


def test_further_prompts_of_media_begin_as_the_recorded_ones():
    """Each recorded text again and again, longer each time, with the same pictures; the longest has room."""
    recorded = [Recorded({"prompt": text, "multi_modal_data": {}}, [1] * 5, [7, 8]) for text in ("w1", "w2")]
    workload = Workload.of_media(recorded)
    assert workload.greedy == [[7, 8], [7, 8]] and len(workload.prompts) == len(workload.params) == NUM_OTHERS + 2
    assert [each["prompt"] for each in workload.prompts[:6]] == ["w1", "w2", "w1", "w2", "w1 w7", "w2 w7"]
    assert workload.wrong([[7, 8], [7, 9], *[[0]] * NUM_OTHERS]) == [1]
