"""What a plan says is what an engine allocates, to the byte: by purpose, and all arrays together."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxengine.config.engine_config import EngineConfig
from jaxengine.models.model_classes import MODELS
from jaxengine.models.registry import read_folder
from jaxengine.plan.chips import CHIPS, Chips
from jaxengine.plan.model import open_planned
from jaxengine.plan.plan import Split, plan_split, platform_for
from jaxengine.runner.start.stage_arrays import StageArrays
from tests.conftest import TINY_CHECKPOINT, TINY_OPTIONS
from tests.fixtures import (
    attended_checkpoints,
    mllama_checkpoints,
    nemotron_vl_models,
    omni_checkpoints,
    retrieval_models,
    sound_checkpoints,
    unit_pictures,
    whisper_checkpoints,
)
from tests.fixtures.drawn_weights import checkpoint
from tests.fixtures.picture_checkpoints import whole_checkpoint
from tests.jaxengine.engine.draft_matrix import SETS
from tests.jaxengine.plan.start import allocated
from tests.models.families.test_unit_pictures import write_first
from tests.models.quantization import test_gguf

OPTIONS = TINY_OPTIONS | {"max_model_len": 48, "num_gpu_blocks_override": 40}
DRAFT = {"method": "draft_model", "model": str(TINY_CHECKPOINT), "num_speculative_tokens": 2}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2}
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
# Models that are not as they were recorded, by name; functions of a folder that does not exist.
MADE: dict[str, Callable[[Path], Path]] = {
    "sees": functools.partial(whole_checkpoint, "qwen2_vl_vision"),
    **{kind: functools.partial(nemotron_vl_models.make, kind=kind) for kind in nemotron_vl_models.CLASSES},
    **{name: functools.partial(retrieval_models.make_retriever, name=name) for name in retrieval_models.CASES},
}
# Models that see and pool: their processors need files, and a step all tokens of a prompt.
POOLS = {"skip_tokenizer_init": False, "max_model_len": 64, "max_num_batched_tokens": 64}
# Heads that draft, by name in SETS.
HEADS = "mtp deepseek_v3", "eagle3 llama", "dspark llama", "dflash qwen3", "dflash qwen3_bias"

# Model, and options besides OPTIONS.
PLAIN = {
    "float32": ("llama", {}),
    "bf16": ("llama", {"dtype": "bfloat16", "kv_cache_dtype": "int8"}),
    "int8": ("llama", {"quantization": "int8"}),
    "gguf kept": ("gguf", {"quantization": "gguf"}),
    "draft": ("llama", {"speculative_config": DRAFT}),
    "adapters": ("llama", LORA),
    "tp 2": ("llama", {"tensor_parallel_size": 2}),
    "pp 2": ("llama", {"pipeline_parallel_size": 2}),
}
THOROUGH = {
    **{
        f"{model}, {name}": (model, options)
        for model in ("qwen3_moe", "gemma3", "gpt_oss", "falcon_h1", "deepseek_v32", "mamba2", "kimi_linear")
        for name, options in {"bf16": {"dtype": "bfloat16"}}.items()
    },
    **{f"{model}, int8": (model, {"quantization": "int8"}) for model in ("qwen3_moe", "gemma3", "qwen2")},
    **{f"{model}, tp 2": (model, {"tensor_parallel_size": 2}) for model in ("qwen3_moe", "gemma3", "falcon_h1")},
    **{f"{model}, pp 2": (model, {"pipeline_parallel_size": 2}) for model in ("qwen3_moe", "gemma3", "jamba")},
    **{f"{model}, pp 2": (model, {"pipeline_parallel_size": 2}) for model in ("zamba", "zamba2_shared", "dory")},
    "experts": ("qwen3_moe", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
    "replicas": ("llama", {"data_parallel_size": 2}),
    "tp 2, adapters": ("llama", {"tensor_parallel_size": 2, **LORA}),
    "pp 2, bf16": ("llama", {"pipeline_parallel_size": 2, "dtype": "bfloat16"}),
    "tp 2, draft": ("llama", {"tensor_parallel_size": 2, "speculative_config": DRAFT}),
    "tp 2, int8": ("llama", {"tensor_parallel_size": 2, "quantization": "int8"}),
    "gguf, dequantised": ("gguf", {"dtype": "bfloat16"}),
    "ngram, bf16": ("qwen3", {"speculative_config": NGRAM, "dtype": "bfloat16"}),
    "fp8 pages of an indexer": ("glm_moe_dsa", {"kv_cache_dtype": "fp8", "tensor_parallel_size": 2}),
    "fp8 pages": ("llama", {"kv_cache_dtype": "fp8"}),
    "pages with scales of tokens": ("llama", {"kv_cache_dtype": "int8_per_token_head"}),
    "pictures": ("sees", {"skip_tokenizer_init": False}),
    "steering": ("llama", {"steer": ["residual:*"]}),
    **{f"{name}, pooled": (name, POOLS) for name in MADE if name != "sees"},
    **{name: (name, {}) for name in HEADS},
    **{f"{name}, tp 2, bf16": (name, {"tensor_parallel_size": 2, "dtype": "bfloat16"}) for name in HEADS},
}


@pytest.fixture
def chosen(tmp_path, executables_dir):
    """Options of cases by their names."""

    def choose(cases: dict[str, tuple[str, dict]]) -> dict[str, dict]:
        found = {}
        for name, (model, options) in cases.items():
            found[name] = OPTIONS | _model(model, tmp_path / name) | {"compile_cache_dir": executables_dir} | options
        return found

    return choose


def _model(name: str, folder: Path) -> dict[str, Any]:
    """Options with a model, and with the head that drafts for it, written to a folder that does not exist."""
    if name == "gguf":
        folder.mkdir()
        return {"model": test_gguf.write(folder / "model.gguf", test_gguf.LLAMA, lambda tensor: "Q4_K")}
    if name in HEADS:
        folder.mkdir()
        options, drafts = SETS[name](folder)
        return {"load_format": "dummy", **options, "speculative_config": drafts | {"num_speculative_tokens": 2}}
    make = MADE.get(name, lambda _: checkpoint(name))
    return {"model": str(make(folder))}


def every_family(folder: Path) -> dict[str, dict]:
    """Options of the first recorded checkpoint of each class of models that generate, by the class's name; whole ones,
    in `folder`, of those that see or hear.
    """
    found: dict[str, dict] = {}
    for recorded in sorted(TINY_CHECKPOINT.parent.glob("*/config.json")):
        name, family = recorded.parent.name, read_folder(checkpoint(recorded.parent.name)).architecture
        if family in found:
            continue
        whole = WHOLE[next(end for end in WHOLE if name.endswith(end))]
        try:
            model = whole(name, folder / name)
        except KeyError:  # recorded without the other files, as another one of its family is
            continue
        sees = model.parent == folder
        found[family] = OPTIONS | {"model": str(model), "max_model_len": 64, "num_gpu_blocks_override": 200}
        found[family] |= {"skip_tokenizer_init": not sees, "max_num_batched_tokens": 96 if sees else 32}
    joined = _joined(folder / "joined")
    like = found["InternVLForConditionalGeneration"]
    found[read_folder(joined).architecture] = like | {"model": str(joined), "load_format": "dummy"}
    return found


def _joined(folder: Path) -> Path:
    """Write InternVL with the text of InternLM 2, of which no file is recorded, without weights; return its folder."""
    folder.mkdir()
    write_first(folder, "internvl_rms_vision")
    (folder / "model.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    config["llm_config"] = json.loads((checkpoint("internlm2") / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _seeing(name: str, folder: Path) -> Path:
    if name in mllama_checkpoints.CASES:
        return mllama_checkpoints.write_checkpoint(folder, name)
    if name in unit_pictures.CASES:
        unit_pictures.write_checkpoint(folder, name, checkpoint(name))
        return folder
    return whole_checkpoint(name, folder)


# By the end of a checkpoint's name, the most specific first.
WHOLE: dict[str, Callable[[str, Path], Path]] = {
    "_vision": _seeing,
    "whisper_sound": whisper_checkpoints.whole_checkpoint,
    **dict.fromkeys(attended_checkpoints.KINDS, attended_checkpoints.whole_checkpoint),
    "_sound": sound_checkpoints.whole_checkpoint,
    **dict.fromkeys(("_omni", "_omni_wide"), omni_checkpoints.whole_checkpoint),
    "": lambda name, _: checkpoint(name),
}


def planned(options: dict) -> list[StageArrays]:
    """Stages of a plan, for which no device is needed."""
    split = Split(
        options.get("tensor_parallel_size", 1),
        options.get("pipeline_parallel_size", 1),
        options.get("data_parallel_size", 1),
        options.get("enable_expert_parallel", False),
    )
    chips = Chips(CHIPS["cpu"], split.size)
    model = open_planned(EngineConfig.from_options(**options), platform_for(chips.chip))
    try:
        plan = plan_split(model, chips, split)
        assert plan.error is None and plan.num_pages == options["num_gpu_blocks_override"]
        return plan.stages
    finally:
        model.close()


def compare(cases: dict[str, dict]) -> None:
    """Plans every case and compares it with what a process that starts it allocates."""
    started, wrong = allocated(cases), {}
    for name, options in cases.items():
        stages = planned(options)
        own = [stage.bytes_of(options["num_gpu_blocks_override"]) for stage in stages]
        of_all = sum(sum(sizes.values()) * stage.num_devices for sizes, stage in zip(own, stages, strict=True))
        if (own, of_all) != (found := (started[name]["stages"], started[name]["all"])):
            wrong[name] = {"planned": (own, of_all), "allocated": found}
    assert not wrong and len(started) == len(cases)


def test_one_of_each_kind(chosen):
    compare(chosen(PLAIN))


@pytest.mark.thorough("every family, and some thirty models and options")
def test_every_family_and_many_options(chosen, executables_dir, tmp_path):
    families = every_family(tmp_path)
    assert families.keys() == MODELS.keys()
    cases = {name: options | {"compile_cache_dir": executables_dir} for name, options in families.items()}
    compare({**cases, **chosen(THOROUGH)})
