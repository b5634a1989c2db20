"""Fields that encoders have and decoders lack: tables of positions and of token types, and an activation by name."""

from __future__ import annotations

from typing import NamedTuple


class Disentangled(NamedTuple):
    """Disentangled attention (He et al. 2020, arXiv:2006.03654), whose logits have parts by distance.

    Attributes:
      buckets: ranges of distances on each side; 0 for a range of its own for each distance.
      farthest: distance from which on all have the last range of their side.
      kinds: parts of logits: C2P, queries with keys of distances, and P2C, keys with queries of distances.
      normed: whether the embeddings of distances have a norm.
      shared: whether queries and keys of distances come from the projections of tokens, instead of their own.
    """

    buckets: int
    farthest: int
    kinds: tuple[str, ...]
    normed: bool
    shared: bool


C2P, P2C = "c2p", "p2c"


class EncoderConfig(NamedTuple):
    """Sizes and choices of an encoder's embeddings and MLPs.

    Attributes:
      activation: a name of jaxengine.models.layers.base.activations.ACTIVATIONS.
      gated: whether MLPs have a gate, where the family does not fix it.
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
      num_task_types: rows of the table of task types, of which every token has the first; 0 for a model without one.
      logits_bias: whether logits of a masked language model have a bias, where the family does not fix it.
      embedding_norm: whether embeddings are normed, where the family does not fix it.
      disentangled: parts of attention by distance; None for none.
      convolution: (odd number of tokens, activation) of a convolution of the embeddings that is added after the first
        layer; None for none.
      dropped_token: id of the token whose embedding is 0, in an encoder that scales the other tokens' (ESM); None for
        none.
      dense_first: whether the dense layer before scores of labels comes before the pooling, where the family does not
        fix it.
      head_activation, head_bias: activation and bias of the dense layer before scores of labels, where the family does
        not fix them.
      layer_groups: (number of groups of layers that share weights, number of layers in a run of a group), of an encoder
        whose groups run one after the other, each as often as the number of layers demands (ALBERT).
      rotates_values: whether rope rotates values too, where the family does not fix it.
      pads: whether padding tokens follow a text up to num_positions tokens, and are seen like others.
    """

    activation: str
    num_token_types: int
    num_positions: int
    first_position: int = 0
    norm_bias: bool = True
    head_activation: str = "gelu"
    head_bias: bool = True
    embedding_size: int = 0
    distances: tuple[int, int] | None = None
    adaptation: tuple[int, float] | None = None
    num_task_types: int = 0
    logits_bias: bool = True
    embedding_norm: bool = True
    disentangled: Disentangled | None = None
    convolution: tuple[int, str] | None = None
    dropped_token: int | None = None
    dense_first: bool = False
    gated: bool = False
    layer_groups: tuple[int, int] = (1, 1)
    rotates_values: bool = False
    pads: bool = False
