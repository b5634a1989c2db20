"""Encoder: a transformer whose tokens see their whole prompt. It pools, and generates nothing.

NamedEncoder is BERT's kind, with norms after or before a layer's parts, and learned positions or rope; a family gives
its checkpoints' names of the parts (EncoderNames).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.encoder import EncoderConfig
from jaxengine.models.config.fields import MAX_VOCAB, ConfigFields, ModelConfigError
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.pooler import CLS, Classifier, TokenHead
from jaxengine.models.config.readers.gguf import GGUFConfig, gguf_fields
from jaxengine.models.config.readers.hf import Activation, hf_fields, read_head_dim, read_rope
from jaxengine.models.config.rope import Rope
from jaxengine.models.forward_batch import ForwardBatch
from jaxengine.models.layers.attention.attention import Attention, LayerPages, StepInputs
from jaxengine.models.layers.attention.masked import MaskedScores
from jaxengine.models.layers.base.activations import ACTIVATIONS, read_activation
from jaxengine.models.layers.base.embedding import Embedding
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.mlp import MLP, gelu
from jaxengine.models.layers.base.norm import Identity, LayerNorm
from jaxengine.models.layers.classify import DenseLabelScores
from jaxengine.models.layers.decoder import Decoder
from jaxengine.models.layers.pre_norm import PreNormLayer
from jaxengine.models.layers.token_results import TokenHeads
from jaxengine.models.params.declare import ParamDecl, Source, declare, parts_of
from jaxengine.models.quantization.registry import PLAIN
from jaxengine.pallas_kernels.kv.pages import KVPages


class EncoderNames(NamedTuple):
    """Checkpoint modules of an encoder. Names from `qkv` to `mlp_norm` are names within a layer.

    Attributes:
      layer: a layer, with "{layer}" for its number.
      qkv: attention's projections of queries, keys and values; one name if they are one matrix.
      out: attention's output projection.
      attention_norm, mlp_norm: the norms of attention and of the MLP: before them with a `last_norm`, else after them.
      up, down: the MLP's projections.
      dense, labels: the two projections of a classifier.
      embedding_norm: the norm of embeddings; None for none.
      masked: projection, norm and bias of the head of a masked language model; None if they are not known.
      last_norm: the norm after the last layer; None for none.
    """

    layer: str
    qkv: tuple[str, ...]
    out: str
    attention_norm: str
    up: str
    down: str
    mlp_norm: str
    dense: str
    labels: str
    embedding_norm: str | None = "model.embeddings.LayerNorm"
    masked: tuple[str, str, str] | None = None
    last_norm: str | None = None


def encoder_fields(
    fields: ConfigFields, encoder: EncoderConfig, *, rope: Rope | None = None, bias: bool = True, **names: Any
) -> dict[str, Any]:
    """Return the keyword arguments of ModelConfig, except the architecture, for the fields of a config.json that
    encoders share.

    encoder: the configuration read already. The result's vocab_size counts each token once for each token type, and its
    max_position_embeddings leaves out the rows of a position table before the first position. rope: rope of all layers,
    or None. bias: whether attention's projections have biases. names: further arguments of hf_fields, `activation` and
    `eps`. Raises ModelConfigError for wrong fields, and for too many token types.
    """
    ropes = [rope] * fields.integer("num_hidden_layers")
    shared = hf_fields(fields, ropes=ropes, tied=True, causal=False, bias=bias, output_bias=bias, **names)
    if encoder.num_positions:
        shared["max_position_embeddings"] = encoder.num_positions - encoder.first_position
    most = MAX_VOCAB // shared["vocab_size"]
    if encoder.num_token_types > most:
        raise fields.fail("type_vocab_size", f"at most {most}, with a vocab_size of {shared['vocab_size']}")
    return shared | {"vocab_size": shared["vocab_size"] * max(1, encoder.num_token_types), "encoder": encoder}


def rotated_fields(fields: ConfigFields, *, types: int, rope: Rope | None = None, bias: bool = True) -> dict[str, Any]:
    """Return the keyword arguments of ModelConfig for an encoder with rope whose config.json has BERT's field names, by
    `encoder_fields`.

    types: default of type_vocab_size. rope: rope of all layers; None for the rope in the file. bias: whether
    attention's projections have biases. Raises ModelConfigError for wrong fields.
    """
    types = fields.integer("type_vocab_size", types, minimum=0)
    encoder = EncoderConfig(read_activation(fields), num_token_types=types, num_positions=0)
    rope = rope or read_rope(fields, read_head_dim(fields))
    return encoder_fields(fields, encoder, rope=rope, bias=bias, activation=HIDDEN_ACT, eps="layer_norm_eps")


def gguf_encoder_fields(
    gguf: GGUFConfig,
    *,
    activation: str,
    bias: bool,
    positions: bool = False,
    rotates: bool = False,
    gated: bool = False,
    eps: str = "attention.layer_norm_epsilon",
) -> dict[str, Any]:
    """Return the keyword arguments of ModelConfig, except the architecture, that encoders share from a GGUF file. Its
    vocab_size counts each token once for each of `tokenizer.ggml.token_type_count` token types, if the file has their
    table.

    activation, gated: those of EncoderConfig, which no metadata say. bias: whether attention's projections usually have
    biases. positions: whether there is a table of positions, with context_length rows. rotates: whether layers have
    rope. eps: name of the field with the epsilon of norms. Raises ModelConfigError for wrong fields, and for a file
    whose tokens see earlier ones alone.
    """
    general, fields = ConfigFields(gguf.metadata), gguf.fields
    if fields.boolean("attention.causal", False):
        raise fields.fail("attention.causal", "false or absent")
    shared = gguf_fields(gguf, eps=eps, causal=False, bias=bias, output_bias=bias)
    if not rotates:
        shared["attention"] = tuple(replace(layer, rope=None) for layer in shared["attention"])
    types = general.integer("tokenizer.ggml.token_type_count", 1) if "token_types" in gguf.stored else 0
    if types > (most := MAX_VOCAB // shared["vocab_size"]):
        raise general.fail("tokenizer.ggml.token_type_count", f"at most {most}")
    rows = shared["max_position_embeddings"] if positions else 0
    encoder = EncoderConfig(activation, num_token_types=types, num_positions=rows, gated=gated)
    return shared | {"vocab_size": shared["vocab_size"] * max(1, types), "encoder": encoder}


class EncoderEmbeddings(nnx.Module):
    """Normed sum of the embeddings of a token, its token type, its position and the first task type, the latter three
    if the encoder has them. The tables have BERT's names under `source`; `norm` is the norm's checkpoint module, None
    for a sum without a norm.
    """

    def __init__(self, config: ModelConfig, encoder: EncoderConfig, *, source: str, norm: str | None, build: Build):
        size, types = encoder.embedding_size or config.hidden_size, encoder.num_token_types
        self.first_position, self.num_rows = encoder.first_position, config.vocab_size // max(1, types)

        def table(name: str, rows: int) -> Any:  # whole on every device
            decl = ParamDecl((None, None), (Source(f"{source}.{name}", rows).tensor("weight"),))
            return declare((rows, size), build.dtype, decl)

        self.tokens = Embedding(self.num_rows, size, source=f"{source}.word_embeddings", build=build)
        self.types = table("token_type_embeddings", types) if types else None
        self.positions = table("position_embeddings", encoder.num_positions) if encoder.num_positions else None
        self.tasks = table("task_type_embeddings", encoder.num_task_types) if encoder.num_task_types else None
        self.norm = Identity() if norm is None else LayerNorm(size, config.rms_norm_eps, source=norm, build=build)
        self.dtype = build.dtype

    def __call__(self, token_ids: jax.Array, positions: jax.Array) -> jax.Array:
        """Return the embeddings [T, D] of tokens i32[T], whose ids contain their token types (EncoderConfig), at
        positions i32[T]: the norm of the f32 sum of the rows of token, type, task (the first) and position, as far as
        there are tables.
        """
        x = self.token_rows(token_ids % self.num_rows, positions)
        if self.types is not None:
            x = x + self.types[...][token_ids // self.num_rows].astype(jnp.float32)
        if self.tasks is not None:
            x = x + self.tasks[...][0].astype(jnp.float32)
        if self.positions is not None:
            rows = position_rows(token_ids % self.num_rows, positions, self.first_position)
            x = x + self.positions[...][rows].astype(jnp.float32)
        return self.norm(x).astype(self.dtype)

    def token_rows(self, token_ids: jax.Array, positions: jax.Array) -> jax.Array:
        """Return the token table's rows f32[T, D] of tokens i32[T], without their types, at positions i32[T]."""
        return self.tokens(token_ids).astype(jnp.float32)


