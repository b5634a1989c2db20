"""What the demo says is what the outputs and metrics hold."""

from __future__ import annotations

import pytest

from jaxengine.commands.demo import summary
from jaxengine.requests.output.outputs import CompletionOutput, RequestMetrics, RequestOutput

BEFORE = {
    "vllm:prefix_cache_hits": 0,
    "vllm:prefix_cache_queries": 0,
    "vllm:num_preemptions": 0,
    "jaxengine:page_slots_used": 0,
    "jaxengine:page_slots_empty": 0,
    "jaxengine:steps": 0,
}
AFTER = {
    "vllm:prefix_cache_hits": 48,
    "vllm:prefix_cache_queries": 100,
    "vllm:num_preemptions": 2,
    "jaxengine:page_slots_used": 300,
    "jaxengine:page_slots_empty": 100,
    "jaxengine:steps": 5,
    "jaxengine:executables_compiled": 3,
    "jaxengine:executables_loaded": 4,
    "jaxengine:compilations_since_ready": 0,
}


def output(first_token: float, tokens: int) -> RequestOutput:
    metrics = RequestMetrics(arrival_time=1.0, first_token_time=1.0 + first_token)
    return RequestOutput("x", None, [1, 2], [CompletionOutput(0, "", [0] * tokens)], True, metrics=metrics)


def lines(after=AFTER, **changes) -> str:
    outputs = [output(0.3, 10), output(0.1, 20), output(0.5, 30)]
    return "\n".join(summary(outputs, 2.0, BEFORE, {**after, **changes}, 7.0, num_pages=40, page_size=16))


@pytest.mark.parametrize(
    "part",
    [
        "30.0 tokens/s (60 new tokens of 3 requests, 6 prompt tokens, 2.00 s)",
        "mean 0.300 s, median 0.300 s, last 0.500 s",
        "48 of 100 prompt tokens found",
        "5 of 40 held on average (12.5 %), 25.0 % of their token slots empty; 2 preemptions",
        "7.0 s until ready; 3 executables compiled, 4 loaded",
        "0 after ready",
    ],
)
def test_summary_holds(part):
    assert part in lines()


def test_a_second_start_says_that_it_compiled_nothing():
    text = lines(**{"jaxengine:executables_compiled": 0})
    assert "nothing compiled: all 4 executables were loaded from the cache" in text
