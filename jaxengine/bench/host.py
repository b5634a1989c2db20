"""`jaxengine bench host`: host time of a step, with a model that takes no time.

A step is `Scheduler.schedule`, `Packer.pack` and `Scheduler.update`; the sampled ids are random. All sequences decode,
at staggered offsets within their pages. With `--turnover` requests also finish and new ones begin; with `--width` every
decode has drafts, of which a random number is accepted. `loop` is the time of a whole `Engine.step`, with counters and
slot rows, on a runner that does nothing. No device is used.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from types import SimpleNamespace
from typing import Any

from jaxengine.config.command_line import output_file, positive_int

PAGE_SIZE = 16
PROMPT_TOKENS = 64
# Never sampled: sampled ids start at FIRST_TOKEN_ID.
STOP_TOKEN_ID = 2
FIRST_TOKEN_ID = 100
ENCODER_ROWS = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser, with `run` as the function that executes it."""
    sizes = [1, 64, 256, 1024]
    parser.add_argument("--num-seqs", type=positive_int, nargs="+", default=sizes, help="sequences running at once")
    parser.add_argument(
        "--num-steps", type=positive_int, default=300, help="steps of a round; the fastest of five rounds counts"
    )
    parser.add_argument(
        "--turnover", type=_turnover, default=0, metavar="N", help="requests end after N tokens on average, at least 2"
    )
    parser.add_argument(
        "--windows",
        type=_window,
        nargs="+",
        default=[None],
        metavar="W",
        help="attention window of each cache group, `all` for full attention (default: one group of full attention)",
    )
    parser.add_argument(
        "--width",
        type=int,
        choices=(1, 2, 4, 8),
        default=1,
        help="tokens of a decode: the last one and drafts (default: 1)",
    )
    parser.add_argument("--sees", action="store_true", help="simulate a model with an encoder, on text-only requests")
    parser.add_argument("--offload", action="store_true", help="with a host tier of KV pages that has nothing to do")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the results there")
    parser.set_defaults(run=run)


def _turnover(text: str) -> int:
    """Parse a whole number of at least 2. Raises ArgumentTypeError for any other text."""
    if (count := positive_int(text)) == 1:
        raise argparse.ArgumentTypeError("1 leaves nothing to decode; allowed: 2 or more")
    return count


def _window(text: str) -> int | None:
    """Parse a window in tokens, at least 1; return None for "all". Raises ArgumentTypeError for any other text."""
    return None if text == "all" else positive_int(text)


def run(args: argparse.Namespace) -> int:
    """Measure the host's time per step (`measure`) for each number of sequences in args.num_seqs, print the figures,
    write them to the --json file, and return 0. Raises OSError if the file cannot be written.
    """
    from jaxengine.results import table, write_json

    windows = tuple(args.windows)
    options = {"windows": windows, "width": args.width, "sees": args.sees, "offload": args.offload}
    results = [measure(num_seqs, args.num_steps, args.turnover, **options) for num_seqs in args.num_seqs]
    print(table(results))
    per_step = {str(result["num_seqs"]): result["us_per_step"] for result in results}
    # A single number for a single size.
    us_per_step = per_step if len(per_step) > 1 else results[0]["us_per_step"]
    result = {"us_per_step": us_per_step, "num_steps": args.num_steps, "results": results}
    changed = ({"windows": windows} if windows != (None,) else {}) | ({"sees": True} if args.sees else {})
    write_json(args.json, result | changed | ({"width": args.width} if args.width > 1 else {}))
    return 0


