"""A request whose logits are not finite is counted as corrupted, one that forbids itself all tokens is not."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxengine import LLM, SamplingParams
from jaxengine.scheduler.base.request import NOT_FINITE


def test_a_model_that_gives_nan_is_counted(tiny_options):
    llm = LLM(**tiny_options)
    (stage,) = llm.core.runner.stages
    stage.params = [jax.device_put(jnp.full_like(leaf, jnp.nan), leaf.format) for leaf in stage.params]
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": [5, 6]}] * 3, params, use_tqdm=False)
    assert [(each.outputs[0].finish_reason, each.outputs[0].stop_reason) for each in outputs] == [
        ("error", NOT_FINITE)
    ] * 3
    (corrupted,) = [metric.value for metric in llm.get_metrics() if metric.name == "vllm:corrupted_requests"]
    assert corrupted == 3


def test_parameters_that_leave_no_token_are_the_reason(make_llm):
    """They are named instead of the logits; a request beside it is not disturbed."""
    llm, only = make_llm(), {"allowed_token_ids": [7], "stop_token_ids": [7]}
    before = llm.core.engine.request_stats.num_corrupted
    params = [SamplingParams(temperature=0, max_tokens=4, **only, min_tokens=count) for count in (3, 0)]
    outputs = llm.generate([{"prompt_token_ids": [5, 6]}] * 2, params, use_tqdm=False)
    nothing, stopped = (each.outputs[0] for each in outputs)
    assert nothing.finish_reason == "error" and "no token is allowed" in nothing.stop_reason
    assert (stopped.token_ids, stopped.finish_reason, stopped.stop_reason) == ([7], "stop", 7)
    assert llm.core.engine.request_stats.num_corrupted == before
