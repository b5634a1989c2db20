"""The endpoints of pooling models: OpenAI's, vLLM's, Jina's and Cohere's shapes, their fields and their errors."""

from __future__ import annotations

import base64
import dataclasses
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jaxengine import AsyncLLM, PoolingParams
from jaxengine.requests.params.options import RequestOptions
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.app import create_app
from jaxengine.server.http.pooling import protocol
from tests.fixtures.pooling_models import QUERY_PROMPT, SIZE, TEXTS
from tests.jaxengine.server.asgi_client import http_client, post
from tests.jaxengine.server.http.checked_document import Checked
from tests.jaxengine.server.openai_client import openai_client

GOLDENS = np.load(Path(__file__).parents[3] / "fixtures" / "pooling.npz")
HALF_BYTES = {"output_dimension": 4, "embedding_types": ["binary"]}
INPUT = {"content": [{"type": "text", "text": "w5"}]}
PICTURE = {"type": "image_url", "image_url": {"url": "data:,"}}
IDS = [5, 9, 77, 12, 31, 40, 41, 3, 2]


def sigmoid(values: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-values))


@pytest.fixture(scope="module")
def embedder(pooling_folder, pooling_options):
    engine = AsyncLLM(pooling_folder("last"), hf_overrides={"matryoshka_dimensions": [4, 8]}, **pooling_options)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def classifier(pooling_folder, pooling_options):
    engine = AsyncLLM(pooling_folder("one_label"), **pooling_options)
    yield engine
    engine.shutdown()


@pytest.fixture
def app(embedder):
    return create_app(embedder, ServerConfig(served_model_name=("tiny",), max_prompts=8))


@pytest.fixture
def scoring_app(classifier):
    return create_app(classifier, ServerConfig(served_model_name=("tiny",), max_prompts=8))


async def vectors(app, **fields) -> np.ndarray:
    answer = await post(app, "/v1/embeddings", **fields)
    assert answer.status == 200, answer.body
    return np.array([each["embedding"] for each in answer.json["data"]])


async def test_embeddings_of_openais_client(app):
    client = openai_client(app)
    found = await client.embeddings.create(model="tiny", input=TEXTS)
    assert found.object == "list" and found.model == "tiny"
    assert [each.index for each in found.data] == [0, 1, 2, 3] and found.data[0].object == "embedding"
    np.testing.assert_allclose([each.embedding for each in found.data], GOLDENS["last"], atol=1e-4)
    num_tokens = sum(len(text.split()) + 1 for text in TEXTS)
    assert (found.usage.prompt_tokens, found.usage.total_tokens) == (num_tokens, num_tokens)
    plain = await client.embeddings.create(model="tiny", input=TEXTS[0], encoding_format="float", dimensions=4)
    cut = GOLDENS["last"][0, :4]
    np.testing.assert_allclose(plain.data[0].embedding, cut / np.linalg.norm(cut), atol=1e-4)


