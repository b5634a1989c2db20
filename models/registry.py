"""Registry of models: which class reads and builds an architecture, and the abstract construction of it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flax import nnx

from jaxengine.models.architectures import (
    BIDIRECTIONAL,
    POOLING_CLASSES,
    POOLING_SUFFIXES,
    POOLINGS,
    left_out,
    usual_name,
)
from jaxengine.models.build import Build, build_abstract
from jaxengine.models.causal_lm import CausalLM
from jaxengine.models.config.attention import LayerAttention
from jaxengine.models.config.drafts import dflash, eagle, eagle3
from jaxengine.models.config.drafts.dflash import DFlashConfig
from jaxengine.models.config.drafts.eagle import EagleConfig
from jaxengine.models.config.drafts.eagle3 import Eagle3Config
from jaxengine.models.config.fields import ConfigFields, ModelConfigError
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.pooler import LAST, Pooler
from jaxengine.models.config.readers.gguf import GGUFConfig, RopeFactors, gguf_family, with_numbers, with_stored_biases
from jaxengine.models.config.readers.hf import (
    config_file,
    errors_of,
    hf_architecture,
    read_config_json,
    with_usual_fields,
)
from jaxengine.models.layers.drafts.dflash import DFlash
from jaxengine.models.layers.drafts.eagle import Eagle
from jaxengine.models.layers.drafts.eagle3 import Eagle3
from jaxengine.models.layers.drafts.next_token import next_token_class, with_next_layer
from jaxengine.models.model_classes import ENCODERS, MODELS
from jaxengine.models.params.declare import declared_params
from jaxengine.models.params.source import MODEL, CheckpointNames
from jaxengine.models.quantization.base.rules import Quantization
from jaxengine.models.quantization.registry import PLAIN, read_quantization
from jaxengine.sharding.layout import MeshLayout

_SUFFIX = re.compile(r"(For[A-Z]\w*|LMHeadModel|Model)$")
_GENERATING = ("forcausallm", "lmheadmodel")  # ends of the names of decoders, as `_plain` has them
_NO_FACTORS = RopeFactors()
QUANTIZATION = "quantization_config"
_TEXT = ("text_config", "llm_config", "language_config")  # where wrappers have the fields of a language model


def family_of(architecture: str, *, nested: bool = False) -> tuple[str, str | None]:
    """Return (the class name in MODELS or ENCODERS of an architecture's layers, its pooling task, None if it
    generates).

    nested: whether the fields of its decoder are in `text_config`; a pooling class then has the layers of
    *ForConditionalGeneration, where there is one. Names of POOLING_CLASSES are as listed; others that end as in
    POOLING_SUFFIXES have the layers of the causal model or encoder of that stem. The name of an unknown architecture is
    returned with None; it may have been replaced by its usual spelling.
    """
    if architecture in POOLING_CLASSES:
        return POOLING_CLASSES[architecture]
    architecture = usual_name(architecture)
    for suffix, task in POOLING_SUFFIXES.items():
        stem = architecture.removesuffix(suffix)
        if architecture.endswith(suffix) and architecture not in MODELS:
            for end in (*(("ForConditionalGeneration",) if nested else ()), "ForCausalLM", "LMHeadModel", "Model"):
                if (name := f"{stem}{end}") in MODELS or name in ENCODERS:
                    return name, task
    return architecture, None


def usual_pooling(architecture: str, fields: ConfigFields) -> str:
    """Return the type of pooling of a checkpoint that names none: the field `pooling` for classes in POOLINGS, an
    encoder family's own choice, otherwise LAST. Raises ModelConfigError for wrong fields.
    """
    family, _ = family_of(architecture)
    if (kinds := POOLINGS.get(architecture) or POOLINGS.get(family)) is not None:
        if (kind := fields.text("pooling", next(iter(kinds)))) not in kinds:
            raise fields.fail("pooling", ", ".join(kinds))
        return kinds[kind]
    encoder = ENCODERS.get(family)
    return LAST if encoder is None else encoder.usual_pooling(fields)


def model_for_hf(architecture: str, *, nested: bool = False) -> type[CausalLM]:
    """Return the class that has an architecture's layers; that of a Wrapper over another text part for
    "Wrapper[Text]", the two architectures. nested: see `family_of`; not used for these two. Raises ModelConfigError for
    an architecture that is not registered, with the name of the nearest one if any is similar.
    """
    architecture, _, text = architecture.partition("[")
    if text:
        from jaxengine.models.families.wrapped import over_text

        return over_text(model_for_hf(architecture), model_for_hf(text.removesuffix("]")))
    family, _ = family_of(architecture, nested=nested)
    model: Any = MODELS.get(family) or ENCODERS.get(family)
    if model is None:
        raise ModelConfigError(_unsupported(architecture, [*MODELS, *ENCODERS]))
    return model


def _with_text(model: Any, fields: ConfigFields) -> Any:
    """Return the class that builds a config.json's model: `model` itself or, if it is a Wrapper, its class over the
    decoder that the text part's model_type names. Raises ModelConfigError, with the nearest types, for a type without a
    class.
    """
    if not hasattr(model, "text_kind"):  # no Wrapper, whose module a plain model needs not
        return model
    from jaxengine.models.families.wrapped import over_text

    kind = model.text_kind(fields)
    names = {f"{stem}{end}" for stem in (_plain(kind), _plain(kind.removesuffix("_text"))) for end in _GENERATING}
    for name in MODELS:
        if _plain(name) in names:
            return over_text(model, MODELS[name])
    kinds = [_plain(_SUFFIX.sub("", name)) for name in MODELS if _plain(name).endswith(_GENERATING)]
    near = difflib.get_close_matches(_plain(kind), kinds, 3, 0.5)
    nearest = f", the nearest are {', '.join(near)}" if near else ""
    allowed = f"that of a decoder (...ForCausalLM) in docs/models.md{nearest}"
    raise ConfigFields({"model_type": kind}).fail("model_type", allowed)


def _plain(name: str) -> str:
    """Return a name in lower case, without what is neither a letter nor a digit."""
    return re.sub("[^a-z0-9]", "", name.lower())


def model_for_gguf(architecture: str) -> type[CausalLM]:
    """Return the class that reads files of this general.architecture. Raises ModelConfigError if no class reads it,
    with the name of the nearest one if any is similar.
    """
    # Only as many families are imported as come before the one that reads the file.
    classes: Any = (MODELS, ENCODERS)
    for table in classes:
        for model in table.values():
            if model.gguf_architecture == architecture:
                return model
    every = (model.gguf_architecture for table in classes for model in table.values())
    known = {name for name in every if name is not None}
    raise ModelConfigError(_unsupported(architecture, sorted(known)))


def _unsupported(architecture: str, known: Iterable[str]) -> str:
    """Return the error text for an architecture that is not among `known`, shortened to 100 characters, with the name
    of the nearest one if any is similar.
    """
    shown = repr(architecture if len(architecture) <= 100 else architecture[:97] + "...")
    known = list(known)
    # The common suffix is not evidence of similarity, so names are compared without it.
    stems = {_SUFFIX.sub("", name).lower(): name for name in known}
    near = difflib.get_close_matches(_SUFFIX.sub("", architecture[:100]).lower(), stems, 1, 0.7)
    nearest = f", the nearest is {stems[near[0]]}" if near else ""
    return (
        f"the architecture {shown} is not supported{nearest}; docs/models.md lists the {len(known)} that are, and "
        "jaxengine.register_model adds one of your own, --plugin for commands (CONTRIBUTING.md, A model family)"
    )


def read_hf(raw: Mapping[str, Any], pooler: Pooler | None = None) -> ModelConfig:
    """Return the ModelConfig of a Hugging Face config.json, `raw`. Raises ModelConfigError for wrong fields, and for an
    architecture that is not registered.

    pooler: the computation of a pooling model on hidden states; None for a model that generates. Its quantization is
    that of `quantization_config`, `compression_config` or a text config, the first that is not null. Ids of first and
    last tokens at or above the vocabulary's size are left out. With a pooler, the layers of a model whose tokens see
    their whole prompt (`sees_all`) are not causal, and its tower never cuts a prompt; without one, such a model is an
    error.
    """
    fields = ConfigFields(with_usual_fields(ConfigFields(raw).raw))
    model = model_for_hf(hf_architecture(fields), nested=fields.mapping("text_config") is not None)
    model = _with_text(model, fields)
    stored = fields.value(QUANTIZATION, None)
    stored = fields.value("compression_config", None) if stored is None else stored  # as compressed-tensors once had it
    if stored is None:
        texts = (fields.mapping(name) or {} for name in _TEXT)
        stored = next((text[QUANTIZATION] for text in texts if text.get(QUANTIZATION) is not None), None)
    names = model.checkpoint_names
    prefixes = names.prefixes if pooler is None else (*names.prefixes, *_without_base(names))
    if isinstance(stored, Mapping) and fields.has("expert_dtype"):  # as DeepSeek-V4 has it
        stored = {"expert_dtype": fields.text("expert_dtype"), **stored}
    parts = (*names.parts, *(names.tower_parts or ()))
    quantization = read_quantization(stored, prefixes, names.ends_of_modules(), parts)
    if quantization is not None and names.plain:
        quantization = replace(quantization, listed=(*quantization.listed, *names.plain))
    shape = _with_ids_of_tokens(model.read_hf(fields.with_defaults(**left_out(hf_architecture(fields)))))
    if pooler is not None and sees_all(fields):
        shape["attention"] = _seeing_all(fields, shape["attention"])
        if (tower := shape.get("tower")) is not None:  # tokens see each other in any case, so prompts are never cut
            shape["tower"] = replace(tower, attends_both_ways=False, whole_prompt=shape["max_position_embeddings"])
    config = ModelConfig(architecture=model.__name__, pooler=pooler, quantization=quantization, **shape)
    if pooler is None and not config.is_causal:
        name = "use_bidirectional_attention"
        nested = not fields.has(name) and fields.has("text_config")
        holder = fields.part("text_config") if nested else fields
        raise holder.fail(name, "false or absent for a model that generates")
    return config


def _with_ids_of_tokens(shape: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of ModelConfig without ids at or above vocab_size among bos_token_id (then None) and
    eos_token_ids.
    """
    size, bos = shape["vocab_size"], shape.get("bos_token_id")
    ends = tuple(end for end in shape.get("eos_token_ids", ()) if end < size)
    return {**shape, "bos_token_id": bos if bos is not None and bos < size else None, "eos_token_ids": ends}


