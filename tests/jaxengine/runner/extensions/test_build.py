"""What an engine was not started with is neither imported nor built on its devices."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import TINY_CHECKPOINT

MODELS = TINY_CHECKPOINT.parent
CODE = """
import sys
import jax
import jaxengine.runner.open
from jaxengine.config.engine_config import EngineConfig
from jaxengine.config.platforms import PLATFORMS
from jaxengine.runner.devices import build_split
from jaxengine.runner.extensions.build import step_programs
from jaxengine.models.registry import read_folder
from jaxengine.sharding.mesh import make_mesh
from jaxengine.sharding.stages import Stage

folder, options = sys.argv[1], eval(sys.argv[2])
model = read_folder(folder)
config = EngineConfig.from_options(model=folder, max_model_len=64, skip_tokenizer_init=True, **options)
config = config.resolved(model, PLATFORMS["cpu"], [])
layout = config.mesh_layout(model)
abstract = build_split(model, config, layout, Stage(0, model.num_layers))
programs = step_programs(abstract, config, PLATFORMS["cpu"], make_mesh(layout, jax.devices()[:1]))
here = "jaxengine.runner.extensions."
found = {name.removeprefix(here).split(".")[0] for name in sys.modules if name.startswith(here)} - {"build", "settle"}
print(*sorted(found), "/", *sorted(each.name for each in programs.extensions))
"""


@pytest.mark.parametrize(
    ("name", "options", "more"),
    [
        ("llama", {}, []),
        ("llama", {"enable_lora": True}, ["adapters"]),
        ("llama", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, ["drafts"]),
        ("llama", {"capture_layers": [0, -1]}, ["capture"]),
        ("llama", {"record_steps": "steps"}, ["recording"]),
        ("llama", {"enable_trace_replay": True, "enable_sampling_mass": True}, ["mass", "trace"]),
        ("mixtral", {}, ["experts"]),
        ("qwen3_next", {}, ["experts", "states"]),
    ],
)
def test_only_what_an_engine_was_started_with_is_there(name, options, more):
    command = [sys.executable, "-c", CODE, str(MODELS / name), repr(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    wanted = " ".join(sorted([*more, "scores", "structured"]))
    assert done.stdout.strip() == f"{wanted} / {wanted}"
