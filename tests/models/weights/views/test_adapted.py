"""XLM-RoBERTa in Jina AI's own form: other names, and adapters of several tasks beside each matrix, as
jinaai/jina-reranker-v2-base-multilingual and jinaai/jina-embeddings-v3 are published."""

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
from jaxengine.models.config.pooler import CLS, Classifier, Pooler
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


# XLM-RoBERTa's names of modules, and those of Jina AI's code.
_OWN = {
    "embeddings.LayerNorm": "emb_ln",
    "encoder.layer.": "encoder.layers.",
    "attention.output.dense": "mixer.out_proj",
}
_OWN |= {"attention.output.LayerNorm": "norm1", "intermediate.dense": "mlp.fc1"}
_OWN |= {"output.LayerNorm": "norm2", "output.dense": "mlp.fc2"}  # after those of attention


def state(folder: Path, pooler: Pooler = Pooler(), **changes) -> list[np.ndarray]:  # noqa: B008
    config = read_hf(read_config_json(folder) | changes, pooler)
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
    original = next(name for name in stored if name.endswith("parametrizations.weight.original"))
    plainly = original.replace(".parametrizations.weight.original", ".weight")
    save_file({**stored, plainly: stored[original].copy()}, published / "model.safetensors")
    with pytest.raises(ModelFileError, match="stands for .*, as does"):
        state(published)


def test_names_of_jina_ais_own_code(tmp_path):
    """A reranker's weights under these names are those of XLM-RoBERTa, which joins its projections at load."""
    plain, published = make_encoder(tmp_path / "plain", "xlm_roberta_score"), tmp_path / "published"
    stored, parts = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        for usual, own in _OWN.items():
            name = name.replace(usual, own)
        before, inside, part = name.partition(".attention.self.")
        if inside:
            parts.setdefault(f"{before}.mixer.Wqkv.{part.partition('.')[2]}", {})[part[0]] = tensor
        else:
            stored[name] = tensor
    stored |= {name: np.concatenate([each[part] for part in "qkv"]) for name, each in parts.items()}
    published.mkdir()
    code = {"AutoConfig": "configuration_xlm_roberta.XLMRobertaFlashConfig"}
    fields = read_config_json(plain) | {"auto_map": code, "position_embedding_type": "absolute"}
    del fields["model_type"]  # it has none
    (published / "config.json").write_text(json.dumps(fields))
    save_file(stored, published / "model.safetensors")
    got, wanted = (state(folder, Pooler(CLS, Classifier(1))) for folder in (published, plain))
    assert len(got) == len(wanted) > 10
    assert all((one == other).all() for one, other in zip(got, wanted, strict=True))
