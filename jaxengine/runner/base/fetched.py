"""Arrays of tokens that forward passes leave and host 0 fetches, of all replicas.

In an engine of several processes every device leaves the tokens of all replicas, as host 0 can fetch only what it has.
"""

from __future__ import annotations

from typing import Any

import jax

from jaxengine.runner.base.extension import StageShape
from jaxengine.sharding.collectives import stack_ranks


def fetched_shape(shape: StageShape, num_tokens: int, width: int, dtype: Any) -> Any:
    """Return the abstract array in which a stage leaves `width` numbers for each of num_tokens tokens of each replica:
    [replicas, num_tokens, width] in an engine of several processes, replicated on every device; otherwise [replicas *
    num_tokens, width], sharded by replica.
    """
    if _is_gathered(shape):
        return shape.shape((shape.num_ranks, num_tokens, width), dtype)
    return shape.rows(num_tokens, dtype, width)


def fetched(shape: StageShape, left: Any) -> Any:
    """Return the arrays that a device of the stage leaves, in the form of `fetched_shape`: gathered over replicas in an
    engine of several processes, else unchanged. left: a pytree of the device's arrays [T, ...]. Traced.
    """
    return jax.tree.map(stack_ranks, left) if _is_gathered(shape) else left


def fetched_tokens(shape: StageShape) -> int:
    """Return the number of tokens for which a device holds arrays of `fetched_shape`: those of the steps in flight and
    of the one that the host reads, of all replicas in an engine of several processes.
    """
    most = max(bucket.num_tokens for bucket in shape.buckets) * (shape.config.max_in_flight + 1)
    return most * shape.num_ranks if _is_gathered(shape) else most


def _is_gathered(shape: StageShape) -> bool:
    """Whether every device leaves the tokens of all replicas: in an engine of several processes."""
    return shape.config.nnodes > 1
