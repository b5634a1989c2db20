"""Paged attention on Ampere and Ada, in Pallas-Triton kernels."""
