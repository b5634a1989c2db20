"""Rows of n-grams of token ids, against integers of any size."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxengine.models.build import Build
from jaxengine.models.config.compressed import primes_from
from jaxengine.models.config.state import NGrams
from jaxengine.models.layers.states.ngrams import NGramTables, hash_factors, rows_of, table_sizes
from jaxengine.sharding.layout import MeshLayout
from tests.tables import each_row

PUBLISHED = NGrams(1, 3, 8, 2048, 20_000_000, 128, 512, 1234, 7, 248320, 8192, 4)


@each_row(
    "ngrams",
    [
        PUBLISHED,
        NGrams(0, 4, 1, 6, 2, 1, 1, 5, 7, 97, 8, 2),
        NGrams(2, 2, 3, 6, 300_000_000, 1, 3, 1 << 30, 7, 1 << 22, 8, 2),
    ],
)
def test_rows(ngrams: NGrams):
    """Rows are products of token ids and factors, exclusive or, modulo a prime; no n-gram reaches beyond an end."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, ngrams.vocab_size, 40)
    ids[[5, 6, 11, 30]] = ngrams.end
    ids[8] = ngrams.vocab_size - 1
    before = np.stack([np.concatenate([np.full(lag, 3), ids[:-lag]]) for lag in range(1, ngrams.longest)], axis=1)
    blocks: Any = SimpleNamespace(token_ids=jnp.asarray(ids, jnp.int32), positions=jnp.arange(40))
    found = np.asarray(jax.jit(partial(rows_of, ngrams, blocks))(jnp.asarray(before, jnp.int32)))
    factors, sizes = hash_factors(ngrams), table_sizes(ngrams)
    firsts = np.cumsum([0, *sizes])
    for place, row in enumerate(found):
        mixed, seen, wanted = int(ids[place]) * factors[0], True, []
        for lag in range(1, ngrams.longest):
            seen = seen and lag <= place and ids[place - lag] != ngrams.end
            mixed ^= int(ids[place - lag] if seen else ngrams.end) * factors[lag]
            own = slice((lag - 1) * ngrams.num_heads, lag * ngrams.num_heads)
            wanted += [first + mixed % size for first, size in zip(firsts[own], sizes[own], strict=True)]
        assert row.tolist() == wanted, place


def test_sizes_and_factors():
    """Primes in order, those of the layers before left out. Factors are those that transformers computes."""
    assert primes_from(1, 6) == (2, 3, 5, 7, 11, 13) and primes_from(24, 2) == (29, 31)
    assert table_sizes(NGrams(1, 2, 3, 6, 5, 1, 1, 0, 7, 97, 8, 2)) == (13, 17, 19)
    assert primes_from(20_000_000, 2) == (20_000_003, 20_000_023)
    assert primes_from(2**31 - 1, 1) == (2**31 - 1,) and primes_from(1, 6543)[-1] == 65537
    assert all(factor % 2 and 0 < factor * (PUBLISHED.vocab_size - 1) < 1 << 63 for factor in hash_factors(PUBLISHED))


def test_parts_are_padded_to_what_devices_share():
    build = Build("float32", mesh=MeshLayout(model=4))
    tables: Any = NGramTables(NGrams(0, 2, 2, 6, 10, 1, 5, 0, 7, 97, 8, 2), source="s", build=build)
    sources = tables.weight.values.get_metadata()["decl"].sources
    assert [(source.rows, source.padding) for source in sources] == [(5, 3)] * 4 + [(4, 4)] and tables.num_rows == 40
