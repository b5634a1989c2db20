"""Every recorded checkpoint through whole engines: what transformers says, however requests are served.

    python -m tests.models.families.matrix [NAME ...] [--only MODE ...] [--fast-compile] [--json FILE]

First the logits, of whole prompts of text and in chunks: the largest difference, of the largest logit. With `--only
logits` nothing else. Then engines, of models that see or hear with their towers, and with the pictures and sounds of
tests/fixtures/recorded_prompts.py in their prompts. Encoders and pooling models, whose names have the fixture's in
front (encoders/bert, tests/fixtures/pooled_prompts.py), are examined by pooled_matrix.py. No NAME: all of them.

The first engine serves the recorded prompts one by one, greedily, whose tokens must be those that transformers goes on
with, and twenty others, greedy and seeded, of which some begin as the recorded ones do. All other modes must give the
tokens of this one: a crowd in pools so small that requests are preempted, the same again with prefix hits, chunks of 5,
16 and 512 tokens, and two devices by each kind of parallelism that splits the model; a tower that cannot be split is
whole on each. What differs by the scheduler alone is served by one engine. With matrices of the layers rounded to int8
and to e4m3, the tokens of a crowd are those of the same engine one by one. It forces eight devices on the CPU.

A refusal counts as "not split" where it is of what the mode asks for and says why the model cannot be split so; any
other fails the row. Results are added to those that the JSON file has (benchmarks/results/families.json is kept); the
exit status is 1 when a token differs or a row failed. `--fast-compile` compiles as tests do (tests/fast_compile.py), in
half the time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import numpy as np

from jaxengine import LLM, SamplingParams
from jaxengine.media.open import open_processor
from jaxengine.models.build import Build
from jaxengine.models.cache import paged_groups
from jaxengine.models.registry import build_model, read_folder
from jaxengine.scheduler.pages.groups import most_pages
from jaxengine.tokens.tokenizer import Tokenizer
from tests.conftest import use_scheduler
from tests.fast_compile import fast_compile
from tests.fixtures.drawn_weights import FOLDER
from tests.fixtures.pooled_prompts import POOLED
from tests.fixtures.recorded_prompts import WITH_MEDIA, Recorded, least_options, recorded_prompts, write_whole
from tests.models.conftest import PagedRun, load_recorded
from tests.models.families.modes import (
    EQUAL,
    FIRST,
    MODES,
    NOTHING,
    POOLS,
    ROUNDED,
    SCHEDULED,
    UNCUT,
    Found,
    ended,
    in_modes,
    is_as_it_should_be,
)
from tests.models.families.pooled_matrix import examine_pooled

NUM_OTHERS = 20
PAGE_SIZE = 4
PREEMPT_AFTER = 6  # steps
TOLERANCE = 1e-4


def options(length: int, windows: list[int | None], chunk: int = 32, *, requests: float = 1) -> dict[str, Any]:
    """Room for one request of any length, or several, in every cache group, and little more."""
    return {
        "dtype": "float32",
        "max_model_len": length,
        "max_num_seqs": 8,
        "max_num_batched_tokens": chunk,
        "block_size": PAGE_SIZE,
        "num_gpu_blocks_override": pages_for(length, windows, chunk, requests),
        "compilation_config": {"cudagraph_capture_sizes": [8], "prefill_sizes": [chunk]},
        "disable_log_stats": True,
    }


def pages_for(length: int, windows: list[int | None], chunk: int, requests: float) -> int:
    """Pages of so many requests, and a few more."""
    return int(requests * most_pages(length, windows, page_size=PAGE_SIZE, chunk=chunk)) + 4


class Workload:
    """Prompts with the tokens that are known to follow greedily, then others, of which some begin as the first do."""

    def __init__(self, recorded: list[Recorded], others: list[dict[str, Any]], longest: int):
        """others: prompts of unknown answers. longest: tokens of the longest of all prompts, with those for media."""
        self.greedy = [each.answer for each in recorded]
        self.prompts = [each.prompt for each in recorded] + others
        self.params = [self._params(max(1, len(tokens))) for tokens in self.greedy]
        for index in range(len(others)):
            self.params.append(self._params(12, temperature=0.9 * (index % 2), seed=index))
        self.longest = longest + max(params.max_tokens or 0 for params in self.params)

    @classmethod
    def of_tokens(cls, recorded: list[Recorded], length: int, vocab_size: int) -> Workload:
        """With random token ids, at most `length` of them with their answers."""
        rng, most, others = np.random.default_rng(1), length - 13, []
        for index in range(NUM_OTHERS):
            own = rng.integers(0, vocab_size, int(rng.integers(1, 24))).tolist()
            shared = recorded[0].token_ids[:20] if index % 3 == 0 else []
            others.append({"prompt_token_ids": (shared + own)[:most]})
        longest = max(len(ids) for ids in (*(each["prompt_token_ids"] for each in others), recorded[0].token_ids))
        return cls(recorded, others, max(longest, len(recorded[1].token_ids)))

    @classmethod
    def of_media(cls, recorded: list[Recorded]) -> Workload:
        """With the recorded texts or token ids, which then go on, and their pictures and sounds."""
        others: list[dict[str, Any]] = []
        for index in range(NUM_OTHERS):
            prompt, times = recorded[index % len(recorded)].prompt, index // len(recorded)
            ids = prompt.get("prompt_token_ids")
            more = (
                {"prompt": prompt["prompt"] + " w7" * times} if ids is None else {"prompt_token_ids": ids + [7] * times}
            )
            others.append({**prompt, **more})
        return cls(recorded, others, max(len(each.token_ids) for each in recorded) + 3 * times)

    @staticmethod
    def _params(count: int, temperature: float = 0.0, seed: int | None = None) -> SamplingParams:
        return SamplingParams(temperature=temperature, seed=seed, max_tokens=count, ignore_eos=True, detokenize=False)

    def run(self, llm: LLM, *, alone: bool = False) -> list[list[int]]:
        given: Any = self.prompts
        if alone:
            done = [
                llm.generate([each], [params], use_tqdm=False)[0]
                for each, params in zip(given, self.params, strict=True)
            ]
        else:
            done = llm.generate(given, self.params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in done]

    def wrong(self, tokens: list[list[int]]) -> list[int]:
        """Prompts that went on otherwise than is known."""
        return [
            index
            for index, expected in enumerate(self.greedy)
            if expected and tokens[index][: len(expected)] != expected
        ]


def logits_error(name: str) -> float:
    """The largest difference to the recorded logits, of the largest of them: whole prompts, chunks, single tokens."""
    case, worst = load_recorded(name), 0.0
    for prompt, golden in zip(case.prompts, case.logits, strict=True):
        num_tokens, cut = -(-len(prompt) // 40) * 40, max(1, len(prompt) // 3)
        whole = PagedRun(case.model).step({"a": prompt}, num_tokens=num_tokens)["a"]
        run, parts = PagedRun(case.model), [prompt[:cut], prompt[cut:-4], *np.split(prompt[-4:], 4)]
        pieces = np.concatenate([run.step({"a": part}, num_tokens=num_tokens)["a"] for part in parts])
        worst = max(worst, *(float(np.abs(each - golden).max() / np.abs(golden).max()) for each in (whole, pieces)))
    return worst


def examine(name: str, cache: str, only: list[str]) -> Found:
    """Serve a recorded checkpoint in each mode; return what came out."""
    # Of those that hear, and of those that attend to what a tower makes, no logits of texts are recorded.
    error = logits_error(name) if (FOLDER / name / "golden.npz").exists() else None
    architecture = read_folder(FOLDER / name).architecture
    if only == ["logits"]:
        return Found(architecture, error, {})
    with tempfile.TemporaryDirectory() as temporary:
        model = write_whole(name, Path(temporary))
        config, more = read_folder(model), dict[str, Any](least_options(name), compile_cache_dir=cache)
        length = min(256, config.max_position_embeddings)
        if name in WITH_MEDIA:
            processor = open_processor(model, config, tokenizer=Tokenizer.from_hf_folder(model))
            workload = Workload.of_media([*recorded_prompts(name, processor.placeholder).values()])
        else:
            recorded = [*recorded_prompts(name, str).values()]
            workload = Workload.of_tokens(recorded, length, config.vocab_size)
            more["skip_tokenizer_init"] = True
            if config.tower is not None and not config.tower.crosses:  # its processor has no settings here
                more["language_model_only"] = True
        return Found(architecture, error, serve(model, workload, length, more, only))


def serve(model: Path, workload: Workload, length: int, more: dict[str, Any], only: list[str]) -> dict[str, str]:
    """Serve a workload in each mode; return what came out (Found.modes). more: options of all engines."""
    config, shared = read_folder(model), {"model": str(model), **more}
    if config.keeps_states:
        shared["num_state_snapshots"] = 24
    # Some texts go on, and with stages half of a step must have room.
    chunk = max(32, 2 * shared.pop("max_num_batched_tokens", 0) + 16)
    model_groups = build_model(config, Build("float32")).cache_groups(PAGE_SIZE, "float32")
    windows = [group.window for group in paged_groups(model_groups)]
    small = [pages_for(length, windows, chunk, 1)]
    small += [pages_for(min(length, workload.longest + 1), windows, chunk, count) for count in POOLS]
    first = LLM(**options(length, windows, chunk, requests=max(POOLS)), **shared)
    expected = workload.run(first, alone=True)
    rows = {"alone": _verdict(workload.wrong(expected)) if any(workload.greedy) else FIRST}
    if not only or "preempted" in only:
        rows |= _crowded(first, workload, expected, small)
        if rows["preempted"] == NOTHING:
            rows["preempted"] = _verdict(_differing(_interrupted(first, workload), expected))
    for mode, changes in SCHEDULED.items():
        if first.core.engine.runner.config.whole_pictures:
            rows[mode] = UNCUT
        elif not only or mode in only:
            use_scheduler(first, num_pages=small[0], **changes)
            rows[mode] = _verdict(_differing(workload.run(first), expected))
    rows["alone"] = ended(first, rows["alone"])
    for mode, llm in in_modes(lambda least: options(length, windows, max(chunk, least)) | shared, only):
        if isinstance(llm, str):
            rows[mode] = llm
            continue
        wanted = expected
        if mode in ROUNDED:
            wanted = workload.run(llm, alone=True)
            use_scheduler(llm)  # without the prefixes of these
        rows[mode] = ended(llm, _verdict(_differing(workload.run(llm), wanted)))
    return rows


def _crowded(llm: LLM, workload: Workload, expected: list[list[int]], pools: list[int]) -> dict[str, str]:
    """The workload in small pools, and once more with what is left there of the first time, until requests have been
    preempted and prefixes found."""
    rows: dict[str, str] = {}
    for num_pages in pools:
        scheduler = use_scheduler(llm, num_pages=num_pages)
        found = {"preempted": _verdict(_differing(workload.run(llm), expected))}
        if found["preempted"] == EQUAL and not scheduler.num_preemptions:
            found["preempted"] = NOTHING
        again, cached = _verdict(_differing(workload.run(llm), expected)), scheduler.config.enable_prefix_caching
        if again == EQUAL and cached and not scheduler.num_prefix_hits:
            again = NOTHING
        found["prefix hits"] = again if cached else f"not cached, {again}"
        # What is wrong in any pool stays.
        for mode, each in found.items():
            if rows.get(mode, NOTHING) == NOTHING or not each.endswith((NOTHING, EQUAL)):
                rows[mode] = each
        if NOTHING not in rows.values():
            break
    return rows


def _interrupted(llm: LLM, workload: Workload) -> list[list[int]]:
    """Return the tokens that follow the prompts when everything that runs is preempted again and again, each time a
    step later: for models whose windows give back what they take, or of which few requests run at once, so that no pool
    is too small.
    """
    scheduler, engine = use_scheduler(llm), llm.core.engine
    schedule, most = scheduler.schedule, engine._max_in_flight
    left = pause = PREEMPT_AFTER

    def preempting(*args: Any, **kwargs: Any) -> Any:
        nonlocal left, pause
        left -= 1
        if left < 0:
            scheduler.preempt_all()
            left = pause = pause + 1
        return schedule(*args, **kwargs)

    scheduler.schedule, engine._max_in_flight = preempting, 1  # no step is in flight when another is scheduled
    try:
        return workload.run(llm)
    finally:
        scheduler.schedule, engine._max_in_flight = schedule, most


def _differing(found: list[list[int]], expected: list[list[int]]) -> list[int]:
    return [index for index, (one, other) in enumerate(zip(found, expected, strict=True)) if one != other]


def _verdict(wrong: list[int]) -> str:
    return f"requests {wrong} differ" if wrong else EQUAL


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--only", nargs="+", default=[], choices=["logits", "preempted", *SCHEDULED, *MODES, *ROUNDED])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--executables", default=str(Path(".cache") / "executables"))
    parser.add_argument("--fast-compile", action="store_true")
    args = parser.parse_args()
    with fast_compile() if args.fast_compile else contextlib.nullcontext():
        return int(_run(args))


def _run(args: argparse.Namespace) -> bool:
    """Whether anything was not as it should be."""
    recorded = {path.parent.name for path in FOLDER.glob("*/golden.npz")} | {*WITH_MEDIA}
    bad = False
    for name in args.names or (*sorted(recorded), *POOLED):
        try:
            found = (examine_pooled if name in POOLED else examine)(name, args.executables, args.only)
        except Exception:  # of one checkpoint: the others are examined all the same
            traceback.print_exc()
            bad = True
            continue
        bad |= found.error is not None and found.error > TOLERANCE
        bad |= not all(map(is_as_it_should_be, found.modes.values()))
        shown = [f"error {found.error:.1e}"] if found.error is not None else []
        print(f"{name}: {', '.join(shown + [f'{mode} {each}' for mode, each in found.modes.items()])}", flush=True)
        if args.json:
            known = json.loads(args.json.read_text()) if args.json.exists() else {}
            row = known.setdefault(name, {"modes": {}})
            row["architecture"] = found.architecture
            row["modes"] |= found.modes
            if found.error is not None:
                row["error"] = float(f"{found.error:.1e}")
            args.json.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
    return bad


if __name__ == "__main__":
    sys.exit(main())
