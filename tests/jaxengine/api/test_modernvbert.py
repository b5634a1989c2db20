"""ColModernVBERT: embeddings of the tokens of prompts with pictures, as recorded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxengine import LLM
from tests.fixtures.modernvbert_models import CASES, GOLDENS, PROMPTS, make
from tests.fixtures.unit_pictures import picture

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 128,
    "num_gpu_blocks_override": 32,
    "max_num_batched_encoder_tokens": 512,  # all tiles of a prompt are encoded at once
    "compilation_config": {"cudagraph_capture_sizes": [], "prefill_sizes": []},
}


@pytest.mark.thorough("the same layers and pictures", but=("usual",))
@pytest.mark.parametrize("name", CASES)
def test_embeddings_are_those_of_transformers(name, tmp_path, executables_dir):
    llm = LLM(str(make(tmp_path, name)), **OPTIONS, compile_cache_dir=executables_dir)
    with np.load(GOLDENS) as goldens:
        for case, (text, pictures) in PROMPTS.items():
            images = {"image": [picture(index) for index in pictures]}
            prompt = {"prompt": text, "multi_modal_data": images} if pictures else text
            (output,) = llm.encode([prompt], pooling_task="token_embed", use_tqdm=False)
            assert output.prompt_token_ids == goldens[f"{name}_{case}_ids"].tolist()
            np.testing.assert_allclose(output.outputs.data, goldens[f"{name}_{case}"], rtol=0, atol=1e-5)
    llm.shutdown()
