"""Encoders: embeddings, labels and scores as transformers makes them, whatever else is in a step."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxengine import LLM, ConfigError, PoolingParams, RequestError
from jaxengine.checkpoint.model_source import open_model
from jaxengine.config.base.platforms import PLATFORMS
from jaxengine.config.engine_config import EngineConfig
from jaxengine.models.build import Build
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.registry import build_model
from jaxengine.models.weights.load import check_source
from tests.fixtures.encoder_models import CASES, FIRST, LAST, LONGEST, NAMES_ONLY, PAIRS, TEXTS, VOCAB

GOLDENS = np.load(Path(__file__).parents[2] / "fixtures" / "encoders.npz")
RAW = PoolingParams(use_activation=False)
OPTIONS = {
    "dtype": "float32",
    "max_num_seqs": 8,
    "max_num_batched_tokens": LONGEST,
    "block_size": 4,
    "num_gpu_blocks_override": 200,
    "compilation_config": {"cudagraph_capture_sizes": [], "prefill_sizes": []},
    "disable_log_stats": True,
}
# Of each family one that embeds or one that scores; of RoBERTa's tests/sharding/test_encoders.py has one.
ALWAYS = ("bert_score", "distilbert", "modernbert_score", "nomic_score", "gte", "jina_v3")
ALWAYS += ("jina_v2_code", "mpnet", "voyage", "t5_gated", "deberta_score")


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in ALWAYS else pytest.mark.thorough("as others")) for name in CASES],
)
def case(request, encoder_folder, executables_dir):
    options = OPTIONS | {"compile_cache_dir": executables_dir}
    if request.param == ALWAYS[0]:  # its pages are counted by what programs need, which compiles the largest one twice
        del options["num_gpu_blocks_override"]
    llm = LLM(encoder_folder(request.param), **options)
    yield request.param, llm
    llm.shutdown()


def raw(llm: LLM, prompts, lora_request=None) -> np.ndarray:
    """Raw outputs of the model, [N, labels]; of an embedder the normalised embeddings."""
    params = None if llm.core.inputs.pooling.task == "embed" else RAW
    return np.stack(
        [each.outputs.data for each in llm.encode(prompts, params, use_tqdm=False, lora_request=lora_request)]
    )


def normalized(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def check_equal(ours: np.ndarray, golden: np.ndarray) -> None:
    assert ours.shape == golden.shape
    assert np.abs(ours - golden).max() <= 1e-5 * max(1.0, np.abs(golden).max())


def test_texts_in_a_crowd_are_those_of_transformers(case):
    name, llm = case
    crowd = [*TEXTS, *TEXTS[::-1], *(" ".join(f"w{9 + n}" for n in range(count)) for count in range(1, 40))]
    found = raw(llm, crowd)
    check_equal(found[: len(TEXTS)], GOLDENS[name])
    check_equal(found[len(TEXTS) : 2 * len(TEXTS)], GOLDENS[name][::-1])
    alone = np.concatenate([raw(llm, [text]) for text in TEXTS])
    assert np.array_equal(alone, found[: len(TEXTS)]), "bit for bit"
    metrics = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    assert metrics["jaxengine:compilations_since_ready"] == 0
    assert llm.core.engine.scheduler.num_free_pages == llm.core.engine.runner.plan.num_pages


def test_pairs_are_joined_as_the_tokenizer_joins_them(case):
    name, llm = case
    if not name.endswith("_score"):
        with (
            pytest.raises(RequestError, match="a model that scores pairs of texts has 1")
            if name.endswith("labels")
            else pytest.raises(RequestError, match="chat_template")
        ):
            llm.score(*PAIRS[0], use_tqdm=False, chat_template="x")
        return
    scores = llm.score(*map(list, zip(*PAIRS, strict=True)), use_tqdm=False)
    golden = GOLDENS[f"{name}_pairs"][:, 0]
    check_equal(np.array([each.outputs.score for each in scores]), 1 / (1 + np.exp(-golden)))
    if name == "bert_score":  # types are in the ids
        second = [VOCAB + int(word[1:]) for word in PAIRS[0][1].split()]
        first = [int(word[1:]) for word in PAIRS[0][0].split()]
        ids = [FIRST, *first, LAST, *second, VOCAB + LAST]
        assert scores[0].prompt_token_ids == ids
        check_equal(raw(llm, [{"prompt_token_ids": ids}])[:, 0], golden[:1])


def test_types_of_a_tokenizer_are_left_out_where_the_model_has_none(encoder_folder):
    """DistilBERT comes with BERT's tokenizers, which make types of tokens."""
    from jaxengine.tokens.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_hf_folder(encoder_folder("bert"))
    typed = tokenizer.encode_pair(*PAIRS[1], VOCAB)
    assert max(typed) >= VOCAB and [each % VOCAB for each in typed] == tokenizer.encode_pair(*PAIRS[1], 0)
    for name, has_types in (("bert_score", True), ("distilbert_labels", False), ("xlm_roberta_score", False)):
        source = open_model(EngineConfig(model=encoder_folder(name)))
        assert source.pooling is not None and source.pooling.has_token_types == has_types
        source.close()


