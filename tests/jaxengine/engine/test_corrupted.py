"""A request whose logits are not finite is counted as corrupted."""

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
