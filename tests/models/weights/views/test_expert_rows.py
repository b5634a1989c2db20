"""Checkpoints with the matrices of all experts in the rows of one, as DBRX has them."""

from __future__ import annotations

import numpy as np
import pytest

from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.source import ExpertRows
from jaxengine.models.weights.views.expert_rows import ExpertRowsSource
from tests.models.weights.test_load import ArraySource

NAMES = ExpertRows(rows=("w1", "v1"), turned=("w2",))
AT = "model.layers.0.ffn"


def test_an_expert_is_some_rows():
    stored = {
        f"{AT}.experts.mlp.{part}": np.arange(24.0).reshape(6, 4) + k for k, part in enumerate(("w1", "v1", "w2"))
    }
    router = np.ones((2, 4))
    source = ExpertRowsSource(ArraySource(stored | {f"{AT}.router.layer.weight": router}), NAMES, 2)
    assert len(list(source.names())) == 7
    np.testing.assert_array_equal(source.read(f"{AT}.router.layer.weight"), router)
    w1, w2 = stored[f"{AT}.experts.mlp.w1"], stored[f"{AT}.experts.mlp.w2"]
    assert source.shape(f"{AT}.experts.1.w1.weight") == (3, 4) and source.shape(f"{AT}.experts.1.w2.weight") == (4, 3)
    np.testing.assert_array_equal(source.read(f"{AT}.experts.1.w1.weight", slice(1, 3), slice(0, 2)), w1[4:6, :2])
    np.testing.assert_array_equal(source.read(f"{AT}.experts.1.w2.weight", slice(1, 3), slice(0, 2)), w2.T[1:3, 3:5])
    with pytest.raises(ModelFileError, match="must be a matrix with the rows of 4 experts, got"):
        ExpertRowsSource(ArraySource(stored), NAMES, 4)
