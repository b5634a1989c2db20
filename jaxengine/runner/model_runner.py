"""The device side of the engine: the stages that run a model, one behind the other, as one thing that executes steps.

Serving calls nothing but the executables made at start-up, and an executable refuses any other shape, so nothing can
compile while serving. Slots are numbered over all ranks: rank * max_num_seqs + the rank's own number. Knows rows and
messages; of requests only the sampling parameters of a slot.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxengine.config.engine_config import ResolvedConfig
from jaxengine.runner.compile_watch import CompileWatch
from jaxengine.runner.heads import HEADS, POOL, SCORE, verifier
from jaxengine.runner.memory import MemoryPlan, StageNeeds, plan_memory, return_free_memory
from jaxengine.runner.peers import ALONE, Peers
from jaxengine.runner.pending_step import PendingStep
from jaxengine.runner.stage_runner import StageRunner
from jaxengine.runner.state_changes import (
    ADAPTERS,
    BIAS_ROW,
    COUNTS_ROW,
    HISTORY_ROW,
    MASK_ROWS,
    NUM_COLUMN_ROWS,
    NUM_DELTAS,
    NUM_MASK_ROWS,
    NUM_PARAM_ROWS,
    PAGE_DELTAS,
    PARAMETERS,
    ROPE_DELTAS,
)
from jaxengine.runner.step import Forwarded
from jaxengine.sampling.state import NEUTRAL
from models.cache import platform_of, product_platform_of
from models.layers.lora import product_forms
from models.quantization.table import weight_rows
from models.weights.lora_pools import AdapterTargets, Matrices, targets_of
from scheduler.buckets import Bucket
from scheduler.extensions.pictures import Encode
from scheduler.media import EMBEDS
from scheduler.packing import StepInput, delta_chunks
from scheduler.token_params import ADAPTER, FEW_ADAPTERS

Progress = Callable[[int, int, str], None]


class ModelRunner:
    """Compiles at construction, then only executes. Where an engine has several processes, each has one of these.

    Attributes:
      plan: what the memory of a device is used for; of the stage with the least room.
      compiles: what XLA compiled while the engine was serving.
      pools: whether the model pools, so that steps end with `pool`, not with `sample`.
      keeps_history: whether drafts are made on the device.
      encoder: how pictures are encoded; None for a model that sees none.
      has_places: whether layers turn queries and keys by places in time, height and width.
    """

    def __init__(
        self,
        stages: Sequence[StageRunner],
        config: ResolvedConfig,
        *,
        progress: Progress | None = None,
        peers: Peers = ALONE,
    ):
        """stages in order; config resolved; progress(done, total, what) is called per program."""
        self.config = config
        self.packer = stages[0].programs.packer
        self.compiles = CompileWatch()
        self.vocab_size = stages[0].programs.model.config.vocab_size
        self.num_ranks = stages[0].programs.model.mesh.num_ranks
        self.windows = stages[0].programs.windows
        self.pools = stages[0].programs.model.config.pooler is not None
        models = [stage.programs.model for stage in stages]
        device = stages[0].programs.mesh.devices.flat[0]
        products = product_platform_of(device)
        self.weight_rows = weight_rows(models, products)
        if (drafter := stages[-1].drafter) is not None:
            self.weight_rows += weight_rows([drafter.programs.model], products, prefix="draft: ")
        self.adapter_forms = product_forms(models, platform_of(device))
        self._stages = stages
        self._last = stages[-1]
        self.keeps_history = self._last.programs.state_shapes.keeps_history
        self._peers = peers
        self._has_bias = np.zeros(self.num_ranks * config.max_num_seqs, np.bool_)
        self._has_mask = np.zeros_like(self._has_bias)
        self._adapter = np.full(len(self._has_bias), -1, np.int32)
        self._rope_delta = np.zeros(len(self._has_bias), np.int32)
        self.has_places = stages[0].programs.model.config.sees_places
        encoder = stages[0].programs.encoder
        self.encoder = None if encoder is None else encoder.layout
        return_free_memory()
        before = self.memory_in_use()
        # Where the user says how large the pool is, the steps tell their needs after they have been compiled.
        late = config.fixes_pages and not config.enforce_eager
        needs = [
            StageNeeds(0, 0, stage.programs.state_bytes, stage.encoder_bytes) if late else stage.foresee_needs()
            for stage in stages
        ]
        plan = self._plan_memory(needs)
        programs = hashlib.sha256(repr([stage.programs.description for stage in stages]).encode()).hexdigest()
        self.plan = replace(plan, num_pages=peers.agree(plan.num_pages, programs))
        self._warm_up(progress or (lambda done, total, what: None))
        return_free_memory()
        if not config.enforce_eager:
            self.plan = self._plan_as_compiled(before)
        for stage in stages:
            stage.allocate()
        lora = models[0].build.lora
        if lora is not None and not config.enforce_eager:
            # What adapters add to a program takes longer when it runs for the first time, on a CPU as long as a step.
            forms = (ADAPTER, ADAPTER | FEW_ADAPTERS) if lora.may_group else (ADAPTER,)
            for bucket, features in itertools.product(self.buckets, forms):
                jax.block_until_ready(self._forward(bucket, self.packer.nothing(bucket, features)))
        peers.await_ready()

    @property
    def buckets(self):
        return self.packer.buckets

    @property
    def num_mask_words(self) -> int:
        """Words of a slot's mask: a bit for each token, those of padding included."""
        return -(-self._last.programs.vocab_size // 32)

    @property
    def num_compiled(self) -> int:
        """Programs that start-up compiled."""
        return sum(cache.num_compiled for stage in self._stages for cache in stage.caches)

    @property
    def num_loaded(self) -> int:
        """Programs that start-up found compiled."""
        return sum(cache.num_loaded for stage in self._stages for cache in stage.caches)

    @property
    def on_cpu(self) -> bool:
        """Whether its devices are parts of the host's memory."""
        return self._stages[0].programs.mesh.devices.flat[0].platform == "cpu"

    def memory_in_use(self) -> int:
        """Bytes that a device of the first stage holds now; devices that are parts of a host's memory share its use."""
        return self._stages[0].memory_in_use

    def execute(self, step: StepInput) -> PendingStep:
        """Dispatches a step's forward pass; does not wait for it."""
        for deltas in delta_chunks(step.overflow, NUM_DELTAS, self.num_ranks * self.packer.num_table_rows):
            self.change_state(PAGE_DELTAS, deltas)
        return self.forward(step.bucket, step.buffer)

    def forward(self, bucket: Bucket, message: np.ndarray) -> PendingStep:
        """Dispatches the forward pass whose message this is, i32[ranks, size]; the other processes do the same."""
        # Engines of several processes have no wide buckets (jaxengine.config.speculation).
        self._peers.announce("forward", (message,), num_tokens=bucket.num_tokens, num_seqs=bucket.num_seqs)
        forwarded = self._peers.run(lambda: self._forward(bucket, message))
        return PendingStep(bucket, forwarded, self._fetch, self._last.drafts)

    def encode(self, encodes: Sequence[Sequence[Encode]]) -> None:
        """Dispatches the encoding of each rank's pictures, before the forward pass that is the first to need them."""
        assert self.encoder is not None
        # Engines of several processes see nothing (jaxengine.config.encoder).
        seen = [[each for each in own if each.item.modality != EMBEDS] for own in encodes]
        if any(seen):
            self._stages[0].encode(self.encoder.pack(seen))
        placed = [[each for each in own if each.item.modality == EMBEDS] for own in encodes]
        for message in self.encoder.place(placed):
            self._stages[0].place(message)

    def set_rope_deltas(self, slots: list[int], deltas: list[int]) -> None:
        """Says what the places of tokens behind these slots' prompts are more than their positions."""
        self._set_column(ROPE_DELTAS, self._rope_delta, slots, deltas)

    def sample(self, pending: PendingStep) -> None:
        """Dispatches the sampler of a step, after which nothing else can be done with it; so do the other processes.

        Before the next forward pass: that takes its tokens.
        """
        pending.sampled = self._run_head(verifier(pending.bucket.width), pending)
        pending.forwarded = None

    def pool(self, pending: PendingStep) -> None:
        """Dispatches what a pooling model tells of the prompts of a step, in the place of `sample`."""
        pending.sampled = self._run_head(POOL, pending)
        pending.forwarded = None

    def score(self, pending: PendingStep) -> None:
        """Scores the prompts of a step whose sampler has not been dispatched; the other processes do the same."""
        pending.scored = self._run_head(SCORE, pending)

    def change_state(self, name: str, *arguments: Any) -> None:
        """Runs one of STATE_CHANGES on the stages that have it; the other processes do the same."""
        self._peers.announce("change", arguments, name=name)
        self._peers.run(lambda: [stage.change_state(name, *arguments) for stage in self._stages])

    def set_params(self, rows: list[tuple[int, np.ndarray]]) -> None:
        """Stores sampling parameters: (slot, words), the latter as `param_words` gives them."""
        for first in range(0, len(rows), NUM_PARAM_ROWS):
            chunk = rows[first : first + NUM_PARAM_ROWS]
            slots = np.full(NUM_PARAM_ROWS, len(self._has_bias), np.int32)
            words = np.zeros((NUM_PARAM_ROWS, len(NEUTRAL)), np.int32)
            for index, (slot, own_words) in enumerate(chunk):
                slots[index], words[index] = slot, own_words
            self.change_state(PARAMETERS, slots, words)

    def set_bias(self, slot: int, row: np.ndarray | None) -> None:
        """Sets a slot's additive logit bias, f32[V]; None for no bias."""
        if row is None and not self._has_bias[slot]:
            return
        self._has_bias[slot] = row is not None
        row = np.zeros(self.vocab_size, np.float32) if row is None else row
        self.change_state(BIAS_ROW, np.int32(slot), self._padded(row))

    def set_masks(
        self, rows: list[tuple[int, np.ndarray | None]], places: list[tuple[int, int, np.ndarray]] | None = None
    ) -> None:
        """Sets which tokens slots may take: (slot, i32[num_mask_words]), distinct slots; None allows every token.

        places: what may stand in places of the next step with drafts: (rank, row * width + place in the row, words).
        """
        programs, num_slots = self._last.programs, self.config.max_num_seqs
        changed: list[tuple[int, np.ndarray | None]] = []
        for slot, row in rows:
            if row is not None or self._has_mask[slot]:
                rank, own = divmod(slot, num_slots)
                changed.append((rank * programs.num_masks + own, row))
                self._has_mask[slot] = row is not None
        changed += [(rank * programs.num_masks + num_slots + place, row) for rank, place, row in places or ()]
        parts, own_words = programs.num_vocab_parts, self.num_mask_words // programs.num_vocab_parts
        for first in range(0, len(changed), NUM_MASK_ROWS):
            numbers = np.full(NUM_MASK_ROWS, self.num_ranks * programs.num_masks, np.int32)
            masks = np.full((NUM_MASK_ROWS, parts, programs.stored_mask_words // parts), -1, np.int32)
            for index, (number, row) in enumerate(changed[first : first + NUM_MASK_ROWS]):
                numbers[index] = number
                if row is not None:
                    masks[index, :, :own_words] = row.reshape(parts, own_words)
            self.change_state(MASK_ROWS, numbers, masks.reshape(NUM_MASK_ROWS, -1))

    def set_token_counts(self, slot: int, prompt: np.ndarray, output: np.ndarray) -> None:
        """Tells penalties what a slot's prompt and output hold so far."""
        counts = 2 * np.bincount(output, minlength=self.vocab_size).astype(np.int32)
        counts[prompt] |= 1
        self.change_state(COUNTS_ROW, np.int32(slot), self._padded(counts))

    def set_history(self, slot: int, tokens: np.ndarray) -> None:
        """Tells what drafts are made of: the tokens i32[n] that a slot begins with."""
        if self.keeps_history:
            row = np.zeros(self.config.max_model_len, np.int32)
            row[: len(tokens)] = tokens
            self.change_state(HISTORY_ROW, np.int32(slot), row)

    @property
    def adapter_targets(self) -> AdapterTargets:
        """What an adapter may change of the model."""
        return targets_of([stage.programs.model for stage in self._stages])

    def put_adapter(self, matrices: Matrices) -> list[list[jax.Array]]:
        """An adapter's matrices on the devices, for `write_adapter`; any thread may call it."""
        return jax.block_until_ready([stage.put_adapter(matrices) for stage in self._stages])

    def write_adapter(self, slot: int, values: list[list[jax.Array]]) -> None:
        """Has steps from here on find in a slot of the pools what `put_adapter` gave."""
        for stage, own in zip(self._stages, values, strict=True):
            stage.write_adapter(slot, own)

    def set_adapters(self, slots: list[int], adapters: list[int]) -> None:
        """Says which slot of the pools these slots' adapters have, -1 for none."""
        self._set_column(ADAPTERS, self._adapter, slots, adapters)

    def expert_load(self) -> np.ndarray | None:
        """u32[layers, E], tokens that experts were picked for so far, modulo 2**32; None without experts.

        Waits for the steps in flight.
        """
        self._peers.announce("expert load")
        loads = [load for stage in self._stages if (load := self._peers.run(stage.expert_load)) is not None]
        return np.concatenate([self._fetch(load).sum(axis=0, dtype=np.uint32) for load in loads]) if loads else None

    def _set_column(self, name: str, known: np.ndarray, slots: list[int], values: list[int]) -> None:
        """Tells the devices the values that differ from what they know of these slots."""
        news = [pair for pair in zip(slots, values, strict=True) if known[pair[0]] != pair[1]]
        for first in range(0, len(news), NUM_COLUMN_ROWS):
            rows = np.full((2, NUM_COLUMN_ROWS), len(known), np.int32)
            for index, (slot, value) in enumerate(news[first : first + NUM_COLUMN_ROWS]):
                rows[:, index] = slot, value
                known[slot] = value
            self.change_state(name, *rows)

    def _forward(self, bucket: Bucket, message: np.ndarray) -> Forwarded:
        output = None
        for stage in self._stages:
            output = stage.forward(bucket, message, output)
        assert isinstance(output, Forwarded)
        return output

    def _run_head(self, name: str, pending: PendingStep) -> Any:
        """A head of HEADS on what the forward pass dispatched last has left."""
        size, forwarded = HEADS[name].size_of(self.buckets, pending.bucket), pending.forwarded
        assert size is not None and forwarded is not None
        self._peers.announce(name)
        return self._peers.run(lambda: self._last.run_head(name, size, forwarded))

    def _fetch(self, array: jax.Array) -> np.ndarray:
        return self._peers.run(lambda: np.asarray(array))

    def _padded(self, row: np.ndarray) -> np.ndarray:
        """A row over the vocabulary as the sampler counts it."""
        return np.pad(row, (0, self._last.programs.vocab_size - len(row)))

    def _plan_memory(self, needs: Sequence[StageNeeds]) -> MemoryPlan:
        """The plan of the stage with the least room."""
        plans = [
            plan_memory(
                self.config,
                total=stage.device_memory,
                weights=stage.weight_bytes,
                needs=own_needs,
                page_bytes=stage.page_bytes,
                windows=self.windows,
                shared=jax.local_device_count() if self.on_cpu else 0,
            )
            for stage, own_needs in zip(self._stages, needs, strict=True)
        ]
        return min(plans, key=lambda plan: plan.num_pages)

    def _plan_as_compiled(self, before: int) -> MemoryPlan:
        """The plan with what the programs turned out to need; before: memory in use when none had been compiled.

        On a CPU what programs hold is told by the process: those compiled now hold about half of what loaded ones do.
        """
        plans = []
        for stage in self._stages:
            weights, workspace, states = stage.weight_bytes, stage.workspace_bytes, stage.programs.state_bytes
            if self.on_cpu:
                process, programs = max(0, before - weights), max(0, stage.memory_in_use - before)
            else:
                process, programs = 0, stage.program_bytes
            own = {"weights": weights, "programs": programs, "workspace": workspace, "states": states}
            own["embeddings"] = stage.encoder_bytes
            plans.append(replace(self.plan, **own, process=process))
        return max(plans, key=lambda plan: plan.planned)

    def _warm_up(self, progress: Progress) -> None:
        """Makes every executable serving can need, the costly ones first so that they show early."""
        buckets = [] if self.config.enforce_eager else sorted(self.buckets, reverse=True)
        heads = [] if self.config.enforce_eager else self._last.programs.heads()
        sizes = [] if self.config.enforce_eager or self.encoder is None else self.encoder.programs
        total = len(buckets) * len(self._stages) + len(heads) + len(sizes)
        for stage in self._stages:
            stage.plan_pool(self.plan.num_pages)
        for index, bucket in enumerate(buckets):
            for number, stage in enumerate(self._stages):
                progress(index * len(self._stages) + number, total, str(bucket))
                stage.compile_forward(bucket)
        for index, size in enumerate(sizes):
            progress(
                len(buckets) * len(self._stages) + index,
                total,
                f"encode {size} patches" if size else "place embeddings",
            )
            self._stages[0].compile_encoder(size)
        for index, (name, size) in enumerate(heads):
            progress(total - len(heads) + index, total, f"{name} {size}")
            self._last.compile_head(name, size)
        progress(total, total, "ready")