def sees_all(fields: ConfigFields) -> bool:
    """Return whether the tokens of a pooling model with a decoder's layers see their whole prompt, by its class or
    because `is_causal` is false. Raises ModelConfigError for wrong fields.
    """
    return hf_architecture(fields) in BIDIRECTIONAL or not fields.boolean("is_causal", True)


def _seeing_all(fields: ConfigFields, attention: Sequence[LayerAttention]) -> tuple[LayerAttention, ...]:
    """Return `attention` of all layers with all tokens visible; an encoder's is returned unchanged. Raises
    ModelConfigError for layers with windows, chunks, states or ALiBi.
    """
    if not any(each.causal for each in attention):
        return tuple(attention)
    if any(each.window is not None or each.chunk is not None or each.state is not None for each in attention):
        raise fields.fail("is_causal", "true or absent for a model with windows, chunks or recurrent states")
    if any(each.slopes is not None for each in attention):
        raise fields.fail("is_causal", "true or absent for a decoder with ALiBi")
    return tuple(replace(each, causal=False) for each in attention)


def _without_base(names: CheckpointNames) -> list[tuple[str, str]]:
    """Return further prefix replacements for pooling models, whose checkpoint names lack the common beginning (see
    jaxengine.models.weights.views.renamed.with_prefix).
    """
    base = names.base
    return [("", MODEL), *((old.removeprefix(base), new) for old, new in names.prefixes if old.startswith(base))]


