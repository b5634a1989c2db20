"""Retrievers that see (ColPali, ColQwen2): embeddings of tokens as transformers computes them, and late interaction."""

from __future__ import annotations

import numpy as np
import pytest

from jaxengine import LLM, PoolingParams, RequestError
from tests.fixtures.picture_cases import PICTURES
from tests.fixtures.picture_checkpoints import picture
from tests.fixtures.retrieval_models import CASES, GOLDENS, PALI_PROMPTS, WIDTH, make_retriever
from tests.fixtures.unit_pictures import picture as square

MARK = "<|vision_start|><|image_pad|><|vision_end|>"
OPTIONS = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "num_gpu_blocks_override": 64,
    "limit_mm_per_prompt": {"video": 0},
}


@pytest.fixture(scope="module")
def goldens():
    with np.load(GOLDENS) as found:
        return dict(found)


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory, executables_dir):
    folder = make_retriever(tmp_path_factory.mktemp("retriever") / request.param, request.param)
    # Tokens of ColPali see later ones, so its prompts are not cut.
    whole = {"max_model_len": 32} if request.param == "colpali" else {}
    llm = LLM(str(folder), **OPTIONS | whole, compile_cache_dir=executables_dir)
    yield request.param, llm
    llm.shutdown()


def prompts_of(name):
    """Prompts by name, as `encode` takes them."""
    if name == "colpali":
        shown = {key: [] if index is None else [square(index)] for key, (index, _) in PALI_PROMPTS.items()}
        texts = {key: text for key, (_, text) in PALI_PROMPTS.items()}
    else:
        shown = {key: [picture(*part[1:]) for part in prompt if part[0] == "image"] for key, prompt in PICTURES.items()}
        texts = {
            key: "".join(part if isinstance(part, str) else MARK for part in prompt) for key, prompt in PICTURES.items()
        }
    return {
        key: {"prompt": texts[key], "multi_modal_data": {"image": images}} if images else texts[key]
        for key, images in shown.items()
    }


def test_embeddings_are_those_of_transformers(case, goldens):
    name, llm = case
    prompts = prompts_of(name)
    outputs = llm.encode([*prompts.values()], use_tqdm=False)
    for key, output in zip(prompts, outputs, strict=True):
        assert output.prompt_token_ids == goldens[f"{name}_{key}_ids"].tolist()
        golden = goldens[f"{name}_{key}"]
        assert output.outputs.data.shape == golden.shape == (len(output.prompt_token_ids), WIDTH)
        assert np.abs(output.outputs.data - golden).max() <= 1e-4, key
