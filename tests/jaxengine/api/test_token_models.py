"""Answers for tokens, and sparse vectors: as transformers computes them, by task, in steps and chunks of any size."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxengine import LLM, ConfigError, PoolingParams, RequestError
from jaxengine.checkpoint.model_source import open_model
from jaxengine.config.engine_config import EngineConfig
from jaxengine.models.build import Build
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.layers.token_results import token_results
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.registry import build_model
from jaxengine.models.weights.load import check_source, load_params
from tests.fixtures.drawn_weights import checkpoint, draw_all
from tests.fixtures.encoder_models import TEXTS
from tests.fixtures.token_models import CASES, GOLDENS, make_token_model
from tests.jaxengine.api.test_encoders import OPTIONS, check_equal
from tests.tables import each_row

RAW = PoolingParams(use_activation=False)
# One of each kind; the others differ in names of tensors, which a test of its own checks.
ALWAYS = ("modernbert_tokens", "pylate", "splade", "m3")


@pytest.fixture(scope="module")
def goldens():
    with np.load(GOLDENS) as found:
        return dict(found)


@pytest.fixture(scope="module")
def token_folder(tmp_path_factory):
    made = {}

    def folder(name):
        if name not in made:
            made[name] = str(make_token_model(tmp_path_factory.mktemp("tokens") / name, name))
        return made[name]

    return folder


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in ALWAYS else pytest.mark.thorough("as others")) for name in CASES],
)
def case(request, token_folder, executables_dir):
    llm = LLM(token_folder(request.param), **OPTIONS, compile_cache_dir=executables_dir)
    yield request.param, llm
    llm.shutdown()


def rows(llm: LLM, texts, params=None, task=None) -> np.ndarray:
    """Rows of all tokens, one text after the other."""
    outputs = llm.encode(texts, params, pooling_task=task, use_tqdm=False)
    return np.concatenate([each.outputs.data for each in outputs])


def test_answers_in_a_crowd_are_those_of_transformers(case, goldens):
    name, llm = case
    crowd = [*TEXTS, *(" ".join(f"w{9 + n}" for n in range(count)) for count in range(1, 30, 3))]
    if name.startswith("splade"):
        found = [each.outputs.embedding for each in llm.embed(crowd, use_tqdm=False)][: len(TEXTS)]
        check_equal(np.array(found), goldens[name])
        assert 0 < np.count_nonzero(found) < np.size(found)
        with pytest.raises(RequestError, match="task is 'token_embed'; allowed: embed or score"):
            llm.encode(TEXTS, pooling_task="token_embed", use_tqdm=False)
    elif name == "m3":
        for task, golden in (("token_embed", "m3_colbert"), ("token_classify", "m3_sparse")):
            count = len(goldens[golden])
            check_equal(rows(llm, crowd, task=task)[:count], goldens[golden])
        mixed = [PoolingParams(task=task) for task in ("embed", "token_embed", "token_classify", "embed")]
        found = [each.outputs.data for each in llm.encode(TEXTS, mixed, use_tqdm=False)]
        check_equal(np.stack([found[0], found[3]]), goldens["m3"][[0, 3]])
        assert [each.shape for each in found[1:3]] == [(2, 32), (53, 1)]
    else:
        params = RAW if name.endswith("_tokens") else PoolingParams(prompt_name="")
        check_equal(rows(llm, crowd, params)[: len(goldens[name])], goldens[name])
    metrics = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    assert metrics["jaxengine:compilations_since_ready"] == 0


def test_labels_of_tokens_are_probabilities(case, goldens):
    name, llm = case
    if not name.endswith("_tokens"):
        return
    logits = np.exp(goldens[name].astype(np.float64))
    check_equal(rows(llm, TEXTS), logits / logits.sum(axis=1, keepdims=True))
    with pytest.raises(RequestError, match="task is 'classify'; allowed: token_classify or score"):
        llm.classify(TEXTS, use_tqdm=False)


def test_pairs_are_scored_by_their_tokens(case, goldens):
    name, llm = case
    if llm.core.inputs.pooling.task != "token_embed":
        return
    ends = np.cumsum([len(text.split()) + 2 for text in TEXTS])[:-1]
    prefixed = np.cumsum([len(text.split()) + 3 for text in TEXTS])[:-1]
    has_prefix = name == "pylate"
    queries = np.split(goldens[f"{name}_query" if has_prefix else name], prefixed if has_prefix else ends)
    documents = np.split(goldens[f"{name}_document" if has_prefix else name], prefixed if has_prefix else ends)
    golden = [(queries[0] @ each.T).max(axis=1).sum() for each in documents]
    found = [each.outputs.score for each in llm.score(TEXTS[0], TEXTS, use_tqdm=False)]
    check_equal(np.array(found), np.array(golden))


@pytest.mark.parametrize("name", CASES)
def test_every_name_of_a_tensor_is_known(token_folder, name):
    source = open_model(EngineConfig(model=token_folder(name)))
    assert source.pooling is not None and source.pooling.tasks
    assert source.weights is not None and not isinstance(source.weights, Path)
    check_source(build_model(source.config, Build("float32")), source.weights)
    source.close()


@each_row(
    ("architecture", "recorded", "heads"),
    [
        ("Qwen2ForRewardModel", "qwen2_untied", {"score.0": (56, True), "score.2": (1, True)}),
        ("Qwen2ForProcessRewardModel", "qwen2_untied", {"score.0": (56, True), "score.2": (2, True)}),
        ("InternLM2ForRewardModel", "internlm2", {"v_head": (1, False)}),
    ],
)
def test_rewards_of_tokens(tmp_path_factory, architecture, recorded, heads):
    """Heads of a class of its own, with the class' number of scores; an LM head beside them is not read."""
    folder, base = tmp_path_factory.mktemp("rewards"), checkpoint(recorded)
    raw = json.loads((base / "config.json").read_text()) | {"architectures": [architecture], "num_labels": 5}
    (folder / "config.json").write_text(json.dumps(raw))
    shapes = {f"{name}.weight": (rows, raw["hidden_size"]) for name, (rows, _) in heads.items()}
    shapes |= {f"{name}.bias": (rows,) for name, (rows, has_bias) in heads.items() if has_bias}
    tensors = draw_all(shapes)
    save_file(load_file(base / "model.safetensors") | tensors, folder / "model.safetensors")
    source = open_model(EngineConfig(model=str(folder), skip_tokenizer_init=True))
    width = list(heads.values())[-1][0]
    assert source.weights is not None and not isinstance(source.weights, Path)
    assert source.pooling is not None and source.pooling.tasks == ("token_classify",)
    assert source.pooling.activation == ("sigmoid" if width == 1 else "softmax")
    model = build_model(source.config, Build("float32"))
    nnx.update(model, load_params(model, source.weights))
    source.close()
    x = np.random.default_rng(3).normal(size=(7, raw["hidden_size"])).astype(np.float32)
    found = np.asarray(token_results(model, jnp.asarray(x)))
    for index, name in enumerate(heads):
        x = np.maximum(x, 0) if index else x
        x = x @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", 0)
    assert x.shape == (7, width)
    check_equal(found, x)