def position_rows(token_ids: jax.Array, positions: jax.Array, first: int) -> jax.Array:
    """Return the row of the position table for each token i32[T], of prompts that follow each other whole; positions:
    i32[T], within each prompt. `first` is the row of a prompt's first token.

    If that is not 0, the token with the id first - 1 is padding, as in RoBERTa: wherever a prompt has it, it takes the
    row first - 1, and later tokens do not count it.
    """
    if not first:
        return positions
    is_padding = token_ids == first - 1
    counted = jnp.cumsum(~is_padding, dtype=jnp.int32)
    begins = jnp.arange(len(positions)) - positions
    before = jnp.where(begins > 0, counted[jnp.maximum(begins - 1, 0)], 0)
    return jnp.where(is_padding, 0, counted - before) + first - 1


class PostNormLayer(nnx.Module):
    """Layer that computes norm(x + attention(x)), then norm(x + mlp(x))."""

    def __init__(self, attention: nnx.Module, attention_norm: nnx.Module, mlp: nnx.Module, mlp_norm: nnx.Module):
        self.attention, self.attention_norm, self.mlp, self.mlp_norm = attention, attention_norm, mlp, mlp_norm

    def __call__(self, x: jax.Array, kv: KVPages, pages: LayerPages, step: StepInputs) -> tuple[jax.Array, KVPages]:
        with jax.named_scope("attention"):
            attended, kv = self.attention(x, kv, pages, step)
            x = self.attention_norm(x + attended)
        with jax.named_scope("mlp"):
            return self.mlp_norm(x + self.mlp(x, step.rows)), kv


