"""What a plain request runs through: as few files and calls as now, and none of what it did not ask for.

The lists may only become shorter. `python -m scripts.request_path` prints both paths in order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from scripts.request_path import ROOT, Event, files, num_calls, steady_step, trace


def files_of(folders: Mapping[str, str]) -> set[str]:
    return {f"jaxengine/{folder}/{name}.py" for folder, names in folders.items() for name in names.split()}


# Files that a greedy request to an engine without any option enters, and those of a decode step of it.
REQUEST = files_of(
    {
        "api": "adapters core fair_lock llm progress",
        "config": "structured_outputs_config",
        "engine": "engine metrics slot_rows stats timeline",
        "engine/extensions": "build",
        "models": "forward_batch",
        "requests": "detokenizer inputs lora options output_processor sampling_params",
        "requests/media": "inputs",
        "runner": "compile_watch model_runner peers stage_runner",
        "runner/executables": "layer_chain",
        "runner/programs": "pending_step step",
        "sampling": "state",
        "scheduler": "batch buckets config packing rank request results scheduler slots token_params",
        "scheduler/pages": "groups page_pool",
        "scheduler/policy": "waiting",
        "tokens": "tokenizer",
    }
)
STEP = files_of(
    {
        "api": "core",
        "engine": "engine metrics slot_rows stats timeline",
        "models": "forward_batch",
        "requests": "output_processor",
        "runner": "compile_watch model_runner peers stage_runner",
        "runner/programs": "pending_step step",
        "scheduler": "batch buckets packing rank results scheduler slots",
        "scheduler/pages": "groups page_pool",
        "scheduler/policy": "waiting",
    }
)
# Calls of that step.
MAX_CALLS = 97

# The engine's core loop, from a request to the device and back.
SPINE = [
    *("jaxengine/api/core.py", "jaxengine/requests/inputs.py", "jaxengine/requests/output_processor.py"),
    *(f"jaxengine/engine/{name}.py" for name in ("engine", "slot_rows", "in_flight", "stats")),
    *(f"scheduler/{name}.py" for name in ("scheduler", "rank", "batch", "packing", "slots", "request", "results")),
    *(f"scheduler/{name}.py" for name in ("config", "buckets", "token_params")),
    *(f"models/{name}.py" for name in ("forward_batch", "layers/decoder", "build", "causal_lm")),
    *(f"jaxengine/runner/{name}.py" for name in ("model_runner", "stage_runner", "memory", "open")),
    *(f"jaxengine/runner/programs/{name}.py" for name in ("step_programs", "step", "device_state", "state_changes")),
    *(f"jaxengine/runner/programs/{name}.py" for name in ("epilogues", "pending_step")),
    *(f"jaxengine/sampling/{name}.py" for name in ("sampler", "state")),
]
# For each optional capability the words that name it, and in how many files of SPINE some line does. The aim is 3.
CAPABILITIES = {
    "drafts": (
        r"draft|propos|guess|is_forced|is_guided|guided|verify_rows|make_verify|VerifyOutput|verifier|verified|widen"
        r"|narrow|history|eagle|streams|is_read",
        8,
    ),
    "adapters": (r"adapter|lora", 3),
    "pictures": (r"media|picture|tower|embeds|encoder|encodes|rope_delta|rope_positions|has_places|sees_places", 5),
    "grammars": (r"mask|grammar|guided|forced", 6),
    "pooling": (r"pool(s|er|ed|ing)\b|POOL(ED)?\b", 8),
    "states": (r"snapshot|state_rows|StateRows|states\b", 10),
    "scores": (r"score|prompt_logprobs", 10),
    "capture": (r"(?i)capture|hidden_states\b", 1),
}


@pytest.fixture(scope="module")
def events(smollm) -> list[Event]:
    return trace(smollm)


def test_a_request_enters_no_more_files(events):
    found = files(events)
    assert len(found) > 20 and not set(found) - REQUEST, "files that a plain request did not enter before"
    assert not REQUEST - set(found), "files that it enters no more: take them off the list"


def test_a_steady_step_enters_no_more_files_and_makes_no_more_calls(events):
    step = steady_step(events)
    found = files(step)
    assert not set(found) - STEP, "files that a plain step did not enter before"
    assert not STEP - set(found), "files that it enters no more: take them off the list"
    assert num_calls(step) == MAX_CALLS, "more than before, or fewer: then lower the number"


def test_no_capability_is_on_the_path_of_a_plain_request(events):
    assert not [path for path in files(events) if "/extensions/" in path and not path.endswith("/build.py")]


def named_in(words: str) -> list[str]:
    """Files of the spine with a line that names a capability."""
    return [path for path in SPINE if re.search(words, (ROOT / path).read_text())]


@pytest.mark.parametrize("name", CAPABILITIES)
def test_the_spine_names_a_capability_in_few_files(name):
    words, most = CAPABILITIES[name]
    found = named_in(words)
    assert 0 < len(found) <= most, found
    assert len(found) == most, "fewer than before: lower the number"


def test_a_named_capability_is_found():
    assert named_in(r"class Rank\b") == ["scheduler/rank.py"] and not named_in("no such words here")