async def test_answers_are_as_the_document_says(app, scoring_app):
    async with http_client(app) as client:
        document = (await client.get("/openapi.json")).json()
    checked = Checked(document)
    pairs, documents = {"text_1": "to", "text_2": TEXTS}, {"query": "to", "documents": TEXTS}
    for asked, path, body in (
        (app, "/v1/embeddings", {"input": TEXTS}),
        (app, "/v1/embeddings", {"input": TEXTS[0], "encoding_format": "base64"}),
        (app, "/v2/embed", {"texts": TEXTS, "embedding_types": ["float", "base64", "binary", "ubinary"]}),
        (app, "/pooling", {"input": TEXTS}),
        (app, "/pooling", {"input": TEXTS, "task": "token_embed"}),
        (scoring_app, "/classify", {"input": TEXTS}),
        *((scoring_app, path, pairs) for path in ("/score", "/v1/score")),
        *((scoring_app, path, documents) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
        (app, "/rerank", {**documents, "return_documents": False}),
    ):
        answer = await post(asked, path, **body)
        assert answer.status == 200, answer.body
        checked.check("post", path, "application/json", [answer.json])
    typed = {
        (method, path, "application/json")
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        if operation["tags"][0] in ("pooling", "scores")
    }
    assert typed == checked.seen


async def test_embeddings_in_coheres_form(app, embedder, monkeypatch):
    """POST /v2/embed, as vLLM serves it beside /v1/embeddings."""

    async def embed(**fields):
        answer = await post(app, "/v2/embed", **fields)
        assert answer.status == 200, answer.body
        return answer.json

    kinds = ["float", "base64", "binary", "ubinary"]
    found = await embed(model="tiny", texts=TEXTS, embedding_types=kinds, request_id="mine")
    golden = GOLDENS["last"]
    vectors_ = np.array(found["embeddings"]["float"])
    np.testing.assert_allclose(vectors_, golden, atol=1e-4)
    for text, vector in zip(found["embeddings"]["base64"], vectors_, strict=True):
        np.testing.assert_array_equal(np.frombuffer(base64.b64decode(text), "<f4"), vector.astype("<f4"))
    bits = np.packbits(golden >= 0, axis=1)
    assert found["embeddings"]["ubinary"] == bits.tolist()
    assert found["embeddings"]["binary"] == (bits.astype(int) - 128).tolist()
    assert (found["id"], found["texts"], found["response_type"]) == ("embd-mine", TEXTS, "embeddings_by_type")
    num_tokens = sum(len(text.split()) + 1 for text in TEXTS)
    billed = {"input_tokens": num_tokens, "image_tokens": 0}
    assert found["meta"] == {"api_version": {"version": "2"}, "billed_units": billed}
    found = await embed(texts=TEXTS, input_type="query")
    assert list(found["embeddings"]) == ["float"]
    np.testing.assert_allclose(found["embeddings"]["float"], GOLDENS["last_query"], atol=1e-4)
    # END keeps a text's beginning, START its end, and both the token that ends a prompt.
    long, ends = "w5 w9 " + "w7 " * 200 + "w77 w12", {"END": [5, 9, 7, 7, 7], "START": [7, 7, 7, 77, 12]}
    for side, ids in ends.items():
        cut = (await embed(texts=[long], truncate=side, max_tokens=6))["embeddings"]["float"]
        expected = (await post(app, "/v1/embeddings", input=[[*ids, 2]])).json["data"][0]["embedding"]
        np.testing.assert_allclose(cut[0], expected, atol=1e-4, err_msg=side)
    whole = await embed(texts=[long])
    assert whole["meta"]["billed_units"]["input_tokens"] == 96
    template = "{% for each in messages %}{{ 'w3 ' if each.role == 'system' }}{{ each.content }} {% endfor %}</s>"
    config = dataclasses.replace(embedder.inputs.config, chat_template=template)
    monkeypatch.setattr(embedder.inputs, "config", config)
    inputs = [{"content": [{"type": "text", "text": text}]} for text in TEXTS[:2]]
    # An empty prompt, as many models have for documents, makes no message.
    found = await embed(inputs=inputs, output_dimension=8, input_type="document")
    assert np.array(found["embeddings"]["float"]).shape == (2, 8) and "texts" not in found
    asked = await vectors(app, input=f"{TEXTS[1]} </s>", add_special_tokens=False, dimensions=8)
    np.testing.assert_allclose(found["embeddings"]["float"][1], asked[0], atol=1e-4)
    found = await embed(inputs=inputs, input_type="query")
    asked = await vectors(app, input=f"w3 {QUERY_PROMPT} {TEXTS[1]} </s>", add_special_tokens=False)
    np.testing.assert_allclose(found["embeddings"]["float"][1], asked[0], atol=1e-4)


async def test_forms_of_input_and_fields(app):
    golden = GOLDENS["last"]
    np.testing.assert_allclose(await vectors(app, input=IDS), golden[:1], atol=1e-4)
    np.testing.assert_allclose(await vectors(app, input=[IDS, IDS]), golden[[0, 0]], atol=1e-4)
    np.testing.assert_allclose(await vectors(app, input=TEXTS, prompt_name="query"), GOLDENS["last_query"], atol=1e-4)
    np.testing.assert_allclose(await vectors(app, input=QUERY_PROMPT + TEXTS[0]), GOLDENS["last_query"][:1], atol=1e-4)
    bare = await vectors(app, input=TEXTS[0] + " </s>", add_special_tokens=False)
    np.testing.assert_allclose(bare, golden[:1], atol=1e-4)
    cut = await vectors(app, input=[*[9] * 40, *IDS], truncate_prompt_tokens=len(IDS))
    np.testing.assert_allclose(cut, golden[:1], atol=1e-4)
    cut = await vectors(app, input=[*IDS, *[9] * 40], truncate_prompt_tokens=len(IDS), truncation_side="right")
    np.testing.assert_allclose(cut, golden[:1], atol=1e-4)
    for name in ("normalize", "use_activation"):
        raw = await vectors(app, input=TEXTS[0], **{name: False})
        assert abs(np.linalg.norm(raw) - 1) > 0.1
        np.testing.assert_allclose(raw / np.linalg.norm(raw), golden[:1], atol=1e-4)
    answer = await post(app, "/v1/embeddings", input=TEXTS[0], encoding_format="base64", request_id="mine")
    (entry,) = answer.json["data"]
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(entry["embedding"]), "<f4"), golden[0], atol=1e-4)
    assert answer.json["id"] == "embd-mine"
    for name, order, dtype in (
        ("float32", "big", ">f4"),
        ("float16", "native", "<f2"),
        ("bfloat16", "little", ml_dtypes.bfloat16),
        ("fp8_e4m3", "big", ml_dtypes.float8_e4m3fn),
        ("fp8_e5m2", None, ml_dtypes.float8_e5m2),
    ):
        form = {"encoding_format": "base64", "embed_dtype": name, "endianness": order}
        (entry,) = (await post(app, "/v1/embeddings", input=TEXTS[0], **form)).json["data"]
        found = np.frombuffer(base64.b64decode(entry["embedding"]), dtype).astype("f4")
        np.testing.assert_allclose(found, golden[0], atol=0.1)
        for path, fields in (("/v1/embeddings", {}), ("/pooling", {"task": "token_embed"})):
            form["encoding_format"] = "bytes"
            named = await post(app, path, input=TEXTS[:2], **form, **fields)
            about = json.loads(named.headers["metadata"])
            assert named.headers["content-type"] == "application/octet-stream"
            assert about["model"] == "tiny" and about["usage"]["prompt_tokens"] == len(IDS) + 2
            for index, part in enumerate(about["data"]):
                assert (part["index"], part["embed_dtype"], part["endianness"]) == (index, name, order or "native")
                rows = np.frombuffer(named.body[part["start"] : part["end"]], dtype).reshape(part["shape"])
                last = rows.astype("f4").reshape(-1, SIZE)[-1]
                np.testing.assert_allclose(last, golden[index], atol=0.1)
            assert part["end"] == len(named.body)
            form["encoding_format"] = "bytes_only"
            bare = await post(app, path, input=TEXTS[:2], **form, **fields)
            assert bare.body == named.body and "metadata" not in bare.headers
    answer = await post(app, "/pooling", input=TEXTS[0], task="embed")
    (entry,) = answer.json["data"]
    assert entry["object"] == "pooling" and answer.json["id"].startswith("pooling-")
    np.testing.assert_allclose(entry["data"], golden[0], atol=1e-4)


