"""jaxengine.open_model: modules, weights, logits and hidden states without an engine, and the documents' blocks."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxengine
from jaxengine import LLM, ConfigError, ModelFileError, SamplingParams
from jaxengine.rl import forward
from tests.conftest import TINY_OPTIONS
from tests.models.conftest import load_recorded
from tests.tables import each_row

ROOT = Path(__file__).resolve().parents[3]
TINY = ROOT / "tests" / "fixtures" / "models" / "llama"


@pytest.fixture(scope="module")
def model() -> jaxengine.OpenModel:
    return jaxengine.open_model(TINY)


def test_logits_of_one_sequence_and_of_several(model):
    case = load_recorded("llama")
    logits = np.asarray(model.forward(case.prompts[0].tolist()))
    assert logits.dtype == np.float32 and logits.shape == case.logits[0].shape
    assert np.abs(logits - case.logits[0]).max() <= 1e-5 * np.abs(case.logits[0]).max()
    several = np.asarray(model.forward(np.stack([case.prompts[0], case.prompts[0][::-1]])))
    assert several.shape == (2, *logits.shape)
    np.testing.assert_allclose(several[0], logits, atol=1e-4)


def test_hidden_states_lead_to_the_logits(model):
    prompt = load_recorded("llama").prompts[1]
    states = model.hidden_states(prompt)
    assert states.shape == (len(prompt), model.config.num_layers + 1, model.config.hidden_size)
    assert (np.asarray(states[:, 0]) == np.asarray(model.module.embed(jnp.asarray(prompt)))).all()
    np.testing.assert_allclose(model.module.logits(states[:, -1]), model.forward(prompt), atol=1e-4)
    assert model.hidden_states(prompt[None]).shape == (1, *states.shape)


def test_params_are_what_the_forward_pass_takes(model):
    prompt = load_recorded("llama").prompts[1]
    assert (np.asarray(forward(model.module, model.params, prompt[None])[0]) == np.asarray(model.forward(prompt))).all()
    narrow = jaxengine.open_model(TINY, dtype="bfloat16").params
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(narrow))


TOKENS = {
    "no tokens": ([], r"tokens must be integers \[T\] or \[B, T\], got float64\[0\]"),
    "text": ("hello", r"tokens must be integers \[T\] or \[B, T\], got <U5\[\]"),
    "below zero": ([3, -1], "tokens must be at least 0 and below 128, got -1"),
    "above the vocabulary": ([[3, 128]], "tokens must be at least 0 and below 128, got 128"),
}


@each_row("kind", TOKENS)
def test_tokens_that_are_none_are_refused(kind, model):
    tokens, text = TOKENS[kind]
    for call in (model.forward, model.hidden_states):
        with pytest.raises(ValueError, match=text):
            call(tokens)


def test_suppressed_tokens_are_not_sampled_but_have_logits_and_raw_logprobs(model, tmp_path):
    prompt = load_recorded("llama").prompts[1].tolist()
    logits = np.asarray(model.forward(prompt))
    suppressed = [int(logits[-1].argmax())]
    folder = shutil.copytree(TINY, tmp_path / "model", ignore=shutil.ignore_patterns("eagle3.*"))
    (folder / "generation_config.json").write_text(json.dumps({"suppress_tokens": suppressed}))
    assert (np.asarray(jaxengine.open_model(folder).forward(prompt)) == logits).all()
    llm = LLM(str(folder), **{**TINY_OPTIONS, "max_model_len": 64})
    params = SamplingParams(max_tokens=6, temperature=0, logprobs=1, ignore_eos=True)
    output = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0].outputs[0]
    assert not set(output.token_ids) & set(suppressed)
    whole = np.asarray(jax.nn.log_softmax(model.forward([*prompt, *output.token_ids]), axis=-1))[len(prompt) - 1 :]
    for token, reported, own in zip(output.token_ids, output.logprobs, whole, strict=False):
        assert abs(reported[token].logprob - own[token]) <= 1e-4
        assert token == np.delete(own, suppressed).argmax() + (token > suppressed[0])
    best = output.logprobs[0][suppressed[0]]
    assert best.rank == 1 and abs(best.logprob - whole[0].max()) <= 1e-4


def test_models_that_cannot_be_opened_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="dtype"):
        jaxengine.open_model(TINY, dtype="float64")
    with pytest.raises(ModelFileError, match=r"has no config\.json"):
        jaxengine.open_model(tmp_path)


@pytest.mark.parametrize("name", ["reinforcement_learning.md", "research.md"])
def test_blocks_of_the_documents_run(name, model, monkeypatch):
    text = (ROOT / "docs" / name).read_text()
    (block,) = (found for found in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "open_model()" in found)
    monkeypatch.setattr(jaxengine, "open_model", lambda: model)
    found: dict = {}
    exec(block, found)  # noqa: S102
    if "gradients" in found:
        gradients = jax.tree.leaves(found["gradients"])
        assert float(found["value"]) > 0 and all(np.isfinite(each).all() for each in gradients)
    else:
        assert found["logits"].shape == (5, 128) and found["states"].shape == (5, 3, 64)
