"""What the devices must have before a step with pictures: embeddings, and the places of the tokens behind them."""

from __future__ import annotations

import time

from jaxengine.engine.stats import MediaStats
from jaxengine.runner.model_runner import ModelRunner
from scheduler.batch import ScheduledStep


def prepare_media(runner: ModelRunner, step: ScheduledStep, max_num_seqs: int, stats: MediaStats) -> None:
    """Dispatches, and counts, what the forward pass of this step, the next one to be dispatched, counts on."""
    admitted = [request for batch in step.batches for request in batch.admitted]
    pictures = runner.extension("pictures")
    if admitted and pictures.uses_mrope:
        slots = [request.rank * max_num_seqs + request.slot for request in admitted]
        deltas = [0 if request.media is None else request.media.rope_delta for request in admitted]
        pictures.set_rope_deltas(slots, deltas)
    if any(batch.encodes for batch in step.batches):
        start, items = time.monotonic(), [each.item for batch in step.batches for each in batch.encodes]
        pictures.encode([batch.encodes for batch in step.batches])
        stats.num_calls += any(item.num_patches for item in items)
        stats.num_items += sum(item.num_patches > 0 for item in items)
        stats.num_patches += sum(item.num_patches for item in items)
        stats.encode_seconds += time.monotonic() - start
