"""Decoder: the base class of decoder-only families, with all that a step does outside of the layers.

It has the embedding, the loop over the layers, the final norm and the logits. The layers are in the family's own file,
and a family overrides the methods in which it differs. jaxengine.models.layers.decoder_step has what the layers share
in a step, and gives each layer its part of the cache.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.cache import Cache, Paged, State, group_layers
from jaxengine.models.config.attention import LayerState
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.pooler import Classifier, TokenHead
from jaxengine.models.config.readers.gguf import GGUFConfig, gguf_fields
from jaxengine.models.forward_batch import ForwardBatch
from jaxengine.models.layers.attention.attention import num_kv_heads
from jaxengine.models.layers.base.embedding import Embedding, own_logits, vocab_source
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.norm import NormClass, RMSNorm
from jaxengine.models.layers.base.rows import Rows
from jaxengine.models.layers.base.scale import Scaled, scaled
from jaxengine.models.layers.classify import SCORE, DenseModules, LabelScores
from jaxengine.models.layers.decoder_step import DecoderStep
from jaxengine.models.layers.token_results import TokenHeads
from jaxengine.models.params.source import CheckpointNames
from jaxengine.pallas_kernels.kv.pages import KVPages, KVSpec
from jaxengine.sharding.layout import MeshLayout
from jaxengine.sharding.stages import Stage


class _OwnFiles(nnx.Module):
    """Base of families, which do not read the GGUF files of those that they inherit from."""

    gguf_architecture: ClassVar[str | None] = None

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        if "gguf_architecture" not in vars(cls):
            cls.gguf_architecture = None


class Decoder(_OwnFiles):
    """Decoder of a family: reads the family's configuration, creates its layers and runs them. Implements
    jaxengine.models.causal_lm.CausalLM. head_bias: bias of logits, which a subclass may create.
    """

    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames()
    norm_class: ClassVar[NormClass] = RMSNorm
    head_bias: Any = None

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        return gguf_fields(gguf)

    def __init__(self, config: ModelConfig, build: Build):
        """Create the modules of the stage `build.stage`; None means all layers.

        The first stage has the embedding and the towers. The last stage has the norm and, depending on `config`, the LM
        head (the embedding if they are tied), or the label scores, Dense modules and token heads of a pooling model.
        """
        self.config = config
        self.build = build = replace(build, stage=build.stage or Stage(0, config.num_layers))
        stage, size, tied = self.stage, config.hidden_size, config.tie_word_embeddings
        pooler = config.pooler
        classifier = None if pooler is None else pooler.classifier
        scores = pooler is None or (classifier is not None and bool(classifier.token_ids))
        if stage.is_first or (stage.is_last and tied and scores):
            self.embed = self.make_embedding(build)
        self.layers = nnx.List([self.make_layer(layer, replace(build, layer=layer)) for layer in stage.layers])
        if stage.is_first and config.tower is not None:
            tower = config.tower.make(config.hidden_size, build.as_named(config.quantization))
            self.tower = tower if config.tower.multiplier == 1.0 else Scaled(tower, config.tower.multiplier)
        if stage.is_first and config.sound_tower is not None:
            self.sound_tower = config.sound_tower.make(config.hidden_size, build.as_named(config.quantization))
        if stage.is_last:
            self.norm = self.make_norm(build)
        if stage.is_last and classifier is not None:
            self.labels = self.make_labels(classifier, build)
        if stage.is_last and pooler is not None and pooler.dense:
            self.dense = DenseModules(pooler.dense, build)
        if stage.is_last and pooler is not None and pooler.token_heads:
            self.token_heads = self.make_token_heads(pooler.token_heads, build)
        if stage.is_last and pooler is None and not tied:
            head = vocab_source("lm_head", config.vocab_size, self.mesh, config.num_logits)
            self.lm_head = Linear(size, (head,), axes=("embed", "vocab"), build=build)

    @abstractmethod
    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        """Return a new DecoderLayer, number `layer` of the whole model. Its checkpoint modules are in
        "model.layers.{layer}".
        """

    def make_embedding(self, build: Build) -> Any:
        """Return a new token table: an Embedding, or a module that is called like one."""
        return Embedding(self.config.vocab_size, self.config.hidden_size, source="model.embed_tokens", build=build)

    def make_labels(self, classifier: Classifier, build: Build) -> Any:
        """Return a new module that scores labels: it maps (pooled f32[R, D], the token table if the head is tied to it,
        otherwise None) to f32[R, num_labels].
        """
        return LabelScores(self.config, classifier, build)

    def make_token_heads(self, heads: Sequence[TokenHead], build: Build) -> nnx.Module:
        """Return a new module that scores tokens, [T, D] -> f32[T, N], with the outputs of `heads` concatenated."""
        return TokenHeads(self.config.hidden_size, heads, SCORE, build)

    def make_norm(self, build: Build) -> nnx.Module:
        """Return a new norm for the output of the last layer."""
        return self.norm_class(self.config.hidden_size, self.config.rms_norm_eps, source="model.norm", build=build)

    @property
    def mesh(self) -> MeshLayout:
        """Mesh for which the model is built."""
        return self.build.mesh

    @property
    def stage(self) -> Stage:
        """Pipeline stage: the range of layers that this model has."""
        assert self.build.stage is not None
        return self.build.stage

    def embed_batch(self, batch: ForwardBatch) -> jax.Array:
        """Return the embeddings [T, D] of a step's tokens, computed from their ids only. Families whose module of
        embeddings also takes positions override this method.
        """
        return self.embed_tokens(batch.token_ids)

    def embed_tokens(self, token_ids: jax.Array) -> jax.Array:
        """Return the embeddings [T, D] of tokens i32[T]: their rows of the table, multiplied by the configuration's
        embedding_multiplier.
        """
        return scaled(self.embed(token_ids), self.config.embedding_multiplier)

    def first_input(self, x: jax.Array, batch: ForwardBatch) -> jax.Array:
        """Return the first layer's input [T, S], S the `stream_size` of a token, from its embeddings x [T, D], those of
        tokens or those that the batch has in their place. It is x itself; families that add rows of positions, or have
        several hidden states of a token, override this method.
        """
        return x

    def make_layer_inputs(self, batch: ForwardBatch, x: jax.Array, rows: Rows) -> jax.Array:
        """Return the second input of each layer, in addition to the hidden state: [T, L, P], where P is the
        configuration's `layer_input_size`, computed from `batch` and the first layer's input x [T, D], whose rows are
        `rows`. Families with such inputs override this method; in others it raises NotImplementedError.
        """
        raise NotImplementedError(f"{type(self).__name__} has no inputs of single layers")

    def last_normed(self, x: jax.Array, rows: Rows) -> jax.Array:
        """Return hidden states [T, D] after the final norm, for the output x [T, S] of the last layer. rows: the
        step's, for families whose final norm has products.
        """
        return self.norm(x)

    def token_logits(self, hidden: jax.Array) -> jax.Array:
        """Return logits f32[R, V] of hidden states [R, D], split as `head_products`: these times logit_scale, plus the
        bias of each token and soft-capped to cap * tanh(logits / cap), if there is a bias or a cap.
        """
        logits, cap = scaled(head_products(self, hidden), self.config.logit_scale), self.config.logit_soft_cap
        logits = logits if self.head_bias is None else logits + self.head_bias[...].astype(jnp.float32)
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def __call__(
        self, batch: ForwardBatch, kv: KVPages | Cache, hidden: jax.Array | None = None
    ) -> tuple[jax.Array, KVPages | Cache]:
        """Return hidden states [T, D] after the final norm, and the pool with the keys and values of this step.

        kv: the pool, which is flat (jaxengine.models.cache); if layers keep states, a Cache of pool and states, and the
        result is then a Cache as well. hidden: [T, D] of the previous stage; None in the first stage, which embeds the
        batch. A stage that is not the last returns hidden states without the norm. If the batch has one page table, all
        layers are in one group.

        Raises ValueError if the numbers of page tables and of groups differ, if the pool's number of pages is not a
        multiple of the largest group's number of layers, or if a layer's kv_source is in another stage.
        """
        groups = self.cache_groups(*_page_of(kv), hybrid=len(batch.ragged) > 1)
        step = DecoderStep(self.config, self.build, groups, batch, kv)
        with jax.named_scope("embed"):
            if hidden is None:
                x = self.first_input(step.embed(self.embed_batch(batch)), batch)
            else:
                x = step.from_previous_stage(hidden)
        if hidden is None and self.config.layer_input_size:
            with jax.named_scope("layer_inputs"):
                step.layer_inputs = self.make_layer_inputs(batch, x, step.rows)
        for index, layer in enumerate(self.layers):
            x = step.run(index, layer, x)
        if not self.stage.is_last:
            return step.to_next_stage(x), step.cache
        with jax.named_scope("norm"):
            return self.last_normed(x, step.rows), step.cache

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Return logits f32[R, V / n] of hidden states [R, D], where n is the number of devices that share the rows.
        Those of the padding are -inf where the vocabulary is padded so that devices can split it.
        """
        with jax.named_scope("logits"):
            return own_logits(self.token_logits(hidden), self.config.num_logits)

    def cache_groups(self, page_size: int, kv_dtype: Any, *, hybrid: bool = True) -> tuple[Paged | State, ...]:
        """Return the cache groups of the whole model. Each lists only those of its layers that are in this stage, which
        may be none.

        Groups with pages come first, of which there is at least one, without layers if no layer has pages; then those
        with states. Shapes are those of one device. page_size: in tokens. kv_dtype: dtype of the pages. hybrid: see
        jaxengine.models.cache.group_layers. Raises ModelConfigError for a page_size that does not suit a layer's
        compressed keys.
        """
        specs = {
            layer: KVSpec(
                num_pages=1,
                page_size=page_size,
                num_kv_heads=num_kv_heads(each, self.mesh),
                dtype=kv_dtype,
                **each.page_sizes(page_size),
            )
            for layer, each in enumerate(self.config.attention)
            if each.has_pages
        }
        numbers = list(specs)
        widths = [specs[layer].num_kv_heads * specs[layer].token_width for layer in numbers]
        reaches = [self.config.attention[layer].reach for layer in numbers]
        groups = group_layers(reaches, widths, hybrid=hybrid) if numbers else [(None, ())]
        nothing = KVSpec(1, page_size, 1, 1, 1, "float32") if specs.keys().isdisjoint(self.stage.layers) else None
        paged = []
        for window, layers in groups:
            here = tuple(numbers[each] for each in layers if numbers[each] in self.stage.layers)
            paged.append(Paged(here, window, tuple(specs[layer] for layer in here), nothing))
        kinds = dict.fromkeys(each.state for each in self.config.attention if each.state is not None)
        return (*paged, *(self._state_group(state) for state in kinds))

    def _state_group(self, state: LayerState) -> State:
        """Return the cache group of this stage's layers that keep `state`, with the shapes of one device."""
        arrays = tuple(
            array._replace(shape=array.of_device(self.mesh.num_shards), dtype=array.dtype or self.build.dtype)
            for array in state.arrays
        )
        return State(tuple(each for each in self._state_layers if self.config.attention[each].state == state), arrays)

    @property
    def _state_layers(self) -> list[int]:
        """Indices of this stage's layers that keep a state."""
        return [layer for layer in self.stage.layers if self.config.attention[layer].state is not None]


def head_products(model: Decoder, hidden: jax.Array) -> jax.Array:
    """Return the products f32[R, V] of hidden states [R, D] with the model's token table if the checkpoint ties the
    head to it, otherwise with its LM head. On several devices they are those of this device's part of the vocabulary
    (see `own_logits`).
    """
    tied = model.config.tie_word_embeddings
    return model.embed.logits(hidden) if tied else model.lm_head(hidden, out_dtype=jnp.float32)


def _page_of(kv: KVPages | Cache) -> tuple[int, str]:
    """Return the page size of `kv` in tokens, and its cache dtype."""
    pool = kv.kv if isinstance(kv, Cache) else kv
    return pool.page_size, pool.spec.kv_dtype
