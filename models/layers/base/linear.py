"""Linear: the matrix product of layers, with its bias and its communication between devices.

Shape letters, here and in all model files: T tokens of the step, S sequences, R rows, N query heads, K key/value heads,
H head dimension, D hidden size, F feed-forward size, V vocabulary, L layers.

The residual stream is kept in the model's dtype. Every product accumulates in float32; norms and activations are
computed in float32.

A layer may be split over devices (jaxengine.sharding.collectives), which then have parts of the declared weights. A
product gathers the tokens that are distributed over the devices of its output, and adds up the partial sums of the
devices of its input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.adapters import Adapters
from jaxengine.models.build import Build
from jaxengine.models.layers.base.lora import LoraPools
from jaxengine.models.layers.base.rows import Rows
from jaxengine.models.params.declare import ParamDecl, Source, declare
from jaxengine.sharding.collectives import gather_tokens, num_shards, reduce_tokens


class Linear(nnx.Module):
    """Linear layer y = x @ weight + bias, with a weight [in, out], and with pools for LoRA adapters if the build has
    any and the product belongs to a layer or has the step's tokens as its rows (`of_tokens`).

    Args:
      sources: checkpoint modules whose outputs are concatenated, in order, with their widths; q, k and v, or gate and
        up, form one product.
      axes: logical axes of (in, out).
      of_tokens: whether a product outside of the layers takes adapters; it is then called with `rows`.
    """

    def __init__(
        self,
        in_size: int,
        sources: Sequence[Source],
        *,
        axes: tuple[str, str],
        build: Build,
        bias: bool = False,
        of_tokens: bool = False,
    ):
        out_size = sum(source.num_contributed for source in sources)
        self.axes = axes
        self.weight = build.weight((in_size, out_size), sources, axes)
        biases = ParamDecl((axes[1],), tuple(source.tensor("bias") for source in sources), init_std=0.02)
        self.bias = declare((out_size,), build.dtype, biases) if bias else None
        spec = build.lora if build.layer is not None or of_tokens else None
        options = {"axes": axes, "dtype": build.dtype}
        self.lora = None if spec is None else LoraPools(spec, in_size, tuple(sources), **options)

    def __call__(self, x: jax.Array, rows: Rows | None = None, *, out_dtype: Any = None) -> jax.Array:
        """Return x @ weight, [R, in] -> [R, out], plus the bias and the contributions of adapters, if any.

        On several devices x and the result are a device's parts: tokens are gathered before the product, and partial
        sums are added up after it. rows: description of x's rows; None if they are not the step's tokens. out_dtype:
        dtype of the result; None for that of x. Raises ValueError if rows is None and the layer has pools for adapters.
        """
        out_dtype, split = out_dtype or x.dtype, num_shards(self.axes[0]) > 1
        own_dtype = x.dtype if split else out_dtype if self.bias is None else jnp.float32
        adapters = None if self.lora is None else _adapters_of(rows)
        x = gather_tokens(x, self.axes[1])
        y = self.weight.matmul(x, out_dtype=own_dtype if adapters is None else jnp.float32)
        if self.lora is not None and adapters is not None:
            # If x is split as the previous product's outputs are, it has the tokens that that product has gathered.
            slots = gather_tokens(gather_tokens(adapters.slots, self.axes[0]), self.axes[1])
            y = self.lora.add(y, x, slots, adapters).astype(own_dtype)
        if split:
            y = reduce_tokens(y, self.axes[0])
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32)
        return y.astype(out_dtype)

    def share(self, other: Linear) -> None:
        """Take the weight and the bias of `other` in place of the own ones. Pools for adapters stay the own."""
        self.weight, self.bias = other.weight, other.bias

    def partial(self, x: jax.Array, adapters: Adapters | None, *, out_dtype: Any = jnp.float32) -> jax.Array:
        """Return this device's part of the product, [R, in] -> [R, out] in `out_dtype`, without the bias and without
        communication between devices. adapters: those of x's rows, which are applied; None to apply none.
        """
        if self.lora is None or adapters is None:
            return self.weight.matmul(x, out_dtype=out_dtype)
        return with_adapters(self.weight.matmul(x, out_dtype=jnp.float32), x, self.lora, adapters).astype(out_dtype)


def with_adapters(y: jax.Array, x: jax.Array, lora: LoraPools | None, adapters: Adapters | None) -> jax.Array:
    """Return y f32[R, out], a product of x [R, in], plus the contribution of the rows' adapters. y itself if `lora` or
    `adapters` is None.
    """
    return y if lora is None or adapters is None else lora.add(y, x, adapters.slots, adapters)


def _adapters_of(rows: Rows | None) -> Adapters | None:
    """Return the adapters of `rows`, None if they have none. Raises ValueError if `rows` is None."""
    if rows is None:
        raise ValueError("a product with pools for adapters needs `rows`, the description of its rows")
    return rows.adapters
