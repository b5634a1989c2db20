"""Damaged indices and headers of safetensors, and damaged folders of our own layout: read, or refused in one line."""

from __future__ import annotations

import gc
import json
import random
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine.models.build import Build
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.registry import build_model, read_folder
from jaxengine.models.weights.formats.orbax import load_checkpoint, load_scales, save_checkpoint
from jaxengine.models.weights.formats.safetensors import SafetensorsCheckpoint
from jaxengine.models.weights.load import load_params
from jaxengine.models.weights.views.kv_scales import KVScales, KVShape
from tests.models.damage import damaged_bytes, damaged_value


def refused(case, use) -> bool:
    """Whether `use` raised a ModelFileError; other errors are failures."""
    try:
        use()
        return False
    except ModelFileError as error:
        assert len(str(error)) < 2000 and str(error).isprintable(), case
        return True


def read_all(folder):
    checkpoint = SafetensorsCheckpoint(folder)
    try:
        for name in checkpoint.names():
            assert checkpoint.read(name).shape == checkpoint.shape(name)
    finally:
        checkpoint.close()


def test_damaged_indices_and_headers(tmp_path, checkpoints, thorough):
    folder = tmp_path / "model"
    shutil.copytree(checkpoints / "llama3_sharded", folder)
    index, shard = folder / "model.safetensors.index.json", folder / "model-00001-of-00003.safetensors"
    whole = {index: index.read_bytes(), shard: shard.read_bytes()}
    size = int.from_bytes(whole[shard][:8], "little")
    header, data = json.loads(whole[shard][8 : 8 + size]), whole[shard][8 + size :]
    count, num_refused = 10_000 if thorough else 150, 0
    for number in range(count):
        rng = random.Random(f"index/{number}")
        file = rng.choice((index, shard))
        if rng.random() < 0.2:
            file.write_bytes(damaged_bytes(whole[file], rng))
        elif file == index:
            file.write_text(json.dumps(damaged_value(json.loads(whole[index]), rng)))
        else:
            damaged = json.dumps(damaged_value(header, rng)).encode()
            file.write_bytes(len(damaged).to_bytes(8, "little") + damaged + data)
        num_refused += refused(number, lambda: read_all(folder))
        file.write_bytes(whole[file])
    assert count // 2 < num_refused < count


@pytest.mark.filterwarnings("ignore")
def test_damaged_layouts_of_our_own(tmp_path, checkpoints, thorough):
    source = checkpoints / "llama"
    model = build_model(read_folder(source), Build(jnp.float32))
    whole, folder = tmp_path / "whole", tmp_path / "damaged"
    shape = KVShape(2, (0, 1), 2, values_in_keys=False)
    scales = KVScales(*np.ones((2, 2, 2), np.float32))
    save_checkpoint(whole, load_params(model, SafetensorsCheckpoint(source)), model, kv_scales=scales)
    load_checkpoint(whole, model)
    files = sorted(path.relative_to(whole) for path in whole.rglob("*") if path.is_file())
    count, num_refused = 1000 if thorough else 15, 0
    for number in range(count):
        rng = random.Random(f"layout/{number}")
        shutil.copytree(whole, folder)
        file = folder / rng.choice(files)
        raw = file.read_bytes()
        try:
            file.write_text(json.dumps(damaged_value(json.loads(raw), rng)))
        except ValueError:  # not one of its notes, but data
            file.write_bytes(damaged_bytes(raw, rng))
        num_refused += refused(number, lambda: (load_scales(folder, shape), load_checkpoint(folder, model)))
        shutil.rmtree(folder)
    assert 0 < num_refused < count
    gc.collect()  # futures that orbax leaves behind, each of which complains when it goes


def test_a_layout_holds_regular_files_only(tmp_path, checkpoints):
    source = checkpoints / "llama"
    model = build_model(read_folder(source), Build(jnp.float32))
    save_checkpoint(tmp_path / "ours", load_params(model, SafetensorsCheckpoint(source)), model)
    metadata = tmp_path / "ours" / "weights" / "_METADATA"
    metadata.rename(tmp_path / "elsewhere")
    metadata.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ModelFileError, match="_METADATA: must be a regular file or a folder"):
        load_checkpoint(tmp_path / "ours", model)
