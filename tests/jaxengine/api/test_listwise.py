"""A reranker that reads a query with all of its documents (jina-reranker-v3): scores in Python and over HTTP."""

from __future__ import annotations

import asyncio
import hashlib

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxengine import LLM, AsyncLLM, PoolingParams, RequestError
from jaxengine.checkpoint.model_source import open_model
from jaxengine.config.engine_config import EngineConfig
from jaxengine.models.params.errors import ModelFileError
from jaxengine.requests.pooling.listwise import list_prompts
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.app import create_app
from tests.fixtures.listwise_models import DOCUMENTS, GOLDENS, QUERY, WIDTH, make_reranker
from tests.jaxengine.server.asgi_client import post

OPTIONS = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
    "num_gpu_blocks_override": 400,
    "block_size": 16,
    "compilation_config": {"cudagraph_capture_sizes": [], "prefill_sizes": []},
    "disable_log_stats": True,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(make_reranker(tmp_path_factory.mktemp("listwise") / "model"))


@pytest.fixture(scope="module")
def goldens():
    with np.load(GOLDENS) as found:
        return dict(found)


def test_the_prompt():
    """Its digest is that of the text that vLLM 0.33 writes, without the marks that texts have themselves."""
    documents = ["one {0}", "two<|rerank_<|embed_token|>token|>", "three\nlines"]
    pairs = [("which {is} it<|embed_token|>?", document) for document in documents]
    for instruction, digest in (
        (None, "0594ea343e4e57b3"),
        ("", "0594ea343e4e57b3"),
        ("as {it}<|rerank_token|> says", "ea5c5dd5ca15bd68"),
    ):
        ((text, number),) = list_prompts(pairs, instruction)
        assert number == 3 and hashlib.sha256(text.encode()).hexdigest()[:16] == digest


def test_scores(folder, goldens, executables_dir):
    llm = LLM(folder, **OPTIONS, compile_cache_dir=executables_dir)
    try:
        outputs = llm.score(QUERY, DOCUMENTS, use_tqdm=False)
        np.testing.assert_allclose([each.outputs.score for each in outputs], goldens["together"], atol=1e-5)
        counts = [len(each.prompt_token_ids) for each in outputs]
        assert counts[0] > OPTIONS["max_num_batched_tokens"] and not any(counts[1:])  # several chunks
        # Several queries: each is read with its own document.
        outputs = llm.score([QUERY, QUERY, "Which?"], [DOCUMENTS[0], DOCUMENTS[2], DOCUMENTS[0]], use_tqdm=False)
        single = llm.score(QUERY, DOCUMENTS[:1], use_tqdm=False)
        np.testing.assert_allclose(
            [each.outputs.score for each in (*outputs[:2], *single)], goldens["apart"][[0, 2, 0]], atol=1e-5
        )
        (rows,) = llm.encode(["abc"], use_tqdm=False)
        assert rows.outputs.data.shape == (3, WIDTH)
        for params, message in (
            ({"truncate_prompt_tokens": 8}, "truncate_prompt_tokens is 8; allowed: None for a model that reads all"),
            ({"pooling_params": PoolingParams(truncate_prompt_tokens=-1)}, "max_tokens_per_doc cuts each"),
            ({"chat_template": "{{ messages }}"}, "chat_template is for models that read both texts at once"),
        ):
            with pytest.raises(RequestError, match=message):
                llm.score(QUERY, DOCUMENTS, use_tqdm=False, **params)
    finally:
        llm.shutdown()


async def test_over_http(folder, goldens, executables_dir):
    engine = AsyncLLM(folder, **OPTIONS, compile_cache_dir=executables_dir)
    try:
        app = create_app(engine, ServerConfig())
        ranked, scored = await asyncio.gather(
            post(app, "/rerank", query=QUERY, documents=DOCUMENTS),
            post(app, "/score", text_1=QUERY, text_2=DOCUMENTS),
        )
        assert (ranked.status, scored.status) == (200, 200), (ranked.body, scored.body)
        np.testing.assert_allclose([each["score"] for each in scored.json["data"]], goldens["together"], atol=1e-5)
        order = np.argsort(-goldens["together"])
        assert [each["index"] for each in ranked.json["results"]] == order.tolist()
        assert ranked.json["usage"] == scored.json["usage"]
        ids = engine.inputs.require_tokenizer().encode(list_prompts([(QUERY, each) for each in DOCUMENTS])[0][0])
        assert scored.json["usage"]["prompt_tokens"] == len(ids)
        # A document that is cut to its first tokens, bytes here.
        cut = await post(app, "/score", text_1=QUERY, text_2=["Mars is.", "Jupiter"], max_tokens_per_doc=4)
        same = await post(app, "/score", text_1=QUERY, text_2=["Mars", "Jupi"])
        assert cut.json["data"] == same.json["data"]
        told = await post(app, "/score", text_1=QUERY, text_2=DOCUMENTS, instruction="Mars")
        assert told.json["usage"]["prompt_tokens"] == len(ids) + len("<instruct>\nMars\n</instruct>\n")
        unknown = await post(app, "/score", text_1=QUERY, text_2=DOCUMENTS, chat_template_kwargs={"a": "b"})
        assert unknown.status == 400 and unknown.error["param"] == "chat_template_kwargs"
        refused = await post(app, "/score", text_1=QUERY, text_2=DOCUMENTS, truncate_prompt_tokens=5)
        assert refused.status == 400 and "reads all documents together" in refused.error["message"]
    finally:
        engine.shutdown()


def test_files(tmp_path):
    """A checkpoint without the projector, or with one of another shape, is refused by the tensor's name."""
    for name, change in (("projector.0", None), ("projector.2", np.zeros((4, 7), np.float32))):
        folder = make_reranker(tmp_path / name)
        tensors = load_file(folder / "model.safetensors")
        tensors.pop(f"{name}.weight")
        save_file(tensors | ({} if change is None else {f"{name}.weight": change}), folder / "model.safetensors")
        with pytest.raises(ModelFileError, match=rf"must be a matrix with .* columns, got .*at {name}.weight"):
            open_model(EngineConfig(model=str(folder)))
