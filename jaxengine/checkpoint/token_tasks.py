"""Reads a checkpoint's heads for the tokens of prompts: ColBERT's projection, bge-m3's heads, labels of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from jaxengine.config.features.pooling_model import NORMALIZE, RELU, PoolingModel, TokenTask
from jaxengine.models.architectures import TOKEN_HEADS
from jaxengine.models.config.fields import MAX_HIDDEN, ConfigFields, ModelConfigError
from jaxengine.models.config.pooler import PROJECTIONS, TOKEN_CLASSIFY, TOKEN_EMBED, Dense, Pooler, TokenHead
from jaxengine.models.config.readers.hf import text_fields
from jaxengine.models.model_classes import ENCODERS
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.registry import family_of
from jaxengine.models.weights.formats.safetensors import SafetensorsCheckpoint

# Modules of BAAI/bge-m3, in separate files: (task, module).
M3_HEADS = ((TOKEN_EMBED, "colbert_linear"), (TOKEN_CLASSIFY, "sparse_linear"))
# The tasks of a model that embeds tokens as it embeds prompts, whatever the size of its embeddings.
EMBEDDINGS: Mapping[str, TokenTask] = {TOKEN_EMBED: TokenTask((0, MAX_HIDDEN), NORMALIZE)}
_M3 = "BgeM3EmbeddingModel"
# Modules of retrievers over the hidden states of a model that sees, as transformers and as their authors name them.
_PROJECTIONS = ("embedding_proj_layer", "custom_text_proj")


def own_projection(folder: Path, fields: ConfigFields) -> Dense:
    """Return the sizes of the projection that a checkpoint has among its weights under one of PROJECTIONS.

    Only the header of the weights is read. fields: content of config.json. Raises ModelFileError for a checkpoint
    without the projection or with another shape, ModelConfigError for a wrong hidden_size.
    """
    checkpoint = SafetensorsCheckpoint(folder)
    try:
        name = next((name for name in PROJECTIONS if name in checkpoint.names()), None)
        if name is None:
            raise ModelFileError(folder, f"has no {PROJECTIONS[0]}, the projection of embeddings, and no module Dense")
        shape = checkpoint.shape(name)
    finally:
        checkpoint.close()
    if len(shape) != 2 or not 1 <= shape[0] <= MAX_HIDDEN or _hidden_size(fields) not in (None, shape[1]):
        raise ModelFileError(folder, f"must be a matrix with hidden_size columns, got {shape}", name)
    return Dense(shape[1], shape[0], False, "Identity", "")


def retrieval_head(folder: Path, fields: ConfigFields, architecture: str) -> TokenHead | None:
    """Return the projection of a retriever: its class's own (jina-reranker-v3), or one of _PROJECTIONS over a model
    that sees (ColPali, ColQwen2); None for a checkpoint without it.

    Only the header of the weights is read. fields: content of config.json, whose text model has hidden_size. Raises
    ModelFileError for another shape, and if the class's own is missing.
    """
    own, size = TOKEN_HEADS.get(architecture), _hidden_size(fields)
    checkpoint = SafetensorsCheckpoint(folder)
    try:
        shapes = {name: checkpoint.shape(name) for name in checkpoint.names()}
    finally:
        checkpoint.close()
    module = next((each for each in _PROJECTIONS if f"{each}.weight" in shapes), None) if own is None else own.source
    if module is None:
        return None

    def rows(module: str, columns: int | None) -> int:
        """Return the number of rows of a module's matrix. Raises ModelFileError unless it has 1 to MAX_HIDDEN, and
        `columns` columns (None: any number).
        """
        shape = shapes.get(f"{module}.weight", ())
        if len(shape) != 2 or not 1 <= shape[0] <= MAX_HIDDEN or columns not in (None, shape[1]):
            expected = "hidden_size" if columns is None or columns == size else columns
            raise ModelFileError(folder, f"must be a matrix with {expected} columns, got {shape}", f"{module}.weight")
        return shape[0]

    if own is None or own.inner is None:
        return TokenHead(TOKEN_EMBED, rows(module, size), module, bias=f"{module}.bias" in shapes)
    inner = rows(own.inner, size)
    return own._replace(width=rows(module, inner), inner_width=inner)


def _hidden_size(fields: ConfigFields) -> int | None:
    """Return hidden_size of a config.json's text model; None without it. Raises ModelConfigError for a wrong one."""
    text = text_fields(fields) if fields.has("text_config") else fields
    return text.integer("hidden_size", None)


