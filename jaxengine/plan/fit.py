"""Choice of what an engine's options leave open, so that the model fits the devices that are there (option `fit`)."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax

from jaxengine.config.base.lengths import AUTO_LENGTH
from jaxengine.config.base.platforms import PLATFORMS
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.plan.chips import CHIPS, Chip, Chips
from jaxengine.plan.model import PlannedModel, open_planned
from jaxengine.plan.plan import PARALLEL, platform_for
from jaxengine.plan.splits import Ranked, rank_splits
from jaxengine.runner.base.card import claim_card
from jaxengine.runner.base.memory import device_memory

logger = logging.getLogger(__name__)

# Context length, in tokens, below which a model is of little use. Fewer sequences and smaller steps are chosen before
# a shorter one.
LEAST_LENGTH = 4096
_LEAST_TOKENS = 64
# Patterns of jax's `device_kind` for each chip. The first that matches counts.
_KINDS = {
    "v5e": r"TPU v5 ?(lite|e)",
    "v6e": r"TPU v6 ?(lite|e)",
    "v5p": r"TPU v5p?$",
    "tpu7x": r"TPU ?v?7x?",
    "a100": r"A100\b",
    "h200": r"H200\b",
    "h100": r"H100\b",
    "b200": r"B200",
    "b300": r"B300",
    "l40s": r"L40S",
    "l4": r"L4\b",
    "a10g": r"A10G",
    "t4": r"T4\b",
    "rtx4090": r"RTX 4090",
    "rtx5090": r"RTX 5090",
    "rtxpro6000": r"RTX PRO 6000",
}


def fitted(config: EngineConfig, devices: Sequence[Any] | None = None, mesh: Any = None) -> EngineConfig:
    """Return the config without `fit` and with sizes for the options that it leaves open, and log these.

    Candidates are tried in this order, and the first that fits is taken: the best split with the whole context, or with
    LEAST_LENGTH tokens of it; the same with half as many sequences and tokens a step, and so on; then the longest
    context that fits. A max_model_len that is left open becomes "auto": the engine itself finds the longest that fits.
    Has jax's client take its share of CUDA cards (`claim_card`), after binding this process if numa_bind is set.
    devices: candidates; None for `jax.devices()`. mesh: the user's mesh, which must be None.

    Raises:
      ConfigError: nothing fits, options contradict the model or each other, or a mesh is given.
      DefaultModelMissing, ModelConfigError, ModelFileError: the model cannot be read.
    """
    if mesh is not None:
        raise ConfigError("fit", True, "False with a mesh, which says how the model is split")
    if config.numa_bind:  # before jax starts its threads, as in open_resolved
        from jaxengine.runner.start.numa import bind_process

        bind_process(config.numa_bind_nodes, config.numa_bind_cpus)
    claim_card(config.gpu_memory_utilization or PLATFORMS["gpu"].memory_utilization)
    chips = chips_of(jax.devices() if devices is None else list(devices))
    config = replace(config, fit=False)
    if config.max_model_len is None:
        config = replace(config, max_model_len=AUTO_LENGTH)
    model = open_planned(config, platform_for(chips.chip))
    try:
        sizes = _choose(model, chips)
    finally:
        model.close()
    logger.info("fit on %s: %s", chips, ", ".join(f"{name} {value}" for name, value in sizes.items()))
    return replace(config, **sizes)


def chips_of(devices: Sequence[Any]) -> Chips:
    """Return the devices, at least one, as Chips with the memory that the first one reports; all are taken to be like
    the first.

    A GPU or TPU of an unknown kind has bandwidth 0 and flops 0: its splits are ordered by how many sequences they hold.
    """
    first = devices[0]
    if first.platform == "cpu":
        return Chips(CHIPS["cpu"], len(devices))
    name = next((name for name, kind in _KINDS.items() if re.search(kind, first.device_kind)), None)
    memory = device_memory(first)
    if name is not None:
        return Chips(replace(CHIPS[name], memory=memory), len(devices))
    capability = str(getattr(first, "compute_capability", ""))
    platform = "tpu" if first.platform == "tpu" else "cuda"
    return Chips(Chip(first.device_kind, platform, capability, memory, 0.0, 0.0), len(devices))


def _choose(model: PlannedModel, chips: Chips) -> dict[str, Any]:
    """Return the first options that fit, in the order that `fitted` documents: parallel sizes, and numbers of sequences
    and tokens if reduced. Without a fit at LEAST_LENGTH, the options with the longest context. Raises the first
    ConfigError of a split if none fits.
    """
    given = {name: value for name in PARALLEL if (value := getattr(model.config, name)) not in (1, False)}
    enough = min(LEAST_LENGTH, model.source.config.max_position_embeddings)
    found: tuple[int, dict[str, Any]] | None = None
    refused: ConfigError | None = None
    for sizes in _smaller(model):
        ranked = rank_splits(replace(model, config=replace(model.config, **sizes)), chips, given, enough)
        refused = refused or ranked[0].error
        for each in ranked:
            length = _length(each)
            if length and (length >= enough or model.config.max_model_len != AUTO_LENGTH):
                return each.split.options | sizes
            if length and (found is None or length > found[0]):
                found = length, each.split.options | sizes
        if not any(map(_holds_weights, ranked)):
            break
    if found is None:
        assert refused is not None
        raise refused
    return found[1]


def _length(ranked: Ranked) -> int:
    """Return the context (max_model_len) with which a planned split fits, in tokens; 0 if it does not."""
    return ranked.plan.config.max_model_len if ranked.fits and ranked.plan is not None else 0


def _holds_weights(ranked: Ranked) -> bool:
    """Return whether the weights of a split take less than the budget of a device in every stage; False if it could not
    be planned.
    """
    plan = ranked.plan
    return plan is not None and all(stage.sizes(0).weights < plan.budget for stage in plan.stages)


def _smaller(model: PlannedModel) -> Iterator[dict[str, int]]:
    """Yield {}, then options with half, rounded down, of the model's default max_num_seqs and max_num_batched_tokens,
    and so on down to 1 and _LEAST_TOKENS. The tokens of a step are never fewer than its sequences. Options that the
    user gave are not yielded, nor is max_num_batched_tokens without chunked prefill. Raises ConfigError for options
    that contradict each other.
    """
    yield {}
    usual = model.resolved(max_model_len=min(LEAST_LENGTH, model.source.config.max_position_embeddings))
    own = model.config.max_num_seqs, model.config.max_num_batched_tokens
    # Without chunks a step has room for a whole prompt.
    open_seqs, open_tokens = own[0] is None, own[1] is None and usual.enable_chunked_prefill
    seqs, tokens = usual.max_num_seqs, usual.max_num_batched_tokens
    while True:
        before = seqs, tokens
        seqs = max(1, seqs // 2) if open_seqs else seqs
        tokens = max(min(_LEAST_TOKENS, tokens), seqs, tokens // 2) if open_tokens else tokens
        if (seqs, tokens) == before:
            return
        sizes = {"max_num_seqs": seqs} if open_seqs else {}
        yield sizes | ({"max_num_batched_tokens": tokens} if open_tokens else {})
