"""Programs of a draft model or head, in addition to those of its target model: a closed set; nothing is allocated.

A draft model has one program for each bucket, run before the bucket's forward pass: in steps without drafts it writes
the draft model's keys and values, in wide steps it makes the drafts (step.py). A draft head has one for each bucket
that runs once its tokens have been sampled, and one that makes drafts before each wide bucket (head_step.py, and
block_step.py for a head that drafts a block at once).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.config.engine_config import ResolvedConfig
from jaxengine.models.cache import KVPages, abstract_kv, device_kv, page_bytes_of_group, paged_groups
from jaxengine.models.forward_batch import StepLayout
from jaxengine.runner.base.program import Program, abstract_params, program_on
from jaxengine.runner.extensions.drafts.block_step import make_block_draft, make_fill
from jaxengine.runner.extensions.drafts.head_step import (
    DraftHeadSpec,
    HeadState,
    HeadWeights,
    make_follow,
    make_head_draft,
)
from jaxengine.runner.extensions.drafts.section import NAME, drafts_of
from jaxengine.runner.extensions.drafts.step import DraftSpec, make_draft, make_extend
from jaxengine.runner.programs.step_programs import StepPrograms
from jaxengine.scheduler.batches.buckets import Bucket
from jaxengine.sharding.rules import part_bytes, part_shape


class DraftPrograms:
    """Programs of one draft model, for the steps of one target model on one mesh.

    Attributes:
      model: the draft model, abstract.
      target: the programs of the target model.
      description: static facts that the shapes do not show; part of the key of a stored executable.
      pages_description: those of them on which the content and form of a replica's pages depend.
      fills_after_sample: whether a step's keys and values are written by the program of `after`.
    """

    fills_after_sample: ClassVar[bool] = False

    def __init__(self, model: Any, target: StepPrograms, config: ResolvedConfig):
        """Store the abstract draft model, split into graph and weights, and its cache groups. config: the engine's."""
        self.model = model
        self.target = target
        # Its keys and values are never quantised: they are few, and need no scales.
        self._groups = model.cache_groups(config.block_size, config.dtype, hybrid=False)
        self._group = [group.window for group in paged_groups(target.groups)].index(None)
        self._has_tiers = config.kv_offloading_bytes > 0
        self._graph, params = nnx.split(model)
        self._params_tree = jax.tree.structure(params)
        settings = self._groups, self._group, target.packer.page_size, target.platform
        about = type(model).__name__, model.config
        self.description = repr((*about, model.build, *settings))
        self.pages_description = repr((*about, model.build.of_pages, *settings))

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of the draft model's pool on one device."""
        return page_bytes_of_group(self._groups, platform=self.target.platform)

    def memory(self) -> dict[str, int]:
        """Return the bytes on one device, by purpose, of the arrays that the draft model holds besides its weights and
        its pool: those in which pages of the pool are copied to host memory and back; none without tiers.
        """
        if not self._has_tiers:
            return {}
        from jaxengine.runner.extensions.offload import bytes_on_their_way

        return {"draft pages on their way": bytes_on_their_way(self.page_bytes)}

    def weights(self, own: Sequence[Any], model: Sequence[Any]) -> Any:
        """Return the weights that the programs take: the draft model's leaves, and leaves of the target model if they
        are needed, as a head's are.

        own, model: leaves of the draft model and of the target, arrays or shapes.
        """
        return own

    def kept_shapes(self, num_pages: int) -> Any:
        """Return the abstract arrays that stay on the devices between steps: the draft model's pool, with as many pages
        (`num_pages`) per replica as the target's.
        """
        return abstract_kv(self._groups, num_pages, platform=self.target.platform, mesh=self.target.mesh)

    def pages_of(self, kept: Any) -> KVPages:
        """Return the pool among the arrays of `kept_shapes`, abstract or real."""
        return kept

    def with_pages(self, kept: Any, pages: KVPages) -> Any:
        """Return the arrays of `kept_shapes` with another pool."""
        return pages

    def start(self, kept: Any) -> Program:
        """Return the program () -> the initial arrays of `kept_shapes`; each device creates its own part.

        kept: their shapes. A pool begins as `device_kv` creates it, other arrays as zeros.
        """
        return program_on(self.target.mesh, "draft's pool", partial(device_kv, kept), (), kept, ())

    def before(self, bucket: Bucket, weights: Any, kept: Any) -> Program | None:
        """Return the program that runs before a bucket's forward pass; None if there is none.

        It is (weights, kept, DeviceState, message) -> kept; for a wide bucket the result is (kept, Drafts). weights,
        kept: shapes.
        """
        if bucket.width == 1:
            return self._program(f"draft's {bucket}", make_extend(self._spec(bucket)), bucket, weights, kept)
        return self._drafting(bucket, make_draft(self._spec(bucket)), weights, kept)

    def after(self, bucket: Bucket, weights: Any, kept: Any) -> Program | None:
        """Return the program that runs once a bucket's tokens have been sampled; None if there is none, as for a draft
        model.

        It is (weights, kept, DeviceState, SampledRows, hidden states, message) -> kept. weights, kept: shapes.
        """
        return None

    def of_bucket(self, bucket: Bucket, weights: Any, kept: Any) -> dict[str, Program]:
        """Return those of a bucket's programs "before" and "after" that there are, by these names. weights, kept:
        shapes.
        """
        found = {"before": self.before(bucket, weights, kept), "after": self.after(bucket, weights, kept)}
        return {when: program for when, program in found.items() if program is not None}

    def _spec(self, bucket: Bucket) -> Any:
        """Return the DraftSpec of the programs for a bucket."""
        return DraftSpec(self._graph, self._params_tree, *self._where(bucket))

    def _where(self, bucket: Bucket) -> tuple[Bucket, StepLayout, int, int]:
        """Return (bucket, layout of its message, tokens of a page, index of the cache group that keeps all keys),
        fields of DraftSpec.
        """
        return bucket, self.target.packer.layouts[bucket], self.target.packer.page_size, self._group

    def _drafting(self, bucket: Bucket, function: Callable, weights: Any, kept: Any) -> Program:
        """Return the program (weights, kept, DeviceState, message) -> (kept, Drafts) of a wide bucket, with this
        function. weights, kept: shapes.
        """
        results = kept, drafts_of(self.target.shape, bucket)
        return self._program(f"drafts of {bucket}", function, bucket, weights, kept, results=results)

    def _program(
        self,
        name: str,
        function: Callable,
        bucket: Bucket,
        weights: Any,
        kept: Any,
        step: tuple[Any, ...] = (),
        results: Any = None,
    ) -> Program:
        """Return the program with this name and `function` of (weights, kept, DeviceState, *step, message), with `kept`
        donated.

        step: further arguments, shapes. results: shapes; None for those of `kept`.
        """
        leaves, tree = jax.tree.flatten(weights)
        weights = jax.tree.unflatten(tree, abstract_params(leaves))
        arguments = weights, kept, self.target.state_shapes, *step, self.target.message_shape(bucket)
        return program_on(self.target.mesh, name, function, arguments, kept if results is None else results, (1,))


