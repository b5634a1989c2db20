"""What the kernels of experts multiply, by their own lists of visits."""

from __future__ import annotations

import pytest

from benchmarks.expert_tiles import measure


@pytest.mark.parametrize(
    ("model", "tokens", "visits", "ratio"), [("qwen3-moe-30b-a3b", 1024, 160, 1.6), ("gpt-oss-120b", 8192, 256, 1.4)]
)
def test_visits_multiply_little_beyond_the_rows(model, tokens, visits, ratio):
    """Of tiles as long as an average expert's rows there were 255 visits, and 2.0 times the rows."""
    row = measure(model, tokens)
    assert row["TPU visits"] <= visits and row["TPU ratio"] <= ratio