@pytest.mark.parametrize("bias", [False, True])
def test_labels_behind_a_projection(tmp_path, bias):
    """ModernBERT's decoder has a projection, an activation and a norm before logits, and before labels, too."""
    base = checkpoint("modernbert_decoder_odd")
    raw = json.loads((base / "config.json").read_text())
    raw |= {"architectures": ["ModernBertDecoderForSequenceClassification"], "num_labels": 3, "classifier_bias": bias}
    raw |= {"classifier_activation": "relu"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    stored = {name: each for name, each in load_file(base / "model.safetensors").items() if name.startswith("model.")}
    size = raw["hidden_size"]
    shapes = {"head.dense.weight": (size, size), "head.norm.weight": (size,), "classifier.weight": (3, size)}
    shapes |= {"head.norm.bias": (size,)} | ({"head.dense.bias": (size,), "classifier.bias": (3,)} if bias else {})
    drawn = draw_all(shapes)
    save_file(stored | drawn, tmp_path / "model.safetensors")
    source = open_model(EngineConfig(model=str(tmp_path), skip_tokenizer_init=True))
    assert source.weights is not None and not isinstance(source.weights, Path)
    model = build_model(source.config, Build("float32"))
    nnx.update(model, load_params(model, source.weights))
    source.close()
    x = np.random.default_rng(3).normal(size=(7, size)).astype(np.float32)
    inner = np.maximum(x @ drawn["head.dense.weight"].T + drawn.get("head.dense.bias", 0), 0)
    inner = inner - inner.mean(axis=1, keepdims=True)
    inner /= np.sqrt((inner**2).mean(axis=1, keepdims=True) + raw["norm_eps"])
    inner = inner * drawn["head.norm.weight"] + drawn["head.norm.bias"]
    expected = inner @ drawn["classifier.weight"].T + drawn.get("classifier.bias", 0)
    check_equal(np.asarray(token_results(model, jnp.asarray(x))), expected)
    overrides = {"architectures": ["ModernBertDecoderForCausalLM"], "classifier_from_token": [4, 5]}
    overrides |= {"method": "no_post_processing"}
    config = EngineConfig(model=str(tmp_path), hf_overrides=overrides, runner="pooling", skip_tokenizer_init=True)
    with pytest.raises(ModelConfigError, match="classifier_from_token must be absent for ModernBertDecoderForCausalLM"):
        build_model(open_model(config).config, Build("float32"))


def test_rows_of_a_decoder_come_in_chunks(make_pooling_llm):
    """The last row is the embedding of a model that pools the last token; chunks and preemption change nothing."""
    llm = make_pooling_llm("last")
    texts = [" ".join(f"w{(5 * n + start) % 90 + 9}" for n in range(70)) for start in range(5)]
    whole = llm.encode(texts, pooling_task="token_embed", use_tqdm=False)
    embeddings = np.array([each.outputs.embedding for each in llm.embed(texts, use_tqdm=False)])
    assert all(each.outputs.data.shape == (71, 32) for each in whole)
    check_equal(np.stack([each.outputs.data[-1] for each in whole]), embeddings)
    alone = llm.encode(texts[1], pooling_task="token_embed", use_tqdm=False)[0]
    assert alone.num_cached_tokens == 0
    check_equal(whole[1].outputs.data, alone.outputs.data)
    short = llm.encode(f"{texts[1][:40]}", pooling_task="token_embed", use_tqdm=False)[0].outputs.data
    check_equal(short[:5], alone.outputs.data[:5])


def test_what_a_model_does_not_have_is_refused(token_folder, tmp_path):
    def refused(error, said, name, **options):
        with pytest.raises(error, match=said):
            open_model(EngineConfig.from_options(model=token_folder(name), **options))

    refused(ConfigError, "auto for BertForTokenClassification", "bert_tokens", convert="embed")
    refused(ConfigError, "is 'embed'; allowed: token_embed", "colbert", pooler_config={"task": "embed"})
    refused(ConfigError, "pools sparsely", "splade", pooler_config={"pooling_type": "MEAN"})
    refused(ModelFileError, "has no linear.weight", "splade", hf_overrides={"architectures": ["HF_ColBERT"]})
    shutil.copytree(token_folder("m3"), tmp_path / "m3")
    (tmp_path / "m3" / "sparse_linear.pt").unlink()
    with pytest.raises(ModelFileError, match="BgeM3EmbeddingModel needs colbert_linear and sparse_linear"):
        open_model(EngineConfig(model=str(tmp_path / "m3"), hf_overrides={"architectures": ["BgeM3EmbeddingModel"]}))
    refused(ConfigError, "tensor_parallel_size is 2; allowed: 1 for", "splade", tensor_parallel_size=2)
    folder = tmp_path / "copy"
    shutil.copytree(token_folder("splade"), folder)
    path = folder / "1_SpladePooling" / "config.json"
    for value, shown in (("mean", "max or sum, got mean"), (5, "a string, got 5")):
        path.write_text(json.dumps({"pooling_strategy": value}))
        with pytest.raises(ModelFileError, match=f"pooling_strategy must be {shown}"):
            open_model(EngineConfig(model=str(folder)))
