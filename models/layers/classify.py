"""Scores of a classifier's labels, by a matrix of the checkpoint or rows of its output head.

A `*ForSequenceClassification` checkpoint has `score.weight` instead of a head. A reranker that answers with one of a
few tokens is scored by their rows of the head alone, without logits of the other tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.pooler import DENSE, Classifier, Dense
from jaxengine.models.layers.base.embedding import Embedding
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.mlp import gelu
from jaxengine.models.params.declare import Source
from jaxengine.models.quantization.registry import PLAIN

SCORE, HEAD = "score", "lm_head"


class LabelScores(nnx.Module):
    """Module that scores labels, [R, D] -> f32[R, num_labels], by `score` or by rows of the LM head for the
    classifier's tokens, or their difference (Classifier.difference), [R, 1]. Products are in float32. Its argument
    `table` is the embedding if the checkpoint ties the head to it, otherwise None.
    """

    def __init__(self, config: ModelConfig, classifier: Classifier, build: Build):
        self.classifier = classifier
        # As in vLLM, scores are computed in float32 whatever the model's dtype.
        build = replace(build, dtype=jnp.float32)
        size = config.hidden_size
        if not classifier.token_ids:
            rows = 2 if classifier.difference else classifier.num_labels
            self.score = Linear(size, (Source(SCORE, rows),), axes=("embed", "labels"), build=build)
        elif not config.tie_word_embeddings:
            self.head = Embedding(config.vocab_size, size, source=HEAD, build=build)

    def __call__(self, hidden: jax.Array, table: Embedding | None) -> jax.Array:
        if not self.classifier.token_ids:
            scores = self.score(hidden, out_dtype=jnp.float32)
            return scores[:, :1] - scores[:, 1:] if self.classifier.difference else scores
        rows = (table or self.head)(jnp.asarray(self.classifier.token_ids, jnp.int32)).astype(jnp.float32)
        if self.classifier.difference:
            rows = rows[1:] - rows[:1]
        return jnp.dot(hidden.astype(jnp.float32), rows.T, precision=jax.lax.Precision.HIGHEST)


_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "Identity": lambda x: x,
    "Tanh": jnp.tanh,
    "ReLU": jax.nn.relu,
    "GELU": gelu,
    "Sigmoid": jax.nn.sigmoid,
    "SiLU": jax.nn.silu,
}


class DenseModules(nnx.Module):
    """Chain of the Dense modules of sentence-transformers: f32[R, D] -> f32[R, N], computed in float32.

    Their weights are tensors of the checkpoint modules dense.0.linear, dense.1.linear and so on. They are in files of
    their own and never quantised.
    """

    def __init__(self, dense: Sequence[Dense], build: Build):
        build = replace(build, dtype=jnp.float32, scheme=PLAIN)
        self.activations = tuple(each.activation for each in dense)
        self.products = nnx.List(
            Linear(
                each.in_features,
                (Source(f"{DENSE}.{index}.linear", each.out_features),),
                axes=("embed", "labels"),
                bias=each.bias,
                build=build,
            )
            for index, each in enumerate(dense)
        )

    def __call__(self, pooled: jax.Array) -> jax.Array:
        for product, activation in zip(self.products, self.activations, strict=True):
            pooled = _ACTIVATIONS[activation](product(pooled, out_dtype=jnp.float32))
        return pooled


class LinearLabelScores(nnx.Module):
    """Module that scores labels by one projection with a bias, [R, D] -> f32[R, num_labels]. source: its checkpoint
    module.
    """

    def __init__(self, size: int, classifier: Classifier, source: str, *, build: Build):
        # In float32 whatever the model's dtype, like LabelScores.
        build, rows = replace(build, dtype=jnp.float32), Source(source, classifier.num_labels)
        self.labels = Linear(size, (rows,), axes=("embed", "labels"), bias=True, build=build)

    def __call__(self, hidden: jax.Array, table: Embedding | None) -> jax.Array:
        return self.labels(hidden, out_dtype=jnp.float32)


class DenseLabelScores(nnx.Module):
    """Module that scores labels by two projections, as encoders do: labels(norm(activation(dense(pooled)))), [R, D] ->
    f32[R, num_labels].

    sources: checkpoint modules of both projections. dense_bias, labels_bias: whether the first and the second one have
    a bias. norm: function that returns the norm for a Build; None for no norm.
    """

    def __init__(
        self,
        size: int,
        classifier: Classifier,
        sources: tuple[str, str],
        *,
        activation: Callable[[jax.Array], jax.Array],
        build: Build,
        dense_bias: bool = True,
        labels_bias: bool = True,
        norm: Callable[[Build], nnx.Module] | None = None,
    ):
        # In float32 whatever the model's dtype, like LabelScores.
        build = replace(build, dtype=jnp.float32)
        dense, labels = sources
        self.dense = Linear(size, (Source(dense, size),), axes=("embed", "labels"), bias=dense_bias, build=build)
        rows = Source(labels, classifier.num_labels)
        self.labels = Linear(size, (rows,), axes=("embed", "labels"), bias=labels_bias, build=build)
        self.activation, self.norm = activation, None if norm is None else norm(build)

    def __call__(self, hidden: jax.Array, table: Embedding | None) -> jax.Array:
        inner = self.activation(self.dense(hidden, out_dtype=jnp.float32))
        inner = inner if self.norm is None else self.norm(inner)
        return self.labels(inner, out_dtype=jnp.float32)


def pooled_result(model: Any, pooled: jax.Array) -> jax.Array:
    """Return the results of a pooling model for prompts' pooled states f32[R, D]: scores f32[R, num_labels] if it has a
    classifier, otherwise the output f32[R, N] of its Dense modules, or the states themselves without any.

    model: a jaxengine.models.layers.decoder.Decoder whose config has a pooler. Nothing is normalised here.
    """
    pooler = model.config.pooler
    classifier = pooler.classifier
    if classifier is None:
        return model.dense(pooled) if pooler.dense else pooled
    with jax.named_scope("labels"):
        is_tied = classifier.token_ids and model.config.tie_word_embeddings
        return model.labels(pooled, model.embed if is_tied else None)