async def test_embeddings_of_tokens(app):
    answers = [
        (await post(app, "/pooling", input=TEXTS[:2], task="token_embed", **fields)).json["data"]
        for fields in ({}, {"encoding_format": "base64"})
    ]
    for index, (whole, packed) in enumerate(zip(*answers, strict=True)):
        rows = np.array(whole["data"])
        assert rows.shape == (len(TEXTS[index].split()) + 1, SIZE)
        np.testing.assert_allclose(rows[-1], GOLDENS["last"][index], atol=1e-4)  # the model's embedding is the last
        unpacked = np.frombuffer(base64.b64decode(packed["data"]), "<f4").reshape(-1, SIZE)
        np.testing.assert_allclose(unpacked, rows, atol=1e-6)


async def test_tokens_are_embedded_and_score_pairs_where_the_option_says_so(pooling_folder, pooling_options):
    """The server's scores of tokens are those of LLM.score (tests/jaxengine/api/test_token_models.py)."""
    engine = AsyncLLM(pooling_folder("last"), pooler_config={"task": "token_embed"}, **pooling_options)
    app = create_app(engine, ServerConfig(served_model_name=("tiny",)))
    rows = [np.array(each["data"]) for each in (await post(app, "/pooling", input=TEXTS)).json["data"]]
    embedded = (await post(app, "/v1/embeddings", input=TEXTS)).json["data"]  # as in vLLM, not one vector each
    for each, expected in zip(embedded, rows, strict=True):
        np.testing.assert_allclose(each["embedding"], expected, atol=1e-6)
    golden = [(rows[0] @ each.T).max(axis=1).sum() for each in rows]
    found = (await post(app, "/score", text_1=TEXTS[0], text_2=TEXTS)).json["data"]
    np.testing.assert_allclose([each["score"] for each in found], golden, rtol=1e-4)
    ranked = (await post(app, "/rerank", query=TEXTS[0], documents=TEXTS)).json["results"]
    assert [each["index"] for each in ranked] == np.argsort(golden)[::-1].tolist()
    np.testing.assert_allclose([each["relevance_score"] for each in ranked], np.sort(golden)[::-1], rtol=1e-4)
    engine.shutdown()


