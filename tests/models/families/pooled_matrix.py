"""Recorded encoders and pooling models through whole engines: the same answers, however prompts are served.

tests/models/families/matrix.py runs it, over the names of tests/fixtures/pooled_prompts.py. The recorded prompts one by
one must have the recorded answers, and together with others, in every mode, those that they have alone.
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from jaxengine import LLM, PoolingParams
from tests.conftest import use_scheduler
from tests.fixtures.pooled_prompts import Pooled, pooled_options, pooled_prompts, write_pooled
from tests.models.families.modes import EQUAL, ROUNDED, SCHEDULED, SEES_ALL, Found, ended, in_modes

NUM_OTHERS, MOST_TOKENS = 20, 19
TOLERANCE = 1e-5
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "block_size": 4,
    "num_gpu_blocks_override": 200,
    "compilation_config": {"cudagraph_capture_sizes": [], "prefill_sizes": []},
    "disable_log_stats": True,
}


class Asked:
    """Prompts with recorded answers, and others."""

    def __init__(self, recorded: list[Pooled]):
        rng = np.random.default_rng(1)
        others = [
            {"prompt_token_ids": rng.integers(6, 60, 1 + each % MOST_TOKENS).tolist()} for each in range(NUM_OTHERS)
        ]
        self.prompts: list[Any] = [each.prompt for each in recorded] + others
        self.params = [PoolingParams(**each.params) for each in recorded]
        self.params += [self.params[each % len(recorded)] for each in range(NUM_OTHERS)]
        self.answers = [each.answer for each in recorded]

    def alone(self, llm: LLM) -> list[np.ndarray]:
        """Return the answers to the prompts, each asked by itself."""
        each = zip(self.prompts, self.params, strict=True)
        return [np.asarray(llm.encode([one], [params], use_tqdm=False)[0].outputs.data) for one, params in each]

    def together(self, llm: LLM) -> list[np.ndarray]:
        """Return the answers to all prompts at once, the recorded ones twice."""
        count = len(self.answers)
        prompts, params = self.prompts + self.prompts[:count], self.params + self.params[:count]
        return [np.asarray(each.outputs.data) for each in llm.encode(prompts, params, use_tqdm=False)]


def error_of(found: list[np.ndarray], wanted: list[np.ndarray]) -> float:
    """The largest difference, of the largest value of an answer if that is above one. found: `wanted`, and its first
    ones once more.
    """
    worst = 0.0
    for one, other in zip(found, itertools.cycle(wanted), strict=False):
        if one.shape != other.shape or not np.isfinite(one).all():
            return np.inf
        worst = max(worst, float(np.abs(one - other).max() / max(1.0, np.abs(other).max())))
    return worst


def verdict(found: list[np.ndarray], wanted: list[np.ndarray]) -> str:
    error = error_of(found, wanted)
    return EQUAL if error <= TOLERANCE else f"differs by {error:.1e}"


def examine_pooled(name: str, cache: str, only: list[str]) -> Found:
    """Serve a checkpoint of POOLED in each mode; return what came out."""
    with tempfile.TemporaryDirectory() as temporary:
        own = pooled_options(name)
        chunk = 2 * own.pop("max_num_batched_tokens", 32)  # where two ranks have whole prompts, they share a step
        model = str(write_pooled(name, Path(temporary) / "model"))

        def options_of(least: int) -> dict[str, Any]:
            sizes = {"max_num_batched_tokens": max(chunk, least)}
            return OPTIONS | {"compile_cache_dir": cache, "model": model} | sizes | own

        asked, rows, llm = Asked(pooled_prompts(name)), dict[str, str](), LLM(**options_of(0))
        architecture = llm.core.inputs.model_config.architecture
        expected = asked.alone(llm)
        error = error_of(expected[: len(asked.answers)], asked.answers)
        rows = {"alone": EQUAL if error <= TOLERANCE else f"differs by {error:.1e}"}
        use_scheduler(llm)
        rows["crowd"] = verdict(asked.together(llm), expected)
        for mode, changes in SCHEDULED.items():
            if not llm.core.inputs.config.enable_chunked_prefill:
                rows[mode] = SEES_ALL
            elif not only or mode in only:
                use_scheduler(llm, **changes)
                rows[mode] = verdict(asked.together(llm), expected)
        rows["alone"] = ended(llm, rows["alone"])
        for mode, each in in_modes(options_of, only):
            if isinstance(each, str):
                rows[mode] = each
                continue
            wanted = asked.alone(each) if mode in ROUNDED else expected
            rows[mode] = ended(each, verdict(asked.together(each), wanted))
        return Found(architecture, error, rows)
