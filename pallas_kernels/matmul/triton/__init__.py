"""Quantised products on Ampere, Ada and RTX Blackwell GPUs, in Pallas-Triton."""