async def test_a_field_reaches_the_engine(embedder, app, monkeypatch):
    calls = []

    def pool(prompt, params=None, request_id=None, options=None):
        calls.append((prompt, request_id, options))
        return original(prompt, params, request_id, options)

    original = embedder.pool
    monkeypatch.setattr(embedder, "pool", pool)
    answer = await post(app, "/v1/embeddings", input=IDS, cache_salt="pepper", timeout=50, request_id="a", user="one")
    assert answer.status == 200
    ((prompt, request_id, options),) = calls
    assert prompt["cache_salt"] == "pepper" and request_id == "embd-a" and 49 < options.timeout <= 50
    answer = await post(app, "/v1/embeddings", input=IDS, priority=1)
    assert answer.status == 400 and answer.error["param"] == "priority"


async def test_labels(scoring_app):
    golden = sigmoid(GOLDENS["one_label"])
    answer = await post(scoring_app, "/classify", input=TEXTS)
    for index, entry in enumerate(answer.json["data"]):
        assert (entry["index"], entry["label"], entry["num_classes"]) == (index, "LABEL_0", 1)
        np.testing.assert_allclose(entry["probs"], golden[index], atol=1e-4)
    raw = await post(scoring_app, "/classify", input=TEXTS[0], use_activation=False)
    np.testing.assert_allclose(raw.json["data"][0]["probs"], GOLDENS["one_label"][0], atol=1e-4)


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
async def test_scores_of_pairs(scoring_app, app, path):
    golden = sigmoid(GOLDENS["one_label"])[:, 0]
    split = [text.split(" ", 2) for text in TEXTS if len(text.split()) > 2]
    queries, documents = [f"{one} {two} " for one, two, _ in split], [rest for *_, rest in split]
    expected = [golden[index] for index, text in enumerate(TEXTS) if len(text.split()) > 2]
    for names in (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")):
        answer = await post(scoring_app, path, **dict(zip(names, (queries, documents), strict=True)))
        found = [entry["score"] for entry in answer.json["data"]]
        np.testing.assert_allclose(found, expected, atol=1e-4)
        assert {entry["object"] for entry in answer.json["data"]} == {"score"}
    # A text that is in several pairs is computed once and counts in each, as in vLLM.
    for text_1, text_2, num_tokens in (("w5 w9", ["w6", "w6"], 2 * (3 + 2)), (["w5", "w5"], ["w5", "w6 w7"], 9)):
        answer = await post(app, path, text_1=text_1, text_2=text_2)
        assert (answer.json["usage"]["prompt_tokens"], answer.json["usage"]["total_tokens"]) == (num_tokens,) * 2
    # Each text is cut, and then both are a prompt.
    cut = {"max_tokens_per_query": 1, "max_tokens_per_doc": 2}
    for some, (one, other) in ((scoring_app, ("w5", " w6 w7")), (app, ("w5", "w6 w7"))):
        whole = await post(some, path, text_1=one, text_2=other)
        short = await post(some, path, text_1="w5 w9", text_2=f"{other} w8", **cut)
        assert (short.json["data"], short.json["usage"]) == (whole.json["data"], whole.json["usage"])
    both = await post(scoring_app, path, text_1="w5", text_2="w6", documents="w7")
    assert both.status == 400 and "give text_1 and text_2 or queries and documents" in both.error["message"]
    many = await post(scoring_app, path, text_1="w5 ", text_2=["w6"] * 9)
    assert many.status == 400 and "there are 9 pairs of texts; allowed: 1 to 8" in many.error["message"]
    assert many.error["param"] == "text_2"


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_documents_in_order_of_their_scores(scoring_app, app, path):
    documents = ["w77 w12 w31 w40 w41 w3", {"text": "w20 w64"}, "w33 w4"]
    texts = [each if isinstance(each, str) else each["text"] for each in documents]
    scores = await post(scoring_app, "/score", text_1="w5 w9 ", text_2=texts)
    by_score = sorted(((entry["score"], entry["index"]) for entry in scores.json["data"]), reverse=True)
    answer = await post(scoring_app, path, query="w5 w9 ", documents=documents, top_n=2)
    results = answer.json["results"]
    assert [entry["index"] for entry in results] == [index for _, index in by_score[:2]]
    np.testing.assert_allclose([entry["relevance_score"] for entry in results], [score for score, _ in by_score[:2]])
    assert [entry["document"]["text"] for entry in results] == [texts[entry["index"]] for entry in results]
    assert set(answer.json) == {"id", "model", "results", "usage"}
    bare = await post(scoring_app, path, query="w5 w9 ", documents=documents, return_documents=False)
    assert len(bare.json["results"]) == 3 and "document" not in bare.json["results"][0]
    for each in (scoring_app, app):
        long = await post(each, path, query="w5 ", documents=["w6 " * 10_000])
        assert long.status == 400 and long.error["param"] == "documents", long.body
    # An embedder orders them by the cosine.
    one, *others = await vectors(app, input=["w5 w9 ", *texts])
    answer = await post(app, path, query="w5 w9 ", documents=documents)
    cosines = {entry["index"]: entry["relevance_score"] for entry in answer.json["results"]}
    np.testing.assert_allclose([cosines[index] for index in range(3)], [one @ other for other in others], atol=1e-4)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/score", "/v1/rerank"])
async def test_a_model_that_generates_has_no_pooling(chat_engine, path):
    answer = await post(
        create_app(chat_engine, ServerConfig()), path, input="a", texts=["a"], text_1="a", query="a", documents=["a"]
    )
    assert (
        answer.status == 400 and "this model generates text; start it with runner='pooling'" in answer.error["message"]
    )


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_a_pooling_model_generates_nothing(app, path):
    body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "input": "a", "max_tokens": 1}
    answer = await post(app, path, **body)
    assert answer.status == 400 and "this model pools (task 'embed') and generates no text" in str(answer.json)


