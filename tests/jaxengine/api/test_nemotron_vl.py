"""Llama Nemotron Embed VL and Rerank VL: vectors and scores of prompts with pictures, as recorded."""

from __future__ import annotations

import numpy as np
import pytest

from jaxengine import LLM
from tests.fixtures.nemotron_vl_models import CLASSES, EMBED, GOLDENS, PROMPTS, make
from tests.fixtures.unit_pictures import picture


@pytest.mark.thorough("the same layers and pictures", but=(EMBED,))
@pytest.mark.parametrize("kind", CLASSES)
def test_pooled_results_are_the_recorded_ones(kind, tmp_path, executables_dir):
    options = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 2, "num_gpu_blocks_override": 32}
    llm = LLM(str(make(tmp_path, kind)), **options, compile_cache_dir=executables_dir)
    with np.load(GOLDENS) as goldens:
        for name, (text, pictures) in PROMPTS.items():
            images = {"image": [picture(index) for index in pictures]}
            prompt = {"prompt": text, "multi_modal_data": images} if pictures else text
            if kind == EMBED:
                (output,) = llm.embed([prompt], use_tqdm=False)
                found = output.outputs.embedding
            else:
                (output,) = llm.classify([prompt], use_tqdm=False)
                found = output.outputs.probs
            assert output.prompt_token_ids == goldens[f"{name}_ids"].tolist()
            np.testing.assert_allclose(found, goldens[f"{kind}_{name}"], rtol=0, atol=1e-5)
    llm.shutdown()
