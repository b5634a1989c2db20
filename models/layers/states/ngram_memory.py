"""Memory of n-grams: rows of a table, found by hashes of a token's id and of those before it, that are added to a
token's hidden states (DeepSeek-AI 2026, "Conditional Memory via Scalable Lookup", Engram, as in DeepSeek-V4.1).

A hash is the exclusive or of products of ids and constants of 63 bits, modulo a prime number. C: rows that a token
looks up, E: elements of a row, A: hidden states of a token.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.cache import StateRows
from jaxengine.models.config.compressed import TOKEN_MAP
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.layers.attention.attention import StepInputs
from jaxengine.models.layers.attention.blocks.token_blocks import TokenBlocks, recent
from jaxengine.models.layers.base.embedding import Embedding
from jaxengine.models.layers.base.hashes import product_of_ids, remainders
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.params.declare import ParamDecl, Source, declare

_LEAST = 1e-6  # smallest magnitude of a product before its square root


class NgramLookup(nnx.Module):
    """Memory of the layer number `layer`, one of those in `config.ngrams.layers`. `source`: its checkpoint module."""

    def __init__(self, config: ModelConfig, layer: int, *, source: str, build: Build):
        form = config.ngrams
        assert form is not None
        index, size, count = form.layers.index(layer), config.hidden_size, config.num_streams
        self.form, self.num_streams, self.eps = form, count, config.rms_norm_eps
        self.primes, self.multipliers = form.primes[index], form.multipliers(layer)
        sizes, named = (form.num_rows[index], form.head_dim), f"{source}.embed"
        self.table = Embedding(*sizes, source=named, build=build, of_tokens=False)
        joined = (Source(f"{source}.wkv", (count + 1) * size),)
        self.keys_value = Linear(form.num_columns * form.head_dim, joined, axes=("latent", "latent"), build=build)
        weights = [ParamDecl((None, None), (Source(f"{source}.{name}_weight", count),)) for name in ("q", "k")]
        self.weights = nnx.List([declare((count, size), jnp.float32, each) for each in weights])
        ids = ParamDecl((None,), (Source(f"{source}.{TOKEN_MAP}", config.vocab_size),), init_value=0)
        self.token_map = declare((config.vocab_size,), jnp.int32, ids)

    def __call__(
        self, x: jax.Array, state: jax.Array, rows: StateRows, step: StepInputs
    ) -> tuple[jax.Array, jax.Array]:
        """Return hidden states [T, A * D] with what the memory has for each token added, and the state after this
        step's tokens. x: hidden states [T, A * D]. state, rows: SharedKeys.arrays' ids of earlier tokens, i32[rows,
        longest - 1, 1], and where they are.

        The table's rows are projected to a key for each hidden state, and a value. The value is multiplied by sigmoid(
        sign(d) * sqrt(max(|d|, 1e-6))) for each hidden state, where d is the product of hidden state and key, RMS
        normed and weighted, divided by sqrt(D).
        """
        ids, state = self._latest(step.blocks, state, rows)
        found = self.table(self._places(ids).reshape(-1)).reshape(x.shape[0], -1)
        keys, value = jnp.split(self.keys_value(found, step.rows).astype(jnp.float32), [x.shape[1]], axis=1)
        wide, keys = (each.reshape(x.shape[0], self.num_streams, -1) for each in (x.astype(jnp.float32), keys))
        weight = self.weights[0][...] * self.weights[1][...]
        product = jnp.sum(wide * weight * keys, axis=-1)
        for each in (wide, keys):
            product = product * jax.lax.rsqrt(jnp.mean(jnp.square(each), axis=-1) + self.eps)
        product = product * wide.shape[-1] ** -0.5
        root = jnp.sqrt(jnp.maximum(jnp.abs(product), _LEAST))
        gates = jax.nn.sigmoid(jnp.where(product < 0, -root, root))
        return (wide + gates[..., None] * value[:, None]).astype(x.dtype).reshape(x.shape), state

    def _latest(self, blocks: TokenBlocks, state: jax.Array, rows: StateRows) -> tuple[jax.Array, jax.Array]:
        """Return the smaller vocabulary's ids u32[T, longest] of each token and those before it, the padding's where
        there is none, and the state after this step.
        """
        latest = recent(blocks.token_ids[:, None] + 1, state, rows, blocks)
        lags = jnp.arange(self.form.longest, dtype=jnp.int32)
        ids = latest.at(jnp.arange(len(blocks.positions), dtype=jnp.int32), lags)[..., 0] - 1
        ids = jnp.where(lags <= blocks.positions[:, None], ids, self.form.pad_id)
        mapped = self.token_map[...][jnp.clip(ids, 0, len(self.token_map) - 1)]
        return mapped.astype(jnp.uint32), latest.after(state, rows)

    def _places(self, ids: jax.Array) -> jax.Array:
        """Return the rows i32[T, C] of the table for ids u32[T, longest], those for 2-grams first. A row is the XOR of
        the ids' products with the multipliers, modulo the prime of its range.
        """
        count, places, first = self.form.num_heads, [], 0
        mixed = product_of_ids(ids[:, 0], self.multipliers[0])
        for lag in range(1, self.form.longest):
            other = product_of_ids(ids[:, lag], self.multipliers[lag])
            mixed = mixed[0] ^ other[0], mixed[1] ^ other[1]
            primes = self.primes[(lag - 1) * count : lag * count]
            starts = first + np.cumsum([0, *primes[:-1]])
            places.append(remainders(mixed, primes) + jnp.asarray(starts, jnp.int32))
            first += sum(primes)
        return jnp.concatenate(places, axis=1)
