"""What makes a row a failure, and how a baseline finds what got worse."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxengine.check import baseline, report
from jaxengine.check.compile import Compiler
from jaxengine.check.compiled import cycles
from jaxengine.check.devices import target_devices, topologies
from jaxengine.check.inspect import device_bytes, mosaic_gpu, vmem_bytes
from jaxengine.check.judge import failures, overfull
from jaxengine.check.targets import TARGETS, find_target, gpu_target_config, require_compiler, split_targets
from jaxengine.config.engine_config import ConfigError
from tests.tables import each_row

V6E = TARGETS["v6e"]
ROW = {
    "target": "v6e",
    "program": "decode S=1",
    "step": True,
    "peak_bytes": 1_000_000,
    "fast_bytes": 1000,
    "copies": [],
    "collectives": {},
    "wrong_exchanges": [],
    "cycles": 100,
    "failures": [],
}
WORK = {"operations": 1_000_000, "flops": 900_000, "weight_bytes": 100 << 20, "row_bytes": 9}
WORK |= {"state_bytes": 0, "gathered_bytes": 0}
NEEDS = {
    "needs": WORK | {"quantized_bytes": 0},
    "dtype": "bfloat16",
    "operations": {"bf16": 990_000, "f32": 10_000},
    "moved_bytes": 110 << 20,
    "workspace_bytes": 13 << 20,
}
LATENTS = {"latent_bytes": 64 << 20, "workspace_bytes": 192 << 20, "result_bytes": 128 << 20}
CODES = NEEDS | {"needs": WORK | {"quantized_bytes": 50 << 20}}


@each_row(
    ("change", "planned", "words"),
    [
        ({}, 1_000_000, ""),
        ({}, 981_000, ""),
        ({}, 970_000, "above"),
        ({}, 1_019_000, ""),
        ({}, 1_030_000, "below"),
        ({"peak_bytes": V6E.hbm_bytes + 1}, V6E.hbm_bytes, "needs"),
        ({"fast_bytes": V6E.fast_bytes + 1}, 1_000_000, "on the chip"),
        ({"copies": ["pool: copy c"]}, 1_000_000, "copies pool"),
        ({"collectives": {"all-reduce": 1}}, 1_000_000, "other devices"),
        ({"wrong_exchanges": ["no code wrote all-gather g"]}, 1_000_000, "exchanges: no code wrote"),
        ({"spill_bytes": 8}, 1_000_000, "spills 8 bytes"),
        ({"experts": {"rows": 8192, "average": 64.0, "multiplied": 1.1}}, 1_000_000, ""),
        ({"experts": {"rows": 8192, "average": 64.0, "multiplied": 1.12}}, 1_000_000, "1.12 times the rows of experts"),
        ({"experts": {"rows": 4096, "average": 32.0, "multiplied": 1.12}}, 1_000_000, ""),
        ({"attentions": 2, "attention_kernels": 1}, 1_000_000, "1 of 2 layers attend with a kernel"),
        (NEEDS, 1_000_000, ""),
        (NEEDS | {"operations": {"bf16": 1_200_000}}, 1_000_000, "1,200,000 operations in products, at most 1,100,000"),
        (NEEDS | {"operations": {"bf16": 900_000, "f32": 90_000}}, 1_000_000, "of a bfloat16 model in f32: 90,000"),
        (NEEDS | {"dtype": "float32", "operations": {"f32": 990_000}}, 1_000_000, ""),
        (NEEDS | {"moved_bytes": 120 << 20}, 1_000_000, "moves 125,829,120 bytes"),
        (NEEDS | {"moved_bytes": 120 << 20, "needs": NEEDS["needs"] | {"gathered_bytes": 4 << 20}}, 1_000_000, ""),
        (CODES | {"workspace_bytes": 6 << 20}, 1_000_000, ""),
        (CODES, 1_000_000, "temporaries of 13,631,488 bytes besides codes, at most 6,553,609"),
        (LATENTS, 1_000_000, ""),
        (LATENTS | {"latent_bytes": 130 << 20, "result_bytes": 127 << 20}, 1_000_000, ""),
        (LATENTS | {"result_bytes": 127 << 20}, 1_000_000, "temporaries of 65.0 MiB besides the result, at most 64.0"),
        ({"error": "XlaRuntimeError: no"}, 1_000_000, "does not compile: XlaRuntimeError"),
    ],
)
def test_failures(change, planned, words):
    found = failures(ROW | change, V6E, planned, is_largest=True)
    assert len(found) == bool(words) and all(words in text for text in found)


def test_a_smaller_step_may_stay_below_the_plan_and_a_group_may_talk():
    assert not failures(ROW, V6E, 2_000_000, is_largest=False)
    assert not failures(ROW | {"collectives": {"all-reduce": 1}}, find_target("v6e-4"), 1_000_000, is_largest=True)


def test_programs_that_hold_more_than_planned_are_found_over_all_of_a_stage():
    """Each stays below the plan: only their sum shows it."""
    rows = [
        ROW | {"program": name, "stage": stage, "held_bytes": 300, "planned_held": 500}
        for name in "ab"
        for stage in (0, 1)
    ]
    kernel = ROW | {"step": False, "held_bytes": 900}
    assert not overfull([*rows[:2], kernel])
    assert [text.split(":")[0] for text in overfull([*rows[:3], kernel])] == ["v6e, stage 0"]


@pytest.mark.parametrize(("cycles", "worse"), [(100, False), (105, False), (106, True), (50, False)])
def test_a_regression_beyond_five_percent_is_found(tmp_path, cycles, worse):
    file, settings = str(tmp_path / "base.json"), {"model": "m", "options": {}, "kernels": None}
    baseline.save(file, settings, [ROW])
    row = ROW | {"cycles": cycles, "failures": []}
    baseline.compare([row], baseline.load(file, settings))
    assert bool(row["failures"]) == worse
    assert not worse or "cycles was 100 in the baseline and is 106 (+6 %)" in row["failures"][0]


def test_plain_attention_where_it_is_said_to_be():
    row = ROW | {"attentions": 2, "attention_kernels": 0, "fast_bytes": None}
    assert TARGETS["cpu"].plain_attention and not failures(row, TARGETS["cpu"], 1_000_000, is_largest=True)
    assert failures(row, TARGETS["sm_120"], 1_000_000, is_largest=True)


def test_more_operations_are_a_regression_and_a_processor_is_compared_by_counts():
    old = ROW | {"operations": {"bf16": 1000}, "exchanged_bytes": 100}
    row = ROW | {"operations": {"bf16": 1000, "f32": 10}, "exchanged_bytes": 100, "failures": []}
    baseline.compare([row], [old])
    assert row["failures"] == ["operations in f32 was 0 in the baseline and is 10"]
    here = row | {"target": "cpu", "cycles": 1000, "peak_bytes": 10**9, "exchanged_bytes": 200, "failures": []}
    baseline.compare([here], [old | {"target": "cpu"}])
    assert [text.split(" was ")[0] for text in here["failures"]] == ["exchanged_bytes", "operations in f32"]


def test_other_compilers_are_told(tmp_path):
    file = str(tmp_path / "base.json")
    baseline.save(file, {}, [])
    assert baseline.other_compilers(file) == ""
    Path(file).write_text(json.dumps({"compilers": {"jaxlib": "0.1"}}))
    assert "(then 0.1)" in baseline.other_compilers(file)


def test_what_a_block_costs():
    """From one trip and nine, for 1,024 keys and 128 tokens; a program that failed is told as it is."""
    rows = [
        {"target": "v6e", "step": False, "failures": [], "compile_s": 1.0, "cycles": count}
        | {"program": f"b, {trips} times", "block": {"name": "b", "trips": trips, "tokens": 64, "keys": 512}}
        for trips, count in ((1, 1500), (9, 9500))
    ]
    failed = {"target": "v6e", "step": False, "program": "c", "failures": ["does not compile"], "error": "no"}
    other, block = cycles.per_block([*rows, failed])
    assert other is failed and (block["program"], block["cycles"], block["failures"]) == ("b", 1000 * 2 * 2, [])
    rows[0]["cycles"] = None
    assert cycles.per_block(rows)[0]["failures"] == ["libtpu reports no cycles"]


def test_spills_where_there_were_none_are_a_regression():
    row = ROW | {"spill_bytes": 8, "failures": []}
    baseline.compare([row], [ROW | {"spill_bytes": 0}])
    assert row["failures"] == ["spill_bytes was 0 in the baseline and is 8"]


def test_a_baseline_of_something_else_is_refused(tmp_path):
    file = tmp_path / "base.json"
    baseline.save(str(file), {"model": "a"}, [ROW])
    with pytest.raises(ConfigError, match="model 'b'"):
        baseline.load(str(file), {"model": "b"})
    for content in ([1], {"rows": [], "settings": [1]}):
        file.write_text(json.dumps(content))
        with pytest.raises(ConfigError, match="--save"):
            baseline.load(str(file), {"model": "b"})


def test_a_program_that_is_gone_is_told():
    assert baseline.missing([], [ROW], ["v6e"]) == ["v6e, decode S=1: in the baseline, not checked"]
    assert baseline.missing([ROW], [ROW], ["v6e"]) == baseline.missing([], [ROW], ["v5e"]) == []


def test_the_table_shows_failures_and_what_is_not_known():
    failed = {"target": "v6e", "program": "x", "step": False, "error": "e", "failures": ["e"]}
    text = report.table([ROW | {"hbm_bytes": 2_000_000}, failed])
    assert "FAIL" in text.splitlines()[3] and "50" in text.splitlines()[2]
    assert report.failures([ROW, failed]) == ["v6e, x: e"]


@pytest.mark.parametrize("name", ["v6f", "v6e-3", "sm_90-", "sm_90-3", "cpu-3", "", "v5e-x"])
def test_an_unknown_target_is_refused(name):
    with pytest.raises(ConfigError, match="sm_90"):
        find_target(name) if name != "sm_90-" else find_target("sm_90-0")


def test_several_devices():
    target = find_target("v5e-16")
    assert (target.topology, target.num_devices) == ("v5e:4x4", 16)
    assert find_target("sm_90-4").num_devices == 4


TENSOR, DATA, STAGES = "tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size"


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("v5e-8", {}, [("v5e-8", 8)]),
        ("v5e-8", {DATA: 2, STAGES: 2}, [("v5e-8", 2)]),
        ("v5e-8", {TENSOR: 4, STAGES: 2}, [("v5e-8", 4)]),
        ("v5e", {}, [("v5e", 1), ("v5e-4", 4), ("v5e-8", 8), ("v5e-16", 16)]),
        ("v5e", {TENSOR: 4}, [("v5e-4", 4)]),
        ("sm_90", {DATA: 4}, [("sm_90-4", 1), ("sm_90-8", 2)]),
    ],
)
def test_how_a_model_is_split_over_a_target(name, options, expected):
    found = split_targets(find_target(name), options)
    assert [(target.name, split[TENSOR]) for target, split in found] == expected
    assert all(options.items() <= split.items() and target.num_devices in (1, 2, 4, 8, 16) for target, split in found)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("v5e-8", {TENSOR: 4}, "tensor_parallel_size is 4; allowed: .* of v5e-8, 8; it is 4"),
        ("v5e-8", {TENSOR: 2, DATA: 3}, "data_parallel_size is 3; .* it is 6"),
        ("v6e", {TENSOR: 256}, "of v6e, 1, 4, 8, 16, 32, 64, 128; it is 256"),
    ],
)
def test_sizes_that_a_target_does_not_have_are_refused(name, options, words):
    with pytest.raises(ConfigError, match=words):
        split_targets(find_target(name), options)


def test_a_missing_compiler_names_the_command(monkeypatch):
    monkeypatch.setattr("jaxengine.check.targets.find_spec", lambda name: None)
    said = r"libtpu is missing.; `make check-deps` or `pip install 'jaxengine\[tpu-check\]'"
    with pytest.raises(ConfigError, match=said):
        require_compiler(V6E)
    require_compiler(TARGETS["cpu"])


def test_the_description_of_a_card():
    text = gpu_target_config(TARGETS["sm_100"])
    assert "major: 10 minor: 0 feature_extension: ACCELERATED_FEATURES" in text and "core_count: 148" in text


def test_what_compilers_print():
    log = """ptxas info    : Used 157 registers, used 16 barriers, 1 bytes smem
    0 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
      %4 = call ptr @mosaic_gpu_get_function(ptr %3, ptr @decode_kernel_name, i32 135296, i32 1)
    ptxas info    : Used 62 registers, used 2 barriers"""
    assert mosaic_gpu(log) == {"registers": 157, "spill_bytes": 12, "fast_bytes": 135296}
    assert mosaic_gpu("") == {"registers": None, "spill_bytes": None, "fast_bytes": None}


def test_a_kernel_that_was_made_for_the_memory_plan_is_judged_in_its_step(tmp_path):
    """Mosaic makes a kernel once in a process, so the second log says nothing of it."""
    log = tmp_path / "log"
    compiler: Any = object.__new__(Compiler)
    compiler.request, compiler._figures_of_kernels = SimpleNamespace(log=str(log)), {}
    step: Any = SimpleNamespace(name="mixed T=8")
    other: Any = SimpleNamespace(name="decode S=8")
    log.write_text("ptxas info    : 12 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads\n")
    told = {"registers": None, "spill_bytes": 12, "fast_bytes": None}
    assert compiler._kernel_figures(step, 0) == told
    end = log.stat().st_size
    assert compiler._kernel_figures(other, end) == told | {"spill_bytes": None}
    assert compiler._kernel_figures(step, end) == told
    config = '"used_scoped_memory_configs":[{"memory_space":"1","offset":"1024","size":"4096"}]'
    assert vmem_bytes(config) == 5120 and vmem_bytes("") is None


def test_device_memory_of_a_tpu_program(tmp_path):
    """As libtpu 0.0.52 reports it: by kind of memory, device memory first."""
    assert device_bytes(tmp_path) is None
    report = "Memory Space: default (color=0)\nTotal bytes: 1268643936 (1.18GiB)\n  cumulative_size;\n\n"
    report += "Memory Space: vmem (color=1)\nTotal bytes: 133366272 (127.19MiB)\n"
    (tmp_path / "module_0018.jit_forward.after_optimizations-memory-usage-report.txt").write_text(report)
    assert device_bytes(tmp_path) == 1268643936


@pytest.mark.parametrize(
    ("name", "topology", "host"),
    [
        ("v6e", "v6e:1x1", {"chips_per_host_bounds": (1, 1, 1)}),
        ("v5e", "v5e:1x1", {"chips_per_host_bounds": (1, 1, 1)}),
        ("v6e-4", "v6e:2x2", {}),
        ("v5p", "v5p:2x2x1", {}),
    ],
)
def test_one_chip_is_alone_on_its_host(monkeypatch, name, topology, host):
    """libtpu 0.0.42 refuses it otherwise: the topology does not fill a host of four."""
    asked: list[dict[str, Any]] = []

    def describe(**kwargs):
        asked.append(kwargs)
        return SimpleNamespace(devices=list(range(8)))

    monkeypatch.setattr(topologies, "get_topology_desc", describe)
    assert target_devices(find_target(name)) == list(range(find_target(name).num_devices))
    assert asked == [{"platform": "tpu", "topology_name": topology, **host}]
