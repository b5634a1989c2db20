"""What an engine allocates when it starts, by purpose: counted on the arrays themselves, in a process with two devices.

    python -m tests.jaxengine.plan.start < JOB

prints a JSON line for each case of JOB, a JSON object with the options of each case. Weights are loaded and pools are
made as by an engine; no step is compiled, for none is run.
"""

from __future__ import annotations

import gc
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

from jaxengine.config.engine_config import EngineConfig
from jaxengine.models.lora import declared_pools
from jaxengine.runner.extensions.drafts.drafter import Drafter
from jaxengine.runner.extensions.pictures.section import EncoderPool
from jaxengine.runner.start.devices import open_stages
from jaxengine.runner.start.open import open_resolved

DEVICES = 2


def allocated(cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By case: bytes of one device by purpose of each stage, and of all arrays on all devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    done = subprocess.run(
        [sys.executable, "-m", "tests.jaxengine.plan.start"],
        input=json.dumps(cases),  # all families' options are longer than an argument may be
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {found["case"]: found for found in map(json.loads, done.stdout.splitlines())}


def held(stage: Any) -> dict[str, int]:
    """Bytes of the first device by purpose, of the arrays that a StageRunner has made."""
    pools = {pool.index for pool in declared_pools(stage.programs.model)}
    draft = stage.extensions.get("drafts")
    state = stage._state
    counted = {each.name for each in stage.programs.extensions if each.counts_slots}
    sections = state.slots.sections
    found = {
        "weights": [leaf for index, leaf in enumerate(stage.params) if index not in pools],
        "adapters": [leaf for index, leaf in enumerate(stage.params) if index in pools],
        "pages": stage._kv,
        "slots": state.slots._replace(sections={name: own for name, own in sections.items() if name not in counted}),
        "sampling": (state.tokens, state.sampling),
        **{name: own for name, own in sections.items() if name in counted},
        **({"draft": draft.params, "draft pages": draft._kept} if isinstance(draft, Drafter) else {}),
        **{
            purpose: stage.extensions[each.name].rows
            for each in stage.programs.extensions
            if isinstance(stage.extensions.get(each.name), EncoderPool)
            for purpose in each.allocated()
        },
    }
    sizes = {
        purpose: sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(own))
        for purpose, own in found.items()
    }
    return {purpose: size for purpose, size in sizes.items() if size}


def _on_all_devices() -> int:
    gc.collect()
    shapes = [(array.sharding.shard_shape(array.shape), array) for array in jax.live_arrays()]
    return sum(math.prod(shape) * array.dtype.itemsize * len(array.sharding.device_set) for shape, array in shapes)


def main() -> None:
    for case, options in json.load(sys.stdin).items():
        before = _on_all_devices()
        opened = open_resolved(EngineConfig.from_options(**options))
        stages = open_stages(*opened, progress=lambda done, total, what: None)
        for stage in stages:
            stage.plan_pool(opened.config.num_gpu_blocks_override)
            stage.allocate()
        found: dict[str, Any] = {"all": _on_all_devices() - before}  # before the parts of arrays become arrays, too
        found["stages"] = [held(stage) for stage in stages]
        print(json.dumps({"case": case, **found}), flush=True)
        del stages, stage


if __name__ == "__main__":
    main()
