"""Random requests, half of them structured, with aborts: nothing compiles, nothing leaks, all is valid."""

from __future__ import annotations

import re

import numpy as np

from jaxengine.requests.params.options import RequestOptions
from jaxengine.requests.params.sampling_params import RequestOutputKind
from tests.test_no_recompile import random_params

NUM_REQUESTS = 60
WHOLE = RequestOutputKind.FINAL_ONLY
PATTERNS = (
    "[a-z]{2,30}",
    "[a-z ]{400,}",
    "(yes|no|perhaps)",
    r"-?[0-9]{1,4}(\.[0-9]{1,3})?",
    "[A-Z][a-z]{3,9}( [a-z]{2,8}){3,9}",
    r"\{[^{}]{0,40}\}",
)


def test_a_mixture(chat_llm):
    core, rng = chat_llm.core, np.random.default_rng(12)
    vocab_size, tokenizer = core.inputs.model_config.vocab_size, core.inputs.require_tokenizer()
    patterns, alive, finished = {}, [], {}

    def step():
        for output in core.step():
            if output.finished:
                finished[output.request_id] = output

    for index in range(NUM_REQUESTS):
        params = random_params(rng, vocab_size, 96)
        name = f"mixture-{index}"
        if rng.random() < 0.5:
            patterns[name] = str(rng.choice(PATTERNS))
            params = params.clone_with(structured_outputs={"regex": patterns[name]}, max_tokens=48, output_kind=WHOLE)
        token_ids = rng.integers(0, vocab_size, int(rng.integers(1, 150))).tolist()
        options = RequestOptions(timeout=30.0 if rng.random() < 0.1 else None)
        core.add(core.inputs.prepare({"prompt_token_ids": token_ids}, params, request_id=name, options=options))
        alive.append(name)
        if rng.random() < 0.1:
            for output in core.abort(alive.pop(int(rng.integers(len(alive))))):
                finished[output.request_id] = output
        for _ in range(int(rng.integers(0, 4))):
            step()
    while core.has_unfinished:
        step()
    assert len(finished) == NUM_REQUESTS and core.pop_rejected() == []
    assert core.runner.compiles.count == 0
    assert core.engine.scheduler.num_free_pages == core.engine.scheduler.num_pages
    assert (
        not core.engine.extensions.require("structured").masks._keys
        and not core.engine.extensions.require("structured").masks.worker._sequences
    )
    reasons = [each.finish_reason for name in patterns for each in finished[name].outputs]
    assert {"stop", "length"} <= set(reasons)
    for name, pattern in patterns.items():
        for each in finished[name].outputs:
            text = tokenizer.decode(each.token_ids)
            if each.finish_reason == "stop" and each.stop_reason is None:
                assert re.fullmatch(pattern, text), (pattern, text)
