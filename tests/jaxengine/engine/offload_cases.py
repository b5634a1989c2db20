"""Workloads for pages outside of the devices; run as a module it prints what engines over several devices found.

    python -m tests.jaxengine.engine.offload_cases JOB

needs four devices (XLA_FLAGS=--xla_force_host_platform_device_count=4). JOB: JSON of options by case.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxengine import LLM, SamplingParams
from jaxengine.requests.params.options import RequestOptions
from jaxengine.scheduler.pages.groups import PageTables

# Bits that are NaN in a pool of this dtype, or as large as a code can be.
NAN = {"uint16": 0x7FC0, "uint8": 0x7F, "int8": 0x7F}


@partial(jax.jit, donate_argnums=0)
def poison(data: jax.Array, rows: jax.Array) -> jax.Array:
    """NaN in these rows of a pool, i32[n]; numbers past its end are dropped."""
    return data.at[rows].set(NAN.get(data.dtype.name, jnp.nan), mode="drop")


def poison_pages(llm: LLM, ranks: list[np.ndarray]) -> None:
    """NaN in these pages of each replica, i32[n], and in what a draft model keeps under their numbers."""
    num_pages = llm.core.runner.plan.num_pages
    stages = llm.core.runner.stages
    more = [each for stage in stages for each in stage.extensions.values() if each.page_shapes(num_pages) is not None]
    holder: Any
    for holder in (*stages, *more):
        size = len(holder.pages.data)
        places = size // len(ranks) // num_pages
        rows = np.full(size, size, np.int32)
        found = [
            ((rank * places + np.arange(places)[:, None]) * num_pages + pages).ravel()
            for rank, pages in enumerate(ranks)
        ]
        joined = np.concatenate(found)
        rows[: len(joined)] = joined
        holder.pages = replace(holder.pages, data=poison(holder.pages.data, rows))


class Poisoned:
    """Engine whose pages are NaN from when they are taken until a step or a stored page fills them, and while nobody
    can find them.
    """

    def __init__(self, llm: LLM):
        self.llm = llm
        self._taken: list[list[int]] = [[] for _ in llm.core.engine.scheduler.ranks]
        poison_pages(llm, [np.empty(0, np.int32)] * len(self._taken))  # compiled here, and not within a step
        execute = type(llm.core.runner).execute

        def poisoned(step):
            if any(self._taken):
                poison_pages(llm, [np.array(sorted(set(pages)), np.int32) for pages in self._taken])
                self._taken = [[] for _ in self._taken]
            return execute(llm.core.runner, step)

        llm.core.runner.execute = poisoned
        for index, rank in enumerate(llm.core.engine.scheduler.ranks):
            for name in ("grow", "grow_by_one"):
                setattr(rank.pages, name, partial(self._take, index, rank.pages, getattr(rank.pages, name)))

    def _take(self, index: int, tables: PageTables, take: Any, *arguments: Any) -> None:
        before = len(tables.deltas)
        take(*arguments)
        for _, _, found in tables.deltas[before:]:
            self._taken[index] += found.tolist()

    def run(
        self, prompts: Sequence[Any], at_once: int = 1, max_tokens: int = 9, loras: Sequence[str | None] = ()
    ) -> list[list[int]]:
        """Tokens of each prompt, some requests at once. prompts: token ids, or what an engine takes otherwise. loras:
        of each prompt the name of an adapter that is loaded; none without any.
        """
        outputs: dict[int, list[int]] = {}
        core = self.llm.core
        for first in range(0, len(prompts), at_once):
            for index in range(first, min(first + at_once, len(prompts))):
                prompt = prompts[index]
                prompt = {"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt
                options = RequestOptions(lora=loras[index]) if loras else None
                params = params_of(index, max_tokens)
                core.add(core.inputs.prepare(prompt, params, request_id=str(index), options=options))
            while core.has_unfinished:
                output: Any
                for output in core.step():
                    if output.finished:
                        outputs[int(output.request_id)] = list(output.outputs[0].token_ids)
                ranks = core.engine.scheduler.ranks
                poison_pages(self.llm, [np.flatnonzero(rank.pool.page_states() == 0) for rank in ranks])
            offload: Any = core.engine.extensions.by_name.get("offload")
            assert offload is None or offload.flush()
        for rank in core.engine.scheduler.ranks:
            rank.pool.check()
        return [outputs[index] for index in range(len(prompts))]


def params_of(index: int, max_tokens: int = 9) -> SamplingParams:
    """How the tokens of a prompt are chosen: every second draws them."""
    return SamplingParams(temperature=0.9 * (index % 2), seed=index, max_tokens=max_tokens, ignore_eos=True)


def prompts_of(count: int, length: int = 37) -> list[list[int]]:
    """Prompts without a common prefix."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 128, length).tolist() for _ in range(count)]


def passes(llm: LLM) -> dict[str, Any]:
    """What three passes over more prompts than a pool holds found: the first computes, the others bring pages back."""
    engine, prompts = Poisoned(llm), prompts_of(8)
    first, *others = [engine.run(prompts, at_once) for at_once in (1, 1, 4)]
    status = llm.core.engine.extensions.by_name["offload"].status()["kv_offload"]
    return {
        "tokens": first,
        "equal": [each == first for each in others],
        "hits": status["hits"],
        "compilations": llm.core.runner.compiles.count,
        "content": llm.core.engine.extensions.by_name["offload"].mover.describe(),
    }


def over_devices(cases: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What a process with four devices found in each case."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [sys.executable, "-m", "tests.jaxengine.engine.offload_cases", json.dumps(cases)],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {found.pop("case"): found for found in map(json.loads, done.stdout.splitlines())}


def main() -> None:
    for case, options in json.loads(sys.argv[1]).items():
        with LLM(**options) as llm:
            print(json.dumps({"case": case, **passes(llm)}), flush=True)


if __name__ == "__main__":
    main()
