"""A fork of an engine's process: one error at once wherever it uses the engine, and the owner's engine goes on."""

from __future__ import annotations

import asyncio
import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from jaxengine import AsyncLLM, SamplingParams
from jaxengine.requests.beam_search import BeamSearchParams
from tests.forked import in_fork

ROOT = Path(__file__).resolve().parents[3]
PROMPT = {"prompt_token_ids": [5, 6, 7]}
SHORT = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
OFFLINE = {
    "generate": lambda llm: llm.generate(PROMPT, SHORT, use_tqdm=False),
    "chat": lambda llm: llm.chat([{"role": "user", "content": "Hi"}], SHORT, use_tqdm=False),
    "beam_search": lambda llm: llm.beam_search(PROMPT, BeamSearchParams(beam_width=2, max_tokens=2)),
    "encode": lambda llm: llm.encode(PROMPT, use_tqdm=False),
    "score": lambda llm: llm.score("a", "b", use_tqdm=False),
    "get_metrics": lambda llm: llm.get_metrics(),
    "get_expert_load": lambda llm: llm.get_expert_load(),
    "reset_prefix_cache": lambda llm: llm.reset_prefix_cache(),
    "reset_mm_cache": lambda llm: llm.reset_mm_cache(),
    "core": lambda llm: llm.core.step(),
}


async def _first(outputs):
    return [output async for output in outputs]


ONLINE = {
    "generate": lambda engine: _first(engine.generate(PROMPT, SHORT)),
    "encode": lambda engine: _first(engine.encode(PROMPT)),
    "stream": lambda engine: _first(engine.stream(PROMPT, SHORT)),
    "abort": lambda engine: engine.abort("one"),
    "check_health": lambda engine: engine.check_health(),
    "utility": lambda engine: engine.utility("status"),
    "list_loras": lambda engine: engine.list_loras(),
}


def refused(said):
    return said.startswith("EngineDeadError: this engine belongs to process") and "'spawn'" in said


def test_every_call_of_a_fork_is_refused_at_once(make_llm):
    llm = make_llm()
    before = llm.generate(PROMPT, SHORT, use_tqdm=False)[0].outputs[0].token_ids
    wrong = {name: said for name, call in OFFLINE.items() if not refused(said := in_fork(lambda: call(llm)))}  # noqa: B023
    assert wrong == {}
    llm._lock._take()  # as held by another thread when the process was forked
    try:
        assert refused(in_fork(llm.get_metrics))
    finally:
        llm._lock.__exit__()
    assert in_fork(llm.shutdown) == "None"  # for `with LLM(...)` and exit handlers
    assert "temperature" in in_fork(llm.get_default_sampling_params)  # plain values serve a fork, too
    assert llm.generate(PROMPT, SHORT, use_tqdm=False)[0].outputs[0].token_ids == before


def test_every_call_of_a_forks_online_engine_is_refused_at_once(tiny_options):
    engine = AsyncLLM(**tiny_options)
    try:
        calls = ONLINE.items()
        wrong = {name: said for name, call in calls if not refused(said := in_fork(lambda: asyncio.run(call(engine))))}  # noqa: B023
        assert wrong == {}
        assert in_fork(lambda: engine.errored) == "True" and not engine.errored
        assert refused(in_fork(engine.get_metrics)) and refused(in_fork(engine.text_spans))
        assert in_fork(engine.shutdown) == "None"
        assert asyncio.run(_first(engine.generate(PROMPT, SHORT)))[-1].finished
        with pytest.raises(TypeError, match="AsyncLLM cannot be pickled"):
            pickle.dumps(engine)
    finally:
        engine.shutdown()


def test_an_engine_is_not_pickled(make_llm):
    for use in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="LLM cannot be pickled or copied"):
            use(make_llm())


EXIT = """
import os, sys, jax
from jaxengine.api.owner import Owner
Owner(has_devices=True)  # and an engine that was deleted has left its devices open
jax.jit(lambda x: x @ x)(jax.numpy.ones((300, 300))).block_until_ready()
if (pid := os.fork()) == 0:
    sys.exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_fork_of_an_engines_process_can_end():
    """With exit handlers and the deletion of modules, as workers of a preloading server end."""
    command = [sys.executable, "-W", "ignore", "-c", EXIT]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.stdout == "3\n", ended.stderr


NO_DEVICES = """
import os
from jaxengine.api.owner import Owner
import jax
opened = []
jax.local_devices = lambda **options: opened.append(options) or []
owner = Owner(has_devices=False)
if (pid := os.fork()) == 0:
    os._exit(len(opened) + 2 * owner.is_here)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_fork_of_a_process_without_devices_opens_none():
    """A TPU has one process at a time, and it is the engine's."""
    command = [sys.executable, "-W", "ignore", "-c", NO_DEVICES]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.stdout == "0\n", ended.stderr
