"""Programs of a draft model or draft head, for a check."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jax

from jaxengine.check.compiled.hlo import MustNotCopy
from jaxengine.check.model.programs import CheckedProgram, StagePrograms, checked_step, large_types
from jaxengine.check.model.roofline import Work
from jaxengine.check.model.shapes import model_config
from jaxengine.config.engine_config import EngineConfig
from jaxengine.config.features.speculation import DRAFT_MODEL, HEADS, check_draft_model
from jaxengine.models.build import Build
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.registry import build_model, build_next_token
from jaxengine.models.weights.adapters.pools import abstract_leaves
from jaxengine.runner.extensions.drafts.open import HEAD_KINDS, open_draft, settle_draft
from jaxengine.runner.extensions.drafts.programs import DraftPrograms, HeadPrograms
from jaxengine.runner.extensions.states.section import StatesExtension
from jaxengine.sharding.rules import part_bytes, part_shape
from jaxengine.sharding.stages import Stage


class Drafting(NamedTuple):
    """Draft model or draft head of a stage.

    Attributes:
      programs: programs that the engine runs for it.
      weights: abstract (shapes and shardings).
      weight_bytes, page_bytes: bytes on one device of the weights, and of a page of its pool.
    """

    programs: DraftPrograms
    weights: Any
    weight_bytes: int
    page_bytes: int


def settled(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """Return the config, with speculative_config completed from the config.json of a draft head if it names one.

    Other configs are returned unchanged. model: configuration of the target. Reads no weights. Raises ConfigError or
    ModelConfigError for a head that does not fit.
    """
    chosen = config.speculative_config
    if chosen is None or chosen.method not in HEADS:
        return config
    found = settle_draft(replace(config, load_format="dummy"), model)
    return replace(config, speculative_config=found.speculative_config)


def drafting(stage: StagePrograms) -> Drafting | None:
    """Return the draft model or head that the stage's config names; None if drafts come from no model.

    Its weights are abstract; a head's config.json is read. Raises ConfigError for a drafter that an engine refuses,
    ModelConfigError or ModelFileError for one whose configuration cannot be used.
    """
    chosen, config = stage.config.speculative_config, stage.config
    if chosen is None or not chosen.has_model:
        return None
    layout = stage.model.mesh
    if chosen.method == DRAFT_MODEL:
        assert chosen.model is not None
        own = model_config(chosen.model)
        check_draft_model(own, stage.model.config)
        model: Any = build_model(own, Build(config.dtype, layout, Stage(0, own.num_layers)))
        programs = DraftPrograms(model, stage.steps, config)
    else:
        build, own = Build(config.dtype, layout), stage.model.config
        if chosen.model is not None:
            own = open_draft(replace(config, load_format="dummy"), own).config
        kind = HEAD_KINDS.get(chosen.method)
        model = build_next_token(own, build) if kind is None else kind.build(own, build)
        programs = (HeadPrograms if kind is None else kind.programs)(model, stage.steps, config)
    leaves = [leaf for _, leaf in abstract_leaves(model, stage.mesh)]
    weights = programs.weights(leaves, stage.params)
    return Drafting(programs, weights, sum(map(part_bytes, leaves)), programs.page_bytes)


def accepted_states(stage: StagePrograms, *, short: bool) -> Iterator[CheckedProgram]:
    """Yield the program of each bucket with drafts that writes the states after accepted tokens, and must not copy
    them, with `short` only of the largest; nothing without states or drafts. The programs have no roofline.
    """
    for extension in stage.steps.extensions:
        if isinstance(extension, StatesExtension) and (programs := extension.programs(stage.params)):
            kept = large_types(("states", leaf) for leaf in jax.tree.leaves(programs[0].results))
            for program in programs[-1:] if short else programs:
                others = {"must_not_copy": MustNotCopy(states=kept), "expected": None}
                yield checked_step(program, stage.mesh, work=Work(0, 0), **others)


def drafts(stage: StagePrograms, num_pages: int, *, short: bool) -> Iterator[CheckedProgram]:
    """Yield the drafter's programs that run before and after the forward pass of each bucket; nothing without a
    drafter.

    num_pages: number of pages of the drafter's pool. short: only for the corners of the bucket grid. The programs have
    no roofline. Raises ConfigError for a drafter that an engine refuses.
    """
    if (found := drafting(stage)) is None:
        return
    kept = found.programs.kept_shapes(num_pages)
    pools = {math.prod(part_shape(leaf)): "draft's pool" for leaf in jax.tree.leaves(kept) if leaf.ndim > 2}
    for bucket in stage.buckets(short):
        for make in (found.programs.before, found.programs.after):
            if (program := make(bucket, found.weights, kept)) is not None:
                others = {"must_not_copy": MustNotCopy(pools), "expected": None}
                yield checked_step(program, stage.mesh, work=Work(0, 0), **others)
