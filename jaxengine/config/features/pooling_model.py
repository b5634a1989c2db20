"""Properties of an opened pooling model, for the code that computes its answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxengine.models.config.pooler import EMBED, TOKEN_CLASSIFY, TOKEN_EMBED, Dense, Pooler, Splade

NORMALIZE, SOFTMAX, SIGMOID, IDENTITY = "normalize", "softmax", "sigmoid", "identity"
RELU = "relu"
TOKEN_TASKS = (TOKEN_EMBED, TOKEN_CLASSIFY)
# Prompts of models that embed the tokens of a query and of a document differently.
QUERY, DOCUMENT = "query", "document"


class TokenTask(NamedTuple):
    """How a task about tokens makes its answer from the model's output rows, one for each prompt token.

    Attributes:
      columns: (first, end) of the columns of the model's rows that belong to the task; the end is excluded.
      activation: what use_activation applies: NORMALIZE, SOFTMAX, SIGMOID, IDENTITY or RELU.
      left_out: ids of the special first and last token of a prompt whose rows are left out of the answer; None to keep
        the row.
    """

    columns: tuple[int, int]
    activation: str
    left_out: tuple[int | None, int | None] = (None, None)


@dataclass(frozen=True)
class SentenceModel:
    """Settings in the files of a sentence-transformers model.

    Attributes:
      pooling_type: one of POOLING_TYPES.
      normalize: whether embeddings are normalised to length 1.
      prompts: texts to prepend to the input, by name; default_prompt names the one used by default.
      max_seq_length: limit of the input in tokens; None for the model's own limit.
      dense: products after the pooling, in order.
      do_lower_case: texts are lower-cased before they are tokenized.
      by_tokens: a text has an embedding for each token (ColBERT), and no pooling.
      splade: sparse pooling; None if pooling is not sparse. Its number of tokens is not known here, and 0.
      messages: whether texts are messages, of which the chat template makes prompts.
      has_processor: whether the folder names a processor, which adds special tokens to a chat template's prompt.
    """

    pooling_type: str
    normalize: bool
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    max_seq_length: int | None = None
    dense: tuple[Dense, ...] = ()
    do_lower_case: bool = False
    by_tokens: bool = False
    splade: Splade | None = None
    messages: bool = False
    has_processor: bool = False


@dataclass(frozen=True)
class PoolingModel:
    """Pooling, tasks and defaults of a pooling model.

    Attributes:
      pooler: the pooling that the model computes.
      task: EMBED, CLASSIFY or one of TOKEN_TASKS, for requests that name none of `tasks`.
      activation: effect of use_activation: NORMALIZE for an embedding; SOFTMAX, SIGMOID or IDENTITY for scores.
      use_activation: default of a request's use_activation.
      dimensions: default of a request's dimensions; None for all.
      matryoshka: sizes to which an embedding may be cut, empty for any; None if it may not be cut.
      labels: names of the labels, by number.
      sentence: settings of sentence-transformers, if there are any.
      token_rows: rows of the token table of an encoder, or of a decoder whose tokens attend to later ones; None for
        others. The tokenizer of such a model joins two texts with special tokens and gives each a token type: the id of
        a token of type n is increased by n * token_rows.
      has_token_types: whether the model distinguishes token types; otherwise ids are not increased.
      reads_messages: whether the checkpoint's chat template makes the prompt of a pair of texts, unless another
        template is given.
      reads_lists: whether the model scores pairs by reading a query together with all of its documents.
      padded_length: number of tokens up to which padding tokens follow a text, for a model trained so; 0 for no
        padding.
      tokens: tasks about tokens, by name.
      own_task: the model's task about whole prompts, EMBED or CLASSIFY; None if it only has tasks about tokens.
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
    reads_messages: bool = False
    reads_lists: bool = False
    padded_length: int = 0
    tokens: Mapping[str, TokenTask] = field(default_factory=dict)
    own_task: str | None = None

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of all tasks that a request may name."""
        return (*([] if self.own_task is None else [self.own_task]), *self.tokens)

    @property
    def cut_side(self) -> str:
        """Side on which a prompt that is too long loses tokens unless the request says otherwise: "right" of an encoder
        (with token_rows), else "left".
        """
        return "left" if self.token_rows is None else "right"

    def cut(self, token_ids: list[int], keep: int, side: str | None = None) -> list[int]:
        """Return at most `keep` (at least 1) of the token ids; the list itself if it is not longer.

        side: where ids are removed, "left" or "right"; None for `cut_side`. An encoder (token_rows is not None) keeps
        its first and its last token, which are special, on either side; with a `keep` of 1 only the first ("left") or
        the last ("right").
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
    """Raise `error(text)`, where the text gives the allowed sizes, if this model's embeddings may not be cut to
    `dimensions`, or if it has none.
    """
    if not {EMBED, TOKEN_EMBED} & {*model.tasks}:
        raise error("None: this model classifies")
    if model.matryoshka is None:
        raise error("None: the model is not said to be trained for it (is_matryoshka, matryoshka_dimensions)")
    if model.matryoshka and dimensions not in model.matryoshka:
        raise error(", ".join(map(str, model.matryoshka)))
