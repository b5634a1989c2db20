"""Cost of rounding steps up to compiled shapes: padding on a chat-like mix of lengths, by grid of shapes, against the
time to compile the grid.

Requests arrive at random at three loads and run through the real scheduler with a model that costs nothing; lengths are
log-normal around the averages of the ShareGPT trace (Kwon et al. 2023, section 6.1: 161 prompt and 338 output tokens).
The scheduler does not know the grid, so one run serves all of them. `lost` is time and not tokens: how much longer an
8B-shaped step takes with its padding than without, by a roofline of the platform (weights read once a step, a product
for every token, a pass over the logits of every row). Empty rows of a decode step that waits for the weights anyway
cost next to nothing, padding of a full prefill step its whole share. The time to compile a grid follows from the mean
times in which `jaxengine check` compiled the steps of an 8B model (`--checks`, for a GPU and a TPU).
"""

from __future__ import annotations

import itertools
import json
import statistics
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import RESULTS, Option
from benchmarks.recorder import Recorder
from jaxengine.config.base.platforms import PLATFORMS, Platform
from jaxengine.scheduler.base.config import SchedulerConfig
from jaxengine.scheduler.base.request import Request
from jaxengine.scheduler.base.token_params import TokenParams
from jaxengine.scheduler.batches.buckets import Buckets
from jaxengine.scheduler.scheduler import Scheduler

MEAN_PROMPT, MEAN_OUTPUT = 161, 338
MAX_MODEL_LEN = 4096
# Requests running on average, as shares of max_num_seqs; the last one is more than there is room for.
LOADS = (0.03, 0.3, 1.2)
# Bytes read for the logits of one row while sampling: float32, written once and read about three times.
LOGIT_BYTES = 128_256 * 4 * 4


@dataclass(frozen=True)
class Roofline:
    """Speed of an 8B model in bfloat16 on one device, at rates that are reached in practice.

    Attributes:
      bytes_per_s, flops_per_s: bytes and operations a second.
      weight_bytes: bytes of all weights.
    """

    bytes_per_s: float
    flops_per_s: float
    weight_bytes: float = 16.1e9

    def step_s(self, num_tokens: np.ndarray, num_seqs: np.ndarray) -> np.ndarray:
        """Return the seconds f64[n] of steps with these numbers of tokens and sequences, both [n]: the longer of
        reading the weights and multiplying the tokens by them, and the bytes of the sequences' logits.

        Attention is left out, because padding does not slow it.
        """
        products = self.weight_bytes * num_tokens / self.flops_per_s  # 2 operations a weight, 2 bytes a weight
        return np.maximum(self.weight_bytes / self.bytes_per_s, products) + LOGIT_BYTES * num_seqs / self.bytes_per_s


CHECKS = tuple(str(RESULTS / f"check_llama-3.1-8b_{target}.json") for target in ("sm_90", "v6e"))
# H200 and v6e by their data sheets, at 80 % of the bandwidth and 65 % of the products.
ROOFLINES = {"gpu": Roofline(0.8 * 4.8e12, 0.65 * 989e12), "tpu": Roofline(0.8 * 1.64e12, 0.65 * 918e12)}


OPTIONS = {
    "steps": Option(3000, "measured steps at each load"),
    "checks": Option(CHECKS, "tables of a GPU and of a TPU that `jaxengine check --json` wrote", metavar="FILE"),
    "tolerance": Option(1.0, "percent of time a smaller grid may lose"),
}


