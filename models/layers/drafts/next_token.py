"""Multi-token-prediction (MTP) layer after a model's last one, which predicts the token after the next
(DeepSeek-AI 2024, arXiv:2412.19437, section 2.2).

For each token it takes the model's hidden state and the embedding of the next token, each normed,
projects both to one and runs one more decoder layer of the family over them; the model's own head then gives the
logits. Checkpoints store it as layer number num_hidden_layers, or under names of its own. Applied to its own hidden
states it predicts further tokens. Families differ in what jaxengine.models.params.source.NextLayer says.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp

from jaxengine.models.build import Build
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.forward_batch import ForwardBatch
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.decoder import Decoder
from jaxengine.models.params.declare import Source
from jaxengine.models.params.source import NextLayer
from jaxengine.models.quantization.registry import PLAIN
from jaxengine.pallas_kernels.kv.pages import KVPages
from jaxengine.sharding.stages import Stage


@cache
def next_token_class(family: type[Decoder]) -> type[Decoder]:
    """Return the class of the family's next-token layer, cached by family: one layer between norms of its own, whose
    input is projected from both a hidden state and an embedding. Its constructor takes the ModelConfig of
    `with_next_layer` and a Build, whose stage is not read.
    """

    class NextToken(family):
        """One layer of the family between norms of its own. It uses the model's embeddings and logits."""

        form_of_next = family.checkpoint_names.next_layer

        def __init__(self, config: ModelConfig, build: Build):
            count, size, eps = config.num_layers, config.hidden_size, config.rms_norm_eps
            number, last = count - self.form_of_next.count, f"model.layers.{count - 1}"
            stage = Stage(number, count, is_first=False, is_last=False)
            super().__init__(config, replace(build, stage=stage))
            name = f"model.layers.{number}"
            self.embed_norm = self.norm_class(size, eps, source=f"{name}.enorm", build=build)
            self.hidden_norm = self.norm_class(size, eps, source=f"{name}.hnorm", build=build)
            # Stored plain, whatever the storage of other products.
            plain, source = replace(build, scheme=PLAIN), Source(f"{name}.eh_proj", size)
            self.joined = Linear(2 * size, (source,), axes=("latent", "embed"), build=plain)
            self.head_norm = self.norm_class(size, eps, source=f"{last}.{self.form_of_next.norm}", build=build)

        def read(self, hidden: jax.Array) -> jax.Array:
            """Return the model's hidden states [T, D] after its final norm, in the form that this layer takes:
            unchanged.
            """
            return hidden

        def embeddings(self, token_ids: jax.Array, model: Decoder) -> jax.Array:
            """Return the embeddings [T, D] of tokens i32[T] that the model's first layer gets."""
            return model.embed_tokens(token_ids)

        def __call__(
            self, batch: ForwardBatch, kv: KVPages, hidden: jax.Array, embeddings: jax.Array
        ) -> tuple[jax.Array, KVPages]:
            """Return hidden states [T, D], given each token's hidden state [T, D] and the next token's embedding [T,
            D], and the layer's own pool `kv` with the keys and values of these tokens written.

            The result replaces `hidden` when predicting further tokens.
            """
            with jax.named_scope("join"):
                both = [self.embed_norm(embeddings), self.hidden_norm(hidden)]
                both = both[::-1] if self.form_of_next.hidden_first else both
                x = self.joined(jnp.concatenate(both, axis=-1))
            x, pool = super().__call__(batch, kv, x)
            assert isinstance(pool, KVPages)
            return self.head_norm(x) if self.form_of_next.normed else x, pool

        def draft_logits(self, hidden: jax.Array, model: Decoder) -> jax.Array:
            """Return the logits f32[R, V / n] of the tokens after the next ones for hidden states [R, D], split over n
            devices as the model's logits are.
            """
            return model.logits(hidden if self.form_of_next.normed else self.head_norm(hidden))

    NextToken.__module__ = family.__module__
    return NextToken


def with_next_layer(config: ModelConfig, layer: NextLayer) -> ModelConfig:
    """Return a model's configuration with its first next-token layer, `layer`, appended; without a tower and without
    further next-token layers. It attends like the last layer that attends, if layer.windowed the last with a window.
    """
    likely = [each for each in config.attending if each.window is not None or not layer.windowed]
    own, experts = (likely or config.attending)[-1], config.experts
    further = [replace(own, mixer_only=False, feed_forward_only=True)] * (layer.count - 1)
    if layer.dense and experts is not None:
        experts = replace(experts, dense_layers=(*experts.dense_layers, config.num_layers))
    attention = *config.attention, own, *further
    return replace(config, attention=attention, experts=experts, num_nextn_predict_layers=0, tower=None)
