"""jaxengine.rl.tunix: Tunix's rollout interface over an engine, and a model of jaxengine as Tunix trains it.

With google-tunix where it is installed, otherwise with what tunix_base.py records of it.
"""

from __future__ import annotations

import importlib
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxengine
from jaxengine import LLM
from jaxengine.rl import forward
from tests.jaxengine.rl import tunix_base
from tests.tables import each_row

PAD, EOS, BOS = 0, 2, 1
PROMPTS = ["aa", "abcdefgh", "aa"]


class Tokenizer:
    """One token for each letter: "a" is 10."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") + 10 for letter in text]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> int:
        return BOS

    def eos_id(self) -> int:
        return EOS

    def pad_id(self) -> int:
        return PAD


@pytest.fixture(scope="module")
def tunix():
    """jaxengine.rl.tunix and Tunix's own module of the interface."""
    if tunix_base.is_installed():
        assert tunix_base.differences() == []
        yield importlib.import_module("jaxengine.rl.tunix"), importlib.import_module(tunix_base.NAME)
        return
    sys.modules.update(tunix_base.as_modules())
    try:
        yield importlib.import_module("jaxengine.rl.tunix"), sys.modules[tunix_base.NAME]
    finally:
        for name in (*tunix_base.as_modules(), "jaxengine.rl.tunix"):
            del sys.modules[name]


@pytest.fixture(scope="module")
def llm(tiny_options):
    with LLM(**tiny_options) as llm:
        yield llm


@pytest.fixture(scope="module")
def model(tiny_model):
    return jaxengine.open_model(tiny_model)


@pytest.fixture
def rollout(tunix, llm):
    return partial(tunix[0].JaxengineRollout, tokenizer=Tokenizer(), llm=llm)


def config(tunix, **changes: Any) -> Any:
    fields = {"max_tokens_to_generate": 6, "temperature": 1.0, "max_prompt_length": 5, "seed": 3}
    return tunix[1].RolloutConfig(**fields | {"return_logprobs": True} | changes)


def test_generate_and_score(tunix, rollout):
    one = rollout()
    found = one.generate(PROMPTS, config(tunix))
    assert len(found.text) == len(found.tokens) == 3 and found.logits is None
    # The longest prompt has nine tokens with the first one, more than max_prompt_length.
    assert found.left_padded_prompt_tokens.shape == (3, 16)
    assert found.left_padded_prompt_tokens[0].tolist() == [PAD] * 13 + [BOS, 10, 10]
    width = max(map(len, found.tokens))
    completions = np.array([[*ids, *[PAD] * (width - len(ids))] for ids in found.tokens])
    scores = one.get_per_token_logps(found.left_padded_prompt_tokens, jnp.asarray(completions))
    for row, (ids, logprobs) in enumerate(zip(found.tokens, found.logprobs, strict=True)):
        assert logprobs.dtype == np.float32
        np.testing.assert_array_equal(np.asarray(scores[row, : len(ids)]), logprobs)  # bit for bit
        assert not scores[row, len(ids) :].any()


def test_a_text_is_one_prompt_and_tokenizers_may_have_their_tokens_as_attributes(tunix, rollout):
    plain = Tokenizer()
    attributes = SimpleNamespace(encode=plain.encode, decode=plain.decode, bos_id=None, pad_id=5, eos_id=EOS)
    one = rollout(tokenizer=attributes)
    found = one.generate("abc", config(tunix))
    assert found.left_padded_prompt_tokens.tolist() == [[5, 5, 10, 11, 12]] and (one.pad_id(), one.eos_id()) == (5, EOS)
    assert one.generate([], config(tunix)).left_padded_prompt_tokens.shape == (0, 5)
    attributes.pad_id = None  # as of Llama 3
    assert one.pad_id() == EOS
    attributes.eos_id = None
    with pytest.raises(ValueError, match="tokenizer must have an eos_id"):
        one.pad_id()


def test_each_prompt_of_each_call_draws_its_own_numbers(tunix, rollout):
    def drawn(one: Any, **changes: Any) -> list[list[int]]:
        output = one.generate(["aa", "aa", "bc"], config(tunix, temperature=2.0, return_logprobs=False, **changes))
        assert output.logprobs is None
        return [ids.tolist() for ids in output.tokens]

    one = rollout()
    first, second = drawn(one), drawn(one)
    assert first[0] != first[1] and first != second
    again = rollout()
    assert [drawn(again), drawn(again)] == [first, second]
    assert drawn(rollout(), seed=jax.random.key(3)) not in (first, second)
    assert len({one._params(config(tunix, seed=seed), {}, 0, 0).seed for seed in (3, -3, 2**64 - 4)}) == 3


def test_an_answer_ends_with_its_end(tunix, rollout):
    plain = rollout().generate(["aa"], config(tunix, temperature=0.0))
    *before, last = list(dict.fromkeys(plain.tokens[0].tolist()))[:2]
    end = plain.tokens[0].tolist().index(last)
    ended = rollout().generate(["aa"], config(tunix, temperature=0.0, eos_tokens=[last]))
    assert ended.tokens[0].tolist() == plain.tokens[0][: end + 1].tolist()
    assert ended.text == [" ".join(map(str, plain.tokens[0][:end].tolist()))] and before
    longer = rollout().generate(["aa"], config(tunix, temperature=0.0), max_tokens=9, ignore_eos=True)
    assert len(longer.tokens[0]) == 9


