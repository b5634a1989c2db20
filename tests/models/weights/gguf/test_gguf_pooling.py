"""GGUF files of rerankers, classifiers and embedders with Dense modules: scores and vectors as those of transformers.

The heads are written by the rules of llama.cpp's converters (conversion/bert.py, gemma.py and qwen.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxengine import LLM, PoolingParams
from jaxengine.checkpoint.model_source import open_model
from jaxengine.config.engine_config import EngineConfig
from jaxengine.models.params.errors import ModelFileError
from tests.fixtures import encoder_models, pooling_models
from tests.models.weights.gguf import further_conversion, gguf_conversion, gguf_metadata
from tests.models.weights.gguf.gguf_writer import ARRAY, F32, STRING, U32, gguf_bytes

GOLDENS = {
    name: values
    for file in ("encoders", "pooling")
    for name, values in np.load(Path(__file__).parents[3] / "fixtures" / f"{file}.npz").items()
}
ROBERTA = {"classifier.dense": "cls", "classifier.out_proj": "cls.output"}
HEADS = {
    "xlm_roberta_score": ROBERTA,
    "roberta_labels": ROBERTA,
    "modernbert_score": {"head.dense": "cls", "head.norm": "cls.norm", "classifier": "cls.output"},
}
# Sizes of the two Dense modules, which files have without biases and activations.
SIZE, INNER, OUTER = encoder_models.SIZE, 20, 12


@pytest.fixture
def encoder_options(pooling_options):
    longest = encoder_models.LONGEST
    return {**pooling_options, "max_model_len": longest - 1, "max_num_batched_tokens": longest}


def with_head(monkeypatch, head: dict[str, np.ndarray], *, joins: bool = False, **own: Any) -> None:
    """Adds these tensors, and these fields of the architecture, to the next file of an encoder."""

    def written(metadata, tensors):
        prefix = metadata["general.architecture"][1]
        fields = {f"{prefix}.{name.replace('__', '.')}": value for name, value in own.items()}
        fields = {name: value for name, value in (metadata | fields).items() if value is not None}
        tensors = joined_queries(tensors) if joins else tensors
        return gguf_bytes(fields, [*tensors, *(gguf_conversion.tensor(*each) for each in head.items())])

    monkeypatch.setattr(further_conversion, "gguf_bytes", written)


def encoder_file(monkeypatch, folder: Path, name: str, *, joins: bool = False, **own: Any) -> bytes:
    """The file of a folder with an encoder that scores labels. own: further fields, None to leave one out."""
    config = json.loads((folder / "config.json").read_bytes())
    tensors = load_file(folder / "model.safetensors")
    tensors = {each.removeprefix("roberta.").removeprefix("model."): values for each, values in tensors.items()}
    head = {
        f"{HEADS[name][module]}.{kind}": values
        for each, values in tensors.items()
        for module, _, kind in [each.rpartition(".")]
        if module in HEADS[name]
    }
    if "roberta" in name:  # RobertaModel and XLMRobertaModel leave out the positions of padding
        tensors["embeddings.position_embeddings.weight"] = tensors["embeddings.position_embeddings.weight"][1:]
        config |= {"model_type": "bert", "max_position_embeddings": config["max_position_embeddings"] - 1}
    labels = [config["id2label"][key] for key in sorted(config["id2label"])]
    own = {"pooling_type": None, "classifier__output_labels": (ARRAY, (STRING, labels)), **own}
    with_head(monkeypatch, head, joins=joins, **own)
    return further_conversion.converted_encoder(config, tensors)


def opened(path: Path, file: bytes, **options: Any):
    path.write_bytes(file)
    return open_model(EngineConfig(model=str(path), skip_tokenizer_init=True, **options))


def answers(path: Path, folder: Path | str, texts: list[str], options: dict[str, Any]) -> np.ndarray:
    """What an engine with the file `path` and the tokenizer of `folder` answers to texts, without activations."""
    with LLM(str(path), tokenizer=str(folder), **options) as llm:
        outputs = llm.encode(texts, PoolingParams(use_activation=False), use_tqdm=False)
    return np.stack([each.outputs.data for each in outputs])


def joined_queries(tensors: list[Any]) -> list[Any]:
    """The tensors of a file in which each layer has queries, keys and values in one, as jina-reranker-v2 has them."""
    parts = {name: each for name, *each in tensors}
    for name in [name for name in parts if ".attn_q." in name]:
        (*columns, rows), kind, data = parts.pop(name)
        for part in "kv":
            data += parts.pop(name.replace("attn_q", f"attn_{part}"))[2]
        parts[name.replace("attn_q", "attn_qkv")] = [(*columns, 3 * rows), kind, data]
    return [(name, *each) for name, each in parts.items()]


@pytest.mark.parametrize("name, joins", [("xlm_roberta_score", True), ("roberta_labels", False)])
def test_scores_of_labels(encoder_folder, encoder_options, monkeypatch, tmp_path, name, joins):
    folder, path = Path(encoder_folder(name)), tmp_path / "model.gguf"
    file = encoder_file(monkeypatch, folder, name, joins=joins)
    assert (b"attn_qkv" in file) == joins
    path.write_bytes(file)
    found = answers(path, folder, encoder_models.TEXTS, encoder_options)
    np.testing.assert_allclose(found, GOLDENS[name], atol=1e-4)
    source = opened(path, path.read_bytes())
    assert source.pooling.labels == {at: f"LABEL_{at}" for at in range(GOLDENS[name].shape[1])}
    source.close()


@pytest.mark.parametrize("name, number", [("cls", 2), ("mean", 1), ("mean", None)])
def test_what_a_reranker_of_modernbert_pools(monkeypatch, tmp_path, name, number):
    """Of a file that does not say it, llama.cpp takes the mean."""
    config = {**encoder_models.MODERN, "num_labels": 1, "classifier_pooling": name, "hidden_activation": "silu"}
    case = encoder_models.Case("ModernBertForSequenceClassification", config, "model.")
    folder = encoder_models.write_encoder(tmp_path / "folder", case)
    own = {"classifier__pooling_type": None if number is None else (U32, number), "hidden_activation": (STRING, "silu")}
    own["attention__layer_norm_epsilon"] = None  # of a config.json with norm_eps alone
    own["attention__layer_norm_rms_epsilon"] = (F32, 1e-5)
    file = encoder_file(monkeypatch, folder, "modernbert_score", **own)
    found = opened(tmp_path / "model.gguf", file)
    expected = open_model(EngineConfig(model=str(folder), skip_tokenizer_init=True))
    assert found.pooling.pooler == expected.pooling.pooler and found.pooling.activation == expected.pooling.activation
    assert found.config.encoder == expected.config.encoder
    assert found.config.rms_norm_eps == pytest.approx(1e-5)
    for each in expected.weights.names():
        mine = each if each in found.weights.names() else each.removeprefix("model.")
        np.testing.assert_array_equal(found.weights.read(mine), expected.weights.read(each), err_msg=each)
    for source in (found, expected):
        source.close()


def reranker_file(folder: Path, **changes: Any) -> bytes:
    """The file of pooling_models' reranker: Qwen3Model writes the rows of the LM head for yes and no."""
    config = json.loads((folder / "config.json").read_bytes()) | {"bos_token_id": 1, "rope_theta": 10000.0}
    tensors = load_file(folder / "model.safetensors")
    about = gguf_metadata.metadata("qwen3", config) | {
        "qwen3.pooling_type": (U32, 4),
        "qwen3.classifier.output_labels": (ARRAY, (STRING, ["yes", "no"])),
    }
    rows = tensors["model.embed_tokens.weight"][[pooling_models.YES, pooling_models.NO]]
    written = {"cls.output.weight": rows} | changes
    for name, values in tensors.items():
        parts, kind = name.rsplit(".", 1)
        layer = parts.split(".")[2] if ".layers." in parts else None
        part = parts.split(".", 3)[3] if layer else parts
        named = f"{gguf_conversion.NAMES[part]}.{kind}"
        written[f"blk.{layer}.{named}" if layer else named] = values
    return gguf_bytes(about, [gguf_conversion.tensor(*each) for each in written.items() if each[1] is not None])


