"""Modules and names of vLLM under jaxengine: found where there is a counterpart, refused with advice where not."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

import jaxengine
from jaxengine import vllm_names
from jaxengine.api.not_built import NOT_BUILT, NotBuiltError
from tests.tables import each_row


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
