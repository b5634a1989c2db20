"""Options are honoured or refused by name; what is left open follows from model and platform."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxengine.config.base.files import named_path
from jaxengine.config.base.key_file import read_key
from jaxengine.config.base.platforms import PLATFORMS
from jaxengine.config.engine_config import CompilationConfig, ConfigError, EngineConfig
from jaxengine.config.kv.kv_cache import kv_dtype
from jaxengine.pallas_kernels.kv.pages import PER_TOKEN
from jaxengine.pallas_kernels.registry import PLATFORMS as KERNELS
from jaxengine.runner.base.memory import StageNeeds, plan_memory
from jaxengine.runner.executables.bundle import Bundle
from jaxengine.runner.start.open import resolve_model
from jaxengine.server.batch.store import BatchStore, Bounds
from tests.conftest import TINY_CHECKPOINT
from tests.models.tiny import TINY
from tests.tables import each_row

MODEL = dataclasses.replace(TINY, vocab_size=128, max_position_embeddings=1000, attention=TINY.attention[:2])
CPU = PLATFORMS["cpu"]


def test_unknown_option_names_a_near_one():
    with pytest.raises(ConfigError, match="did you mean max_num_seqs") as error:
        EngineConfig.from_options(max_num_seq=3)
    assert error.value.param == "max_num_seq"


@each_row("field", dataclasses.fields(EngineConfig))
def test_every_option_refuses_a_value_of_another_type(field):
    number = str(field.type).startswith("str") or "int" in str(field.type) or field.name == "plugins"
    wrong = 3.5 if number else "yes"
    with pytest.raises(ConfigError) as error:
        EngineConfig(**{field.name: wrong})
    assert error.value.param.startswith(field.name)


@each_row("field", [field for field in dataclasses.fields(EngineConfig) if field.init])
def test_an_error_is_short_whatever_the_value(field):
    """An int that Python does not print, a megabyte, what numpy cannot compare or read as a dtype."""
    for value in (10**5000, [10**5000], "x" * 1_000_000, np.array([1, 2]), {"a": {"b": 1}}, "\ud800"):
        try:
            EngineConfig(**{field.name: value})
        except ConfigError as error:
            assert len(str(error)) < 5000 and error.param.startswith(field.name)  # some are allowed


@each_row(
    "options",
    [
        {"max_num_seqs": 0},
        {"max_num_seqs": True},
        {"gpu_memory_utilization": 0.0},
        {"gpu_memory_utilization": 1.5},
        {"gpu_memory_utilization": float("nan")},
        {"dtype": "float64"},
        {"max_model_len": "4x"},
        {"kv_cache_memory_bytes": "1.5G"},
        {"cudagraph_capture_sizes": 3},
        {"hf_token": 7},
        {"scheduling_policy": "lifo"},
        {"load_format": "pt"},
        {"logprobs_mode": "all"},
        {"block_size": -1},
        {"compilation_config": {"cudagraph_capture_sizes": [0]}},
        {"compilation_config": {"sizes": [1]}},
        {"compilation_config": {"mode": 4}},
        {"max_cudagraph_capture_size": 0},
        {"max_cudagraph_capture_size": "many"},
        {"max_cudagraph_capture_size": 4, "cudagraph_capture_sizes": [1, 8]},
        {"compilation_config": -1},
    ],
)
def test_values_out_of_range_are_refused(options):
    with pytest.raises(ConfigError):
        EngineConfig.from_options(**options)


NO_NAMES = {"~nosuchuser/x": "home directory", "a\0b": "null byte", "x" * 300: "too long", "b/" * 2500: "too long"}
FILES = {
    "record_trace": lambda name: {"record_trace": name},
    "record_steps": lambda name: {"record_steps": name},
    "kv_offloading_path": lambda name: {"kv_offloading_size": 0.1, "kv_offloading_path": name},
    "profiler_config.profiler_dir": lambda name: {"profiler_config": {"profiler_dir": name}},
    "plugins": lambda name: {"plugins": [f"{name}/own.py"]},
    "steering_vectors": lambda name: {"steer": ["residual:*"], "steering_vectors": {"calm": name}},
    "tokenizer": lambda name: {"tokenizer": name},
    "generation_config": lambda name: {"generation_config": name},
}


@each_row("option, name", [(option, name) for option in FILES for name in NO_NAMES])
def test_what_no_file_can_be_called_is_refused_as_any_other_value(option, name):
    with pytest.raises(ConfigError, match=f"^{option} .* cannot be the name of a file .*{NO_NAMES[name]}") as error:
        resolve_model(EngineConfig.from_options(model=str(TINY_CHECKPOINT), **FILES[option](name)), CPU)
    assert error.value.param == option


def test_other_options_that_name_files(tmp_path):
    for option, read in (
        ("bundle_key_file", lambda name: read_key("bundle_key_file", name)),
        ("bundle", lambda name: Bundle(name, None)),
        ("batch_storage_dir", lambda name: BatchStore(name, Bounds(1, 1, 1, 1, 1.0))),
    ):
        for name, why in NO_NAMES.items():
            with pytest.raises(ConfigError, match=f"^{option} .* cannot be the name of a file .*{why}"):
                read(name)
    assert named_path("tokenizer", tmp_path / "absent" / "file") == tmp_path / "absent" / "file"
    (tmp_path / "loop").symlink_to("loop")
    assert named_path("tokenizer", str(tmp_path / "loop")) == tmp_path / "loop"  # for its reader to refuse


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().seed = 1  # type: ignore[misc]


def test_resolved_leaves_nothing_open():
    config = EngineConfig().resolved(MODEL, CPU)
    assert (config.dtype, config.kv_cache_dtype) == ("float32", "float32")
    assert (config.max_model_len, config.block_size, config.max_num_seqs) == (1000, 16, 32)
    assert EngineConfig().resolved(MODEL, PLATFORMS["tpu"]).dtype == "bfloat16"
    assert EngineConfig(max_num_batched_tokens=20).resolved(MODEL, CPU).max_num_seqs == 20  # not 32, which is refused


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"max_model_len": 1001}, "max_model_len"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "max_num_batched_tokens"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 512}, "max_num_batched_tokens"),
        ({"enable_chunked_prefill": False, "long_prefill_token_threshold": 8}, "long_prefill_token_threshold"),
    ],
    ids=str,
)
def test_options_that_do_not_go_together_are_refused(options, param):
    with pytest.raises(ConfigError) as error:
        EngineConfig(**options).resolved(MODEL, CPU)
    assert error.value.param == param


def test_no_cap_of_logprobs_is_the_vocabulary():
    small = dataclasses.replace(MODEL, vocab_size=500)
    assert EngineConfig(max_logprobs=-1).resolved(small, CPU).max_logprobs == 500
    with pytest.raises(ConfigError, match="which has 1025 tokens; give at most 1024, as each step"):
        EngineConfig(max_logprobs=-1).resolved(dataclasses.replace(MODEL, vocab_size=1025), CPU)


def test_capture_sizes_become_buckets():
    config = EngineConfig(
        max_num_seqs=16,
        max_num_batched_tokens=64,
        compilation_config=CompilationConfig(cudagraph_capture_sizes=(1, 2, 4), prefill_sizes=(32,)),
    ).resolved(MODEL, CPU)
    shapes = [(bucket.num_tokens, bucket.num_seqs) for bucket in config.buckets(CPU)]
    assert shapes == [(1, 1), (2, 2), (4, 4), (16, 16), (32, 16), (64, 16)]
    too_large = dataclasses.replace(config, compilation_config=CompilationConfig(cudagraph_capture_sizes=(32,)))
    with pytest.raises(ConfigError, match="allowed: 1 to 16"):
        too_large.buckets(CPU)
    capped = dataclasses.replace(config, compilation_config=CompilationConfig(max_cudagraph_capture_size=4))
    decodes = [bucket.num_seqs for bucket in capped.buckets(CPU) if bucket.num_tokens == bucket.num_seqs]
    assert decodes == [size for size in CPU.decode_sizes if size <= 4] + [16]


def plan(**options):
    config = EngineConfig(**options).resolved(MODEL, CPU)
    needs = StageNeeds(programs=20 << 20, workspace=8 << 20)
    return plan_memory(config, total=1 << 30, weights=100 << 20, needs=needs, page_bytes=1 << 14)


def test_pages_follow_from_memory():
    quarter = plan(gpu_memory_utilization=0.25, max_num_seqs=512, max_num_batched_tokens=512)
    assert quarter.num_pages == ((256 - 100 - 20 - 8) << 20) >> 14 and quarter.planned == quarter.budget
    assert plan(kv_cache_memory_bytes=4 << 20).num_pages == 256
    assert plan(num_gpu_blocks_override=99, kv_cache_memory_bytes=1 << 14).num_pages == 99
    # 63 pages hold 1,000 tokens.
    assert "8,192 pages of 16 tokens; 130.0 requests of 1,000 tokens at once" in quarter.table()
    assert f"kv_cache_memory_bytes={quarter.kv_bytes} gives the pool this size" in quarter.table()
    uneven = dataclasses.replace(quarter, most_page_bytes=2 * quarter.page_bytes)  # in another pipeline stage
    assert f"kv_cache_memory_bytes={2 * quarter.kv_bytes} gives" in uneven.table()
    assert "kv_cache_memory_bytes" not in dataclasses.replace(quarter, page_bytes=0).table()


def test_a_cpu_is_not_filled_unless_that_is_asked_for():
    """Its memory is everybody's: 512 tokens of each request, 32 pages of 16, or two requests of full length."""
    default = plan()
    assert default.num_pages == 32 * 32 and default.by_need and "sized by need" in default.table()
    assert plan(max_num_seqs=2).num_pages == 2 * 63
    assert plan(max_num_seqs=1).num_pages == 63
    assert plan(max_model_len=100).num_pages == 32 * 7
    filled = plan(gpu_memory_utilization=0.5)
    assert filled.num_pages > 3 * default.num_pages and not filled.by_need
    # Half of the memory is the most, and then need is not what decides.
    config = EngineConfig().resolved(MODEL, CPU)
    needs = StageNeeds(programs=20 << 20, workspace=8 << 20)
    tight = plan_memory(config, total=1 << 30, weights=476 << 20, needs=needs, page_bytes=1 << 14)
    assert tight.num_pages == ((512 - 476 - 28) << 20) >> 14 and not tight.by_need


