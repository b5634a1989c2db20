"""Tokens that a transcript may not begin with."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxengine.runner.extensions.sounds.rules import RuleRow, rule_words, ruled
from jaxengine.scheduler.base.media import MAX_BEGIN


def test_no_transcript_begins_with_any_of_many_tokens():
    row, begin = RuleRow(0, first_timestamp=600, eos=590, most_initial=-1), range(0, 2 * MAX_BEGIN, 2)
    words = [rule_words(row, begin, chosen) for chosen in ((), (5,))] + [rule_words(row, (), ())]
    without = np.zeros_like(words[0])  # a slot without rules
    found = np.asarray(ruled(jnp.zeros((4, 700)), jnp.asarray(np.stack([*words, without]))))
    forbidden = [set(np.flatnonzero(np.isinf(each)).tolist()) for each in found]
    assert forbidden == [set(begin), set(), set(), set()]
