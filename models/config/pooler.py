"""Pooling of a prompt's hidden states in a pooling model.

It says which hidden states are pooled and how they are scored. The host normalises, activates and names labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from jaxengine.models.config.fields import ModelConfigError

LAST, MEAN, CLS = "LAST", "MEAN", "CLS"
POOLING_TYPES = (LAST, MEAN, CLS)
MAX_LABELS = 1 << 16
# Stands for a token in the answer of a pooled prompt: the row that ends the prompt gives it, and it ends the request.
POOLED = 0


# Beginning of the names of Dense modules' tensors; behind it, the number of the module.
DENSE = "dense"
# Of Dense modules, by the names of torch's classes.
DENSE_ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid", "SiLU")


class Dense(NamedTuple):
    """Product after the pooling: activation(pooled @ weight + bias).

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
      token_ids: the rows of the output head that stand for the labels; empty where the checkpoint has a matrix of its
        own, score.weight.
      difference: there is one label, whose score is the logit of the second of two tokens less that of the first.
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


@dataclass(frozen=True)
class Pooler:
    """Pooling of the hidden states of a prompt into one, and its use.

    Attributes:
      pooling_type: LAST, the state of the last token; CLS, of the first; MEAN, the mean over all of them.
      classifier: scores of the pooled state; None where the state itself is the result, an embedding.
      dense: products that make the embedding of the state, in order.
    """

    pooling_type: str = LAST
    classifier: Classifier | None = None
    dense: tuple[Dense, ...] = ()

    def width(self, hidden_size: int) -> int:
        """Return the number of elements of an embedding, for a model with hidden states of this size."""
        return self.dense[-1].out_features if self.dense else hidden_size

    @property
    def reads_all(self) -> bool:
        """Whether pooling needs hidden states of tokens before the last."""
        return self.pooling_type != LAST
