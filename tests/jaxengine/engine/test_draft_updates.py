"""New weights of a draft model: no token changes, and drafts are those of the weights that it has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxengine import LLM, RequestError
from jaxengine.runner.weights.weight_update import WeightUpdateError, read_weights
from tests.conftest import TINY_CHECKPOINT
from tests.jaxengine.engine.test_speculation import force
from tests.jaxengine.engine.test_weight_updates import NORM, PROMPTS, changed, greedy
from tests.tables import each_row

NUM_TOKENS = 16


@pytest.fixture(scope="module")
def llm(tiny_options):
    """Drafted by the model itself, so that every draft is right while both have the same weights. Its programs are
    those of an engine of test_offload.py.
    """
    drafts = {"method": "draft_model", "model": str(TINY_CHECKPOINT), "num_speculative_tokens": 1}
    sizes = {"max_model_len": 64, "num_gpu_blocks_override": 40}
    with LLM(**tiny_options | sizes | {"speculative_config": drafts}) as llm:
        force(llm, 2)  # whether drafts pay on this machine is not what is asked
        yield llm


def drafted(llm: LLM) -> tuple[list[list[int]], float]:
    """Tokens of the prompts, and the share of their drafts that were right."""
    llm.core.utility("reset_prefix_cache")
    drafts: Any = llm.core.engine.extensions.by_name["drafts"]
    stats = drafts.stats
    before, right = stats.num_tokens, int(stats.accepted.sum())
    outputs = llm.generate(PROMPTS, greedy(NUM_TOKENS), use_tqdm=False)
    while llm.core.engine.has_unfinished:
        llm.core.step()
    share = (int(stats.accepted.sum()) - right) / (stats.num_tokens - before)
    return [list(each.outputs[0].token_ids) for each in outputs], share


@pytest.mark.thorough("test_next_token.py and test_eagle3.py update drafts on the engines that they have")
def test_drafts_are_those_of_the_newest_weights(llm):
    first, share = drafted(llm)
    assert share == 1
    update = llm.update_weights(changed(1), target="draft")
    assert update.version == llm.weight_version == 0 and update.leaves > 3
    tokens, share = drafted(llm)
    assert tokens == first and share < 0.9
    llm.update_weights(changed(1))
    other, share = drafted(llm)
    assert other != first and share == 1 and llm.weight_version == 1
    for target in ("model", "draft"):
        llm.update_weights(iter(changed(0).items()), target=target, kv="drop")
    assert drafted(llm) == (first, 1) and llm.core.runner.compiles.count == 0


@each_row(
    ("params", "options", "fault"),
    [
        ({**changed(1), NORM: np.full(64, np.nan, np.float32)}, {}, "finite"),
        ({name: each for name, each in changed(1).items() if name != NORM}, {}, "missing"),
        (changed(1), {"version": "a"}, "version is 'a'"),
        (changed(1), {"target": "both"}, "target is 'both'; allowed: model, draft"),
    ],
)
def test_what_is_wrong_changes_nothing(llm, params, options, fault):
    before = [np.asarray(each) for each in llm.core.runner.stages[0].extensions["drafts"].params]
    with pytest.raises(RequestError, match=fault):
        llm.update_weights(params, **{"target": "draft", **options})
    after = llm.core.runner.stages[0].extensions["drafts"].params
    assert all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))
    assert not llm.is_paused()


def test_an_engine_without_a_draft_model_has_no_weights_of_one():
    for method, what in ((None, "no drafts"), ("ngram", "the method 'ngram'"), ("grammar", "the method 'grammar'")):
        chosen = None if method is None else SimpleNamespace(method=method, has_model=False)
        runner: Any = SimpleNamespace(config=SimpleNamespace(nnodes=1, speculative_config=chosen), stages=[])
        with pytest.raises(RequestError, match=what) as error:
            read_weights(runner, {}, target="draft")
        assert error.value.param == "target" and not isinstance(error.value, WeightUpdateError)
