"""Pooling of a prompt's hidden states in a pooling model.

Defines which hidden states are pooled and how they are scored. The host normalises, activates and names labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from jaxengine.models.config.fields import ModelConfigError

LAST, MEAN, CLS = "LAST", "MEAN", "CLS"
MAX, WEIGHTED_MEAN, MEAN_SQRT_LEN = "MAX", "WEIGHTED_MEAN", "MEAN_SQRT_LEN"
POOLING_TYPES = (LAST, MEAN, CLS, MAX, WEIGHTED_MEAN, MEAN_SQRT_LEN)
# Tasks of pooling models. The first two give one vector for a prompt, the others one for each of its tokens.
EMBED, CLASSIFY = "embed", "classify"
TOKEN_EMBED, TOKEN_CLASSIFY = "token_embed", "token_classify"
MAX_LABELS = 1 << 16
# Placeholder token in the output of a pooled prompt. The row that ends the prompt gives it, and it ends the request.
POOLED = 0


# Beginning of the names of Dense modules' tensors; the number of the module follows.
DENSE = "dense"
# Names of a projection of embeddings among a model's own weights (ColBERT, Voyage, EmbeddingGemma 2). It is the first
# Dense module of such a model.
PROJECTIONS = ("linear.weight", "model.linear.weight") + tuple(
    f"{base}embedding_projection.weight" for base in ("", "language_model.")
)
# Activations of Dense modules, by the names of torch's classes.
DENSE_ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid", "SiLU")


class Dense(NamedTuple):
    """Dense layer after the pooling: activation(pooled @ weight + bias).

    Attributes:
      in_features, out_features: elements of its input and of its result.
      bias: whether it has a bias.
      activation: one of DENSE_ACTIVATIONS.
      folder: folder of its weights, inside the model's folder.
    """

    in_features: int
    out_features: int
    bias: bool
    activation: str
    folder: str


@dataclass(frozen=True)
class Classifier:
    """Scores of labels, each the product of a pooled hidden state and a row of a matrix.

    Attributes:
      num_labels: number of labels.
      token_ids: the rows of the output head that are used for the labels; empty if the checkpoint has a separate
        matrix, score.weight.
      difference: whether there is one label, whose score is the logit of the second of two tokens minus that of the
        first; without tokens, the product with the first of two rows of score.weight minus that with the second.

    Raises ModelConfigError for less than 1 or more than MAX_LABELS labels, a difference of more than one label, and any
    number of tokens other than none or one per label (two for a difference).
    """

    num_labels: int
    token_ids: tuple[int, ...] = ()
    difference: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.num_labels <= MAX_LABELS:
            raise ModelConfigError(f"num_labels must be 1 to {MAX_LABELS}, got {self.num_labels}")
        rows = 2 if self.difference else self.num_labels
        if self.token_ids and len(self.token_ids) != rows or self.difference and self.num_labels != 1:
            raise ModelConfigError(f"{self.num_labels} labels need {rows} tokens, got {len(self.token_ids)}")


class TokenHead(NamedTuple):
    """Scores of each token, x @ weight + bias, for one of the tasks about tokens.

    Attributes:
      task: TOKEN_EMBED or TOKEN_CLASSIFY.
      width: elements of a token's scores.
      source: checkpoint module of weight and bias; None for the family's scores of labels.
      inner: checkpoint module of a projection of the hidden state, whose ReLU is x; None if x is the hidden state
        itself.
      bias: whether the modules have biases.
      inner_width: elements of x; 0 for those of a hidden state.
    """

    task: str
    width: int
    source: str | None = None
    inner: str | None = None
    bias: bool = True
    inner_width: int = 0


class Splade(NamedTuple):
    """Sparse pooling (Formal et al. 2021, arXiv:2109.10086): a prompt's vector has an element for each token of the
    vocabulary, made of the logits of a masked language model at all positions.

    Attributes:
      num_tokens: elements of a vector, tokens of the vocabulary.
      strategy: "max" or "sum", over the positions.
      num_logs: how often log(1 + x) is applied to each logit, after negative logits are set to 0.
    """

    num_tokens: int
    strategy: str = "max"
    num_logs: int = 1


@dataclass(frozen=True)
class Pooler:
    """Pooling of the hidden states of a prompt into one, and its use.

    Attributes:
      pooling_type: LAST, the state of the last token; CLS, of the first; MEAN, the mean over all of them;
        WEIGHTED_MEAN, their mean with weight i for the i-th token from 1; MEAN_SQRT_LEN, their sum divided by the
        square root of their number; MAX, the largest value of each element.
      classifier: scores of the pooled state; None if the state itself is the result, an embedding.
      dense: dense layers that compute the embedding from the state, in order.
      token_heads: the checkpoint's scores for tasks about tokens; if empty, tokens get the same scores as prompts.
      answers_tokens: whether the model supports tasks about tokens.
      splade: sparse pooling, in place of pooling_type; None for none.
      adapter: folder, inside the model's folder, of a LoRA adapter that is added to the weights when they are loaded;
        None for none.
      normed: whether hidden states are those after the last norm, in families that also have the others.
    """

    pooling_type: str = LAST
    classifier: Classifier | None = None
    dense: tuple[Dense, ...] = ()
    token_heads: tuple[TokenHead, ...] = ()
    answers_tokens: bool = False
    splade: Splade | None = None
    adapter: str | None = None
    normed: bool = True

    def width(self, hidden_size: int) -> int:
        """Return the number of elements of an embedding, for a model with hidden states of `hidden_size`: the
        vocabulary's size with splade, otherwise the last Dense module's output, otherwise hidden_size.
        """
        if self.splade is not None:
            return self.splade.num_tokens
        return self.dense[-1].out_features if self.dense else hidden_size

    @property
    def reads_all(self) -> bool:
        """Whether pooling needs hidden states of tokens before the last one."""
        return self.pooling_type != LAST or self.splade is not None
