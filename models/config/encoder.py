"""Fields that encoders have and decoders lack: tables of positions and of token types, and an activation by name."""

from __future__ import annotations

from typing import NamedTuple

from jaxengine.models.config.fields import ConfigFields

# Values of `hidden_act`; the first is the default.
ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu")


class EncoderConfig(NamedTuple):
    """Sizes and choices of an encoder's embeddings and MLPs.

    Attributes:
      activation: one of ACTIVATIONS.
      num_token_types: rows of the table of token types; 0 for a model without one. A token of type n has its usual id
        plus n times the rows of the token table, so that ids alone describe a request.
      num_positions: rows of the position table; 0 for a model without one.
      first_position: row of the position table for a prompt's first token; if it is not 0, the token with the id
        first_position - 1 is padding and has no position.
      norm_bias: whether norms have biases.
      distances: (number of ranges of distances with one attention bias each, distance from which on all have the last
        bias); None for a model without such biases, or whose family fixes them.
      embedding_size: elements of an embedding; 0 for those of a hidden state.
      adaptation: (index of the LoRA adapter that is added to the weights, among those that the checkpoint stores with
        each matrix, factor of its products); None for the weights alone.
      head_activation, head_bias: activation and bias of the dense layer before scores of labels, where the family does
        not fix them.
    """

    activation: str
    num_token_types: int
    num_positions: int
    first_position: int = 0
    norm_bias: bool = True
    head_activation: str = ACTIVATIONS[0]
    head_bias: bool = True
    embedding_size: int = 0
    distances: tuple[int, int] | None = None
    adaptation: tuple[int, float] | None = None


def read_activation(fields: ConfigFields, name: str = "hidden_act") -> str:
    """Return the activation's name in the field `name`, the first of ACTIVATIONS if it is absent or null. Raises
    ModelConfigError for a value that is not in ACTIVATIONS.
    """
    activation = fields.text(name, ACTIVATIONS[0])
    if activation not in ACTIVATIONS:
        raise fields.fail(name, ", ".join(ACTIVATIONS))
    return activation
