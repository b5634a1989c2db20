"""Mosaic GPU kernels of matrix products for Blackwell."""
