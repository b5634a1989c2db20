"""What the matrix of families asks and compares, and which of an engine's refusals say that a model is not split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from jaxengine.config.base.platforms import PLATFORMS
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.registry import read_folder
from jaxengine.runner.start.devices import build_split, choose_devices
from jaxengine.sharding.layout import MeshLayout
from jaxengine.sharding.stages import Stage
from tests.fixtures.drawn_weights import FOLDER
from tests.fixtures.pooled_prompts import KINDS, POOLED, pooled_prompts
from tests.fixtures.recorded_prompts import ATTENDING, WITH_MEDIA, Recorded, recorded_prompts
from tests.models.families.matrix import NUM_OTHERS, Workload
from tests.models.families.modes import MODES, is_not_split
from tests.models.families.pooled_matrix import error_of
from tests.models.quantization import matrix as formats

MODEL = read_folder(FOLDER / "llama")
ONE_LAYER = replace(MODEL, attention=MODEL.attention[:1])
ODD_HEADS = replace(MODEL, attention=tuple(replace(each, num_heads=3, num_kv_heads=3) for each in MODEL.attention))


def opened(model: ModelConfig, mode: str, stage: Stage | None = None, mesh: MeshLayout | None = None) -> None:
    """What of an engine's start may refuse to split the model."""
    resolved = EngineConfig.from_options(**MODES[mode]).resolved(model, PLATFORMS["cpu"])
    stage = stage or Stage(0, len(model.attention))
    build_split(model, resolved, mesh or resolved.mesh_layout(model), stage)


def attending() -> None:
    model = read_folder(FOLDER / "whisper_sound")
    EngineConfig.from_options(**MODES["pp 2"]).resolved(model, PLATFORMS["cpu"])


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
        ("pp 2", attending, True),
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
    """Every recorded checkpoint has prompts, with pictures and sounds if it has a tower, whose answers are known."""
    texts = {path.parent.name for path in FOLDER.glob("*/golden.npz")}
    assert {path.parent.name for path in FOLDER.glob("*/config.json")} == texts | {*WITH_MEDIA}
    assert {name for name in texts if name.endswith("_vision")} - TEXT_PARTS <= set(WITH_MEDIA)
    for name in ("llava_vision", "qwen2_vl_vision", "voxtral_sound", "qwen3_omni", "nemotron_h_omni_sound", *ATTENDING):
        recorded = recorded_prompts(name, str)
        assert any(any(map(len, each.prompt["multi_modal_data"].values())) for each in recorded.values()), name
        assert all(each.answer and each.token_ids for each in recorded.values()), name


def test_further_prompts_of_media_begin_as_the_recorded_ones():
    """Each recorded text again and again, longer each time, with the same pictures; the longest has room."""
    recorded = [Recorded({"prompt": text, "multi_modal_data": {}}, [1] * 5, [7, 8]) for text in ("w1", "w2")]
    workload = Workload.of_media(recorded)
    assert workload.greedy == [[7, 8], [7, 8]] and len(workload.prompts) == len(workload.params) == NUM_OTHERS + 2
    assert [each["prompt"] for each in workload.prompts[:6]] == ["w1", "w2", "w1", "w2", "w1 w7", "w2 w7"]
    assert workload.wrong([[7, 8], [7, 9], *[[0]] * NUM_OTHERS]) == [1]


def test_further_prompts_of_token_ids_and_a_sound_begin_as_the_recorded_ones():
    recorded = [Recorded({"prompt_token_ids": ids, "multi_modal_data": {}}, ids, [7]) for ids in ([1], [1, 2])]
    workload = Workload.of_media(recorded)
    given = [each["prompt_token_ids"] for each in workload.prompts]
    assert given[:8] == [[1], [1, 2], [1], [1, 2], [1, 7], [1, 2, 7], [1, 7, 7], [1, 2, 7, 7]]
    assert workload.longest >= max(map(len, given)) + 12


def test_pooling_models_of_all_fixtures_are_asked_what_is_recorded():
    assert len({*POOLED}) == sum(len([*each.names]) for each in KINDS.values()) > 100
    for name in POOLED:
        recorded = pooled_prompts(name)
        assert len(recorded) > 1 and all(each.answer.size and np.isfinite(each.answer).all() for each in recorded), name


def test_answers_differ_by_values_and_shapes():
    one, other, small = np.array([3.0, -4.0]), np.array([3.0, -4.4]), np.array([0.5, 0.25])
    assert error_of([one, small, one], [one, small]) == 0  # the first is asked twice
    assert error_of([one, small, other], [one, small]) == pytest.approx(0.1)
    assert error_of([small - 0.01], [small]) == pytest.approx(0.01)  # values below one are not compared with themselves
    assert error_of([one[:1]], [one]) == error_of([one * np.nan], [one]) == np.inf


def test_formats_are_asked_what_numpy_goes_on_with(monkeypatch):
    """In all modes but those that round weights once more."""
    asked = []
    monkeypatch.setattr(formats, "serve", lambda *given: asked.append(given) or {})
    assert formats.examine(next(iter(formats.quantized_models.FORMATS)), "cache", experts=False) == {}
    ((_, workload, length, more, only),) = asked
    assert [len(each) for each in workload.greedy] == [formats.COUNT] * 2 and workload.longest <= length
    assert more["compile_cache_dir"] == "cache" and {*MODES} <= {*only} and not {"int8", "e4m3"} & {*only}
