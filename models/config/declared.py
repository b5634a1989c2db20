"""DeclaredForm: the layers of a family that is a row of a table, as data.

The row and the reading of its configuration are in jaxengine.models.families.declared_rows.
"""

from __future__ import annotations

from dataclasses import dataclass

# Kinds of norms. RMS norms: with weights, with weights stored as their difference from one, without weights. Layer
# norms: with weights and biases, with weights only, without either. For queries and keys also: an RMS norm over all
# heads at once, and a layer norm for each head with weights only.
RMS, OFFSET, FIXED_RMS = "rms", "offset rms", "fixed rms"
LAYER, UNBIASED, FIXED = "layer", "unbiased", "fixed"
ALL_HEADS, EACH_HEAD = "all heads", "each head"
# Placements of norms, in the order of the names below: x + part(norm(x)), one part after the other; the same with both
# parts in parallel; norm(x + part(x)); x + norm(part(x)); x + norm(part(norm(x))); norm(x) + part(norm(x)).
BEFORE, PARALLEL, AFTER, OUTPUT, AROUND = "before", "parallel", "after", "output", "around"
WITHIN = "within"
# Order of the rows of a joined projection: all of q, all of k, all of v; for each group of heads its queries, key and
# value; for each quarter of the heads its queries, values and keys;
# for each of `chunks` equal parts of the heads its queries, keys and values.
ROWS, GROUPS, QUARTERS, CHUNKS = "rows", "groups", "quarters", "chunks"


@dataclass(frozen=True)
class DeclaredForm:
    """Layers, embedding and output of a decoder. Names are those of checkpoint modules, without the layer's prefix.

    Attributes:
      norm: kind of all norms.
      placement: placement of norms.
      norms: names of a layer's norms in the order of their use, one where both parts share it.
      norm_offsets: for each of `norms`, which must be of kind OFFSET, the number from which its weights are stored as
        their difference; () for one.
      first_norm: whether the first layer has the first of its norms; otherwise its input is not normed.
      qkv: projections of queries, keys and values, one name where they are joined, or two where keys and values are.
      joined: order of a joined projection's rows. chunks: number of parts in the order CHUNKS.
      query_rank: size of the vector that the projection of queries returns, from which they are projected by `wq` after
        the norm `inter_norm`, both in `self_attn`; None where that projection returns queries.
      out: projection after attention.
      heads_norm: RMS norm of the outputs of all heads at once, before that projection; None for none.
      qk_norms: names of the norms of q and k, () for none. qk_norm: their kind. qk_norms_last: whether they follow
        rope.
      reversed_rope: whether rope rotates in the opposite direction.
      gate: projection whose result, after `gate_activation`, multiplies the outputs of heads; None for none. It has one
        number per head if `gates_heads`. gate_bias: vector with a number for each head that is added to its result;
        None for none.
      value_scale: factor of values.
      up: the MLP's projections before its activation: gate and up, or up alone; () for layers without an MLP.
      joined_up: whether the one projection in `up` is gate and up joined.
      down: the MLP's projection after the activation.
      down_bias: whether `down` of a gated MLP has a bias though `up` has none.
      limits: for each layer, the bounds of gate and up (ThenClamped) of experts, and of the shared or dense MLP,
        each None for none; () for none in all layers.
      inner_norm: RMS norm of the input of `down` in a gated MLP; None for none.
      experts_norm: norm after experts, which layers with a dense MLP lack; None for none.
      activation: name of the MLP's activation.
      positions: table of positions, whose rows are added to embeddings; None for none.
      sinusoids: whether, in place of such a table, sines of each position at half as many frequencies as an embedding
        has elements, then their cosines, are added.
      first_position: row of the first position, or number of the first position of `sinusoids`.
      root_scaled: whether embeddings are multiplied by the root of their size, rounded to their dtype.
      embedding_norm: the norm after the embedding, of kind `norm`; None for none.
      final_norm: whether a norm follows the last layer.
      head_bias: whether logits have a bias.
      head: a projection of the last hidden states before the logits, and the norm, of kind `norm`, that follows its
        activation, `head_activation`; () for none. head_dense_bias: whether the projection has a bias; the scores of
        labels in a classifier, which come after it in place of logits, have one with it.
      residuals: (factor of a part's input, factor of its output) where the two are added: for attention, for a mixer
        with a state, and for the MLP.
      depth_scaled: whether, in place of `residuals`, the n-th addend (the embeddings are the first) has the factor
        n ** -0.5, and the sum before it ((n - 1) / n) ** 0.5.
      mixer: module of a layer that keeps a state instead of attention.
      latent_eps: epsilon of the norms of latents; None for that of DeepSeek's models, 1e-6.
      embedding_size: elements of an embedding that is projected to the hidden size, and back before the logits; None
        for the hidden size.
    """

    norm: str = LAYER
    placement: str = BEFORE
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    norm_offsets: tuple[float, ...] = ()
    first_norm: bool = True
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    joined: str = ROWS
    chunks: int = 1
    query_rank: int | None = None
    out: str = "self_attn.o_proj"
    heads_norm: str | None = None
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
    down_bias: bool = False
    limits: tuple[tuple[float | None, float | None], ...] = ()
    inner_norm: str | None = None
    experts_norm: str | None = None
    activation: str = "silu"
    residuals: tuple[tuple[float, float], ...] = ((1.0, 1.0),) * 3
    depth_scaled: bool = False
    mixer: str = "mamba"
    latent_eps: float | None = None
    positions: str | None = None
    sinusoids: bool = False
    first_position: int = 0
    root_scaled: bool = False
    embedding_norm: str | None = None
    final_norm: bool = True
    head_bias: bool = False
    head: tuple[str, ...] = ()
    head_activation: str = "gelu"
    head_dense_bias: bool = False
    embedding_size: int | None = None
