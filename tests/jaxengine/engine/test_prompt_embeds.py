"""Prompts of embeddings: the tokens of the same prompt by ids, in chunks, among others, and from the prefix cache."""

from __future__ import annotations

import base64
import io
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save

from jaxengine import LLM, ConfigError, RequestError, SamplingParams
from jaxengine.checkpoint.model_source import open_model
from jaxengine.config.base.platforms import PLATFORMS
from jaxengine.config.engine_config import EngineConfig
from jaxengine.models.layers.pictures import Pictures
from jaxengine.models.registry import read_folder
from jaxengine.models.unpaged import run_unpaged
from tests.conftest import TINY_CHECKPOINT
from tests.models.conftest import load_recorded

ROOT = Path(__file__).parents[3]
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, detokenize=False, logprobs=2)


@pytest.fixture(scope="module")
def llm(make_llm):
    return make_llm(enable_prompt_embeds=True)


@pytest.fixture(scope="module")
def table(tiny_model):
    return load_file(Path(tiny_model) / "model.safetensors")["model.embed_tokens.weight"].astype(np.float32)


def drawn(count: int, seed: int, table: np.ndarray) -> list[int]:
    return np.random.default_rng(seed).integers(3, len(table), count).tolist()


def answered(llm, prompts, params=GREEDY):
    """Tokens and their log-probabilities for each prompt."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        (each.outputs[0].token_ids, np.array([list(entry.values())[0].logprob for entry in each.outputs[0].logprobs]))
        for each in outputs
    ]


def check_same(found, wanted):
    for (tokens, scores), (own_tokens, own_scores) in zip(found, wanted, strict=True):
        assert tokens == own_tokens
        np.testing.assert_allclose(scores, own_scores, atol=1e-4)


def test_rows_of_the_table_are_their_tokens(llm, table):
    """More tokens than a step has, one, and a page less one; beside prompts of tokens."""
    prompts = [drawn(count, count, table) for count in (70, 1, 3, 33)]
    wanted = answered(llm, prompts)
    llm.reset_prefix_cache()
    check_same(answered(llm, [{"prompt_embeds": table[ids]} for ids in prompts]), wanted)
    mixed = [{"prompt_embeds": table[prompts[0]]}, prompts[1], {"prompt_embeds": table[prompts[2]]}, prompts[3]]
    check_same(answered(llm, mixed), wanted)
    assert llm.get_metrics() is not None and llm.core.engine.scheduler.num_free_pages > 0


def test_prefixes_are_found_by_their_content(llm, table):
    ids = drawn(40, 7, table)
    llm.reset_prefix_cache()
    embedded = {"prompt_embeds": table[ids]}
    first, again, longer, other, as_tokens = (
        llm.generate([prompt], GREEDY, use_tqdm=False)[0]
        for prompt in (
            embedded,
            embedded,
            {"prompt_embeds": table[[*ids, 5, 9]]},
            {"prompt_embeds": table[[*ids[:20], *ids[19::-1]]]},
            [0] * 40,  # the placeholders' ids
        )
    )
    cached = [each.num_cached_tokens for each in (first, again, longer, other, as_tokens)]
    assert cached == [0, 36, 40, 20, 0]
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


def test_forms_of_embeddings(llm, table):
    ids = drawn(9, 3, table)
    rows, file = table[ids], io.BytesIO()
    np.save(file, rows)
    torch = io.BytesIO()
    _write_torch(torch, rows)
    forms = [rows, file.getvalue(), base64.b64encode(file.getvalue()).decode(), save({"rows": rows}), torch.getvalue()]
    wanted = answered(llm, [ids] * len(forms))
    check_same(answered(llm, [{"prompt_embeds": form} for form in forms]), wanted)
    narrow = rows.astype(ml_dtypes.bfloat16)
    assert answered(llm, [{"prompt_embeds": narrow}])[0][0] is not None


def _write_torch(file: io.BytesIO, rows: np.ndarray) -> None:
    """What torch.save writes for a float32 tensor, as far as it is read."""
    import zipfile

    def number(value: int) -> bytes:
        return b"J" + value.to_bytes(4, "little")

    program = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000"
    program += b"X\x03\0\0\0cpu" + number(rows.size) + b"tQK\0" + number(len(rows)) + number(rows.shape[1]) + b"\x86"
    program += number(rows.shape[1]) + b"K\x01\x86\x89ccollections\nOrderedDict\n)RtR."
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("a/data.pkl", program)
        made.writestr("a/data/0", rows.tobytes())


@pytest.mark.parametrize(
    ("prompt", "params", "said"),
    [
        ({"prompt_embeds": np.zeros((3, 5), np.float32)}, GREEDY, "rows of 5 elements; the model's hidden states have"),
        ({"prompt_embeds": np.zeros((500, 1), np.float32)}, GREEDY, "prompt_embeds has"),
        ({"prompt_embeds": np.zeros((3, 5), np.int32)}, GREEDY, r"is an array int32\[3, 5\]; allowed:"),
        ({"prompt_embeds": np.full((3, 5), np.nan, np.float32)}, GREEDY, "not finite"),
        ({"prompt_embeds": "!"}, GREEDY, "prompt_embeds is"),
        ({"prompt_embeds": object()}, GREEDY, "prompt_embeds is an array object"),
        ({"prompt_embeds": b"PK\3\4"}, GREEDY, "a file of torch.save that is not read"),
        ({"prompt_embeds": np.zeros((3, 5), np.float32), "prompt": "a"}, GREEDY, "has prompt_embeds and prompt;"),
        ("rows", SamplingParams(prompt_logprobs=1), "prompt_logprobs is 1; allowed with prompt_embeds: None"),
        ("rows", SamplingParams(repetition_penalty=1.5), "repetition_penalty is 1.5; allowed with prompt_embeds: 1.0"),
    ],
)
def test_what_is_refused(llm, table, prompt, params, said):
    prompt = {"prompt_embeds": table[:4]} if prompt == "rows" else prompt
    with pytest.raises(RequestError, match=said):
        llm.generate([prompt], params, use_tqdm=False)


def test_engines_that_do_not_take_them(make_llm, table, tiny_model, pooling_folder):
    with pytest.raises(RequestError, match="started without enable_prompt_embeds"):
        make_llm().generate([{"prompt_embeds": table[:4]}], GREEDY, use_tqdm=False)
    source = open_model(EngineConfig(model=pooling_folder("last")))
    with pytest.raises(ConfigError, match="enable_prompt_embeds is True, but pooling models"):
        EngineConfig(enable_prompt_embeds=True).resolved(source.config, PLATFORMS["cpu"])
    source.close()


@pytest.mark.parametrize("name", ["deepseek_v4", "gemma3n", "qwen4_exp"])
def test_models_whose_layers_read_token_ids(name):
    """Experts by token id, inputs of layers by token id, and n-grams of token ids."""
    model = read_folder(TINY_CHECKPOINT.parent / name)
    with pytest.raises(ConfigError, match="enable_prompt_embeds is True, but layers of .* read token ids"):
        EngineConfig(enable_prompt_embeds=True).resolved(model, PLATFORMS["cpu"])


@pytest.mark.parametrize("name", ["gpt2", "longcat_flash", "solar"])
def test_rows_get_what_the_family_adds_to_embeddings(name):
    """Rows of positions, and further hidden states; without layers the output shows the first one's input."""
    model: Any = nnx.clone(load_recorded(name).model)
    model.layers = nnx.List([])
    ids = jnp.arange(5, 11, dtype=jnp.int32)
    wanted = run_unpaged(model, ids[None])[0]
    rows = Pictures(model.embed_tokens(ids), jnp.arange(6, dtype=jnp.int32))
    found = run_unpaged(model, jnp.zeros_like(ids)[None], sections={"pictures": rows})[0]
    np.testing.assert_array_equal(found, wanted)


