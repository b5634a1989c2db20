"""Drafts of DFlash and DSpark heads change no token, and are right where a head's LM head was fitted to what the model
says next.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from jaxengine import LLM, SamplingParams
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.models.layers.base.section import Capture
from jaxengine.runner.weights.weight_names import WeightUpdateError
from tests.fixtures.drawn_weights import FOLDER, checkpoint
from tests.jaxengine.engine.test_draft_models import accepted_share
from tests.jaxengine.engine.test_eagle3 import write
from tests.jaxengine.engine.test_logprobs import assert_scored_as_recorded
from tests.jaxengine.engine.test_speculation import assert_same, force, workload
from tests.models.conftest import load_recorded
from tests.models.layers.drafts.test_dflash import loaded, read
from tests.models.layers.drafts.test_eagle3 import NUM_PAGES, PAGE_SIZE, one_sequence, pool_of
from tests.sharding.parallel_cases import OPTIONS

NUM_DRAFTS, NUM_TOKENS = 2, 15
PADDED = NUM_PAGES * PAGE_SIZE  # tokens of a prompt with its answer, so that one program reads them all
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "detokenize": False}


def continued(name: str) -> list[tuple[list[int], list[int]]]:
    """Prompts, and how transformers goes on after each."""
    with np.load(FOLDER / name / "golden.npz") as golden:
        return [(golden[f"token_ids_{at}"].tolist(), golden[f"greedy_{at}"][:NUM_TOKENS].tolist()) for at in range(2)]


def maker(head: Any, name: str) -> Callable[[np.ndarray, int], np.ndarray]:
    """A function of i32[n] tokens of the model and a number of tokens before: [n - before - NUM_DRAFTS, NUM_DRAFTS, D],
    what a head makes of each block that begins at a later token, in the places of its drafts.
    """
    graph, state = nnx.split(head)
    model_graph, model_state = nnx.split(load_recorded(name).model)
    masks = [head.sizes.mask_token] * (NUM_DRAFTS - head.sizes.from_anchor)

    @jax.jit
    def write(state, lent, tokens):
        """Return the head's pool with what it keeps of the model's tokens. Nothing sees those that a prompt is padded
        with.
        """
        head, model = nnx.merge(graph, state), nnx.merge(model_graph, lent)
        capture = Capture(head.sizes.streams)
        batch = one_sequence(tokens, jnp.int32(0))
        model(batch._replace(sections={"capture": capture}), pool_of(model))
        nothing = one_sequence(jnp.zeros(len(tokens), jnp.int32), jnp.int32(0))
        return head.write(nothing, pool_of(head), capture.joined())

    @jax.jit
    def run(state, lent, kv, block, start):
        head, model = nnx.merge(graph, state), nnx.merge(model_graph, lent)
        return head(one_sequence(block, start), kv, head.embeddings(block, model))[0][-NUM_DRAFTS:]

    def made(tokens: np.ndarray, before: int) -> np.ndarray:
        kv = write(state, model_state, jnp.asarray(np.pad(tokens, (0, PADDED - len(tokens)))))
        blocks = [(jnp.asarray([tokens[at], *masks]), at) for at in range(before, len(tokens) - NUM_DRAFTS)]
        return np.stack([run(state, model_state, kv, block, jnp.int32(at)) for block, at in blocks])

    return made


def fitted(folder: Path, name: str) -> str:
    """A head whose LM head says what a model does in `continued`, by least squares over what its layers make."""
    config = load_recorded(name).config
    raw, stored = read(name)
    for layer in range(raw["num_hidden_layers"]):  # what attention finds decides
        stored[f"layers.{layer}.self_attn.o_proj.weight"] *= 8
    folder.mkdir()
    head = loaded(folder, raw, stored, name, config)
    made, features, wanted, before = maker(head, name), [], [], []
    for prompt, more in continued(name):
        tokens = np.asarray([*prompt, *more], np.int32)
        found = made(tokens, len(prompt))
        features += [*found.reshape(-1, found.shape[2])]
        drafts = [len(prompt) + at + 1 + draft for at in range(len(found)) for draft in range(NUM_DRAFTS)]
        wanted += [*tokens[drafts]]
        before += [*tokens[np.asarray(drafts) - 1]]
    assert len(wanted) <= config.hidden_size  # else no matrix need fit
    target = np.zeros((len(wanted), config.vocab_size), np.float32)
    target[np.arange(len(wanted)), wanted] = 10
    if head.sizes.markov_rank:
        first, second = (stored[f"markov_head.markov_w{number}.weight"] for number in (1, 2))
        target -= first[before] @ second.T
    lm_head = np.linalg.lstsq(np.stack(features), target, rcond=None)[0].T
    return write(folder / "fitted", raw, stored | {"lm_head.weight": lm_head.astype(np.float32)})


@pytest.mark.parametrize(
    ("method", "name"),
    [
        # Its blocks are in tests/jaxengine/runner/extensions/test_draft_blocks.py, its layers in DSpark's heads, too.
        pytest.param("dflash", "qwen3", marks=pytest.mark.thorough("a DSpark head without its two matrices")),
        ("dspark", "llama"),
    ],
)
def test_drafts_are_right_where_the_head_cannot_be_wrong(method, name, tmp_path, executables_dir):
    head = fitted(tmp_path / "head", name)
    drafts = {"method": method, "model": head, "num_speculative_tokens": NUM_DRAFTS}
    known = {"load_format": "auto", "skip_tokenizer_init": True, "num_gpu_blocks_override": 40}
    known |= {"model": str(checkpoint(name)), "compile_cache_dir": executables_dir}
    llm = LLM(**OPTIONS | known, speculative_config=drafts)
    assert not llm.core.runner.extension("drafts").keeps_history  # blocks are drafted from hidden states alone
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in continued(name)] * 8
    params = SamplingParams(**GREEDY)

    def plain(prompts, params):
        force(llm, 1)
        return llm.generate(prompts, params, use_tqdm=False)

    expected = plain(prompts, params)
    assert [list(each.outputs[0].token_ids) for each in expected] == [more for _, more in continued(name)] * 8
    force(llm, NUM_DRAFTS + 1)
    llm.reset_prefix_cache()

    def share() -> float:
        return accepted_share(llm, prompts, params, expected)

    for _ in ("new", "with known prefixes"):
        assert share() > 0.95
    # A head that does not know what comes proposes anything, and no token changes.
    others, kinds = workload(0.7, 100, text=False)
    wanted = plain(others, kinds)
    force(llm, NUM_DRAFTS + 1)
    assert_same(llm.generate(others, kinds, use_tqdm=False), wanted)
    if name == "llama":  # products of Qwen 3's sizes have other bits for one row than for many
        tokens = [prompt["prompt_token_ids"] for prompt in prompts]
        scored = [SamplingParams(**GREEDY, logprobs=0)] * len(tokens)
        assert_scored_as_recorded(llm, tokens, scored, "several tokens in a step")
    metrics = {metric.name: metric.value for metric in llm.get_metrics()}
    assert metrics["vllm:num_preemptions"] > 0 and metrics["vllm:prefix_cache_hits"] > 0
    assert metrics["jaxengine:compilations_since_ready"] == 0
    # New weights count, here those of what is read of the model.
    joined = load_file(Path(head) / "model.safetensors")["fc.weight"]
    llm.update_weights({"fc.weight": -joined}, target="draft", strict=False)
    assert share() < 0.1
    llm.update_weights(head, target="draft")
    assert share() > 0.95
    with pytest.raises(WeightUpdateError, match="finite"):
        llm.update_weights({"fc.weight": joined * np.nan}, target="draft", strict=False)
    assert llm.core.runner.compiles.count == 0


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({"method": "dflash"}, "dflash' without a model; name it in speculative_config.model"),
        ({"method": "dflash", "model": "x", "prompt_lookup_max": 3}, "'dflash' has no prompt_lookup_max"),
    ],
)
def test_bad_options_are_refused(chosen, said):
    with pytest.raises(ConfigError, match=said):
        EngineConfig(speculative_config=chosen | {"num_speculative_tokens": 2})


def test_a_mask_in_a_file_of_its_own_is_refused(tmp_path):
    raw, tensors = read("qwen3")
    head = write(tmp_path / "head", raw, tensors)
    (tmp_path / "head" / "mask_embedding.pt").write_bytes(b"")
    drafts = {"method": "dflash", "model": head, "num_speculative_tokens": 2}
    with pytest.raises(ConfigError, match=r"has a mask_embedding\.pt, which is not read"):
        LLM(str(checkpoint("qwen3")), skip_tokenizer_init=True, speculative_config=drafts)
