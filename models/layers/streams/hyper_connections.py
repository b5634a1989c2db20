"""Several hidden states of a token, which a part of a layer reads as one and writes as many: manifold-constrained
hyper-connections (Xie et al. 2026, as in DeepSeek-V4), or independent ones (as in Hy4 and Qwen4-Exp). A: how many there
are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxengine.models.build import Build
from jaxengine.models.config.compressed import HyperConnections
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.norm import GroupedOffsetRMSNorm, rms_normalized
from jaxengine.models.layers.base.rows import Rows
from jaxengine.models.params.declare import ParamDecl, Source, declare


class Mixing(NamedTuple):
    """Weights with which a part's output is added to the hidden states.

    shares: f32[T, A], factor of the output in each hidden state. matrix: f32[T, A, A], factor of each old hidden state
    (second axis) in each new one (third axis).
    """

    shares: jax.Array
    matrix: jax.Array


class Mixer(nnx.Module):
    """Projection in float32 that computes from a token's hidden states the numbers by which they are mixed. Its factors
    and biases are applied by callers.

    num_factors: number of parts of the product that have a factor each. name: the checkpoint's prefix of "fn", "base"
    and "scale".
    """

    def __init__(self, config: ModelConfig, num_outputs: int, num_factors: int, *, name: str):
        sizes = config.hidden_size * config.num_streams, num_outputs
        product = ParamDecl(("embed", None), (Source(f"{name}fn", num_outputs),), transposed=True, init_std=0.02)
        self.product = declare(sizes, jnp.float32, product)
        self.bias = declare((num_outputs,), jnp.float32, _plain(f"{name}base", num_outputs))
        self.factors = declare((num_factors,), jnp.float32, _plain(f"{name}scale", num_factors))
        self.norm_eps = config.rms_norm_eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the product f32[T, num_outputs] of the hidden states x [T, A * D], RMS-normed, without factors and
        biases.
        """
        with jax.default_matmul_precision("float32"):
            return rms_normalized(x, self.norm_eps) @ self.product[...]


def _plain(name: str, size: int) -> ParamDecl:
    """Return the declaration of a vector that is not split over devices, the checkpoint's tensor `name`."""
    return ParamDecl((None,), (Source(name, size),), init_std=0.3)


class HyperConnection(nnx.Module):
    """Connection of one part of a layer with a token's hidden states [T, A * D]: `read` mixes the part's input from
    them, `write` adds its output to them.
    """

    def __init__(self, config: ModelConfig, *, name: str):
        assert config.hyper_connections is not None
        self.form: HyperConnections = config.hyper_connections
        assert self.form.rounds is not None
        count = self.form.num_streams
        self.rounds = self.form.rounds
        self.mixer = Mixer(config, (2 + count) * count, 3, name=name)

    def read(self, x: jax.Array) -> tuple[jax.Array, Mixing]:
        """Return the part's input [T, D], mixed from hidden states x [T, A * D], and the weights with which `write`
        adds its output.

        The weights' matrix is made nearly doubly stochastic by `rounds` rounds of dividing by its sums
        (Sinkhorn-Knopp).
        """
        shares, mixing = self.mixed(x)
        return joined(x, shares), mixing

    def mixed(self, x: jax.Array) -> tuple[jax.Array, Mixing]:
        """Return the shares f32[T, A] of the hidden states x [T, A * D] in a part's input, and the weights with which
        `write` adds a part's output to x: sigmoids plus eps, `magnitude` times sigmoids, and a matrix that `rounds` of
        division by sums (plus eps) make doubly stochastic.
        """
        count, eps = self.form.num_streams, self.form.eps
        mixed, bias, factors = self.mixer(x), self.mixer.bias[...], self.mixer.factors[...]
        parts = zip(*(jnp.split(each, (count, 2 * count), axis=-1) for each in (mixed, bias)), factors, strict=True)
        reading, writing, matrix = (part * factor + own for part, own, factor in parts)
        matrix = jax.nn.softmax(matrix.reshape(-1, count, count), axis=-1) + eps
        matrix = matrix / (jnp.sum(matrix, axis=-2, keepdims=True) + eps)
        for _ in range(self.rounds - 1):
            for axis in (-1, -2):
                matrix = matrix / (jnp.sum(matrix, axis=axis, keepdims=True) + eps)
        return jax.nn.sigmoid(reading) + eps, Mixing(self.form.magnitude * jax.nn.sigmoid(writing), matrix)

    def write(self, x: jax.Array, output: jax.Array, mixing: Mixing) -> jax.Array:
        """Return the hidden states [T, A * D] after a part with output [T, D]: the hidden states x before it, mixed by
        mixing.matrix, plus the output multiplied by mixing.shares, in x's dtype.
        """
        wide = x.astype(jnp.float32).reshape(x.shape[0], self.form.num_streams, -1)
        mixed = jnp.einsum("tab,tad->tbd", mixing.matrix, wide, precision="float32")
        mixed = mixed + mixing.shares[..., None] * output.astype(jnp.float32)[:, None]
        return mixed.astype(x.dtype).reshape(x.shape)