def read_folder(folder: Path | str, raw: Mapping[str, Any] | None = None) -> ModelConfig:
    """Return the ModelConfig of the generating model in a Hugging Face folder, or in one of Mistral AI's format. Raises
    ModelFileError, which names the file and the field, for a missing file and for wrong or unsupported fields.

    raw: content to use instead of the folder's config.json; None to read the file.
    """
    raw = read_config_json(folder) if raw is None else raw
    with errors_of(Path(folder) / config_file(folder)):
        return read_hf(raw)


def read_gguf(
    metadata: Mapping[str, Any],
    *,
    tie_word_embeddings: bool = True,
    rope_factors: RopeFactors = _NO_FACTORS,
    biased: Collection[str] | None = None,
    stored: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    pooler: Pooler | None = None,
) -> ModelConfig:
    """Return the ModelConfig of GGUF metadata. Raises ModelConfigError for wrong fields, and for an architecture that
    is not registered.

    Facts that are in tensors instead of metadata: whether the file lacks an output head (tie_word_embeddings), the
    content of the tensors that scale rope, if any, which matrices have a bias (`biased`, see `with_stored_biases`; None
    for those that the family usually has), and shapes of its weights (`stored`, see GGUFConfig). pooler: the
    computation of a pooling model on hidden states; None for a model that generates.
    """
    model = model_for_gguf(gguf_family(metadata, biased or ()))
    gguf = GGUFConfig(with_numbers(metadata), tie_word_embeddings, rope_factors, stored)
    shape = model.read_gguf(gguf)
    shape = shape if biased is None else with_stored_biases(shape, biased, stored)
    return ModelConfig(architecture=model.__name__, pooler=pooler, **shape)


