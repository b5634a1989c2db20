"""Embedders of texts and images (CLIP, SigLIP): embeddings as transformers computes them, in Python and over HTTP."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from jaxengine import LLM, AsyncLLM, ConfigError, RequestError
from jaxengine.checkpoint.model_source import open_model
from jaxengine.config.engine_config import EngineConfig
from jaxengine.models.build import Build
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.registry import build_model
from jaxengine.models.weights.load import check_source
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.app import create_app
from tests.fixtures.clip_models import CASES, GOLDENS, TEXTS, make_embedder, picture
from tests.jaxengine.media.pictures import data_url, saved
from tests.jaxengine.server.asgi_client import post

OPTIONS = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "block_size": 4,
    "num_gpu_blocks_override": 40,
    "compilation_config": {"cudagraph_capture_sizes": [], "prefill_sizes": []},
    "disable_log_stats": True,
}


@pytest.fixture(scope="module")
def goldens():
    with np.load(GOLDENS) as found:
        return dict(found)


def image_prompt(index):
    return {"prompt": "", "multi_modal_data": {"image": picture(index)}}


def check(rows, golden):
    assert np.abs(np.asarray(rows) - golden).max() <= 1e-5


def test_clip(tmp_path, executables_dir, goldens):
    """Texts in chunks beside images, which no layer changes; scores are cosines."""
    folder = str(make_embedder(tmp_path / "clip", "clip"))
    llm = LLM(folder, **OPTIONS, max_num_batched_tokens=8, compile_cache_dir=executables_dir)
    try:
        prompts = [TEXTS[2], image_prompt(0), TEXTS[0], TEXTS[1], image_prompt(1), TEXTS[2], image_prompt(0)]
        outputs = llm.embed(prompts, use_tqdm=False)
        texts, images = goldens["clip_texts"], goldens["clip_images"]
        check(
            [each.outputs.embedding for each in outputs],
            np.stack([texts[2], images[0], texts[0], texts[1], images[1], texts[2], images[0]]),
        )
        for number, index in ((0, 2), (2, 0), (3, 1)):
            assert outputs[number].prompt_token_ids == goldens[f"clip_ids_{index}"].tolist()
        assert len(outputs[1].prompt_token_ids) == 1
        shown = [{"content": [{"type": "image", "image": picture(index)}]} for index in range(2)]
        found = [each.outputs.score for each in llm.score(TEXTS[0], shown, use_tqdm=False)]
        np.testing.assert_allclose(found, images @ texts[0], atol=1e-5)
        for prompt, message in (
            ({**image_prompt(0), "prompt": "w5"}, "1 images and 3 tokens of a text; this model embeds an image by it"),
            ({"prompt": "", "multi_modal_data": {"image": [picture(0)] * 2}}, "2 images|image"),
            ({**image_prompt(0), "prompt_token_ids": np.array([5, 6])}, "1 images and 2 tokens of a text"),
            ("", "prompt is empty"),
        ):
            with pytest.raises(RequestError, match=message):
                llm.embed(prompt, use_tqdm=False)
    finally:
        llm.shutdown()


async def test_siglip_over_http(tmp_path, executables_dir, goldens):
    """Texts, which are padded, and messages of an image, or of a text."""
    engine = AsyncLLM(str(make_embedder(tmp_path / "siglip", "siglip")), **OPTIONS, compile_cache_dir=executables_dir)
    try:
        app = create_app(engine, ServerConfig())
        found = (await post(app, "/v1/embeddings", input=TEXTS)).json
        check([each["embedding"] for each in found["data"]], goldens["siglip_texts"])
        assert found["usage"]["prompt_tokens"] == sum(len(goldens[f"siglip_ids_{index}"]) for index in range(3))
        ids = [goldens[f"siglip_ids_{index}"].tolist() for index in range(3)]
        found = (await post(app, "/v1/embeddings", input=ids)).json
        check([each["embedding"] for each in found["data"]], goldens["siglip_texts"])
        for index in range(2):
            url = data_url(saved(Image.fromarray(picture(index)), "PNG"))
            content = [{"type": "image_url", "image_url": {"url": url}}]
            found = await post(app, "/v1/embeddings", messages=[{"role": "user", "content": content}])
            assert found.status == 200, found.body
            check(found.json["data"][0]["embedding"], goldens["siglip_images"][index])
        long = await post(app, "/v1/embeddings", input=TEXTS[2] + " w4 w4")
        assert long.status == 400 and "20" in long.error["message"]
        cut = await post(app, "/v1/embeddings", input=TEXTS[2] + " w4 w4", truncate_prompt_tokens=-1)
        assert cut.status == 200, cut.body
    finally:
        engine.shutdown()


def test_files(tmp_path):
    """Every tensor is known, with the tower or without it; sizes that do not meet are refused by name."""
    for name in CASES:
        folder = make_embedder(tmp_path / name, name)
        for limits in ({}, {"image": 0}):
            source = open_model(EngineConfig(model=str(folder), limit_mm_per_prompt=limits))
            assert source.pooling is not None and source.pooling.pooler.pooling_type == "LAST"
            assert source.pooling.cut([1, 2, 3, 4], 2) == [1, 4]
            check_source(build_model(source.config, Build("float32")), source.weights)
            source.close()
        with pytest.raises(ConfigError, match="runner is 'generate'; allowed: pooling or auto"):
            open_model(EngineConfig(model=str(folder), runner="generate"))
    for name, changes, message in (
        ("clip", {"projection_dim": 32}, "projection_dim must be 24, the hidden_size of text_config, got 32"),
        ("siglip", {"text_config": {"projection_size": 40}}, "projection_size must be hidden_size 24, got 40"),
        ("siglip", {"vision_config": {"vision_use_head": False}}, "vision_use_head must be true or absent"),
        ("siglip", {"vision_config": {"hidden_size": 36}}, "vision_config must be one with the hidden_size of text"),
    ):
        config = json.loads((tmp_path / name / "config.json").read_text())
        for key, value in changes.items():
            config[key] = {**config[key], **value} if isinstance(value, dict) else value
        (tmp_path / "changed").mkdir(exist_ok=True)
        (tmp_path / "changed" / "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelFileError, match=message):
            open_model(EngineConfig(model=str(tmp_path / "changed"), skip_tokenizer_init=True))
