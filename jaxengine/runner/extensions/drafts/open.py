"""What drafts on the devices, opened: a draft model, a layer of the model's own checkpoint, or an EAGLE-3 head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from jaxengine.checkpoint.model_source import ModelSource, find_model, open_model
from jaxengine.config.engine_config import ConfigError, EngineConfig, ResolvedConfig
from jaxengine.config.lengths import given_length
from jaxengine.config.speculation import DRAFT_MODEL, EAGLE3, NAME, STORED, check_draft_model, check_head
from jaxengine.models.build import Build
from jaxengine.models.config.eagle3 import Eagle3Config
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.layers.decoder import Decoder
from jaxengine.models.layers.eagle3 import Eagle3Source
from jaxengine.models.layers.next_token import NextTokenSource
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.source import WeightSource
from jaxengine.models.registry import build_eagle3, build_model, build_next_token, model_for_hf, read_eagle3
from jaxengine.models.weights.formats.safetensors import SafetensorsCheckpoint
from jaxengine.runner.extensions.drafts.programs import DraftPrograms, HeadPrograms
from jaxengine.sharding.layout import MeshLayout
from jaxengine.sharding.stages import Stage


class OpenedDraft(NamedTuple):
    """An opened draft model or head. model: abstract; source: of its weights; programs: class of its programs."""

    model: Any
    source: ModelSource
    programs: type[DraftPrograms]


def settle_draft(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """The config with its draft model or head on this machine, if it names one: speculative_config then has its path,
    no revision, and a head's streams.

    model: that which is drafted for. Raises as `open_draft`, and ConfigError for other streams than the head's.
    """
    chosen = config.speculative_config
    if chosen is None or chosen.method not in STORED:
        return config
    draft = open_draft(config, model)
    draft.close()
    streams = draft.config.streams if isinstance(draft.config, Eagle3Config) else None
    if chosen.streams not in (None, streams):
        raise ConfigError(f"{NAME}.streams", chosen.streams, f"{streams}, as the head has it, or nothing")
    return replace(config, speculative_config=replace(chosen, model=str(draft.path), revision=None, streams=streams))


def open_draft(config: EngineConfig, model: ModelConfig) -> ModelSource:
    """The draft model or the head of a config, which has a speculative_config with such a method; the caller closes it.

    model: that which is drafted for. What the config says of its weights and tokenizer is not said of what drafts.

    Raises:
      ConfigError: there is no such model, or it cannot draft for this one.
      ModelFileError: as jaxengine.checkpoint.model_source.open_model.
    """
    chosen = config.speculative_config
    assert chosen is not None
    own = replace(
        config,
        model=chosen.model,
        revision=chosen.revision,
        load_format="dummy" if config.load_format == "dummy" else "auto",
        skip_tokenizer_init=True,
        tokenizer=None,
        tokenizer_revision=None,
        quantization=None,
        generation_config="vllm",
        override_generation_config=None,
        hf_overrides=None,
        pooler_config=None,
        speculative_config=None,
    )
    try:
        draft = _open_head(own, model) if chosen.method == EAGLE3 else open_model(own)
    except ConfigError as error:
        error.args = (f"{NAME}.model: {error.args[0]}",)
        error.param = NAME
        raise
    try:
        if isinstance(draft.config, Eagle3Config):
            check_head(draft.config, model)
        else:
            check_draft_model(draft.config, model)
    except ConfigError:
        draft.close()
        raise
    return draft


def _open_head(config: EngineConfig, model: ModelConfig) -> ModelSource:
    """The EAGLE-3 head that `config.model` names; its weights as they are stored, None with load_format "dummy".

    model: that which it drafts for. Raises ConfigError and ModelFileError as `open_draft`.
    """
    path = find_model(config)
    if not path.is_dir():
        problem = f"{NAME}.model {str(path)!r} is a file"
        raise ConfigError.because(NAME, problem, "name a folder of an EAGLE-3 head, with config.json and *.safetensors")
    head = read_eagle3(path, model)
    head = head.up_to(given_length(config.max_model_len) or model.max_position_embeddings)
    return ModelSource(path, head, None if config.load_format == "dummy" else SafetensorsCheckpoint(path), {})


def open_drafting(source: ModelSource, config: ResolvedConfig, layout: MeshLayout) -> OpenedDraft | None:
    """Open the draft model or head that a config names for the model of `source`, split as that; None where drafts
    need no weights on the devices, or there are none.

    Its weights are read later, so that `source` stays open; the caller closes its own source. Raises as `open_draft`,
    and ConfigError where it cannot be split or used, or is not in the checkpoint.
    """
    chosen, model = config.speculative_config, source.config
    if chosen is None or not chosen.has_model:
        return None
    if chosen.method == DRAFT_MODEL:
        draft = open_draft(config, model)
        build = Build(config.dtype, layout, Stage(0, draft.config.num_layers))
        return OpenedDraft(_split(chosen.method, lambda: build_model(draft.config, build)), draft, DraftPrograms)
    weights = source.weights
    if chosen.method == EAGLE3:
        if not issubclass(model_for_hf(model.architecture), Decoder):
            problem = f"{NAME}.method is {chosen.method!r}, and {model.architecture} tells no layer's hidden states"
            raise ConfigError.because(NAME, problem, "leave it out, or give another method")
        draft = _as_read(open_draft(config, model), None if isinstance(weights, Path) else weights)
        shape: Any = draft.config
        head = _split(chosen.method, lambda: build_eagle3(shape, Build(config.dtype, layout)))
        return OpenedDraft(head, draft, HeadPrograms)
    if isinstance(weights, Path):
        problem = f"{NAME}.method is {chosen.method!r}, and a folder that jaxengine convert wrote has no such layer"
        raise ConfigError.because(NAME, problem, "give the checkpoint that it was made of")
    weights = None if weights is None else NextTokenSource(weights, model.num_layers)
    head = _split(chosen.method, lambda: build_next_token(model, Build(config.dtype, layout)))
    return OpenedDraft(head, replace(source, weights=weights), HeadPrograms)


def _as_read(head: ModelSource, model: WeightSource | None) -> ModelSource:
    """A head with its weights as Eagle3 names them, the head itself where it has none.

    model: the weights of the model, of which it may share some; None where these cannot be read by name. Raises
    ModelFileError; the head is closed then.
    """
    if head.weights is None:
        return head
    assert isinstance(head.config, Eagle3Config) and not isinstance(head.weights, Path)
    try:
        weights = Eagle3Source(head.weights, head.config, model)
    except ModelFileError:
        head.close()
        raise
    return replace(head, config=weights.config, weights=weights)


def _split(method: str, build: Callable[[], Any]) -> Any:
    try:
        return build()
    except ModelConfigError as error:
        problem = f"what {NAME} says, {method}, cannot be used ({error})"
        raise ConfigError.because(NAME, problem, "leave it out") from None
    except ValueError as error:
        problem = f"what {NAME} says, {method}, cannot be split as the model is ({error})"
        raise ConfigError.because(NAME, problem, "leave it out, or give another tensor_parallel_size") from None
