"""DeclaredForm: what a family that is a row of a table says of its layers, as data.

The row and the reading of its configuration are in jaxengine.models.families.declared_rows.
"""

from __future__ import annotations

from dataclasses import dataclass

# Kinds of norms: RMS, with weights, with their difference to one, without; layer norms with weights and biases, with
# weights alone, without either. Of queries and keys also: RMS over all heads at once, and a layer norm with weights
# alone for each head.
RMS, OFFSET, FIXED_RMS = "rms", "offset rms", "fixed rms"
LAYER, UNBIASED, FIXED = "layer", "unbiased", "fixed"
ALL_HEADS, EACH_HEAD = "all heads", "each head"
# Places of norms: x + part(norm(x)), one part after the other; both parts beside each other; norm(x + part(x));
# x + norm(part(x)); x + norm(part(norm(x))); norm(x) + part(norm(x)).
BEFORE, PARALLEL, AFTER, OUTPUT, AROUND = "before", "parallel", "after", "output", "around"
WITHIN = "within"
# Rows of a joined projection: all of q, all of k, all of v; queries, a key and a value of each group of heads; queries,
# values and keys of each quarter of the heads.
ROWS, GROUPS, QUARTERS = "rows", "groups", "quarters"


@dataclass(frozen=True)
class DeclaredForm:
    """Layers and ends of a decoder. Names are of checkpoint modules, those of a layer without the layer's own.

    Attributes:
      norm: kind of all norms.
      placement: of norms.
      norms: names of a layer's norms in the order of their use, one where both parts share it.
      first_norm: whether the first layer has the first of them; without it its input stays as it is.
      qkv: projections of queries, keys and values, or one name where they are joined.
      joined: order of a joined projection's rows.
      out: projection after attention.
      heads_norm: RMS norm of the results of all heads at once, before that projection; None for none.
      clip: bound of projected queries, keys and values; None for none.
      qk_norms: norms of each head's q and k, () for none. qk_norm: their kind. qk_norms_last: they follow rope.
      reversed_rope: rope turns the other way.
      gate: projection whose `gate_activation` multiplies the results of heads, each with one number if `gates_heads`;
        None for none. gate_bias: vector with a number for each head that is added to what it gives; None for none.
      value_scale: factor of values.
      up: the MLP's projections before its activation: gate and up, or up alone; () for layers without an MLP.
      joined_up: the one projection before it is gate and up joined.
      down: its projection after that.
      limits: in each layer, the bounds of gate and up (SiluThenClamped) of experts, and of the shared or dense MLP,
        each None for none; () for none in all layers.
      inner_norm: RMS norm of what goes into `down`, of a gated MLP; None for none.
      experts_norm: norm after experts, which a layer with a dense MLP lacks; None for none.
      activation: name of its activation.
      positions: table of positions, whose rows are added to embeddings; None for none.
      first_position: row of the first position.
      root_scaled: whether embeddings are multiplied by the root of their size, rounded to their dtype.
      embedding_norm: the norm after the embedding, of kind `norm`; None for none.
      final_norm: whether a norm follows the last layer.
      head_bias: whether logits have a bias.
      head: a projection of the last hidden states before the logits, and the norm, of kind `norm`, that follows its
        activation, `head_activation`; () for none.
      residuals: factors of what a part gets and of what it gives, where they are added: of attention, of a mixer with a
        state, of the MLP.
      depth_scaled: the n-th part that is added up, of which embeddings are the first, has the factor n ** -0.5, and
        what it is added to ((n - 1) / n) ** 0.5, in place of `residuals`.
      mixer: module of a layer that keeps a state instead of attention.
      embedding_size: elements of an embedding that is projected to the hidden size, and back before the logits; None
        for the hidden size.
    """

    norm: str = LAYER
    placement: str = BEFORE
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    first_norm: bool = True
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    joined: str = ROWS
    out: str = "self_attn.o_proj"
    heads_norm: str | None = None
    clip: float | None = None
    qk_norms: tuple[str, ...] = ()
    qk_norm: str = LAYER
    qk_norms_last: bool = False
    reversed_rope: bool = False
    gate: str | None = None
    gates_heads: bool = False
    gate_activation: str = "sigmoid"
    gate_bias: str | None = None
    value_scale: float = 1.0
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    joined_up: bool = False
    down: str = "mlp.down_proj"
    limits: tuple[tuple[float | None, float | None], ...] = ()
    inner_norm: str | None = None
    experts_norm: str | None = None
    activation: str = "silu"
    residuals: tuple[tuple[float, float], ...] = ((1.0, 1.0),) * 3
    depth_scaled: bool = False
    mixer: str = "mamba"
    positions: str | None = None
    first_position: int = 0
    root_scaled: bool = False
    embedding_norm: str | None = None
    final_norm: bool = True
    head_bias: bool = False
    head: tuple[str, ...] = ()
    head_activation: str = "gelu"
    embedding_size: int | None = None
