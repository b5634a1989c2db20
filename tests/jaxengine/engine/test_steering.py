"""Steering: requests with vectors run as a model whose modules add them, each with its own in one batch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import jaxengine
from jaxengine import LLM, ConfigError, ModelFileError, RequestError, SamplingParams, read_control_vector
from jaxengine.config.base.platforms import PLATFORMS
from jaxengine.config.engine_config import EngineConfig
from jaxengine.models.registry import read_folder
from jaxengine.models.unpaged import run_unpaged
from tests.conftest import TINY_CHECKPOINT, TINY_OPTIONS
from tests.fixtures.drawn_weights import checkpoint
from tests.models.conftest import load_recorded
from tests.models.weights.gguf.gguf_writer import gguf_bytes
from tests.tables import each_row

TAPS = ("residual:1", "residual:2", "attention_output:0", "mlp_output:1")
PROMPT, NEW, SIZE = 12, 24, 64
ROOT = Path(__file__).resolve().parents[3]
TOLERANCE = 1e-4


def control_vector(path, directions: dict[str, np.ndarray]) -> str:
    tensors = [(name, each.shape[::-1], 0, each.astype("<f4").tobytes()) for name, each in directions.items()]
    path.write_bytes(gguf_bytes({"general.architecture": (8, "controlvector")}, tensors))
    return str(path)


@pytest.fixture(scope="module")
def calm(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("vectors") / "calm.gguf"
    return control_vector(path, {"direction.1": np.random.default_rng(5).standard_normal(SIZE)})


@pytest.fixture(scope="module")
def llm(executables_dir, calm):
    options = {
        "max_model_len": 64,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 96,
        "compile_cache_dir": executables_dir,
    }
    steer = {"steer": TAPS, "steering_vectors": {"calm": calm}, "capture": ["residual:*", "attention_output:0"]}
    options["compile_cache_dir"] = executables_dir
    return LLM(**TINY_OPTIONS | {"model": str(checkpoint("llama"))} | options | steer)


def generate(llm, prompts, params):
    prompts = [{"prompt_token_ids": list(map(int, prompt))} for prompt in prompts]
    return llm.generate(prompts, params, use_tqdm=False)


def asked(steer=None, **fields) -> SamplingParams:
    return SamplingParams(temperature=0, ignore_eos=True, max_tokens=NEW, logprobs=0, steer=steer, **fields)


def scores(output) -> np.ndarray:
    """f32[tokens], the logprobs of the tokens that were generated."""
    own = output.outputs[0]
    return np.array([each[token].logprob for each, token in zip(own.logprobs, own.token_ids, strict=True)], np.float32)


class Added(nnx.Module):
    """A module whose output has a vector added to it."""

    def __init__(self, module, vector):
        self.module, self.vector = module, nnx.Param(vector)

    def __call__(self, x, *more):
        found = self.module(x, *more)
        return (found[0] + self.vector[...], *found[1:]) if isinstance(found, tuple) else found + self.vector[...]


@jax.jit
def edited_scores(state, tokens, vectors):
    """f32[T - 1], the logprob of each token but the first, of a model whose modules add the vectors [TAPS, D]."""
    model: Any = nnx.merge(nnx.graphdef(load_recorded("llama").model), state)
    first, second = model.layers
    first.attention = Added(first.attention, vectors[2])
    second.mlp = Added(second.mlp, vectors[3])
    model.layers = nnx.List([Added(first, vectors[0]), Added(second, vectors[1])])
    logits = run_unpaged(model, tokens[None])[1][0, :-1]
    return jax.nn.log_softmax(logits)[np.arange(len(tokens) - 1), tokens[1:]]


def test_64_requests_with_their_own_vectors_are_edited_models(llm):
    """More tokens than pages hold, so that some are preempted and come to other slots; every fourth has no vector."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(3, 120, (64, PROMPT))
    vectors = rng.standard_normal((64, len(TAPS), SIZE)).astype(np.float32)
    vectors *= rng.random((64, len(TAPS), 1)) < 0.6  # at some taps
    vectors[::4] = 0
    given = [
        [{"at": at, "vector": each, "scale": 0.5} for at, each in zip(TAPS, own, strict=True) if each.any()]
        for own in vectors
    ]
    outputs = generate(llm, prompts, [asked(each) for each in given])
    state, moved = nnx.state(load_recorded("llama").model), 0
    for prompt, own, output in zip(prompts, vectors, outputs, strict=True):
        tokens = np.array([*prompt, *output.outputs[0].token_ids], np.int32)
        wanted = np.asarray(edited_scores(state, tokens, own / 2))[PROMPT - 1 :]
        assert np.abs(scores(output) - wanted).max() <= TOLERANCE
        plain = np.asarray(edited_scores(state, tokens, 0 * own))[PROMPT - 1 :]
        moved += np.abs(plain - wanted).max() > 0.1
    assert moved > 40
    metrics = {each.name: getattr(each, "value", 0) for each in llm.get_metrics()}
    assert llm.core.engine.scheduler.num_preemptions > 0 and metrics["jaxengine:compilations_since_ready"] == 0


