"""The memory plan beside what is held: every program counts, and what was foreseen is enough."""

from __future__ import annotations

import pytest

from jaxengine import LLM
from jaxengine.runner.base.memory import memory_in_use, return_free_memory


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


def test_what_is_foreseen_is_enough(make_llm):
    runner = make_llm().core.engine.runner
    (stage,) = runner.stages
    foreseen = stage.estimate_needs()
    assert foreseen.programs >= stage.program_bytes
    assert foreseen.workspace >= 0.98 * stage.workspace_bytes


def test_a_plan_on_a_cpu_adds_up_to_what_the_process_held(make_llm):
    runner = make_llm().core.engine.runner
    plan, device = runner.plan, runner.stages[0].programs.mesh.devices.flat[0]
    assert plan.process > 0 and plan.planned == sum(
        (plan.weights, plan.programs, plan.kv_bytes, plan.workspace, plan.process)
    )
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