async def test_other_paths_stay(app, scoring_app):
    async with http_client(app) as client:
        models = (await client.get("/v1/models")).json()
        assert models["data"][0]["id"] == "tiny"
        assert (await client.get("/health")).status_code == 200
    assert (await post(app, "/tokenize", prompt=TEXTS[0])).json["tokens"] == IDS
    for given in ({"input": TEXTS[0]}, {"messages": [{"role": "user", "content": TEXTS[0]}]}):
        invoked, direct = await post(app, "/invocations", **given), await post(app, "/v1/embeddings", **given)
        assert invoked.status == direct.status
        assert {**invoked.json, "id": "", "created": 0} == {**direct.json, "id": "", "created": 0}
    assert "results" in (await post(scoring_app, "/invocations", query="w5", documents=["w6"])).json


@pytest.mark.parametrize(
    ("path", "fields", "param", "problem"),
    [
        ("/v1/embeddings", {"input": [[200]]}, "input", "input holds the token id 200; allowed: 0 to 127"),
        ("/v1/embeddings", {"input": [[5] * 97]}, "input", "input: prompt is too long: 97 tokens > 96 maximum"),
        ("/v1/embeddings", {"input": "w5 " * 97}, "input", "input: prompt is too long: 98 tokens > 96 maximum"),
        (
            "/rerank",
            {"query": "w5", "documents": ["w5 " * 97]},
            "documents",
            "documents: prompt is too long: 98 tokens",
        ),
        ("/v1/embeddings", {"input": ["w5"] * 9}, "input", "input holds 9 prompts; allowed: 1 to 8"),
        ("/v1/embeddings", {"input": [5, "w5"]}, "input", "input must be a string"),
        ("/v1/embeddings", {"input": ""}, "input", "input is empty"),
        ("/v1/embeddings", {}, "input", "input is missing"),
        ("/v1/embeddings", {"input": "w5", "dimensions": 5}, "dimensions", "dimensions is 5; allowed: 4, 8"),
        ("/v1/embeddings", {"input": "w5", "encoding_format": "int8"}, "encoding_format", "'float', 'base64'"),
        ("/pooling", {"input": "w5", "endianness": "big"}, "endianness", "with encoding_format"),
        ("/v1/embeddings", {"input": "w5", "late_chunking_params": {"chunk_size": 2}}, "late_chunking_params", "not"),
        ("/rerank", {"query": "w5", "documents": ["w6"], "max_tokens_per_doc": -5}, "max_tokens_per_doc", "from 0"),
        ("/v1/embeddings", {"input": "w5", "truncate_prompt_tokens": 97}, "truncate_prompt_tokens", "1 to 96"),
        ("/v1/embeddings", {"input": "w5", "prompt_name": "x"}, "prompt_name", "'query', 'document'"),
        ("/v2/embed", {}, "texts", "texts is missing; give one of texts, images and inputs"),
        ("/v2/embed", {"texts": [""]}, "texts", "texts is empty"),
        ("/v2/embed", {"texts": ["w5"], "images": ["data:,"]}, "texts", "texts and images are given"),
        ("/v2/embed", {"images": ["data:,"]}, "images", "image"),
        ("/v2/embed", {"texts": ["w5"], "input_type": "x"}, "input_type", "Unsupported input_type 'x'"),
        ("/v2/embed", {"texts": ["w5 " * 97], "truncate": "NONE"}, "texts", "prompt is too long: 98 tokens"),
        ("/v2/embed", {"texts": ["w5"] * 9}, "texts", "texts holds 9 prompts; allowed: 1 to 8"),
        ("/v2/embed", {"inputs": [INPUT] * 9}, "inputs", "inputs holds 9 prompts; allowed: 1 to 8"),
        ("/v2/embed", {"inputs": [INPUT] * 10_001}, "inputs", "at most 10000 entries are allowed"),
        (
            "/v2/embed",
            {"inputs": [INPUT, {**INPUT, "role": "system"}]},
            "inputs",
            "allowed: objects with `content` alone",
        ),
        ("/v2/embed", {"inputs": [{"content": [PICTURE]}]}, "inputs", "image"),
        ("/v2/embed", {"inputs": [{"content": [{"type": "file"}]}]}, "inputs", "allowed: objects with `content` alone"),
        ("/v2/embed", {"inputs": [{"content": [{"type": "text", "text": 5}]}]}, "inputs", "text"),
        ("/v2/embed", {"texts": ["w5 w6"], "truncate": "NONE", "max_tokens": 2}, "max_tokens", "input has 3"),
        ("/v2/embed", {"texts": ["w5"], "output_dimension": 5}, "output_dimension", "allowed: 4, 8"),
        ("/v2/embed", {"texts": ["w5"], **HALF_BYTES}, "embedding_types", "a multiple of 8"),
        ("/pooling", {"input": "w5", "task": "classify"}, "task", "task is 'classify'; allowed: embed"),
        ("/classify", {"input": "w5"}, "task", "task is 'classify'; allowed: embed"),
        ("/rerank", {"query": "w5", "documents": []}, "documents", "documents must be texts"),
        ("/rerank", {"query": "w5", "documents": ""}, "documents", "documents must be texts"),
        ("/rerank", {"query": "w5", "documents": [{"image": "w5"}]}, "documents", "documents must be texts"),
        ("/rerank", {"query": "w5", "documents": ["w5"], "top_n": -1}, "top_n", "top_n is -1"),
        ("/score", {"text_1": ["w5", "w6"], "text_2": ["w7"]}, "text_1", "as many of both, or one in text_1"),
        ("/score", {"text_1": "w5", "text_2": "w7", "instruction": "w8"}, "instruction", "prompts lack"),
        ("/rerank", {"query": "w5", "documents": ["w7"], "instruction": "w8"}, "instruction", "prompts lack"),
    ],
)
async def test_what_is_wrong_is_said(app, path, fields, param, problem):
    answer = await post(app, path, **fields)
    assert answer.status == 400 and answer.error["param"] == param and problem in answer.error["message"], answer.body


