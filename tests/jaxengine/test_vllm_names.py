"""Modules and names of vLLM under jaxengine: found where there is a counterpart, refused with advice where not."""

from __future__ import annotations

import dataclasses
import inspect
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import jaxengine
from jaxengine import vllm_names
from jaxengine.api.not_built import NOT_BUILT, NotBuiltError
from jaxengine.requests.output.outputs import RequestMetrics
from tests.tables import each_row

MEMBERS = json.loads((Path(__file__).parent.parent / "fixtures/vllm_members.json").read_text())
# Members of vLLM's classes that are neither here nor refused by name, and parameters that are not taken.
_PROFILE = {"start_profile": "delay_iterations max_iterations profile_prefix", "update_weights": "request"}
ABSENT: dict[str, str] = {
    "LLM": "chat_template",
    "AsyncLLM": (
        "add_request check_admission get_kv_event_sources get_num_queued_tokens get_num_unfinished_requests get_status "
        "handle_fault notify_kv_transfer_request_rejected wait_for_requests_to_drain"
    ),
    "LLMEngine": "has_unfinished_requests_dp",
    "SamplingParams": (
        "all_stop_token_ids bad_words_token_ids eos_token_id for_sampler_warmup "
        "output_text_buffer_length sampling_type skip_clone update_from_generation_config update_from_tokenizer verify "
        "watermarking"
    ),
    "StructuredOutputsParams": "all_constraints_none all_non_structural_tag_constraints_none",
    "BeamSearchParams": "structured_outputs watermarking",
    "PoolingParams": (
        "all_parameters clone extra_kwargs late_interaction_params output_kind requires_token_ids returned_token_ids "
        "step_tag_id valid_parameters verify"
    ),
    "LoRARequest": "adapter_id is_3d_lora_weight name",
    "CompletionOutput": "lora_request spec_decode_metrics",
    "RequestMetrics": "is_corrupted is_watermark_skipped is_watermarked",
}
NOT_TAKEN: dict[str, dict[str, str]] = {
    "LLM": _PROFILE
    | {
        "beam_search": "concurrency_limit",
        "generate": "mm_processor_kwargs",
    },
    "AsyncLLM": _PROFILE
    | {
        "abort": "internal",
        "encode": "reasoning_ended tokenization_kwargs trace_headers",
        "generate": ("data_parallel_rank kv_hints prompt_text reasoning_ended reasoning_parser_kwargs trace_headers"),
    },
    "LLMEngine": {
        "abort_request": "internal",
        "add_request": "kv_hints prompt_text session_id trace_headers",
        "from_engine_args": "enable_multiprocessing stat_loggers",
        "start_profile": _PROFILE["start_profile"],
    },
    "RequestOutput": {"add": "next_output"},
    "SamplingParams": {"from_optional": "skip_clone watermarking"},
}


def run(statement: str) -> None:
    exec(statement, {})  # noqa: S102


@each_row("module", vllm_names.MODULES)
def test_every_name_of_a_module_is_found(module):
    found = import_module(f"jaxengine.{module}")
    names = [word.partition("=")[0] for word in vllm_names.MODULES[module].split()]
    assert names and all(getattr(found, name) is not None for name in names)
    for name in names:
        if name in jaxengine.__all__:
            assert getattr(found, name) is getattr(jaxengine, name)


def test_every_public_name_is_found():
    for name in jaxengine.__all__:
        assert getattr(jaxengine, name) is not None
    assert jaxengine.AsyncEngineArgs is jaxengine.EngineArgs and jaxengine.AsyncLLMEngine is jaxengine.AsyncLLM
    assert import_module("jaxengine.exceptions").VLLMValidationError is jaxengine.RequestError


