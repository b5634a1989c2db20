"""Product of rows with a matrix: the public operation.

Chooses the implementation.
"""

from __future__ import annotations

from functools import partial

import jax
from jax import lax

from jaxengine.pallas_kernels.registry import kernel, platform_rows


def matmul(x: jax.Array, weight: jax.Array, *, contract: int = 0) -> jax.Array:
    """Multiply x [R, n] by weight over the weight's axis `contract` of size n: return float32 [R, size of the other
    axis].

    The implementation is chosen when the program is compiled, by the platform it is compiled for.

    Raises ValueError if the shapes do not fit together.
    """
    if x.ndim != 2 or weight.ndim != 2 or contract not in (0, 1) or weight.shape[contract] != x.shape[1]:
        text = f"x [R, n] and weight with n along axis {contract} (0 or 1) must agree"
        raise ValueError(f"matmul: {text}, got {x.shape} and {weight.shape}")
    by_platform = {
        platform: partial(kernel("matmul", row), contract=contract) for platform, row in platform_rows().items()
    }
    return lax.platform_dependent(x, weight, **by_platform)
