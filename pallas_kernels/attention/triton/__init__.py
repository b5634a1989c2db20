"""Pallas-Triton kernels: paged attention on Ampere and Ada, and sparse attention on these, Hopper and Blackwell."""