class _Steps:
    """Runner of scheduler steps of `num_seqs` decoding sequences that times their parts.

    Attributes:
      spent: f64[3], seconds of schedule, pack and update since it was last zeroed.
    """

    def __init__(
        self,
        num_seqs: int,
        longest: int,
        turnover: int,
        windows: tuple[int | None, ...] = (None,),
        width: int = 1,
        sees: bool = False,
    ):
        """Make a scheduler with `num_seqs` requests, and run it until all prompts are computed.

        Sampled ids and accepted counts are drawn from a fixed seed for 64 steps, which repeat. longest: output tokens
        of a request with turnover 0. turnover: mean output tokens of a request, 0 for `longest`. windows: window of
        each cache group. width: tokens of a decode. sees: simulate a model with an encoder.
        """
        import numpy as np

        from jaxengine.scheduler.base.config import SchedulerConfig
        from jaxengine.scheduler.batches.packing import Packer
        from jaxengine.scheduler.extensions.drafts import DraftOptions
        from jaxengine.scheduler.extensions.pictures import PictureOptions
        from jaxengine.scheduler.scheduler import Scheduler

        generator = np.random.default_rng(0)
        max_model_len = PROMPT_TOKENS + PAGE_SIZE + longest + 1
        extensions = [PictureOptions(ENCODER_ROWS, ENCODER_ROWS, mrope=True)] if sees else []
        extensions += [DraftOptions()] if width > 1 else []
        self.config = SchedulerConfig(
            num_pages=num_seqs * len(windows) * -(-max_model_len // PAGE_SIZE),
            page_size=PAGE_SIZE,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=max(512, num_seqs),
            max_model_len=max_model_len,
            windows=windows,
            widths=(width,) if width > 1 else (),
            extensions=tuple(extensions),
        )
        sections = {"pictures": 4} if sees else {}
        self.scheduler = _with_drafts(Scheduler(self.config), width)
        self.packer = Packer(
            _buckets(self.config, sections), PAGE_SIZE, num_groups=len(windows), sections=_fields(sections)
        )
        self.requests = _requests(generator, longest, turnover)
        for _ in range(num_seqs):
            self.scheduler.add_request(next(self.requests))
        shape = (64, 1, num_seqs) if width == 1 else (64, 1, num_seqs, width)
        self.tokens = generator.integers(FIRST_TOKEN_ID, 30_000, shape).astype(np.int32)
        # Accepted tokens of each row.
        self.counts = generator.integers(1, width + 1, shape[:3]).astype(np.int32)
        self.spent, self._taken = np.zeros(3), 0
        slots = self.scheduler.ranks[0].slots
        while self.scheduler.num_waiting or (slots.num_computed < slots.num_fed)[slots.active].any():
            self.step()

    def step(self) -> None:
        """Run one scheduler step, and add the seconds of its parts to `spent`. Each request that ends is replaced by a
        new one.
        """
        clock, scheduler = time.perf_counter, self.scheduler
        start = clock()
        scheduled_step = scheduler.schedule(0.0)
        scheduled = clock()
        self.packer.pack(scheduled_step)
        packed = clock()
        tokens, counts = sampled(self.tokens, self.counts, self._taken, scheduled_step.width)
        sent = clock()
        result = scheduler.update(scheduled_step, tokens, 0.0, counts)
        end = clock()
        self.spent += scheduled - start, packed - scheduled, end - sent
        self._taken += 1
        for _ in result.finished:
            scheduler.add_request(next(self.requests))

    def run(self, num_steps: int) -> Any:
        """Run `num_steps` steps; return the seconds that each part took, f64[3] (schedule, pack, update). Resets
        `spent` first.
        """
        self.spent[:] = 0
        for _ in range(num_steps):
            self.step()
        return self.spent.copy()


def measure(
    num_seqs: int,
    num_steps: int,
    turnover: int = 0,
    *,
    rounds: int = 5,
    windows: tuple[int | None, ...] = (None,),
    width: int = 1,
    sees: bool = False,
    offload: bool = False,
) -> dict[str, Any]:
    """Return the microseconds per step of `num_seqs` decoding sequences, by part.

    The keys are "num_seqs", "us_per_step" and its parts "schedule", "pack" and "update", all of the fastest of `rounds`
    rounds, and "loop", the least CPU time of a whole `Engine.step`.

    num_steps: number of steps in a round. turnover: mean number of tokens after which a request ends and another one
    starts, at least 2; 0 for never. width: tokens of a decode, the last one and drafts. windows: window of each cache
    group, in tokens; None for full attention. sees: simulates a model with an encoder, on text-only requests.

    With windows other than (None,), or with `sees`, the key "more" is the median extra CPU time over a step with
    neither; rounds are then eight times as many and a quarter as long, and alternate. With `offload`, "loop" is of an
    engine with a host tier of pages that stays unused, and the key "over_without" the median ratio of its time to that
    of an engine without, in alternating runs of an eighth of the steps. Raises ValueError for sizes below their
    minimum.
    """
    if num_seqs < 1 or num_steps < 1 or turnover < 0 or turnover == 1:
        raise ValueError(
            f"num_seqs is {num_seqs}, num_steps {num_steps}: at least 1; turnover {turnover}: 0, or 2 or more"
        )
    compared = windows != (None,) or sees
    rounds = 8 * rounds if compared else rounds
    # A comparison has no ending requests, and shorter rounds, so that the machine's speed is equal for neighbours.
    num_steps = -(-num_steps // 4) if compared else num_steps
    longest = turnover * 2 if turnover else (rounds + 1) * num_steps * width + PAGE_SIZE
    steps = _Steps(num_seqs, longest, turnover, windows, width, sees)
    plain = _Steps(num_seqs, longest, turnover, width=width) if compared else None
    found, beyond = [], []
    for _ in range(rounds):
        # Thread time, so that other processes do not affect the differences.
        times = [time.thread_time()]
        if plain is not None:
            plain.run(num_steps)
        times.append(time.thread_time())
        found.append(steps.run(num_steps))
        times.append(time.thread_time())
        beyond.append(times[2] - 2 * times[1] + times[0])
    best = min(found, key=lambda spent: spent.sum())
    schedule, pack, update = (best / num_steps * 1e6).round(1).tolist()
    loop, over = _loops(steps, num_steps, longest, turnover, width, rounds, offload)
    more = {"more": round(float(statistics.median(beyond)) / num_steps * 1e6, 1)} if compared else {}
    return {
        "num_seqs": num_seqs,
        "us_per_step": round(float(best.sum()) / num_steps * 1e6, 1),
        "schedule": schedule,
        "pack": pack,
        "update": update,
        "loop": round(loop * 1e6, 1),
        **more,
        **over,
    }


def _loops(
    steps: _Steps, num_steps: int, longest: int, turnover: int, width: int, rounds: int, offload: bool
) -> tuple[float, dict[str, float]]:
    """Return (CPU seconds of an `Engine.step` in the fastest run, extra figures).

    With `offload` the seconds are those of an engine with a host tier of pages, and the extra figures {"over_without"}:
    the median ratio of its seconds to those of an engine without one. Otherwise there are no extra figures. longest:
    tokens of the longest request. Other arguments: see `measure`.
    """
    import numpy as np

    generator = np.random.default_rng(0)
    loops = [
        _Loop(steps, _requests(generator, longest, turnover), width, offload=each)
        for each in ((False, True) if offload else (False,))
    ]
    size = -(-num_steps // 8) if offload else num_steps
    spent = np.zeros((-(-num_steps // size) * rounds, len(loops)))
    for number, row in enumerate(spent):
        for index in range(len(loops))[:: 1 if number % 2 else -1]:  # the second of two neighbours is at a disadvantage
            row[index] = loops[index].run(size)
    for each in loops:
        each.shutdown()
    over = {"over_without": round(float(np.median(spent[:, 1] / spent[:, 0])), 4)} if offload else {}
    return float(spent[:, -1].min()) / size, over


def sampled(tokens: Any, counts: Any, number: int, width: int) -> tuple[Any, Any]:
    """Return (sampled ids, accepted counts) of step `number`; with width 1 the first id of each row, and None for the
    counts.

    tokens: i32[n, ranks, S] or i32[n, ranks, S, W] ids of n steps, which repeat. counts: i32[n, ranks, S], used only if
    width is above 1.
    """
    ids = tokens[number % len(tokens)]
    if width > 1:
        return ids, counts[number % len(counts)]
    return (ids if ids.ndim == 2 else ids[:, :, 0]), None


def _with_drafts(scheduler: Any, width: int) -> Any:
    """Make the scheduler use `width` for every decode if it is above 1, instead of choosing by measurement; return the
    scheduler.
    """
    if width > 1:
        scheduler.extension("drafts").width.choose = lambda num_rows, runs: width
    return scheduler


class _Loop:
    """Runner of `Engine.step` over all sequences.

    requests: iterator over requests. width: tokens of a decode. offload: with a host tier of pages.
    """

    def __init__(self, steps: _Steps, requests: Any, width: int, *, offload: bool):
        """Make an engine on a FreeRunner with as many requests as `steps` has, and run it until all prompts are
        computed.
        """
        from jaxengine.engine.engine import Engine

        config = steps.config
        if offload:
            from jaxengine.scheduler.extensions.offload import OffloadOptions

            config = dataclasses.replace(config, extensions=(*config.extensions, OffloadOptions()))
        runner: Any = FreeRunner(config, steps.packer, steps.tokens, steps.counts, offload=offload)
        self._engine, self._requests = Engine(runner), requests
        _with_drafts(self._engine.scheduler, width)
        for _ in range(config.max_num_seqs):
            self._engine.queue([next(requests)])
        slots = self._engine.scheduler.ranks[0].slots
        while self._engine.scheduler.num_waiting or (slots.num_computed < slots.num_fed)[slots.active].any():
            self._step()

    def run(self, num_steps: int) -> float:
        """Run `num_steps` steps and return their CPU seconds in this thread."""
        start = time.thread_time()
        for _ in range(num_steps):
            self._step()
        return time.thread_time() - start

    def shutdown(self) -> None:
        """End the threads of the engine's extensions."""
        self._engine.extensions.shutdown()

    def _step(self) -> None:
        """Run one engine step. Each request that ends is replaced by a new one."""
        for _ in self._engine.step().finished:
            self._engine.queue([next(self._requests)])


class _FreeConfig:
    """Configuration of a FreeRunner: the given values, and an engine's defaults for all other options."""

    def __init__(self, **own: Any):
        """Store the given values. own: values by option."""
        from jaxengine.config.engine_config import EngineConfig

        self._usual = EngineConfig()
        vars(self).update(own)

    def __getattr__(self, name: str) -> Any:
        """Return an engine's default of an option that was not given. Raises AttributeError for an unknown option."""
        return getattr(self._usual, name)


class FreeRunner:
    """Stand-in for ModelRunner whose steps take no time.

    tokens: i32[n, ranks, S], sampled ids of n steps, which repeat; with drafts i32[n, ranks, S, W], of which counts,
    i32[n, ranks, S], are accepted. offload: have a host tier of pages of one KiB.
    """

    on_cpu, page_bytes, state_bytes, block_bytes = False, 1 << 10, 0, 1 << 10
    fills_after_sample = False

    def __init__(self, config: Any, packer: Any, tokens: Any, counts: Any = None, *, offload: bool = False):
        """Make a runner without devices. config: a SchedulerConfig. packer: packer of the steps' messages. counts: None
        without drafts. For the other arguments see the class.
        """
        from jaxengine.config.features.speculation import SpeculativeConfig
        from jaxengine.runner.compile_watch import CompileWatch

        drafts = {"method": "ngram", "num_speculative_tokens": config.widths[-1] - 1} if config.widths else None
        self.packer, self.buckets, self.compiles = packer, packer.buckets, CompileWatch()
        self.vocab_size, self.num_ranks, self.windows = 32_000, 1, config.windows
        self.keeps_history, self.uses_mrope = bool(config.widths), bool(packer.sections)
        own = {"drafts": self.keeps_history, "pictures": self.uses_mrope, "offload": offload}
        self.towers = ()
        self.extensions = dict.fromkeys(("structured", *(name for name, has in own.items() if has)), self)
        self.plan = SimpleNamespace(num_pages=config.num_pages)
        self.config = _FreeConfig(
            scheduler_config=lambda num_pages, num_ranks, windows: config,
            max_model_len=config.max_model_len,
            max_in_flight=2,
            speculative_config=SpeculativeConfig.read(drafts),
            **({"kv_offloading_size": 1.0, "kv_offloading_bytes": 1 << 30} if offload else {}),
        )
        self._tokens, self._counts, self._taken = tokens, counts, 0

    def execute(self, step: Any) -> Any:
        """Return a pending step that is ready at once, with the next sampled ids and, with drafts, accepted counts."""
        self._taken += 1
        ids, right = sampled(self._tokens, self._counts, self._taken, step.bucket.width)
        drafts = None if right is None else right * 0 + ids.shape[-1] - 1
        results = {"counts": right, "num_drafts": drafts}
        return SimpleNamespace(token_ids=lambda: ids, result=results.get, is_ready=lambda: True)

    def extension(self, name: str) -> Any:
        """Return this runner, which stands in for all of its extensions."""
        return self

    def sample(self, pending: Any) -> None: ...

    def set_params(self, rows: Any) -> None: ...

    def set_biases(self, biases: Any) -> None: ...

    def set_logprob_ids(self, rows: Any) -> None: ...

    def set_token_counts(self, sequences: Any) -> None: ...

    def masked(self, among: Any = None) -> list[int]:
        return []

    def set_masks(self, rows: Any, places: Any) -> None: ...

    def set_histories(self, histories: Any) -> None: ...

    def set_rope_deltas(self, slots: Any, deltas: Any) -> None: ...


def _fields(sections):
    """Return, by name, functions from a bucket to the shape of a message section; the shape is None if the bucket has
    no sections.

    sections: number of values per token, by name.
    """
    return {
        name: lambda bucket, values=values: (values, bucket.num_tokens) if bucket.sections else None
        for name, values in sections.items()
    }


def _buckets(config, sections=()):
    """Return the buckets of a SchedulerConfig, with only the largest size of each kind. sections: names of message
    sections.
    """
    from jaxengine.scheduler.batches.buckets import Buckets

    limits = config.max_num_seqs, config.max_num_batched_tokens
    return Buckets(*limits, [], [], widths=config.widths, sections=tuple(sections))


def _requests(generator, longest: int, turnover: int):
    """Yield requests endlessly, with random prompts of PROMPT_TOKENS to PROMPT_TOKENS + PAGE_SIZE - 1 tokens.

    Request ids count from "0". generator: NumPy's. longest: number of output tokens of each request if `turnover` is 0.
    turnover: mean number of output tokens otherwise, which are drawn uniformly from 1 to 2 * turnover - 1.
    """
    import numpy as np

    from jaxengine.scheduler.base.request import Request
    from jaxengine.scheduler.base.token_params import TokenParams

    params, number = TokenParams(temperature=0.0), 0
    while True:
        length = PROMPT_TOKENS + number % PAGE_SIZE
        yield Request(
            request_id=str(number),
            prompt_token_ids=generator.integers(FIRST_TOKEN_ID, 30_000, length).astype(np.int32),
            params=params,
            max_tokens=int(generator.integers(1, turnover * 2)) if turnover else longest,
            stop_token_ids=(STOP_TOKEN_ID,),
        )
        number += 1
