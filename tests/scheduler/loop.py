"""The engine's loop around a scheduler and a device without a model, and requests to run through it."""

from __future__ import annotations

from collections import deque

import numpy as np

from jaxengine.scheduler.base.config import SchedulerConfig
from jaxengine.scheduler.base.request import Request
from jaxengine.scheduler.base.token_params import TokenParams
from jaxengine.scheduler.batches.buckets import Buckets, most_wide
from jaxengine.scheduler.batches.packing import Packer
from jaxengine.scheduler.extensions.adapters import AdapterOptions
from jaxengine.scheduler.extensions.drafts import DraftOptions
from jaxengine.scheduler.extensions.pictures import PictureOptions
from jaxengine.scheduler.extensions.snapshots import SnapshotOptions
from jaxengine.scheduler.pages.groups import most_pages_of
from jaxengine.scheduler.scheduler import Scheduler
from tests.scheduler.fake_device import POISON, VOCAB_SIZE, FakeDevice, expected_output

DRAFTS = ("guesses", "draft", "forced", "guided")


def scheduler_config(*, pictures=None, num_adapters=0, **options) -> SchedulerConfig:
    """pictures: PictureOptions; options: fields of SchedulerConfig, and of DraftOptions where there are `widths`."""
    drafts = {name: options.pop(name) for name in DRAFTS if name in options}
    extensions = [] if pictures is None else [pictures]
    if options.get("num_snapshots"):
        extensions.append(SnapshotOptions(pictures is not None and pictures.whole))
    if num_adapters:
        extensions.append(AdapterOptions(num_adapters))
    if options.get("widths"):
        extensions.append(DraftOptions(**drafts))
    return SchedulerConfig(extensions=tuple(extensions), **options)