def has_m3_heads(folder: Path, architecture: str) -> bool:
    """Whether a folder has bge-m3's additional heads and an architecture that uses them.

    Raises ModelConfigError if the architecture requires them and they are missing.
    """
    family = family_of(architecture)[0]
    files = [any((folder / f"{name}{end}").is_file() for end in (".safetensors", ".pt")) for _, name in M3_HEADS]
    if architecture == _M3 and not all(files):
        names = " and ".join(name for _, name in M3_HEADS)
        raise ModelConfigError(f"{_M3} needs {names} in files of these names, .safetensors or .pt")
    return all(files) and family == "XLMRobertaModel" and not architecture.endswith("ForSequenceClassification")


def with_tokens(model: PoolingModel, folder: Path, architecture: str, fields: ConfigFields) -> PoolingModel:
    """Return the model with its tasks about tokens, and the heads that they need.

    model: complete for prompts, or with a head of labels for tokens. Sparse poolers, and encoders that score prompts,
    have no such tasks and are returned unchanged. fields: content of config.json. Raises ModelConfigError if
    heads of bge-m3 that the architecture requires are missing, or their fields are invalid.
    """
    pooler = model.pooler
    if pooler.splade is not None:
        return model
    if pooler.token_heads:  # labels of tokens, or a retriever's projection
        (head,) = pooler.token_heads
        tokens = {head.task: TokenTask((0, head.width), model.activation)}
        return replace(model, pooler=replace(pooler, answers_tokens=True), tokens=tokens)
    if has_m3_heads(folder, architecture):
        return _with_m3(model, pooler, fields)
    is_encoder = family_of(architecture)[0] in ENCODERS
    if pooler.classifier is not None:
        if is_encoder:  # its scores are of a prompt's first token
            return model
        tokens = {TOKEN_CLASSIFY: TokenTask((0, pooler.classifier.num_labels), model.activation)}
    else:
        tokens = EMBEDDINGS
    return replace(model, pooler=replace(pooler, answers_tokens=True), tokens=tokens)


def with_token_labels(pooler: Pooler, num_labels: int, architecture: str = "") -> Pooler:
    """Return the pooler with a head that scores labels for each token, in place of its other heads for tokens.

    The head is `architecture`'s own, which may have another number of labels (a reward model's), or else the family's
    usual one, with `num_labels` labels.
    """
    head = TOKEN_HEADS.get(architecture) or TokenHead(TOKEN_CLASSIFY, num_labels)
    return replace(pooler, token_heads=(head if head.width else head._replace(width=num_labels),))


def _with_m3(model: PoolingModel, pooler: Pooler, fields: ConfigFields) -> PoolingModel:
    """Return the model with bge-m3's tasks about tokens: embeddings of tokens, and weights of tokens.

    fields: content of config.json, for hidden_size and the ids of the first and last token, for which there are no
    results; by default 1024, 0 and 2. Raises ModelConfigError for invalid ones.
    """
    first, last = fields.integer("bos_token_id", 0, minimum=0), fields.integer("eos_token_id", 2, minimum=0)
    size = fields.integer("hidden_size", 1024)
    heads = tuple(TokenHead(task, size if task == TOKEN_EMBED else 1, name) for task, name in M3_HEADS)
    tokens: Mapping[str, TokenTask] = {
        TOKEN_EMBED: TokenTask((0, size), NORMALIZE, (first, None)),
        TOKEN_CLASSIFY: TokenTask((size, size + 1), RELU, (first, last)),
    }
    return replace(model, pooler=replace(pooler, answers_tokens=True, token_heads=heads), tokens=tokens)
