"""What an engine was not started with, other models' families included, is neither imported nor built."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.conftest import TINY_CHECKPOINT

MODELS = TINY_CHECKPOINT.parent
# Each case in a process of its own, which has imported as much as the first one: what all start with.
CODE = """
import json, os, sys
import jax
import jaxengine.runner.start.open
from jaxengine.config.engine_config import EngineConfig
from jaxengine.config.base.platforms import PLATFORMS
from jaxengine.runner.start.devices import build_split
from jaxengine.runner.extensions.build import step_programs
from jaxengine.models.registry import read_folder
from jaxengine.sharding.mesh import make_mesh
from jaxengine.sharding.stages import Stage

def show(folder, options):
    model = read_folder(folder)
    config = EngineConfig.from_options(model=folder, max_model_len=64, skip_tokenizer_init=True, **options)
    config = config.resolved(model, PLATFORMS["cpu"], [])
    layout = config.mesh_layout(model)
    abstract = build_split(model, config, layout, Stage(0, model.num_layers))
    programs = step_programs(abstract, config, PLATFORMS["cpu"], make_mesh(layout, jax.devices()[:1]))
    here = "jaxengine.runner.extensions."
    found = imported("jaxengine.runner.extensions.") - {"build", "settle"}
    families = imported("jaxengine.models.families.")
    print(*sorted(found), "/", *sorted(each.name for each in programs.extensions), "/", *sorted(families), flush=True)

def imported(package):
    return {name.removeprefix(package).split(".")[0] for name in sys.modules if name.startswith(package)}

for folder, options in json.loads(sys.argv[1]):
    if not (child := os.fork()):
        show(folder, options)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""
CASES = [
    ("llama", {}, []),
    ("llama", {"enable_lora": True}, ["adapters"]),
    ("llama", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, ["drafts"]),
    ("llama", {"capture_layers": [0, -1]}, ["capture"]),
    ("llama", {"capture": ["mlp_output:1"], "steer": ["residual:*"]}, ["capture", "steering"]),
    ("llama", {"record_steps": "steps"}, ["recording"]),
    ("llama", {"enable_trace_replay": True, "enable_sampling_mass": True}, ["mass", "trace"]),
    ("mixtral", {}, ["experts"]),
    ("qwen3_next", {}, ["experts", "states"]),
]
# A family is imported with those that it is made of. Those of EAGLE-3's heads are Llama's.
FAMILIES = {"llama": "llama", "mixtral": "llama mixtral", "qwen3_next": "llama qwen2 qwen2_moe qwen3_moe qwen3_next"}


def test_only_what_an_engine_was_started_with_is_there():
    cases = json.dumps([(str(MODELS / name), options) for name, options, _ in CASES])
    done = subprocess.run([sys.executable, "-c", CODE, cases], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    wanted = [(" ".join(sorted([*more, "scores", "structured"])), FAMILIES[name]) for name, _, more in CASES]
    assert done.stdout.splitlines() == [f"{extensions} / {extensions} / {families}" for extensions, families in wanted]
