"""Drafts of a head of EAGLE 1 or 2 change no token, and are right where it cannot be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxengine import LLM
from jaxengine.config.features.speculation import EAGLE
from tests.fixtures.drawn_weights import FOLDER, checkpoint, draw_all
from tests.jaxengine.engine.test_draft_models import assert_counts_on
from tests.jaxengine.engine.test_eagle3 import ONES, SHAPES, SIZE, TINY, write
from tests.jaxengine.engine.test_speculation import assert_same, force, workload
from tests.sharding.parallel_cases import OPTIONS

KNOWN = OPTIONS | {"load_format": "auto", "skip_tokenizer_init": True, "num_gpu_blocks_override": 40}


def counting(folder: Path) -> tuple[str, str]:
    """A model of which token t + 1 follows t, and a head that takes the embedding of the next token for the model's
    hidden state there, as this model does.
    """
    silent = {f"layers.0.{name}.weight": np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    norm, eye = "layers.0.post_attention_layernorm.weight", np.eye(SIZE, dtype=np.float32)
    own = silent | {norm: ONES, "layers.0.input_layernorm.weight": ONES, "norm.weight": ONES}
    model = {f"model.{name}": value for name, value in own.items()}
    model |= {"model.embed_tokens.weight": np.sqrt(SIZE) * eye, "lm_head.weight": np.roll(eye, 1, axis=0)}
    head = silent | {norm: ONES, "fc.weight": np.concatenate([eye, 0 * eye], axis=1)}
    raw = TINY | {"vocab_size": SIZE}
    about = raw | {"architectures": ["EagleLlamaForCausalLM"]}
    return write(folder / "model", raw, model), write(folder / "head", about, head)


def test_a_head_goes_on_from_what_it_made_and_takes_new_weights(tmp_path, executables_dir):
    model, head = counting(tmp_path)
    drafts = {"method": EAGLE, "model": head, "num_speculative_tokens": 2}
    llm = LLM(model, **KNOWN, compile_cache_dir=executables_dir, speculative_config=drafts)
    assert_counts_on(llm, SIZE, (3, 2))
    name, stored = "fc.weight", load_file(Path(head) / "model.safetensors")
    llm.update_weights(stored | {name: 0 * stored[name]}, target="draft")
    with pytest.raises(AssertionError):
        assert_counts_on(llm, SIZE, (3,))
    llm.update_weights(head, target="draft")
    assert_counts_on(llm, SIZE, (3,))


@pytest.mark.thorough("minutes of compiling; what heads give is in tests/models/layers, too")
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_families(family, tmp_path, executables_dir):
    about = json.loads((FOLDER / family / "eagle.json").read_text())
    raw = about["config"] | {"architectures": ["LlamaForCausalLM"], "qkv_bias": family == "qwen3"}
    head = write(tmp_path / "head", raw, draw_all(about["shapes"]))
    options = KNOWN | {"model": str(checkpoint(family)), "num_gpu_blocks_override": 60}
    options |= {"compile_cache_dir": executables_dir}
    plain = LLM(**options)
    for count in (1, 3, 7):
        drafts = {"method": EAGLE, "model": head, "num_speculative_tokens": count}
        drafting = LLM(**options, speculative_config=drafts)
        force(drafting, 8 if count == 7 else None)
        for temperature in (0.0, 0.7):
            prompts, params = workload(temperature, 100, text=False)
            expected = plain.generate(prompts, params, use_tqdm=False)
            assert_same(drafting.generate(prompts, params, use_tqdm=False), expected)