def run(args: Namespace, recorder: Recorder) -> None:
    """Evaluate every grid of both platforms; add the rows, note the recommended grid of each platform and print it."""
    for (name, roofline), check in zip(ROOFLINES.items(), args.checks, strict=True):
        platform, compile_s = PLATFORMS[name], compile_seconds(check)
        steps = [simulate(platform, load, args.steps) for load in LOADS]
        rows = [
            {"platform": name, "grid": grid, **evaluate(platform, *sizes, steps, roofline, compile_s)}
            for grid, sizes in grids(platform).items()
        ]
        best = recommend(rows, args.tolerance)
        for row in rows:
            recorder.add(row, quiet=True)
        decode, mixed = grids(platform)[best["grid"]]
        told = {"recommended": best["grid"], "decode_sizes": decode, "mixed_sizes": mixed}
        recorder.notes[name] = told | {"compile_seconds": dict(zip(("decode", "mixed"), compile_s, strict=True))}
        sizes = f"max_num_seqs {platform.max_num_seqs}, max_num_batched_tokens {platform.max_num_batched_tokens}"
        print(f"{name}, {sizes}: " + ", ".join(f"{key} {value}" for key, value in told.items()), flush=True)


def compile_seconds(check: str) -> tuple[float, float]:
    """Return the mean compile seconds (of a decode step, of a mixed step) from a table that `jaxengine check --json`
    wrote.

    check: path of the file. Both are rounded to a digit.
    """
    rows = [row for row in json.loads(Path(check).read_text())["rows"] if row["step"]]
    kinds = ([row["compile_s"] for row in rows if row["program"].startswith(kind)] for kind in ("decode", "mixed"))
    decode, mixed = (round(statistics.fmean(seconds), 1) for seconds in kinds)
    return decode, mixed


def grids(platform: Platform) -> dict[str, tuple[list[int], list[int]]]:
    """Return (decode sizes, mixed sizes) of each grid, by name: the platform's "defaults", and every pair of a series
    for decodes and one for mixed steps, whose names say how sizes grow ("x2", "every 16", "one" for the largest alone).

    The largest size of either kind is left out, because it is always compiled.
    """
    seqs, tokens = platform.max_num_seqs, platform.max_num_batched_tokens

    def powers(base: float, first: int, limit: int) -> list[int]:
        sizes = (round(first * base**exponent) for exponent in itertools.count())
        return list(itertools.takewhile(lambda size: size < limit, sizes))

    decodes = {
        "x2": powers(2, 1, seqs),
        "1, x2 from 8": [1, *powers(2, 8, seqs)],
        "x4": powers(4, 1, seqs),
        "one": [],
        "every 16": [1, 2, 4, 8, *range(16, seqs, 16)],
    }
    mixeds = {
        "x2": powers(2, 16, tokens),
        "x2 from 128": powers(2, 128, tokens),
        "128s to 1024, x2": [*range(128, 1024, 128), *powers(2, 1024, tokens)],
        "64s to 768, half steps": [
            128,
            *range(192, 768, 64),
            768,
            *sorted(powers(2, 1024, tokens) + powers(2, 1536, tokens)),
        ],
        "x1.5 from 128": powers(1.5, 128, tokens),
        "x4": powers(4, 32, tokens),
        "one": [],
    }
    found = {"defaults": ([*platform.decode_sizes], [*platform.prefill_sizes])}
    for (decode_name, decode), (mixed_name, mixed) in itertools.product(decodes.items(), mixeds.items()):
        found[f"decode {decode_name}, mixed {mixed_name}"] = (decode, mixed)
    return {
        name: ([size for size in decode if size < seqs], [size for size in mixed if size < tokens])
        for name, (decode, mixed) in found.items()
    }