def preempting(llm: LLM) -> list[int]:
    """Have the engine preempt all that runs in every third step; return a list that gets how many these were."""
    scheduler, calls, preempted = llm.core.engine.scheduler, itertools.count(1), []
    schedule = scheduler.schedule

    def run(*args: Any, **kwargs: Any) -> Any:
        if next(calls) % 3 == 0:
            preempted.append(scheduler.num_running)
            scheduler.preempt_all()
        return schedule(*args, **kwargs)

    scheduler.schedule = run
    return preempted


def compare_on_two_devices(folder: str) -> None:
    options: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 16, "block_size": 8}
    options |= {
        "max_model_len": 128,
        "disable_log_stats": True,
        "enable_prompt_embeds": True,
        "skip_tokenizer_init": True,
    }
    table = load_file(Path(folder) / "model.safetensors")["model.embed_tokens.weight"].astype(np.float32)
    prompts = [drawn(count, count, table) for count in (70, 1, 3, 33)]
    embedded = [{"prompt_embeds": table[ids]} for ids in prompts]
    further: tuple[dict[str, Any], ...] = {"tensor_parallel_size": 2}, {"async_scheduling": False}
    for changes in further:
        llm = LLM(folder, **options, **changes)
        wanted = answered(llm, prompts)
        llm.reset_prefix_cache()
        preempted = preempting(llm)
        check_same(answered(llm, embedded), wanted)
        assert sum(preempted) > 5 and llm.core.runner.compiles.count == 0
        llm.shutdown()


@pytest.mark.thorough("further engines")
def test_two_devices_and_preemption(tiny_model):
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.jaxengine.engine.test_prompt_embeds", str(tiny_model)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]


if __name__ == "__main__":
    compare_on_two_devices(sys.argv[1])
