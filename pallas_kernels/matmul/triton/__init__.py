"""Quantised products on Ampere and Ada GPUs, in Pallas-Triton."""
