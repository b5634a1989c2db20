"""The memory plan beside what is held: every program counts, and what was estimated is enough."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from benchmarks.processes import unused_bytes
from jaxengine import LLM
from jaxengine.runner.base.memory import (
    StageNeeds,
    give_back_zeros,
    heap_bytes,
    host_memory,
    kept_bytes,
    kept_of_step,
    memory_in_use,
    return_free_memory,
)
from jaxengine.runner.executables.cache import ExecutableCache
from tests.tables import each_row


def test_every_loaded_program_counts(make_llm):
    """The code of one is not enough: all buckets, heads and state changes stay loaded."""
    sizes = {"cudagraph_capture_sizes": [1, 8], "prefill_sizes": [32]}
    runner = make_llm(compilation_config=sizes).core.engine.runner
    (stage,) = runner.stages
    num_programs = len(runner.buckets) + len(stage.programs.epilogue_sizes()) + len(stage.programs.state_changes())
    whole = stage.program_bytes
    held = [stage.held(each, None) for each in _programs(stage)]  # remembered by now
    assert len(held) == num_programs and min(held) > 0
    assert whole == sum(held) > 3 * max(held)


@pytest.mark.thorough("half a minute of compiling")
def test_a_program_that_was_loaded_counts_as_when_it_was_compiled(tiny_options, tmp_path):
    """Also where what it held had not been remembered: a loaded program cannot be made into a file again."""
    options = {**tiny_options, "compile_cache_dir": str(tmp_path), "enforce_eager": True}

    def held(**options) -> list[int]:
        runner = LLM(**options).core.engine.runner
        (stage,) = runner.stages
        return [stage.held(program, stage._changes[name]) for name, program in stage.programs.state_changes().items()]

    LLM(**options)
    for file in tmp_path.glob("*.xla"):
        if file.stat().st_size < 200:  # a number
            file.unlink()
    loaded = held(**options)
    assert min(loaded) > 0
    assert loaded == held(**{**options, "compile_cache_dir": ""})


def test_the_estimate_is_enough(make_llm):
    runner = make_llm().core.engine.runner
    (stage,) = runner.stages
    estimated = stage.estimate_needs()
    assert estimated.programs >= stage.program_bytes
    assert estimated.workspace >= 0.98 * stage.workspace_bytes


def test_what_was_compiled_for_the_estimate_is_used(make_llm, monkeypatch):
    """If the pool gets the pages that it probably gets; else it is compiled again."""
    runner = make_llm().core.engine.runner
    (stage,) = runner.stages
    assert runner._likely_pages() is None  # the options fix the pages
    monkeypatch.setattr(runner, "config", replace(runner.config, num_gpu_blocks_override=None, default_seq_tokens=32))
    assert runner._likely_pages() == runner._plan_memory([StageNeeds(1 << 20, 1 << 20)]).num_pages
    bucket, pages = max(runner.buckets), runner.plan.num_pages
    made: list[object] = []
    monkeypatch.setattr(stage, "_forwards", dict(stage._forwards))
    monkeypatch.setattr(stage, "executables", ExecutableCache("", stage.programs.mesh.local_devices))
    found = stage._forwards[bucket]
    monkeypatch.setattr(stage.executables, "_begin_compiling", lambda *_: made.append(runner) or (lambda: found))
    for likely, count in ((pages, 1), (pages + 1, 2)):
        made.clear()
        stage.estimate_needs(likely)
        stage.plan_pool(pages)
        stage.compile_forward(bucket)
        assert len(made) == count


def test_a_pool_takes_memory_as_it_is_used():
    zeros = jnp.zeros((96 << 20) // 4, jnp.float32).block_until_ready()
    assert unused_bytes(zeros) == 0
    give_back_zeros(zeros)
    assert unused_bytes(zeros) > zeros.nbytes - (1 << 20)
    changed = jax.jit(lambda x: x.at[: (32 << 20) // 4].add(1), donate_argnums=0)(zeros).block_until_ready()
    assert (48 << 20) < unused_bytes(changed) < (65 << 20)
    assert float(changed.sum()) == (32 << 20) // 4


def test_the_heap_has_the_blocks_of_a_step_on_the_thread_that_waits(monkeypatch):
    """Which is there with more cores than devices; glibc gives back blocks from 32 MiB on whenever they are free."""
    mib = 1 << 20
    assert [kept_bytes(size * mib, 3 * mib) // mib for size in (8, 34, 35, 50)] == [8, 34, 3, 3]
    assert [kept_bytes(size * mib, 3 * mib, num_blocks=2) // mib for size in (35, 66, 67)] == [35, 66, 3]
    assert [kept_of_step(9, epilogue, blocks) for epilogue in (4, 20) for blocks in (1, 2)] == [9, 11, 20, 24]
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    assert [heap_bytes(24 * mib, devices) // mib for devices in (0, 1, 2)] == [0, 28, 2]


def test_a_plan_on_a_cpu_adds_up_to_what_the_process_held(make_llm):
    runner = make_llm().core.engine.runner
    plan, device = runner.plan, runner.stages[0].programs.mesh.devices.flat[0]
    assert plan.process > 0 and plan.heap == heap_bytes(runner.stages[0].kept_bytes, jax.local_device_count()) > 0
    assert plan.planned == sum((plan.weights, plan.programs, plan.kv_bytes, plan.workspace, plan.process, plan.heap))
    return_free_memory()
    before = memory_in_use(device)
    page = bytearray(64 << 20)
    assert 60 << 20 < memory_in_use(device) - before < 90 << 20
    del page
    assert any(line.split()[0] == "programs" for line in plan.table().splitlines())


def _programs(stage):
    yield from stage.programs.state_changes().values()
    for bucket in stage.programs.packer.buckets:
        yield stage.programs.forward(bucket, stage.params, stage._kv_shapes)
    for name, size in stage.programs.epilogue_sizes():
        yield stage.programs.epilogue(name, size, stage.params)


@each_row(
    ("groups", "limits", "expected"),
    (
        ("0::/pod/app", {"": "max", "pod": "6000", "pod/app": "9000"}, 6000),  # a group that contains the process's
        ("0::/pod/app", {"pod": "7000", "pod/app": "max", "other": "10"}, 7000),
        ("0::/", {"": "5000"}, 5000),
        ("0::/../other", {"": "5000"}, 5000),  # of which a container sees nothing
        ("", {"": "max"}, 8 << 10),
        ("3:cpu,memory:/app\n0::/", {"memory": "9223372036854771712", "memory/app": "4000"}, 4000),  # version 1
        ("", {"memory": "3000"}, 3000),
    ),
)
def test_memory_of_a_host_with_control_groups(groups, limits, expected, tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("host")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemFree: 1 kB\nMemTotal: 8 kB\n")
    if groups:
        (tmp_path / "proc/self/cgroup").write_text(f"{groups}\n")
    for group, limit in limits.items():
        folder = tmp_path / "sys/fs/cgroup" / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ("memory.limit_in_bytes" if group.startswith("memory") else "memory.max")).write_text(f"{limit}\n")
    assert host_memory(tmp_path) == expected
