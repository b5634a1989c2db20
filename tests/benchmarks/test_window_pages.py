"""What pools hold beside what windows allow: by hand, and of one model filled by the scheduler."""

from __future__ import annotations

import pytest

from benchmarks.pages import window_pages
from jaxengine.scheduler.base.config import SchedulerConfig

# Pages of 64 tokens; layers of a page and windows of its groups -> factors at 8k, 32k and 128k.
FACTORS = {
    "gpt-oss-120b": (36, [(128, 18), (None, 18)], (1.97, 1.99, 2.00)),
    "gemma-3-27b": (62, [*[(1024, 13)] * 4, (None, 13)], (3.18, 4.24, 4.62)),
    "gemma-3-4b": (34, [*[(1024, 5)] * 6, (None, 5)], (3.89, 5.73, 6.50)),
    "gemma-2-9b": (42, [(4096, 21), (None, 21)], (1.33, 1.78, 1.94)),
    "mistral-7b-v0.1": (32, [(4096, 32)], (2, 8, 32)),
}


@pytest.mark.parametrize("name", FACTORS)
def test_the_most_that_windows_allow(name):
    num_layers, groups, factors = FACTORS[name]
    found = [window_pages.bound(groups, num_layers, length) for length in window_pages.LENGTHS]
    assert found == [pytest.approx(factor, abs=0.006) for factor in factors]


def test_a_pool_is_full_of_sequences_of_that_length():
    config = SchedulerConfig(129 * 10, 64, 64, 2048, 3 * 8192, enable_prefix_caching=False)
    held = window_pages.fill(config, 8192, 10)
    assert held["sequences"] == 10 and 0.97 * 10 * 8192 < held["tokens"] <= 10 * 8192 and held["preemptions"] == 0


@pytest.mark.parametrize("name", ["gpt-oss-120b", "gemma-3-4b"])
def test_pages_given_back_hold_nearly_what_windows_allow(name):
    _, groups, (factor, *_) = FACTORS[name]
    (row,) = window_pages.measure(name, lengths=(8192,))
    assert row["groups"] == "+".join(str(window or "all") for window, _ in groups)
    assert row["layers a page"] == groups[0][1] and row["kept sequences"] == window_pages.NUM_SEQS
    assert row["share"] >= 0.95 and row["factor"] > 0.95 * factor