@pytest.mark.thorough("examples/grpo.py trains, and the engine follows")
def test_a_model_trains_and_the_engine_follows(tunix, rollout, model, llm):
    last = model.config.num_layers - 1
    actor = tunix[0].TunixModel(model.module, is_trained=lambda path: path[:2] == ("layers", last), remat=True)
    trained, whole = nnx.state(actor, nnx.Param), len(jax.tree.leaves(model.params))
    assert 0 < len(jax.tree.leaves(trained)) < whole == len(jax.tree.leaves(nnx.state(actor)))
    one = rollout(actor)
    rows = jnp.array([[PAD, PAD, 11, 12, 13, 14, 15, PAD], [21, 22, 23, 24, 25, 26, 27, 28]])
    real = rows != PAD

    def logits(state: Any, **more: Any) -> jax.Array:
        graph, _, rest = nnx.split(actor, nnx.Param, ...)
        return nnx.merge(graph, state, rest)(rows, positions=jnp.maximum(jnp.cumsum(real, 1) - 1, 0), **more)[0]

    # Padding changes nothing, and is told by segments or by the mask.
    alone = forward(model.module, model.params, rows[:1, 2:7])
    mask = jnp.tril(jnp.ones((8, 8), bool)) & real[:, None, :]
    for more in ({"segment_ids": real.astype(jnp.int32)}, {"attention_mask": mask}):
        np.testing.assert_allclose(logits(trained, **more)[0, 2:7], alone[0], atol=1e-4)
    gradients = jax.grad(lambda state: logits(state, segment_ids=real.astype(jnp.int32))[..., 7].mean())(trained)
    changed = jax.tree.map(lambda weight, gradient: weight + 0.5 * gradient, trained, gradients)
    before = one.get_per_token_logps(rows[:, :4], rows[:, 4:])
    one.update_params(changed, (nnx.Param,))
    after = one.get_per_token_logps(rows[:, :4], rows[:, 4:])
    assert np.abs(np.asarray(after - before)).max() > 1e-3
    likely = jax.nn.log_softmax(logits(changed, segment_ids=real.astype(jnp.int32)))[:, 3:-1]
    expected = jnp.take_along_axis(likely, rows[:, 4:, None], 2)[..., 0] * real[:, 4:]
    np.testing.assert_allclose(after, expected, atol=1e-4)
    assert one.model() is None  # what Tunix takes for weights that are not shared
    # The trainer's arrays stay its own.
    jax.tree.map(lambda weight: weight.delete(), changed)
    np.testing.assert_array_equal(one.get_per_token_logps(rows[:, :4], rows[:, 4:]), after)
    with pytest.raises(ValueError, match="must have the .* trained weights; differs by"):
        one.update_params(nnx.state(actor.module, nnx.Param))
    rollout(tunix[0].TunixModel(model.module))  # as it was
    np.testing.assert_allclose(one.get_per_token_logps(rows[:, :4], rows[:, 4:]), before, atol=1e-6)


def test_another_model_by_names(tunix, rollout, model, llm):
    weights = nnx.Param(jnp.full(model.config.hidden_size, 2.0))
    others = {"final_norm": {"scale": weights}}
    with pytest.raises(jaxengine.RequestError, match="is missing|are missing|stay as they are"):
        rollout().update_params(nnx.State(others))
    with pytest.raises(jaxengine.RequestError, match="named by mapping and not in params"):
        rollout(mapping={"head.kernel": "lm_head.weight"}).update_params(nnx.State(others))
    with pytest.raises(ValueError, match="not those of Tunix's .*: final_norm.bias"):
        rollout().update_params(nnx.State({"final_norm": {"bias": weights}}))


@each_row(
    ("changes", "says"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size must be -1 or the engine's, 1, got 2"),
        ({"data_parallel_size": 4}, "data_parallel_size must be -1 or the engine's, 1, got 4"),
        ({"rollout_mapping_config": object()}, "give JaxengineRollout a mapping"),
        ({"max_tokens_to_generate": 96}, "must be below the engine's max_model_len, 96, got 96"),
        ({"temperature": 0.5}, "logprobs_mode='processed_logprobs'"),
    ],
)
def test_what_the_engine_does_not_do_is_refused(changes, says, tunix, rollout):
    with pytest.raises(ValueError, match=says):
        rollout(rollout_config=config(tunix, **changes))
    with pytest.raises(ValueError, match=says):
        rollout().generate(["aa"], config(tunix, **changes))


def test_what_a_rollout_refuses(tunix, rollout, model):
    warm = rollout(rollout_config=config(tunix, temperature=0.5, return_logprobs=False))
    with pytest.raises(ValueError, match="are of temperature 1: .* got a rollout at 0.5"):
        warm.get_per_token_logps(jnp.ones((1, 2), int), jnp.ones((1, 2), int))
    with pytest.raises(ValueError, match="LoRA parameters are not taken"):
        rollout().update_params({}, (nnx.LoRAParam,))
    with pytest.raises(ValueError, match="is_trained must be true of some weight"):
        tunix[0].TunixModel(model.module, is_trained=lambda path: False)
    with pytest.raises(ValueError, match="cache must be None"):
        tunix[0].TunixModel(model.module)(jnp.ones((1, 2), int), cache={})


def test_without_tunix_one_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, tunix_base.NAME, None)
    monkeypatch.delitem(sys.modules, "jaxengine.rl.tunix", raising=False)
    with pytest.raises(ImportError, match=r"needs Tunix: pip install 'jaxengine\[tunix\]', then"):
        importlib.import_module("jaxengine.rl.tunix")