@each_row(
    "statement",
    [
        "from jaxengine import config, engine, v1",
        "from jaxengine.config import engine_config",
        "from jaxengine.v1 import engine, metrics",
        "from jaxengine.sampling_params import *\nSamplingParams, RequestOutputKind",
        "import jaxengine\njaxengine.sampling_params.SamplingParams",
        "import jaxengine.lora.request as request\nrequest.LoRARequest",
        "import jaxengine\nassert not hasattr(jaxengine, 'nothing') and not hasattr(jaxengine, '__path_hooks__')",
    ],
)
def test_other_ways_to_import(statement):
    run(statement)


@each_row(
    "statement,said",
    [
        ("from jaxengine.config import KVTransferConfig", "kv_transfer_config takes a dict"),
        ("from jaxengine.config import VllmConfig", "jaxengine.EngineArgs has all options"),
        ("from jaxengine.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole", "hands KV pages over"),
        ("import jaxengine.distributed.weight_transfer", "update_weights weights"),
        ("from jaxengine.v1.sample.logits_processor import BatchUpdate", "jaxengine.LogitsProcessor"),
        ("from jaxengine.v1.metrics.reader import get_metrics_snapshot", "LLM.get_metrics"),
        ("from jaxengine.assets.image import ImageAsset", "open a file of yours"),
        ("from jaxengine.multimodal.utils import fetch_audio", "docs/media.md"),
        ("from jaxengine import ModelRegistry", "jaxengine.register_model"),
        ("from jaxengine.utils import random_uuid", "standard library"),
        ("from jaxengine.platforms.cuda import CudaPlatform", "jax.devices"),
        ("from jaxengine.sampling_params import Logprobs", "docs/sampling_params.md"),
        ("from jaxengine.exceptions import LoRAAdapterNotFoundError", "RequestError is that of a bad request"),
    ],
)
def test_what_is_not_built_says_what_there_is(statement, said):
    with pytest.raises(ImportError, match=said):
        run(statement)


def test_other_names_are_pythons_own_errors():
    with pytest.raises(ModuleNotFoundError, match="No module named 'jaxengine.nothing'"):
        import_module("jaxengine.nothing")
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        run("from jaxengine import nothing")


def test_importing_the_package_imports_no_jax():
    code = (
        "import sys, jaxengine, jaxengine.sampling_params, jaxengine.v1.engine.async_llm\n"
        "assert 'jax' not in sys.modules and 'jaxengine.api.llm' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@each_row("kind", MEMBERS)
def test_members_of_vllms_classes(kind):
    """Every public member that vLLM 0.32 has, and every parameter of its methods, is here or known to be missing."""
    cls = RequestMetrics if kind == "RequestMetrics" else getattr(jaxengine, kind)
    fields = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    is_engine = kind in ("LLM", "AsyncLLM", "LLMEngine")
    refused = {*NOT_BUILT} if is_engine else set()
    members = {name: given for name, given in MEMBERS[kind].items() if name != "__init__"}
    absent = {name for name in members if not hasattr(cls, name)} - fields - refused
    assert absent == {*ABSENT.get(kind, "").split()}
    missing = {}
    for name, given in members.items():
        method = getattr(cls, name, None)
        if given and callable(method):
            parameters = inspect.signature(method).parameters
            takes_fields = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
            missing[name] = {*given} - {*parameters} - (fields if takes_fields else set())
    expected = {name: {*names.split()} for name, names in NOT_TAKEN.get(kind, {}).items()}
    assert {name: names for name, names in missing.items() if names} == expected


@pytest.mark.parametrize("kind", ["LLM", "AsyncLLM", "LLMEngine"])
def test_methods_that_are_not_built_are_refused_by_name(kind):
    cls = getattr(jaxengine, kind)
    engine = object.__new__(cls)
    for name, advice in NOT_BUILT.items():
        assert not hasattr(engine, name), f"{name} is built: take it off the table"
        with pytest.raises(NotBuiltError) as error:
            getattr(engine, name)
        assert str(error.value) == f"{kind}.{name} is not built; see {advice}"
    with pytest.raises(AttributeError, match=f"'{kind}' object has no attribute 'sleeep'") as error:
        engine.sleeep()
    assert not isinstance(error.value, NotImplementedError)
