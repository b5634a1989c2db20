"""Captured activations: those of the model's own forward pass, whatever else runs and however it is split."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxengine import LLM, ConfigError, RequestError, SamplingParams
from jaxengine.config.base.platforms import PLATFORMS
from jaxengine.config.engine_config import EngineConfig
from jaxengine.models.cache import pool_spec
from jaxengine.models.config.taps import FINAL_NORM, all_taps, read_taps
from jaxengine.models.forward_batch import ForwardBatch
from jaxengine.models.layers.taps import Taps
from jaxengine.models.registry import read_folder
from jaxengine.pallas_kernels.attention.op import RaggedBatch
from jaxengine.pallas_kernels.kv.pages import alloc
from jaxengine.requests.output.outputs import CompletionOutput
from jaxengine.requests.params.sampling_params import RequestOutputKind
from tests.conftest import TINY_CHECKPOINT, TINY_OPTIONS, use_scheduler
from tests.fixtures.drawn_weights import FOLDER, checkpoint
from tests.models.conftest import load_recorded
from tests.tables import each_row

LAYERS = (0, 1, -1)
TAPS = ("residual:*", "attention_output:0", "mlp_output:*", "final_norm")
OPTIONS: dict[str, Any] = TINY_OPTIONS | {"max_model_len": 64}
CPU = PLATFORMS["cpu"]
TOLERANCE = 1e-4
PAGE_SIZE = 4
MOST_TOKENS = 64
ENGINE = {"residual": [0, 1, 2], "attention_output": [0], "mlp_output": [0, 1], "final_norm": [0]}  # what TAPS name


@pytest.fixture(scope="module")
def recorded():
    return load_recorded("llama")


@pytest.fixture(scope="module")
def llm(executables_dir):
    folder = str(checkpoint("llama"))
    return LLM(
        **OPTIONS | {"model": folder, "capture_layers": LAYERS, "capture": TAPS, "compile_cache_dir": executables_dir}
    )


@partial(jax.jit, static_argnames=("graph", "taps"))
def forward(graph, state, token_ids, count, taps):
    """Final hidden states and arrays of taps of i32[MOST_TOKENS] tokens, of which `count` are a sequence."""
    model, number = nnx.merge(graph, state), jnp.arange(MOST_TOKENS, dtype=jnp.int32)
    ends, table = jnp.stack([0 * count, count]), jnp.arange(MOST_TOKENS // PAGE_SIZE, dtype=jnp.int32)[None]
    places = jnp.where(number < count, number, -1)
    ragged = RaggedBatch(ends, ends[1:], table, places, jnp.int32(1), jnp.int32(count == 1))
    section = Taps(taps)
    batch = ForwardBatch(token_ids, number, ends[1:] - 1, (ragged,), {"taps": section})
    groups = model.cache_groups(PAGE_SIZE, "float32", hybrid=False)
    hidden, _ = model(batch, alloc(pool_spec(groups, MOST_TOKENS // PAGE_SIZE)))
    return hidden, [section[tap] for tap in taps]


def expected(model, token_ids) -> dict[str, np.ndarray]:
    """Arrays of every tap for a sequence, from one forward pass without the engine."""
    known, count = all_taps(model.config), len(token_ids)
    taps = tuple(read_taps([f"{kind}:*" for kind in known if kind != "final_norm"], known))
    padded = np.zeros(MOST_TOKENS, np.int32)
    padded[:count] = token_ids
    hidden, values = forward(*nnx.split(model), padded, jnp.int32(count), taps)
    arrays = {"final_norm": hidden, **{tap.name: value for tap, value in zip(taps, values, strict=True)}}
    return {name: np.asarray(value)[:count] for name, value in arrays.items()}


def layers_of(activations) -> np.ndarray:
    """[T, L, D], the hidden states of LAYERS among what all taps give."""
    return np.stack([activations[name] for name in ("residual:0", "residual:1", "final_norm")], axis=1)


def assert_same(found, wanted) -> None:
    assert found.shape == wanted.shape and found.dtype == np.float32
    for layer in range(wanted.shape[1]):
        assert np.abs(found[:, layer] - wanted[:, layer]).max() <= TOLERANCE * np.abs(wanted[:, layer]).max()


def assert_captured(model, fed, output, names) -> None:
    """The output has what these taps give for the tokens that the model was fed, and nothing else."""
    wanted = expected(model, fed)
    assert output.captured.keys() == set(names)
    for name, found in output.captured.items():
        assert_same(found[:, None], wanted[name][:, None])


def params(max_tokens=8, **fields) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "ignore_eos": True, "max_tokens": max_tokens} | fields)


def generate(llm, prompts, params):
    prompts = [{"prompt_token_ids": list(map(int, prompt))} for prompt in prompts]
    return [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]


def fed(prompt, output: CompletionOutput) -> list[int]:
    """The tokens that the model was given."""
    return [*map(int, prompt), *output.token_ids[:-1]]


def some_prompts(count=12):
    rng = np.random.default_rng(3)
    shared = rng.integers(3, 120, 12).tolist()
    return [shared * (index % 2) + rng.integers(3, 120, int(rng.integers(1, 22))).tolist() for index in range(count)]


def test_layers_are_counted_as_transformers_counts_them(llm, recorded):
    with np.load(TINY_CHECKPOINT / "eagle3.npz") as golden:
        tokens, wanted = golden["token_ids"], golden["streams"]
    layers = json.loads((TINY_CHECKPOINT / "eagle3.json").read_text())["config"]
    streams = (layers.get("eagle_config") or layers)["eagle_aux_hidden_state_layer_ids"]
    assert streams == [layer % (recorded.config.num_layers + 1) for layer in LAYERS]
    (output,) = generate(llm, [tokens], params(1, return_hidden_states=True))
    wanted = wanted.reshape(len(tokens), len(streams), -1).copy()
    assert streams[-1] == recorded.config.num_layers
    wanted[:, -1] = recorded.model.norm(wanted[:, -1])  # the recorder leaves the final norm out, transformers does not
    assert_same(output.hidden_states, wanted)


def test_hidden_states_are_those_of_the_model_in_any_batch(llm, recorded):
    """Prompts of several chunks, some with a cached prefix, together with requests that ask for none or for others."""
    use_scheduler(llm)
    prompts = some_prompts()
    named = [None, ["mlp_output:*"], ["residual:2", "attention_output:*"], ["final_norm"]]
    asked = [
        params(index % 7 + 1, return_hidden_states=bool(index % 3), capture=named[index % 4])
        for index in range(len(prompts))
    ]
    outputs = generate(llm, prompts, asked)
    again = generate(llm, prompts, asked)  # prefixes are cached now
    for index, (prompt, first, second) in enumerate(zip(prompts, outputs, again, strict=True)):
        assert first.token_ids == second.token_ids
        if asked[index].capture:
            names = [tap.name for tap in read_taps(asked[index].capture, ENGINE)]
            for output in (first, second):
                assert_captured(recorded.model, fed(prompt, output), output, names)
        else:
            assert first.captured is None
        if not index % 3:
            assert first.hidden_states is None and second.hidden_states is None
            continue
        wanted = layers_of(expected(recorded.model, fed(prompt, first)))
        assert_same(first.hidden_states, wanted)
        assert_same(second.hidden_states, wanted)
    assert llm.core.engine.extensions.by_name["capture"].is_idle
    metrics = {each.name: getattr(each, "value", 0) for each in llm.get_metrics()}
    assert metrics["vllm:prefix_cache_hits"] > 0 and metrics["jaxengine:compilations_since_ready"] == 0


def test_a_preempted_request_returns_each_position_once(llm, recorded):
    scheduler = use_scheduler(llm, num_pages=40)
    prompts = some_prompts(8)
    outputs = generate(llm, prompts, params(30, return_hidden_states=True, capture=["residual:2", "mlp_output:0"]))
    assert scheduler.num_preemptions > 2
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_same(output.hidden_states, layers_of(expected(recorded.model, fed(prompt, output))))
        assert_captured(recorded.model, fed(prompt, output), output, ["residual:2", "mlp_output:0"])
    use_scheduler(llm)


def test_pieces_of_a_stream_make_the_whole(llm):
    """What ends a request is known a step late; rows of steps that had been dispatched by then are left out."""
    use_scheduler(llm)
    core, prompt = llm.core, some_prompts(1)[0]
    (whole,) = generate(llm, [prompt], params(return_hidden_states=True))
    stop = whole.token_ids[5]
    count = whole.token_ids.index(stop) + 1
    for kind in (RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE):
        asked = params(return_hidden_states=True, capture=["residual:1"], output_kind=kind, stop_token_ids=[stop])
        core.add(core.inputs.prepare({"prompt_token_ids": prompt}, asked, request_id="piece"))
        pieces = []
        while core.has_unfinished:
            pieces += [output.outputs[0] for output in core.step()]
        assert sum(len(each.token_ids) for each in pieces) >= count
        joined = pieces[0]
        for each in pieces[1:]:
            assert each.hidden_states is not None
            if kind is RequestOutputKind.DELTA:
                assert len(each.hidden_states) == len(each.token_ids) == 1
                joined._append(each)
            else:
                joined = each
        assert joined.token_ids == whole.token_ids[:count]
        np.testing.assert_array_equal(joined.hidden_states, whole.hidden_states[: len(prompt) + count - 1])
        np.testing.assert_array_equal(joined.captured["residual:1"], joined.hidden_states[:, 1])


def test_each_of_n_outputs_has_its_own(llm, recorded):
    use_scheduler(llm)
    prompt = some_prompts(1)[0]
    asked = params(temperature=1.0, n=3, seed=1, return_hidden_states=True)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], asked, use_tqdm=False)
    assert len({tuple(each.token_ids) for each in output.outputs}) > 1
    for each in output.outputs:
        assert_same(each.hidden_states, layers_of(expected(recorded.model, fed(prompt, each))))


def test_taps_that_the_engine_was_started_without_are_refused(llm):
    for names, said in (
        (["attention_output:1"], "capture names 'attention_output:1'; the engine was started with residual:0-2"),
        (["router_logits:*"], "capture names 'router_logits:.'; the engine was started with residual:0-2, "),
    ):
        with pytest.raises(RequestError, match=said) as refused:
            generate(llm, [[5, 6]], params(capture=names))
        assert refused.value.param == "capture"


def test_an_engine_without_the_option_refuses_the_field(make_llm):
    with pytest.raises(
        RequestError, match="return_hidden_states: the engine was started without capture_layers"
    ) as refused:
        generate(make_llm(), [[5, 6]], params(return_hidden_states=True))
    assert refused.value.param == "return_hidden_states"
    with pytest.raises(RequestError, match="started without capture") as refused:
        generate(make_llm(), [[5, 6]], params(capture=["residual:1"]))
    assert refused.value.param == "capture"


@each_row(
    "options, said",
    [
        ({"capture_layers": [0, 3]}, "capture_layers is 3; .*0 .the embeddings. to 2"),
        ({"capture_layers": [-4]}, "capture_layers is -4; .*-3 to -1"),
        ({"capture_layers": [2, -1]}, "capture_layers is .*different layers"),
        ({"capture_layers": []}, "capture_layers is .*at least one integer"),
        ({"capture_layers": [True]}, "capture_layers is .*at least one integer"),
        ({"capture_layers": "last"}, "capture_layers is .*at least one integer"),
        ({"capture_layers": "0,--5"}, "capture_layers is .*at least one integer"),
        ({"capture_layers": "9" * 5000}, "capture_layers is .*at least one integer"),
        (
            {"capture": "residual:3"},
            "capture is 'residual:3'; .*residual:0-2, attention_output:0-1, mlp_output:0-1, fin",
        ),
        ({"capture": ["router_logits:0"]}, "capture is 'router_logits:0'; .*, of LlamaForCausalLM"),
        ({"capture": ["layers.3"]}, "capture is 'layers.3'; .*such as .residual:3"),
        ({"capture": []}, "capture is .*at least one name such as .residual:3"),
        ({"capture": [3]}, "capture is .*at least one name such as .residual:3"),
    ],
)
def test_what_cannot_be_captured_is_one_error(options, said):
    with pytest.raises(ConfigError, match=said):
        EngineConfig.from_options(skip_tokenizer_init=True, **options).resolved(read_folder(TINY_CHECKPOINT), CPU)


@each_row(
    ("options", "said"),
    [
        ({"capture": "residual:1"}, "capture is 'residual:1'; .*, in which a token has several hidden states"),
        ({"steer": "residual:*"}, r"steer is 'residual:\*'; .*, in which a token has several hidden states"),
        ({"capture_layers": [1, -1]}, r"capture_layers is \[1, -1\]; .* a token of \w+ has several hidden states"),
    ],
)
def test_what_several_hidden_states_exclude_is_refused_with_the_reason(options, said):
    options = EngineConfig.from_options(skip_tokenizer_init=True, **options)
    with pytest.raises(ConfigError, match=said):
        options.resolved(read_folder(FOLDER / "kimi_k3_odd"), CPU)


def test_layers_are_read_from_the_end_and_from_text():
    for given in ([0, -1], "0,-1", "[0, -1]", np.array([0, -1])):
        config = EngineConfig.from_options(capture_layers=given).resolved(read_folder(TINY_CHECKPOINT), CPU)
        assert config.capture_layers == (0, 2)
    for given in (["residual:-1", "mlp_output:0-1"], "residual:-1, mlp_output:*"):
        config = EngineConfig.from_options(capture=given).resolved(read_folder(TINY_CHECKPOINT), CPU)
        assert config.capture == ("residual:2", "mlp_output:0", "mlp_output:1")


@pytest.mark.thorough("layers that run without pages are in tests/models/layers/test_taps.py")
@pytest.mark.parametrize("name", ["deepseek_v4", "deepseek_v41_plain"])
def test_layers_that_need_pages_are_captured(name):
    """Attention to keys of blocks, and experts that a table chooses: the tokens stay, and every tap has its rows."""
    folder, taps = str(checkpoint(name)), all_taps(read_folder(FOLDER / name))
    names = [f"{kind}:{layer}" if kind != FINAL_NORM else kind for kind, layers in taps.items() for layer in layers]
    params, tokens = SamplingParams(temperature=0, max_tokens=4, detokenize=False), []
    for options in ({}, {"capture": names}):
        with LLM(folder, **OPTIONS, **options) as llm:
            asked = params.clone_with(capture=names) if options else params
            (output,) = llm.generate([{"prompt_token_ids": [*range(1, 10)]}], asked, use_tqdm=False)
            tokens.append(list(output.outputs[0].token_ids))
    assert tokens[0] == tokens[1]
    captured = output.outputs[0].captured
    assert {each: len(rows) for each, rows in captured.items()} == dict.fromkeys(names, 12)