class Loop:
    """schedule, execute, update; ahead of the device by one step unless `sync`, or by one for each micro-batch."""

    def __init__(self, *, sync: bool = False, **changes):
        """widths among the changes: steps of all of them in turn, with drafts that are right or wrong."""
        options = {
            "num_pages": 64,
            "page_size": 4,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 24,
            "max_model_len": 64,
        }
        windows = changes.get("windows", (None,))
        self.depth = max(1 if sync else 2, changes.get("num_micro_batches", 1))
        self.slack = (max(changes.get("widths", (1,))) - 1) * self.depth
        changes["windows"] = tuple(None if window is None else window + self.slack for window in windows)
        self.config = scheduler_config(**{**options, **changes})
        self.scheduler = Scheduler(self.config)
        self.num_widths = 0
        if self.config.widths:
            self.scheduler.extension("drafts").width.choose = self.choose_width
        seqs, tokens = self.config.max_num_seqs, self.config.max_num_batched_tokens
        pictures: PictureOptions | None = changes.get("pictures")
        sections = {} if pictures is None else {"pictures": 4 if pictures.mrope else 1}
        decodes = [size for size in (1, 2, 4) if size < seqs]
        buckets = Buckets(seqs, tokens, decodes, [4], self.config.widths, sections=tuple(sections))
        fields = {
            name: lambda bucket, values=values: (values, bucket.num_tokens) if bucket.sections else None
            for name, values in sections.items()
        }
        self.packer = Packer(buckets, self.config.page_size, self.config.num_ranks, self.config.num_tables, fields)
        pipelined = self.config.num_micro_batches > 1
        self.device = FakeDevice(self.packer, self.config, forgetful=pipelined, windows=windows)
        self.in_flight: deque = deque()
        self.finished: list[Request] = []
        self.largest_batch = 0
        self.most_tokens = 0

    @property
    def pool(self):
        return self.scheduler.ranks[0].pool

    def step(self, now: float = 0.0):
        """Returns the scheduled step."""
        step = self.scheduler.schedule(now)
        self.finished += step.expired
        self.check(step)
        if step.num_rows:
            self.largest_batch = max(self.largest_batch, *[batch.num_rows for batch in step.batches])
            self.most_tokens = max(self.most_tokens, *[batch.num_tokens for batch in step.batches])
            for rank, pages in zip(self.scheduler.ranks, self.device.pages, strict=True):
                blank = np.flatnonzero(rank.pool.page_states() == 0)
                pages.reshape(self.config.num_pages, -1)[blank] = POISON
            self.in_flight.append((step, self.device.execute(self.packer.pack(step))))
        if self.in_flight and (not step.num_rows or len(self.in_flight) == self.depth):
            step_before, (token_ids, counts) = self.in_flight.popleft()
            self.finished += self.scheduler.update(step_before, token_ids, counts=counts).finished
            for rank in self.scheduler.ranks:
                rank.pool.check()
        return step

    def run(self, limit: int = 20_000):
        for _ in range(limit):
            if not self.scheduler.num_unfinished and not self.in_flight:
                return
            self.step()
        raise AssertionError("the scheduler makes no progress")

    def choose_width(self, num_rows: int, runs: np.ndarray) -> int:
        self.num_widths += 1
        seqs, tokens = self.config.max_num_seqs, self.config.max_num_batched_tokens
        widths = [1, *(width for width in self.config.widths if num_rows <= most_wide(width, seqs, tokens))]
        return widths[self.num_widths % len(widths)]

    def check(self, step):
        """What must hold after every `schedule`."""
        for rank, batch in zip(self.scheduler.ranks, step.batches, strict=True):
            rank.pool.check()
            slots = rank.slots
            held = np.zeros(self.config.num_pages, np.int32)
            tables = rank.pages
            for slot in np.flatnonzero(slots.active):
                for table, count in zip(tables.table, tables.num_held[:, slot], strict=True):
                    held_columns = np.arange(tables.num_columns[slot] - count, tables.num_columns[slot])
                    pages = table[slot, held_columns]
                    assert (pages >= 0).all() and (np.delete(table[slot], held_columns) < 0).all()
                    np.add.at(held, pages, 1)
                limit = most_pages_of(self.config, int(slots.num_computed[slot]) + self.slack)
                assert tables.num_held[:, slot].sum() <= limit, "more pages than admission counts with"
            assert (held == rank.pool.ref_count).all(), "a page without owner, or an owner without page"
            assert batch.num_tokens == batch.num_scheduled.sum()
            if not batch.num_rows:  # the packer leaves its page-table entries out
                lost = batch.deltas.rows % self.config.max_num_seqs
                assert not slots.active[lost].any(), "entries that a running request needs are dropped"
            assert not (rank.preempted and batch.admitted), "a rank took in a request while it put one out"
            if self.config.num_micro_batches > 1:
                flying = [before.batches[rank.index] for before, _ in self.in_flight]
                pending = {
                    (slot, epoch)
                    for before in flying
                    for slot, epoch in zip(before.slots[before.sample], before.epochs[before.sample], strict=True)
                }
                now = set(zip(batch.slots[: batch.num_decode], batch.epochs[: batch.num_decode], strict=True))
                assert not now & pending, "a request decodes before its last token is known"


def make(name, prompt, max_tokens=8, **fields):
    params = fields.pop("params", TokenParams(temperature=0))
    return Request(str(name), np.array(prompt, np.int32), params, max_tokens, **fields)


def random_request(rng, index, max_len=64, shared=None, **fields):
    length = int(rng.integers(1, max_len - 2))
    prompt = rng.integers(0, VOCAB_SIZE, length).astype(np.int32)
    if shared is not None and rng.random() < 0.5:
        prompt[: min(length, len(shared))] = shared[:length]
    room = max_len - length
    stop = tuple(rng.integers(0, VOCAB_SIZE, 2).tolist()) if rng.random() < 0.3 else ()
    return make(
        index,
        prompt,
        int(rng.integers(1, min(room, 30) + 1)),
        stop_token_ids=stop,
        per_step=bool(rng.random() < 0.3),
        **fields,
    )


def check_output(request, window=None):
    expected = expected_output(request.prompt_token_ids, request.max_tokens, request.stop_token_ids, window=window)
    assert request.output_token_ids.tolist() == expected, request.request_id
    assert request.finish_reason == ("stop" if expected[-1] in request.stop_token_ids else "length")
