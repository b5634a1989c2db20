"""What is known of a pooling model once its files have been read, for whoever makes answers. Reads no file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from models.config.pooler import Pooler

EMBED, CLASSIFY = "embed", "classify"
NORMALIZE, SOFTMAX, SIGMOID, IDENTITY = "normalize", "softmax", "sigmoid", "identity"


@dataclass(frozen=True)
class SentenceModel:
    """What the files of a sentence-transformers model say.

    Attributes:
      pooling_type: LAST, MEAN or CLS.
      normalize: embeddings are made of length 1.
      prompts: what to put before a text, by name; default_prompt is the name of the one used when none is named.
      max_seq_length: tokens of the longest input, None for the model's own limit.
    """

    pooling_type: str
    normalize: bool
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    max_seq_length: int | None = None


@dataclass(frozen=True)
class PoolingModel:
    """What answers of a pooling model are made of, beside what it computes.

    Attributes:
      pooler: the latter.
      task: EMBED or CLASSIFY.
      activation: what use_activation asks for: NORMALIZE of an embedding; SOFTMAX, SIGMOID or IDENTITY of scores.
      use_activation: where a request does not say.
      dimensions: the same, of an embedding; None for all.
      matryoshka: sizes to which an embedding may be cut, empty for any; None where it may not be cut.
      labels: names of the labels, by their numbers.
      sentence: what the files of sentence-transformers say, if there are any.
    """

    pooler: Pooler
    task: str
    activation: str
    use_activation: bool = True
    dimensions: int | None = None
    matryoshka: tuple[int, ...] | None = None
    labels: Mapping[int, str] = field(default_factory=dict)
    sentence: SentenceModel | None = None


def check_dimensions(model: PoolingModel, dimensions: int, error: Callable[[str], Exception]) -> None:
    """Raises `error` of what is allowed for a size to which embeddings of this model may not be cut."""
    if model.task != EMBED:
        raise error("None: this model classifies")
    if model.matryoshka is None:
        raise error("None: the model is not said to be trained for it (is_matryoshka, matryoshka_dimensions)")
    if model.matryoshka and dimensions not in model.matryoshka:
        raise error(", ".join(map(str, model.matryoshka)))
