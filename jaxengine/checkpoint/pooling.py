"""Determines whether a model generates or pools, and how it pools, from the engine's options and the model's files.

Reads the files of sentence-transformers and transformers for embedders, classifiers and rerankers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxengine.checkpoint.sentence_transformers import (
    MODULES,
    read_sentence_model,
    reads_messages,
    with_cross_encoder,
)
from jaxengine.checkpoint.token_tasks import (
    EMBEDDINGS,
    own_projection,
    retrieval_head,
    with_token_labels,
    with_tokens,
)
from jaxengine.config.base.stores import is_url
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.config.features.pooler_config import POOLING_FIELDS, PoolerConfig
from jaxengine.config.features.pooling_model import (
    IDENTITY,
    NORMALIZE,
    SIGMOID,
    SOFTMAX,
    TOKEN_TASKS,
    PoolingModel,
    SentenceModel,
    check_dimensions,
)
from jaxengine.models.architectures import ALIGNER, COLEMBED, LABELS, RANKING
from jaxengine.models.config.encoder import EncoderConfig
from jaxengine.models.config.fields import MAX_HIDDEN, ConfigFields, ModelConfigError
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.pooler import (
    CLASSIFY,
    CLS,
    EMBED,
    LAST,
    MAX,
    MAX_LABELS,
    MEAN,
    TOKEN_CLASSIFY,
    TOKEN_EMBED,
    Classifier,
    Dense,
    Pooler,
    Splade,
)
from jaxengine.models.config.readers.hf import hf_architecture
from jaxengine.models.model_classes import ENCODERS
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.files import ADAPTER_CONFIG
from jaxengine.models.registry import family_of, usual_pooling

_ACTIVATIONS = {"regression": IDENTITY, "multi_label_classification": SIGMOID, "single_label_classification": None}
_CLASSES = {"Sigmoid": SIGMOID, "Identity": IDENTITY, "Softmax": SOFTMAX}
# general.pooling_type of llama.cpp's GGUF files.
_GGUF_TYPES = {1: MEAN, 2: CLS, 3: LAST}
_GGUF_RANK = 4
# Architectures of GGUF files that generate nothing, and how they pool if a file does not say it.
_GGUF_POOLERS = {
    "bert": CLS,
    **dict.fromkeys(
        ("nomic-bert", "modern-bert", "jina-bert-v2", "jina-bert-v3", "gemma-embedding", "eurobert", "t5encoder"), MEAN
    ),
}
# How a reranker of an architecture pools, and the modules that its file must have: BERT's is RoBERTa if it has types.
_GGUF_RERANKERS = {
    "bert": (CLS, ("cls", "cls.output", "token_types")),
    "modern-bert": (MEAN, ("cls", "cls.norm", "cls.output")),
    **dict.fromkeys(("qwen3", "qwen3vl"), (LAST, ("cls.output",))),
}
TWO_WAY, PLAIN = "from_2_way_softmax", "no_post_processing"

# Beginning of the names of classes with a LoRA adapter for each task, in this folder of the model's.
JINA_V5, ADAPTERS = "JinaEmbeddingsV5", "adapters"
# An architecture that pools sparsely even without sentence-transformers' files.
SPLADE = "BertSpladeSparseEmbeddingModel"
# Those whose embeddings are projected by a matrix among their weights.
VOYAGE = "VoyageQwen3BidirectionalEmbedModel"
EMBEDDING_GEMMA = "EmbeddingGemma2Model"

TokenId = Callable[[str], int | None]

logger = logging.getLogger(__name__)


def read_pooling(folder: Path, raw: Mapping[str, Any], config: EngineConfig, token_id: TokenId) -> PoolingModel | None:
    """Return how the model in a Hugging Face folder pools; None for a generating model.

    Args:
      raw: its config.json, with hf_overrides.
      config: supplies runner, convert, pooler_config, hf_overrides and the parallel sizes.
      token_id: maps a token of the vocabulary to its id, and any other text to None.

    Logs a warning for a model that answers by tokens and has no chat template for pairs. Raises ConfigError for options
    that contradict the model, ModelConfigError for wrong fields of config.json, ModelFileError for other invalid files.
    """
    crosses = with_cross_encoder(folder, raw)
    architecture = hf_architecture(ConfigFields(crosses or raw))
    fields = _with_labels(ConfigFields(crosses or raw), architecture)
    family, own_task = family_of(architecture, nested=fields.mapping("text_config") is not None)
    if family in ENCODERS and fields.has("classifier_from_token"):
        raise fields.fail("classifier_from_token", f"absent for {architecture}, an encoder without logits of tokens")
    sentence = None if crosses else read_sentence_model(folder)
    if not _pools(config, architecture, own_task, crosses is not None or sentence is not None):
        return None
    if sentence is not None and sentence.by_tokens and own_task != CLASSIFY:
        own_task = TOKEN_EMBED
    task = _task(config, architecture, own_task, fields.has("classifier_from_token"))
    if crosses is not None and task != CLASSIFY and config.convert == "auto":
        raise ModelFileError(folder / MODULES, f"a CrossEncoder of {architecture} must have a module LogitScore")
    chosen, usual = config.pooler_config or PoolerConfig(), usual_pooling(architecture, fields)
    if task == CLASSIFY:
        pooler = Pooler(chosen.pooling_type or usual, _read_classifier(fields, token_id))
        assert pooler.classifier is not None
        activation = _read_activation(fields, pooler.classifier.num_labels)
        model = PoolingModel(pooler, task, activation, labels=_labels(fields), own_task=task)
        if crosses is not None and reads_messages(folder):
            model = replace(model, reads_messages=True)
        elif pooler.classifier.token_ids and pooler.classifier.num_labels == 1 and config.chat_template is None:
            logger.warning("texts of pairs are only put together: a model that answers by tokens needs a chat_template")
    elif task == TOKEN_CLASSIFY:
        pooler = with_token_labels(Pooler(CLS), _read_classifier(fields, token_id).num_labels, architecture)
        activation = _read_activation(fields, pooler.token_heads[0].width)
        model = PoolingModel(pooler, task, activation, labels=_labels(fields))
    else:
        model = _embedder(folder, fields, architecture, task, sentence, config)
    return _with_choices(with_tokens(model, folder, architecture, fields), chosen)


def _with_labels(fields: ConfigFields, architecture: str) -> ConfigFields:
    """Return the fields of a config.json with what it lacks: its llm_config's pooling and labels (Llama Nemotron VL),
    and then the labels of `architecture` in LABELS. For Qwen3's forced aligner num_labels is its number of times,
    thinker_config's classify_num, for which ModelConfigError is raised if it is wrong.
    """
    inner = fields.mapping("llm_config") or {}
    own = {name: inner[name] for name in ("pooling", "num_labels", "id2label") if name in inner}
    fields = ConfigFields({**own, **fields.raw})
    if architecture in LABELS and not fields.has("num_labels") and not fields.has("id2label"):
        return ConfigFields({**fields.raw, "id2label": dict(enumerate(LABELS[architecture]))})
    if architecture == ALIGNER:
        number = fields.part("thinker_config").integer("classify_num")
        return ConfigFields({**fields.raw, "num_labels": number, "id2label": None})
    return fields


def _embedder(
    folder: Path,
    fields: ConfigFields,
    architecture: str,
    task: str,
    sentence: SentenceModel | None,
    config: EngineConfig,
) -> PoolingModel:
    """Return how a model embeds prompts, or their tokens. Vectors are normalised unless sentence-transformers' files
    have no module for it; those of tokens always are, and sparse ones never.

    fields: content of its config.json. task: EMBED or TOKEN_EMBED. sentence: content of sentence-transformers' files,
    None without them. config: its pooler_config takes precedence. Raises ConfigError for options that a sparse pooler
    or a projection does not support, and for adapters at a URL; ModelConfigError or ModelFileError for invalid files.
    """
    pooling_type = (config.pooler_config or PoolerConfig()).pooling_type
    usual = usual_pooling(architecture, fields) if sentence is None else sentence.pooling_type
    dense, splade = () if sentence is None else sentence.dense, None if sentence is None else sentence.splade
    head = retrieval_head(folder, fields, architecture) if task == TOKEN_EMBED and not dense else None
    is_first = family_of(architecture)[0] == EMBEDDING_GEMMA  # its projection comes before any Dense module
    projects = architecture == VOYAGE or task == TOKEN_EMBED and head is None and architecture != COLEMBED
    if is_first or not dense and projects:
        dense = (own_projection(folder, fields), *dense)
        if task == EMBED and (pooling_type or usual) == MAX:  # of projected tokens; sums and single tokens may be later
            raise ConfigError("pooler_config.pooling_type", MAX, f"another type for {architecture}")
    if architecture == SPLADE:
        splade = splade or Splade(0)
    if splade is not None:
        fields.require(tie_word_embeddings=True)
        splade = splade._replace(num_tokens=fields.integer("vocab_size"))
        if pooling_type is not None:
            raise ConfigError("pooler_config.pooling_type", pooling_type, "None: the checkpoint pools sparsely")
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):  # parts of a token table give no maximum
            if (size := getattr(config, name)) > 1:
                raise ConfigError(name, size, "1 for a model that pools sparsely")
    adapter = task_adapter(folder, fields, architecture)
    if adapter is not None and config.model is not None and is_url(config.model):
        raise ConfigError("model", config.model, f"a folder or a hub id for {architecture}, whose adapters are files")
    heads = () if head is None else (head,)
    parts: dict[str, Any] = {"dense": dense, "token_heads": heads, "splade": splade, "adapter": adapter}
    pooler = Pooler(pooling_type or usual, **parts, normed=architecture != COLEMBED)
    normalize = sentence is None or sentence.normalize or task == TOKEN_EMBED
    return PoolingModel(
        pooler,
        task,
        NORMALIZE if splade is None else IDENTITY,
        normalize,
        matryoshka=_read_matryoshka(fields),
        sentence=sentence,
        own_task=None if task == TOKEN_EMBED else task,
        reads_lists=architecture == RANKING,
    )


def task_adapter(folder: Path, fields: ConfigFields, architecture: str) -> str | None:
    """Return the folder, inside a model's folder, of the LoRA adapter for the task that the field `jina_task` names, by
    default "retrieval"; None for other classes than Jina embeddings v5, and if the field is null.

    A model without a folder of adapters has none, unless the field names one: its weights contain it already. Raises
    ModelConfigError for a task without an adapter.
    """
    if not architecture.startswith(JINA_V5):
        return None
    named, found = "jina_task" in fields.raw, folder / ADAPTERS
    if (task := fields.raw.get("jina_task", "retrieval")) is None or not named and not found.is_dir():
        return None
    tasks = sorted(file.parent.name for file in found.glob(f"*/{ADAPTER_CONFIG}"))
    if task not in tasks:
        raise fields.fail("jina_task", f"null, or one of the folder {ADAPTERS}: {', '.join(tasks) or 'it has none'}")
    return f"{ADAPTERS}/{task}"


def pooling_of_gguf(
    metadata: Mapping[str, Any], config: EngineConfig, stored: Collection[str] = ()
) -> PoolingModel | None:
    """Return how the model of a GGUF file pools; None for a generating model.

    It is a reranker if the metadata say so, or if an encoder has scores of labels. It is an embedder if its
    architecture is one of _GGUF_POOLERS, if the metadata has a pooling type in _GGUF_TYPES, or if the options make it
    pool. stored: llama.cpp's names of the file's modules. Raises ConfigError for options that contradict it;
    ModelConfigError for a pooling type that is not a whole number from 0 on, and for the errors of `_gguf_reranker` and
    `_gguf_dense`.
    """
    architecture, name = metadata.get("general.architecture"), "pooling_type"
    fields = ConfigFields(metadata, f"{architecture}.")
    kind, usual = fields.integer(name, None, minimum=0), _GGUF_POOLERS.get(str(architecture))
    ranks = kind == _GGUF_RANK or usual is not None and not {"cls", "cls.output"}.isdisjoint(stored)
    found, own_task = _GGUF_TYPES.get(kind, usual), CLASSIFY if ranks else None if usual is None else EMBED
    if not _pools(config, "a GGUF file", own_task, found is not None):
        return None
    task = _task(config, "a GGUF file", own_task, False)
    chosen = config.pooler_config or PoolerConfig()
    if ranks:
        return _with_choices(_gguf_reranker(fields, str(architecture), stored, chosen), chosen)
    pooler = Pooler(chosen.pooling_type or found or LAST, dense=_gguf_dense(fields, stored), answers_tokens=True)
    return _with_choices(PoolingModel(pooler, task, NORMALIZE, tokens=EMBEDDINGS, own_task=task), chosen)


def _gguf_reranker(
    fields: ConfigFields, architecture: str, stored: Collection[str], chosen: PoolerConfig
) -> PoolingModel:
    """Return how a reranker or classifier of a GGUF file pools: as `chosen` says, else as ModernBERT's
    classifier.pooling_type does (1 mean, the default, or 2 first token), else as usual for its architecture. Labels are
    those of classifier.output_labels, one without a name if there are none; Qwen3's files, which have the rows of the
    LM head for yes and no, have one in any case. fields: those of the architecture. Raises ModelConfigError for an
    architecture whose rerankers are not read, for a file without their modules, and for a wrong type or labels.
    """
    if architecture not in _GGUF_RERANKERS:
        known = ", ".join(_GGUF_RERANKERS)
        raise ModelConfigError(f"of rerankers in GGUF files those of {known} are read, got {architecture}")
    usual, modules = _GGUF_RERANKERS[architecture]
    if missing := [name for name in modules if name not in stored]:
        raise ModelConfigError(f"a GGUF file of a reranker of {architecture} must have {', '.join(missing)}")
    if architecture == "modern-bert":
        name = "classifier.pooling_type"
        if (kind := fields.integer(name, 1)) not in (1, 2):
            raise fields.fail(name, "1 (mean) or 2 (first token)")
        usual = _GGUF_TYPES[kind]
    name = "classifier.output_labels"
    labels = fields.value(name, [])
    if not isinstance(labels, list) or not all(isinstance(each, str) for each in labels):
        raise fields.fail(name, "a list of names")
    two_way = usual == LAST
    classifier = Classifier(1 if two_way else max(1, len(labels)), difference=two_way)
    activation = _read_activation(ConfigFields({}), classifier.num_labels)
    named = {} if two_way else dict(enumerate(labels))
    return PoolingModel(
        Pooler(chosen.pooling_type or usual, classifier), CLASSIFY, activation, labels=named, own_task=CLASSIFY
    )


def _gguf_dense(fields: ConfigFields, stored: Collection[str]) -> tuple[Dense, ...]:
    """Return the Dense modules of an embedder's GGUF file, dense_2 and dense_3 as far as it stores them, without biases
    and activations; () for none. Their sizes are the fields embedding_length, dense_N_feat_in and dense_N_feat_out.
    Raises ModelConfigError for sizes that do not follow from each other or are absent, and for dense_3 alone.
    """
    names = [name for name in ("dense_2", "dense_3") if name in stored]
    if names == ["dense_3"]:
        raise ModelConfigError("a GGUF file with dense_3.weight must have dense_2.weight")
    sizes = [fields.integer(f"{name}_feat_out") for name in names]
    inputs = [fields.integer("embedding_length"), *sizes] if names else []
    for name, size in zip(names, inputs, strict=False):
        if fields.integer(f"{name}_feat_in") != size:
            raise fields.fail(f"{name}_feat_in", f"{size}, the elements of its input")
    return tuple(Dense(*each, False, "Identity", "") for each in zip(inputs, sizes, strict=False))


def with_token_rows(pooling: PoolingModel, model: ModelConfig, *, makes_types: Callable[[], bool]) -> PoolingModel:
    """Return how `model` pools, with the sizes of its prompts' tokens if these see their whole prompt.

    makes_types: whether the token types that the model's tokenizer makes are inputs; asked only of a model with types.
    """
    if model.encoder is None and model.is_causal:
        return pooling
    encoder = model.encoder or EncoderConfig("", num_token_types=0, num_positions=0)
    types = max(1, encoder.num_token_types)
    rows, padded = model.vocab_size // types, encoder.num_positions if encoder.pads else 0
    return replace(pooling, token_rows=rows, has_token_types=types > 1 and makes_types(), padded_length=padded)


def check_width(model: PoolingModel, hidden_size: int) -> None:
    """Raise an error if embeddings are requested that are longer than the model's.

    hidden_size: hidden size of the model. ConfigError is for the user's dimensions, ModelConfigError for the
    checkpoint's matryoshka_dimensions.
    """
    width = model.pooler.width(hidden_size)
    if model.dimensions is not None and model.dimensions > width:
        raise ConfigError("pooler_config.dimensions", model.dimensions, f"1 to {width}, the elements of an embedding")
    if (largest := max(model.matryoshka or (), default=0)) > width:
        raise ModelConfigError(f"matryoshka_dimensions must be at most {width}, the model's own, got {largest}")


def _pools(config: EngineConfig, name: str, own_task: str | None, says_so: bool) -> bool:
    """Whether the model pools: with runner "pooling", and with "auto" if the architecture has a pooling task, the
    model's files describe a pooling model, or convert names a task.

    config: supplies runner, convert, pooler_config and hf_overrides. name, own_task: name of the architecture, for
    messages, and its pooling task, None for one that generates. says_so: whether the model's files describe a pooling
    model. Raises ConfigError for options that contradict the model or each other.
    """
    converts = config.convert in (EMBED, CLASSIFY)
    if config.runner == "generate":
        if own_task is not None:
            raise ConfigError("runner", config.runner, f"pooling or auto: {name} has no output head")
        if converts:
            raise ConfigError("convert", config.convert, "auto or none with runner='generate'")
    pools = config.runner == "pooling" or (config.runner == "auto" and (own_task is not None or says_so or converts))
    if not pools and config.pooler_config is not None:
        raise ConfigError.because("pooler_config", "pooler_config is for pooling models", "set runner='pooling'")
    others = [name for name in config.hf_overrides or {} if name in POOLING_FIELDS]
    if not pools and others:
        raise ConfigError.because("hf_overrides", f"{others[0]} is for pooling models", "set runner='pooling'")
    return pools


def _task(config: EngineConfig, name: str, own_task: str | None, has_tokens: bool) -> str:
    """Return the pooling task that the option convert asks for.

    "auto" is the architecture's own task, or, for one that generates, CLASSIFY if has_tokens and otherwise EMBED.
    "none" is the architecture's own task. Any other value is the task itself.

    name: the architecture's name, for messages. own_task: the architecture's task, which may be a task about tokens;
    None for an architecture that generates. has_tokens: whether config.json names tokens that stand for labels. Raises
    ConfigError for a task that the checkpoint does not support, and for "none" with an architecture that generates.
    """
    task = {"auto": own_task or (CLASSIFY if has_tokens else EMBED), "none": own_task}.get(
        config.convert, config.convert
    )
    if task is None:
        raise ConfigError("convert", config.convert, f"auto, embed or classify: {name} generates")
    if own_task == CLASSIFY and task != CLASSIFY:
        raise ConfigError("convert", config.convert, f"auto or classify for {name}")
    if own_task in TOKEN_TASKS and task != own_task:
        raise ConfigError("convert", config.convert, f"auto for {name}, which answers for tokens")
    if task == CLASSIFY and own_task != CLASSIFY and not has_tokens:
        problem = f"{name} has no scores of labels, which convert={config.convert!r} needs"
        raise ConfigError.because(
            "convert", problem, "name the tokens that stand for them: hf_overrides, classifier_from_token"
        )
    return task


def _with_choices(model: PoolingModel, chosen: PoolerConfig) -> PoolingModel:
    """Return the model with the user's settings, `chosen`, in place of the checkpoint's.

    A setting of None keeps the checkpoint's, except that dimensions are always the user's. Raises ConfigError for
    dimensions or a task that the model does not have.
    """
    use_activation = model.use_activation if chosen.use_activation is None else chosen.use_activation
    if chosen.dimensions is not None:
        check_dimensions(
            model, chosen.dimensions, lambda text: ConfigError("pooler_config.dimensions", chosen.dimensions, text)
        )
    if chosen.task not in (None, *model.tasks):
        raise ConfigError("pooler_config.task", chosen.task, f"{' or '.join(model.tasks)} for this model")
    task = chosen.task or model.task
    return replace(model, task=task, use_activation=use_activation, dimensions=chosen.dimensions)


def _read_classifier(fields: ConfigFields, token_id: TokenId) -> Classifier:
    """Return how many labels are scored, and which tokens' logits stand for them if the model has no head for labels.
    Without num_labels, id2label and tokens there are two labels.

    num_labels takes precedence over id2label. classifier_from_token lists 1 to MAX_LABELS tokens, as texts or ids; it
    needs a `method`, TWO_WAY or PLAIN, which is TWO_WAY by default if is_original_qwen3_reranker is set.
    With TWO_WAY there are exactly two tokens, the one for "no" first, and one label is scored: the
    difference of their logits. fields: content of config.json. token_id: maps a token of the vocabulary to its id, and
    any other text to None. Raises ModelConfigError for invalid fields, and for texts that the vocabulary does not
    have; ids are not checked.
    """
    tokens = fields.value("classifier_from_token", None)
    if tokens is None:
        labels = fields.mapping("id2label")
        return Classifier(fields.integer("num_labels", 2 if labels is None else len(labels)))
    if not isinstance(tokens, list) or not 1 <= len(tokens) <= MAX_LABELS:
        raise fields.fail("classifier_from_token", "a list of tokens")
    ids = tuple(each if type(each) is int else token_id(each) if isinstance(each, str) else None for each in tokens)
    known = tuple(each for each in ids if each is not None)
    if len(known) != len(ids):
        raise fields.fail(
            "classifier_from_token", f"a list of tokens of the vocabulary; {tokens[ids.index(None)]!r} is none"
        )
    original = fields.boolean("is_original_qwen3_reranker", False)
    method = fields.text("method", TWO_WAY if original else None)
    if method not in (TWO_WAY, PLAIN):
        raise fields.fail("method", f"{TWO_WAY} or {PLAIN}")
    if method == TWO_WAY and len(ids) != 2:
        raise fields.fail("classifier_from_token", f"a list of two tokens with {TWO_WAY}, the one for no first")
    return Classifier(1 if method == TWO_WAY else len(ids), known, difference=method == TWO_WAY)


def _read_activation(fields: ConfigFields, num_labels: int) -> str:
    """Return the activation of the scores: the torch class that sentence_transformers.activation_fn or, without it,
    sbert_ce_default_activation_function names (sigmoid, identity or softmax), else that of problem_type
    (identity for regression, sigmoid for several labels at once), else sigmoid for one label and softmax for several.

    fields: content of config.json. Raises ModelConfigError for an unknown activation or problem_type.
    """
    problem = fields.text("problem_type", None)
    if problem is not None and problem not in _ACTIVATIONS:
        raise fields.fail("problem_type", ", ".join(_ACTIVATIONS))
    # A cross-encoder of sentence-transformers names a class of torch.
    nested = ConfigFields(fields.mapping("sentence_transformers") or {})
    for place, name in ((nested, "activation_fn"), (fields, "sbert_ce_default_activation_function")):
        if (module := place.text(name, None)) is not None:
            kind = _CLASSES.get(module.rpartition(".")[2])
            if kind is None or not module.startswith("torch.nn.modules."):
                raise place.fail(name, f"torch.nn.modules.activation's {', '.join(_CLASSES)}")
            return kind
    own = None if problem is None else _ACTIVATIONS[problem]
    return own or (SIGMOID if num_labels < 2 else SOFTMAX)


def _labels(fields: ConfigFields) -> dict[int, str]:
    """Return label names by index, from id2label, whose keys are strings in JSON; {} without it.

    Raises ModelConfigError for more than MAX_LABELS labels, and for other keys or values.
    """
    names = fields.mapping("id2label") or {}
    if len(names) > MAX_LABELS or not all(
        str(key).isdecimal() and len(str(key)) < 10 and isinstance(name, str) for key, name in names.items()
    ):
        raise fields.fail("id2label", f"at most {MAX_LABELS} names by number")
    return {int(key): name for key, name in names.items()}


def _read_matryoshka(fields: ConfigFields) -> tuple[int, ...] | None:
    """Return the sizes to which embeddings may be truncated, those of matryoshka_dimensions as listed; without it ()
    for any size if is_matryoshka is set, else None, they may not be. Raises
    ModelConfigError for sizes that are not integers from 1 to MAX_HIDDEN.
    """
    sizes, any_size = fields.value("matryoshka_dimensions", None), fields.boolean("is_matryoshka", False)
    if sizes is None:
        return () if any_size else None
    if not isinstance(sizes, (list, tuple)) or not all(type(size) is int and 1 <= size <= MAX_HIDDEN for size in sizes):
        raise fields.fail("matryoshka_dimensions", f"a list of sizes from 1 to {MAX_HIDDEN}")
    return tuple(sizes)