class ConvolvedLayer(PostNormLayer):
    """Layer `first` whose result y becomes norm(y + activation(convolution(x))), where x is its input. The convolution
    is over `kernel` tokens of a prompt, an odd number, with the token in the middle.
    """

    def __init__(self, first: Any, kernel: int, activation: str, size: int, eps: float, *, source: str, build: Build):
        super().__init__(first.attention, first.attention_norm, first.mlp, first.mlp_norm)
        self.kernel, self.activation = kernel, ACTIVATIONS[activation]
        plain = replace(build, scheme=PLAIN, lora=None)
        taps = (Source(f"{source}.conv", size),)
        self.conv = Linear(size * kernel, taps, axes=("embed", "labels"), bias=True, build=plain)
        self.norm = LayerNorm(size, eps, source=f"{source}.LayerNorm", build=build)

    def __call__(self, x: jax.Array, kv: KVPages, pages: LayerPages, step: StepInputs) -> tuple[jax.Array, KVPages]:
        """Map x [T, D] to ([T, D], the pool): the norm of the layer's output plus the activated convolution of x. step:
        its `of_layer` is the result of `taps_within`, [T, kernel].
        """
        y, kv = super().__call__(x, kv, pages, step)
        assert step.of_layer is not None
        with jax.named_scope("conv"):
            seen = [
                jnp.roll(x, self.kernel // 2 - tap, axis=0) * step.of_layer[:, tap, None] for tap in range(self.kernel)
            ]
            added = self.activation(self.conv(jnp.stack(seen, axis=-1).reshape(len(x), -1)))
        return self.norm(y + added), kv


class Encoder(Decoder):
    """Decoder stack whose tokens see their whole prompt. Its `embed` also takes the tokens' positions."""

    def __init__(self, config: ModelConfig, build: Build):
        super().__init__(config, build)
        pooler = config.pooler
        if self.stage.is_last and pooler is not None and pooler.splade is not None:
            self.masked = self.make_masked(build)

    def make_token_heads(self, heads: Sequence[TokenHead], build: Build) -> nnx.Module:
        return TokenHeads(self.config.hidden_size, heads, "model.classifier", build)

    def make_masked(self, build: Build) -> MaskedScores:
        """Return the new head of a masked language model. Families with a known head override it; it raises
        ModelConfigError in the others.
        """
        raise ModelConfigError(f"{type(self).__name__} has no known head of a masked language model")

    @property
    def table(self) -> Embedding:
        """The token table, an Embedding. Families override this property; it raises NotImplementedError in the
        others.
        """
        raise NotImplementedError(f"{type(self).__name__} does not name its table of tokens")

    @classmethod
    def usual_pooling(cls, fields: ConfigFields) -> str:
        """Return the type of pooling, one of POOLING_TYPES, of a checkpoint without a file that states it; by default
        CLS.

        fields: those of its config.json. A family that reads them may raise ModelConfigError.
        """
        return CLS

    def embed_batch(self, batch: ForwardBatch) -> jax.Array:
        return self.embed(batch.token_ids, batch.positions)


class NamedEncoder(Encoder):
    """Encoder of layers after EncoderEmbeddings: PostNormLayers or, with a norm after the last layer, PreNormLayers.

    Attributes:
      names: checkpoint modules of the parts.
      label_activation: function between the two projections of a classifier.
      masked_gelu: whether the head of a masked language model has GELU, whatever the MLPs have.
    """

    names: ClassVar[EncoderNames]
    label_activation: ClassVar[Callable[[jax.Array], jax.Array]] = staticmethod(jnp.tanh)
    masked_gelu: ClassVar[bool] = False

    def make_embedding(self, build: Build) -> EncoderEmbeddings:
        assert self.config.encoder is not None
        source, norm = "model.embeddings", self.names.embedding_norm
        return EncoderEmbeddings(self.config, self.config.encoder, source=source, norm=norm, build=build)

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        config, size, names = self.config, self.config.hidden_size, self.names
        attention = config.attention[layer]
        width = attention.num_heads * attention.head_dim
        source = self.layer_source(layer)
        qkv = [f"{source}.{name}" for name in names.qkv]
        attend = self.make_attention(
            layer,
            build,
            eps=config.rms_norm_eps,
            source=source,
            qkv=[Source(name, width) for name in qkv] if len(qkv) > 1 else parts_of(qkv[0], width, width, width),
            out=Source(f"{source}.{names.out}", size),
        )
        attention_norm, mlp_norm = (
            LayerNorm(size, config.rms_norm_eps, source=f"{source}.{name}", build=build)
            for name in (names.attention_norm, names.mlp_norm)
        )
        if names.last_norm is None:
            return PostNormLayer(attend, attention_norm, self.make_mlp(build), mlp_norm)
        return PreNormLayer(attention_norm, attend, mlp_norm, self.make_mlp(build))

    def layer_source(self, layer: int) -> str:
        """Return the checkpoint module of layer `layer`, with "{layer}" for the number unless layers share modules."""
        return self.names.layer

    def make_attention(self, layer: int, build: Build, **names: Any) -> nnx.Module:
        """Return the new attention module of index `layer`. names: further arguments of Attention."""
        return Attention(self.config.attention[layer], self.config.hidden_size, build=build, **names)

    @property
    def activation(self) -> Callable[[jax.Array], jax.Array]:
        """The activation function of the MLPs, chosen by `config.encoder.activation`."""
        assert self.config.encoder is not None
        return ACTIVATIONS[self.config.encoder.activation]

    def make_mlp(self, build: Build) -> nnx.Module:
        """Return a layer's new MLP with biases, named by `names`, which maps ([T, D], the step's Rows) to [T, D]."""
        names, sizes = self.names, (self.config.hidden_size, self.config.intermediate_size)
        activation, modules = self.activation, {"up": names.up, "down": names.down}
        assert build.layer is not None
        source = self.layer_source(build.layer)
        return MLP(*sizes, source=source, **modules, activation=activation, bias=True, build=build)

    def make_norm(self, build: Build) -> nnx.Module:
        if self.names.last_norm is None:
            return Identity()
        return LayerNorm(self.config.hidden_size, self.config.rms_norm_eps, source=self.names.last_norm, build=build)

    def make_labels(self, classifier: Classifier, build: Build) -> DenseLabelScores:
        sources = self.names.dense, self.names.labels
        return DenseLabelScores(
            self.config.hidden_size, classifier, sources, activation=type(self).label_activation, build=build
        )

    def make_masked(self, build: Build) -> MaskedScores:
        config, names = self.config, self.names.masked
        if names is None:
            return super().make_masked(build)
        assert config.encoder is not None
        size = config.encoder.embedding_size or config.hidden_size
        norm = LayerNorm(size, config.rms_norm_eps, source=names[1], build=build)
        options: dict[str, Any] = {"activation": self.masked_activation, "build": build}
        return MaskedScores(config, (names[0], names[2]), size=size, norm=norm, **options)

    @property
    def masked_activation(self) -> Callable[[jax.Array], jax.Array]:
        """Activation in the head of a masked language model: GELU with `masked_gelu`, else that of the MLPs."""
        return gelu if self.masked_gelu else self.activation

    @property
    def table(self) -> Embedding:
        return self.embed.tokens


# For checkpoints that name the activation in `hidden_act`.
HIDDEN_ACT = Activation("hidden_act", tuple(ACTIVATIONS))
