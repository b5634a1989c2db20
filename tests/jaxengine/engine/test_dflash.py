"""Drafts of a DFlash head change no token, and are right where its LM head was fitted to what the model says next."""

from __future__ import annotations

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
from tests.jaxengine.engine.test_speculation import assert_same, force, workload
from tests.models.conftest import load_recorded
from tests.models.layers.test_dflash import loaded, read
from tests.models.layers.test_eagle3 import one_sequence, pool_of
from tests.sharding.parallel_cases import OPTIONS

NAME, NUM_DRAFTS, NUM_TOKENS = "qwen3", 2, 15
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "detokenize": False}


def continued() -> list[tuple[list[int], list[int]]]:
    """Prompts, and how transformers goes on after each."""
    with np.load(FOLDER / NAME / "golden.npz") as golden:
        return [(golden[f"token_ids_{at}"].tolist(), golden[f"greedy_{at}"][:NUM_TOKENS].tolist()) for at in range(2)]


def made(head: Any, streams: np.ndarray, tokens: np.ndarray, first: int) -> np.ndarray:
    """[n, NUM_DRAFTS, D], what a head makes of the masks of each block that begins at one of `tokens` from the first-th
    on. streams: what it reads of all of them."""
    graph, state = nnx.split(head)
    model_graph, model_state = nnx.split(load_recorded(NAME).model)
    masks = [head.sizes.mask_token] * NUM_DRAFTS

    @jax.jit
    def run(state, lent, block, start):
        head, model = nnx.merge(graph, state), nnx.merge(model_graph, lent)
        kv = head.write(one_sequence(jnp.zeros(len(streams), jnp.int32), jnp.int32(0)), pool_of(head), streams)
        return head(one_sequence(block, start), kv, head.embeddings(block, model))[0][1:]

    starts = range(first, len(tokens) - NUM_DRAFTS)
    return np.stack([run(state, model_state, jnp.asarray([tokens[at], *masks]), jnp.int32(at)) for at in starts])


def fitted(folder: Path) -> str:
    """A head whose LM head says what the model does in `continued`, by least squares over what its layers make."""
    model, config = load_recorded(NAME).model, load_recorded(NAME).config
    raw, tensors = read(NAME)
    for layer in range(2):  # what attention finds decides
        tensors[f"layers.{layer}.self_attn.o_proj.weight"] *= 8
    folder.mkdir()
    head = loaded(folder, raw, tensors, NAME, config)
    features, wanted = [], []
    for prompt, more in continued():
        tokens, capture = np.asarray([*prompt, *more], np.int32), Capture(head.sizes.streams)
        batch = one_sequence(jnp.asarray(tokens), jnp.int32(0))
        model(batch._replace(sections={"capture": capture}), pool_of(model))
        found = made(head, np.asarray(capture.joined()), tokens, len(prompt))
        features += [*found.reshape(-1, found.shape[2])]
        wanted += [tokens[len(prompt) + at + 1 + draft] for at in range(len(found)) for draft in range(NUM_DRAFTS)]
    assert len(wanted) <= config.hidden_size  # else no matrix need fit
    target = np.zeros((len(wanted), config.vocab_size), np.float32)
    target[np.arange(len(wanted)), wanted] = 10
    lm_head = np.linalg.lstsq(np.stack(features), target, rcond=None)[0].T
    return write(folder / "fitted", raw, tensors | {"lm_head.weight": lm_head.astype(np.float32)})


def test_drafts_are_right_where_the_head_cannot_be_wrong(tmp_path, executables_dir):
    head = fitted(tmp_path / "head")
    drafts = {"method": "dflash", "model": head, "num_speculative_tokens": NUM_DRAFTS}
    known = {"load_format": "auto", "skip_tokenizer_init": True, "num_gpu_blocks_override": 40}
    known |= {"model": str(checkpoint(NAME)), "compile_cache_dir": executables_dir}
    llm = LLM(**OPTIONS | known, speculative_config=drafts)
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in continued()] * 8
    params = SamplingParams(**GREEDY)

    def plain(prompts, params):
        force(llm, 1)
        return llm.generate(prompts, params, use_tqdm=False)

    expected = plain(prompts, params)
    assert [list(each.outputs[0].token_ids) for each in expected] == [more for _, more in continued()] * 8
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
    metrics = {metric.name: metric.value for metric in llm.get_metrics()}
    assert metrics["vllm:num_preemptions"] > 0 and metrics["vllm:prefix_cache_hits"] > 0
    assert metrics["jaxengine:compilations_since_ready"] == 0
    # New weights count, here those of what is read of the model.
    name, tensors = "fc.weight", load_file(Path(head) / "model.safetensors")
    llm.update_weights({name: -tensors[name]}, target="draft", strict=False)
    assert share() < 0.1
    llm.update_weights(head, target="draft")
    assert share() > 0.95
    with pytest.raises(WeightUpdateError, match="finite"):
        llm.update_weights({name: tensors[name] * np.nan}, target="draft", strict=False)
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
    raw, tensors = read(NAME)
    head = write(tmp_path / "head", raw, tensors)
    (tmp_path / "head" / "mask_embedding.pt").write_bytes(b"")
    drafts = {"method": "dflash", "model": head, "num_speculative_tokens": 2}
    with pytest.raises(ConfigError, match=r"has a mask_embedding\.pt, which is not read"):
        LLM(str(checkpoint(NAME)), skip_tokenizer_init=True, speculative_config=drafts)