class DelayedConnection(HyperConnection):
    """HyperConnection whose input is mixed with the shares that the connection before it has computed, and which passes
    on its own (DeepSeek-V4.1). Hidden states and shares are in one array [T, A * D + 3 * A] (`with_shares`).
    """

    def read(self, x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, Mixing]]:
        """Return the part's input [T, D], mixed from the hidden states in x by the shares in x, and what `write` needs:
        the shares for the next connection, and the weights with which it adds the part's output.
        """
        streams, shares = without_shares(x, self.form.num_streams)
        return joined(streams, shares), self.mixed(streams)

    def write(self, x: jax.Array, output: jax.Array, mixing: tuple[jax.Array, Mixing]) -> jax.Array:
        """Return x after a part with output [T, D], with the hidden states of HyperConnection.write and the shares for
        the next connection.
        """
        streams, _ = without_shares(x, self.form.num_streams)
        return with_shares(super().write(streams, output, mixing[1]), mixing[0])


def with_shares(streams: jax.Array, shares: jax.Array) -> jax.Array:
    """Return hidden states [T, A * D] followed by shares f32[T, A], in the dtype of the hidden states: [T, A * D + 3 *
    A]. A share is the sum of three numbers of eight bits each, which every floating-point dtype of 16 bits or more has
    if shares are at most 2 and at least 1e-6; float16 loses what is below 2 ** -24.
    """
    parts, left = [], shares
    for _ in range(3):
        part = lax.reduce_precision(left, exponent_bits=8, mantissa_bits=7)
        parts, left = [*parts, part], left - part
    return jnp.concatenate([streams, *(part.astype(streams.dtype) for part in parts)], axis=-1)