def test_no_vector_and_zeros_change_no_bit(llm, make_llm):
    prompts = np.random.default_rng(1).integers(3, 120, (8, PROMPT))
    generate(llm, prompts, asked([{"at": "residual:*", "vector": np.ones(SIZE)}]))  # slots that have had vectors
    plain = generate(llm, prompts, asked())
    zeros = generate(llm, prompts, asked([{"at": at, "vector": np.zeros(SIZE)} for at in TAPS]))
    none = generate(llm, prompts, asked([{"at": "residual:1", "vector": np.ones(SIZE), "scale": 0}]))
    other = generate(make_llm(), prompts, asked())
    for first, *others in zip(plain, zeros, none, strict=True):
        for each in others:
            assert each.outputs[0].token_ids == first.outputs[0].token_ids
            assert scores(each).tobytes() == scores(first).tobytes()
    assert [each.outputs[0].token_ids for each in plain] == [each.outputs[0].token_ids for each in other]
    for _ in range(2):  # the first takes the vectors off their slots
        generate(llm, prompts[:1], asked())
    assert "steering" not in [type(each).__module__.split(".")[-1] for each in llm.core.engine.extensions.active]


def test_pages_are_shared_by_equal_vectors_alone(llm):
    prompt = [np.arange(20) + 50]
    vector = np.random.default_rng(2).standard_normal(SIZE)

    def run(scale, at="residual:1", salt=None):
        steer = [{"at": at, "vector": vector, "scale": scale}] if scale else None
        (output,) = generate(llm, prompt, asked(steer))
        return output.num_cached_tokens, scores(output)

    assert run(0)[0] == 0 and run(0)[0] > 0
    cached, first = run(1)
    assert cached == 0
    cached, again = run(1)
    assert cached > 0 and np.abs(again - first).max() <= TOLERANCE
    assert [run(2)[0], run(1, "residual:2")[0], run(-1)[0]] == [0, 0, 0]


def test_entries_at_one_tap_are_added_and_a_name_stands_for_its_vectors(llm, calm):
    prompt = [np.arange(9) + 30]
    vectors = read_control_vector(calm)
    assert list(vectors) == ["residual:2"]
    given = [{"at": "residual:2", "vector": vectors["residual:2"].tolist(), "scale": each} for each in (1.5, 0.5)]
    (by_array,) = generate(llm, prompt, asked(given))
    (plain,) = generate(llm, prompt, asked())
    assert np.abs(scores(by_array) - scores(plain)).max() > 0.01
    for steer in ([{"vector": "calm", "scale": 2}], [{"at": "residual:2", "vector": "calm", "scale": 2.0}]):
        (by_name,) = generate(llm, prompt, asked(steer))
        assert by_name.outputs[0].token_ids == by_array.outputs[0].token_ids
        assert np.abs(scores(by_name) - scores(by_array)).max() <= TOLERANCE


def test_the_documents_block_runs(llm, monkeypatch):
    (block, *_) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "research.md").read_text(), re.DOTALL)
    monkeypatch.setattr(jaxengine, "LLM", lambda **options: llm)
    found: dict[str, Any] = {}
    exec(block, found)  # noqa: S102
    assert found["vector"].shape == (SIZE,) and len(found["steered"].outputs[0].token_ids) <= 8


def test_what_is_captured_is_steered(llm):
    vector, prompt = np.random.default_rng(3).standard_normal(SIZE).astype(np.float32), [np.arange(9) + 30]
    names = ["residual:*", "attention_output:0"]
    for at in ("residual:1", "attention_output:0"):
        both = (None, [{"at": at, "vector": vector}])
        plain, moved = (generate(llm, prompt, asked(each, capture=names))[0].outputs[0].captured for each in both)
        assert np.abs(moved[at][:9] - plain[at][:9] - vector).max() <= TOLERANCE
        assert (moved["residual:0"][:9] == plain["residual:0"][:9]).all()
        assert np.abs(moved["residual:2"][:9] - plain["residual:2"][:9]).max() > 0.1


ONES = [1.0] * SIZE


