"""Sums of the vectors of a request, computed once for all of its outputs and from what was read at start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxengine import RequestError, SamplingParams
from jaxengine.checkpoint.model_source import open_model
from jaxengine.config.base.platforms import PLATFORMS
from jaxengine.config.engine_config import EngineConfig
from jaxengine.requests.inputs import InputProcessor, input_processor
from jaxengine.requests.params import steering_vectors
from jaxengine.requests.params.activations import MAX_STEER
from tests.conftest import TINY_CHECKPOINT
from tests.models.weights.gguf.gguf_writer import gguf_bytes
from tests.tables import each_row

SIZE, PROMPT = 64, [5, 6, 7]
ONES, RAMP = np.ones(SIZE, np.float32), np.arange(SIZE, dtype=np.float32)
NAMED = 70  # more than a cache of files would hold


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> InputProcessor:
    """Inputs of an engine that steers after its first layer alone; the files of its vectors are gone by now."""
    folder: Path = tmp_path_factory.mktemp("vectors")
    paths = {f"v{number}": folder / f"{number}.gguf" for number in range(NAMED)}
    for number, path in enumerate(paths.values()):
        tensors: list[Any] = [("direction.1", (SIZE,), 0, (number * RAMP).astype("<f4").tobytes())]
        path.write_bytes(gguf_bytes({"general.architecture": (8, "controlvector")}, tensors))
    named = {name: str(path) for name, path in paths.items()}
    options = {"model": str(TINY_CHECKPOINT), "steer": ["residual:1-2", "mlp_output:0"], "steering_vectors": named}
    config = EngineConfig.from_options(skip_tokenizer_init=True, **options)
    source = open_model(config)
    for path in paths.values():
        path.unlink()
    source.close()
    return input_processor(source, config.resolved(source.config, PLATFORMS["cpu"]))


def prepared(inputs: InputProcessor, steer: list[dict[str, Any]], **fields: Any) -> list[Any]:
    params = SamplingParams(steer=steer, max_tokens=2, **fields)
    return inputs.prepare({"prompt_token_ids": PROMPT}, params).requests


def added(inputs: InputProcessor, steer: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    (request,) = prepared(inputs, steer)
    return {at: np.frombuffer(values, np.float32) for at, values in request.params.steer}


@each_row(
    "steer, wanted",
    [
        ([("residual:1", RAMP, 2), ("residual:*", ONES, 3)], {"residual:1": 2 * RAMP + 3, "residual:2": 3 * ONES}),
        ([("residual:1", RAMP, 1e20), ("residual:1", RAMP, -1e20)], {"residual:1": 0 * RAMP}),
        ([("residual:2", ONES, 0.5)] * MAX_STEER, {"residual:2": ONES * MAX_STEER / 2}),
        ([("mlp_output:-2", ONES, 1)], {"mlp_output:0": ONES}),
        ([(None, "v3", 1), ("residual:-1", "v69", 2), (None, "v3", 1)], {"residual:2": 144 * RAMP}),
    ],
)
def test_entries_add_up(steer, wanted, inputs):
    found = added(inputs, [dict(zip(("at", "vector", "scale"), each, strict=True)) for each in steer])
    assert found.keys() == wanted.keys()
    for at, values in wanted.items():
        np.testing.assert_array_equal(found[at], values)


def test_outputs_of_a_request_share_what_is_computed_and_differ_in_seeds(inputs):
    steer = [{"at": "residual:1", "vector": ONES}]
    requests = prepared(inputs, steer, n=5, seed=3)
    assert all(each.params is requests[0].params for each in requests)
    assert [each.seed for each in requests] == [3, 4, 5, 6, 7]
    drawn = prepared(inputs, steer, n=5)
    assert len({each.seed for each in drawn}) == 5
    assert [each.request_id.split("_")[0] for each in drawn] == list("01234")


def test_equal_sums_alone_have_one_digest(inputs):
    digests = {
        prepared(inputs, [{"at": at, "vector": vector}])[0].params.steer_digest
        for at in ("residual:1", "residual:2")
        for vector in (ONES, RAMP, [1.0] * SIZE)
    }
    assert len(digests) == 4


@each_row(
    "steer, said",
    [
        ([("residual:1", ONES)] * (MAX_STEER + 1), f"at most {MAX_STEER}"),
        ([("residual:*", each * ONES) for each in range(3)], "adds 384 numbers .*; allowed: at most 320"),
        ([("mlp_output:-1", ONES)], "'mlp_output:-1'; .* mlp_output:0; mlp_output:-1 .* the model's mlp_output:0-1"),
        ([("residual:-2", "v1")], "the vector 'v1' has residual:2; residual:-2 .* the model's residual:0-2"),
        ([("residual:0-999999", ONES)], "'residual:0-999999'; the engine was started with residual:1-2"),
    ],
)
def test_more_than_a_moments_work_and_other_places_are_refused(steer, said, inputs, monkeypatch):
    monkeypatch.setattr(steering_vectors, "MAX_ADDED", 5 * SIZE, raising=False)
    with pytest.raises(RequestError, match=said) as refused:
        prepared(inputs, [dict(zip(("at", "vector"), each, strict=True)) for each in steer])
    assert refused.value.param == "steer"
