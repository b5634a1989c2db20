"""Tokens of a step where ranks share it."""

from __future__ import annotations

import pytest

from jaxengine.config.engine_config import ConfigError
from jaxengine.config.execution.step_tokens import rank_tokens


def test_a_rank_has_room_for_a_whole_prompt_where_none_is_divided():
    assert rank_tokens(2048, None, 2, 2048, chunks=True) == 1024
    assert rank_tokens(2048, None, 2, 2048, chunks=False) == 2048
    assert rank_tokens(4096, 4096, 2, 2048, chunks=False) == 2048
    with pytest.raises(
        ConfigError, match="max_num_batched_tokens is 2048; allowed: at least 4096: 2 ranks share a step"
    ):
        rank_tokens(2048, 2048, 2, 2048, chunks=False)