@each_row(
    "steer, said",
    [
        (
            [{"at": "residual:0", "vector": ONES}],
            "steer is at 'residual:0'; .* with residual:1-2, attention_out",
        ),
        ([{"at": "residual:1", "vector": [1.0, 2.0]}], "a vector of 2 numbers; the model's hidden size is 64"),
        ([{"vector": "fury"}], "steer names the vector 'fury'; the engine was started with steering_vectors calm"),
        ([{"at": "residual:1", "vector": "calm"}], "steer is at 'residual:1'; the vector 'calm' has residual:2"),
        ([{"at": "residual:1", "vector": [3e38] * SIZE}] * 2, "steer adds numbers that are not finite"),
        ("calm", "steer must be a list of dicts"),
        ([{"at": "residual:1"}], "steer must be a list of dicts"),
        ([{"at": "residual:1", "vector": ONES, "layer": 3}], "steer must be a list of dicts"),
        ([{"vector": ONES}], "steer must be a dict with .at."),
        ([{"at": "final_norm", "vector": ONES}], "steer at must be such as"),
        ([{"at": "layers.3", "vector": ONES}], "steer at must be such as"),
        ([{"at": "residual:1", "vector": [float("nan")]}], "steer vector must be .* finite numbers"),
        ([{"at": "residual:1", "vector": [[1.0]]}], "steer vector must be .* finite numbers"),
        ([{"at": "residual:1", "vector": [1e300]}], "steer vector must be .* finite numbers"),
        ([{"at": "residual:1", "vector": [1j]}], "steer vector must be .* finite numbers"),
        ([{"at": "residual:1", "vector": b"123"}], "steer vector must be .* finite numbers"),
        ([{"at": "residual:1", "vector": ONES, "scale": float("inf")}], "steer scale must be a finite number"),
        ([{"at": "residual:1", "vector": ONES, "scale": True}], "steer scale must be a finite number"),
    ],
)
def test_what_cannot_be_added_is_refused(steer, said, llm):
    with pytest.raises(RequestError, match=said) as refused:
        generate(llm, [[5, 6]], asked(steer))
    assert refused.value.param == "steer"


def test_an_engine_without_the_option_refuses_the_field(make_llm):
    with pytest.raises(RequestError, match="started without steer") as refused:
        generate(make_llm(), [[5, 6]], asked([{"at": "residual:1", "vector": ONES}]))
    assert refused.value.param == "steer"


@each_row(
    "options, said",
    [
        (
            {"steer": "residual:3"},
            "steer is 'residual:3'; .*residual:0-2, attention_output:0-1, mlp_output:0-1, of",
        ),
        ({"steer": ["final_norm"]}, "steer is 'final_norm'; .*residual:0-2"),
        ({"steer": 3}, "steer is 3; .*at least one name"),
        ({"steer": "residual:*", "pipeline_parallel_size": 2}, "steer is given, but pipeline_parallel_size"),
        ({"steering_vectors": {"a": "a.gguf"}}, "steering_vectors is given, but nothing is steered"),
        ({"steer": "residual:*", "steering_vectors": ["a.gguf"]}, "steering_vectors is .*a dict such as"),
    ],
)
def test_what_cannot_be_steered_is_one_error(options, said):
    with pytest.raises(ConfigError, match=said):
        model = read_folder(TINY_CHECKPOINT)
        EngineConfig.from_options(skip_tokenizer_init=True, **options).resolved(model, PLATFORMS["cpu"])


FILES = {
    "another model's": ({"direction.1": np.ones(32)}, "has directions of 32 numbers; those of this model have 64"),
    "deeper": ({"direction.2": np.ones(SIZE)}, "steers residual:3; this model has residual:0-2"),
    "layer 0": (
        {"direction.0": np.ones(SIZE)},
        "is not direction.N of a layer N >= 1: this is not a control vector (at direction.0)",
    ),
    "no directions": ({"token_embd.weight": np.ones((4, SIZE))}, "this is not a control vector (at token_embd.weight)"),
    "empty": ({}, "has no tensor direction.1"),
    "matrix": ({"direction.1": np.ones((2, SIZE))}, "must have one axis, got [2, 64] (at direction.1)"),
    "not finite": ({"direction.1": np.full(SIZE, np.inf)}, "has numbers that are not finite (at direction.1)"),
    "lengths": ({"direction.1": np.ones(SIZE), "direction.2": np.ones(32)}, "has directions of [32, 64] numbers"),
}


@each_row("kind", FILES)
def test_files_that_are_no_control_vector_are_refused_at_start(kind, tmp_path_factory, monkeypatch):
    from jaxengine.checkpoint.model_source import open_model
    from jaxengine.models.weights.formats.safetensors import SafetensorsCheckpoint

    closed, close = [], SafetensorsCheckpoint.close
    monkeypatch.setattr(SafetensorsCheckpoint, "close", lambda weights: (closed.append(weights), close(weights)))
    directions, said = FILES[kind]
    path = control_vector(tmp_path_factory.mktemp("wrong") / "wrong.gguf", directions)
    options = {"model": str(TINY_CHECKPOINT), "steer": "residual:*", "steering_vectors": {"wrong": path}}
    with pytest.raises(ModelFileError) as refused:
        open_model(EngineConfig.from_options(skip_tokenizer_init=True, **options))
    assert said in str(refused.value)
    assert len(closed) == 1  # the model's own weights, which were open already


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ModelFileError, match="cannot be read|No such file|there is no"):
        read_control_vector(tmp_path / "none.gguf")
