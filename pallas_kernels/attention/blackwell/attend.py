"""Paged attention on NVIDIA GPUs of compute capability 10.0 (Blackwell): the registry's functions of kind "blackwell".

Work lists, loads, stores and merges are those of `attention.hopper`, and so are the limits of what the kernels support.
Only the warpgroups that compute are here, in decode.py and prefill.py. There is no kernel for latents.
"""

from __future__ import annotations

from typing import Any

import jax

from jaxengine.pallas_kernels.attention.blackwell.decode import attend
from jaxengine.pallas_kernels.attention.blackwell.prefill import body
from jaxengine.pallas_kernels.attention.hopper import attend as hopper

COMPUTING = hopper.Computing(decode=attend, prefill=body, prefill_rows=256, latents=False)


def attention_schedule(*arguments: Any, **options: Any) -> Any:
    """Return the kernels' items of the step, or the XLA work list, by `hopper.attention_schedule` for Blackwell's
    kernels.
    """
    return hopper.attention_schedule(*arguments, **options, computing=COMPUTING)


def ragged_paged_attention(*arguments: Any, **options: Any) -> tuple[jax.Array, jax.Array]:
    """Return the attention of queries to the pages of their sequences on a Blackwell GPU: o [T, N, Hv] in q's dtype and
    lse f32 [T, N].

    Arguments, errors and the cases that XLA computes instead are those of `hopper.ragged_paged_attention`.
    """
    return hopper.ragged_paged_attention(*arguments, **options, computing=COMPUTING)
