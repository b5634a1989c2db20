"""Every script of examples/ runs as it stands and prints what it promises.

They run in this process, under the name __main__, with the engines of the other tests: only the options of LLM and
AsyncLLM differ from those of a user, so that nothing is compiled twice. Those that need a server get a real one.
"""

from __future__ import annotations

import ast
import json
import re
import runpy
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import jaxengine
from jaxengine import AsyncLLM
from jaxengine.checkpoint import plugins
from jaxengine.checkpoint.model_source import open_model
from jaxengine.config.engine_config import EngineConfig
from jaxengine.models.model_classes import MODELS
from tests.conftest import TINY_OPTIONS
from tests.fast_compile import fast_compile

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TINY = Path(__file__).resolve().parents[1] / "fixtures" / "models" / "llama"
OPTIONS = TINY_OPTIONS | {"max_model_len": 64}
TESTED = {"offline_batch", "chat", "structured_output", "streaming", "openai_tools", "grpc_client"} | {
    "custom_model",
    "forward_pass",
    "grpo",
    "grpo_tunix",
    "hidden_states",
    "logits_processor",
    "train_and_generate",
}


@pytest.fixture
def run(monkeypatch, capsys):
    """run(name, *arguments): what the script prints."""

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [f"examples/{name}.py", *arguments])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.fixture
def own_llm(monkeypatch, smollm):
    """`LLM()` gives the engine that other tests use as well."""
    monkeypatch.setattr(jaxengine, "LLM", lambda: smollm)


@pytest.fixture(scope="module")
def served(make_smollm_server):
    """A server of the default model, that of tests/jaxengine/server/test_default_model.py."""
    return make_smollm_server(api_server_count=2)


def test_every_example_is_run_here_and_says_how_it_is_started():
    trees = {path.stem: ast.parse(path.read_text()) for path in EXAMPLES.glob("*.py")}
    scripts = {name: ast.get_docstring(tree) or "" for name, tree in trees.items()}
    assert set(scripts) == TESTED
    for name, text in scripts.items():
        assert re.search(rf"^    python examples/{name}[.]py( \[?[A-Z:_]+\]?)*$", text, re.MULTILINE), name


def test_offline_batch(run, own_llm):
    lines = run("offline_batch").splitlines()
    assert len(lines) == 8
    assert lines[0].startswith("The capital of France is' Paris") and lines[0].endswith("(length, 8 tokens)")
    first, same, other = (line.partition(": ")[2] for line in lines[4:7])
    assert first == same != other
    assert lines[-1] == "0 compilations since ready"


def test_chat(run, own_llm):
    lines = run("chat").splitlines()
    assert lines[0] == "> What is the capital of France?" and "Paris" in lines[1]
    cached = [int(number) for number in re.findall(r"\[(\d+) of \d+ prompt tokens cached\]", "\n".join(lines))]
    assert len(cached) == 3 and cached[0] < cached[1] < cached[2]


def test_structured_output(run, own_llm):
    choice, regex, city, refused = run("structured_output").splitlines()
    assert choice in ("choice: positive", "choice: negative")
    assert re.fullmatch(r"regex:  \d{4}-\d{2}-\d{2}", regex)
    assert set(ast.literal_eval(city.removeprefix("json:   "))) == {"name", "population", "coastal"}
    assert refused.startswith("refused: structured_outputs")


def test_streaming(run, smollm, monkeypatch):
    # Over the engine that is there, which outlives the script.
    monkeypatch.setattr("jaxengine.api.async_llm.EngineCore", lambda *_, **__: smollm.core)
    monkeypatch.setattr(smollm.core, "shutdown", lambda: None)
    made = AsyncLLM()
    monkeypatch.setattr(jaxengine, "AsyncLLM", lambda: made)
    *told, left = run("streaming").splitlines()
    params = jaxengine.SamplingParams(temperature=0.0, max_tokens=24)
    for line, output in zip(told, smollm.generate(list(PROMPTS), params, use_tqdm=False), strict=True):
        assert line.startswith(f"{output.prompt}{output.outputs[0].text!r}  (")
        assert 1 < int(re.findall(r"\((\d+) pieces\)", line)[0]) <= 24
    assert re.fullmatch("left after '.+'", left)
    assert made.errored  # it was shut down