def test_limits_and_cuts(case):
    _, llm = case
    config = llm.core.inputs.config
    longest = config.max_model_len
    assert not config.enable_prefix_caching and not config.enable_chunked_prefill
    ids = [FIRST, *(9 + n % 80 for n in range(longest - 2)), LAST]
    assert raw(llm, [ids]).shape[0] == 1
    with pytest.raises(RequestError, match=f"too long: {longest + 1} tokens > {longest} maximum"):
        llm.encode([[*ids, LAST]], use_tqdm=False)
    # The special tokens at both ends stay.
    cut = [FIRST, *ids[1:5], LAST]
    found = llm.encode([ids], truncate_prompt_tokens=6, use_tqdm=False)[0]
    assert found.prompt_token_ids == cut
    check_equal(np.stack([found.outputs.data]), np.stack([llm.encode([cut], use_tqdm=False)[0].outputs.data]))


@pytest.mark.parametrize("name", [*(name for name in CASES if name not in ALWAYS), *NAMES_ONLY])
def test_every_name_of_a_tensor_is_known(encoder_folder, name):
    source = open_model(EngineConfig(model=encoder_folder(name)))
    assert source.pooling is not None and not source.config.is_causal
    check_source(build_model(source.config, Build("float32")), source.weights)
    source.close()


def test_dense_modules_that_cannot_be_are_refused(encoder_folder, tmp_path):
    def refused(said, path, **changes):
        folder = tmp_path / f"case {len(list(tmp_path.iterdir()))}"
        shutil.copytree(encoder_folder("embedding_gemma"), folder)
        content = json.loads((folder / path).read_text())
        content = content[::-1] if path == "modules.json" else content | changes
        (folder / path).write_text(json.dumps(content))
        with pytest.raises(ModelFileError, match=said):
            source = open_model(EngineConfig(model=str(folder)))
            check_source(build_model(source.config, Build("float32")), source.weights)

    dense = "2_Dense/config.json"
    refused("activation_function must be torch.nn.modules' Identity", dense, activation_function="torch.nn.modules.x.Y")
    refused("activation_function must be", dense, activation_function="my.modules.activation.Tanh")
    refused("use_residual must be false", dense, use_residual=True)
    refused("module_input_name must be", dense, module_input_name="token_embeddings")
    refused("in_features must be an integer", dense, in_features=0)
    refused(r"as dense.0.linear.weight \(at linear.weight\)", dense, in_features=24)
    refused("'Normalize'|'Dense' is not supported here", "modules.json")


def test_windows_on_both_sides_are_refused_on_tpus(encoder_folder):
    source = open_model(EngineConfig(model=encoder_folder("modernbert")))
    assert EngineConfig().resolved(source.config, PLATFORMS["cpu"]).max_model_len == LONGEST
    with pytest.raises(ConfigError, match="ModernBertModel attends to windows on both sides of a token"):
        EngineConfig().resolved(source.config, PLATFORMS["tpu"])
    source.close()


def test_what_cannot_be_is_refused(encoder_folder):
    folder = encoder_folder("bert")
    for options, message in (
        ({"runner": "generate"}, "BertModel has no output head"),
        ({"max_num_batched_tokens": 32, "max_num_seqs": 4}, "at least max_model_len, 64, without chunked prefill"),
        ({"long_prefill_token_threshold": 8}, "long_prefill_token_threshold is 8; allowed: 0"),
        ({"convert": "classify"}, "BertModel has no scores of labels"),
    ):
        with pytest.raises(ConfigError, match=message):
            LLM(folder, **OPTIONS | options)
    for field, value in (
        ("position_embedding_type", "relative_key"),
        ("hidden_act", "prelu"),
        ("is_decoder", True),
    ):
        with pytest.raises(ModelFileError, match=field):
            LLM(folder, **OPTIONS, hf_overrides={field: value})
