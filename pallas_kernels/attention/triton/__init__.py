"""Pallas-Triton kernels: paged attention on Ampere, Ada and RTX Blackwell, and sparse attention on all NVIDIA GPUs."""
