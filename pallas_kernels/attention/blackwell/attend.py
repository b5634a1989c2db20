"""Paged attention in Mosaic GPU on NVIDIA GPUs of compute capability 10.0 (Blackwell).

Work lists, loads, stores and merges are those of `attention.hopper`, and so are the limits of what the kernels support.
Only the warpgroups that compute are here, in decode.py and prefill.py. There is no kernel for latents.
"""

from jaxengine.pallas_kernels.attention.blackwell.decode import attend
from jaxengine.pallas_kernels.attention.blackwell.prefill import body
from jaxengine.pallas_kernels.attention.hopper.attend import Computing

COMPUTING = Computing(decode=attend, prefill=body, prefill_rows=256, latents=False)
