"""Opening of the draft source on the devices: a draft model, an MTP layer of the model's checkpoint, or a head with a
checkpoint of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from jaxengine.checkpoint.model_source import ModelSource, find_model, open_model, open_weights
from jaxengine.config.base.lengths import given_length
from jaxengine.config.engine_config import ConfigError, EngineConfig, ResolvedConfig
from jaxengine.config.features.speculation import (
    DFLASH,
    DRAFT_MODEL,
    DSPARK,
    EAGLE,
    EAGLE3,
    HEADS,
    MTP,
    NAME,
    check_draft_model,
    check_head,
    check_layer,
)
from jaxengine.models.build import Build
from jaxengine.models.config.drafts.draft_heads import DraftHeadConfig
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.layers.decoder import Decoder
from jaxengine.models.layers.drafts.dflash import DFlashSource
from jaxengine.models.layers.drafts.draft_head import DraftHeadSource
from jaxengine.models.layers.drafts.eagle import EagleSource
from jaxengine.models.layers.drafts.eagle3 import Eagle3Source
from jaxengine.models.params.source import WeightSource
from jaxengine.models.registry import (
    build_dflash,
    build_eagle,
    build_eagle3,
    build_model,
    build_next_token,
    model_for_hf,
    read_dflash,
    read_eagle,
    read_eagle3,
    read_next_token,
)
from jaxengine.models.weights.views.renamed import NextTokenSource
from jaxengine.runner.extensions.drafts.programs import BlockPrograms, DraftPrograms, HeadPrograms
from jaxengine.sharding.layout import MeshLayout
from jaxengine.sharding.stages import Stage

_MASK_FILE = "mask_embedding.pt"  # of some DFlash heads


class HeadKind(NamedTuple):
    """Functions and classes of one of the methods of HEADS.

    Attributes:
      read: function of (folder, config of the target model), which returns the head's config.
      build: function of (the head's config, Build), which returns the abstract head.
      source: class of the view of its checkpoint.
      programs: class of its programs.
    """

    read: Callable[[Path, ModelConfig], DraftHeadConfig]
    build: Callable[[Any, Build], Any]
    source: type[DraftHeadSource]
    programs: type[DraftPrograms]


HEAD_KINDS: dict[str, HeadKind] = {
    EAGLE: HeadKind(read_eagle, build_eagle, EagleSource, HeadPrograms),
    EAGLE3: HeadKind(read_eagle3, build_eagle3, Eagle3Source, HeadPrograms),
    DFLASH: HeadKind(read_dflash, build_dflash, DFlashSource, BlockPrograms),
    DSPARK: HeadKind(partial(read_dflash, method=DSPARK), build_dflash, DFlashSource, BlockPrograms),
}


class OpenedDraft(NamedTuple):
    """Opened draft model or head, whose weights are not read yet.

    Attributes:
      model: abstract model.
      source: open source of its weights.
      programs: class of its programs.
    """

    model: Any
    source: ModelSource
    programs: type[DraftPrograms]


def settle_draft(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """Return the config with its draft model or head downloaded: speculative_config then has its local path, no
    revision, and the head's streams (the target layers whose hidden states it reads). A config that names no draft
    model is returned unchanged.

    model: config of the target model. Raises the errors of `open_draft`, and ConfigError for streams that differ from
    the head's.
    """
    chosen = config.speculative_config
    if chosen is None or chosen.model is None:
        return config
    draft = open_draft(config, model)
    draft.close()
    streams = draft.config.streams if isinstance(draft.config, DraftHeadConfig) else None
    if chosen.streams not in (None, streams):
        raise ConfigError(f"{NAME}.streams", chosen.streams, f"{streams}, as the head has it, or nothing")
    return replace(config, speculative_config=replace(chosen, model=str(draft.path), revision=None, streams=streams))


def open_draft(config: EngineConfig, model: ModelConfig) -> ModelSource:
    """Open the draft model or head that a config's speculative_config names; the caller closes the returned source.

    model: config of the target model. Options for the target's weights and tokenizer do not apply to the draft model.

    Raises:
      ConfigError: there is no such model, or it cannot draft for this target.
      ModelFileError: its files are missing or invalid.
    """
    chosen = config.speculative_config
    assert chosen is not None
    own = replace(
        config,
        model=chosen.model,
        revision=chosen.revision,
        load_format="dummy" if config.load_format == "dummy" else "auto",
        config_format="auto",
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
        draft = _OPEN.get(chosen.method, lambda own, model: open_model(own))(own, model)
    except ConfigError as error:
        error.args = (f"{NAME}.model: {error.args[0]}",)
        error.param = NAME
        raise
    with draft.closing_on_error():
        if isinstance(draft.config, DraftHeadConfig):
            check_head(chosen.method, draft.config, model)
        elif chosen.method == MTP:
            check_layer(draft.config, model)
        else:
            check_draft_model(draft.config, model)
    return draft


def _open_head(method: str, config: EngineConfig, model: ModelConfig) -> ModelSource:
    """Open the head of a method that `config.model` names, for at most max_model_len positions, with its weights as
    stored; without weights for load_format "dummy".

    model: config of the target model. Raises the errors of `_find_folder`, ConfigError for an embedding of the mask in
    a file of its own, and ModelFileError for missing or invalid files.
    """
    path = _find_folder(config, HEADS[method])
    if (path / _MASK_FILE).exists():
        problem = f"{NAME}.model has a {_MASK_FILE}, which is not read"
        raise ConfigError.because(NAME, problem, "name a head whose mask is a token of its vocabulary")
    head = HEAD_KINDS[method].read(path, model)
    head = head.up_to(given_length(config.max_model_len) or model.max_position_embeddings)
    weights = None if config.load_format == "dummy" else open_weights(path, config)
    return ModelSource(path=path, config=head, generation_defaults={}, weights=weights)


def _open_layer(config: EngineConfig, model: ModelConfig) -> ModelSource:
    """Open the checkpoint that `config.model` names, of which only the next-token layer is read; without weights for
    load_format "dummy".

    model: config of the target model. Raises the errors of `_find_folder`, and ModelFileError for missing or invalid
    files.
    """
    path = _find_folder(config, "a model with a next-token layer")
    draft = read_next_token(path, model)
    weights = None if config.load_format == "dummy" else _next_layer(open_weights(path, config), model)
    return ModelSource(path=path, config=draft, generation_defaults={}, weights=weights)


_OPEN: dict[str, Callable[[EngineConfig, ModelConfig], ModelSource]] = {
    **{method: partial(_open_head, method) for method in HEADS},
    MTP: _open_layer,
}


def _find_folder(config: EngineConfig, what: str) -> Path:
    """Return the folder that `config.model` names, downloaded if needed. what: name of what it has, for the error.
    Raises ConfigError for a file in place of a folder, and the errors of `find_model`.
    """
    path = find_model(config)
    if not path.is_dir():
        problem = f"{NAME}.model {str(path)!r} is a file"
        raise ConfigError.because(NAME, problem, f"name a folder of {what}, with config.json and *.safetensors")
    return path


def open_drafting(source: ModelSource, config: ResolvedConfig, layout: MeshLayout, platform: str) -> OpenedDraft | None:
    """Open the draft model or head that a config names for the target model of `source`, split over the same mesh
    layout. platform: name of the platform whose kernels run.

    Returns None without a draft method, or with one that has no weights. The weights are read later, so the `source` of
    the result stays open, and the caller closes it. Raises the errors of `open_draft`, and ConfigError if the draft
    cannot be split or used, or is not in the checkpoint.
    """
    chosen, model = config.speculative_config, source.config
    if chosen is None or not chosen.has_model:
        return None
    if chosen.method == DRAFT_MODEL:
        draft = open_draft(config, model)
        build = Build(config.dtype, layout, Stage(0, draft.config.num_layers))
        with draft.closing_on_error():
            return OpenedDraft(_split(chosen.method, lambda: build_model(draft.config, build)), draft, DraftPrograms)
    weights = source.weights
    if (kind := HEAD_KINDS.get(chosen.method)) is not None:
        if not issubclass(model_for_hf(model.architecture), Decoder):
            problem = f"{NAME}.method is {chosen.method!r}, and {model.architecture} gives no layer's hidden states"
            raise ConfigError.because(NAME, problem, "leave it out, or give another method")
        draft = _as_read(open_draft(config, model), None if isinstance(weights, Path) else weights, kind)
        with draft.closing_on_error():
            if platform == "tpu" and any(each.window and not each.causal for each in draft.config.attention):
                problem = f"{NAME}.model attends to windows on both sides of a token, which the TPU kernel does not"
                raise ConfigError.because(NAME, problem, "give a head without such layers")
            head = _split(chosen.method, lambda: kind.build(draft.config, Build(config.dtype, layout)))
        return OpenedDraft(head, draft, kind.programs)
    if chosen.model is not None:
        draft = open_draft(config, model)
        with draft.closing_on_error():
            head = _split(chosen.method, lambda: build_next_token(draft.config, Build(config.dtype, layout)))
        return OpenedDraft(head, draft, HeadPrograms)
    view = None if weights is None or isinstance(weights, Path) else _next_layer(weights, model)
    if weights is not None and (view is None or not view.names()):
        what = "a folder that jaxengine convert wrote" if view is None else "this checkpoint"
        problem = f"{NAME}.method is {chosen.method!r}, and {what} has no such layer"
        raise ConfigError.because(NAME, problem, f"give {NAME}.model, a checkpoint that has one")
    head = _split(chosen.method, lambda: build_next_token(model, Build(config.dtype, layout)))
    return OpenedDraft(head, replace(source, weights=view), HeadPrograms)


def _next_layer(weights: WeightSource, model: ModelConfig) -> NextTokenSource:
    """Return the view of a checkpoint, `weights`, with only its next-token layer for the model."""
    layer = model_for_hf(model.architecture).checkpoint_names.next_layer
    return NextTokenSource(weights, model.num_layers, layer)


def _as_read(head: ModelSource, model: WeightSource | None, kind: HeadKind) -> ModelSource:
    """Return the source of a head of this kind with its weights under the names that the head declares, and with the
    configuration that these weights determine; unchanged if it has no weights.

    model: weights of the target model, some of which the head may share; None if they cannot be read by name. Raises
    ModelFileError, after closing the head's source, for weights that cannot be used.
    """
    if head.weights is None:
        return head
    assert isinstance(head.config, DraftHeadConfig) and not isinstance(head.weights, Path)
    with head.closing_on_error():
        weights = kind.source(head.weights, head.config, model)
    return replace(head, config=weights.config, weights=weights)


def _split(method: str, build: Callable[[], Any]) -> Any:
    """Return build(), an abstract draft model or head. Raises ConfigError about speculative_config, with `method`, if
    it cannot be built or split.
    """
    try:
        return build()
    except ModelConfigError as error:
        problem = f"{NAME}.method is {method!r}, which cannot be used ({error})"
        raise ConfigError.because(NAME, problem, "leave it out") from None
    except ValueError as error:
        problem = f"{NAME}.method is {method!r}, which cannot be split as the model is ({error})"
        raise ConfigError.because(NAME, problem, "leave it out, or give another tensor_parallel_size") from None
