"""Additions of speculative decoding to forward passes, and the epilogue that verifies drafts.

Drafts come from the message (the host proposed them all), from a Proposer within the forward pass that looks at known
tokens, or from a draft model or head that ran before it (jaxengine.runner.extensions.drafts.drafter).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxengine.drafts.proposer import Drafts, Proposer
from jaxengine.drafts.registry import proposer_of
from jaxengine.models.layers.base.section import Capture
from jaxengine.runner.base.device_state import DeviceState, SlotState, TokenState
from jaxengine.runner.base.extension import (
    EVERYWHERE,
    DeviceExtension,
    Epilogue,
    EpilogueSpec,
    HostExtension,
    Kept,
    StageExtension,
    StageShape,
    StateChange,
)
from jaxengine.runner.base.forward_pass import ForwardPass, SampledRows
from jaxengine.runner.programs.epilogues import choose, remember, stack_results
from jaxengine.runner.programs.pending_step import PendingStep
from jaxengine.runner.programs.state_changes import long_rows, own_slot
from jaxengine.sampling.sampler import flags_of
from jaxengine.sampling.state import SamplingState, set_rows, write_slots, write_tokens
from jaxengine.sampling.verification import assumed_tokens, only_tokens, verify
from jaxengine.scheduler.batches.buckets import Bucket
from jaxengine.scheduler.extensions.drafts import FORCED, GUIDED

NAME, HISTORY_ROWS = "drafts", "history rows"


class DraftRows(NamedTuple):
    """Section of SampledRows for drafts.

    Attributes:
      token_ids: i32[S, W - 1], the drafts, after each of which another token is to be sampled.
      counts: i32[S], number of drafts of a row, the first of its token_ids.
      is_forced: bool[S], rows whose drafts are grammar drafts: each is the only token allowed at its position.
      is_guided: bool[S], rows with a grammar mask for each position.
    """

    token_ids: jax.Array
    counts: jax.Array
    is_forced: jax.Array
    is_guided: jax.Array


class VerifyOutput(NamedTuple):
    """Output of a step whose rows had drafts, for the host: the fields of SampleOutput for all S * W positions, and
    counts of each row.

    Attributes:
      token_ids: i32[replicas, S * W].
      logprob, rank, top_ids, top_logprobs, given_logprobs, support: [replicas, S * W, ...], see SampleOutput.
      counts: i32[replicas, S], number of tokens that each row got, from its first position on.
      num_drafts: i32[replicas, S], number of drafts that each row had.
    """

    token_ids: jax.Array
    logprob: jax.Array
    rank: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array
    given_logprobs: jax.Array
    counts: jax.Array
    num_drafts: jax.Array
    support: jax.Array | None = None


class DraftsExtension(DeviceExtension):
    """Device extension of drafts in the stage that samples. Its section of TokenState is the history, i32[R, L]: the
    known tokens of each slot by position, if drafts are computed from it. The host writes the tokens of a request's
    prompt, the sampler those that it samples.

    Attributes:
      proposer: of drafts within the forward pass; None if the message, a draft model or a head provides them.
    """

    name = NAME

    def __init__(self, shape: StageShape):
        """Choose the proposer, None with pipeline stages, and the number of sampler rows for grammar masks of drafts, 0
        if these have none.
        """
        super().__init__(shape)
        chosen, config = shape.config.speculative_config, shape.config
        assert chosen is not None
        self.proposer: Proposer | None = proposer_of(chosen) if config.pipeline_parallel_size == 1 else None
        self._has_model, self._is_read, self._streams = chosen.has_model, chosen.reads_hidden, chosen.streams or ()
        self._reads_next_tokens = chosen.reads_next_tokens
        guided = chosen.guides(config.pipeline_parallel_size, config.max_in_flight)
        self.num_position_rows = max([0, *(each.num_tokens for each in shape.buckets.wide if guided)])

    @property
    def keeps_history(self) -> bool:
        """Whether the devices store the tokens of all slots: for n-gram lookup, and for a draft head that reads the
        token after each hidden state.
        """
        return self.proposer is not None or self._reads_next_tokens

    def tokens(self) -> Any:
        """Return the history, i32[R, max_model_len], as a Kept; None if drafts are not computed from it."""
        size = self.shape.num_slots, self.shape.config.max_model_len
        return Kept(size, jnp.int32) if self.keeps_history else None

    @property
    def changes(self) -> Mapping[str, StateChange]:
        if not self.keeps_history:
            return {}
        return long_rows(HISTORY_ROWS, _set_history, self.shape.config.max_model_len, np.int32, EVERYWHERE)

    @property
    def epilogues(self) -> Mapping[str, Epilogue]:
        """Epilogues that verify drafts, by name (`verifier`): one for each width of wide buckets."""
        widths = sorted({bucket.width for bucket in self.shape.buckets.wide})
        return {verifier(width): _verify_epilogue(width) for width in widths}

    def label(self, bucket: Bucket) -> str:
        """Return text about a forward pass that its shapes do not show: the layers whose states it leaves and, for a
        wide bucket, the source of its drafts. "" if there is nothing to add.
        """
        label = f", read after {self._streams}" * bool(self._streams)
        if bucket.width > 1:
            label = ", of drafts" * self._has_model + label
            label = label if self.proposer is None else f", {self.proposer}{label}"
        return label

    def given(self, bucket: Bucket) -> Any:
        """Return, for a wide bucket, the abstract Drafts of a draft model or head, or the history that the proposer
        reads; None for other buckets, and if the message has all drafts.
        """
        if bucket.width == 1:
            return None
        if self._has_model:
            return drafts_of(self.shape, bucket)
        size = self.shape.num_slots, np.int32, self.shape.config.max_model_len
        return None if self.proposer is None else self.shape.rows(*size)

    def left(self, num_tokens: int, num_rows: int) -> Any:
        """Return the abstract hidden states [T, D], or those of several layers joined, that a draft head reads; None
        without a head.
        """
        return self.shape.hidden(num_tokens, max(1, len(self._streams))) if self._is_read else None

    def row_section(self, num_rows: int, width: int) -> DraftRows | None:
        if width == 1:
            return None
        rows = self.shape.rows
        flag = rows(num_rows, np.bool_)
        return DraftRows(rows(num_rows, np.int32, width - 1), rows(num_rows, np.int32), flag, flag)

    def fill_tokens(self, step: ForwardPass) -> ForwardPass | None:
        """Return the pass with token ids in place of each -1 (a row's last token, then the row's drafts), 0 in
        padding, and with its Drafts as a section.

        Returns None if the message has all drafts, or rows have none; other code then fills in the last tokens.
        """
        if (drafts := self._drafts(step)) is None:
            return None
        assert step.last_token is not None
        own, row = step.batch.token_ids, step.token_row
        known = jnp.concatenate([step.last_token[step.rows.index][:, None], drafts.token_ids], axis=1)
        column = jnp.clip(step.column, 0, known.shape[1] - 1)
        own = jnp.where(step.is_token, jnp.where(own >= 0, own, known[row, column]), 0)
        return step._replace(batch=step.batch._replace(token_ids=own)).with_section(NAME, drafts)

    def before_model(self, step: ForwardPass) -> ForwardPass:
        """Return the pass with the DraftRows of a wide step for the sampler, and, with streams, with a Capture section
        for the layers whose hidden states a head reads.
        """
        if step.spec.bucket.width > 1:
            assert step.sampled is not None
            sections = {**step.sampled.sections, NAME: _draft_rows(step)}
            step = step._replace(sampled=step.sampled._replace(sections=sections))
        return step.with_section("capture", Capture(self._streams)) if self._streams else step

    def after_model(self, step: ForwardPass) -> ForwardPass:
        """Return the pass with the hidden states that a draft head reads left under NAME; unchanged without a head."""
        if not self._is_read:
            return step
        return step.leaving(NAME, step.batch.sections["capture"].joined() if self._streams else step.hidden)

    def remember(
        self, tokens: TokenState, slot: jax.Array, position: jax.Array, token_ids: jax.Array, is_kept: jax.Array
    ) -> TokenState:
        """Return the state with the kept tokens written into the history; unchanged without a history."""
        if not self.keeps_history:
            return tokens
        history = write_tokens(tokens.sections[NAME], slot, position, jnp.maximum(token_ids, 0), is_kept)
        return tokens._replace(sections={**tokens.sections, NAME: history})

    def at_stage(self, stage: Any) -> StageExtension | None:
        return None if self.proposer is None else History()

    def on_host(self, runner: Any) -> HostExtension:
        return SlotHistory(runner, self)

    def _drafts(self, step: ForwardPass) -> Drafts | None:
        """Return this step's drafts, at most W - 1 a row: those of the draft model or head, or those that the proposer
        computes from the history. None if the message has all of them, or rows have none.
        """
        count = step.spec.bucket.width - 1
        if not count or NAME not in step.given:
            return None
        if self.proposer is None:
            return step.given[NAME]
        with jax.named_scope("draft"):
            return self.proposer.propose(step.given[NAME][step.rows.index], step.rows.start + 1, count)


class History(StageExtension):
    """Stage extension that passes the token history to forward passes that propose drafts from it."""

    name = NAME

    def before_forward(self, bucket: Bucket, params: Sequence[Any], state: DeviceState, message: Any) -> Any:
        """Return the histories of all slots for a wide bucket; None for other buckets."""
        return state.tokens.sections[NAME] if bucket.width > 1 and state.tokens is not None else None


class SlotHistory(HostExtension):
    """Host extension of drafts: writes the histories of slots, and reads the results of steps with drafts.

    Attributes:
      keeps_history: whether the tokens of all slots are stored on the device.
    """

    def __init__(self, runner: Any, extension: DraftsExtension):
        super().__init__(runner)
        self.keeps_history = extension.keeps_history

    def verified(self, pending: PendingStep) -> tuple[np.ndarray, np.ndarray] | None:
        """Return how many tokens each row of a step got and how many drafts it had, both i32[replicas, rows]; waits for
        the step. None for a step without drafts.
        """
        counts, num_drafts = pending.result("counts"), pending.result("num_drafts")
        return None if counts is None or num_drafts is None else (counts, num_drafts)

    def drafts(self, pending: PendingStep) -> np.ndarray | None:
        """Return the drafts, i32[replicas, rows, W - 1], that a draft model or head proposed for a step; waits for
        these alone. None if the drafts had another source, or there were none.
        """
        if not isinstance(own := pending.given.get(NAME), Drafts):
            return None
        return self.runner.fetch(own.token_ids).reshape(self.runner.num_ranks, -1, pending.bucket.width - 1)

    def set_histories(self, histories: list[tuple[int, np.ndarray]]) -> None:
        """Write slots' token histories on the devices; does nothing unless `keeps_history`.

        histories: pairs of a slot (numbered over all replicas) and its first tokens, i32[n].
        """
        if self.keeps_history:
            self.runner.change_rows(HISTORY_ROWS, histories, self.runner.config.max_model_len)


def drafts_of(shape: StageShape, bucket: Bucket) -> Drafts:
    """Return the abstract Drafts of a wide bucket's rows, over all replicas: token ids i32[replicas * S, W - 1] and
    counts i32[replicas * S].
    """
    rows = shape.rows
    return Drafts(rows(bucket.num_seqs, np.int32, bucket.width - 1), rows(bucket.num_seqs, np.int32))


def verifier(width: int) -> str:
    """Return the name of the epilogue that samples and verifies rows of `width` tokens."""
    return f"verify {width}"


def make_verify(spec: EpilogueSpec) -> Callable:
    """Return the epilogue function that samples a token at every position of every row, and accepts those that follow
    accepted drafts.

    It is (SlotState, TokenState, SamplingState, SampledRows, logits f32[S * W, V / n]) -> (SlotState, TokenState,
    VerifyOutput). Positions after a row's first wrong draft count as not computed (num_computed), and are computed
    again.
    """

    def verify_rows(
        slots: SlotState, tokens: TokenState, sampling: SamplingState, rows: SampledRows, logits: jax.Array
    ):
        """Sample and verify the drafts, see `make_verify`."""
        drafts, num_drafts, is_forced, is_guided_row = rows.sections[NAME]
        width = drafts.shape[1] + 1
        slot = jnp.repeat(rows.slot, width)
        position = (rows.position[:, None] + jnp.arange(width, dtype=jnp.int32)).reshape(-1)
        flags = flags_of(rows.features[0])
        assumed, only = assumed_tokens(drafts), only_tokens(drafts, num_drafts, is_forced)
        is_guided = jnp.repeat(is_guided_row, width)
        more = {"assumed": assumed, "only": only, "is_guided": is_guided}
        own = choose(spec, logits, sampling, tokens, slot, position, flags, **more)
        with jax.named_scope("verify"):
            chosen = own.token_ids.reshape(-1, width)
            found = verify(chosen, drafts, num_drafts, rows.is_sampled, is_guided_row)
            target = jnp.where(rows.is_sampled, rows.slot, tokens.last_token.shape[0])
            num_computed = write_slots(slots.num_computed, target, rows.position - 1 + found.counts)
            kept = own.token_ids, found.is_kept.reshape(-1), flags
            tokens = remember(spec, tokens, target, found.last, slot, position, *kept)
        with jax.named_scope("results"):
            (token_ids, *counts), scores = stack_results((own.token_ids, found.counts, num_drafts), own, flags)
            output = VerifyOutput(token_ids, *scores[:-1], *counts, support=scores.support)
        return slots._replace(num_computed=num_computed), tokens, output

    return verify_rows


def _verify_epilogue(width: int) -> Epilogue:
    """Return the epilogue that verifies drafts, of steps whose rows have `width` tokens."""
    return Epilogue(
        make_verify,
        arguments=("slots", "tokens", "sampling", "rows", "logits"),
        changes=("slots", "tokens"),
        output=VerifyOutput,
        size_of=lambda buckets, bucket: bucket.num_seqs if bucket.width == width else None,
        width=width,
        ends=True,
    )


def _draft_rows(step: ForwardPass) -> DraftRows:
    """Return the drafts of each row of a wide step: its scheduled tokens after the first. Unless they are grammar
    drafts, their count is limited to the number that was proposed for the row.
    """
    rows, batch, drafts = step.rows, step.batch, step.batch.sections.get(NAME)
    counts, is_forced = jnp.maximum(rows.num_scheduled - 1, 0), rows.sample == FORCED
    if drafts is not None:
        counts = jnp.where(is_forced, counts, jnp.minimum(counts, drafts.counts))
    token_ids = batch.token_ids[batch.logits_indices].reshape(-1, step.spec.bucket.width)[:, 1:]
    return DraftRows(token_ids, counts, is_forced, rows.sample == GUIDED)


def _set_history(state: DeviceState, slots: jax.Array, rows: jax.Array) -> DeviceState:
    """Return the state with histories i32[n, max_model_len] written for slots i32[n], numbered over all replicas."""
    assert state.tokens is not None
    history = set_rows(state.tokens.sections[NAME], own_slot(state, slots), rows)
    return state._replace(tokens=state.tokens._replace(sections={**state.tokens.sections, NAME: history}))
