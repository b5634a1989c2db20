"""Every step the scheduler may emit has a bucket, and the bucket holds it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxengine.scheduler.batches.buckets import Bucket, Buckets


@given(
    st.integers(1, 64),
    st.integers(0, 200),
    st.lists(st.integers(1, 64), max_size=5),
    st.lists(st.integers(1, 264), max_size=5),
    st.data(),
)
def test_round_up_is_total(max_num_seqs, more, decode, mixed, data):
    max_tokens = max_num_seqs + more
    buckets = Buckets(
        max_num_seqs,
        max_tokens,
        [size for size in decode if size <= max_num_seqs],
        [size for size in mixed if size <= max_tokens],
    )
    num_tokens = data.draw(st.integers(1, max_tokens))
    num_seqs = data.draw(st.integers(1, min(num_tokens, max_num_seqs)))
    bucket = buckets.round_up(num_tokens, num_seqs)
    assert bucket in set(buckets)
    assert bucket.num_tokens >= num_tokens and bucket.num_seqs >= num_seqs
    assert bucket.decode_only == (num_tokens == num_seqs)
    for each in buckets:
        assert each.num_seqs <= buckets.sample_size(each) <= 2 * each.num_seqs
    scored = buckets.round_up(num_tokens, num_seqs, prompt=True)
    assert scored in buckets.prompt and scored.num_tokens >= num_tokens and scored.num_seqs >= num_seqs
    if max_tokens > 1:  # else no rank can have a row of two
        mixed = buckets.round_up(num_tokens, num_seqs, mixed=True)
        assert mixed in set(buckets) and not mixed.decode_only
        assert mixed.num_tokens >= num_tokens and mixed.num_seqs >= num_seqs


@pytest.mark.parametrize(("num_tokens", "num_seqs"), [(0, 0), (5, 6), (33, 1), (20, 9), (3, 0)])
def test_impossible_steps_are_refused(num_tokens, num_seqs):
    with pytest.raises(ValueError, match="allowed:"):
        Buckets(8, 32, [], []).round_up(num_tokens, num_seqs)


def test_largest_shapes_are_always_there():
    assert list(Buckets(8, 32, [1, 2], [16])) == [
        Bucket(1, 1),
        Bucket(2, 2),
        Bucket(8, 8),
        Bucket(16, 8),
        Bucket(32, 8),
    ]


def test_mixed_steps_share_the_samplers_of_decodes():
    buckets = Buckets(32, 512, [1, 4, 8, 16], [32, 64, 128])
    assert {buckets.sample_size(bucket) for bucket in buckets} == {1, 4, 8, 16, 32}
    assert buckets.sample_size(Bucket(32, 31)) == 32
    assert Buckets(64, 512, [], [8]).sample_size(Bucket(8, 7)) == 7  # 64 rows would be nine times as many


@pytest.mark.parametrize("sizes", [([9], []), ([], [33]), ([0], [])])
def test_sizes_out_of_range_are_refused(sizes):
    with pytest.raises(ValueError, match="allowed: 1 to"):
        Buckets(8, 32, *sizes)
