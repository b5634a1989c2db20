"""Scores of labels: of a matrix, of an output head of its own, of one that is the embedding."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.config.pooler import LAST, Classifier, Pooler
from jaxengine.models.layers.base.embedding import Embedding
from jaxengine.models.layers.classify import LabelScores
from tests.models.tiny import TINY

RANDOM = np.random.default_rng(0)
HIDDEN = RANDOM.normal(size=(3, TINY.hidden_size)).astype(np.float32)
TABLE = RANDOM.normal(size=(TINY.vocab_size, TINY.hidden_size)).astype(np.float32)


def scores(classifier: Classifier, *, tied: bool) -> np.ndarray:
    config = replace(TINY, tie_word_embeddings=tied, pooler=Pooler(LAST, classifier))
    layer = LabelScores(config, classifier, Build(jnp.bfloat16))
    table = None
    if tied:
        table = Embedding(TINY.vocab_size, TINY.hidden_size, source="model.embed_tokens", build=Build(jnp.float32))
    if not classifier.token_ids:
        layer.score.weight.values.set_value(jnp.asarray(TABLE[: classifier.num_labels].T))
    else:
        (table or layer.head).weight.values.set_value(jnp.asarray(TABLE))
    return np.asarray(layer(jnp.asarray(HIDDEN), table))


@pytest.mark.parametrize("tied", [True, False])
def test_scores(tied):
    logits = HIDDEN @ TABLE.T
    np.testing.assert_allclose(scores(Classifier(5), tied=tied), logits[:, :5], rtol=1e-5, atol=1e-5)
    some = Classifier(3, token_ids=(7, 40, 2))
    np.testing.assert_allclose(scores(some, tied=tied), logits[:, [7, 40, 2]], rtol=1e-5, atol=1e-5)
    two_way = Classifier(1, token_ids=(7, 40), difference=True)
    np.testing.assert_allclose(scores(two_way, tied=tied), logits[:, [40]] - logits[:, [7]], rtol=1e-5, atol=1e-5)


def test_labels_and_tokens_that_do_not_go_together():
    for wrong in ((0,), (1 << 20,), (2, (1, 2, 3)), (2, (1, 2), True), (1, (1,), True)):
        with pytest.raises(ModelConfigError):
            Classifier(*wrong)
    with pytest.raises(ModelConfigError, match="token ids must lie in"):
        replace(TINY, pooler=Pooler(LAST, Classifier(1, token_ids=(TINY.vocab_size,))))
