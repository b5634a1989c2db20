"""Files of a pooling model beside its weights."""

from __future__ import annotations

import gc
import os
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxengine.models.config.pooler import Dense, Pooler, TokenHead
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.weights.formats.arrays import ArraySource
from jaxengine.models.weights.pooled import with_own_files


@pytest.mark.skipif(sys.platform != "linux", reason="counts open files in /proc")
def test_files_are_closed_if_a_later_one_is_invalid(tmp_path):
    dense = tuple(Dense(4, 4, False, "Identity", folder) for folder in ("1_Dense", "2_Dense"))
    pooler = Pooler("MEAN", dense=dense, token_heads=(TokenHead("token_embed", 4, "head"),))
    for each in dense:
        (tmp_path / each.folder).mkdir()
    stored, last = tmp_path / "1_Dense/model.safetensors", tmp_path / "2_Dense/model.safetensors"
    save_file({"linear.weight": np.zeros((4, 4), np.float32)}, stored)
    head = tmp_path / "head.safetensors"
    weights = ArraySource({"norm.weight": np.zeros(4)})
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for path, invalid in ((last, b""), (head, b"x")):
        path.write_bytes(invalid)
        with pytest.raises(ModelFileError, match=path.parent.name):
            with_own_files(tmp_path, weights, CheckpointNames(), pooler)
        assert len(os.listdir("/proc/self/fd")) == before and list(weights.names()) == ["norm.weight"]
        path.write_bytes(stored.read_bytes())
    whole = with_own_files(tmp_path, weights, CheckpointNames(), pooler)
    assert {"dense.1.linear.weight", "head.linear.weight"} <= set(whole.names())
    whole.close()
    assert len(os.listdir("/proc/self/fd")) == before
