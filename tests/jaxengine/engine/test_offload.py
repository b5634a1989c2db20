"""Pages that leave the devices and come back: tokens are those of an engine without, whatever leaves."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxengine import LLM, SamplingParams
from tests.conftest import TINY_CHECKPOINT, TINY_OPTIONS
from tests.fixtures.drawn_weights import checkpoint
from tests.jaxengine.engine.offload_cases import Poisoned, over_devices, params_of, passes, prompts_of
from tests.jaxengine.engine.test_draft_models import accepted_share
from tests.jaxengine.engine.test_eagle3 import attending
from tests.jaxengine.engine.test_next_token import one_layer
from tests.jaxengine.engine.test_speculation import force
from tests.sharding.parallel_cases import OPTIONS

MODELS = TINY_CHECKPOINT.parent
SMALL = {"num_gpu_blocks_override": 40, "max_model_len": 64, "kv_offloading_size": 0.05}
KIND = pytest.mark.thorough("another kind of page")
NUM_UNDRAFTED = 6  # tokens that `head_options` never drafts


def plainly(make_llm, prompts: list[list[int]], max_tokens: int = 9) -> list[list[int]]:
    """Tokens of an engine whose pages stay where they are."""
    params = [params_of(index, max_tokens) for index in range(len(prompts))]
    outputs = make_llm().generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
    return [list(each.outputs[0].token_ids) for each in outputs]


@pytest.fixture(scope="module")
def plain_tokens(make_llm) -> list[list[int]]:
    return plainly(make_llm, prompts_of(8))


def test_tokens_are_those_of_an_engine_without(make_llm, plain_tokens):
    found = passes(make_llm(**SMALL))
    assert found["tokens"] == plain_tokens and found["equal"] == [True, True]
    assert found["hits"] > 400 and found["compilations"] == 0


def test_a_draft_model_finds_its_pages(make_llm, plain_tokens):
    """One that is the model itself is always right, unless it reads what it has not written."""
    chosen = {"method": "draft_model", "model": str(TINY_CHECKPOINT), "num_speculative_tokens": 1}
    llm = make_llm(**SMALL, speculative_config=chosen)
    force(llm, 2)
    found, drafts = passes(llm), llm.core.engine.extensions.by_name["drafts"].stats
    assert found["tokens"] == plain_tokens and found["equal"] == [True, True]
    assert found["hits"] > 400 and found["compilations"] == 0
    assert drafts.num_tokens == drafts.accepted.sum() > 64


def head_options(method: str, folder: Path, executables_dir: str) -> dict[str, Any]:
    """Options of an engine whose head, or next-token layer, is right by its keys and values alone. It drafts all tokens
    but the first six, one at a time: the head of test_eagle3.py, whose programs it has.

    method: of speculative_config. folder: empty, for the checkpoints.
    """
    options = OPTIONS | {"load_format": "auto", "skip_tokenizer_init": True, "compile_cache_dir": executables_dir}
    drafts: dict[str, Any] = {"method": method, "num_speculative_tokens": 1}
    if method == "eagle3":
        model, drafts["model"] = attending(folder, NUM_UNDRAFTED)
    else:
        model = one_layer(folder / "model")
    return options | {"model": model, "num_gpu_blocks_override": 40, "speculative_config": drafts}


def head_load() -> tuple[list[Any], list[SamplingParams]]:
    """Prompts of 41 tokens for `head_options`, and how their tokens are chosen, among those that are drafted."""
    own: Any = {"max_tokens": 20, "ignore_eos": True, "detokenize": False}
    own["logit_bias"] = dict.fromkeys(range(NUM_UNDRAFTED), -100.0)
    # How often a request waits for its pages, and then drafts nothing, is a matter of time: some 100 are drafted.
    params = [SamplingParams(temperature=0.7 * (index % 2), seed=index, **own) for index in range(12)]
    rng = np.random.default_rng(2)
    return [{"prompt_token_ids": [0, *rng.integers(1, 32, 40).tolist()]} for _ in params], params


@pytest.mark.parametrize("method", ["eagle3", pytest.param("mtp", marks=pytest.mark.thorough("another head"))])
def test_a_head_finds_its_pages_in_the_folder(executables_dir, tmp_path, method):
    """It is right by its keys and values alone, which it writes once the sampler has run."""
    options = head_options(method, tmp_path, executables_dir)
    options |= {"kv_offloading_size": 0.05, "kv_offloading_path": str(tmp_path / "pages")}
    prompts, params = head_load()
    with LLM(**options) as llm:
        offload: Any = llm.core.engine.extensions.by_name["offload"]
        force(llm, 1)
        expected = llm.generate(prompts, params, use_tqdm=False)  # without drafts
        assert offload.flush()
        llm.reset_prefix_cache()
        force(llm, 2)
        assert accepted_share(llm, prompts, params, expected) > 0.95
        assert offload.orders.num_hits > 200 and llm.core.runner.compiles.count == 0
        # With other weights of the head a page has another content.
        before = offload.mover.describe()
        folder = options["speculative_config"].get("model", options["model"])
        name = {"eagle3": "midlayer.self_attn.o_proj.weight", "mtp": "model.layers.1.eh_proj.weight"}[method]
        llm.update_weights({name: -load_file(f"{folder}/model.safetensors")[name]}, target="draft", strict=False)
        assert offload.mover.describe() != before
        llm.generate(prompts[:1], params[:1], use_tqdm=False)
        assert offload.tiers.disk is None


KINDS = {
    "windows": ("gemma2", {"num_gpu_blocks_override": 90}),
    "windows of codes": ("gemma2", {"num_gpu_blocks_override": 90, "kv_cache_dtype": "int8"}),
    "states": ("qwen3_next", {"num_state_snapshots": 4}),
    "states of convolutions": ("lfm2", {"num_state_snapshots": 4}),
    "latents": ("deepseek_v2", {}),
    "keys of an indexer": ("deepseek_v32", {}),
    "int8": ("llama", {"kv_cache_dtype": "int8"}),
    "fp8": ("llama", {"kv_cache_dtype": "fp8"}),
    "int8 scales of tokens": ("llama", {"kv_cache_dtype": "int8_per_token_head"}),
    "bfloat16": ("llama", {"dtype": "bfloat16"}),
    "pages of different sizes": ("gemma4", {"num_gpu_blocks_override": 90}),
    "states beside pages": ("falcon_h1", {"num_state_snapshots": 4}),
}


def options_of(model: str, executables_dir: str, **more) -> dict:
    known = {"gemma2", "gpt_oss", "mistral", "gemma3"}
    named = {"model": str(checkpoint(model))} if model in known else {"model": str(MODELS / model)}
    return {**TINY_OPTIONS, **SMALL, "compile_cache_dir": executables_dir, "load_format": "dummy", **named, **more}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in ("windows of codes", "states of convolutions") else KIND)
        for kind in KINDS
    ],
)
def test_every_kind_of_page(executables_dir, kind):
    model, options = KINDS[kind]
    with LLM(**options_of(model, executables_dir, **options)) as llm:
        found = passes(llm)
    assert found["equal"] == [True, True] and found["hits"] > 100 and found["compilations"] == 0


def test_over_devices(executables_dir, thorough):
    llama = options_of("llama", executables_dir)
    cases = {"tp 2, dp 2": llama | {"tensor_parallel_size": 2, "data_parallel_size": 2}}
    if thorough:
        states = options_of("qwen3_next", executables_dir, num_state_snapshots=4)
        cases |= {"pp 2": llama | {"pipeline_parallel_size": 2}}
        both = options_of("falcon_h1", executables_dir, num_state_snapshots=4)
        cases |= {"states, pp 2": both | {"pipeline_parallel_size": 2}}
        cases |= {"states, tp 2, dp 2": states | {"tensor_parallel_size": 2, "data_parallel_size": 2}}
        cases |= {"windows, tp 2": options_of("gemma2", executables_dir) | {"tensor_parallel_size": 2}}
        cases |= {"tp 2": llama | {"tensor_parallel_size": 2, "max_logprobs": 5}}
    found_in = over_devices(cases)
    assert not thorough or found_in["tp 2"]["content"] == found_in["tp 2, dp 2"]["content"]
    for case, found in found_in.items():
        assert found["equal"] == [True, True], case
        assert found["hits"] > 100 and found["compilations"] == 0, case


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preempted_requests_have_the_same_tokens(make_llm, caplog, mode):
    llm = make_llm(**SMALL, preemption_mode=mode)
    engine, prompts = Poisoned(llm), prompts_of(8, 9)
    with caplog.at_level(logging.WARNING):
        found = [engine.run(prompts, 8, 40) for _ in range(3)]
    assert found == [plainly(make_llm, prompts, 40)] * 3
    assert f"is preempted by PreemptionMode.{mode.upper()} mode because" in caplog.text
    counts = {each.labels["mode"]: each.value for each in llm.get_metrics() if each.name == BY_MODE}
    assert counts[mode] == llm.core.engine.scheduler.num_preemptions > 0 == sum(counts.values()) - counts[mode]
    orders = llm.core.engine.scheduler.extension("offload")
    assert not orders._pinned and not orders._checked and not orders.store.host._pins


BY_MODE = "jaxengine:num_preemptions_by_mode"


def test_new_weights_find_no_old_pages(tiny_options, tmp_path):
    options = tiny_options | SMALL | {"kv_offloading_path": str(tmp_path)}
    prompts = prompts_of(8)
    tensors = load_file(TINY_CHECKPOINT / "model.safetensors")
    rng = np.random.default_rng(1)
    new = {name: each + 0.1 * rng.standard_normal(each.shape).astype(each.dtype) for name, each in tensors.items()}
    with LLM(**options | {"kv_offloading_size": None, "kv_offloading_path": None}) as plain:
        plain.update_weights(new)
        expected = Poisoned(plain).run(prompts)
    with LLM(**options) as llm:
        engine = Poisoned(llm)
        old = engine.run(prompts)
        num_files = sum(each.is_file() for each in tmp_path.rglob("*"))
        llm.update_weights(new, kv="keep")
        assert engine.run(prompts) == engine.run(prompts) == expected != old
        assert llm.core.engine.scheduler.extension("offload").num_hits > 0
        llm.sleep(level=1)
        llm.wake_up()
        assert engine.run(prompts) == expected
    # What follows the switch may be of mixed weights: it is no other engine's.
    assert num_files == sum(each.is_file() for each in tmp_path.rglob("*")) > 0


def disk_of(llm: LLM) -> Any:
    return llm.core.engine.scheduler.extension("offload").store.disk


def test_a_folder_is_shared_by_restarts(tiny_options, tmp_path, plain_tokens):
    options = tiny_options | SMALL | {"kv_offloading_path": str(tmp_path)}
    prompts = prompts_of(8)
    with LLM(**options) as first, LLM(**options) as beside:
        assert Poisoned(first).run(prompts) == plain_tokens
        disk = disk_of(beside)
        disk._scan()  # as it does every second
        assert Poisoned(beside).run(prompts) == plain_tokens
        assert beside.core.engine.scheduler.extension("offload").num_hits == 8 * 36
    files = [each for each in tmp_path.rglob("*") if each.is_file()]
    for path in files[::3]:  # a flipped byte
        raw = bytearray(path.read_bytes())
        raw[-7] ^= 1
        path.write_bytes(raw)
    with LLM(**options) as again:
        assert Poisoned(again).run(prompts) == plain_tokens
        orders = again.core.engine.scheduler.extension("offload")
        assert orders.store.disk.num_bad > 0 and 0 < orders.num_hits < 8 * 36
    with LLM(**options | {"block_size": 8, "num_gpu_blocks_override": 20}) as other:
        assert not len(disk_of(other))
