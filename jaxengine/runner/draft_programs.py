"""The programs of a draft model beside those of the model that it drafts for: a closed set, nothing allocated.

One for each bucket: in steps without drafts `extend`, which writes the draft model's keys and values, in wide ones
`draft`, which makes the drafts (jaxengine.runner.draft_step).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from flax import nnx

from jaxengine.config.engine_config import ConfigError, ResolvedConfig
from jaxengine.config.speculation import NAME
from jaxengine.runner.draft_step import DraftSpec, make_draft, make_extend
from jaxengine.runner.program import Program, abstract_params, program_on
from jaxengine.runner.step_programs import StepPrograms
from models.build import Build
from models.cache import KVPages, abstract_kv, device_kv, page_bytes_of_group, paged_groups
from models.causal_lm import CausalLM
from models.config.model_config import ModelConfig
from models.registry import build_model
from scheduler.buckets import Bucket
from sharding.layout import MeshLayout
from sharding.stages import Stage


def build_draft(model: ModelConfig, config: ResolvedConfig, layout: MeshLayout) -> CausalLM:
    """The abstract draft model, split as the model that it drafts for. Raises ConfigError where it cannot be."""
    try:
        return build_model(model, Build(config.dtype, layout, Stage(0, model.num_layers)))
    except ValueError as error:
        problem = f"the draft model of {NAME} cannot be split over {layout.model} devices ({error})"
        raise ConfigError.because(NAME, problem, "take another draft model, or another tensor_parallel_size") from None


class DraftPrograms:
    """Of one draft model, for the steps of one model on one mesh.

    Attributes:
      model: the draft model, abstract.
      target: the programs of the model that it drafts for.
      description: everything static that the shapes do not tell; part of the key of a stored executable.
    """

    def __init__(self, model: CausalLM, target: StepPrograms, config: ResolvedConfig):
        self.model = model
        self.target = target
        # Its keys and values are never coded: they are few, and need no scales.
        self._groups = model.cache_groups(config.block_size, config.dtype, hybrid=False)
        self._group = [group.window for group in paged_groups(target.groups)].index(None)
        self._graph, params = nnx.split(model)
        self._params_tree = jax.tree.structure(params)
        settings = self._groups, self._group, target.packer.page_size, target.layout
        self.description = repr((model.config, model.build, *settings))

    @property
    def page_bytes(self) -> int:
        """Bytes that the draft model keeps of one page on one device."""
        return page_bytes_of_group(self._groups, layout=self.target.layout)

    def kv_shapes(self, num_pages: int) -> KVPages:
        """Its pool beside one of `num_pages` pages per rank, abstract."""
        return abstract_kv(self._groups, num_pages, layout=self.target.layout, mesh=self.target.mesh)

    def pool(self, kv: KVPages) -> Program:
        """() -> its pool of these shapes, each device making its own part."""
        return program_on(self.target.mesh, "draft's pool", partial(device_kv, kv), (), kv, ())

    def beside(self, bucket: Bucket, params: Sequence[Any], kv: KVPages) -> Program:
        """What runs before a bucket's forward pass: `extend`, and `draft` where its decodes have drafts."""
        own, state = abstract_params(params), self.target.state_shapes
        message = self.target.message_shape(bucket)
        assert state.tokens is not None
        layout = self.target.packer.layouts[bucket]
        where = layout, self.target.packer.page_size, self._group, bucket.width
        spec = DraftSpec(self._graph, self._params_tree, *where)
        if bucket.width == 1:
            arguments = own, kv, state.slots, state.tokens.last_token, message
            return program_on(self.target.mesh, f"draft's {bucket}", make_extend(spec), arguments, kv, (1,))
        arguments = own, kv, state.slots, state.tokens, state.sampling, message
        results = kv, self.target.draft_shapes(bucket)
        return program_on(self.target.mesh, f"drafts of {bucket}", make_draft(spec), arguments, results, (1,))