PROMPTS = ("The sea is", "A good breakfast is", "Mountains are")


def test_openai_tools(run, served):
    call, tool, answer = run("openai_tools", served.base_url + "/v1").split("\n", 2)
    arguments = json.loads(call.removeprefix("call: get_weather(").removesuffix(")"))
    assert tool == f"tool: It is sunny in {arguments['city']}, 24 degrees."
    assert len(answer.strip()) > len("answer: ")


def test_grpc_client(run, served, smollm):
    whole, streamed, ids, refused = run("grpc_client", served.grpc_address).splitlines()
    params = jaxengine.SamplingParams(temperature=0.0, max_tokens=8)
    outputs = smollm.generate(["The capital of France is", "The sea is"], params, use_tqdm=False)
    assert whole == f"whole: {outputs[0].outputs[0].text!r}"
    assert "".join(ast.literal_eval(streamed.removeprefix("streamed: "))) == outputs[1].outputs[0].text
    assert ids.endswith("back: 'The capital of France is Paris'")
    assert refused.startswith("refused: INVALID_ARGUMENT, ['sampling.top_p']: sampling.top_p: top_p must be ")


@pytest.mark.thorough("tests/jaxengine/checkpoint/test_custom_models.py serves such a class")
def test_custom_model(run, monkeypatch):
    monkeypatch.setitem(MODELS, "CappedLlamaForCausalLM", MODELS["LlamaForCausalLM"])
    monkeypatch.delitem(MODELS, "CappedLlamaForCausalLM")  # and again at the end
    with fast_compile():
        llama, capped = run("custom_model", str(TINY)).splitlines()
    (tokens, scores), (same, lower) = (
        [ast.literal_eval(each) for each in re.findall(r"\[.*?\]", line)] for line in (llama, capped)
    )
    assert tokens == same and len(tokens) == 6
    assert lower != scores and all(low <= high for low, high in zip(lower, scores, strict=True))