def build_model(config: ModelConfig, build: Build) -> CausalLM:
    """Return the model of a ModelConfig with ShapeDtypeStructs for weights: nothing is allocated until load_params. It
    has its family's class or, with `build.exact`, the `exact_class` of that.

    Raises ValueError for a mesh that cannot split its weights, and ModelConfigError, a subclass, for a config that its
    family or its quantization cannot build.
    """
    family: Any = model_for_hf(config.architecture)
    if build.exact:
        from jaxengine.models.layers.exact import exact_class

        family = exact_class(family)
    return build_abstract(family, config, _as_stored(config, build))


def build_next_token(config: ModelConfig, build: Build) -> Any:
    """Return the next-token layer of the model with this config, which follows the last layer and predicts further
    tokens (jaxengine.models.layers.drafts.next_token).

    Its weights are ShapeDtypeStructs. Raises ValueError for a mesh that cannot split them, and ModelConfigError for a
    config that cannot be built.
    """
    family: Any = model_for_hf(config.architecture)
    stored, layer = config.quantization, family.checkpoint_names.next_layer
    if layer.names and isinstance(stored, Quantization):  # it names the layer's modules as the checkpoint does
        own = layer.placed(config.num_layers)
        config = replace(config, quantization=replace(stored, prefixes=(*own, *stored.prefixes)))
    return build_abstract(next_token_class(family), with_next_layer(config, layer), _as_stored(config, build))


def read_eagle(folder: Path, model: ModelConfig) -> EagleConfig:
    """Return the config of the head of EAGLE 1 or 2 in a Hugging Face folder. Raises ModelFileError, which names the
    file and the field, for a missing file, for wrong or unsupported fields, and for a model that is no such head.

    model: config of the target model, whose vocabulary size holds for a file without one. Whether head and model fit
    together is not checked here.
    """
    raw = read_config_json(folder)
    with errors_of(folder / config_file(folder)):
        fields = eagle.head_fields({"vocab_size": model.vocab_size, **with_usual_fields(raw)})
        return eagle.read_head(fields, model_for_hf(hf_architecture(fields)).read_hf(fields))


