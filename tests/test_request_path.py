"""What a plain greedy request runs through, and that the spine names no optional capability beyond what stands here.

The lists and numbers only shrink: who makes a path shorter makes them shorter.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.request_path import Paths
from tests.jaxengine.server.conftest import chat_model

__all__ = ["chat_model"]

ROOT = Path(__file__).resolve().parents[1]
NUM_CALLS = 85
STEP = """
    api/core.py engine/engine.py engine/slot_rows.py engine/stats/stats.py engine/stats/timeline.py engine/metrics.py
    models/forward_batch.py
    runner/compile_watch.py runner/model_runner.py runner/stage_runner.py runner/programs/pending_step.py
    scheduler/batches/batch.py scheduler/batches/buckets.py scheduler/batches/packing.py scheduler/batches/results.py
    scheduler/batches/slots.py scheduler/pages/groups.py scheduler/pages/page_pool.py scheduler/rank.py
    scheduler/scheduler.py
"""
REQUEST = f"""
    {STEP}
    api/fair_lock.py api/llm.py engine/extensions/build.py
    requests/inputs.py requests/output/detokenizer.py requests/output/output_processor.py requests/params/options.py
    requests/params/sampling_params.py
    runner/executables/layer_chain.py tokens/tokenizer.py
    scheduler/policy/waiting.py scheduler/base/request.py scheduler/base/token_params.py
"""
SPINE = """
    jaxengine/api/core.py jaxengine/engine/engine.py jaxengine/engine/in_flight.py jaxengine/engine/slot_rows.py
    jaxengine/engine/stats/stats.py jaxengine/requests/inputs.py jaxengine/requests/output/output_processor.py
    jaxengine/runner/base/memory.py jaxengine/runner/model_runner.py jaxengine/runner/start/open.py
    jaxengine/runner/base/device_state.py jaxengine/runner/programs/epilogues.py
    jaxengine/runner/programs/pending_step.py jaxengine/runner/programs/state_changes.py
    jaxengine/runner/programs/step.py jaxengine/runner/programs/step_programs.py jaxengine/runner/stage_runner.py
    jaxengine/sampling/sampler.py jaxengine/sampling/state.py
    models/build.py models/causal_lm.py models/forward_batch.py models/layers/decoder.py
    scheduler/base/config.py scheduler/base/request.py scheduler/base/token_params.py scheduler/batches/batch.py
    scheduler/batches/buckets.py scheduler/batches/packing.py scheduler/batches/results.py scheduler/batches/slots.py
    scheduler/rank.py scheduler/scheduler.py
"""
# Capability -> its words, and the files of the spine that have any of them.
NAMED = {
    "drafts": (
        r"\b(drafts?|proposed|proposer|guesses|eagle)\b|is_forced|is_guided|VerifyOutput",
        "jaxengine/sampling/sampler.py jaxengine/sampling/state.py",
    ),
    "adapters": (
        r"adapter|\blora",
        "jaxengine/requests/inputs.py models/build.py scheduler/base/request.py",
    ),
    "pictures": (
        r"media|pictures?\b|tower|embeds|encoder\b|mrope|rope_delta",
        "jaxengine/requests/inputs.py models/layers/decoder.py scheduler/base/request.py",
    ),
    "structured": (
        r"grammar|\bmasks?\b|token_mask|MASK\b",
        "jaxengine/sampling/sampler.py jaxengine/sampling/state.py scheduler/base/token_params.py",
    ),
    "pooling": (
        r"\bpool(er|ed|ing)\b|POOLED|\.pools\b",
        "jaxengine/requests/inputs.py models/layers/decoder.py",
    ),
    "capture": (
        r"captur|CAPTURE|HIDDEN_STATES|\btaps?\b",
        "scheduler/base/token_params.py",
    ),
    "steering": (
        r"steer",
        "jaxengine/requests/inputs.py scheduler/base/request.py scheduler/base/token_params.py",
    ),
    "states": (
        r"snapshots?\b(?!,)|state_rows\b|StateRows|keeps_states",
        "jaxengine/sampling/sampler.py scheduler/base/config.py scheduler/rank.py",
    ),
    "offload": (
        r"offload|\bswap\b|\btiers?\b",
        "",
    ),
    "kv_transfer": (
        r"kv_transfer|KVTransfer",
        "jaxengine/requests/output/output_processor.py scheduler/base/request.py scheduler/base/token_params.py",
    ),
    "scores": (
        r"prompt_logprobs|prompt_scores|score_prompts",
        "jaxengine/requests/output/output_processor.py scheduler/base/token_params.py",
    ),
}


@pytest.fixture(scope="module")
def traced(chat_model, executables_dir) -> Paths:
    options = {"model": chat_model, "load_format": "dummy", "dtype": "float32", "compile_cache_dir": executables_dir}
    code = f"import json; from scripts.request_path import trace; print(json.dumps(trace(**{options!r})))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    return Paths(*json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(("kind", "named"), [("request", REQUEST), ("step", STEP)])
def test_files_that_are_entered(traced, kind, named):
    entered, expected = set(getattr(traced, kind)), {f"jaxengine/{name}" for name in named.split()}
    assert not entered - expected, f"a plain {kind} enters these as well: {sorted(entered - expected)}"
    # Other processors run layers as one program.
    unused = expected - entered - {"jaxengine/runner/executables/layer_chain.py"}
    assert not unused, f"a plain {kind} does not enter these any more, take them off: {sorted(unused)}"


def test_calls_of_a_decode_step(traced):
    assert traced.num_calls <= NUM_CALLS


def test_capabilities_that_were_not_started_are_not_imported(traced):
    """The runner's scores and structured belong to programs that every engine compiles at start."""
    own = [name for name in traced.modules if ".extensions." in name]
    floors = {
        "jaxengine.engine.extensions.build",
        "jaxengine.runner.extensions.build",
        "jaxengine.runner.extensions.settle",
        "jaxengine.runner.extensions.scores",
        "jaxengine.runner.extensions.structured",
    }
    assert not set(own) - floors, sorted(set(own) - floors)
    assert "jaxengine.models.layers.exact" not in traced.modules


@pytest.mark.parametrize("capability", NAMED)
def test_files_of_the_spine_that_name_a_capability(capability):
    pattern, known = NAMED[capability]
    found = {name for name in SPINE.split() if re.search(pattern, (ROOT / name).read_text())}
    assert found == set(known.split()), f"{capability}: {' '.join(sorted(found))}"


def test_the_loop_is_short():
    assert len((ROOT / "jaxengine/engine/engine.py").read_text().splitlines()) <= 200