def test_custom_model_is_a_plugin(monkeypatch, tmp_path):
    monkeypatch.setitem(MODELS, "CappedLlamaForCausalLM", MODELS["LlamaForCausalLM"])
    monkeypatch.delitem(MODELS, "CappedLlamaForCausalLM")
    monkeypatch.setattr(plugins, "_LOADED", set())
    config = json.loads((TINY / "config.json").read_text()) | {"architectures": ["CappedLlamaForCausalLM"]}
    shutil.copytree(TINY, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = EngineConfig(model=str(tmp_path), skip_tokenizer_init=True)
    with pytest.raises(jaxengine.ModelFileError, match="'CappedLlamaForCausalLM' is not supported"):
        open_model(options)
    source = open_model(replace(options, plugins=(str(EXAMPLES / "custom_model.py"),)))
    assert source.config.architecture == "CappedLlamaForCausalLM"


@pytest.mark.thorough("tests/jaxengine/engine/test_logits_processors.py runs such a processor")
def test_logits_processor(run):
    with fast_compile():
        lines = run("logits_processor", str(TINY)).splitlines()
    plain, limited = (ast.literal_eval(line.rpartition(": ")[2]) for line in lines)
    assert len(plain) == len(limited) == 12 and len(set(plain)) < 12 and len(set(limited)) == 12


@pytest.mark.thorough("test_grpo trains, and its engine generates")
def test_train_and_generate(run):
    """The engine computes what the forward pass of trainers has learnt."""
    with fast_compile():
        *losses, answer = run("train_and_generate", str(TINY)).splitlines()
    first, *_, last = (float(line.rpartition(" ")[2]) for line in losses)
    assert first > 1 and last < 0.3
    assert answer == "after [5, 17, 9, 40]: [3, 28, 11, 60, 33, 8, 21, 4]"


def share_of_low_ids(answer) -> float:
    return sum(token < 40 for token in answer.token_ids) / len(answer.token_ids)


def test_grpo(executables_dir):
    """The reward rises, and the same seed gives the same curve, on the tiny model and with a reward of token ids."""
    found, model = runpy.run_path(str(EXAMPLES / "grpo.py")), jaxengine.open_model(TINY)
    curves = []
    with fast_compile(), jaxengine.LLM(str(TINY), **OPTIONS, compile_cache_dir=executables_dir) as llm:
        for seed in (3, 3, 4):
            llm.update_weights(model.params)
            options = {"steps": 5, "layers": 1, "rate": 1e-2, "max_tokens": 8, "seed": seed}
            steps = [*found["train"](llm, model, [[5, 6, 7], [40, 41]], share_of_low_ids, **options)]
            assert all(gap < 1e-3 for _, _, gap in steps)
            curves.append([reward for reward, _, _ in steps])
    assert curves[0] == curves[1] != curves[2]
    assert all(curve[-1] > curve[0] + 0.15 for curve in curves), curves


def test_grpo_tunix(executables_dir, monkeypatch, capsys):
    pytest.importorskip("tunix", reason="google-tunix is in no extra")
    from tests.jaxengine.rl.test_tunix import Tokenizer

    found, model = runpy.run_path(str(EXAMPLES / "grpo_tunix.py")), jaxengine.open_model(TINY)
    make, reward = found["learner"], found["Reward"]()
    for name, value in {"PROMPTS": ["ab", "cdef"], "LAYERS": 1, "RATE": 1e-2}.items():
        monkeypatch.setitem(make.__globals__, name, value)
    with fast_compile(), jaxengine.LLM(str(TINY), **OPTIONS, compile_cache_dir=executables_dir) as llm:
        make(llm, model, Tokenizer(), reward, 3).train([{"prompts": np.array(["ab", "cdef"])} for _ in range(3)])
        assert llm.weight_version == 4  # those of the actor, and of each step
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == ["step 0", "step 1", "step 2"]


def test_forward_pass(run):
    with np.load(TINY / "golden.npz", allow_pickle=False) as golden:
        prompt, logits = golden["token_ids_0"].tolist(), golden["logits_0"]
    with fast_compile():
        shapes, *layers = run("forward_pass", str(TINY), ",".join(map(str, prompt))).splitlines()
    best = int(logits[-1].argmax())
    assert shapes == f"states ({len(prompt)}, 3, 64), logits ({len(prompt)}, 128), best next token {best}"
    assert [line.partition(":")[0] for line in layers] == ["layer 0", "layer 1", "layer 2"]
    norms = [ast.literal_eval(line.rpartition(": |x| of each token ")[2]) for line in layers]
    assert all(len(each) == len(prompt) and min(each) > 0 for each in norms)


@pytest.mark.thorough("tests/jaxengine/engine/test_capture.py compares them")
def test_hidden_states(run, monkeypatch, executables_dir):
    monkeypatch.setattr(jaxengine, "LLM", partial(jaxengine.LLM, **OPTIONS, compile_cache_dir=executables_dir))
    with np.load(TINY / "golden.npz", allow_pickle=False) as golden:
        prompt = golden["token_ids_0"].tolist()
    with fast_compile():
        lines = run("hidden_states", str(TINY), ",".join(map(str, prompt))).splitlines()
    heads, norms = zip(*(line.split(": |x| of each token ") for line in lines), strict=True)
    shape = f"({len(prompt) + 3}, 64) float32"
    assert [*heads] == [f"{place} {shape}" for place in ("residual:0", "residual:1", "final_norm")]
    wanted = np.linalg.norm(jaxengine.open_model(TINY).hidden_states(prompt), axis=-1).T
    for own, layer in zip(norms, wanted, strict=True):
        np.testing.assert_allclose(ast.literal_eval(own)[: len(prompt)], layer, atol=0.02)