def simulate(platform: Platform, load: float, num_steps: int, seed: int = 0) -> np.ndarray:
    """Run the scheduler for `num_steps` steps, after a warm-up that fills the engine, on requests of random lengths
    that arrive at random.

    Returns (tokens, sequences) of each step that was not empty, i64[n, 2]. load: rate of arrivals as a share of the
    engine's capacity. A request that finds a queue of twice max_num_seqs is left out.
    """
    generator = np.random.default_rng(seed)
    seqs = platform.max_num_seqs
    scheduler = Scheduler(
        SchedulerConfig(
            num_pages=seqs * (MAX_MODEL_LEN // platform.page_size),
            page_size=platform.page_size,
            max_num_seqs=seqs,
            max_num_batched_tokens=platform.max_num_batched_tokens,
            max_model_len=MAX_MODEL_LEN,
            enable_prefix_caching=False,
        )
    )
    params = TokenParams(temperature=0.0)
    # A request runs about as many steps as it has outputs.
    arrivals = generator.poisson(load * seqs / MEAN_OUTPUT, num_steps + 2 * MEAN_OUTPUT)
    number, seen = itertools.count(), []
    for step, arrived in enumerate(arrivals):
        # A queue longer than for two steps changes nothing but memory.
        for _ in range(min(int(arrived), max(0, 2 * seqs - scheduler.num_waiting))):
            prompt, output = (_length(generator, mean) for mean in (MEAN_PROMPT, MEAN_OUTPUT))
            scheduler.add_request(
                Request(
                    request_id=str(next(number)),
                    prompt_token_ids=np.zeros(prompt, np.int32),
                    params=params,
                    max_tokens=output,
                    stop_token_ids=(),
                )
            )
        batch = scheduler.schedule(0.0)
        if not batch.num_rows:
            continue
        if step >= 2 * MEAN_OUTPUT:
            seen.append((batch.num_tokens, batch.num_rows))
        scheduler.update(batch, np.ones((1, batch.num_rows), np.int32))
    return np.array(seen, np.int64).reshape(-1, 2)


def _length(generator: np.random.Generator, mean: int) -> int:
    """Return a random log-normal length with sigma 1 and this mean, clipped to 4 and to half of MAX_MODEL_LEN,
    exclusive.
    """
    return int(np.clip(generator.lognormal(np.log(mean) - 0.5, 1.0), 4, MAX_MODEL_LEN // 2 - 1))


def evaluate(
    platform: Platform,
    decode: Sequence[int],
    mixed: Sequence[int],
    loads: list[np.ndarray],
    roofline: Roofline,
    compile_s: tuple[float, float],
) -> dict[str, Any]:
    """Return the row of a grid: padding in percent of the tokens of decode and mixed steps, percent of time lost to
    padding at each load, according to `roofline`, its number of programs and the minutes to compile them.

    decode, mixed: sizes of the grid. loads: steps of each load, as `simulate` returns them. compile_s: as
    `compile_seconds` returns it. Numbers are rounded.
    """
    buckets = Buckets(platform.max_num_seqs, platform.max_num_batched_tokens, decode, mixed)
    lost, needed, padded = [], np.zeros(2), np.zeros(2)
    for steps in loads:
        shapes = [buckets.round_up(int(tokens), int(seqs)) for tokens, seqs in steps]
        sizes = np.array([(shape.num_tokens, shape.num_seqs) for shape in shapes]).reshape(-1, 2)
        for kind, rows in enumerate((steps[:, 0] == steps[:, 1], steps[:, 0] > steps[:, 1])):
            needed[kind] += steps[rows, 0].sum()
            padded[kind] += sizes[rows, 0].sum()
        ideal, real = (roofline.step_s(*array.T).sum() for array in (steps, sizes))
        lost.append(100 * (real / ideal - 1))
    seconds = sum(compile_s[0 if bucket.decode_only else 1] for bucket in buckets)
    waste = 100 * (padded - needed) / np.maximum(needed, 1)
    return {
        "programs": len(buckets),
        "minutes": round(seconds / 60, 1),
        "decode_padding": round(float(waste[0]), 1),
        "mixed_padding": round(float(waste[1]), 1),
        **{f"lost_{name}": round(float(value), 2) for name, value in zip(("low", "middle", "full"), lost, strict=True)},
    }


def recommend(rows: list[dict[str, Any]], tolerance: float) -> dict[str, Any]:
    """Return the row with the fewest programs among those that lose at most `tolerance` percentage points more than the
    best grid at every load.

    Of rows with equally many programs it is the one that loses least.
    """
    names = ("lost_low", "lost_middle", "lost_full")
    best = {name: min(row[name] for row in rows) for name in names}
    good = [row for row in rows if all(row[name] <= best[name] + tolerance for name in names)]
    return min(good, key=lambda row: (row["programs"], sum(row[name] for name in names)))