def test_a_process_takes_its_share_of_a_cpu():
    config = EngineConfig(gpu_memory_utilization=1.0, max_num_seqs=512, max_num_batched_tokens=512).resolved(MODEL, CPU)
    needs, sizes = StageNeeds(programs=20 << 20, workspace=8 << 20), {"total": 1 << 30, "page_bytes": 1 << 14}
    alone, shared = (plan_memory(config, weights=0, needs=needs, shared=shared, **sizes) for shared in (0, 1))
    assert alone.num_pages - shared.num_pages == (shared.process + shared.heap) >> 14 > shared.process >> 14 > 0
    assert shared.planned <= shared.budget
    assert "process" in shared.table() and "process" not in alone.table()


def test_no_more_pages_than_are_useful():
    assert plan(gpu_memory_utilization=1.0, max_num_seqs=1).num_pages == 2 * 63


def test_a_plan_that_does_not_fit_says_what_would():
    with pytest.raises(ConfigError, match="at most 512 .* raise gpu_memory_utilization") as error:
        plan(kv_cache_memory_bytes=32 << 14)
    assert error.value.param == "max_model_len"


@pytest.mark.parametrize("name", PER_TOKEN)
@pytest.mark.parametrize("platform", KERNELS)
def test_scales_of_tokens_are_for_pools_that_hold_them(name, platform):
    """The option's names and platforms are those of the pools, which options know nothing of."""
    if KERNELS[platform].reads_token_scales:
        assert kv_dtype(name, None, "bfloat16", platform) == name
    else:
        with pytest.raises(ConfigError, match=f"kv_cache_dtype.*{platform}"):
            kv_dtype(name, None, "bfloat16", platform)