BODIES = {
    "/v1/embeddings": (protocol.EmbeddingRequest, {"input": "w5"}),
    "/classify": (protocol.ClassifyRequest, {"input": "w5"}),
    "/rerank": (protocol.RerankRequest, {"query": "w5", "documents": ["w6"]}),
    "/v2/embed": (protocol.CohereEmbedRequest, {"texts": ["w5"]}),
}


@pytest.mark.parametrize("path", sorted(BODIES))
async def test_a_field_that_is_not_built_is_refused(app, scoring_app, path):
    model, body = BODIES[path]
    for field, neutral in model.refused.items():
        for value in ("x", 7, [[1]]):
            answer = await post(scoring_app, path, **body, **{field: value})
            assert answer.status == 400 and answer.error["param"] == field
        for value in (None, *neutral):
            assert (await post(scoring_app, path, **body, **{field: value})).status == (400 if path[1] == "v" else 200)


async def test_a_conversation_is_one_prompt(scoring_app, classifier, monkeypatch):
    template = "{% for each in messages %}{{ each.content }} {% endfor %}{{ more }}{{ ' w9' if add_generation_prompt }}"
    config = dataclasses.replace(classifier.inputs.config, chat_template=template)
    monkeypatch.setattr(classifier.inputs, "config", config)
    messages = [{"role": "user", "content": "w5"}, {"role": "assistant", "content": [{"type": "text", "text": "w6"}]}]
    for fields, text in (
        ({}, "w5 w6 "),
        ({"add_generation_prompt": True}, "w5 w6  w9"),
        ({"chat_template_kwargs": {"more": "w7"}}, "w5 w6 w7"),
    ):
        expected = (await post(scoring_app, "/classify", input=text, add_special_tokens=False)).json
        found = (await post(scoring_app, "/classify", messages=messages, **fields)).json
        assert found["data"] == expected["data"] and found["usage"] == expected["usage"]
    # Several conversations are several prompts; /v1/embeddings takes them under input, too.
    one, two = messages, messages[1:]
    many = (await post(scoring_app, "/classify", messages=[one, two])).json
    each = [(await post(scoring_app, "/classify", messages=talk)).json for talk in (one, two)]
    assert [entry["probs"] for entry in many["data"]] == [entry["data"][0]["probs"] for entry in each]
    for given, asked in ((one, one), ([one, two], [one, two])):
        body, beside = protocol.EmbeddingRequest(input=given), protocol.EmbeddingRequest(input="w5")
        assert (body.messages, body.input, beside.messages) == (asked, None, None)
    crowd = await post(scoring_app, "/classify", messages=[one] * 9)
    assert crowd.status == 400 and "messages holds 9 prompts; allowed: 1 to 8" in crowd.error["message"]
    cut = (await post(scoring_app, "/classify", messages=messages, truncate_prompt_tokens=1)).json
    assert cut["usage"]["prompt_tokens"] == 1
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    both = {"messages": messages, "add_generation_prompt": True, "continue_final_message": True}
    for fields, param in (
        ({"messages": messages, "input": "w5"}, "input"),
        ({}, "input"),
        ({"input": "w5", "add_generation_prompt": True}, "add_generation_prompt"),
        (both, "continue_final_message"),
        ({"messages": image}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages"),
        ({"messages": [{"role": "user", "content": "w5 " * 9999}]}, "messages"),
        ({"messages": messages, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ):
        answer = await post(scoring_app, "/classify", **fields)
        assert answer.status == 400 and answer.error["param"] == param, (fields, answer.body)


async def test_encode_streams_one_output_and_leaves_nothing(embedder):
    outputs = [each async for each in embedder.encode(TEXTS[0], PoolingParams(dimensions=4), "mine")]
    assert [(each.request_id, each.finished, each.outputs.data.shape) for each in outputs] == [("mine", True, (4,))]
    with pytest.raises(RequestError, match=r"has no answer: abort \(timeout\)"):
        await anext(embedder.encode(TEXTS[2], timeout=1e-9))
    (late,) = [each async for each in embedder.pool(TEXTS[2], options=RequestOptions(timeout=1e-9))]
    assert (late.finish_reason, late.stop_reason, late.outputs.data.size) == ("abort", "timeout", 0)
    abandoned = embedder.encode(TEXTS[0])
    await anext(abandoned)
    await abandoned.aclose()
    answer = await post(create_app(embedder, ServerConfig()), "/v1/embeddings", input=TEXTS[2], timeout=1e-9)
    assert answer.status == 504
    assert not embedder.core.has_unfinished and not len(embedder.core._processor)


async def test_pairs_that_repeat_a_long_text_are_refused_before_they_are_made(scoring_app, monkeypatch):
    made = []
    monkeypatch.setattr("jaxengine.server.http.pooling.run.pair_prompt", lambda *args: made.append(args))
    fields = {"text_1": "w5 " * 5_000_000, "text_2": ["w6"] * 4}
    answer = await post(scoring_app, "/score", **fields)
    assert answer.status == 400 and "characters together; allowed: 33554432" in answer.error["message"], answer.body
    answer = await post(scoring_app, "/score", text_1="w5 " * 100_000, text_2="w6")
    assert answer.status == 400 and "prompt is too long: " in answer.error["message"]
    assert not made


async def test_a_text_that_is_too_long_is_cut_if_the_request_asks(app):
    long, end = "w7 " * 100_000, [77, 12, 2]
    expected = await vectors(app, input=[[7] * 5 + end])
    found = await vectors(app, input=long + "w77 w12", truncate_prompt_tokens=8)
    assert np.abs(found - expected).max() < 1e-5
    answer = await post(app, "/v1/embeddings", input=long)
    assert answer.status == 400 and "prompt is too long: " in answer.error["message"]
