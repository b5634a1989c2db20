"""Metrics of the operations and bytes of steps that follow from the model's shape, under vLLM's names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxengine.check.model.roofline import attention_work, product_work, state_work, written_bytes
from jaxengine.engine.extension import LoopExtension
from jaxengine.engine.stats.metric_types import Counter, Metric
from jaxengine.runner.model_runner import ModelRunner
from jaxengine.scheduler.batches.batch import ScheduledStep
from jaxengine.scheduler.batches.buckets import Bucket

_TOKEN = Bucket(1, 1)


class StepWork(LoopExtension):
    """Loop extension that adds up what one device, on average over all of the engine, computes, reads and writes.

    Counted are the tokens of requests and the keys that each of them sees, without padding: matrix products, attention
    and recurrent states. A step reads every weight that its tokens reach once, the embeddings of its tokens, and of
    each request the keys and values that its last token sees; it writes the keys and values of its tokens. Activations,
    encoder towers, draft models and the sampler are left out.

    Attributes:
      flops, read_bytes, write_bytes: totals; a multiplication and an addition are two operations.
    """

    def __init__(self, runner: ModelRunner):
        """Compute the work of a token by its position, up to max_model_len, and that of a step's weights by its number
        of tokens.
        """
        self.flops = self.read_bytes = self.write_bytes = 0.0
        self._num_stages, self._num_ranks = len(runner.stages), runner.num_ranks
        config = runner.config
        self._last = config.max_model_len
        # Operations of the attention of all tokens before a position, and bytes of the keys that a token there sees.
        self._attention, self._keys = np.zeros(self._last + 1), np.zeros(self._last + 1)
        steps = [1 << power for power in range(config.max_num_batched_tokens.bit_length() + 1)]
        self._tokens = np.array(steps, np.float64)
        self._products, self._weights = np.zeros(len(steps)), np.zeros(len(steps))
        self._row = self._token_flops = self._token_bytes = self._written = self._state_bytes = 0.0
        for stage in runner.stages:
            self._add(stage.programs.model, config)

    def before_forward(self, step: ScheduledStep) -> None:
        """Add the work of a step, by one device on average, to flops, read_bytes and write_bytes."""
        tokens = step.num_tokens / self._num_ranks
        rows = tokens if step.width > 1 else step.num_rows / self._num_ranks
        attended = keys = 0.0
        for rank, batch in zip(self.loop.scheduler.ranks, step.batches, strict=True):
            computed = rank.slots.num_computed[batch.slots]  # with the step's tokens
            ends, begins = np.minimum(computed, self._last), np.minimum(computed - batch.num_scheduled, self._last)
            attended += float((self._attention[ends] - self._attention[begins]).sum())
            keys += float(self._keys[ends].sum())
        products = float(np.interp(tokens, self._tokens, self._products)) + (rows - 1) * self._row
        weights = float(np.interp(tokens, self._tokens, self._weights))
        states = step.num_rows / self._num_ranks * self._state_bytes
        own = self._num_ranks * self._num_stages
        self.flops += (products + tokens * self._token_flops) / self._num_stages + attended / own
        self.read_bytes += (weights + tokens * self._token_bytes + states) / self._num_stages + keys / own
        self.write_bytes += (tokens * self._written + states) / self._num_stages

    def metrics(self) -> Iterator[Metric]:
        yield Counter("vllm:estimated_flops_per_gpu", self.flops)
        yield Counter("vllm:estimated_read_bytes_per_gpu", self.read_bytes)
        yield Counter("vllm:estimated_write_bytes_per_gpu", self.write_bytes)

    def _add(self, model: Any, config: Any) -> None:
        """Add a stage's work to the tables, of attention by position, of products and weights by number of tokens, and
        to the constants of a token, row and state. model: the stage's, abstract. config: the engine's, resolved.
        """
        kinds = [model.config.attention[layer] for layer in model.stage.layers]
        attending = [each for each in kinds if each.attends]
        types, share = (config.kv_cache_dtype, config.dtype), model.mesh.model
        # Between these positions the work of a token is linear in its position, or nearly.
        bends = {each.reach for each in attending} | {each.index and each.index.top_k for each in attending}
        some = {0, self._last, *(1 << power for power in range(self._last.bit_length())), *filter(None, bends)}
        grid = np.array(sorted(each for each in some if each <= self._last))
        works = [[attention_work(each, _TOKEN, *types, int(at)) for each in attending] for at in grid]
        seen = np.arange(self._last + 1)
        flops = np.interp(seen, grid, [sum(work.flops for work in own) for own in works])
        self._attention += (flops.cumsum() - flops[0]) / share
        sizes = np.array([sum(work.num_bytes for work in own) for own in works], np.float64)
        self._keys += np.interp(seen, grid, sizes - sizes[0]) / share
        for at, tokens in enumerate(self._tokens):
            work = product_work(model, Bucket(int(tokens), 1), config.dtype)
            self._products[at] += work.flops
            self._weights[at] += work.reached_bytes
        two, one = (product_work(model, Bucket(2, rows), config.dtype) for rows in (2, 1))
        self._row += two.flops - one.flops
        states = [state_work(each.state, _TOKEN, config.dtype) for each in kinds if each.state is not None]
        self._token_flops += sum(work.flops for work in states) / share
        self._state_bytes += sum(work.num_bytes for work in states) / share / 2  # read once, and written once
        self._token_bytes += model.config.hidden_size * np.dtype(config.dtype).itemsize
        self._written += sum(written_bytes(each, types[0]) for each in attending if each.has_pages) / share