def without_shares(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Return the hidden states [T, A * D] and the shares f32[T, A] that `with_shares` joined to x in three parts, which
    are added. count: A.
    """
    streams, *parts = jnp.split(x, [x.shape[1] - each * count for each in (3, 2, 1)], axis=-1)
    first, second, third = (part.astype(jnp.float32) for part in parts)
    return streams, first + (second + third)


class IndependentConnection(nnx.Module):
    """HyperConnection that leaves the hidden states [T, A * D] as they are and only adds a part's output to each."""

    def __init__(self, config: ModelConfig, *, name: str):
        assert config.hyper_connections is not None
        self.form: HyperConnections = config.hyper_connections
        self.mixer = Mixer(config, 2 * self.form.num_streams, 2, name=name)

    def read(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the part's input [T, D], mixed from hidden states x [T, A * D] with shares sigmoid(.) + eps, and the
        factors f32[T, A] with which `write` adds its output, magnitude * sigmoid(.) + eps.
        """
        parts = zip(*(jnp.split(each, 2, axis=-1) for each in (self.mixer(x), self.mixer.bias[...])), strict=True)
        shares = (part * factor + own for (part, own), factor in zip(parts, self.mixer.factors[...], strict=True))
        reading, writing = (jax.nn.sigmoid(each) for each in shares)
        return joined(x, reading + self.form.eps), self.form.magnitude * writing + self.form.eps

    def write(self, x: jax.Array, output: jax.Array, factors: jax.Array) -> jax.Array:
        """Return `added_to_each` of the hidden states x and the part's output."""
        return added_to_each(x, output, factors)


def added_to_each(x: jax.Array, output: jax.Array, factors: jax.Array) -> jax.Array:
    """Return the hidden states x [T, A * D], each plus a part's output [T, D] multiplied by its factor of f32[T, A],
    computed in float32, in x's dtype.
    """
    wide = x.astype(jnp.float32).reshape(*factors.shape, -1)
    added = wide + factors[..., None] * output.astype(jnp.float32)[:, None]
    return added.astype(x.dtype).reshape(x.shape)


def equal_streams(self: Any, x: jax.Array, batch: Any) -> jax.Array:
    """Return a step's embeddings x [T, D] as hidden states [T, A * D]; all A hidden states of a token are equal. It is
    the method `first_input` of decoders.
    """
    return jnp.tile(x, (1, self.config.num_streams))


def joined(x: jax.Array, shares: jax.Array) -> jax.Array:
    """Return the sum [T, D] of a token's A hidden states x [T, A * D], multiplied by their shares f32[T, A], in x's
    dtype.
    """
    wide = x.astype(jnp.float32).reshape(*shares.shape, -1)
    return jnp.sum(shares[..., None] * wide, axis=1).astype(x.dtype)


class MeanOfStreams(nnx.Module):
    """Norm of the mean of a token's hidden states: [T, A * D] -> [T, D]."""

    def __init__(self, config: ModelConfig, norm: Any):
        self.num_streams, self.norm = config.num_streams, norm

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(joined(x, jnp.full((x.shape[0], self.num_streams), 1 / self.num_streams, jnp.float32)))


class StreamsByShares(nnx.Module):
    """Norm of the sum of a token's hidden states, weighted by the shares that the last connection has computed: [T, A *
    D + 3 * A] -> [T, D].
    """

    def __init__(self, config: ModelConfig, norm: Any):
        self.num_streams, self.norm = config.num_streams, norm

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(joined(*without_shares(x, self.num_streams)))


class JoinedStreams(nnx.Module):
    """Norm of the weighted sum of a token's hidden states: [T, A * D] -> [T, D]."""

    def __init__(self, config: ModelConfig, norm: Any, *, name: str):
        assert config.hyper_connections is not None
        self.eps, self.norm = config.hyper_connections.eps, norm
        self.mixer = Mixer(config, config.num_streams, 1, name=name)

    def __call__(self, x: jax.Array) -> jax.Array:
        shares = self.mixer(x) * self.mixer.factors[...] + self.mixer.bias[...]
        return self.norm(joined(x, jax.nn.sigmoid(shares) + self.eps))


class GatedStreams(nnx.Module):
    """Mean of a token's hidden states, each normed by itself and multiplied by a gate for each element: [T, A * D] ->
    [T, D].

    Gates are sigmoid(up(silu(down(n) / A))) of all normed hidden states n side by side, with a product of the rank that
    the configuration names in between.
    """

    def __init__(self, config: ModelConfig, *, source: str, build: Build):
        form, size = config.hyper_connections, config.hidden_size
        assert form is not None and form.rank is not None
        self.count, wide = form.num_streams, size * form.num_streams
        self.hc_norm = GroupedOffsetRMSNorm(wide, size, form.eps, source=f"{source}.hc_norm", build=build)
        # Whole on every device.
        down, up = Source(f"{source}.input_mix_weight_down", form.rank), Source(f"{source}.input_mix_weight_up", wide)
        options: dict[str, Any] = {"axes": ("embed", "latent"), "build": build, "of_tokens": True}
        self.down, self.up = Linear(wide, (down,), **options), Linear(form.rank, (up,), **options)

    def mean(self, normed: jax.Array, rows: Rows) -> jax.Array:
        """Return the mean [T, D] of normed hidden states [T, A * D], multiplied by their gates
        sigmoid(up(silu(down(normed) / A))), in their dtype. rows: the step's.
        """
        inner = jax.nn.silu(self.down(normed, rows, out_dtype=jnp.float32) / self.count).astype(normed.dtype)
        gates = jax.nn.sigmoid(self.up(inner, rows, out_dtype=jnp.float32))
        wide = (gates * normed.astype(jnp.float32)).reshape(normed.shape[0], self.count, -1)
        return jnp.mean(wide, axis=1).astype(normed.dtype)

    def __call__(self, x: jax.Array, rows: Rows) -> jax.Array:
        return self.mean(self.hc_norm(x), rows)


class GatedConnection(GatedStreams):
    """Connection of one part of a layer with a token's hidden states [T, A * D]: `read` returns the part's input,
    `write` adds its output to each, multiplied by a factor of its own.
    """

    def __init__(self, config: ModelConfig, *, source: str, build: Build):
        super().__init__(config, source=source, build=build)
        assert config.hyper_connections is not None
        self.magnitude = config.hyper_connections.magnitude
        inject = Source(f"{source}.block_inject_weight", self.count)
        self.inject = Linear(config.hidden_size * self.count, (inject,), axes=("embed", "latent"), build=build)

    def read(self, x: jax.Array, rows: Rows) -> tuple[jax.Array, jax.Array]:
        """Return the part's input [T, D] for hidden states x [T, A * D], and the factors f32[T, A] with which `write`
        adds its output, magnitude * sigmoid(inject(n) / A) of the normed hidden states n. rows: the step's.
        """
        normed = self.hc_norm(x)
        factors = self.magnitude * jax.nn.sigmoid(self.inject(normed, rows, out_dtype=jnp.float32) / self.count)
        return self.mean(normed, rows), factors

    def write(self, x: jax.Array, output: jax.Array, factors: jax.Array) -> jax.Array:
        """Return `added_to_each` of the hidden states x and the part's output."""
        return added_to_each(x, output, factors)