class BlockPrograms(DraftPrograms):
    """Programs of a draft head that reads the target model's hidden states and drafts a block at once, for the steps of
    one target on one mesh.
    """

    fills_after_sample: ClassVar[bool] = True

    def __init__(self, model: Any, target: StepPrograms, config: ResolvedConfig):
        """Store the abstract head, and the static parts of the target model. config: the engine's."""
        super().__init__(model, target, config)
        graph, params = nnx.split(target.model)
        self._lender = graph, jax.tree.structure(params)
        self.description += target.description

    def weights(self, own: Sequence[Any], model: Sequence[Any]) -> HeadWeights:
        return HeadWeights(list(own), list(model))

    def before(self, bucket: Bucket, weights: HeadWeights, kept: Any) -> Program | None:
        """Return the program that proposes the drafts of a wide bucket; None for a bucket without drafts."""
        if bucket.width == 1:
            return None
        return self._drafting(bucket, self._make_draft(self._spec(bucket)), weights, kept)

    def after(self, bucket: Bucket, weights: HeadWeights, kept: Any) -> Program | None:
        """Return the program that writes the head's keys and values of a step's tokens; never None."""
        forwarded = self.target.forwarded(bucket)
        step = forwarded.rows, forwarded.sections[NAME]
        return self._program(f"head's {bucket}", self._make_after(self._spec(bucket)), bucket, weights, kept, step)

    def _make_draft(self, spec: DraftHeadSpec) -> Callable:
        """Return the function of the program `before`."""
        return make_block_draft(spec)

    def _make_after(self, spec: DraftHeadSpec) -> Callable:
        """Return the function of the program `after`."""
        return make_fill(spec)

    def _spec(self, bucket: Bucket) -> DraftHeadSpec:
        graph, tree = self._lender
        return DraftHeadSpec(self._graph, self._params_tree, *self._where(bucket), model_graph=graph, model_tree=tree)


class HeadPrograms(BlockPrograms):
    """Programs of a draft head that drafts one token after another, each from the hidden state that it made last, for
    the steps of one target on one mesh.
    """

    def __init__(self, model: Any, target: StepPrograms, config: ResolvedConfig):
        """Store the abstract head, the shape of its hidden states of slots, and the static parts of the target model.
        config: the engine's.
        """
        super().__init__(model, target, config)
        self._hidden = target.shape.rows(config.max_num_seqs, config.dtype, model.config.hidden_size)

    def memory(self) -> dict[str, int]:
        """Return what DraftPrograms.memory does, and the bytes of a hidden state for each slot."""
        return {**super().memory(), "draft states": part_bytes(self._hidden)}

    def kept_shapes(self, num_pages: int) -> HeadState:
        """Return the abstract HeadState: a pool of `num_pages` pages per replica, and a hidden state for each slot."""
        return HeadState(super().kept_shapes(num_pages), self._hidden)

    def pages_of(self, kept: HeadState) -> KVPages:
        return kept.kv

    def with_pages(self, kept: HeadState, pages: KVPages) -> HeadState:
        return kept._replace(kv=pages)

    def start(self, kept: HeadState) -> Program:
        """Return the program () -> the initial HeadState, with hidden states of zeros."""
        shape, dtype = part_shape(self._hidden), self._hidden.dtype

        def begin() -> HeadState:
            return HeadState(device_kv(kept.kv), jnp.zeros(shape, dtype))

        return program_on(self.target.mesh, "head's pool", begin, (), kept, ())

    def _make_draft(self, spec: DraftHeadSpec) -> Callable:
        return make_head_draft(spec)

    def _make_after(self, spec: DraftHeadSpec) -> Callable:
        return make_follow(spec)
