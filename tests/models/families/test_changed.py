"""Logits of recorded checkpoints with changed configurations, against those of transformers."""

from __future__ import annotations

import numpy as np
import pytest

from tests.fixtures.changed_models import CASES, PROMPT, RECORD, TOKENS, write
from tests.models.conftest import PagedRun, load_checkpoint

# Further states and MLPs, whose activations, or convolutions of one token, are found where these have theirs.
FURTHER = ("axk2", "falcon_h1", "hy_v4", "kimi_linear", "minimax", "mamba_one", "mamba2_one", "qwen3_next_one")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough("as others")] * (name in FURTHER)) for name in CASES]
)
def test_logits_of_changed_configurations(name, tmp_path):
    write(name, tmp_path)
    _, model = load_checkpoint(tmp_path)
    run = PagedRun(model)
    found = np.concatenate([run.step({"a": part}, num_tokens=8)["a"] for part in np.split(PROMPT, [5, 7])])
    with np.load(RECORD) as golden:
        expected = golden[name]
    assert np.abs(found[-TOKENS:] - expected).max() <= 1e-4 * np.abs(expected).max()
