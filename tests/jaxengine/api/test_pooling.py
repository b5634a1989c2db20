"""Pooling models: embeddings, labels and scores as transformers and sentence-transformers make them, in any company."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jaxengine import LLM, ConfigError, PoolingParams, RequestError, SamplingParams
from jaxengine.models.params.errors import ModelFileError
from tests.conftest import use_scheduler
from tests.fixtures.pooling_models import NO, QUERY_PROMPT, SIZE, TEXTS, YES

GOLDENS = np.load(Path(__file__).parents[2] / "fixtures" / "pooling.npz")
RAW = PoolingParams(use_activation=False)
TOLERANCE = 1e-4
ORIGINAL = {"classifier_from_token": [f"w{NO}", f"w{YES}"], "is_original_qwen3_reranker": True}


class Frozen(dict):
    """Options with a hash, for the cache of engines."""

    def __hash__(self):
        return hash(repr(sorted(self.items())))


def embeddings(llm: LLM, prompts=TEXTS, **options) -> np.ndarray:
    return np.array([each.outputs.embedding for each in llm.embed(prompts, use_tqdm=False, **options)])


def scores(llm: LLM, prompts=TEXTS) -> np.ndarray:
    return np.stack([each.outputs.data for each in llm.encode(prompts, RAW, use_tqdm=False)])


def normalized(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def check_equal(ours: np.ndarray, golden: np.ndarray) -> None:
    assert ours.shape == golden.shape
    assert np.abs(ours - golden).max() <= TOLERANCE * max(1.0, np.abs(golden).max())


@pytest.mark.parametrize(
    "name", ["last", pytest.param("mean", marks=pytest.mark.thorough("test_pooling_server.py has means"))]
)
def test_embeddings_are_those_of_sentence_transformers(make_pooling_llm, name):
    llm = make_pooling_llm(name)
    outputs = llm.embed(TEXTS, use_tqdm=False)
    check_equal(np.array([each.outputs.embedding for each in outputs]), GOLDENS[name])
    assert all(each.finished and each.outputs.hidden_size == SIZE for each in outputs)
    assert [len(each.prompt_token_ids) for each in outputs] == [len(text.split()) + 1 for text in TEXTS]
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    assert metrics["jaxengine:compilations_since_ready"].value == 0


def test_a_prompt_of_the_model_goes_before_a_text(make_pooling_llm):
    llm = make_pooling_llm("last")
    check_equal(embeddings(llm, pooling_params=PoolingParams(prompt_name="query")), GOLDENS["last_query"])
    check_equal(embeddings(llm, [QUERY_PROMPT + text for text in TEXTS]), GOLDENS["last_query"])
    with pytest.raises(RequestError, match="prompt_name is 'other'; allowed: 'query', 'document'"):
        llm.embed(TEXTS[0], pooling_params=PoolingParams(prompt_name="other"))


@pytest.mark.parametrize("chunk", [1, 5, 16, 0])
@pytest.mark.parametrize("name", ["last", "mean"])
def test_chunks_of_any_length_in_a_crowd(make_pooling_llm, name, chunk):
    llm = make_pooling_llm(name)
    use_scheduler(llm, long_prefill_token_threshold=chunk, enable_prefix_caching=False)
    crowd = [*TEXTS, *TEXTS[::-1], *(" ".join(f"w{9 + index}" for index in range(3, 3 + n)) for n in range(1, 20))]
    found = embeddings(llm, crowd)
    check_equal(found[: len(TEXTS)], GOLDENS[name])
    check_equal(found[len(TEXTS) : 2 * len(TEXTS)], GOLDENS[name][::-1])
    use_scheduler(llm)


def test_a_prefix_hit_serves_the_last_token_and_no_mean(make_pooling_llm):
    for name, hits in (("last", True), ("mean", False)):
        llm = make_pooling_llm(name)
        llm.reset_prefix_cache()
        first, again = (llm.embed(TEXTS[2], use_tqdm=False)[0] for _ in range(2))
        assert first.num_cached_tokens == 0 and (again.num_cached_tokens > 0) == hits
        check_equal(np.array(again.outputs.embedding), GOLDENS[name][2])
        unread = llm.embed(TEXTS[2], use_tqdm=False, pooling_params=PoolingParams(skip_reading_prefix_cache=True))[0]
        assert unread.num_cached_tokens == 0


@pytest.mark.parametrize("name", ["last", "mean"])
def test_preemption_between_two_chunks(make_pooling_llm, name):
    llm = make_pooling_llm(name)
    core, scheduler = llm.core, use_scheduler(llm, long_prefill_token_threshold=5, enable_prefix_caching=True)
    for index, text in enumerate(TEXTS):
        core.add(core.inputs.prepare(text, PoolingParams(), request_id=f"{name}-{index}"))
    found = {}
    for number in range(200):
        for output in core.step():
            found[output.request_id] = output
        rank = scheduler.ranks[0]
        if number in (1, 3, 6) and rank.slots.num_active:
            rank.preempted = []
            rank._preempt(rank.slots.last_in_order())
            scheduler._requeue(rank.preempted.pop())
        if not core.has_unfinished:
            break
    assert scheduler.num_preemptions >= 3
    check_equal(np.stack([found[f"{name}-{index}"].outputs.data for index in range(len(TEXTS))]), GOLDENS[name])
    use_scheduler(llm)


def test_token_ids_limits_and_cuts(make_pooling_llm):
    llm = make_pooling_llm("last")
    ids = [5, 9, 77, 12, 31, 40, 41, 3, 2]
    check_equal(embeddings(llm, [ids, {"prompt_token_ids": ids}]), GOLDENS["last"][[0, 0]])
    check_equal(embeddings(llm, [[7] * 30 + ids], truncate_prompt_tokens=len(ids)), GOLDENS["last"][:1])
    kept = {"tokenization_kwargs": {"truncate_prompt_tokens": len(ids)}}
    check_equal(embeddings(llm, [[7] * 30 + ids], **kept), GOLDENS["last"][:1])
    longest = llm.core.inputs.config.max_model_len
    assert embeddings(llm, [[7] * longest]).shape == (1, SIZE)  # no room is kept for a token
    check_equal(embeddings(llm, [[7] * 200], truncate_prompt_tokens=-1), embeddings(llm, [[7] * longest]))
    with pytest.raises(RequestError, match=f"too long: {longest + 1} tokens > {longest} maximum"):
        llm.embed([[7] * (longest + 1)])
    with pytest.raises(RequestError, match="truncate_prompt_tokens is 0; allowed: -1, or 1 to"):
        llm.embed(ids, truncate_prompt_tokens=0)


def test_use_activation_and_dimensions(make_pooling_llm, pooling_folder, pooling_options):
    llm = make_pooling_llm("last")
    raw = np.stack([each.outputs.data for each in llm.encode(TEXTS, RAW, use_tqdm=False)])
    check_equal(normalized(raw), GOLDENS["last"])
    assert np.abs(raw - GOLDENS["last"]).max() > 0.1
    check_equal(embeddings(llm, pooling_params=PoolingParams(normalize=False)), raw)
    with pytest.raises(RequestError, match="dimensions is 8; allowed: None: the model is not said"):
        llm.embed(TEXTS[0], pooling_params=PoolingParams(dimensions=8))
    sizes = Frozen(matryoshka_dimensions=(4, 8))
    cut = make_pooling_llm("last", ("hf_overrides", sizes), ("pooler_config", Frozen(dimensions=4)))
    check_equal(embeddings(cut), normalized(raw[:, :4]))
    check_equal(embeddings(cut, pooling_params=PoolingParams(dimensions=8)), normalized(raw[:, :8]))
    with pytest.raises(RequestError, match="dimensions is 5; allowed: 4, 8"):
        cut.embed(TEXTS[0], pooling_params=PoolingParams(dimensions=5))
    with pytest.raises(ConfigError, match="pooler_config.dimensions is 5; allowed: 4, 8"):
        LLM(
            pooling_folder("last"),
            **pooling_options,
            hf_overrides=dict(sizes),
            override_pooler_config={"dimensions": 5},
        )


@pytest.mark.parametrize("name", ["one_label", "three_labels"])
def test_scores_of_labels_are_those_of_transformers(make_pooling_llm, name):
    llm = make_pooling_llm(name, *([] if name == "one_label" else [("enforce_eager", True)]))
    golden = GOLDENS[name]
    check_equal(scores(llm), golden)
    exponents = np.exp(golden - golden.max(axis=1, keepdims=True))
    probs = {
        "one_label": 1 / (1 + np.exp(-golden)),
        "three_labels": exponents / exponents.sum(axis=1, keepdims=True),
    }[name]
    outputs = llm.classify(TEXTS, use_tqdm=False)
    check_equal(np.array([each.outputs.probs for each in outputs]), probs)
    assert outputs[0].outputs.num_classes == golden.shape[1]
    check_equal(np.stack([each.outputs.data for each in llm.reward(TEXTS, use_tqdm=False)]), golden)


def test_a_reranker_is_scored_by_the_logits_of_two_tokens(make_pooling_llm):
    overrides = ("hf_overrides", Frozen(ORIGINAL, architectures=["Qwen3ForSequenceClassification"]))
    llm = make_pooling_llm("reranker", ("runner", "pooling"), overrides)
    golden = GOLDENS["reranker"][:, 1] - GOLDENS["reranker"][:, 0]
    check_equal(scores(llm)[:, 0], golden)
    words = [text.split() for text in TEXTS if len(text.split()) > 3]
    queries, documents = [" ".join(each[:2]) + " " for each in words], [" ".join(each[2:]) for each in words]
    expected = [1 / (1 + np.exp(-golden[index])) for index, text in enumerate(TEXTS) if len(text.split()) > 3]
    found = [each.outputs.score for each in llm.score(queries, documents, use_tqdm=False)]
    check_equal(np.array(found), np.array(expected))
    template = "{% for message in messages %}{{ message.content }}{% if loop.first %} {% endif %}{% endfor %}"
    (templated,) = llm.score(queries[0].strip(), documents[0], use_tqdm=False, chat_template=template)
    assert abs(templated.outputs.score - expected[0]) < TOLERANCE


def test_an_embedder_scores_by_the_cosine(make_pooling_llm):
    llm = make_pooling_llm("mean")
    one = normalized(GOLDENS["mean"])
    found = [each.outputs.score for each in llm.score(TEXTS[0], TEXTS[1:], use_tqdm=False)]
    check_equal(np.array(found), one[1:] @ one[0])
    found = [each.outputs.score for each in llm.score(TEXTS, TEXTS, use_tqdm=False)]
    check_equal(np.array(found), np.ones(len(TEXTS)))
    for data, problem in (((TEXTS[:2], TEXTS[:3]), "as many of both"), (("", "w5"), "none of them empty")):
        with pytest.raises(RequestError, match=problem):
            llm.score(*data)


def test_what_an_engine_is_not_for_is_refused(make_pooling_llm, make_llm):
    embedder, classifier = make_pooling_llm("last"), make_pooling_llm("one_label")
    with pytest.raises(RequestError, match="task is 'classify'; allowed: embed, token_embed or score"):
        embedder.classify(TEXTS[0])
    with pytest.raises(RequestError, match="task is 'embed'; allowed: classify, token_classify or score"):
        classifier.embed(TEXTS[0])
    with pytest.raises(RequestError, match="normalize is True; allowed: None with task classify"):
        classifier.encode(TEXTS[0], PoolingParams(normalize=True))
    for switch in ("normalize", "use_activation", "skip_reading_prefix_cache"):
        with pytest.raises(RequestError, match=f"{switch} is 1; allowed: True, False or None"):
            embedder.embed(TEXTS[0], pooling_params=PoolingParams(**{switch: 1}))
    with pytest.raises(RequestError, match="this model pools .* and generates no text"):
        embedder.generate(TEXTS[0], SamplingParams(max_tokens=1))
    for call in (LLM.embed, LLM.encode, LLM.classify, LLM.reward):
        with pytest.raises(RequestError, match="this model generates text; start it with runner='pooling'"):
            call(make_llm(), [[5, 6]])
    with pytest.raises(RequestError, match="this model generates text"):
        make_llm().score("a", "b")


def test_a_state_that_is_not_finite_ends_its_own_request(make_pooling_llm):
    llm = make_pooling_llm("mean")
    (stage,) = llm.core.runner.stages
    paths = [index for index, leaf in enumerate(stage.params) if leaf.shape == (128, SIZE)]
    whole = stage.params[paths[0]]
    stage.params[paths[0]] = whole.at[99].set(np.nan)
    try:
        with pytest.raises(RequestError, match=r"has no answer: error \(logits are not finite\)"):
            llm.embed([[5, 6, 99], [5, 6]], use_tqdm=False)
        core = llm.core
        for name, ids in (("bad", [5, 6, 99]), ("good", TEXTS[1])):
            core.add(core.inputs.prepare(ids, PoolingParams(), request_id=name))
        found = {}
        while core.has_unfinished:
            found |= {each.request_id: each for each in core.step()}
        assert found["bad"].finish_reason == "error" and found["good"].finish_reason == "stop"
        check_equal(found["good"].outputs.data[None], GOLDENS["mean"][1:2])
    finally:
        stage.params[paths[0]] = whole


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("mean", {"runner": "generate"}, "runner is 'generate'; allowed: pooling or auto"),
        ("one_label", {"convert": "embed"}, "convert is 'embed'; allowed: auto or classify"),
        ("last", {"convert": "classify"}, "has no scores of labels"),
        ("last", {"convert": "none"}, "convert is 'none'; allowed: auto, embed or classify"),
        ("last", {"task": "rank"}, "task is 'rank'; allowed"),
        ("last", {"pooler_config": {"pooling_type": "ALL"}}, "pooler_config.pooling_type is 'ALL'; allowed: LAST"),
        ("last", {"pooler_config": {"step_tag_id": 5}}, "pooler_config.step_tag_id is 5, which is not supported yet"),
        ("last", {"pooler_config": {"other": 5}}, "pooler_config has no 'other'"),
        ("last", {"pooler_config": {"task": "classify"}}, "pooler_config.task is 'classify'; allowed: embed"),
        ("last", {"hf_overrides": {"rope_thetas": 5}}, "hf_overrides has 'rope_thetas', which this model's"),
        ("reranker", {"pooler_config": {"normalize": True}}, "pooler_config is for pooling models"),
        ("reranker", {"hf_overrides": {"num_labels": 2}}, "num_labels is for pooling models"),
        ("reranker", {"hf_overrides": {"is_causal": False}}, "hf_overrides has 'is_causal', which this model's"),
    ],
)
def test_options_that_a_checkpoint_cannot_follow(pooling_folder, pooling_options, name, options, problem):
    with pytest.raises(ConfigError, match=problem):
        LLM(pooling_folder(name), **{**pooling_options, **options})


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ({"classifier_from_token": ["nothing"], "method": "no_post_processing"}, "'nothing' is none"),
        ({"classifier_from_token": ["w5"], "method": "from_2_way_softmax"}, "a list of two tokens"),
        ({"classifier_from_token": ["w5"]}, "method must be from_2_way_softmax or no_post_processing"),
        ({"classifier_from_token": []}, "classifier_from_token must be a list of tokens"),
    ],
)
def test_tokens_that_cannot_stand_for_labels(pooling_folder, pooling_options, overrides, problem):
    with pytest.raises(ModelFileError, match=problem):
        LLM(pooling_folder("reranker"), runner="pooling", **pooling_options, hf_overrides=overrides)
