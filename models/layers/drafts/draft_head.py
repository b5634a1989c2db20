"""Common parts of heads that draft from a target model's hidden states: EAGLE-3 (eagle3.py) and DFlash (dflash.py)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxengine.models.build import Build
from jaxengine.models.config.drafts.draft_heads import DraftHeadConfig
from jaxengine.models.layers.base.embedding import Embedding, own_logits, vocab_source
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.norm import RMSNorm
from jaxengine.models.layers.base.scale import scaled
from jaxengine.models.layers.decoder import Decoder, head_products
from jaxengine.models.params.declare import ParamDecl, Source, declare
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.source import WHOLE, WeightSource, WrappedSource, renamed
from jaxengine.sharding.collectives import gather_parts
from jaxengine.sharding.stages import Stage

EMBEDDING, LM_HEAD, _COLUMNS = "model.embed_tokens.weight", "lm_head.weight", "columns"
# Rows of two embeddings that are compared at a time.
_ROWS = 8192


class DraftHead(Decoder):
    """Layers that draft for a target model, with embeddings and an LM head of their own if the config says so."""

    def __init__(self, config: DraftHeadConfig, build: Build):
        self.sizes = config
        stage = Stage(0, config.num_layers, is_first=False, is_last=False)
        super().__init__(config, replace(build, stage=stage))
        size, vocab_size = config.hidden_size, config.vocab_size
        if config.own_embedding:
            self.embed = Embedding(vocab_size, size, source=EMBEDDING.removesuffix(".weight"), build=build)
        self.head_norm = RMSNorm(size, config.rms_norm_eps, source="model.norm", build=build)
        if not config.own_head:
            return
        head = vocab_source("lm_head", config.draft_vocab_size, build.mesh)
        self.lm_head = Linear(size, (head,), axes=("embed", "vocab"), build=build)
        # For each token of the vocabulary the number of its logit, from 1 on; 0 for those that are not drafted.
        # DraftHeadSource guarantees that the numbers are in range.
        padded = build.mesh.padded_vocab_size(vocab_size)
        source = Source(_COLUMNS, vocab_size, padding=padded - vocab_size)
        self.columns = declare((padded,), jnp.int32, ParamDecl(("sampled_vocab",), (source,)))

    def embeddings(self, token_ids: jax.Array, model: Decoder) -> jax.Array:
        """Return the embeddings [T, D] of tokens i32[T], from the table of `model` unless the head has its own, times
        the head's embedding_multiplier.
        """
        table = self.embed if self.sizes.own_embedding else model.embed
        return scaled(table(token_ids), self.sizes.embedding_multiplier)

    def products(self, normed: jax.Array, model: Decoder) -> jax.Array:
        """Return the products f32[R, V] of hidden states [R, D], after the head's norm, with its LM head, or with that
        of the target `model`. On several devices they are those of this device's part of the vocabulary (see
        `own_logits`).
        """
        with jax.named_scope("logits"):
            if not self.sizes.own_head:
                return head_products(model, normed)
            return self.lm_head(normed, out_dtype=jnp.float32)

    def logits_of(self, products: jax.Array, model: Decoder) -> jax.Array:
        """Return logits f32[R, V / n] from `products`, split over n devices as the logits of the target `model` are;
        -inf for tokens that are never drafted. Factor and cap are the head's, as it is trained on the products.
        """
        with jax.named_scope("logits"):
            own = scaled(products, self.sizes.logit_scale)
            if (cap := self.sizes.logit_soft_cap) is not None:
                own = cap * jnp.tanh(own / cap)
            if not self.sizes.own_head:
                return own_logits(own, model.config.num_logits)
            own = gather_parts(own_logits(own, self.sizes.draft_vocab_size), "sampled_vocab", dimension=1)
            # Promised to be in bounds: for other modes XLA:TPU needs a row of memory for each token.
            own = jnp.pad(own, ((0, 0), (1, 0)), constant_values=-jnp.inf)
            return own.at[:, self.columns[...]].get(mode="promise_in_bounds")


class DraftHeadSource(WrappedSource):
    """View of a head's checkpoint under the tensor names that a DraftHead declares.

    Attributes:
      config: the head's config, with own_embedding set if it stores embeddings that differ from the model's.
      PREFIXES: pairs of beginnings of stored names and what they become, of which the first that fits counts.
    """

    PREFIXES: ClassVar[tuple[tuple[str, str], ...]] = (
        *(("model.", "model."), ("lm_head.", "lm_head."), ("d2t", "d2t"), ("t2d", "t2d"), ("", "model.")),
    )

    def __init__(
        self, source: WeightSource, config: DraftHeadConfig, model: WeightSource | None, *, partial: bool = False
    ):
        """Wrap `source`, the head's checkpoint.

        model: source of the model's weights; None if they cannot be compared. Embeddings that equal the model's are
        left out, unless the config has own_embedding. partial: whether the checkpoint updates a loaded head; if it then
        has no `d2t`, the drafted tokens stay as they are. Raises ModelFileError if `d2t` is missing although not all
        tokens are drafted, or if it does not name distinct tokens, one for each draft.
        """
        super().__init__(source)
        self._stored = {renamed(name, self.PREFIXES): name for name in source.names()}
        self._stored.pop("t2d", None)
        self._has_columns = False
        self.config = config = self.settled(config, partial=partial)
        self._has_columns = config.own_head and (not partial or "d2t" in self._stored)
        self._columns = self._read_columns(config) if self._has_columns else np.zeros(config.vocab_size, np.int32)
        if EMBEDDING in self._stored and not config.own_embedding:
            if self._is_of(model):
                del self._stored[EMBEDDING]
            else:
                self.config = replace(config, own_embedding=True)

    def settled(self, config: DraftHeadConfig, *, partial: bool) -> DraftHeadConfig:
        """Return the config with what only the stored tensors determine: here the config itself. partial: see
        `__init__`.
        """
        return config

    def stores(self, name: str) -> bool:
        """Return whether the view has a tensor of this name, as a DraftHead declares it."""
        return name in self._stored

    def leave_out(self, name: str) -> None:
        """Remove the tensor of this name from the view, which must have it."""
        del self._stored[name]

    def names(self) -> Iterable[str]:
        return [*self._stored, *((_COLUMNS,) if self._has_columns else ())]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._columns.shape if name == _COLUMNS else self._source.shape(self._stored[name])

    def held_in(self, name: str) -> tuple[str, ...]:
        return ("d2t" if name == _COLUMNS else self._stored.get(name, name),)

    def read(self, name: str, rows: slice = WHOLE, columns: slice = WHOLE) -> np.ndarray:
        return self._columns[rows] if name == _COLUMNS else self._source.read(self._stored[name], rows, columns)

    def _read_columns(self, config: DraftHeadConfig) -> np.ndarray:
        """Return DraftHead.columns, i32[V]: for each token of the vocabulary 1 + its index among the drafted tokens, 0
        if it is not drafted. Removes `d2t` from the stored names.

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
