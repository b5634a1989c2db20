"""Properties of an opened pooling model, for the code that computes its answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from jaxengine.models.config.pooler import Dense, Pooler

EMBED, CLASSIFY = "embed", "classify"
NORMALIZE, SOFTMAX, SIGMOID, IDENTITY = "normalize", "softmax", "sigmoid", "identity"


@dataclass(frozen=True)
class SentenceModel:
    """Settings in the files of a sentence-transformers model.

    Attributes:
      pooling_type: LAST, MEAN or CLS.
      normalize: whether embeddings are normalised to length 1.
      prompts: texts to prepend to the input, by name; default_prompt names the one used by default.
      max_seq_length: limit of the input in tokens; None for the model's own limit.
      dense: products behind the pooling, in order.
      do_lower_case: texts are lower-cased before they are tokenized.
    """

    pooling_type: str
    normalize: bool
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    max_seq_length: int | None = None
    dense: tuple[Dense, ...] = ()
    do_lower_case: bool = False


@dataclass(frozen=True)
class PoolingModel:
    """How a pooling model's answers are computed.

    Attributes:
      pooler: the pooling that the model computes.
      task: EMBED or CLASSIFY.
      activation: effect of use_activation: NORMALIZE for an embedding; SOFTMAX, SIGMOID or IDENTITY for scores.
      use_activation: default of a request's use_activation.
      dimensions: default of a request's dimensions; None for all.
      matryoshka: sizes to which an embedding may be cut, empty for any; None if it may not be cut.
      labels: names of the labels, by number.
      sentence: settings of sentence-transformers, if there are any.
      token_rows: rows of the token table of a model whose tokens see later ones; None for others. Its tokenizer joins
        two texts with special tokens and tells them apart by types: a token of type n has n * token_rows more than its
        id.
      has_token_types: whether the model tells them apart; otherwise types leave ids as they are.
    """

    pooler: Pooler
    task: str
    activation: str
    use_activation: bool = True
    dimensions: int | None = None
    matryoshka: tuple[int, ...] | None = None
    labels: Mapping[int, str] = field(default_factory=dict)
    sentence: SentenceModel | None = None
    token_rows: int | None = None
    has_token_types: bool = False

    @property
    def cut_side(self) -> str:
        """Side on which a prompt that is too long loses tokens unless the request says otherwise: "left" or "right"."""
        return "left" if self.token_rows is None else "right"

    def cut(self, token_ids: list[int], keep: int, side: str | None = None) -> list[int]:
        """Return at most `keep` of the token ids.

        side: where the others are removed, "left" or "right"; None for `cut_side`. An encoder keeps its first and its
        last token, which are special, whatever the side.
        """
        side = side or self.cut_side
        if len(token_ids) <= keep:
            return token_ids
        if self.token_rows is None:
            return token_ids[:keep] if side == "right" else token_ids[-keep:]
        if side == "left":
            return [token_ids[0], *token_ids[len(token_ids) - keep + 1 :]]
        return [*token_ids[: keep - 1], token_ids[-1]]


def check_dimensions(model: PoolingModel, dimensions: int, error: Callable[[str], Exception]) -> None:
    """Raise `error(text)`, where the text says which sizes are allowed, if embeddings of this model may not be cut to
    `dimensions`.
    """
    if model.task != EMBED:
        raise error("None: this model classifies")
    if model.matryoshka is None:
        raise error("None: the model is not said to be trained for it (is_matryoshka, matryoshka_dimensions)")
    if model.matryoshka and dimensions not in model.matryoshka:
        raise error(", ".join(map(str, model.matryoshka)))
