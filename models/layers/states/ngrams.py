"""Embeddings of n-grams of token ids, gated by the hidden states that they are added to, and a convolution along them
(Qwen4-Exp's per-layer embeddings).

An n-gram is hashed to a row of each of several tables. Its tokens before a step's are a state of the sequence, as is
the convolution's window, so nothing depends on how a prompt was cut. Shape letter A: hidden states of a token.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.cache import StateRows
from jaxengine.models.config.compressed import primes_from
from jaxengine.models.config.state import NGrams
from jaxengine.models.layers.attention.attention import StepInputs
from jaxengine.models.layers.attention.blocks.token_blocks import TokenBlocks, recent
from jaxengine.models.layers.base.hashes import product_of_ids, remainders
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.norm import GroupedOffsetRMSNorm
from jaxengine.models.params.declare import ParamDecl, Source, declare
from jaxengine.pallas_kernels.state.conv import causal_conv
from jaxengine.sharding.collectives import gather_tokens, num_shards, reduce_tokens, shard_index

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15  # of SplitMix64 (Steele et al. 2014), as are the two factors
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_OF_LAYER = 10007  # distance of the seeds of successive layers
_LEAST_GATE = 1e-6


def hash_factors(ngrams: NGrams) -> list[int]:
    """Return `longest` odd numbers, by which the token ids of an n-gram are multiplied, the last token's first. They
    are outputs of SplitMix64 after the layer's seed, small enough that products with token ids are less than 2**63.
    """
    most = max(1, ((1 << 63) - 1) // ngrams.vocab_size // 2)
    factors = []
    for index in range(ngrams.longest):
        # The generator adds its constant once for the place in the list, and once itself.
        mixed = (ngrams.seed + _OF_LAYER * ngrams.number + _GAMMA * (index + 2)) & _MASK
        for shift, factor in ((30, _FIRST), (27, _SECOND)):
            mixed = ((mixed ^ (mixed >> shift)) * factor) & _MASK
        factors.append(2 * ((mixed ^ (mixed >> 31)) % most) + 1)
    return factors


def table_sizes(ngrams: NGrams) -> tuple[int, ...]:
    """Return the number of rows of each table of the layer, those of 2-grams first: the primes from `least` on that
    follow those of the layers before.
    """
    before = ngrams.number * ngrams.num_tables
    return primes_from(ngrams.least, before + ngrams.num_tables)[before:]


def rows_of(ngrams: NGrams, blocks: TokenBlocks, before: jax.Array) -> jax.Array:
    """Return the numbers i32[T, num_tables] of the rows that a step's tokens look up, counted through all tables.

    before: i32[T, longest - 1], ids of the tokens before each token in its sequence, the last one first; those before
    the first one may be any. From `end` on, towards the beginning, they count as `end`. A row is the XOR of the ids'
    products with factors, modulo a table's size.
    """
    lags = jnp.arange(1, ngrams.longest, dtype=jnp.int32)
    ends = (before == ngrams.end) | (lags > blocks.positions[:, None])
    ids = jnp.where(jnp.cumsum(ends, axis=1) > 0, ngrams.end, before).astype(jnp.uint32)
    factors, sizes, found = hash_factors(ngrams), table_sizes(ngrams), []
    high, low = product_of_ids(blocks.token_ids.astype(jnp.uint32), factors[0])
    for index, factor in enumerate(factors[1:]):
        more_high, more_low = product_of_ids(ids[:, index], factor)
        high, low = high ^ more_high, low ^ more_low
        own = sizes[index * ngrams.num_heads :][: ngrams.num_heads]
        found.append(remainders((high, low), own))
    return jnp.concatenate(found, axis=1) + jnp.asarray(np.cumsum([0, *sizes[:-1]]), jnp.int32)


class NGramTables(nnx.Module):
    """Tables of a layer's n-grams. Their rows are split over devices by the logical axis "vocab"."""

    def __init__(self, ngrams: NGrams, *, source: str, build: Build):
        total = -(-sum(table_sizes(ngrams)) // ngrams.divisor) * ngrams.divisor
        self.stored = stored = -(-total // ngrams.parts)
        shards = build.mesh.num_shards("vocab")
        # Each part has as many rows, so that a row's device follows from its number.
        self.of_part = -(-stored // shards) * shards
        counts = [min(stored, total - first) for first in range(0, total, stored)]
        parts = [
            Source(f"{source}.shard_{index}", count, padding=self.of_part - count) for index, count in enumerate(counts)
        ]
        self.num_rows = len(parts) * self.of_part
        width = ngrams.size // ngrams.num_tables
        self.weight = build.for_table().weight((self.num_rows, width), parts, ("vocab", "embed"), table=True)

    def __call__(self, rows: jax.Array) -> jax.Array:
        """Return the embeddings [T, size] of rows i32[T, num_tables], those of all tables side by side."""
        shards = num_shards("vocab")
        numbers = gather_tokens(rows.reshape(-1), "vocab")
        part, inner = numbers // self.stored, numbers % self.stored
        if shards == 1:
            return self.weight.rows(part * self.of_part + inner).reshape(len(rows), -1)
        share = self.of_part // shards
        own = inner // share == shard_index("vocab")
        here = jnp.where(own, part * share + inner % share, -1)
        # Adding zeros to the one device's row is exact.
        return reduce_tokens(self.weight.rows(here, of_others=True), "vocab").reshape(len(rows), -1)


class GatedNGrams(nnx.Module):
    """Values that a layer adds to a token's hidden states: one projected from its n-grams' embeddings and multiplied,
    for each hidden state, by a gate, and a SiLU of a convolution of all these products, normed, along the sequence.

    A gate is sigmoid(sign(s) * sqrt(max(|s|, 1e-6))), where s is the product of the normed hidden state and a key,
    normed and projected from the embeddings as well, divided by sqrt(D). It is whole on every device.
    """

    def __init__(self, ngrams: NGrams, hidden_size: int, *, eps: float, source: str, build: Build):
        channels = ngrams.channels
        self.ngrams, self.hidden_size = ngrams, hidden_size
        self.tables = NGramTables(ngrams, source=f"{source}.ple_embedding.ngram_embedding", build=build)

        def linear(name: str, size: int) -> Linear:
            return Linear(ngrams.size, (Source(f"{source}.{name}", size),), axes=("embed", "latent"), build=build)

        def norm(name: str) -> GroupedOffsetRMSNorm:
            return GroupedOffsetRMSNorm(channels, hidden_size, eps, source=f"{source}.{name}", build=build)

        self.key, self.value = linear("key_proj", channels), linear("value_proj", hidden_size)
        self.key_norm, self.query_norm, self.conv_norm = (norm(f"norm_{each}") for each in ("key", "query", "conv"))
        taps = ParamDecl((None, None), (Source(f"{source}.conv1d.weight", channels),), init_std=0.3)
        self.conv = declare((channels, ngrams.kernel), build.dtype, taps)

    def __call__(
        self, x: jax.Array, states: tuple[jax.Array, jax.Array], rows: StateRows, step: StepInputs
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Map hidden states x[T, A * D] to (what is added to them, [T, A * D], the states after this step's tokens).
        What is added is the gated values of the n-grams' embeddings plus SiLU of their dilated convolution.

        states: windows of the convolution and last token ids, [R, ...] each; NGrams.arrays has the shapes of one row.
        rows: those that sequences read and write.
        """
        ngrams, blocks, (windows, last) = self.ngrams, step.blocks, states
        with jax.named_scope("ngrams"):
            kept = recent(blocks.token_ids[:, None], last, rows, blocks)
            lags = jnp.arange(1, ngrams.longest, dtype=jnp.int32)
            before = kept.at(jnp.arange(x.shape[0], dtype=jnp.int32), lags)[..., 0]
            embedded = self.tables(rows_of(ngrams, blocks, before)).astype(x.dtype)
        with jax.named_scope("gated_ngrams"):
            added = self._gated(x, embedded, step)
        with jax.named_scope("causal_conv"):
            # The taps are `longest` tokens apart.
            taps = jnp.zeros((ngrams.channels, ngrams.window + 1), self.conv.dtype)
            taps = taps.at[:, :: ngrams.longest].set(self.conv[...])
            mixed, windows = causal_conv(self.conv_norm(added), taps, windows, rows)
        added = added.astype(jnp.float32) + jax.nn.silu(mixed)
        return added.astype(x.dtype), (windows, kept.after(last, rows))

    def _gated(self, x: jax.Array, embedded: jax.Array, step: StepInputs) -> jax.Array:
        """Return the values [T, A * D] of embeddings [T, size], multiplied by the gates of hidden states x: sigmoids of
        the signed roots of products of normed keys and x over sqrt(D), whose size is at least _LEAST_GATE.
        """
        key, query = self.key_norm(self.key(embedded, step.rows)), self.query_norm(x)
        products = key.astype(jnp.float32) * query.astype(jnp.float32)
        scores = jnp.sum(products.reshape(x.shape[0], -1, self.hidden_size), axis=-1) / math.sqrt(self.hidden_size)
        scores = jnp.sign(scores) * jnp.sqrt(jnp.maximum(jnp.abs(scores), _LEAST_GATE))
        value = self.value(embedded, step.rows).astype(jnp.float32)
        gated = jax.nn.sigmoid(scores)[..., None] * value[:, None]
        return gated.reshape(x.shape).astype(x.dtype)