def test_a_reranker_is_scored_by_the_rows_of_yes_and_no(pooling_folder, pooling_options, tmp_path):
    folder, path = Path(pooling_folder("reranker")), tmp_path / "model.gguf"
    path.write_bytes(reranker_file(folder))
    found = answers(path, folder, pooling_models.TEXTS, pooling_options)
    golden = GOLDENS["reranker"]
    np.testing.assert_allclose(found, golden[:, 1:] - golden[:, :1], atol=1e-4)
    with pytest.raises(ModelFileError, match="a reranker of qwen3 must have cls.output"):
        opened(path, reranker_file(folder, **{"cls.output.weight": None}))


def test_dense_modules(encoder_folder, encoder_options, monkeypatch, tmp_path):
    folder, path = Path(encoder_folder("embedding_gemma")), tmp_path / "model.gguf"
    config, tensors = json.loads((folder / "config.json").read_bytes()), load_file(folder / "model.safetensors")
    modules = [load_file(folder / f"{at}_Dense" / "model.safetensors")["linear.weight"] for at in (2, 3)]
    named = {f"dense_{at}.weight": values for at, values in enumerate(modules, 2)}
    sizes = {"dense_2_feat_in": SIZE, "dense_2_feat_out": INNER, "dense_3_feat_in": INNER, "dense_3_feat_out": OUTER}

    def file(head, **own):
        with_head(monkeypatch, head, **{name: (U32, size) for name, size in own.items()})
        return further_conversion.converted_encoder(config, tensors)

    source = opened(path, file(named, **sizes))
    for at, values in enumerate(modules):
        np.testing.assert_array_equal(source.weights.read(f"dense.{at}.linear.weight"), values)
    source.close()
    vectors = answers(path, folder, encoder_models.TEXTS, encoder_options)
    path.write_bytes(file({}))
    plain = answers(path, folder, encoder_models.TEXTS, encoder_options)
    projected = plain @ modules[0].T @ modules[1].T
    np.testing.assert_allclose(vectors, projected, atol=1e-4)
    for head, changes, said in (
        ({"dense_3.weight": modules[1]}, {}, "with dense_3.weight must have dense_2.weight"),
        (named, {"dense_3_feat_in": 21}, "dense_3_feat_in must be 20, the elements of its input, got 21"),
        (named, {"dense_2_feat_in": 31}, "dense_2_feat_in must be 32, the elements of its input, got 31"),
    ):
        with pytest.raises(ModelFileError, match=said):
            opened(path, file(head, **sizes | changes))
