"""Programs that no model decides are kept for engines of all models: what one of them takes is what it would have
compiled itself.
"""

from __future__ import annotations

from collections import defaultdict

import jax
import pytest

from jaxengine import LLM
from jaxengine.config.base.platforms import PLATFORMS
from jaxengine.config.engine_config import EngineConfig
from jaxengine.models.registry import read_folder
from jaxengine.runner.extensions.build import step_programs
from jaxengine.runner.start.devices import build_split
from jaxengine.sharding.mesh import make_mesh
from jaxengine.sharding.stages import Stage, stages_of
from tests.conftest import TINY_CHECKPOINT, TINY_OPTIONS
from tests.fixtures.drawn_weights import checkpoint

CASES = [
    ("llama", {}),
    ("llama", {"enable_trace_replay": True}),
    ("llama", {"enable_sampling_mass": True}),
    ("qwen3", {"dtype": "bfloat16"}),
    ("mixtral", {}),
]
FURTHER = [
    ("llama", {"max_logprobs": 5}),
    ("llama", {"logprobs_mode": "processed_logprobs"}),
    ("llama", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}),
    ("llama", {"steer": ["residual:*"]}),
    ("qwen3", {"enable_lora": True}),
    ("qwen3_next", {}),
    ("gemma2", {}),
    ("glm4_moe", {"enable_trace_replay": True}),
]


def programs_of(name: str, options: dict, stage: Stage | None = None):
    folder = TINY_CHECKPOINT.with_name(name)
    model = read_folder(folder)
    config = EngineConfig.from_options(model=str(folder), **{**TINY_OPTIONS, "max_model_len": 64, **options})
    config = config.resolved(model, PLATFORMS["cpu"], [])
    layout = config.mesh_layout(model)
    abstract = build_split(model, config, layout, stage or Stage(0, model.num_layers))
    return step_programs(abstract, config, PLATFORMS["cpu"], make_mesh(layout, jax.devices()[:1]))


def shared_of(steps):
    yield steps.state()
    yield from steps.state_changes().values()
    for name, size in steps.epilogue_sizes():
        if not (program := steps.epilogue(name, size, [])).of_model:
            yield program


def test_equal_keys_are_equal_programs(thorough):
    texts, sharers = defaultdict(set), defaultdict(set)
    for case in [*CASES, *(FURTHER if thorough else ())]:
        steps = programs_of(*case)
        for program in shared_of(steps):
            key = steps.shared_description, program.name, str(program.arguments), str(program.results)
            lowered = jax.jit(program.function, donate_argnums=program.donate).lower(*program.arguments)
            texts[key].add(lowered.as_text())
            sharers[key].add(case[0])
    assert {len(found) for found in texts.values()} == {1}
    # Else nothing was compared: a sampler serves several models, and what differs has a key of its own.
    samplers = [found for (_, name, *_), found in sharers.items() if name.startswith("sample ")]
    assert max(map(len, samplers)) >= 3 and len(samplers) >= (6 if thorough else 3)


def test_stages_have_keys_of_their_own():
    """A bundle's keys do not tell the devices of one stage from those of another."""
    count = read_folder(TINY_CHECKPOINT.with_name("gemma2")).num_layers
    stages = [programs_of("arcee_bias", {}, stage) for stage in stages_of([1] * count)]
    assert len({each.shared_description for each in stages}) == count > 2


@pytest.mark.thorough("two engines; the keys that they share are compared above")
def test_another_model_compiles_no_sampler(tmp_path):
    compiled, known = [], {**TINY_OPTIONS, "max_model_len": 64, "compile_cache_dir": str(tmp_path)}
    for name in ("llama", "qwen3"):
        with LLM(**known, model=str(checkpoint(name)), load_format="dummy") as llm:
            compiled.append(llm.core.engine.runner.num_compiled)
    assert compiled[1] <= 4 < 10 < compiled[0], compiled
