"""Engines whose layers attend to pictures (Llama 3.2 Vision): what transformers recorded, out of crowds in small pools,
in chunks, with cached prefixes and on two devices.

    python -m tests.jaxengine.engine.test_crossed_pictures CASE

needs two devices (XLA_FLAGS=--xla_force_host_platform_device_count=2).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxengine import LLM, ConfigError, LoRARequest, RequestError, SamplingParams
from jaxengine.checkpoint.model_source import open_model
from jaxengine.config.base.platforms import PLATFORMS
from jaxengine.config.engine_config import EngineConfig
from jaxengine.models.build import Build
from jaxengine.models.params.declare import declared_params
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.registry import build_model
from jaxengine.models.weights.formats.safetensors import SafetensorsCheckpoint
from jaxengine.models.weights.load import load_params
from tests.fixtures.adapters import write_adapter
from tests.fixtures.mllama_checkpoints import CASES, PROMPTS, recorded_path, text_of, write_checkpoint
from tests.fixtures.unit_pictures import SIZES, picture

ROOT = Path(__file__).parents[3]
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 32,
    "max_num_seqs": 4,
    "block_size": 4,
    "max_num_batched_tokens": 12,
    "num_gpu_blocks_override": 10,
    "compilation_config": {"prefill_sizes": [], "cudagraph_capture_sizes": []},
    "disable_log_stats": True,
    "max_logprobs": 1,
}
PIXEL_STEP = 13
FIRST = next(iter(CASES))


class Case:
    def __init__(self, name: str, folder: Path):
        self.folder = write_checkpoint(folder, name)
        with np.load(recorded_path(name)) as found:
            self.recorded = dict(found)
        self.prompts: list[Any] = [
            {"prompt": text_of(prompt), "multi_modal_data": {"image": [picture(index) for index in pictures]}}
            for prompt, pictures in PROMPTS
        ]
        self.answers = [self.recorded[f"greedy_{number}"].tolist() for number in range(len(PROMPTS))]

    def start(self, **options: Any) -> LLM:
        return LLM(str(self.folder), **{**OPTIONS, **options})


def check(case: Case, llm: LLM, times: int = 1, adapter: LoRARequest | None = None) -> None:
    """The recorded tokens follow each prompt, with the recorded scores, all prompts at once and as often as said."""
    count = len(case.answers[0])
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=1)
    outputs = llm.generate(case.prompts * times, params, use_tqdm=False, lora_request=adapter)
    for index, output in enumerate(outputs):
        number = index % len(case.prompts)
        assert output.prompt_token_ids == case.recorded[f"tokens_{number}"].tolist()
        assert list(output.outputs[0].token_ids) == case.answers[number], PROMPTS[number]
        logits = case.recorded[f"logits_{number}"].astype(np.float64)
        wanted = logits.max(axis=1) - np.log(np.exp(logits).sum(axis=1))
        scores = output.outputs[0].logprobs or []
        ours = [each[token].logprob for each, token in zip(scores, case.answers[number], strict=True)]
        np.testing.assert_allclose(ours, wanted, rtol=0, atol=1e-4 * np.abs(logits).max())
    scheduler = llm.core.engine.scheduler
    assert llm.core.runner.compiles.count == 0 and scheduler.num_free_pages == scheduler.num_pages
    assert all(rows.num_used == 0 for rows in scheduler.extension("crossed_pictures").rows)


FAMILIES = [pytest.param(name, marks=() if name == FIRST else pytest.mark.thorough("a second shape")) for name in CASES]


@pytest.fixture(scope="module", params=FAMILIES)
def case(request, tmp_path_factory):
    return Case(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llm(case, executables_dir):
    return case.start(compile_cache_dir=executables_dir)


def test_pixels_are_those_of_transformers(case, llm):
    processor = llm.core.inputs.media.processor
    side, patch, tiles = processor.side, processor.patch, processor.tower.max_tiles
    for index in range(len(SIZES)):
        item, grid = processor.process("image", picture(index), {}), side // patch
        cut = item.patches.reshape(tiles, grid, grid, 3, patch, patch).transpose(0, 3, 1, 4, 2, 5).ravel()
        np.testing.assert_allclose(cut[::PIXEL_STEP], case.recorded[f"pixels_{index}"], rtol=0, atol=1e-5)
        assert set(item.columns.ravel().tolist()) == {*case.recorded[f"tiling_{index}"].tolist()}


def test_a_crowd_answers_as_transformers_did(case, llm):
    """In chunks and preempted; then once more, with the pictures that are known by now."""
    scheduler = llm.core.engine.scheduler
    check(case, llm, 3)
    rows = scheduler.extension("crossed_pictures").rows[0]
    assert rows.num_queries > rows.num_hits > 0 and scheduler.num_preemptions > 0
    check(case, llm)
    assert llm.core.engine.extensions.media_stats().num_calls > 0


def test_a_prefix_is_found_for_the_same_pictures_alone(case, llm):
    """Whatever stands before a picture depends on it, too."""
    scheduler, params = llm.core.engine.scheduler, SamplingParams(temperature=0, max_tokens=1, logprobs=1)
    text, found = f"{' '.join(f'w{index}' for index in range(20, 36))} {text_of('@')} w5 w6", []
    for pictures in ([0], [0], [1], [1], [], []):
        prompt: Any = {"prompt": text if pictures else text.replace(text_of("@"), "w4")}
        prompt |= {"multi_modal_data": {"image": [picture(number) for number in pictures]}}
        before = scheduler.num_prefix_hits
        output = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
        scores = output.logprobs or []
        found.append((scheduler.num_prefix_hits - before, scores[0][output.token_ids[0]].logprob))
    for (missed, first), (hits, second) in zip(found[::2], found[1::2], strict=True):
        assert missed == 0 < hits and abs(first - second) < 1e-4
    assert len({round(score, 4) for _, score in found}) == 3


def test_requests_that_leave_leave_nothing(case, llm):
    """Before, while and after their pictures are encoded; meanwhile what is encoded is forgotten."""
    core, params = llm.core, SamplingParams(temperature=0, max_tokens=6)
    for steps in range(3):
        prepared = [core.inputs.prepare(prompt, params) for prompt in case.prompts]
        for each in prepared:
            core.add(each)
        for _ in range(steps):
            core.step()
        for each in prepared[::2]:
            core.abort(each.request_id)
        llm.reset_mm_cache()
        core.step()
        for each in prepared[1::2]:
            core.abort(each.request_id)
        while core.has_unfinished:
            core.step()
    check(case, llm)


def test_what_is_refused(case, llm):
    many: dict[str, Any] = {"prompt": text_of("w1 " + "@ w3 " * 9), "multi_modal_data": {"image": []}}
    for index in range(9):
        many["multi_modal_data"]["image"].append(np.full((9, 9, 3), 20 * index, np.uint8))
    cache = llm.core.inputs.media.cache
    known = cache.num_bytes
    same = {"prompt": many["prompt"], "multi_modal_data": {"image": [picture(0)] * 9}}
    too_many = "this model needs all images of a prompt at once: 9 embeddings, where at most 8 are kept"
    for prompt, message in (
        (same, too_many),
        (many, too_many),
        ({"prompt": "w1", "multi_modal_data": {"image": [picture(0)]}}, r"has 0 of the placeholder '<\|image\|>'"),
    ):
        with pytest.raises(RequestError, match=message):
            llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)
        assert cache.num_bytes == known or message != too_many  # no image was preprocessed
    for options, message in (
        ({"limit_mm_per_prompt": {"image": 65}}, r"limit_mm_per_prompt.image is 65; allowed: 0 to 64, as many images"),
        ({"limit_mm_per_prompt": {"image": 5}, "encoder_cache_size": 4}, "image is 5; allowed: 0 to 4, as many"),
        ({"limit_mm_per_prompt": {"image": 3}, "max_num_batched_encoder_tokens": 2}, "is 3; allowed: 0 to 2, as many"),
        ({"encoder_cache_size": 65}, "encoder_cache_size is 65; allowed: 1 to 64 for this model"),
        (
            {"enable_mm_embeds": True},
            "enable_mm_embeds is True, which Mllama.*, which attends to images, does not",
        ),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype is 'int8', which Mllama"),
    ):
        with pytest.raises(ConfigError, match=message):
            case.start(**options)


def test_without_pictures_it_serves_as_its_text_part(case):
    """Neither the tower nor layers that attend to pictures have weights, and what these do not support is taken."""
    options = {**OPTIONS, "pipeline_parallel_size": 2, "kv_cache_dtype": "int8", "enable_lora": True}
    config = EngineConfig(model=str(case.folder), limit_mm_per_prompt={"image": 0}, **options)
    source = open_model(config)
    config.resolved(source.config, PLATFORMS["cpu"])
    model = build_model(source.config, Build("float32"))
    names = {each.name for param in declared_params(model) for each in param.decl.sources}
    assert source.config.tower is None and names and not any("cross" in name for name in names)
    assert isinstance(source.weights, SafetensorsCheckpoint)
    load_params(model, source.weights)
    source.close()


@pytest.mark.thorough("starts an engine with adapters")
def test_an_adapter_is_added_to_all_layers(case, tmp_path, executables_dir):
    """The weights lack what the adapter adds: with it the model answers as recorded, without it otherwise.
    Keys and values of pictures, which the tower makes, take no adapter."""
    path = case.folder / "model.safetensors"
    weights = load_file(path)
    layers = r"language_model\.model\.layers\.\d+\.(self_attn|mlp|cross_attn(?=\.[qo]_))\.\w+_proj"
    named = {name.removesuffix(".weight"): values.shape for name, values in weights.items()}
    shapes = {name: shape for name, shape in named.items() if re.fullmatch(layers, name)}
    assert {name.split(".")[4] for name in shapes} == {"self_attn", "cross_attn", "mlp"}
    folder = write_adapter(tmp_path / "adapter", shapes, seed=3, r=3, lora_alpha=3, std=0.3, target_modules=layers)
    matrices = load_file(folder / "adapter_model.safetensors")
    for name in shapes:
        down, up = (matrices[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
        weights[f"{name}.weight"] -= up @ down
    shutil.copytree(case.folder, tmp_path / "model")
    save_file(weights, tmp_path / "model" / path.name)
    llm = LLM(str(tmp_path / "model"), **OPTIONS, enable_lora=True, compile_cache_dir=executables_dir)
    check(case, llm, 2, LoRARequest("adapter", 1, str(folder)))
    with pytest.raises(AssertionError):
        check(case, llm)
    of_tower = r".*cross_attn\.k_proj"
    wrong = {name: shape for name, shape in named.items() if re.fullmatch(of_tower, name)}
    refused = write_adapter(tmp_path / "refused", wrong, seed=3, r=3, target_modules=of_tower)
    with pytest.raises(ModelFileError, match=r"adapters of it are not supported \(at .*cross_attn.k_proj"):
        llm.generate(case.prompts[0], use_tqdm=False, lora_request=LoRARequest("refused", 2, str(refused)))


def compare(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        case = Case(name, Path(folder))
        for options in ({"tensor_parallel_size": 2}, {"data_parallel_size": 2}):
            llm = case.start(**options)
            check(case, llm, 2)
            # One device has a picture, and the other no request.
            output = llm.generate(case.prompts[1], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)[0]
            assert list(output.outputs[0].token_ids) == case.answers[1][:2]


@pytest.mark.thorough("starts two engines over two devices")
@pytest.mark.parametrize("name", CASES)
def test_two_devices_answer_as_transformers_did(name):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "tests.jaxengine.engine.test_crossed_pictures", name]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.stdout.endswith(f"{name} equal\n"), done.stderr[-3000:]


if __name__ == "__main__":
    for each in sys.argv[1:]:
        compare(each)
        print(each, "equal")
