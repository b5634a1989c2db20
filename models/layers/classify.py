"""Scores of a classifier's labels, by a matrix of the checkpoint or rows of its output head.

A `*ForSequenceClassification` checkpoint has `score.weight` instead of a head. A reranker that answers with one of a
few tokens is scored by their rows of the head alone, without logits of the other tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.pooler import Classifier
from jaxengine.models.layers.embedding import Embedding
from jaxengine.models.layers.linear import Linear
from jaxengine.models.params.declare import Source

SCORE, HEAD = "score", "lm_head"


class LabelScores(nnx.Module):
    """Module that scores labels, [R, D] -> f32[R, num_labels]; `table` is the embedding if the checkpoint ties the head
    to it."""

    def __init__(self, config: ModelConfig, classifier: Classifier, build: Build):
        self.classifier = classifier
        # As in vLLM, scores are computed in float32 whatever the model's dtype.
        build = replace(build, dtype=jnp.float32)
        size = config.hidden_size
        if not classifier.token_ids:
            self.score = Linear(size, (Source(SCORE, classifier.num_labels),), axes=("embed", "labels"), build=build)
        elif not config.tie_word_embeddings:
            self.head = Embedding(config.vocab_size, size, source=HEAD, build=build)

    def __call__(self, hidden: jax.Array, table: Embedding | None) -> jax.Array:
        if not self.classifier.token_ids:
            return self.score(hidden, out_dtype=jnp.float32)
        rows = (table or self.head)(jnp.asarray(self.classifier.token_ids, jnp.int32)).astype(jnp.float32)
        if self.classifier.difference:
            rows = rows[1:] - rows[:1]
        return jnp.dot(hidden.astype(jnp.float32), rows.T, precision=jax.lax.Precision.HIGHEST)


class DenseLabelScores(nnx.Module):
    """Module that scores labels as encoders do: labels(activation(dense(pooled))), [R, D] -> f32[R, num_labels].

    sources: checkpoint modules of both projections, which have biases.
    """

    def __init__(
        self,
        size: int,
        classifier: Classifier,
        sources: tuple[str, str],
        *,
        activation: Callable[[jax.Array], jax.Array],
        build: Build,
    ):
        # In float32 whatever the model's dtype, as LabelScores.
        build = replace(build, dtype=jnp.float32)
        dense, labels = sources
        self.dense = Linear(size, (Source(dense, size),), axes=("embed", "labels"), bias=True, build=build)
        rows = Source(labels, classifier.num_labels)
        self.labels = Linear(size, (rows,), axes=("embed", "labels"), bias=True, build=build)
        self.activation = activation

    def __call__(self, hidden: jax.Array, table: Embedding | None) -> jax.Array:
        inner = self.activation(self.dense(hidden, out_dtype=jnp.float32))
        return self.labels(inner, out_dtype=jnp.float32)


def pooled_result(model: Any, pooled: jax.Array) -> jax.Array:
    """Return the answers of a pooling model to prompts' pooled states f32[R, D]: the states, or scores f32[R, N].

    model: a jaxengine.models.layers.decoder.Decoder whose config has a pooler.
    """
    classifier = model.config.pooler.classifier
    if classifier is None:
        return pooled
    with jax.named_scope("labels"):
        is_tied = classifier.token_ids and model.config.tie_word_embeddings
        return model.labels(pooled, model.embed if is_tied else None)
