"""Paged attention on NVIDIA GPUs of compute capability 9.0 (Hopper): the registry's functions of kind "hopper"."""

from functools import partial

from jaxengine.pallas_kernels.attention.hopper.attend import HOPPER
from jaxengine.pallas_kernels.attention.triton import beside

attention_schedule = partial(beside.attention_schedule, computing=HOPPER)
ragged_paged_attention = partial(beside.ragged_paged_attention, computing=HOPPER)
