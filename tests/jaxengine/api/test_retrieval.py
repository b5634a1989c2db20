"""Retrievers that see (ColPali, ColQwen2): embeddings of tokens as transformers computes them, and late interaction."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxengine import LLM, AsyncLLM, PoolingParams, RequestError
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.app import create_app
from tests.fixtures.picture_cases import PICTURES
from tests.fixtures.picture_checkpoints import picture
from tests.fixtures.retrieval_models import CASES, GOLDENS, MARK, WIDTH, make_retriever, prompts_of
from tests.jaxengine.media.pictures import data_url, saved
from tests.jaxengine.server.asgi_client import post

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "num_gpu_blocks_override": 64,
    "limit_mm_per_prompt": {"video": 0},
}

COLEMBED = {"max_model_len": 64, "max_num_batched_tokens": 72, "max_num_batched_encoder_tokens": 512}


@pytest.fixture(scope="module")
def goldens():
    with np.load(GOLDENS) as found:
        return dict(found)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name == "colqwen2" else pytest.mark.thorough("another family's layers"))
        for name in CASES
    ],
)
def case(request, tmp_path_factory, executables_dir):
    folder = make_retriever(tmp_path_factory.mktemp("retriever") / request.param, request.param)
    # Tokens of these see later ones, so their prompts are not cut.
    whole: dict[str, dict[str, Any]] = {"colpali": {"max_model_len": 32}, "nemotron_colembed": COLEMBED}
    options = OPTIONS | whole.get(request.param, {})
    llm = LLM(str(folder), **options, compile_cache_dir=executables_dir)
    yield request.param, llm
    llm.shutdown()


def test_embeddings_are_those_of_transformers(case, goldens):
    name, llm = case
    prompts = prompts_of(name)
    outputs = llm.encode([*prompts.values()], use_tqdm=False)
    for key, output in zip(prompts, outputs, strict=True):
        assert output.prompt_token_ids == goldens[f"{name}_{key}_ids"].tolist()
        golden = goldens[f"{name}_{key}"]
        width = WIDTH if CASES[name].projection else llm.core.inputs.model_config.hidden_size
        assert output.outputs.data.shape == golden.shape == (len(output.prompt_token_ids), width)
        assert np.abs(output.outputs.data - golden).max() <= 1e-4, key


def test_pages_are_scored(case, goldens, monkeypatch):
    """Late interaction of a question with pages, in vLLM's form, and without them."""
    name, llm = case
    if name != "colqwen2":
        return
    encode, held = llm.encode, list[int]()
    monkeypatch.setattr(
        llm, "encode", lambda texts, *rest, **more: held.append(len(texts)) or encode(texts, *rest, **more)
    )
    shown = PICTURES["a"][1]
    page = {"content": [{"type": "image", "image": picture(*shown[1:])}, {"type": "text", "text": "Say it."}]}
    pages = [page, "What?"] + [dict(page) for _ in range(2 * OPTIONS["max_num_seqs"])]
    found = [each.outputs.score for each in llm.score("What?", pages, use_tqdm=False)]
    assert max(held) <= OPTIONS["max_num_seqs"]  # their pictures are not loaded all at once
    np.testing.assert_allclose(found[2:], found[0], rtol=1e-4)
    found = found[:2]
    prompts = ["What?", {"prompt": f"{MARK}Say it.", "multi_modal_data": {"image": picture(*shown[1:])}}]
    query, document = (each.outputs.data.astype(np.float64) for each in llm.encode(prompts, use_tqdm=False))
    np.testing.assert_allclose(found, [(query @ document.T).max(axis=1).sum(), len(query)], rtol=1e-4)
    several = llm.encode([*prompts_of(name).values()] * 2, use_tqdm=False)  # in a crowd, in chunks
    for key, output in zip([*PICTURES] * 2, several, strict=True):
        assert np.abs(output.outputs.data - goldens[f"{name}_{key}"]).max() <= 1e-4
    for given, message in (
        ({"content": [{"type": "image"}]}, r"^data_2.content\[0\] of type 'image' must have"),
        ({"content": [{"type": "text", "text": ""}]}, "none of them empty"),
        ({"content": [page["content"][0] | {"text": "a"}, 5]}, "other parts than texts"),
        ({"text": "a"}, "allowed: a text, or an object with `content` alone, a list"),
    ):
        with pytest.raises(RequestError, match=message):
            llm.score("a", given, use_tqdm=False)
    cut = PoolingParams(truncate_prompt_tokens=4)
    with pytest.raises(RequestError, match="truncate_prompt_tokens is 4; allowed: .* or more: prompts with media are"):
        llm.encode(prompts[1:], cut, use_tqdm=False)


async def test_over_http(tmp_path, executables_dir, goldens):
    """A page in messages of /pooling, and in /score and /rerank, where answers have its parts as they were given."""
    folder = make_retriever(tmp_path, "colqwen2")
    shown = PICTURES["a"][1]
    part = {"type": "image_url", "image_url": {"url": data_url(saved(Image.fromarray(picture(*shown[1:])), "PNG"))}}
    engine = AsyncLLM(str(folder), **OPTIONS, compile_cache_dir=executables_dir)
    try:
        app = create_app(engine, ServerConfig())
        content = [{"type": "text", "text": PICTURES["a"][0]}, part, {"type": "text", "text": PICTURES["a"][2]}]
        asked = {"messages": [{"role": "user", "content": content}]}
        template = "{% for part in messages[0].content %}{{ part.text if part.type == 'text' else MARK }}{% endfor %}"
        engine.inputs.tokenizer.chat_template = template.replace("MARK", repr(MARK))
        answer = await post(app, "/pooling", **asked)
        assert answer.status == 200, answer.body
        rows = np.array(answer.json["data"][0]["data"])
        assert np.abs(rows - goldens["colqwen2_a"]).max() <= 1e-4
        assert answer.json["usage"]["prompt_tokens"] == len(rows)
        # A limit that cuts nothing is allowed, as in Python.
        for keep, status in ((len(rows), 200), (-1, 200), (len(rows) - 1, 400)):
            cut = await post(app, "/pooling", **asked, truncate_prompt_tokens=keep)
            assert cut.status == status, cut.body
        assert cut.error["param"] == "truncate_prompt_tokens"
        assert f"allowed: {len(rows)} or more: prompts with media are not cut" in cut.error["message"]
        # Conversations with an image each, loaded one after the other.
        several = await post(app, "/pooling", messages=[asked["messages"]] * 3)
        assert [len(each["data"]) for each in several.json["data"]] == [len(rows)] * 3
        page = {"content": [part]}
        scored = await post(app, "/score", text_1="What?", text_2=["What?", page])
        scores = [each["score"] for each in scored.json["data"]]
        assert len(scores) == 2 and scores[0] > scores[1] > 0
        ranked = (await post(app, "/rerank", query="What?", documents=[page, "What?"])).json["results"]
        assert [each["index"] for each in ranked] == [1, 0]
        np.testing.assert_allclose([each["relevance_score"] for each in ranked], scores, rtol=1e-5)
        assert ranked[1]["document"] == {"text": None, "multi_modal": page["content"]}
    finally:
        engine.shutdown()
