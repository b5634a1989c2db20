"""Paged attention on NVIDIA GPUs of compute capability 10.0 and 10.3 (Blackwell): the registry's functions of kind
"blackwell".
"""

from functools import partial

from jaxengine.pallas_kernels.attention.blackwell.attend import COMPUTING
from jaxengine.pallas_kernels.attention.triton import beside

attention_schedule = partial(beside.attention_schedule, computing=COMPUTING)
ragged_paged_attention = partial(beside.ragged_paged_attention, computing=COMPUTING)
