"""Checkpoints with adapters of several tasks beside each matrix, as jinaai/jina-embeddings-v3 is published."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.config.pooler import Pooler
from jaxengine.models.config.readers.hf import read_config_json
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.registry import build_model, read_hf
from jaxengine.models.weights.formats.safetensors import SafetensorsCheckpoint
from jaxengine.models.weights.load import load_params
from jaxengine.models.weights.views.renamed import with_prefix
from tests.fixtures.drawn_weights import draw
from tests.fixtures.encoder_models import make_encoder

TASKS, RANK, ALPHA = ["retrieval.query", "separation", "text-matching"], 4, 3
FIELDS = {"architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta", "position_embedding_type": "rotary"}
FIELDS |= {"lora_adaptations": TASKS, "lora_rank": RANK, "lora_alpha": ALPHA, "rotary_emb_base": 20000.0}


def state(folder: Path, **changes) -> list[np.ndarray]:
    config = read_hf(read_config_json(folder) | changes, Pooler())
    model = build_model(config, Build("float32"))
    source = SafetensorsCheckpoint(folder)
    try:
        own = with_prefix(source, model.checkpoint_names)
        return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.to_pure_dict(load_params(model, own)))]
    finally:
        source.close()


def test_a_task_is_added_to_the_weights(tmp_path):
    plain = make_encoder(tmp_path / "plain", "jina_v3")
    published, merged = tmp_path / "published", tmp_path / "merged"
    stored, added = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if tensor.ndim < 2:
            stored[f"roberta.{name}"] = added[name] = tensor
            continue
        rows, columns = tensor.shape
        is_table = module.endswith("_embeddings")
        a, b = (rows, RANK) if is_table else (RANK, columns), (RANK, columns) if is_table else (rows, RANK)
        at = f"roberta.{module}.parametrizations.weight"
        a, b = (draw(f"{at}.{part}", (len(TASKS), *shape)) for part, shape in (("a", a), ("b", b)))
        stored |= {f"{at}.original": tensor, f"{at}.0.lora_A": a, f"{at}.0.lora_B": b}
        first, second = (a, b) if is_table else (b, a)
        added[name] = tensor + first[1] @ second[1] * (ALPHA / RANK)
    for folder, tensors, fields in ((published, stored, FIELDS), (merged, added, {})):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(read_config_json(plain) | fields))
        save_file(tensors, folder / "model.safetensors")
    kept = {"rope_parameters": None, "rope_theta": 20000.0}
    for got, wanted in (
        (state(published), state(plain, **kept)),
        (state(published, default_task="separation"), state(merged, **kept)),
    ):
        assert len(got) == len(wanted) > 10
        assert all(np.allclose(*pair, atol=1e-6) for pair in zip(got, wanted, strict=True))
    with pytest.raises(ModelConfigError, match="default_task must be one of retrieval.query, separation, text-ma"):
        state(published, default_task="classification")
    with pytest.raises(ModelFileError, match="must be adapters of 4 tasks or more for a matrix"):
        state(published, default_task="a", lora_adaptations=[*TASKS, "a"])
