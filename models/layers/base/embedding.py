"""Token table: rows in and, where the checkpoint ties both, logits out. Devices may share the vocabulary."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.params.declare import ParamDecl, Source, declare
from jaxengine.sharding.collectives import exchange_tokens, gather_tokens, num_shards, reduce_tokens, shard_index
from jaxengine.sharding.layout import MeshLayout


class Embedding(nnx.Module):
    """Token table [V, D], which looks up tokens and, if the checkpoint ties both, also computes logits.

    of_tokens: False for another table, which the checkpoint may store as it does matrices.
    """

    def __init__(self, vocab_size: int, hidden_size: int, *, source: str, build: Build, of_tokens: bool = True):
        rows = vocab_source(source, vocab_size, build.mesh)
        self.num_rows = rows.num_contributed
        stored = build.for_table() if of_tokens else build
        self.weight = stored.weight((self.num_rows, hidden_size), (rows,), ("vocab", "embed"), table=True)

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """Return the rows [T, D] of tokens i32[T].

        Devices that split the vocabulary gather each other's tokens, look up those they have, and add up the rows.
        """
        shards = num_shards("vocab")
        if shards == 1:
            return self.weight.rows(token_ids)
        rows = gather_tokens(token_ids, "vocab") - shard_index("vocab") * (self.num_rows // shards)
        # Adding zeros to the one device's row that holds the token is exact.
        return reduce_tokens(self.weight.rows(rows, of_others=True), "vocab")

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Return logits f32[R, V] of hidden states [R, D]. If devices split the vocabulary, each gathers the rows of
        all of them and returns its part of the vocabulary, which `own_logits` exchanges.
        """
        return self.weight.matmul(gather_tokens(hidden, "vocab"), contract=1)


def sinusoids(positions: jax.Array, size: int) -> jax.Array:
    """Return f32[T, size] of positions i32[T]: their sines at size // 2 frequencies, from 1 to 1 / 10000 radians per
    position in equal ratios, then their cosines, and a zero if `size`, at least 4, is odd.
    """
    count = size // 2
    frequencies = jnp.exp(-math.log(10000.0) / (count - 1) * jnp.arange(count, dtype=jnp.float32))
    angles = positions.astype(jnp.float32)[:, None] * frequencies
    return jnp.pad(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1), ((0, 0), (0, size % 2)))


def vocab_source(name: str, vocab_size: int, mesh: MeshLayout, rows: int | None = None) -> Source:
    """Return the Source of the checkpoint's token table or LM head, padded with rows of no token so that the mesh can
    split it.

    name: the checkpoint's module. rows: number of its rows, those of the first tokens; None for `vocab_size`.
    """
    rows = vocab_size if rows is None else rows
    return Source(name, rows, padding=mesh.padded_vocab_size(vocab_size) - rows)


def vocab_bias(name: str, vocab_size: int, build: Build) -> nnx.Param:
    """Return a new parameter for the bias of logits, [V], split as the logits of `vocab_source`. name: the checkpoint's
    module.
    """
    bias = vocab_source(name, vocab_size, build.mesh).tensor("bias")
    return declare((bias.num_contributed,), build.dtype, ParamDecl(("vocab",), (bias,), init_std=0.02))


def own_logits(logits: jax.Array, vocab_size: int) -> jax.Array:
    """Exchange logits between the devices that split the vocabulary, so that each has all logits of its own rows.

    logits: this device's part of the vocabulary for the rows of all these devices. Returns f32[R, V / n] if n devices
    share the sampled rows, with -inf where there is no token, from `vocab_size` on; V is the size of all devices'
    parts. On one device nothing is exchanged.
    """
    if num_shards("vocab") > 1:
        logits = exchange_tokens(logits, "vocab")
    elif logits.shape[1] == vocab_size:
        return logits
    token = shard_index("sampled_vocab") * logits.shape[1] + jnp.arange(logits.shape[1], dtype=jnp.int32)
    return jnp.where(token < vocab_size, logits, -jnp.inf)
