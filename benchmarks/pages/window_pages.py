"""How many tokens a KV pool holds if layers have windows and pages behind them are freed, compared with keeping all
pages.

Both pools have the same bytes: those in which 40 sequences fit when every layer keeps every page. Cache groups, the
bytes of a page and the number of pages are the engine's own (jaxengine.models.cache, the memory plan), and sequences
are added to the real scheduler, which admits as many as fit; there is no model and no device. Prompts are chosen so
that all sequences have about the same length when no more are admitted; of a longer one only the given length counts.
`factor` is tokens held with pages freed over tokens held without; `bound` is what it would be if every window began at
a page's first token, and a prompt needed no pages for the tokens that a step computes.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from benchmarks.harness import Option
from benchmarks.recorder import Recorder
from jaxengine.check.model.shapes import SHAPES
from jaxengine.config.base.platforms import PLATFORMS
from jaxengine.config.engine_config import EngineConfig, ResolvedConfig
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.runner.base.memory import MemoryPlan, StageNeeds, plan_memory
from jaxengine.runner.extensions.build import step_programs
from jaxengine.runner.programs.step_programs import StepPrograms
from jaxengine.runner.start.devices import build_split
from jaxengine.scheduler.base.config import SchedulerConfig
from jaxengine.scheduler.base.request import Request
from jaxengine.scheduler.base.token_params import TokenParams
from jaxengine.scheduler.scheduler import Scheduler
from jaxengine.sharding.layout import ONE_DEVICE
from jaxengine.sharding.mesh import make_mesh
from jaxengine.sharding.stages import Stage

MODELS = ("gpt-oss-120b", "gemma-3-27b", "gemma-3-4b", "gemma-2-9b", "mistral-7b-v0.1")
LENGTHS = (8 << 10, 32 << 10, 128 << 10)
PAGE_SIZE, NUM_SEQS = 64, 40
OPTIONS = {"models": Option(MODELS, choices=MODELS, metavar="NAME")}


def programs(model: ModelConfig, *, keep_all: bool) -> tuple[ResolvedConfig, StepPrograms]:
    """Return the resolved config and the uncompiled step programs of an engine on one TPU.

    keep_all: whether layers keep the pages before their windows.
    """
    config = EngineConfig(
        max_model_len=model.max_position_embeddings,
        block_size=PAGE_SIZE,
        max_num_seqs=2048,
        enable_prefix_caching=False,  # prompts are cut from one text
        disable_hybrid_kv_cache_manager=keep_all,
    )
    platform = PLATFORMS["tpu"]
    resolved = config.resolved(model, platform)
    whole = build_split(model, resolved, ONE_DEVICE, Stage(0, model.num_layers))
    return resolved, step_programs(whole, resolved, platform, make_mesh(ONE_DEVICE, jax.devices()[:1]))


def plan(config: ResolvedConfig, steps: StepPrograms, num_bytes: int) -> MemoryPlan:
    """Return the memory plan of an engine that has `num_bytes` bytes for pages and no weights."""
    return plan_memory(
        replace(config, kv_cache_memory_bytes=num_bytes),
        total=2 * num_bytes,
        weights=0,
        needs=StageNeeds(0, 0),
        page_bytes=steps.page_bytes,
        windows=steps.windows,
    )


def fill(config: SchedulerConfig, length: int, expected: int) -> dict[str, int]:
    """Add sequences to a scheduler until it admits no more; return the numbers of running "sequences", "tokens",
    "pages" in use, and "preemptions".

    length: about how many tokens a sequence has at the end; of longer ones only these count. expected: about how many
    sequences run at the end.
    """
    scheduler, params = Scheduler(config), TokenParams(temperature=0.0)
    text, steps = np.arange(length, dtype=np.int32) + 100, -(-length // config.max_num_batched_tokens)
    for index in range(2 * expected):
        # Number of tokens it will have generated when the last prompt has been computed.
        later = steps * max(0, expected - index)
        prompt = text[: max(1, length - later)]
        scheduler.add_request(Request(str(index), prompt, params, config.max_model_len - len(prompt)))
    tokens = np.full((1, config.max_num_seqs), 100, np.int32)
    while scheduler.num_waiting:
        running = scheduler.num_running
        step = scheduler.schedule()
        decodes = sum(batch.num_decode for batch in step.batches)
        if scheduler.num_preemptions or (running == scheduler.num_running == decodes == step.num_rows):
            break
        scheduler.update(step, tokens)
    (rank,) = scheduler.ranks
    return {
        "sequences": scheduler.num_running,
        "tokens": int(np.minimum(rank.slots.num_computed[rank.slots.active], length).sum()),
        "pages": scheduler.num_pages - scheduler.num_free_pages,
        "preemptions": scheduler.num_preemptions,
    }


def bound(groups: Sequence[tuple[int | None, int]], num_layers: int, length: int) -> float:
    """Return how many times more tokens fit if pages before windows are freed: pages of all layers over pages kept.

    groups: (window or None, layers whose keys a page holds) of each cache group. num_layers: of the model. length:
    tokens of a sequence.
    """
    columns = -(-length // PAGE_SIZE)
    kept = sum(columns if window is None else min(columns, -(-window // PAGE_SIZE)) for window, _ in groups)
    return num_layers * columns / (groups[0][1] * kept)


def measure(name: str, lengths: Sequence[int] = LENGTHS, num_seqs: int = NUM_SEQS) -> list[dict[str, Any]]:
    """Return a row for each length: the sequences that a pool holds with all pages kept and with pages before windows
    freed, the ratio of their tokens ("factor"), its `bound`, and how much of that it reaches ("share").

    name: key of SHAPES. num_seqs: sequences that fit with all pages kept. Ratios are rounded.
    """
    rows = []
    for length in lengths:
        # No sequence ends; a length beyond the model's context shows what a pool of such layers would hold.
        model = replace(SHAPES[name], max_position_embeddings=3 * length)
        (all_config, every), (config, steps) = (programs(model, keep_all=keep_all) for keep_all in (True, False))
        places = max(len(group.layers) for group in steps.groups)
        groups = [(group.window, places) for group in steps.groups]
        # One page more for each sequence: what the scheduler leaves to its next token.
        columns = -(-length // PAGE_SIZE) + 1
        num_bytes = num_seqs * columns * every.page_bytes
        most = bound(groups, model.num_layers, length)
        held = []
        for one, of in ((all_config, every), (config, steps)):
            num_pages = plan(one, of, num_bytes).num_pages
            expected = num_seqs if of is every else int(most * num_seqs)
            held.append(fill(one.scheduler_config(num_pages, windows=of.windows), length, expected))
        factor = held[1]["tokens"] / held[0]["tokens"]
        rows.append(
            {
                "model": name,
                "groups": "+".join(str(window or "all") for window, _ in groups),
                "layers a page": places,
                "KiB a token": every.page_bytes / PAGE_SIZE / 1024,
                "length": length,
                "kept sequences": held[0]["sequences"],
                "sequences": held[1]["sequences"],
                "tokens": held[1]["tokens"],
                "factor": round(factor, 3),
                "bound": round(most, 3),
                "share": round(factor / most, 3),
            }
        )
    return rows


def run(args: Namespace, recorder: Recorder) -> None:
    for name in args.models:
        for row in measure(name):
            recorder.add(row)