def read_eagle3(folder: Path, model: ModelConfig) -> Eagle3Config:
    """Return the config of the EAGLE-3 head in a Hugging Face folder. Raises ModelFileError, which names the file and
    the field, for a missing file, for wrong or unsupported fields, and for a model that is no such head.

    model: config of the model whose hidden states the head reads; whether they fit together is not checked here.
    """
    raw = read_config_json(folder)
    with errors_of(folder / config_file(folder)):
        fields = eagle3.head_fields(with_usual_fields(raw))
        return eagle3.read_head(fields, model_for_hf(hf_architecture(fields)).read_hf(fields), model)


def read_dflash(folder: Path, model: ModelConfig, method: str = dflash.DFLASH) -> DFlashConfig:
    """Return the config of the DFlash or DSpark head in a Hugging Face folder. Raises ModelFileError, which names the
    file and the field, for a missing file, for wrong or unsupported fields, and for a model that is no such head.

    model: config of the target model, whose vocabulary size holds for a file without one. Whether head and model fit
    together is not checked here. method: dflash.DFLASH or DSPARK.
    """
    raw = read_config_json(folder)
    with errors_of(folder / config_file(folder)):
        fields = dflash.head_fields({"vocab_size": model.vocab_size, **with_usual_fields(raw)}, method)
        layers = model_for_hf(hf_architecture(fields)).read_hf(dflash.without_windows(fields))
        return dflash.read_head(fields, layers, method)


def read_next_token(folder: Path, model: ModelConfig) -> ModelConfig:
    """Return the ModelConfig of a Hugging Face folder whose next-token layer drafts for `model`. An architecture that
    names only that layer, as "...MTPModel", is read as `model`'s. Raises the errors of `read_folder`.
    """
    raw = read_config_json(folder)
    named = hf_architecture(ConfigFields(raw))
    if named.removesuffix("Model").endswith("MTP"):
        raw = {**raw, "architectures": [model.architecture]}
    return read_folder(folder, raw)


def build_eagle(config: EagleConfig, build: Build) -> Any:
    """Return the head of EAGLE 1 or 2 (jaxengine.models.layers.drafts.eagle) of this config, with ShapeDtypeStructs for
    weights. Raises ValueError for a mesh that cannot split them, and ModelConfigError for a config that cannot be
    built.
    """
    return build_abstract(Eagle, config, build)


def build_eagle3(config: Eagle3Config, build: Build) -> Any:
    """Return the EAGLE-3 head (jaxengine.models.layers.drafts.eagle3) of this config, with ShapeDtypeStructs for its
    weights. Raises ValueError for a mesh that cannot split them, and ModelConfigError for a config that cannot be
    built.
    """
    return build_abstract(Eagle3, config, build)


def build_dflash(config: DFlashConfig, build: Build) -> Any:
    """Return the DFlash or DSpark head (jaxengine.models.layers.drafts.dflash) of this config, with ShapeDtypeStructs
    for its weights. Raises ValueError for a mesh that cannot split these, and ModelConfigError for a config that
    cannot be built.
    """
    return build_abstract(DFlash, config, build)


def _as_stored(config: ModelConfig, build: Build) -> Build:
    """Return `build` with the configuration's quantization as its scheme, unless `build` already has a scheme other
    than PLAIN or the configuration has none.
    """
    asked = config.quantization is not None and build.scheme == PLAIN
    return replace(build, scheme=config.quantization) if asked else build


def tensor_sizes(config: ModelConfig, mesh_for: Callable[[int], MeshLayout], limit: int = 16) -> list[int]:
    """Return the tensor-parallel sizes from 1 to `limit` for which the model can be built and `mesh_for(size)` splits
    it evenly, ascending.

    Raises ModelConfigError for an unknown architecture; errors of `mesh_for` are passed on.
    """
    model_class = model_for_hf(config.architecture)
    sizes = []
    for size in range(1, limit + 1):
        mesh = mesh_for(size)
        try:
            model = nnx.eval_shape(lambda mesh=mesh: model_class(config, _as_stored(config, Build("bfloat16", mesh))))
        except ValueError:
            continue  # it cannot be built so, mostly because a quantisation group of inputs would be split
        if all(param.splits_over(mesh) for param in declared_params(model)):
            sizes.append(size)
    return sizes
