"""EAGLE-3 heads: one decoder layer that drafts from hidden states of several of a model's layers (Li et al. 2025,
arXiv:2503.01840).

For each token it takes these hidden states, projected to one, and the embedding of the next token. Its
attention reads both, each normed and concatenated; the output is added to the hidden state alone. A head of its own,
over a part of the vocabulary, gives the logits of the token after the next. For further tokens the layer's output
replaces the model's hidden states.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.readers.eagle3 import Eagle3Config
from jaxengine.models.forward_batch import ForwardBatch
from jaxengine.models.layers.attention.attention import Attention, LayerPages, StepInputs
from jaxengine.models.layers.base.embedding import Embedding, own_logits, vocab_source
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.mlp import GatedMLP
from jaxengine.models.layers.base.norm import RMSNorm
from jaxengine.models.layers.decoder import Decoder
from jaxengine.models.params.declare import ParamDecl, Source, declare
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.source import WHOLE, WeightSource, WrappedSource, renamed
from jaxengine.pallas_kernels.kv.pages import KVPages
from jaxengine.sharding.collectives import gather_parts
from jaxengine.sharding.stages import Stage

_LAYER, EMBEDDING, _COLUMNS = "model.layers.0", "model.embed_tokens.weight", "columns"
_PREFIXES = (
    *(("midlayer.", f"{_LAYER}."), ("layers.0.", f"{_LAYER}."), ("model.midlayer.", f"{_LAYER}.")),
    *(("model.", "model."), ("lm_head.", "lm_head."), ("d2t", "d2t"), ("t2d", "t2d"), ("", "model.")),
)
# Rows of two embeddings that are compared at a time.
_ROWS = 8192


class Eagle3Layer(nnx.Module):
    """Llama or Qwen3 layer whose attention reads embeddings [T, D] and hidden states [T, D], concatenated."""

    def __init__(self, config: Eagle3Config, build: Build):
        size, eps = config.hidden_size, config.rms_norm_eps
        self.embed_norm = RMSNorm(size, eps, source=f"{_LAYER}.input_layernorm", build=build)
        self.hidden_norm = RMSNorm(size, eps, source=f"{_LAYER}.hidden_norm", build=build)
        source, out = f"{_LAYER}.self_attn", Source(f"{_LAYER}.self_attn.o_proj", size)
        self.attention = Attention(config.attention[0], 2 * size, eps=eps, source=source, build=build, out=out)
        self.mlp_norm = RMSNorm(size, eps, source=f"{_LAYER}.post_attention_layernorm", build=build)
        sizes = size, config.intermediate_size
        self.mlp = GatedMLP(*sizes, source=f"{_LAYER}.mlp", bias=config.mlp_bias, build=build)
        self.norm_before_residual = config.norm_before_residual

    def __call__(self, x: jax.Array, kv: KVPages, pages: LayerPages, step: StepInputs) -> tuple[jax.Array, KVPages]:
        """Map x [T, 2 * D], embeddings followed by hidden states, to (hidden states [T, D], the pool with this step's
        keys and values written).
        """
        with jax.named_scope("attention"):
            embeddings, hidden = jnp.split(x, 2, axis=-1)
            normed = self.hidden_norm(hidden)
            both = jnp.concatenate([self.embed_norm(embeddings), normed], axis=-1)
            attended, kv = self.attention(both, kv, pages, step)
            x = (normed if self.norm_before_residual else hidden) + attended
        with jax.named_scope("mlp"):
            return x + self.mlp(self.mlp_norm(x), step.rows), kv


class Eagle3(Decoder):
    """EAGLE-3 head. jaxengine.runner.extensions.drafts.head_step runs it next to its target model."""

    def __init__(self, config: Eagle3Config, build: Build):
        self.sizes = config
        super().__init__(config, replace(build, stage=Stage(0, 1, is_first=False, is_last=False)))
        size, eps, vocab_size = config.hidden_size, config.rms_norm_eps, config.vocab_size
        if config.own_embedding:
            self.embed = Embedding(vocab_size, size, source=EMBEDDING.removesuffix(".weight"), build=build)
        count, target = len(config.streams), config.target_size
        joined, each = count * target, range(count) if config.stream_norms else ()
        norm = RMSNorm(joined, eps, source="model.input_norm", build=build) if config.joined_norm else None
        self.joined_norm = norm
        self.stream_norms = nnx.List(
            [RMSNorm(target, eps, source=f"model.fc_norm.{number}", build=build) for number in each]
        )
        self.joined = Linear(joined, (Source("model.fc", size),), axes=("latent", "embed"), build=build)
        self.head_norm = RMSNorm(size, eps, source="model.norm", build=build)
        head = vocab_source("lm_head", config.draft_vocab_size, build.mesh)
        self.lm_head = Linear(size, (head,), axes=("embed", "vocab"), build=build)
        # For each token of the vocabulary the number of its logit, from 1 on; 0 for those that are not drafted.
        # Eagle3Source guarantees that the numbers are in range.
        padded = build.mesh.padded_vocab_size(vocab_size)
        source = Source(_COLUMNS, vocab_size, padding=padded - vocab_size)
        self.columns = declare((padded,), jnp.int32, ParamDecl(("sampled_vocab",), (source,)))

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        return Eagle3Layer(self.sizes, build)

    def read(self, hidden: jax.Array) -> jax.Array:
        """Return the model's hidden states of each token, [T, streams * target_size], normed as the config says and
        projected to [T, D].
        """
        with jax.named_scope("join"):
            if self.joined_norm is not None:
                hidden = self.joined_norm(hidden)
            if self.stream_norms:
                streams = jnp.split(hidden, len(self.stream_norms), axis=-1)
                parts = [norm(stream) for norm, stream in zip(self.stream_norms, streams, strict=True)]
                hidden = jnp.concatenate(parts, axis=-1)
            return self.joined(hidden)

    def embeddings(self, token_ids: jax.Array, model: Decoder) -> jax.Array:
        """Return the embeddings [T, D] of tokens i32[T], from the table of `model` unless the head has its own."""
        return (self.embed if self.sizes.own_embedding else model.embed)(token_ids)

    def __call__(
        self, batch: ForwardBatch, kv: KVPages, hidden: jax.Array, embeddings: jax.Array
    ) -> tuple[jax.Array, KVPages]:
        """Return hidden states [T, D], given each token's hidden state [T, D] and the next token's embedding [T, D],
        and the head's own pool `kv` with the keys and values of these tokens written. They are after the head's norm if
        the config has norm_output.

        hidden: result of `read`, or of the last call when drafting further tokens.
        """
        x, pool = super().__call__(batch, kv, jnp.concatenate([embeddings, hidden], axis=-1))
        assert isinstance(pool, KVPages)
        return self.head_norm(x) if self.sizes.norm_output else x, pool

    def draft_logits(self, hidden: jax.Array, model: Decoder) -> jax.Array:
        """Return logits f32[R, V / n] of the tokens after the next ones, split over n devices as the model's logits
        are; -inf for tokens that are never drafted.

        hidden: [R, D], results of a call. model: not used, as the head has an output matrix of its own.
        """
        with jax.named_scope("logits"):
            normed = hidden if self.sizes.norm_output else self.head_norm(hidden)
            own = self.lm_head(normed, out_dtype=jnp.float32)
            own = gather_parts(own_logits(own, self.sizes.draft_vocab_size), "sampled_vocab", dimension=1)
            # Promised to be in bounds: for other modes XLA:TPU needs a row of memory for each token.
            own = jnp.pad(own, ((0, 0), (1, 0)), constant_values=-jnp.inf)
            return own.at[:, self.columns[...]].get(mode="promise_in_bounds")


class Eagle3Source(WrappedSource):
    """View of a head's checkpoint under the tensor names that Eagle3 declares.

    Attributes:
      config: the head's config, with own_embedding set if it stores embeddings that differ from the model's.

    Raises ModelFileError if `d2t` does not name distinct tokens of the vocabulary, one for each draft.
    """

    def __init__(
        self, source: WeightSource, config: Eagle3Config, model: WeightSource | None, *, partial: bool = False
    ):
        """Wrap `source`, the head's checkpoint.

        model: source of the model's weights; None if they cannot be compared. Embeddings that equal the model's are
        left out, unless the config has own_embedding. partial: whether the checkpoint updates a loaded head; if it then
        has no `d2t`, the drafted tokens stay as they are. Raises ModelFileError if `d2t` is missing although not all
        tokens are drafted, or if it does not name distinct tokens, one for each draft.
        """
        super().__init__(source)
        self._stored = {renamed(name, _PREFIXES): name for name in source.names()}
        self._stored.pop("t2d", None)
        self._has_columns = not partial or "d2t" in self._stored
        self._columns = self._read_columns(config) if self._has_columns else np.zeros(config.vocab_size, np.int32)
        self.config = config
        if EMBEDDING in self._stored and not config.own_embedding:
            if self._is_of(model):
                del self._stored[EMBEDDING]
            else:
                self.config = replace(config, own_embedding=True)

    def names(self) -> Iterable[str]:
        return [*self._stored, *((_COLUMNS,) if self._has_columns else ())]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._columns.shape if name == _COLUMNS else self._source.shape(self._stored[name])

    def read(self, name: str, rows: slice = WHOLE, columns: slice = WHOLE) -> np.ndarray:
        return self._columns[rows] if name == _COLUMNS else self._source.read(self._stored[name], rows, columns)

    def _read_columns(self, config: Eagle3Config) -> np.ndarray:
        """Return Eagle3.columns, i32[V]: for each token of the vocabulary 1 + its index among the drafted tokens, 0 if
        it is not drafted. Removes `d2t` from the stored names.

        `d2t` has, for each drafted token, its token id minus its index; if it is missing, the first draft_vocab_size
        tokens are drafted. Raises ModelFileError if it is missing although fewer tokens are drafted than the vocabulary
        has, if it does not have an integer for each drafted token, or does not name distinct tokens of the vocabulary.
        """
        count, vocab_size, stored = config.draft_vocab_size, config.vocab_size, self._stored.pop("d2t", None)
        ids = np.arange(count, dtype=np.int64)
        if stored is not None:
            offsets = self._source.read(stored)
            if offsets.shape != ids.shape or not np.issubdtype(offsets.dtype, np.integer):
                text = f"must hold {count} integers, one for each token that is drafted, got {offsets.dtype} "
                raise ModelFileError(self.path, f"{text}{offsets.shape}", stored)
            ids = ids + offsets.astype(np.int64)
            if len(np.unique(ids)) < count or ids.min() < 0 or ids.max() >= vocab_size:
                raise ModelFileError(self.path, f"must name {count} tokens of {vocab_size}, each once", stored)
        elif count < vocab_size:
            text = f"is missing: which {count} of {vocab_size} tokens the head drafts nobody knows"
            raise ModelFileError(self.path, text, "d2t")
        columns = np.zeros(vocab_size, np.int32)
        columns[ids] = 1 + np.arange(count, dtype=np.int32)
        return columns

    def _is_of(self, model: WeightSource | None) -> bool:
        """Return whether the head's embeddings equal those of `model`, of which most checkpoints have a copy.

        Returns False without a model, or if it has no such tensor of that shape. Otherwise both are read, _ROWS rows at
        a time. Raises ModelFileError if reading fails.
        """
        if model is None or EMBEDDING not in model.names() or model.shape(EMBEDDING) != self.shape(EMBEDDING):
            return False
        count = len(self._columns)
        spans = [slice(first, min(first + _ROWS, count)) for first in range(0, count, _ROWS)]
        return all(np.array_equal(self.read(EMBEDDING, span), model.read(EMBEDDING, span)) for span in spans)
